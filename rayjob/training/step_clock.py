"""Where the time of a step goes, every few steps: data, forward, backward, all-reduce, optimizer, logging.

On a CPU the host's clock tells. On a GPU events are put among its work and read a step later, when they have long
passed, so the host never waits for the device to measure it.

DDP reduces gradients during the last backward. What that one takes longer than the others counts as all-reduce; where
a step has one micro-step only it cannot be told apart and stays in the backward. The small all-reduce at the end of a
step counts too: in it a worker waits for the slowest.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import torch

INTERVAL = 10  # steps
Part = Literal["data", "forward", "backward", "last backward", "all-reduce", "optimizer", "evaluation", "logging"]
Mark = Callable[[Part], None]
"""Says that a part of the step ends here, and that the next one begins."""

_OF_HOST = ("data", "evaluation", "logging")  # parts in which the device has nothing to do, or is waited for


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Seconds of one step's parts."""

    data_s: float
    forward_s: float
    backward_s: float
    all_reduce_s: float
    optimizer_s: float
    logging_s: float


class StepClock:
    """Measures a step in INTERVAL.

    Args:
        device: that computes the steps.
        now: the host's clock in seconds.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._is_gpu, self._now = device.type == "cuda", now
        self._is_measuring = False
        self._marks: list[tuple[Part | None, float, Any]] = []

    def begin(self, index: int) -> None:
        """Begins update `index`; what was measured and not taken is forgotten."""
        self._is_measuring = index % INTERVAL == 0
        if self._is_measuring:
            self._marks = []
            self._add(None)

    def mark(self, part: Part) -> None:
        """Ends a part; nothing in a step that is not measured."""
        if self._is_measuring:
            self._add(part)

    def take(self) -> StepSplit | None:
        """Returns the split of an earlier step, once; it is called in a step of which the device's work is done."""
        if self._is_measuring or not self._marks:
            return None
        marks, self._marks = self._marks, []
        return _split([(part, self._seconds(a, b)) for a, b in zip(marks, marks[1:], strict=False) if (part := b[0])])

    def _add(self, part: Part | None) -> None:
        event = torch.cuda.Event(enable_timing=True) if self._is_gpu else None  # type: ignore[no-untyped-call]
        if event:
            event.record()
        self._marks.append((part, self._now(), event))

    def _seconds(self, begin: tuple[Part | None, float, Any], end: tuple[Part | None, float, Any]) -> float:
        if self._is_gpu and end[0] not in _OF_HOST:
            return float(begin[2].elapsed_time(end[2])) / 1e3
        return end[1] - begin[1]


def _split(parts: list[tuple[Part, float]]) -> StepSplit:
    def seconds(*names: Part) -> list[float]:
        return [part_s for name, part_s in parts if name in names]

    alone, last = seconds("backward"), sum(seconds("last backward"))
    exposed_s = max(0.0, last - fmean(alone)) if alone else 0.0
    return StepSplit(
        data_s=sum(seconds("data")),
        forward_s=sum(seconds("forward")),
        backward_s=sum(alone) + last - exposed_s,
        all_reduce_s=exposed_s + sum(seconds("all-reduce")),
        optimizer_s=sum(seconds("optimizer")),
        logging_s=sum(seconds("logging")),
    )


def unmarked(_part: Part) -> None:
    """A `Mark` for who measures nothing."""
