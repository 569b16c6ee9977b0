"""Convert an EAGLE-3 drafter with speculators, load it as its model, and run it once. Not run by pytest itself.

speculators_worker.py EXPORT TARGET INPUTS CONVERTED OUTPUTS: INPUTS holds `aux` [T, 3·H] and `tokens` int64 [T];
OUTPUTS gets the loaded model's tensors, and `logits` [T - 1, D] of its first step.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

export, target, inputs, converted, outputs = map(Path, sys.argv[1:])
config = json.loads((export / "config.json").read_text())
Eagle3Converter().convert(
    export, converted, str(target), validate=False,
    eagle_aux_hidden_state_layer_ids=config["eagle_aux_hidden_state_layer_ids"],
    norm_before_residual=config["norm_before_residual"],
)  # fmt: skip
speculator = Eagle3SpeculatorConfig.from_pretrained(converted)
speculator.transformer_layer_config._attn_implementation = "sdpa"  # its default needs a compiler
model = Eagle3DraftModel.from_pretrained(converted, config=speculator).float().eval()

given = load_file(inputs)
tokens = given["tokens"][1:][None]
found = {}
model.lm_head.register_forward_hook(lambda module, arguments, result: found.setdefault("logits", result[0]))
with torch.no_grad():
    # at position t it reads the state of t and the token of t + 1
    model(hidden_states=given["aux"][:-1][None], input_ids=tokens, document_ids=torch.zeros_like(tokens), ttt_steps=1)
found |= {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("verifier")}
save_file({name: tensor.contiguous() for name, tensor in found.items()}, outputs)
