"""The drafter: one Llama decoder layer over [embedding of the next token ; fused target states]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.drafter.attention import rotary, rotate, ttt_attention
from eyas.drafter.shape import DrafterShape


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


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

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[N, heads, head_dim], rotated."""
        return rotate(self.q_proj(x).unflatten(-1, (-1, self.shape.head_dim)), cos, sin)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[N, kv_heads, head_dim] each, keys rotated."""
        key = self.k_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        return rotate(key, cos, sin), self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim))


class MLP(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = _linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = _linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = _linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


@dataclass
class TTTPositions:
    """Where the queries of a packed batch are.

    `flat` int64 [S]: their positions among the T packed ones. `in_row`: per row, their
    positions inside it. `spans`: per row, (start, end) among the T.
    """

    flat: Tensor
    in_row: Sequence[Tensor]
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
        return torch.cat([layer.input_layernorm(self.embed_tokens(tokens)), layer.hidden_norm(state)], -1)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(positions, self.shape.head_dim, self.shape.rope_theta)

    def finish(self, state: Tensor, attended: Tensor) -> Tensor:
        """The layer's residual branches: next state g [N, H], not normed, from attention [N, heads, d]."""
        residual = state + self.midlayer.self_attn.o_proj(attended.flatten(-2))
        out: Tensor = residual + self.midlayer.mlp(self.midlayer.post_attention_layernorm(residual))
        return out

    def ttt_states(
        self, aux: Tensor, tokens: Tensor, positions: Tensor, where: TTTPositions, steps: int
    ) -> list[Tensor]:
        """States g¹ … g^steps at the query positions, `steps` tensors [S, H].

        Args:
            aux: [T, 3·Ht], the target's states at every position.
            tokens: int64 [T], the token ids.
            positions: int64 [T], positions inside the rows.
            where: the positions that are to predict anything.

        Position t of step i reads token t+1+i; past the end of its row that token is
        arbitrary, and nothing that counts depends on it. Positions outside `where` cost
        their step-0 key and value only: one layer deep, nothing else of theirs is read.
        """
        attention = self.midlayer.self_attn
        last = len(tokens) - 1
        everywhere = torch.arange(len(tokens), device=tokens.device)
        state = self.fuse(aux)
        inputs = self.inputs(tokens[(everywhere + 1).clamp(max=last)], state)
        key, value = attention.key_value(inputs, *self.rotary(positions))
        keys, values, states = [key], [value], []
        state, inputs = state.index_select(0, where.flat), inputs.index_select(0, where.flat)
        at = positions.index_select(0, where.flat)
        for step in range(steps):
            turn = self.rotary(at + step)
            if step:
                inputs = self.inputs(tokens[(where.flat + 1 + step).clamp(max=last)], state)
                key, value = attention.key_value(inputs, *turn)
                keys.append(key)
                values.append(value)
            query = attention.query(inputs, *turn)
            state = self.finish(state, ttt_attention(query, keys, values, where.in_row, where.spans))
            states.append(state)
        return states

    def logits(self, state: Tensor) -> Tensor:
        """Draft-vocabulary logits [N, D] of un-normed states [N, H]."""
        out: Tensor = self.lm_head(self.norm(state))
        return out
