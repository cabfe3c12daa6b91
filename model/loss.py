"""Cross-entropy through the tied head in pieces, so that the logits of a whole batch never stand in memory in fp32.

1. Split the N = B * T rows of the last hidden state into equal pieces of C rows.
2. For each piece: logits = hidden @ weight.T in the dtype of the products.
3. A few rows at a time, few enough for a CPU's cache: in fp32, maximum, exponentials and their sum; then, while they
   are at hand, turn the logits into their own gradient (softmax - onehot), in the memory of the logits.
4. From that the gradients of the piece's hidden rows and of the weight. Backward then only scales what forward found:
   the head costs three matrix products in all, as without pieces, not the four of recomputation.

N rows, C rows of a piece, R rows in cache, D d_model, V vocab_size
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""Target of a position that does not count."""

MAX_LOGITS = 1 << 26
"""Most logits of a piece."""


class LossSums(NamedTuple):
    """Sums over the counted targets of a batch; the caller divides by the tokens of the global batch."""

    nats: Tensor
    """fp32 scalar: sum of the negative log-likelihoods; differentiable."""
    correct: Tensor
    """int64 scalar: targets that are the argmax of their logits."""
    tokens: Tensor
    """int64 scalar: counted targets."""


RowsIntoGradient = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
"""The signature of `rows_into_gradient`."""


def cross_entropy_sums(
    hidden: Tensor, weight: Tensor, targets: Tensor, into_gradient: RowsIntoGradient | None = None
) -> LossSums:
    """Returns the loss sums of `targets` under the logits `hidden @ weight.T`.

    Under autocast the products run in the autocast dtype; exponential, logarithm and all sums are fp32.
    No counted target gives nats 0 and zero gradients.

    Args:
        hidden: (B, T, D) last hidden state.
        weight: (V, D) weight of the head.
        targets: (B, T) int64 in [0, V), or -100 for a position that does not count.
        into_gradient: `rows_into_gradient`, or that compiled.
    """
    device_type = hidden.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype
    flat_hidden = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    flat_targets = targets.reshape(-1)
    # Asked here: a Function sees what its inputs require, also where no gradient will be asked for.
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(device_type, enabled=False):
        nats, correct = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            flat_hidden, weight, flat_targets, needs_grad, into_gradient or rows_into_gradient
        )
    return LossSums(nats, correct, (flat_targets != IGNORED).sum())


def rows_per_piece(n_rows: int, vocab_size: int) -> int:
    """Returns the rows of a piece: as equal as multiples of 64 allow, at most 2^26 logits (128 MiB in bf16)."""
    most = max(64, MAX_LOGITS // vocab_size // 64 * 64)
    n_pieces = math.ceil(n_rows / most)
    return 64 * math.ceil(n_rows / max(1, n_pieces) / 64)


def rows_in_cache(vocab_size: int, device_type: str) -> int | None:
    """Returns the rows of a piece to go through together: 2 MiB in fp32 on a CPU; None for all at once."""
    return max(1, (1 << 19) // vocab_size) if device_type == "cpu" else None


class _ChunkedCrossEntropy(torch.autograd.Function):
    """hidden (N, D), weight (V, D), targets (N,) -> nats, correct; forward finds the gradients too."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, needs_grad: bool, into_gradient: RowsIntoGradient
    ) -> tuple[Tensor, Tensor]:
        head = weight.to(hidden.dtype)
        rows = rows_per_piece(hidden.shape[0], weight.shape[0])
        hidden_grads: list[Tensor] = []
        weight_grad: Tensor | None = None
        nats = torch.zeros((), dtype=torch.float32, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        memory = hidden.new_empty(min(rows, hidden.shape[0]), weight.shape[0])  # of every piece's logits
        for piece, piece_targets in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True):
            counted = (piece_targets != IGNORED).unsqueeze(1)  # (C, 1)
            piece = piece.masked_fill(~counted, 0.0)  # whatever stands there, not even NaN comes through
            logits = torch.mm(piece, head.T, out=memory[: piece.shape[0]])  # (C, V)
            piece_nats, piece_correct = _piece_into_gradient(logits, piece_targets, counted, needs_grad, into_gradient)
            nats += piece_nats
            correct += piece_correct
            if needs_grad:
                hidden_grads.append(logits @ head)
                # The sum over the pieces is kept in fp32: in bf16 it would lose what the later pieces add.
                piece_grad = logits.T @ piece
                weight_grad = piece_grad.float() if weight_grad is None else weight_grad.add_(piece_grad)
        if weight_grad is not None:
            ctx.found = torch.cat(hidden_grads), weight_grad.to(weight.dtype)
        ctx.mark_non_differentiable(correct)
        return nats, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, nats_grad: Tensor, _correct_grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        if ctx.found is None:
            raise RuntimeError("the loss was differentiated before: its gradients were found once, and are gone.")
        # In place, so that the weight's is not there twice.
        (hidden_grad, weight_grad), ctx.found = ctx.found, None
        return hidden_grad.mul_(nats_grad), weight_grad.mul_(nats_grad), None, None, None


def _piece_into_gradient(
    logits: Tensor, targets: Tensor, counted: Tensor, needs_grad: bool, into_gradient: RowsIntoGradient
) -> tuple[Tensor, Tensor]:
    """Returns nats and correct of a piece whose logits (C, V) become their gradient, a few rows at a time."""
    rows = rows_in_cache(logits.shape[1], logits.device.type) or logits.shape[0]
    nats = torch.zeros((), dtype=torch.float32, device=logits.device)
    correct = torch.zeros((), dtype=torch.int64, device=logits.device)
    some_of = (torch.split(tensor, rows) for tensor in (logits, targets, counted))
    for some, some_targets, some_counted in zip(*some_of, strict=True):
        some_nats, some_correct = into_gradient(some, some_targets, some_counted, needs_grad)
        nats += some_nats
        correct += some_correct
    return nats, correct


def rows_into_gradient(logits: Tensor, targets: Tensor, counted: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor]:
    """Returns nats and correct of some rows; with `needs_grad` their logits become d nats / d logits, in place.

    Args:
        logits: (R, V); fp32 ones are overwritten in any case.
        targets: (R,) int64.
        counted: (R, 1) bool: whether the row's target counts.
    """
    x = logits.float()  # (R, V)
    index = targets.unsqueeze(1).where(counted, 0)
    target_logits = x.gather(1, index)
    top, argmax = x.max(1, keepdim=True)  # the first on a tie
    # In place from here on: a new piece of memory costs a CPU more than the exponentials in it.
    norm = x.sub_(top).exp_().sum(1, keepdim=True)
    nats = (norm.log() + top - target_logits).where(counted, 0.0).sum()
    correct = ((argmax == index) & counted).sum()
    if needs_grad:
        x.mul_(counted / norm)  # softmax, 0 where the target does not count; minus onehot:
        x.scatter_add_(1, index, -counted.to(x.dtype))
        logits.copy_(x)
    return nats, correct
