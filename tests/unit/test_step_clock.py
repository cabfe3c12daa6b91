"""How a step splits up, on a clock that is set by hand, and with events in a GPU's place."""

from typing import Any

import numpy as np
import pytest
import torch

from model.config import ModelConfig
from model.llama import Llama
from rayjob.config import OptimizerConfig, TrainConfig
from rayjob.training.ddp import wrap
from rayjob.training.feed import StepFeed, Windows
from rayjob.training.optimizer import build_optimizer
from rayjob.training.schedule import WindowOrder
from rayjob.training.step import Wishes, train_step
from rayjob.training.step_clock import INTERVAL, Part, StepClock, StepSplit

CPU = torch.device("cpu")


class Time:
    """Seconds of a clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def run_step(clock: StepClock, time: Time, index: int, parts: list[tuple[Part, float]]) -> None:
    clock.begin(index)
    for part, seconds in parts:
        time.s += seconds
        clock.mark(part)


TWO_MICRO_STEPS: list[tuple[Part, float]] = [
    ("data", 1.0),
    ("forward", 2.0),
    ("backward", 4.0),
    ("forward", 3.0),
    ("last backward", 9.0),  # of which it waits 5.0 for the others' gradients
    ("optimizer", 0.5),
    ("all-reduce", 0.25),
    ("optimizer", 0.5),
    ("evaluation", 100.0),
    ("logging", 0.125),
]


def test_last_backwards_excess_is_the_all_reduce_and_evaluation_is_no_part() -> None:
    time = Time()
    clock = StepClock(CPU, time)
    run_step(clock, time, 0, TWO_MICRO_STEPS)
    assert clock.take() is None, "in the measured step itself it is not over"
    clock.begin(1)
    assert clock.take() == StepSplit(
        data_s=1.0, forward_s=5.0, backward_s=8.0, all_reduce_s=5.25, optimizer_s=1.0, logging_s=0.125
    )
    assert clock.take() is None, "once"


def test_lone_micro_step_keeps_its_all_reduce_in_the_backward() -> None:
    time = Time()
    clock = StepClock(CPU, time)
    run_step(clock, time, 0, [("forward", 1.0), ("last backward", 7.0), ("all-reduce", 0.5)])
    clock.begin(1)
    split = clock.take()
    assert split is not None
    assert (split.backward_s, split.all_reduce_s) == (7.0, 0.5)


def test_one_step_in_the_interval_is_measured() -> None:
    time = Time()
    clock = StepClock(CPU, time)
    measured = []
    for index in range(5, 2 * INTERVAL + 2):  # as a resumed run begins
        run_step(clock, time, index, [("data", float(index))])
        if split := clock.take():
            measured.append((index, split.data_s))
    assert measured == [(INTERVAL + 1, INTERVAL), (2 * INTERVAL + 1, 2 * INTERVAL)]


class Event:
    """A CUDA event on a device that is `LATE_S` behind the host; to ask it before it has passed is an error."""

    LATE_S = 50.0
    time = Time()
    made: list["Event"] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.made.append(self)

    def record(self) -> None:
        self.at_s = self.time.s + self.LATE_S

    def elapsed_time(self, end: "Event") -> float:
        assert end.at_s <= self.time.s, "the host would have to wait for the device"
        return 1e3 * (end.at_s - self.at_s)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Time:
    def forbid(*_: object) -> None:
        raise AssertionError("a measurement must not wait for the device")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", forbid)
    Event.made.clear()
    Event.time.s = 0.0
    return Event.time


def test_gpu_is_measured_by_events_that_are_read_when_they_have_passed(events: Time) -> None:
    clock = StepClock(torch.device("cuda"), events)
    run_step(clock, events, 0, TWO_MICRO_STEPS)
    n_events = len(Event.made)
    events.s += Event.LATE_S
    run_step(clock, events, 1, TWO_MICRO_STEPS)
    assert len(Event.made) == n_events, "none in other steps"
    split = clock.take()
    assert split is not None
    assert (split.forward_s, split.backward_s, split.all_reduce_s) == (5.0, 8.0, 5.25)
    assert (split.data_s, split.logging_s) == (1.0, 0.125), "by the host's clock"


@pytest.mark.usefixtures("one_worker")
def test_step_marks_all_its_parts_in_order() -> None:
    model = Llama(ModelConfig(vocab_size=64, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=16, max_seq_len=8))
    model.init_weights(0)
    ddp = wrap(model, TrainConfig(use_gpu=False), CPU)
    optimizer = build_optimizer(model, OptimizerConfig())
    windows = Windows(np.arange(8 * 12 + 1, dtype=np.uint16) % 64, 8)
    feed = StepFeed(windows, WindowOrder(len(windows), 6, seed=7), 2, 0, 1, CPU)
    marked: list[str] = []
    settings: Any = {"lr": 1e-2, "grad_clip": 1.0, "precision": torch.float32, "wishes": Wishes}
    train_step(ddp, optimizer, feed.step_batch(0), **settings, mark=marked.append)
    assert marked == ["forward", "backward", "forward", "backward", "forward", "last backward"] + [
        "optimizer",
        "all-reduce",
        "optimizer",
    ]
