"""Submission against a fake Jobs API: what is real is the choice of id, the log, and the exit codes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobStatus

from cluster import submit
from cluster.product import Run
from cluster.settings import Settings, read_settings

RUN = Run("small", "/st/runs/small", Path("/st"), ("--config", "/a b.yaml", 'storage="/st"'))


def job(submission_id: str | None, status: JobStatus = JobStatus.RUNNING, **fields: Any) -> Any:
    return SimpleNamespace(
        **{"submission_id": submission_id, "status": status, "metadata": None, "driver_exit_code": None} | fields
    )


class FakeJobs:
    """Runs one job through the given statuses, one at each look."""

    def __init__(self, log: Path, steps: list[Any], known: list[Any] | None = None) -> None:
        self.log, self.steps, self.known = log, iter(steps), known or []
        self.submitted: list[dict[str, Any]] = []
        self.stopped: list[str] = []

    def list_jobs(self) -> list[Any]:
        return self.known

    def submit_job(self, **fields: Any) -> None:
        self.submitted.append(fields)

    def stop_job(self, job_id: str) -> None:
        self.stopped.append(job_id)

    def get_job_info(self, job_id: str) -> Any:
        step = next(self.steps)
        if isinstance(step, BaseException):
            raise step
        status, text = step
        with self.log.open("a") as file:
            file.write(text)
        code = status if isinstance(status, int) else None
        return job(job_id, JobStatus.FAILED if code else status, driver_exit_code=code, message="gone\nmore")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(submit, "POLL_S", 0)
    monkeypatch.setattr(submit, "check_upload", lambda repository: None)
    settings = read_settings({"RAYJOB_STATE": str(tmp_path / "state"), "RAY_TMPDIR": "/tmp"})
    settings.state.mkdir()
    settings.token_path.write_text("secret")
    return settings


@pytest.fixture
def run(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs RUN on a FakeJobs with the given steps; returns (exit code, fake)."""

    def start(steps: list[Any], known: list[Any] | None = None) -> tuple[int, FakeJobs]:
        fake = FakeJobs(tmp_path / "job.log", steps, known)
        monkeypatch.setattr(submit, "JobSubmissionClient", lambda url, headers: fake)
        monkeypatch.setattr(submit, "log_path", lambda settings, job_id: fake.log)
        return submit.run_job(settings, RUN), fake

    return start


def test_first_attempt_is_one_and_later_ones_count_on() -> None:
    assert submit.next_attempt("small", []) == 1
    assert submit.next_attempt("small", ["small-1", "small-9", "small-2", None]) == 10


def test_attempts_of_other_runs_do_not_count() -> None:
    others = ["small-7-1", "tiny-4", "smallest-5", "small-x", "xsmall-6", "small"]
    assert submit.next_attempt("small", others) == 1
    assert submit.next_attempt("s.all", ["small-3"]) == 1


def test_job_gets_the_next_attempt_and_the_quoted_command(run: Any) -> None:
    exit_code, fake = run([(JobStatus.SUCCEEDED, "")], known=[job("small-1", JobStatus.FAILED)])
    (submitted,) = fake.submitted
    assert exit_code == 0
    assert submitted["submission_id"] == "small-2"
    assert submitted["entrypoint"].startswith("exec ")
    assert submitted["entrypoint"].endswith(" -m rayjob run --config '/a b.yaml' 'storage=\"/st\"'")
    assert submitted["metadata"] == {"run_folder": "/st/runs/small"}


def test_log_is_printed_whole_and_once(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(
        [
            (JobStatus.PENDING, ""),
            (JobStatus.RUNNING, "one\ntw"),
            (JobStatus.RUNNING, "o\n"),
            (JobStatus.SUCCEEDED, "end\n"),
        ]
    )
    assert capsys.readouterr().out.endswith("one\ntwo\nend\n")


@pytest.mark.parametrize(
    ("status", "exit_code"),
    [(JobStatus.SUCCEEDED, 0), (1, 1), (2, 2), (3, 3), (137, 1), (JobStatus.FAILED, 1), (JobStatus.STOPPED, 3)],
)
def test_exit_code_is_the_jobs(run: Any, status: Any, exit_code: int) -> None:
    assert run([(status, "")])[0] == exit_code


def test_running_job_of_the_same_folder_is_joined(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    same = job("small-3", metadata={"run_folder": "/st/runs/small"})
    exit_code, fake = run([(JobStatus.SUCCEEDED, "")], known=[same])
    assert (exit_code, fake.submitted) == (0, [])
    assert "Job small-3 of this run is at work already" in capsys.readouterr().out


@pytest.mark.parametrize(
    "other",
    [
        job("small-3", metadata={"run_folder": "/elsewhere/runs/small"}),
        job("small-3", JobStatus.SUCCEEDED, metadata={"run_folder": "/st/runs/small"}),
        job("small-3"),
        job(None),
    ],
)
def test_any_other_job_is_not_joined(run: Any, other: Any) -> None:
    assert len(run([(JobStatus.SUCCEEDED, "")], known=[other])[1].submitted) == 1


def test_interrupt_stops_the_job_and_waits_for_it(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [KeyboardInterrupt(), (JobStatus.RUNNING, "saving\n"), (JobStatus.STOPPED, "saved\n")]
    exit_code, fake = run(steps)
    assert (exit_code, fake.stopped) == (3, ["small-1"])
    assert capsys.readouterr().out.endswith("saving\nsaved\n")


def test_job_that_had_to_be_killed_is_a_failure(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, submit.STOP_WAIT_S])
    monkeypatch.setattr(submit.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(submit, "submit", lambda *_: None)
    assert run([KeyboardInterrupt(), (JobStatus.STOPPED, "")])[0] == 1


def test_missed_call_is_no_failure_while_the_head_lives(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit.head, "running_ports", lambda settings: {"RAY_PORT": 1})
    assert run([RuntimeError("busy"), ConnectionError(), (JobStatus.SUCCEEDED, "")])[0] == 0


def test_dead_head_is_told(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit.head, "running_ports", lambda settings: {})
    with pytest.raises(submit.JobError, match="the Ray head died"):
        run([ConnectionError()])
