"""Written-out gradients against finite differences and against autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.elementwise import RMSNormFunction, RotateFunction, SwiGLUFunction

EPS = 1e-5


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def angles() -> tuple[Tensor, Tensor]:
    at = normal(5, 1, 3, seed=2)  # (T, 1, E/2)
    return at.cos(), at.sin()


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return RMSNormFunction.apply(x, weight, EPS, x.dtype)


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rotate"])
def test_gradient_agrees_with_finite_differences(name: str) -> None:
    x = normal(2, 5, 4, 6).requires_grad_()
    if name == "rms_norm":
        assert torch.autograd.gradcheck(rms_norm, (x, normal(6, seed=1).requires_grad_()))
    elif name == "swiglu":
        assert torch.autograd.gradcheck(SwiGLUFunction.apply, (x,))
    else:
        assert torch.autograd.gradcheck(lambda x: RotateFunction.apply(x, *angles()), (x,))


def test_rms_norm_equals_torchs() -> None:
    x, weight = normal(7, 16, dtype=torch.float32) * 5, normal(16, dtype=torch.float32, seed=1)
    # fp32 rounding, a few operations deep.
    torch.testing.assert_close(rms_norm(x, weight), F.rms_norm(x, (16,), weight, EPS), rtol=1e-6, atol=1e-6)


def test_rotation_keeps_lengths_and_back_is_its_inverse() -> None:
    x = normal(2, 5, 4, 6)
    cos, sin = angles()
    turned = RotateFunction.apply(x, cos, sin)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(RotateFunction.apply(turned, cos, -sin), x)


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rotate"])
def test_bf16_gradient_follows_float64(name: str) -> None:
    """In the dtypes of a run: activations bf16, norm weights and tables fp32."""
    function = {
        "rms_norm": lambda x: rms_norm(x, torch.ones(6)),
        "swiglu": SwiGLUFunction.apply,
        "rotate": lambda x: RotateFunction.apply(x, *angles()),
    }[name]
    narrow = normal(2, 5, 4, 6, dtype=torch.bfloat16).requires_grad_()
    wide = narrow.detach().double().requires_grad_()
    for x in (narrow, wide):
        y = function(x)
        y.backward(torch.ones_like(y))
    assert narrow.grad is not None
    assert wide.grad is not None
    assert narrow.grad.dtype == torch.bfloat16
    # 2 % of the gradient's size: bf16 keeps 0.4 %, through a handful of operations.
    assert (narrow.grad.double() - wide.grad).norm() < 0.02 * wide.grad.norm()
