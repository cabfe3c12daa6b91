"""What the commands decide around training, without Ray: who may run, what is refused, which stage stands."""

import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from model.complete import CheckpointError
from rayjob import __main__ as program
from rayjob import commands, connection
from rayjob.__main__ import main
from rayjob.config import ConfigError, CostConfig, JobConfig
from rayjob.connection import ConnectCancelled
from rayjob.lease import hold_run
from rayjob.status import read_status, set_stage
from rayjob.training import job
from rayjob.training.attempt import STARTS_FILE, begin_attempt
from rayjob.training.job import Outcome
from rayjob.training.metrics import MetricsRow, MetricsWriter


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    return JobConfig(storage=str(tmp_path), cost=CostConfig(gpu_usd_per_hour=1.0, max_usd=2.0))


@pytest.fixture
def half_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prepared corpus and a run that has taken 5 of its 10 steps."""
    monkeypatch.setattr(commands, "prepare", lambda *_: SimpleNamespace())
    monkeypatch.setattr(job, "steps_of_run", lambda *_: 10)
    monkeypatch.setattr(job, "step_to_go_on_from", lambda *_: 5)
    monkeypatch.setattr(commands, "connect", lambda: None)


def row(cost_usd: float = 0.0, val_loss: float | None = None) -> MetricsRow:
    return MetricsRow(1, 0, 100, 3.0, 0.8, 1e-3, 1000.0, None, 0.3, val_loss, 0.3, 1.5, cost_usd, 1.0, 2.0)


def made(folder: Path, *, exist_ok: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=exist_ok)
    return folder


@pytest.mark.parametrize("command", [commands.train, commands.run])
def test_second_driver_is_refused_and_leaves_the_stage_as_it_is(command: Any, config: JobConfig) -> None:
    set_stage(config, "train", 10)
    with (
        hold_run(config.run_folder, "run"),
        pytest.raises(RuntimeError, match=f"run {config.run_name} is in use by process"),
    ):
        command(config, threading.Event())
    assert read_status(config)["stage"] == "train"


@pytest.mark.usefixtures("half_done")
def test_failure_is_the_stage_and_a_stop_is_not_a_failure(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Outcome:
        raise RuntimeError("broken")

    monkeypatch.setattr(job, "train", fail)
    with pytest.raises(RuntimeError):
        commands.train(config, threading.Event())
    assert read_status(config)["stage"] == "failed"

    def cancel() -> None:
        raise ConnectCancelled("stopped")

    monkeypatch.setattr(commands, "connect", cancel)
    with pytest.raises(ConnectCancelled):
        commands.train(config, threading.Event())
    assert read_status(config)["stage"] == "stopped"


@pytest.mark.usefixtures("half_done")
def test_stop_before_ray_is_there_starts_nothing(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(commands, "connect", lambda: started.append("ray"))
    monkeypatch.setattr(job, "train", lambda *_: started.append("training"))
    stop = threading.Event()
    stop.set()
    assert commands.train(config, stop) is Outcome.STOPPED
    assert started == []
    assert read_status(config)["stage"] == "stopped"


def test_second_interrupt_counts_only_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(program.time, "monotonic", lambda: now[0])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop = program._stop_on_signals()
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        now[0] += 0.9
        signal.raise_signal(signal.SIGINT)
        now[0] += 0.2
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.usefixtures("half_done")
def test_run_whose_checkpoints_do_not_fit_has_failed(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise CheckpointError("of another corpus")

    set_stage(config, "prepare")
    monkeypatch.setattr(job, "step_to_go_on_from", refuse)
    with pytest.raises(CheckpointError):
        commands.train(config, threading.Event())
    assert read_status(config)["stage"] == "failed"


def test_restarts_count_the_lines_that_can_be_read(config: JobConfig) -> None:
    for _ in range(3):
        begin_attempt(made(config.run_folder, exist_ok=True), 0, None)
    path = config.run_folder / STARTS_FILE
    path.write_bytes(b"\x00 torn\n" + path.read_bytes() + b'{"step": 2')
    assert read_status(config)["restarts"] == 2


@pytest.mark.usefixtures("half_done")
def test_run_whose_budget_is_spent_starts_no_workers(config: JobConfig) -> None:
    MetricsWriter(made(config.run_folder), 0).write(row(cost_usd=2.5))
    assert commands.train(config, threading.Event()) is Outcome.BUDGET
    assert read_status(config)["stage"] == "budget"


@pytest.mark.parametrize(("outcome", "code"), [(Outcome.DONE, 0), (Outcome.STOPPED, 3), (Outcome.BUDGET, 0)])
def test_outcome_decides_the_exit_code(
    outcome: Outcome, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "run", lambda *_: outcome)
    assert main(["run", f"storage={tmp_path}"]) == code


def test_storage_that_cannot_be_written_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert main(["run", f"storage={tmp_path / 'file'}"]) == 1
    assert str(tmp_path / "file") in caplog.text
    assert "choose another folder" in caplog.text


def test_gpus_that_the_cluster_does_not_have_are_refused(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    with pytest.raises(ConfigError, match="needs 4 GPUs, but the Ray cluster has 2: .* train.use_gpu=false"):
        job.train(config, SimpleNamespace(), 10, 0, threading.Event(), SimpleNamespace())  # type: ignore[arg-type]


def test_sigterm_while_ray_starts_is_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**_: object) -> None:  # as Ray does: its own handler, which ends the process
        signal.signal(signal.SIGTERM, lambda number, _frame: exit(number))
        signal.raise_signal(signal.SIGTERM)

    stop = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        monkeypatch.setattr(connection.ray, "init", start)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        with pytest.raises(ConnectCancelled):
            connection.connect()
        assert stop.is_set()
        stop.clear()
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set(), "the handler is the caller's again"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_workers_lines_are_coloured_only_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.ray, "init", lambda **_: None)
    monkeypatch.setenv("RAY_COLOR_PREFIX", "unset")  # so that it is restored afterwards
    for is_terminal, expected in ((True, None), (False, "0")):
        monkeypatch.delenv("RAY_COLOR_PREFIX")
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(connection.sys, "stderr", SimpleNamespace(isatty=lambda answer=is_terminal: answer))
        connection.connect()
        assert os.environ.get("RAY_COLOR_PREFIX") == expected
        monkeypatch.setenv("RAY_COLOR_PREFIX", "unset")


def test_address_that_ray_cannot_use_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("no cluster found")

    monkeypatch.setattr(connection.ray, "init", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConfigError, match="RAY_ADDRESS=auto cannot be used: no cluster found"):
        connection.connect()


def test_status_is_json_whatever_the_losses_are(config: JobConfig) -> None:
    writer = MetricsWriter(made(config.run_folder), 0)
    for val_loss in (3.5, float("nan")):
        writer.write(row(val_loss=val_loss))
    status = read_status(config)
    json.dumps(status, allow_nan=False)
    assert status["val_loss"] is None
    assert status["best_val_loss"] == 3.5
