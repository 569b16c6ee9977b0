"""EAGLE-3 decoding on the backend torch_native.

Stock torch_native can neither draft nor verify. SGLang's backend for Intel AMX can; on a CPU without AMX its two
attention kernels are torch here (`sgl_kernel.speculation`), and it serves under torch_native's name, because
everything else goes the plain way only there.
"""

from __future__ import annotations

import sys


def register():
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    import torch
    from sgl_kernel.speculation import decode_attention_cpu, extend_attention_cpu
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import get_spec

    torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
    torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
    plain, able = ATTENTION_BACKENDS["torch_native"], ATTENTION_BACKENDS["intel_amx"]

    def create(runner):
        return (able if get_spec().speculative_algorithm else plain)(runner)

    def around(original, self, backend_name, backend_map, *args, **kwargs):
        backend_map = backend_map | {"torch_native": backend_map["intel_amx"]}
        return original(self, backend_name, backend_map, *args, **kwargs)

    ATTENTION_BACKENDS["torch_native"] = create
    HookRegistry.register(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend", around, HookType.AROUND
    )
