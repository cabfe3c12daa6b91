"""Weights & Biases with its module faked: which run, from which step, and what if it is not installed."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayjob.config import JobConfig
from rayjob.training import job
from rayjob.training.wandb_sink import WandbSink


def open_sink(storage: Path, monkeypatch: pytest.MonkeyPatch, next_step: int) -> tuple[int, dict[str, Any]]:
    settings: dict[str, Any] = {}

    def init(**given: Any) -> SimpleNamespace:
        settings.update(given)
        return SimpleNamespace(step=next_step)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))  # type: ignore[arg-type]
    config = JobConfig(storage=str(storage))
    config.run_folder.mkdir(parents=True, exist_ok=True)
    return WandbSink(config).open(), settings


def test_resumed_run_misses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_sink(tmp_path, monkeypatch, next_step=0)[0] == 0
    assert open_sink(tmp_path, monkeypatch, next_step=151)[0] == 150


def test_run_is_the_run_folders_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [open_sink(storage, monkeypatch, 0)[1]["id"] for storage in (tmp_path / "a", tmp_path / "a", tmp_path / "b")]
    assert ids[0] == ids[1] != ids[2]


def test_key_without_the_package_warns_once_and_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "key")
    monkeypatch.setattr(job.importlib.util, "find_spec", lambda _name: None)
    with caplog.at_level(logging.WARNING):
        sinks = job._sinks(JobConfig(), tmp_path, 10, 0)
    assert "wandb" not in [sink.name for sink in sinks]
    assert "pip install wandb" in caplog.text
