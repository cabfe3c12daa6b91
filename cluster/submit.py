"""Submits a run as a Ray job, shows its log while it runs, and passes its exit code on.

1. A job of the same run folder that still runs is joined, not doubled.
2. Otherwise the next free attempt is submitted: Ray takes a submission id once only.
3. Lines of the job's log are printed as they come.
4. Ctrl-C or SIGTERM stops the job, which saves a checkpoint, and waits for it.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from ray.dashboard.modules.job.pydantic_models import JobDetails
from ray.job_submission import JobStatus, JobSubmissionClient

from cluster import head
from cluster.product import Run
from cluster.settings import REPOSITORY, STOP_WAIT_S, Settings, auth_headers
from cluster.upload import check_upload

POLL_S = 0.25
AGENT_TIMEOUT_S = 60
DONE, FAILED, STOPPED = 0, 1, 3
EXIT_CODES = (0, 1, 2, 3)


class JobError(Exception):
    """Why a job cannot be submitted or followed."""


def run_job(settings: Settings, run: Run) -> int:
    """Runs or joins the job of `run` and returns its exit code.

    Raises:
        UploadError: the repository is too big to be sent along.
        JobError: the head died meanwhile.
        KeyboardInterrupt: a second interrupt while the job was saving.
    """
    client = JobSubmissionClient(settings.dashboard_url, headers=auth_headers(settings))
    jobs = client.list_jobs()
    job_id = find_running(jobs, run)
    if job_id is None:
        check_upload(REPOSITORY)
        job_id = f"{run.name}-{next_attempt(run.name, [job.submission_id for job in jobs])}"
        is_new = True
    else:
        print(f"Job {job_id} of this run is at work already: following it.", flush=True)
        is_new = False
    stopped_at_s = None
    with LogReader(log_path(settings, job_id)) as log:
        try:
            if is_new:
                submit(settings, client, run, job_id)
            job = follow(settings, client, job_id, log)
        except KeyboardInterrupt:
            print("\nStopping: the job saves a checkpoint first.", flush=True)
            stopped_at_s = time.monotonic()
            client.stop_job(job_id)
            job = follow(settings, client, job_id, log)
    if stopped_at_s is not None and time.monotonic() - stopped_at_s >= STOP_WAIT_S:
        print(f"The job was killed: it did not end within {STOP_WAIT_S} s.", file=sys.stderr)
        return FAILED
    return exit_code(job)


def find_running(jobs: Iterable[JobDetails], run: Run) -> str | None:
    """Returns the submission id of the job that writes this run folder now, or None."""
    for job in jobs:
        is_same = (job.metadata or {}).get("run_folder") == run.folder
        if is_same and job.submission_id and not job.status.is_terminal():
            return str(job.submission_id)
    return None


def next_attempt(run_name: str, used_ids: Iterable[str | None]) -> int:
    """Returns the first attempt number, from 1, above all that this run's submission ids have used."""
    pattern = re.compile(re.escape(run_name) + r"-(\d+)")
    matches = [pattern.fullmatch(used or "") for used in used_ids]
    return 1 + max((int(match[1]) for match in matches if match), default=0)


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


def follow(settings: Settings, client: JobSubmissionClient, job_id: str, log: LogReader) -> JobDetails:
    """Prints the job's log until the job has ended; returns how it ended.

    Raises:
        JobError: the head died.
    """
    while True:
        log.print_new()
        try:
            job = client.get_job_info(job_id)
        except (OSError, RuntimeError) as error:
            # A busy dashboard may miss a call; without a head there is nothing to wait for.
            if not head.running_ports(settings):
                raise JobError("the Ray head died. The same command starts it again and goes on.") from error
        else:
            if job.status.is_terminal():
                log.print_new()
                return job
        time.sleep(POLL_S)


def exit_code(job: JobDetails) -> int:
    """Returns the exit code of the job's own process, or the nearest that the contract knows."""
    if job.status is JobStatus.SUCCEEDED:
        return DONE
    if job.status is JobStatus.STOPPED:
        return STOPPED
    if job.driver_exit_code in EXIT_CODES[1:]:
        return int(job.driver_exit_code)
    print(f"The job failed: {(job.message or 'no reason given').splitlines()[0]}", file=sys.stderr)
    return FAILED
