"""Submission against a fake Jobs API: what is real is the choice of id, the log, and the exit codes."""

import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobErrorType, JobStatus

from cluster import submit
from cluster.product import Run
from cluster.restart_policy import Budgets, End, Kind
from cluster.settings import MARKER, Settings, read_settings

RUN = Run("small", "/st/runs/small", Path("/st"), ("--config", "/a b.yaml", 'storage="/st"'), Budgets(3, -1))


def job(submission_id: str | None, status: JobStatus = JobStatus.RUNNING, **fields: Any) -> Any:
    unknown = dict.fromkeys(("metadata", "driver_exit_code", "error_type", "message"))
    return SimpleNamespace(**unknown | {"submission_id": submission_id, "status": status} | fields)


class FakeJobs:
    """Runs one job through the given statuses, one at each look."""

    def __init__(self, log: Path, steps: list[Any], known: list[Any] | None = None) -> None:
        self.log, self.steps, self.known = log, iter(steps), known or []
        self.submitted: list[dict[str, Any]] = []
        self.stopped: list[str] = []
        self.watched: list[str] = []

    def list_jobs(self) -> list[Any]:
        return self.known

    def submit_job(self, **fields: Any) -> None:
        self.submitted.append(fields)

    def stop_job(self, job_id: str) -> bool:
        self.stopped.append(job_id)
        return True

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
    monkeypatch.setattr(submit, "RETRY_PAUSES_S", (0, 0, 0))
    monkeypatch.setattr(submit, "check_upload", lambda repository: None)
    monkeypatch.setattr(submit.head, "running_ports", lambda settings: {"RAY_PORT": 1})
    settings = read_settings({"RAYJOB_STATE": str(tmp_path / "state"), "RAY_TMPDIR": "/tmp"})
    settings.state.mkdir()
    settings.token_path.write_text("secret")
    return settings


@pytest.fixture
def run(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs RUN on a FakeJobs with the given steps; returns (end, fake)."""

    def start(steps: list[Any], known: list[Any] | None = None, last_attempt: int = 0) -> tuple[End, FakeJobs]:
        fake = FakeJobs(tmp_path / "job.log", steps, known)
        monkeypatch.setattr(submit, "JobClient", lambda url, headers: fake)
        monkeypatch.setattr(submit, "log_path", lambda settings, job_id: fake.log)
        return submit.run_job(settings, RUN, fake.watched.append, last_attempt), fake

    return start


@pytest.mark.parametrize(
    ("known", "last_attempt", "expected"),
    [
        ([], 0, "small-1"),
        (["small-1", "small-9", "small-2", None], 0, "small-10"),
        (["small-7-1", "tiny-4", "smallest-5", "small-x", "xsmall-6", "small"], 0, "small-1"),
        ([], 4, "small-5"),  # a new head, which knows no job
        (["small-2"], 4, "small-5"),
        (["small-7"], 4, "small-8"),
    ],
)
def test_attempts_count_on(run: Any, known: list[str | None], last_attempt: int, expected: str) -> None:
    jobs = [job(job_id, JobStatus.FAILED) for job_id in known]
    _, fake = run([(JobStatus.SUCCEEDED, "")], jobs, last_attempt)
    assert [submitted["submission_id"] for submitted in fake.submitted] == [expected]


def test_attempts_of_other_runs_do_not_count() -> None:
    assert submit.attempt_of("s.all", "small-3") == 0


def test_job_gets_the_next_attempt_and_the_quoted_command(run: Any) -> None:
    end, fake = run([(JobStatus.SUCCEEDED, "")], known=[job("small-1", JobStatus.FAILED)])
    (submitted,) = fake.submitted
    assert end == End(Kind.FINAL, 0, "done")
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
    ("fields", "kind", "exit_code", "reason"),
    [
        ({"status": JobStatus.SUCCEEDED}, Kind.FINAL, 0, "done"),
        ({"status": JobStatus.STOPPED}, Kind.FINAL, 3, "stopped on request"),
        ({"driver_exit_code": 3}, Kind.FINAL, 3, "stopped on request"),
        ({"driver_exit_code": 2}, Kind.FINAL, 2, "exit code 2: the job refused what it was given, and would again"),
        ({"driver_exit_code": -9}, Kind.LOST, 1, "the driver was killed by SIGKILL"),
        ({"driver_exit_code": 137}, Kind.LOST, 1, "the driver was killed by SIGKILL"),
        ({"driver_exit_code": -15}, Kind.LOST, 1, "the driver was killed by SIGTERM"),
        ({"driver_exit_code": 143}, Kind.LOST, 1, "the driver was killed by SIGTERM"),
        ({"error_type": JobErrorType.JOB_SUPERVISOR_ACTOR_DIED.value}, Kind.LOST, 1, "the driver was lost: gone"),
        ({"error_type": JobErrorType.RUNTIME_ENV_SETUP_FAILURE.value}, Kind.FAILED, 1, "the job failed: gone"),
        ({"driver_exit_code": 1}, Kind.FAILED, 1, "the job failed: gone"),
        ({"driver_exit_code": -11}, Kind.FAILED, 1, "the job failed: gone"),
        ({"message": None}, Kind.FAILED, 1, "the job failed: no reason given"),
        ({"message": "exit code 1, last available logs (…):\nx"}, Kind.FAILED, 1, "the job failed: exit code 1"),
    ],
)
def test_end_of_a_job_is_told_apart(fields: dict[str, Any], kind: Kind, exit_code: int, reason: str) -> None:
    ended = job("small-1", **{"status": JobStatus.FAILED, "message": "gone\nmore"} | fields)
    assert submit.classify(ended) == End(kind, exit_code, reason)


def test_running_job_of_the_same_folder_is_joined(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    same = job("small-3", metadata={"run_folder": "/st/runs/small"})
    end, fake = run([(JobStatus.SUCCEEDED, "")], known=[same])
    assert (end.exit_code, fake.submitted) == (0, [])
    assert set(fake.watched) == {"small-3"}
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
    end, fake = run(steps)
    assert (end.exit_code, fake.stopped) == (3, ["small-1"])
    assert capsys.readouterr().out.endswith("saving\nsaved\n")


@pytest.mark.parametrize(
    ("status", "exit_code"),
    [(JobStatus.SUCCEEDED, 0), (1, 1), (2, 2), (3, 3), (-9, 1), (-15, 3), (143, 3), (JobStatus.STOPPED, 3)],
)
def test_whatever_follows_an_interrupt_is_final(run: Any, status: Any, exit_code: int) -> None:
    end, _ = run([KeyboardInterrupt(), (status, "")])
    assert (end.kind, end.exit_code) == (Kind.FINAL, exit_code)


def test_interrupt_goes_to_the_driver_itself_and_to_no_other(settings: Settings) -> None:
    def process(job_id: str, **variables: str) -> subprocess.Popen[bytes]:
        metadata = json.dumps({"metadata": {"job_submission_id": job_id}})
        environment = os.environ | {submit.RAY_JOB_CONFIG: metadata, MARKER: settings.marker("head")} | variables
        return subprocess.Popen(["sleep", "60"], env=environment)

    started = [process("small-1"), process("small-12"), process("small-1", **{MARKER: "another folder's"})]
    try:
        assert [one.pid for one in submit.find_driver(settings, "small-1")] == [started[0].pid]
    finally:
        for one in started:
            one.kill()
            one.wait()


def test_second_interrupt_while_the_first_is_passed_on_is_the_same(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to come before the job was told, which then trained on."""
    monkeypatch.setattr(submit, "find_driver", lambda *_: signal.raise_signal(signal.SIGINT) or [])
    before = signal.getsignal(signal.SIGINT)
    end, fake = run([KeyboardInterrupt(), (JobStatus.STOPPED, "saved\n")])
    assert (end.exit_code, fake.stopped) == (3, ["small-1"])
    assert signal.getsignal(signal.SIGINT) is before


def test_job_that_is_still_stopping_is_waited_for_and_a_new_one_submitted(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):  # the second one, after the job was told
        run([KeyboardInterrupt(), KeyboardInterrupt()])
    assert "Not waiting for job small-1, which saves and then ends." in capsys.readouterr().out
    running = job("small-1", metadata={"run_folder": RUN.folder})
    end, fake = run([(JobStatus.RUNNING, "saving\n"), (3, "saved\n"), (JobStatus.SUCCEEDED, "done\n")], known=[running])
    assert (end.exit_code, [one["submission_id"] for one in fake.submitted]) == (0, ["small-2"])
    assert "still stopping: going on when it has ended.\nsaving\nsaved\n" in capsys.readouterr().out


def test_head_that_dies_after_an_interrupt_is_not_brought_back(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        FakeJobs, "stop_job", lambda *_: monkeypatch.setattr(submit.head, "running_ports", lambda _: {}) or True
    )
    end, _ = run([KeyboardInterrupt()])
    assert (end.kind, end.exit_code) == (Kind.FINAL, 1)
    assert "before the job had saved" in end.reason


def test_interrupt_before_the_job_was_taken_waits_for_nothing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def unknown(self: FakeJobs, job_id: str) -> None:
        raise RuntimeError("Job small-1 does not exist")

    monkeypatch.setattr(submit, "submit", interrupted)
    monkeypatch.setattr(FakeJobs, "stop_job", unknown)
    with pytest.raises(KeyboardInterrupt):
        run([])


def test_interrupt_during_the_submission_stops_the_job_that_it_made(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to break the request off, which Ray carried out nevertheless."""

    def submit_job(self: FakeJobs, **fields: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        self.submitted.append(fields)

    monkeypatch.setattr(FakeJobs, "submit_job", submit_job)
    end, fake = run([(JobStatus.STOPPED, "saved\n")])
    assert (end.exit_code, fake.stopped, len(fake.submitted)) == (3, ["small-1"], 1)


def test_submission_that_hangs_is_broken_off_by_a_later_signal(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit_job(self: FakeJobs, **fields: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not broken off")

    monkeypatch.setattr(submit, "SAME_SIGNAL_S", -1)
    monkeypatch.setattr(FakeJobs, "submit_job", submit_job)
    assert run([(JobStatus.STOPPED, "")])[1].stopped == ["small-1"]


@pytest.mark.parametrize("error", [ConnectionError("refused"), RuntimeError("Request failed with status code 500")])
def test_stop_is_asked_for_again_where_it_did_not_arrive(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It used to be forgotten, and the job submitted again."""
    answers = iter([error, error, None])

    def stop_job(self: FakeJobs, job_id: str) -> bool:
        if answer := next(answers):
            raise answer
        self.stopped.append(job_id)
        return True

    monkeypatch.setattr(FakeJobs, "stop_job", stop_job)
    end, fake = run([KeyboardInterrupt(), (JobStatus.STOPPED, "saved\n")])
    assert (end.kind, end.exit_code, fake.stopped) == (Kind.FINAL, 3, ["small-1"])


def test_job_is_waited_for_where_ray_takes_no_stop(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop_job(self: FakeJobs, job_id: str) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(FakeJobs, "stop_job", stop_job)
    end, _ = run([KeyboardInterrupt(), (3, "saved\n")])
    assert (end.kind, end.exit_code) == (Kind.FINAL, 3)
    assert "warning: Ray does not take the stop of job small-1" in capsys.readouterr().out


def test_stop_that_ray_refuses_while_it_starts_the_job_is_asked_for_again(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to be asked for once, and the job trained to its end."""
    answers = iter([False, False, True])
    monkeypatch.setattr(FakeJobs, "stop_job", lambda *_: next(answers))
    starting = (JobStatus.PENDING, "")
    end, _ = run([KeyboardInterrupt(), starting, starting, (JobStatus.STOPPED, "")])
    assert (end.kind, end.exit_code, list(answers)) == (Kind.FINAL, 3, [])


def test_stop_of_a_job_that_has_ended_meanwhile_is_not_insisted_on(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(FakeJobs, "stop_job", lambda _, job_id: bool(asked.append(job_id)))
    end, _ = run([KeyboardInterrupt(), (JobStatus.SUCCEEDED, ""), (JobStatus.SUCCEEDED, "")])
    assert (end.kind, end.exit_code, asked) == (Kind.FINAL, 0, ["small-1"])


def test_dashboard_that_is_slow_to_list_the_jobs_is_asked_again(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([ConnectionError("timed out"), RuntimeError("500"), None])

    def list_jobs(self: FakeJobs) -> list[Any]:
        if answer := next(answers):
            raise answer
        return self.known

    monkeypatch.setattr(FakeJobs, "list_jobs", list_jobs)
    assert run([(JobStatus.SUCCEEDED, "")])[0].exit_code == 0


@pytest.mark.parametrize("is_stopping", [False, True])
def test_job_that_nobody_followed_is_stopped_unless_it_was_asked_before(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopping: bool
) -> None:
    running = job("small-4", metadata={"run_folder": RUN.folder})
    fake = FakeJobs(tmp_path / "job.log", [(JobStatus.RUNNING, "saving\n"), (3, "saved\n")], [running])
    monkeypatch.setattr(submit, "JobClient", lambda url, headers: fake)
    if is_stopping:
        submit.stopping_path(settings, "small-4").touch()
    end = submit.stop_left(settings, RUN, fake.watched.append)
    assert fake.stopped == ([] if is_stopping else ["small-4"])
    assert end == (None if is_stopping else End(Kind.FINAL, 3, "stopped on request"))


def test_nothing_is_stopped_where_no_job_of_the_run_is_left(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = job("tiny-1", metadata={"run_folder": "/st/runs/tiny"})
    fake = FakeJobs(tmp_path / "job.log", [], [other])
    monkeypatch.setattr(submit, "JobClient", lambda url, headers: fake)
    assert submit.stop_left(settings, RUN, fake.watched.append) is None
    monkeypatch.setattr(FakeJobs, "list_jobs", lambda _: (_ for _ in ()).throw(ConnectionError("no head")))
    assert submit.stop_left(settings, RUN, fake.watched.append) is None
    assert fake.stopped == []


def test_stop_reaches_the_job_where_the_state_cannot_be_written(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(submit.Path, "touch", refuse)
    end, fake = run([KeyboardInterrupt(), (JobStatus.STOPPED, "saved\n")])
    assert (end.exit_code, fake.stopped) == (3, ["small-1"])


def test_job_that_had_to_be_killed_is_a_failure(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, submit.STOP_WAIT_S])
    monkeypatch.setattr(submit.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(submit, "submit", lambda *_: None)
    end = run([KeyboardInterrupt(), (JobStatus.STOPPED, "")])[0]
    assert end == End(Kind.FINAL, 1, "the job was killed: it did not end within 60 s")


def test_missed_call_is_no_failure_while_the_head_lives(run: Any) -> None:
    assert run([RuntimeError("busy"), ConnectionError(), (JobStatus.SUCCEEDED, "")])[0].exit_code == 0


def test_dead_head_is_told_whatever_its_dashboard_says(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit.head, "running_ports", lambda settings: {})
    with pytest.raises(submit.HeadLostError, match="the Ray head died"):
        run([(JobStatus.RUNNING, "")])


def test_questions_have_a_time_limit_and_uploads_none(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    monkeypatch.setattr(
        submit.JobSubmissionClient, "_do_request", lambda self, method, endpoint, **given: limits.append(given)
    )
    client = submit.JobClient.__new__(submit.JobClient)
    client._do_request("GET", "/api/jobs/small-1")
    client._do_request("POST", "/api/jobs/small-1/stop")
    client._do_request("PUT", "/api/packages/gcs/x", data=b"")
    assert limits == [{"timeout": submit.ANSWER_TIMEOUT_S}] * 2 + [{"data": b""}]
