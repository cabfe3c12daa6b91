"""The elementwise parts of a layer with written-out gradients: few passes over memory, and nothing kept but inputs.

Left to autograd each of these is a chain of small operations, each of which reads, writes and keeps a tensor of the
size of the activations. Without a compiler that costs as much time as the matrix products of a small model, and more
memory. Arithmetic is in fp32 (float64 for float64 inputs) whatever the dtype of the activations.

B batch, T time, D d_model, F d_ff, H n_heads, K n_kv_heads, E head_dim
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def _wide(x: Tensor) -> Tensor:
    """Returns x in fp32, or as it is if it is float64."""
    return x if x.dtype == torch.float64 else x.float()


class RMSNormFunction(torch.autograd.Function):
    """x (…, D), weight (D,) -> x / rms(x) * weight in `dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = _wide(x)
        inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # (…, 1)
        ctx.save_for_backward(x, weight, inverse_rms)
        return (wide * inverse_rms).mul_(weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        normed = _wide(x) * inverse_rms
        y_grad = _wide(y_grad)
        product = y_grad * normed
        weight_grad = product.flatten(0, -2).sum(0)
        mean = product.mul_(weight).mean(-1, keepdim=True)
        # d/dx of x / rms(x): the part of the gradient along x is what the norm takes away.
        x_grad = (y_grad * weight).sub_(normed.mul_(mean)).mul_(inverse_rms)
        return x_grad.to(x.dtype), weight_grad.to(weight.dtype), None, None


class SwiGLUFunction(torch.autograd.Function):
    """gate and up side by side (…, 2F) -> silu(gate) * up (…, F)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gate_grad = torch.ops.aten.silu_backward(y_grad * up, gate)
        return torch.cat((gate_grad, F.silu(gate).mul_(y_grad)), dim=-1)


class RotateFunction(torch.autograd.Function):
    """x (B, T, heads, E), cos and sin (…, T, 1, E/2) -> x turned by its positions' angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(y_grad, cos, -sin), None, None  # a rotation's transpose is the rotation back


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves are paired as in Hugging Face: dimension i with i + E/2."""
    first, second = _wide(x).chunk(2, dim=-1)  # (B, T, heads, E/2) each
    turned = (first * cos).sub_(second * sin), (second * cos).add_(first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)
