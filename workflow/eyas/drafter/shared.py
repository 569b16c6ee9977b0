"""Gradients of what every TTT step uses, summed in place; and the layer's element-wise parts.

Weights, step-0 keys and values are used once a step. Autograd would make one gradient tensor a
use and add them up: two passes over every weight and every step. Here each use adds its part to
one buffer as the backward pass reaches it (`addmm_`), and the buffer becomes the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Elementwise(Generic[Arguments, Result]):
    """A function of tensors without matrix products, which :func:`compile_elementwise` may compile."""

    all: ClassVar[list[Elementwise]] = []

    def __init__(self, function: Callable[Arguments, Result]) -> None:
        self.function = function
        Elementwise.all.append(self)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return self.function(*args, **kwargs)


def compile_elementwise() -> None:
    """Compile these parts with torch.compile, in this process (needs a C++ compiler on a CPU)."""
    for part in Elementwise.all:
        part.function = torch.compile(part.function, dynamic=True)


class Shared:
    """A tensor with many uses; `value` is what they read, `sum` the buffer they add gradients to."""

    def __init__(self, tensor: Tensor) -> None:
        self._sum: Tensor | None = None
        self.wanted = tensor.requires_grad and torch.is_grad_enabled()
        self.value: Tensor = _Collect.apply(tensor, self) if self.wanted else tensor.detach()

    @property
    def sum(self) -> Tensor:
        if self._sum is None:
            self._sum = torch.zeros_like(self.value, memory_format=torch.contiguous_format)
        return self._sum

    def add_product(self, left: Tensor, right: Tensor, columns: slice) -> None:
        """sum[:, columns] += left · right."""
        if self._sum is None and columns == slice(None):
            self._sum = left @ right
        else:
            self.sum[:, columns].addmm_(left, right)

    def take(self) -> Tensor | None:
        found, self._sum = self._sum, None
        return found


class _Collect(torch.autograd.Function):
    """The identity. Its backward runs when all uses have run theirs, and hands on what they summed."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shared: Shared) -> Tensor:
        ctx.shared = shared
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        found = ctx.shared.take()
        if found is None or grad is None:
            return grad if found is None else found, None
        return found + grad, None


class _Product(torch.autograd.Function):
    """[base +] x · weight[:, columns]ᵀ."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, base: Tensor | None, shared: Shared, columns: slice) -> Tensor:
        ctx.shared, ctx.columns = shared, columns
        ctx.save_for_backward(x, value)
        weight = value[:, columns].T
        return x @ weight if base is None else torch.addmm(base, x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, value = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.shared.add_product(grad.T, x, ctx.columns)
        grad_x = grad @ value[:, ctx.columns] if ctx.needs_input_grad[0] else None
        return grad_x, None, grad if ctx.needs_input_grad[2] else None, None, None


@Elementwise
def _gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    return F.silu(gate).mul_(up)


@Elementwise
def _gate_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_up = grad * silu
    # d silu = sigmoid · (1 + gate · (1 − sigmoid)) = sigmoid + silu · (1 − sigmoid)
    slope = silu.addcmul_(silu, sigmoid, value=-1).add_(sigmoid)
    return slope.mul_(grad).mul_(up), grad_up


class _GatedProduct(torch.autograd.Function):
    """(silu(gate) · up) · weightᵀ; the gated product is made again in the backward pass, not kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, value: Tensor, shared: Shared) -> Tensor:
        ctx.shared = shared
        ctx.save_for_backward(gate, up, value)
        return _gate(gate, up) @ value.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up, value = ctx.saved_tensors
        if ctx.needs_input_grad[2]:
            ctx.shared.add_product(grad.T, _gate(gate, up), slice(None))
        grad_gate, grad_up = _gate_backward(grad @ value, gate, up)
        return grad_gate, grad_up, None, None


class SharedWeights:
    """The linear layers of one forward pass, with their weights' gradients summed over all uses.

    `dtype` is the precision of the products (bf16 on GPUs; masters and gradients stay float32).
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._weights: dict[nn.Linear, Shared] = {}

    def _of(self, layer: nn.Linear) -> Shared:
        if layer not in self._weights:
            self._weights[layer] = Shared(layer.weight.to(self.dtype))
        return self._weights[layer]

    def __call__(self, layer: nn.Linear, x: Tensor, columns: slice = slice(None), base: Tensor | None = None) -> Tensor:
        """[base +] x · weight[:, columns]ᵀ, [N, out]."""
        shared = self._of(layer)
        out: Tensor = _Product.apply(x.to(self.dtype), shared.value, base, shared, columns)
        return out

    def gated(self, layer: nn.Linear, gate: Tensor, up: Tensor) -> Tensor:
        """(silu(gate) · up) · weightᵀ, [N, out]."""
        shared = self._of(layer)
        out: Tensor = _GatedProduct.apply(gate, up, shared.value, shared)
        return out


@Elementwise
def normalise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) · weight of [N, H], and 1 / rms(x) [N]; in float32 at least, result in the dtype of x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (wide * wide).mean(-1).add_(eps).rsqrt_()
    return (wide * scale[:, None]).mul_(weight).to(x.dtype), scale


@Elementwise
def normalise_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    grad = grad.to(scale.dtype)
    normed = x * scale[:, None]
    inner = grad * weight
    product = grad * normed
    mean = (product @ weight.to(product.dtype)).div_(x.shape[-1])
    grad_x = inner.addcmul_(normed, mean[:, None], value=-1).mul_(scale[:, None])
    return grad_x.to(x.dtype), product.sum(0)


class _RMSNorm(torch.autograd.Function):
    """x / rms(x) · weight, keeping x and 1 / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = normalise(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_x, grad_weight = normalise_backward(grad, *ctx.saved_tensors)
        return grad_x if ctx.needs_input_grad[0] else None, grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension of [N, H]."""
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out
