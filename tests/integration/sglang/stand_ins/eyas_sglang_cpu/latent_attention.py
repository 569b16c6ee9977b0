"""Latent attention on the backend torch_native.

SGLang's rule for backends that it does not list gives a prompt's first chunk to the plain form of latent attention,
and torch_native then reads the latent cache as if it held keys: an error, or wrong states where the widths agree.
"""

from __future__ import annotations

import sys


def register():
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        _dispatch_mla_subtype,
    )

    AttentionBackendRegistry.register("torch_native", _dispatch_mla_subtype)
