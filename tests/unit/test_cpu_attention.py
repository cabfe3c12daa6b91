"""Blocked attention against scaled_dot_product_attention."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import model.cpu_attention
from model.cpu_attention import CausalAttentionFunction

B, E = 2, 16


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.cpu_attention, "BLOCK", 8)


def inputs(n_heads: int, n_kv_heads: int, n_tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v as the projections give them: heads beside each other, transposed."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(B, n_tokens, heads, E, generator=generator).to(dtype).transpose(1, 2).requires_grad_()
        for heads in (n_heads, n_kv_heads, n_kv_heads)
    ]


def gradients(y: Tensor, of: list[Tensor]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return torch.autograd.grad(y, of, torch.randn(y.shape, generator=generator).to(y.dtype))


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


# One block, whole blocks, a last one that is short, and a single token.
@pytest.mark.parametrize("n_tokens", [8, 24, 29, 1])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(6, 2), (4, 4), (4, 1)])
def test_output_and_gradients_equal_the_reference(n_tokens: int, n_heads: int, n_kv_heads: int) -> None:
    mine, theirs = (inputs(n_heads, n_kv_heads, n_tokens, torch.float32) for _ in range(2))
    y, wanted = CausalAttentionFunction.apply(*mine), reference(*theirs)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(gradients(y, mine), gradients(wanted, theirs))


def test_bf16_is_as_close_to_float64_as_the_reference_is() -> None:
    mine, theirs, exact = (inputs(6, 2, 29, dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float64))
    with torch.no_grad():
        for wide, narrow in zip(exact, mine, strict=True):
            wide.copy_(narrow)
    results = [(CausalAttentionFunction.apply(*mine), mine), (reference(*theirs), theirs), (reference(*exact), exact)]
    (y, found), (other, their), (wanted, right) = ((y, gradients(y, of)) for y, of in results)
    for mine_, theirs_, right_ in zip((y, *found), (other, *their), (wanted, *right), strict=True):
        # Twice: both round to bf16 in the same places, but not the same sums.
        assert (mine_.double() - right_).norm() <= 2 * (theirs_.double() - right_).norm()


def test_later_tokens_do_not_change_earlier_outputs() -> None:
    q, k, v = inputs(4, 2, 24, torch.bfloat16)
    y = CausalAttentionFunction.apply(q, k, v)
    with torch.no_grad():
        for tensor in (q, k, v):
            tensor[:, :, 20:] = 9.0
    assert torch.equal(CausalAttentionFunction.apply(q, k, v)[:, :20], y[:, :20])
