"""Submits a run as a Ray job, shows its log while it runs, and says how it ended.

1. A job of the same run folder that still runs is joined, not doubled; one that was asked to stop is waited for.
2. Otherwise the next free attempt is submitted: Ray takes a submission id once only.
3. Lines of the job's log are printed as they come.
4. Ctrl-C or SIGTERM stops the job, which saves a checkpoint, and waits for it. A pod may have five seconds left, so the
   driver gets the signal from here, and only then from Ray, which also kills it if it does not end.
"""

from __future__ import annotations

import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from ray.dashboard.modules.job.pydantic_models import JobDetails
from ray.job_submission import JobErrorType, JobStatus, JobSubmissionClient

from cluster import head, processes
from cluster.product import Run
from cluster.restart_policy import End, Kind
from cluster.settings import ANSWER_TIMEOUT_S, REPOSITORY, STOP_WAIT_S, Settings, auth_headers
from cluster.upload import check_upload

POLL_S = 0.25
RETRY_PAUSES_S = (0.5, 1, 2, 4, 8)  # between attempts to have the dashboard answer or take a stop
SAME_SIGNAL_S = 1.0  # a wrapper that passes a signal on repeats it within this
AGENT_TIMEOUT_S = 60
RAY_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
DONE, FAILED, BAD_USAGE, STOPPED = 0, 1, 2, 3
# How a driver ends that somebody or something killed; a shell in between would add 128 to the signal's number.
KILLED = {code: number for number in (signal.SIGKILL, signal.SIGTERM) for code in (-number, 128 + number)}


class JobError(Exception):
    """Why a job cannot be submitted or followed."""


class HeadLostError(JobError):
    """The head died, and the job with it."""


class JobClient(JobSubmissionClient):
    """Ray's client, but no question and no stop waits for ever for a dashboard that has lost its head."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        is_quick = method == "GET" or endpoint.endswith("/stop")
        limit = {"timeout": ANSWER_TIMEOUT_S} if is_quick else {}
        return super()._do_request(method, endpoint, **{**limit, **options})


def run_job(settings: Settings, run: Run, watch: Callable[[str], None], last_attempt: int = 0) -> End:
    """Runs or joins the job of `run` and returns how it ended.

    Args:
        settings: the cluster, whose head is up.
        run: what to run.
        watch: called with the job's id again and again while it is followed.
        last_attempt: the highest attempt so far; a new head has forgotten its predecessor's.

    Raises:
        UploadError: the repository is too big to be sent along.
        JobError: Ray did not take the job, or the head died.
        KeyboardInterrupt: a second interrupt while the job was saving.
    """
    client = JobClient(settings.dashboard_url, headers=auth_headers(settings))
    jobs = list_jobs(settings, client)
    job_id = find_running(jobs, run)
    if job_id and stopping_path(settings, job_id).exists():
        print(f"Job {job_id} of this run is still stopping: going on when it has ended.", flush=True)
        with LogReader(log_path(settings, job_id)) as log:
            follow(settings, client, job_id, log, watch)
        job_id = None
    is_new = job_id is None
    if job_id is None:
        check_upload(REPOSITORY)
        attempt = max(last_attempt, *(attempt_of(run.name, job.submission_id) for job in jobs), 0) + 1
        job_id = f"{run.name}-{attempt}"
        stopping_path(settings, job_id).unlink(missing_ok=True)  # of a job that had this number on another head
    else:
        print(f"Job {job_id} of this run is at work already: following it.", flush=True)
    with LogReader(log_path(settings, job_id)) as log:
        try:
            if is_new:
                submit(settings, client, run, job_id)
            return classify(follow(settings, client, job_id, log, watch))
        except KeyboardInterrupt:
            return stop_and_wait(settings, client, job_id, log, watch)


def stop_and_wait(
    settings: Settings, client: JobSubmissionClient, job_id: str, log: LogReader, watch: Callable[[str], None]
) -> End:
    """Lets the job save and end, and returns how it did, which is final whatever it is."""
    stopped_at_s = time.monotonic()
    with _deaf():
        processes.send(find_driver(settings, job_id), signal.SIGTERM)
        print("\nStopping: the job saves a checkpoint first.", flush=True)
        is_asked = ask_to_stop(settings, client, job_id)
        with suppress(OSError):  # it only helps the next command, if this one does not wait to the end
            stopping_path(settings, job_id).touch()
    try:
        if not is_asked:
            insist(settings, client, job_id)
        job = follow(settings, client, job_id, log, watch)
    except HeadLostError:
        return End(Kind.FINAL, FAILED, "the Ray head died before the job had saved")
    except KeyboardInterrupt:
        print(f"\nNot waiting for job {job_id}, which saves and then ends.", flush=True)
        raise
    if KILLED.get(job.driver_exit_code or 0) is signal.SIGTERM:
        return End(Kind.FINAL, STOPPED, "stopped before the job could take signals, so there was nothing to save")
    end = classify(job)
    if time.monotonic() - stopped_at_s >= STOP_WAIT_S:
        return End(Kind.FINAL, FAILED, f"the job was killed: it did not end within {STOP_WAIT_S} s")
    return replace(end, kind=Kind.FINAL)


@contextmanager
def _deaf() -> Iterator[None]:
    """Lets no further signal keep the request from the job: where a wrapper passes Ctrl-C on, it comes twice."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _held_back() -> Iterator[None]:
    """Keeps a signal until a request has been answered: broken off, nobody would know whether the job exists.

    One more than a second later breaks it off, as it may hang.
    """
    came: list[tuple[int, float]] = []

    def keep(number: int, _frame: FrameType | None) -> None:
        if came and time.monotonic() - came[0][1] > SAME_SIGNAL_S:
            raise KeyboardInterrupt
        came.append((number, time.monotonic()))

    handlers = {number: signal.signal(number, keep) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0][0])


def stopping_path(settings: Settings, job_id: str) -> Path:
    """Returns the file that says that a job has been asked to stop."""
    return settings.state / f"{job_id}.stopping"


def list_jobs(settings: Settings, client: JobSubmissionClient) -> list[JobDetails]:
    """Returns the jobs that the head knows; a busy dashboard is asked again.

    Raises:
        HeadLostError: the head died.
        OSError, RuntimeError: it lives and does not answer.
    """
    for pause_s in RETRY_PAUSES_S:
        try:
            return list(client.list_jobs())
        except (OSError, RuntimeError):
            if not head.running_ports(settings):
                raise HeadLostError("the Ray head died") from None
        time.sleep(pause_s)
    return list(client.list_jobs())


def find_running(jobs: Iterable[JobDetails], run: Run) -> str | None:
    """Returns the submission id of the job that writes this run folder now, or None."""
    for job in jobs:
        is_same = (job.metadata or {}).get("run_folder") == run.folder
        if is_same and job.submission_id and not job.status.is_terminal():
            return str(job.submission_id)
    return None


def attempt_of(run_name: str, job_id: str | None) -> int:
    """Returns the number of the attempt, from 1, that a submission id stands for; 0 if it is not of this run."""
    match = re.fullmatch(re.escape(run_name) + r"-(\d+)", job_id or "")
    return int(match[1]) if match else 0


def submit(settings: Settings, client: JobSubmissionClient, run: Run, job_id: str) -> None:
    """Submits the job.

    Raises:
        JobError: the head did not take it.
    """
    # exec: Ray signals the shell that it starts, and a shell would keep the signal to itself.
    entrypoint = "exec " + shlex.join([head.ray_python(settings), "-m", "rayjob", "run", *run.arguments])
    deadline_s = time.monotonic() + AGENT_TIMEOUT_S
    while True:
        try:
            with _held_back():
                client.submit_job(
                    entrypoint=entrypoint,
                    submission_id=job_id,
                    runtime_env={"working_dir": str(REPOSITORY)},
                    metadata={"run_folder": run.folder},
                )
            break
        except RuntimeError as error:
            # For some seconds after its start the head has no agent to run jobs.
            if "No available agent" not in str(error) or time.monotonic() > deadline_s:
                raise JobError(f"Ray did not take the job: {error}") from error
            time.sleep(POLL_S)
    print(f"Submitted job {job_id}. Ctrl-C saves and stops it; the same command goes on.", flush=True)


def log_path(settings: Settings, job_id: str) -> Path:
    """Returns where Ray, on this machine, writes what the job prints."""
    return settings.ray_temp / "session_latest" / "logs" / f"job-driver-{job_id}.log"


class LogReader:
    """Prints what a job's log file gains; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def print_new(self) -> None:
        """Prints all that has been added since the last call."""
        if self._file is None and self._path.exists():
            self._file = self._path.open(errors="replace")
        if self._file is not None and (text := self._file.read()):
            sys.stdout.write(text)
            sys.stdout.flush()


def find_driver(settings: Settings, job_id: str) -> list[processes.Process]:
    """Returns the job's own process, on this machine; none while Ray still starts it."""
    ours = processes.find_ours(settings.marker("head"))
    # Ray tells the driver, and none of its tasks and actors, by this variable which job it is.
    return [one for one in ours if f'"{job_id}"' in processes.environment_of(one.pid).get(RAY_JOB_CONFIG, "")]


def ask_to_stop(settings: Settings, client: JobSubmissionClient, job_id: str) -> bool:
    """Asks Ray to end the job; returns whether it will, or has ended, if only because the head is gone.

    Raises:
        KeyboardInterrupt: the interrupt came before the job was submitted, so there is nothing to wait for.
    """
    try:
        # Ray refuses while it still starts what is to run the job.
        return client.stop_job(job_id) or client.get_job_info(job_id).status.is_terminal()
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "does not exist" in str(error):
            raise KeyboardInterrupt from None
        return not head.running_ports(settings)


def insist(settings: Settings, client: JobSubmissionClient, job_id: str) -> None:
    """Asks Ray again and again to end the job, for some seconds."""
    for pause_s in RETRY_PAUSES_S:
        time.sleep(pause_s)
        if ask_to_stop(settings, client, job_id):
            return
    print(f"warning: Ray does not take the stop of job {job_id}; its driver has had the signal, if there is one.")


def stop_left(settings: Settings, run: Run, watch: Callable[[str], None]) -> End | None:
    """Stops the job of a run that nobody follows at an interrupt; returns how it ended, or None if there is none."""
    with _deaf():
        try:
            client = JobClient(settings.dashboard_url, headers=auth_headers(settings))
            job_id = find_running(client.list_jobs(), run)
        except (OSError, RuntimeError):  # no head, or one that does not answer
            return None
    if job_id is None or stopping_path(settings, job_id).exists():
        return None
    with LogReader(log_path(settings, job_id)) as log:
        return stop_and_wait(settings, client, job_id, log, watch)


def follow(
    settings: Settings, client: JobSubmissionClient, job_id: str, log: LogReader, watch: Callable[[str], None]
) -> JobDetails:
    """Prints the job's log until the job has ended; returns what Ray says of it.

    Raises:
        HeadLostError: the head died.
    """
    while True:
        log.print_new()
        # Asked first: a dashboard that has lost the rest of the head tells what was true before.
        if not head.running_ports(settings):
            raise HeadLostError("the Ray head died")
        watch(job_id)
        try:
            job = client.get_job_info(job_id)
        except (OSError, RuntimeError):
            pass  # a busy dashboard may miss a call
        else:
            if job.status.is_terminal():
                log.print_new()
                return job
        time.sleep(POLL_S)


def classify(job: JobDetails) -> End:
    """Returns what the end of a job means, by the exit code of its own process where there is one."""
    code = job.driver_exit_code
    if job.status is JobStatus.SUCCEEDED:
        return End(Kind.FINAL, DONE, "done")
    if job.status is JobStatus.STOPPED or code == STOPPED:
        return End(Kind.FINAL, STOPPED, "stopped on request")
    if code == BAD_USAGE:
        return End(Kind.FINAL, BAD_USAGE, "exit code 2: the job refused what it was given, and would again")
    if code in KILLED:
        return End(Kind.LOST, FAILED, f"the driver was killed by {KILLED[code].name}")
    reason = (job.message or "no reason given").partition("\n")[0].partition(", last available logs")[0]
    if job.error_type == JobErrorType.JOB_SUPERVISOR_ACTOR_DIED:
        return End(Kind.LOST, FAILED, f"the driver was lost: {reason}")
    return End(Kind.FAILED, FAILED, f"the job failed: {reason}")
