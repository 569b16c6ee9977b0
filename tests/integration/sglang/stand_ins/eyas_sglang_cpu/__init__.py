"""Defines the schemas of torchvision's kernels just before torchvision is imported: PyPI's build is for CUDA,
its kernels do not load beside a CPU build of torch, and its Python code wants their names."""

from __future__ import annotations

import sys


class _BeforeTorchvision:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for kernel in ("nms", "qnms"):
                library.define(f"{kernel}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules[__name__]._kept = library  # schemas go with it
        return None


def install():
    """Called by a .pth file in every process, spawned ones too."""
    sys.meta_path.insert(0, _BeforeTorchvision())
