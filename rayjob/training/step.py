"""One optimizer step under DDP.

1. Forward and backward of every micro-batch; all but the last inside no_sync(), so the gradients are reduced once.
2. Each loss is divided by the tokens of the whole step over all workers, never by a micro-batch's own.
3. One small all-reduce adds the loss and the workers' wishes (stop, save), so all decide alike.
4. Clip to the global norm; a non-finite norm is the same on every worker and ends the run before the update.
5. Update.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rayjob.training.ddp import Parallel
from rayjob.training.optimizer import set_learning_rate


class NonFiniteError(ArithmeticError):
    """The loss or a gradient is NaN or infinite; nothing was updated."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a worker asks of all: taken up together at the end of the step."""

    stop: bool = False
    save: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: float  # nats per token over all workers
    grad_norm: float  # before clipping
    wishes: Wishes  # of any worker


def train_step(
    ddp: Parallel,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    *,
    n_tokens: int,
    lr: float,
    grad_clip: float,
    precision: torch.dtype,
    wishes: Wishes,
) -> StepResult:
    """Runs one optimizer step.

    Args:
        micro_batches: this worker's inputs and targets, each (B, T) int64 on the model's device.
        n_tokens: targets counted in the step over all workers.
        lr: the rate of this update.
        grad_clip: the greatest global gradient norm.
        precision: bfloat16 for autocast over fp32 weights, or float32.
        wishes: this worker's.

    Raises:
        NonFiniteError: on all workers alike, before the update.
    """
    nats = _accumulate_gradients(ddp, micro_batches, n_tokens, precision)
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), grad_clip)
    total_nats, agreed = _agree(nats, wishes)
    grad_norm = norm.item()  # the step's one wait for the device: the update below depends on it
    if not torch.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        raise NonFiniteError(f"loss {total_nats / n_tokens}, gradient norm {grad_norm}")
    set_learning_rate(optimizer, lr)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(total_nats / n_tokens, grad_norm, agreed)


def _accumulate_gradients(
    ddp: Parallel,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    n_tokens: int,
    precision: torch.dtype,
) -> Tensor:
    # DDP averages over the workers; times their number makes the sum, so gradients are per token of the whole step.
    scale = dist.get_world_size() / n_tokens
    nats = torch.zeros((), device=ddp.device)
    for i, (inputs, targets) in enumerate(micro_batches):
        is_last = i == len(micro_batches) - 1
        # DDP reads the flag in forward, so no_sync() covers forward and backward.
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            with autocast(ddp.device, precision):
                sums = ddp(inputs, targets)
            (sums.nats * scale).backward()
        nats += sums.nats.detach()
    return nats


def autocast(device: torch.device, precision: torch.dtype) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == torch.bfloat16)


def _agree(nats: Tensor, wishes: Wishes) -> tuple[float, Wishes]:
    """Adds loss and wishes over the workers: (total nats, what any worker wishes)."""
    sums = torch.stack([nats.double(), nats.new_tensor(wishes.stop).double(), nats.new_tensor(wishes.save).double()])
    dist.all_reduce(sums)
    total, stop, save = sums.tolist()
    return total, Wishes(stop > 0, save > 0)
