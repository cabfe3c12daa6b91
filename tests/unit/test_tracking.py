"""Trackers follow a run from outside: what they miss they get later, and what they break stays theirs."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rayjob.config import JobConfig, TrackingConfig
from rayjob.training import follow, tracking
from rayjob.training.metrics import MetricsRow, MetricsWriter
from rayjob.training.mlflow_sink import MlflowSink, read_run_id, tracking_uri
from rayjob.training.narration import Narration, format_duration, progress_line
from rayjob.training.tracking import Tracking, is_behind


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
    assert is_behind(tmp_path)


def test_each_outage_is_told_once_and_so_is_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "_RETRY_S", 0.01)
    monkeypatch.setattr(follow, "_POLL_S", 0.01)
    writer = MetricsWriter(tmp_path, 0)
    tracker = FlakyTracker(failures=0)
    with caplog.at_level(logging.WARNING):
        following = Tracking(tmp_path, [tracker])
        for outage in (1, 2):
            writer.write(row(2 * outage - 1))
            assert tracker.was_sent.wait(30)
            tracker.was_sent.clear()
            tracker.failures = 5
            writer.write(row(2 * outage))
            assert tracker.was_sent.wait(30)
            tracker.was_sent.clear()
        following.finish("FINISHED")
    assert tracker.steps == [1, 2, 3, 4]
    assert caplog.text.count("the tracker is away") == caplog.text.count("flaky is back") == 2
    assert not is_behind(tmp_path)


def test_server_that_is_away_all_the_time_costs_an_end_in_time_and_gets_all_at_a_later_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """MLflow's real client and store; the server's port refuses connections, then takes them and never answers."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setattr(tracking, "_RETRY_S", 0.1)
    monkeypatch.setattr(tracking, "_FINISH_TIMEOUT_S", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    away = JobConfig(storage=str(tmp_path), tracking=TrackingConfig(mlflow_uri=f"http://127.0.0.1:{port}"))
    away.run_folder.mkdir(parents=True)
    (away.run_folder / "config.yaml").write_text("seed: 0\n")
    writer = MetricsWriter(away.run_folder, 0)
    servers = {1: contextlib.nullcontext, 21: lambda: socket.create_server(("127.0.0.1", port))}
    for step, server in servers.items():
        caplog.clear()
        with server(), caplog.at_level(logging.WARNING, logger="rayjob"):
            following = Tracking(away.run_folder, [MlflowSink(away, tmp_path)])
            for one in range(step, step + 20):
                writer.write(row(one))
            begun_at_s = time.monotonic()
            following.finish("FINISHED")
            assert time.monotonic() - begun_at_s < 10.0, "three seconds, and what a busy machine adds"
        assert is_behind(away.run_folder)
        assert caplog.text.count("Training goes on") <= 1, "a first request may still be waited for"
        assert "mlflow did not take everything" in caplog.text

    back = JobConfig(storage=str(tmp_path))
    monkeypatch.setattr(tracking, "_FINISH_TIMEOUT_S", 60.0)
    Tracking(back.run_folder, [MlflowSink(back, tmp_path)]).finish("FINISHED")
    assert not is_behind(back.run_folder)
    run_id = read_run_id(back.run_folder)
    assert run_id
    client = MlflowClient(tracking_uri(back))
    assert [metric.step for metric in client.get_metric_history(run_id, "train/loss")] == list(range(1, 41))
    assert client.get_run(run_id).info.status == "FINISHED"


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
