"""The processes of a training job: one alone, or several started by torchrun. Parallelism lives here only."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eyas.errors import EyasError

Parallel = Literal["ddp", "fsdp2"]
Result = TypeVar("Result")

# A process that waits longer than this for the others gives up: long enough for one of them to
# write a checkpoint, or to take a terabyte's checksums.
_PATIENCE = timedelta(hours=6)


@dataclass(frozen=True)
class Processes:
    """This process among the `count` of its job."""

    rank: int
    count: int
    device: torch.device

    @classmethod
    def alone(cls, device: torch.device) -> Processes:
        return cls(0, 1, device)

    @classmethod
    def join(cls, gpu: bool) -> Processes:
        """Meet the other processes that torchrun started: over NCCL on GPUs, over gloo on CPUs."""
        if gpu:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # torchrun's way to tell
            torch.cuda.set_device(device)
        else:
            device = torch.device("cpu")
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=_PATIENCE)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    def leave(self) -> None:
        if self.count > 1:
            dist.destroy_process_group()

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a small tensor over all processes (on the CPU)."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """What every process gave, in the order of ranks."""
        found: list[Any] = [value]
        if self.count > 1:
            found = [None] * self.count
            dist.all_gather_object(found, value)
        return found

    def first_then_all(self, work: Callable[[], Result]) -> Result:
        """Do `work` in every process, but first in one: a fault that all would meet is reported once.

        Where it fails in the first, the others exit with status 1.
        """
        if self.count == 1:
            return work()
        result: Result | None = None
        failure: BaseException | None = None
        if self.rank == 0:
            try:
                result = work()
            except EyasError as exc:
                failure = exc
        flag = torch.tensor([failure is not None])
        dist.broadcast(flag, 0)
        if failure is not None:
            raise failure
        if bool(flag):
            raise SystemExit(1)
        return work() if self.rank else result  # type: ignore[return-value]

    def distribute(self, module: nn.Module, parallel: Parallel) -> nn.Module:
        """The module whose forward and backward passes involve all processes."""
        if self.count == 1:
            return module
        if parallel == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # its successor would copy the buffers at each start
                return DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True)
        from torch.distributed.fsdp import fully_shard

        frozen = {p for p in module.parameters() if not p.requires_grad}
        mesh = dist.device_mesh.init_device_mesh(self.device.type, (self.count,))
        # backward follows at once: gathering the weights a second time would only cost
        fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=frozen)
        return module


@contextlib.contextmanager
def gradients_meet(module: nn.Module, now: bool) -> Iterator[None]:
    """Whether the backward pass inside sums the processes' gradients (the last of a step) or adds up its own."""
    any_module: Any = module
    if hasattr(module, "set_requires_gradient_sync"):  # FSDP2
        any_module.set_requires_gradient_sync(now)
        yield
    elif hasattr(module, "no_sync") and not now:  # DDP
        with any_module.no_sync():
            yield
    else:
        yield


def whole(tensor: Tensor) -> Tensor:
    """A tensor on the CPU, gathered from all processes where each holds a part (all must call this)."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu()


def like(values: Tensor, parameter: Tensor) -> Tensor:
    """`values`, which every process has whole, placed as `parameter` is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(parameter, DTensor):
        return distribute_tensor(values.to(parameter.device), parameter.device_mesh, parameter.placements)
    return values.to(parameter.device)
