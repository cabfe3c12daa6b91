"""One optimizer step under DDP.

1. Forward and backward of every micro-batch; all but the last inside no_sync(), so the gradients are reduced once.
2. Each loss is divided by the tokens of the whole step over all workers, never by a micro-batch's own.
3. One small all-reduce adds the losses, the workers' wishes, the fingerprint of the windows, and whose loss is bad.
4. Clip to the global norm.
5. Update, unless the loss or the norm is not finite. Both are the same on every worker, so all decide alike, and the
   weights and moments stay as they were.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rayjob.training.ddp import Parallel
from rayjob.training.feed import StepBatch
from rayjob.training.optimizer import set_learning_rate
from rayjob.training.step_clock import Mark, unmarked


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a worker asks of all: taken up together at the end of the step."""

    stop: bool = False  # save and end the run
    leave: bool = False  # save and give way: a machine is about to go, or workers to come
    save: bool = False
    saved: bool = False  # no wish but news of rank 0: the save in the background has ended

    @property
    def ends_training(self) -> bool:
        return self.stop or self.leave

    def __or__(self, other: "Wishes") -> "Wishes":
        return Wishes(*(mine or theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def of_all(self, device: torch.device) -> "Wishes":
        """Returns what any worker wishes; all must call it together."""
        if not dist.is_initialized():
            return self
        flags = torch.tensor(astuple(self), dtype=torch.float32, device=device)
        dist.all_reduce(flags)
        return Wishes(*(flag > 0 for flag in flags.tolist()))


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: float  # nats per token over all workers
    grad_norm: float  # before clipping
    windows: int  # fingerprint of the windows that all workers together were fed
    wishes: Wishes  # of any worker
    bad_ranks: tuple[int, ...]  # whose own loss is not finite

    @property
    def is_skipped(self) -> bool:
        """Whether the loss or the gradient is not finite, so that nothing was updated."""
        return not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))


def train_step(
    ddp: Parallel,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    *,
    lr: float,
    grad_clip: float,
    precision: torch.dtype,
    wishes: Callable[[], Wishes],
    mark: Mark = unmarked,
) -> StepResult:
    """Runs one optimizer step; the weights stay as they are where `StepResult.is_skipped`.

    Args:
        batch: this worker's part of the step, on the model's device.
        lr: the rate of this update.
        grad_clip: the greatest global gradient norm.
        precision: bfloat16 for autocast over fp32 weights, or float32.
        wishes: this worker's, asked for as late as possible.
        mark: told where a part of the step ends.
    """
    nats = _accumulate_gradients(ddp, batch.micro_batches, batch.n_tokens, precision, mark)
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), grad_clip)
    mark("optimizer")
    result = _agree(nats, norm, batch, wishes())  # the step's one wait for the device: the update depends on it
    mark("all-reduce")
    if not result.is_skipped:
        set_learning_rate(optimizer, lr)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    mark("optimizer")
    return result


def _accumulate_gradients(
    ddp: Parallel,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    n_tokens: int,
    precision: torch.dtype,
    mark: Mark,
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
            mark("forward")
            (sums.nats * scale).backward()
            mark("last backward" if is_last else "backward")
        nats += sums.nats.detach()
    return nats


def autocast(device: torch.device, precision: torch.dtype) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == torch.bfloat16)


def _agree(nats: Tensor, norm: Tensor, batch: StepBatch, wishes: Wishes) -> StepResult:
    """Adds up what each worker has to tell; the norm is that of the reduced gradient and equal on all."""
    own = [float(batch.fingerprint), *map(float, astuple(wishes))]
    is_bad = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=nats.device)
    is_bad[dist.get_rank()] = ~torch.isfinite(nats)
    sums = torch.cat([nats.double()[None], torch.tensor(own, dtype=torch.float64, device=nats.device), is_bad])
    dist.all_reduce(sums)
    total, fingerprint, *flags, grad_norm = torch.cat([sums, norm.double()[None]]).tolist()
    n_wishes = len(own) - 1
    return StepResult(
        loss=total / batch.n_tokens,
        grad_norm=grad_norm,
        windows=int(fingerprint),
        wishes=Wishes(*(flag > 0 for flag in flags[:n_wishes])),
        bad_ranks=tuple(rank for rank, flag in enumerate(flags[n_wishes:]) if flag > 0),
    )
