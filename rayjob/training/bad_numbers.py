"""Steps whose loss or gradient is not finite: where the first bad number is, and when there were too many.

A bad step is computed once more, without an update and without the other workers, to find the tensor. That costs
nothing until there is one.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.llama import Llama
from rayjob.training.feed import StepBatch
from rayjob.training.step import StepResult, autocast

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BadNumber:
    """The first number of a worker that is not finite."""

    rank: int
    tensor: str
    window_ids: tuple[int, ...]  # of the micro-batch in which it came up
    is_weight: bool = False  # so that every step is bad, and a checkpoint would be

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.tensor} is not finite, windows {' '.join(map(str, self.window_ids))}"


class BadSteps:
    """Finds what is bad in a step, and tells when it was too often; every worker has one, and all answer alike.

    Args:
        model: the unwrapped model.
        precision: of the steps.
        max_in_row: so many end the run.
    """

    def __init__(self, model: Llama, precision: torch.dtype, max_in_row: int) -> None:
        self._model = model
        self._precision = precision
        self._max_in_row = max_in_row
        self.found: list[BadNumber] = []  # in the last step, over all workers

    @property
    def are_weights_bad(self) -> bool:
        return any(bad.is_weight for bad in self.found)

    def take(self, step: int, in_row: int, result: StepResult, batch: StepBatch) -> str | None:
        """Looks at a step, the last of so many bad ones in a row; returns why the run must end, or None.

        All workers must call it after each step.
        """
        if not result.is_skipped:
            self.found = []
            return None
        self.found = _gather(find_bad_number(self._model, batch, self._precision))
        places = "; ".join(map(str, self.found))
        if not places:
            ranks = ", ".join(map(str, result.bad_ranks)) or "none alone"
            places = f"not found when computed again, so it came from outside the model (bad loss on rank: {ranks})"
        told = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}; {places}"
        if dist.get_rank() == 0:
            logger.warning("skipped %s (bad step %d of %d in a row)", told, in_row, self._max_in_row)
        return f"{in_row} bad steps in a row, the last {told}" if in_row >= self._max_in_row else None

    def window_ids(self) -> list[int]:
        """Returns the windows to look at after the last step."""
        return sorted({window for bad in self.found for window in bad.window_ids})


def find_bad_number(model: Llama, batch: StepBatch, precision: torch.dtype) -> BadNumber | None:
    """Returns the first weight, output, loss or gradient of this worker's part of a step that is not finite."""
    rank = dist.get_rank()
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            everything = (int(window) for micro in batch.window_ids for window in micro)
            return BadNumber(rank, f"the weight {name}", tuple(everything), is_weight=True)
    for (inputs, targets), ids in zip(batch.micro_batches, batch.window_ids, strict=True):
        if tensor := _first_bad_tensor(model, inputs, targets, precision):
            return BadNumber(rank, tensor, tuple(ids.tolist()))
    return None


def _first_bad_tensor(model: Llama, inputs: Tensor, targets: Tensor, precision: torch.dtype) -> str | None:
    eagerly = torch.compiler.set_stance("force_eager")  # what is compiled calls no hooks
    with _watched_outputs(model) as bad_outputs, autocast(inputs.device, precision), eagerly:
        sums = model(inputs, targets)
    if bad_outputs:
        return f"the output of {bad_outputs[0]}"
    if not _is_finite(sums.nats):
        return "the loss"
    # Not backward(), which would add to .grad and wake DDP.
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(sums.nats, parameters)
    # Backward goes from the last layer to the first, so the last bad one in the model's order came first.
    bad = [name for name, gradient in zip(names, gradients, strict=True) if not _is_finite(gradient)]
    return f"the gradient of {bad[-1]}" if bad else None


@contextmanager
def _watched_outputs(model: nn.Module) -> Iterator[list[str]]:
    """Collects the names of the modules whose output is not finite, in the order in which they come up."""
    bad: list[str] = []

    def watch(name: str) -> Any:
        def look(_module: nn.Module, _inputs: object, output: object) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            if not all(_is_finite(tensor) for tensor in tensors if isinstance(tensor, Tensor)):
                bad.append(name)

        return look

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        yield bad
    finally:
        for hook in hooks:
            hook.remove()


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _gather(found: BadNumber | None) -> list[BadNumber]:
    everyones: Sequence[BadNumber | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    return [bad for bad in everyones if bad]
