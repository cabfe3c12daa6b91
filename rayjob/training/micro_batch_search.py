"""Which sizes of a micro-batch are tried, and in which order; what trying one means is the caller's.

1. Begin at a middle size; while it is out of memory, halve it.
2. Go up, doubling, until a step gets slower, or the memory or the time is used up.
3. Where up was no better, go down until a step gets slower.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rayjob.training.failure import StartRefusedError

logger = logging.getLogger(__name__)

N_PASSES = 4  # forwards and backwards of a trial: the first warms up
_SLOWER = 1.01  # times of two runs of one size differ by about as much


@dataclass(frozen=True, slots=True)
class Measured:
    """A size as all workers together found it."""

    size: int
    micro_step_s: float | None  # forward and backward of the slowest worker; None: one of them is out of memory
    elapsed_s: float  # since the search began


Measure = Callable[[int], Measured]
StepTime = Callable[[int, float], float]
"""Returns the seconds of a step of a size's micro-steps, from those of one."""


def doubling(sizes: Iterable[int]) -> list[int]:
    """Returns of ascending sizes the first, and each that is at least twice the one taken before."""
    taken: list[int] = []
    for size in sizes:
        if not taken or size >= 2 * taken[-1]:
            taken.append(size)
    return taken


def largest_that_fits(sizes: Sequence[int], first: int, measure: Measure) -> Measured:
    """Tries `first`, and half of it as long as it is out of memory.

    Args:
        sizes: those allowed, ascending.

    Raises:
        StartRefusedError: not even the smallest fits.
    """
    at = measure(first)
    while at.micro_step_s is None:
        smaller = [size for size in sizes if size <= at.size // 2]
        if not smaller:
            raise StartRefusedError(
                f"a forward and backward of {at.size} windows is out of memory, and there is no smaller micro-batch: "
                "lower model.max_seq_len, take a smaller model, or a device with more memory"
            )
        logger.warning("a micro-batch of %d windows is out of memory: halved to %d", at.size, smaller[-1])
        at = measure(smaller[-1])
    return at


def search(sizes: Sequence[int], first: int, measure: Measure, step_time: StepTime, budget_s: float) -> list[Measured]:
    """Returns the sizes tried, at least one of which fits.

    Args:
        sizes: those allowed, ascending.
        first: to begin with.
        budget_s: no size is tried that would probably end later.
    """
    start = largest_that_fits(sizes, first, measure)
    assert start.micro_step_s is not None
    start_s = step_time(start.size, start.micro_step_s)
    larger = [size for size in sizes if size > start.size] if start.size == first else []
    tried = _walk([start], larger, measure, step_time, budget_s)
    if all(_seconds(at, step_time) > start_s for at in tried[1:]):
        smaller = [size for size in reversed(sizes) if size < start.size]
        tried = _walk(tried, smaller, measure, step_time, budget_s)
    return tried


def _walk(
    tried: list[Measured], sizes: Iterable[int], measure: Measure, step_time: StepTime, budget_s: float
) -> list[Measured]:
    """Tries sizes in order until one does not fit, is slower than the best, or would take too long to try."""
    for size in sizes:
        if tried[-1].elapsed_s + _cost_s(tried, size) > budget_s:
            break
        best_s = min(_seconds(at, step_time) for at in tried)
        tried = [*tried, measure(size)]
        if _seconds(tried[-1], step_time) > _SLOWER * best_s:
            break
    return tried


def _cost_s(tried: list[Measured], size: int) -> float:
    """What a trial will probably take: as long as the last, whose compilation does not grow with the size."""
    last, before_s = tried[-1], tried[-2].elapsed_s if len(tried) > 1 else 0.0
    growth = max(0.0, size / last.size - 1)
    return last.elapsed_s - before_s + N_PASSES * (last.micro_step_s or 0.0) * growth


def _seconds(at: Measured, step_time: StepTime) -> float:
    return float("inf") if at.micro_step_s is None else step_time(at.size, at.micro_step_s)
