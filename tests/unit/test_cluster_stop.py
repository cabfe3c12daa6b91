"""What stop.sh does beside ending the services: real processes, a cluster that never was."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.job_submission import JobStatus

from cluster import stop, submit
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


def test_job_is_waited_for_though_the_dashboard_misses_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to end the head at once, and with it the job that was saving."""
    answers = iter([JobStatus.RUNNING, ConnectionError("timed out"), RuntimeError("500"), JobStatus.STOPPED])
    stopped = []

    def get_job_status(job_id: str) -> JobStatus:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    jobs = [SimpleNamespace(submission_id="small-1", status=JobStatus.RUNNING)]
    fake = SimpleNamespace(list_jobs=lambda: jobs, stop_job=stopped.append, get_job_status=get_job_status)
    monkeypatch.setattr(submit, "JobClient", lambda url, headers: fake)
    monkeypatch.setattr(stop.head, "running_ports", lambda settings: {"RAY_PORT": 1})
    settings = read_settings({**os.environ, "RAYJOB_STATE": str(tmp_path)})
    settings.token_path.write_text("secret")
    stop.stop_jobs(settings)
    assert (stopped, list(answers)) == (["small-1"], [])
