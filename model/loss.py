"""Cross-entropy through the tied head in pieces, so that the logits of a whole batch never stand in memory.

1. Split the N = B * T rows of the last hidden state into pieces of C rows.
2. For each piece: logits = hidden @ weight.T, in fp32 from there on; then maximum and exponentials per row.
3. While the piece's logits are at hand, turn them into their own gradient (softmax - onehot), and that into
   the gradients of the piece's hidden rows and of the weight. Backward then only scales what forward found:
   the head costs three matrix products in all, as without pieces, not the four of recomputation.

N rows, C rows of a piece, D d_model, V vocab_size
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""Target of a position that does not count."""


class LossSums(NamedTuple):
    """Sums over the counted targets of a batch; the caller divides by the tokens of the global batch."""

    nats: Tensor
    """fp32 scalar: sum of the negative log-likelihoods; differentiable."""
    correct: Tensor
    """int64 scalar: targets that are the argmax of their logits."""
    tokens: Tensor
    """int64 scalar: counted targets."""


def cross_entropy_sums(hidden: Tensor, weight: Tensor, targets: Tensor) -> LossSums:
    """Returns the loss sums of `targets` under the logits `hidden @ weight.T`.

    Under autocast the products run in the autocast dtype; exponential, logarithm and all sums are fp32.
    No counted target gives nats 0 and zero gradients.

    Args:
        hidden: (B, T, D) last hidden state.
        weight: (V, D) weight of the head.
        targets: (B, T) int64 in [0, V), or -100 for a position that does not count.
    """
    device_type = hidden.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype
    flat_hidden = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    flat_targets = targets.reshape(-1)
    with torch.autocast(device_type, enabled=False):
        nats, correct = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            flat_hidden, weight, flat_targets
        )
    return LossSums(nats, correct, (flat_targets != IGNORED).sum())


def rows_per_piece(vocab_size: int, device_type: str) -> int:
    """Returns the rows of a piece: few enough for a CPU's cache, enough to fill a GPU (256 MiB in fp32)."""
    max_logits = 1 << 20 if device_type == "cpu" else 1 << 26
    return max(256, max_logits // vocab_size)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """hidden (N, D), weight (V, D), targets (N,) -> nats, correct; forward finds the gradients too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        head = weight.to(hidden.dtype)
        rows = rows_per_piece(weight.shape[0], weight.device.type)
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        # The sum over the pieces is kept in fp32: in bf16 it would lose what the later pieces add.
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
        hidden_grads: list[Tensor] = []
        nats = torch.zeros((), dtype=torch.float32, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        for piece, piece_targets in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
            logits = (piece @ head.T).float()  # (C, V)
            counted = (piece_targets != IGNORED).unsqueeze(1)  # (C, 1)
            index = piece_targets.unsqueeze(1).where(counted, 0)
            target_logits = logits.gather(1, index)
            top, argmax = logits.max(1, keepdim=True)  # the first on a tie
            # In place from here on: on a CPU a new piece of memory costs more than the exponentials in it.
            exponentials = logits.sub_(top).exp_()
            norm = exponentials.sum(1, keepdim=True)
            nats += (norm.log() + top - target_logits).where(counted, 0.0).sum()
            correct += ((argmax == index) & counted).sum()
            if weight_grad is not None:
                grad = exponentials.div_(norm)  # softmax, minus onehot: d nats / d logits
                grad.scatter_add_(1, index, grad.new_full((1, 1), -1.0).expand_as(index))
                grad = grad.masked_fill_(~counted, 0.0).to(hidden.dtype)
                hidden_grads.append(grad @ head)
                weight_grad += grad.T @ piece
        if weight_grad is not None:
            ctx.save_for_backward(torch.cat(hidden_grads), weight_grad.to(weight.dtype))
        ctx.mark_non_differentiable(correct)
        return nats, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nats_grad: Tensor, _correct_grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * nats_grad, weight_grad * nats_grad, None
