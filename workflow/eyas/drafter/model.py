"""The drafter: one Llama decoder layer over [embedding of the next token ; fused target states]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eyas.drafter import flash
from eyas.drafter.attention import attend, find_blocks, rotary, rotate
from eyas.drafter.shape import DrafterShape
from eyas.drafter.shared import Shared, SharedWeights, rms_norm


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """Projections of the layer; queries, keys and values see [embedding ; state], twice the width."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = _linear(2 * shape.hidden_size, q)
        self.k_proj = _linear(2 * shape.hidden_size, kv)
        self.v_proj = _linear(2 * shape.hidden_size, kv)
        self.o_proj = _linear(q, shape.hidden_size)

    def heads(self, x: Tensor) -> Tensor:
        """[N, heads * head_dim] as [N, heads, head_dim]."""
        return x.unflatten(-1, (-1, self.shape.head_dim))

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[N, heads, head_dim], rotated."""
        return rotate(self.heads(self.q_proj(x)), cos, sin)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[N, kv_heads, head_dim] each, keys rotated."""
        return rotate(self.heads(self.k_proj(x)), cos, sin), self.heads(self.v_proj(x))


class MLP(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = _linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = _linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = _linear(shape.intermediate_size, shape.hidden_size)


class MidLayer(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


@dataclass
class StepPositions:
    """The positions whose predictions of one TTT step, or of a later one, count.

    `flat` int64 [S]: their places among the T packed positions. `kept` int64 [S]: their places among
    those of the step before, or None where they are the same. `in_row`: per row, their positions
    inside it.
    """

    flat: Tensor
    kept: Tensor | None
    in_row: Sequence[Tensor]


@dataclass
class TTTPositions:
    """Where the queries of a packed batch are: `steps`, and `spans`, per row (start, end) among the T."""

    steps: Sequence[StepPositions]
    spans: Sequence[tuple[int, int]]


class Drafter(nn.Module):
    """The trainable drafter. Parameter names are those of the checkpoint (see `tensor_shapes`)."""

    def __init__(self, shape: DrafterShape, d2t: Tensor, t2d: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        # The target's own embedding is shared by the server, so it must not move.
        self.embed_tokens.weight.requires_grad_(shape.hidden_size != shape.target_hidden_size)
        self.fc = _linear(3 * shape.target_hidden_size, shape.hidden_size)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = _linear(shape.hidden_size, shape.draft_vocab_size)
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)

    @property
    def target_ids(self) -> Tensor:
        """Target id of each draft id: int64 [D]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def draft_ids(self) -> Tensor:
        """Draft id of each target id, -1 where there is none: int64 [V]."""
        ids = torch.full_like(self.t2d, -1, dtype=torch.long)
        ids[self.target_ids] = torch.arange(len(self.d2t), device=self.d2t.device)
        return ids

    def fuse(self, aux: Tensor) -> Tensor:
        """Step-0 states g⁰ [N, H] from the target's three layers [N, 3·Ht]."""
        out: Tensor = self.fc(aux)
        return out

    def inputs(self, tokens: Tensor, state: Tensor) -> Tensor:
        """[N, 2H]: normed embedding of the token that follows, normed state."""
        layer = self.midlayer
        return torch.cat(
            [layer.input_layernorm(self.embed_tokens(tokens).to(state.dtype)), layer.hidden_norm(state)], -1
        )

    def residual(self, state: Tensor, normed: Tensor) -> Tensor:
        """What attention's output is added to, of states [N, H] and the same states normed."""
        return normed if self.shape.norm_before_residual else state

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(positions, self.shape.head_dim, self.shape.rope_theta)

    def finish(self, state: Tensor, attended: Tensor, linear: SharedWeights | None = None) -> Tensor:
        """The layer's residual branches: next state g [N, H], not normed, from attention [N, heads, d].

        `state`: what :meth:`residual` gives.
        """
        linear = linear or SharedWeights(self.norm.weight.dtype)
        mlp = self.midlayer.mlp
        residual = state + linear(self.midlayer.self_attn.o_proj, attended.flatten(-2))
        normed = self.midlayer.post_attention_layernorm(residual)
        return residual + linear.gated(mlp.down_proj, linear(mlp.gate_proj, normed), linear(mlp.up_proj, normed))

    def ttt_states(
        self, aux: Tensor, tokens: Tensor, positions: Tensor, where: TTTPositions, linear: SharedWeights | None = None
    ) -> list[Tensor]:
        """States g¹, g², … at the positions of each step of `where`: tensors [Sᵢ, H].

        Args:
            aux: [T, 3·Ht], the target's states at every position.
            tokens: int64 [T], the token ids.
            positions: int64 [T], positions inside the rows.
            where: the positions that are to predict anything, by step.

        Position t of step i reads token t+1+i; past the end of its row that token is
        arbitrary, and nothing that counts depends on it. Positions outside `where` cost
        their step-0 key and value only: one layer deep, nothing else of theirs is read.
        The embedding's half of each projection is taken once per token, not once per step.
        """
        linear = linear or SharedWeights(self.norm.weight.dtype)
        layer, attention = self.midlayer, self.midlayer.self_attn
        width, last = self.shape.hidden_size, len(tokens) - 1
        of_token, of_state = slice(0, width), slice(width, None)
        # Row r: what token r+1 adds, the one that position r reads at step 0 and position r-i at step i.
        after = self.embed_tokens(torch.cat([tokens[1:], tokens[-1:]])).to(self.norm.weight.dtype)
        after = layer.input_layernorm(after)
        token_key, token_value = (linear(proj, after, of_token) for proj in (attention.k_proj, attention.v_proj))
        read = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for i, step in enumerate(where.steps):
            read[(step.flat + i).clamp(max=last)] = True
        token_query = linear(attention.q_proj, after[read], of_token)
        query_row = read.cumsum(0) - 1
        turn = self.rotary(torch.arange(int(positions.max()) + len(where.steps), device=tokens.device))
        cos, sin = (table.to(linear.dtype) for table in turn)

        state = linear(self.fc, aux).to(self.norm.weight.dtype)
        normed = layer.hidden_norm(state)
        key = linear(attention.k_proj, normed, of_state, token_key)
        value = linear(attention.v_proj, normed, of_state, token_value)
        keys = [Shared(rotate(attention.heads(key), cos[positions], sin[positions]))]
        values = [Shared(attention.heads(value))]
        states, blocks = [], []
        for i, step in enumerate(where.steps):
            if i == 0:
                state, normed = state.index_select(0, step.flat), normed.index_select(0, step.flat)
            elif step.kept is not None:
                state = state.index_select(0, step.kept)
                for shared in (keys, values):
                    shared[1:] = [Shared(one.value.index_select(0, step.kept)) for one in shared[1:]]
            if i == 0 or step.kept is not None:
                blocks = find_blocks(step.in_row, where.spans, flash.block_size(tokens.device))
            at = positions.index_select(0, step.flat) + i
            row = (step.flat + i).clamp(max=last)
            if i:
                normed = layer.hidden_norm(state)
                key = linear(attention.k_proj, normed, of_state, token_key.index_select(0, row))
                value = linear(attention.v_proj, normed, of_state, token_value.index_select(0, row))
                keys.append(Shared(rotate(attention.heads(key), cos[at], sin[at])))
                values.append(Shared(attention.heads(value)))
            query = linear(attention.q_proj, normed, of_state, token_query.index_select(0, query_row[row]))
            query = rotate(attention.heads(query), cos[at], sin[at])
            state = self.finish(self.residual(state, normed), attend(query, keys, values, blocks), linear)
            states.append(state)
        return states

    def logits(self, state: Tensor) -> Tensor:
        """Draft-vocabulary logits [N, D] of un-normed states [N, H]."""
        out: Tensor = self.lm_head(self.norm(state))
        return out
