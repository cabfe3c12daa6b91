"""Stops all that was started from this folder: run_all and jobs, which save first, the head and the MLflow server."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

from cluster import head, locks, processes, redeploy, services, tracking_server
from cluster.settings import STOP_WAIT_S, Settings, SettingsError, auth_headers, forget_other_clusters


def main() -> int:
    """Stops everything; returns the exit code. Doing it twice is no error."""
    forget_other_clusters(os.environ)
    try:
        settings = services.current_settings(os.environ)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    told = stop_runs(settings)
    if head.running_ports(settings):
        stop_jobs(settings)
    redeploy.forget(settings)
    ended = told + head.stop(settings) + tracking_server.stop(settings)
    print(f"Stopped {ended} processes." if ended else "Nothing was running.")
    return 0


def stop_runs(settings: Settings) -> int:
    """Has the calls of run_all end, with their jobs: one that waits for its next attempt would bring everything back.

    Returns how many there were.
    """
    files = list((settings.state / "locks").glob("*.lock"))
    holders = [process for pid in {locks.holder_of(file) for file in files} if pid and (process := processes.look(pid))]
    for process in holders:
        print(f"Stopping process {process.pid} ({process.command}); its job saves a checkpoint first.", flush=True)
    processes.send(holders, signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_WAIT_S + 5
    while any(processes.is_alive(process) for process in holders) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return len(holders)


def stop_jobs(settings: Settings) -> None:
    """Lets running jobs save and end; one that does not is killed with the head."""
    try:
        from cluster.submit import JobClient
    except ImportError:
        print("Ray is not installed any more: a running job is killed without a save.", file=sys.stderr)
        return
    try:
        client = JobClient(settings.dashboard_url, headers=auth_headers(settings))
        jobs = client.list_jobs()
        running = [job.submission_id for job in jobs if job.submission_id and not job.status.is_terminal()]
        for job_id in running:
            print(f"Stopping job {job_id}; it saves a checkpoint first.", flush=True)
            client.stop_job(job_id)
    except (OSError, RuntimeError) as error:
        print(f"The head does not answer ({error}); ending it without asking the job.", file=sys.stderr)
        return
    deadline_s = time.monotonic() + STOP_WAIT_S + 5
    while head.running_ports(settings) and time.monotonic() < deadline_s:
        with suppress(OSError, RuntimeError):  # a busy dashboard may miss a call
            if all(client.get_job_status(job_id).is_terminal() for job_id in running):
                return
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
