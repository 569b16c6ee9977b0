"""Checkpoints in the form that servers load, with their model cards."""

from eyas.export.checkpoint import check_tensors, export_drafter
from eyas.export.describe import describe_exports
from eyas.export.servers import server_config, sglang_layer_ids, vllm_layer_ids
from eyas.plan.export import SERVERS

__all__ = [
    "SERVERS",
    "check_tensors",
    "describe_exports",
    "export_drafter",
    "server_config",
    "sglang_layer_ids",
    "vllm_layer_ids",
]
