"""Causal grouped query attention in bf16 for CPUs, as a few batched matrix products.

torch's own kernel for CPUs takes the products of attention one small tile at a time and reaches a sixth of the speed of
a batched product: at 512 tokens attention then takes a quarter of a step whose arithmetic is a fifteenth. Here:

1. Queries are cut into blocks. A block sees the keys up to its own end: what is above the diagonal is left out.
2. The query heads of a group stand below each other and share one product with their key head: nothing is repeated,
   and the sum over the group in the gradients of keys and values is the product's own.
3. Softmax and sums are fp32. Backward computes the probabilities again: kept, they would be a fifth of all activations.

`scaled_dot_product_attention` is the reference, and what runs everywhere else.

B batch, T time, H n_heads, K n_kv_heads, G = H / K heads of a group, E head_dim, R rows of a block, S keys it sees
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 128
"""Queries of a block: fewer would make small products, more would compute more above the diagonal."""


class CausalAttentionFunction(torch.autograd.Function):
    """q (B, H, T, E), k and v (B, K, T, E) -> (B, T, H, E)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, T, E = q.shape
        K = k.shape[1]
        keys, values = k.reshape(B * K, T, E), v.reshape(B * K, T, E)
        y = q.new_empty(B, T, H, E)
        for begin, end in _blocks(T):
            p = _probabilities(_rows(q, K, begin, end), keys[:, :end], begin, end)
            _rows_of(y, K, begin, end).copy_(_by_head(p @ values[:, :end], B, K, end - begin))
        ctx.save_for_backward(q, k, v, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y_grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, y = ctx.saved_tensors
        B, H, T, E = q.shape
        K = k.shape[1]
        keys, values = k.reshape(B * K, T, E), v.reshape(B * K, T, E)
        # What softmax takes from the gradient of every score of a row: the row's gradient along its output.
        taken = (y_grad.float() * y).sum(-1).transpose(1, 2)  # (B, H, T)
        q_grad = q.new_empty(B, T, H, E)
        # Summed over the blocks in fp32: in bf16 it would lose what the later ones add.
        k_grad, v_grad = (torch.zeros(B * K, T, E, dtype=torch.float32) for _ in range(2))
        for begin, end in _blocks(T):
            rows, row_grads = _rows(q, K, begin, end), _rows(y_grad.transpose(1, 2), K, begin, end)
            p = _probabilities(rows, keys[:, :end], begin, end)
            v_grad[:, :end] += p.transpose(1, 2) @ row_grads
            scores_grad = (row_grads @ values[:, :end].transpose(1, 2)).float()
            scores_grad.sub_(taken[:, :, begin:end].reshape(B * K, -1, 1)).mul_(p).mul_(E**-0.5)
            narrow = scores_grad.to(q.dtype)
            _rows_of(q_grad, K, begin, end).copy_(_by_head(narrow @ keys[:, :end], B, K, end - begin))
            k_grad[:, :end] += narrow.transpose(1, 2) @ rows
        return q_grad.transpose(1, 2), k_grad.view(B, K, T, E).to(k.dtype), v_grad.view(B, K, T, E).to(v.dtype)


def _blocks(n_tokens: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + BLOCK, n_tokens)) for begin in range(0, n_tokens, BLOCK)]


def _probabilities(rows: Tensor, keys: Tensor, begin: int, end: int) -> Tensor:
    """Returns the probabilities (B K, G R, S) of a block's rows over the keys (B K, S, E) up to each query's own."""
    R = end - begin
    scores = (rows @ keys.transpose(1, 2)).float().mul_(rows.shape[-1] ** -0.5)
    later = torch.full((R, R), -torch.inf).triu_(1)
    torch.unflatten(scores, 1, (-1, R))[..., begin:].add_(later)
    return torch.softmax(scores, dim=-1).to(rows.dtype)


def _rows(q: Tensor, n_kv_heads: int, begin: int, end: int) -> Tensor:
    """Returns a block of q (B, H, T, E) with the heads of a group below each other: (B K, G R, E)."""
    grouped = torch.unflatten(q[:, :, begin:end], 1, (n_kv_heads, -1))  # (B, K, G, R, E)
    return grouped.reshape(q.shape[0] * n_kv_heads, -1, q.shape[-1])


def _rows_of(y: Tensor, n_kv_heads: int, begin: int, end: int) -> Tensor:
    """Returns the view (B, K, G, R, E) of a block of y (B, T, H, E)."""
    return torch.unflatten(y[:, begin:end], 2, (n_kv_heads, -1)).permute(0, 2, 3, 1, 4)


def _by_head(rows: Tensor, batch_size: int, n_kv_heads: int, n_rows: int) -> Tensor:
    """Undoes `_rows`: (B K, G R, E) -> (B, K, G, R, E)."""
    return rows.view(batch_size, n_kv_heads, -1, n_rows, rows.shape[-1])
