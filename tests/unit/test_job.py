"""When the driver runs fit() once more; Ray is left out."""

import dataclasses
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from ray.train import PreemptionError, WorkerGroupError

from rayjob.config import CostConfig, FailureConfig, JobConfig
from rayjob.training import job
from rayjob.training.failure import RunFailedError, write_failure
from rayjob.training.metrics import SPENT_FILE

N_STEPS = 50


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    config = JobConfig(storage=str(tmp_path), failure=FailureConfig(max_failures=2))
    config.run_folder.mkdir(parents=True)
    return config


def fit(config: JobConfig, monkeypatch: pytest.MonkeyPatch, ends: list[tuple[int, Exception | None]]) -> int:
    """Runs fit() with these ends, each the newest step then and the error; returns how often it was called."""
    steps, n_fits = [0], 0

    def one_fit(*_: object) -> None:
        nonlocal n_fits
        step, error = ends[n_fits]
        n_fits += 1
        steps.append(step)
        if error:
            raise error

    monkeypatch.setattr(job, "_fit", one_fit)
    monkeypatch.setattr(job, "latest_step", lambda _: steps[-1])
    nothing: Any = None
    try:
        job._fit_while_it_gains(config, nothing, N_STEPS, 1.0, nothing, threading.Event(), nothing)
    finally:
        config.run_folder.joinpath("fits").write_text(str(n_fits))
    return n_fits


def failures() -> WorkerGroupError:
    return WorkerGroupError("killed", {0: RuntimeError("killed")})


def test_used_up_failures_are_free_again_after_a_new_checkpoint(
    config: JobConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert fit(config, monkeypatch, [(20, failures()), (30, failures()), (50, None)]) == 3
    assert "failure.max_failures=2 is used up, but 10 steps were gained" in caplog.text


def test_used_up_failures_without_a_new_checkpoint_are_the_end(
    config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WorkerGroupError):
        fit(config, monkeypatch, [(20, failures()), (20, failures())])
    assert config.run_folder.joinpath("fits").read_text() == "2"


def test_used_up_preemptions_are_the_end_whatever_was_gained(
    config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.train.v2.api.preemption import PreemptionInfo

    error = PreemptionError(PreemptionInfo(deadline_ms=1, preempted_node_to_ranks={}))
    with pytest.raises(PreemptionError):
        fit(config, monkeypatch, [(20, error)])


def test_workers_that_ended_unasked_are_started_again(
    config: JobConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So they do when the actor that would tell them to stop is killed: not done, not stopped, nothing spent."""
    with caplog.at_level(logging.WARNING):
        assert fit(config, monkeypatch, [(20, None), (N_STEPS, None)]) == 2
    assert "though nobody had asked them to" in caplog.text


def test_workers_that_end_unasked_without_a_gain_are_the_end(
    config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunFailedError, match="ended at step 20 though nobody had asked"):
        fit(config, monkeypatch, [(20, None), (20, None)])


def test_workers_that_spent_the_budget_are_not_started_again(
    config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(config, cost=CostConfig(gpu_usd_per_hour=1.0, max_usd=2.0))
    (config.run_folder / SPENT_FILE).write_text('{"elapsed_s": 7200.0, "cost_usd": 2.0}')
    assert fit(config, monkeypatch, [(20, None)]) == 1


def test_reason_that_the_workers_wrote_down_is_told_instead_of_the_last_error(
    config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_failure(config.run_folder, "it would only repeat")
    with pytest.raises(RunFailedError, match="it would only repeat"):
        fit(config, monkeypatch, [(20, failures())])
