"""Trackers follow a run from outside: what they miss they get later, and what they break stays theirs."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from rayjob.training import tracking
from rayjob.training.metrics import MetricsRow, MetricsWriter
from rayjob.training.narration import Narration, format_duration, progress_line
from rayjob.training.tracking import Tracking


def row(step: int, val_loss: float | None = None) -> MetricsRow:
    return MetricsRow(step, 0, 100 * step, 3.2140, 0.84, 5.9e-4, 1000.0, None, 0.3, val_loss, 0.3, 1.5, 3.11, 1.0, 2.0)


class FlakyTracker:
    """Takes one batch, is away for a while, and remembers what it has."""

    name = "flaky"

    def __init__(self, failures: int) -> None:
        self.steps: list[int] = []
        self.status = ""
        self.failures = failures
        self.was_sent = threading.Event()

    def open(self) -> int:
        return max(self.steps, default=0)

    def send(self, rows: Sequence[MetricsRow]) -> None:
        if self.steps and self.failures:
            self.failures -= 1
            raise ConnectionError("the tracker is away.")
        self.steps += [each.step for each in rows]
        self.was_sent.set()

    def close(self, status: str) -> None:
        self.status = status


def test_rows_of_an_outage_arrive_later_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "_RETRY_S", 0.01)
    writer = MetricsWriter(tmp_path, 0)
    tracker = FlakyTracker(failures=3)
    with caplog.at_level(logging.WARNING):
        following = Tracking(tmp_path, [tracker])
        writer.write(row(1))
        assert tracker.was_sent.wait(30)
        for step in range(2, 200):
            writer.write(row(step))
        following.finish("FINISHED")
    assert tracker.steps == list(range(1, 200))
    assert tracker.status == "FINISHED"
    assert caplog.text.count("the tracker is away") == 1, "one warning for an outage, not one a step"


@pytest.mark.parametrize(
    ("limit", "status"),
    [("_FINISH_TIMEOUT_S", "FINISHED"), ("_STOP_TIMEOUT_S", "KILLED"), ("_STOP_TIMEOUT_S", "FAILED")],
)
def test_tracker_that_stays_away_does_not_hold_the_end(
    limit: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "_RETRY_S", 0.01)
    monkeypatch.setattr(tracking, limit, 0.2)
    MetricsWriter(tmp_path, 0).write(row(1))
    tracker = FlakyTracker(failures=10**9)
    tracker.steps = [0]
    Tracking(tmp_path, [tracker]).finish(status)
    assert "flaky did not take everything" in caplog.text


def test_progress_line_has_rate_eta_and_cost() -> None:
    line = progress_line(row(1200), 20_000, 412_031.0)
    assert line == "step 1200/20000 | loss 3.2140 | lr 5.9e-04 | grad 0.84 | 412,031 tok/s | data 0.3% | eta 5s | $3.11"


def test_every_validation_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Narration(10, 0).send([row(1), row(2, val_loss=3.5), row(3), row(4, val_loss=3.4)])
    assert "step 2/10 | loss 3.2140 | val 3.5000 (1.500 bits/byte)" in caplog.text
    assert "step 4/10" in caplog.text


@pytest.mark.parametrize(("seconds", "text"), [(12, "12s"), (245, "4m05s"), (9060, "2h31m"), (0.2, "0s")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
