"""What stop.sh does beside ending the services: real processes, a cluster that never was."""

import os
import signal
from pathlib import Path

import pytest

from cluster import stop
from cluster.settings import read_settings
from tests.unit.test_cluster_locks import start_holder


def test_call_of_run_all_that_waits_for_its_next_attempt_is_ended_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = read_settings({**os.environ, "RAYJOB_STATE": str(tmp_path)})
    assert stop.stop_runs(settings) == 0
    (tmp_path / "locks").mkdir(exist_ok=True)
    waiting = start_holder(tmp_path / "locks" / "run.lock")
    assert stop.stop_runs(settings) == 1
    assert waiting.wait(timeout=10) == -signal.SIGTERM
    assert f"Stopping process {waiting.pid}" in capsys.readouterr().out
