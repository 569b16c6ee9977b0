"""One training step of speculators 0.9.0's EAGLE-3 on a CPU; protocol: see `benchmarks/train_step.py`.

Its own model and data shift, called as its trainer does (which itself cannot run on a CPU), with sdpa
attention, and its KL loss written as soft cross-entropy: the same gradients in one kernel, faster than its
eager form. lm_head is frozen, which is its default and saves it a third of the head's products.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.data import shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Its KL divergence but for the teacher's own entropy, which has no gradient."""
    width = logits.shape[-1]
    teacher = F.softmax(targets, -1)
    loss = F.cross_entropy(logits.reshape(-1, width), teacher.view(-1, width), reduction="none")
    return loss.view(logits.shape[:-1])


def make_model(work: dict[str, Any]) -> Any:
    """speculators' model at these sizes, random weights."""
    layer = LlamaConfig(
        hidden_size=work["hidden"], intermediate_size=work["intermediate"], num_attention_heads=work["heads"],
        num_key_value_heads=work["kv_heads"], head_dim=work["head_dim"], vocab_size=work["vocab"],
        num_hidden_layers=1, max_position_embeddings=8192, pad_token_id=0,
    )  # fmt: skip
    layer._attn_implementation = "sdpa"
    proposal = GreedyTokenProposalConfig(speculative_tokens=work["ttt_steps"])
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=work["draft_vocab"],
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
        ),
    )
    model = Eagle3DraftModel(config)
    ids = torch.randperm(work["vocab"])[: work["draft_vocab"]].sort().values
    t2d = torch.zeros(work["vocab"], dtype=torch.bool)
    t2d[ids] = True
    model.load_vocab_mappings(t2d, ids - torch.arange(len(ids)))
    with torch.no_grad():
        model.embed_tokens.weight.normal_(std=0.02)
        model.verifier_lm_head.weight.normal_(std=0.1)
        model.lm_head.weight.copy_(model.verifier_lm_head.weight)
    return model


def make_batches(work: dict[str, Any]) -> list[dict[str, Tensor]]:
    """A row a batch, without padding."""
    batches = []
    for row in work["rows"]:
        length = row["length"]
        mask = torch.ones(length, dtype=torch.bool)
        mask[: row["prompt"]] = False
        item = shift_batch(
            {
                "input_ids": torch.randint(work["vocab"], (length,)),
                "hidden_states": torch.randn(length, 3 * work["hidden"]),
                "verifier_last_hidden_states": torch.randn(length, work["hidden"]),
                "loss_mask": mask,
                "lengths": torch.tensor([length]),
                "position_ids": torch.arange(length),
            }
        )
        batch = {name: values.unsqueeze(0) for name, values in item.items() if name != "lengths"}
        batch["document_ids"] = torch.zeros(1, length - 1, dtype=torch.long)
        batches.append(batch)
    return batches


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        work = json.load(file)
    torch.set_num_threads(work["threads"])
    torch.manual_seed(work["seed"])
    model = make_model(work)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0)
    batches = make_batches(work)
    ready = {"ready": True, "version": version("speculators"), "variant": "sdpa, soft cross-entropy, lm_head frozen"}
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        if line.strip() != "run":
            break
        cpu, wall, losses = time.process_time(), time.perf_counter(), []
        for batch in batches:
            _, loss, _ = model(
                **batch, ttt_steps=work["ttt_steps"], ttt_step_loss_decay=work["loss_decay"],
                loss_config={"kl_div": (soft_cross_entropy, 1.0)},
            )  # fmt: skip
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        result = {
            "cpu_s": time.process_time() - cpu,
            "wall_s": time.perf_counter() - wall,
            "tokens": sum(row["length"] for row in work["rows"]),
            "supervised": sum(row["length"] - row["prompt"] for row in work["rows"]),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "loss": sum(losses) / len(losses),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
