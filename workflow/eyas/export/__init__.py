"""Checkpoints in the form that servers load."""

from eyas.export.sglang import export_sglang, sglang_layer_ids, vllm_layer_ids

__all__ = ["export_sglang", "sglang_layer_ids", "vllm_layer_ids"]
