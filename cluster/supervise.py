"""Keeps a run going on this machine until it is done: its head, its MLflow server, its job, and Serve beside it.

1. Bring up what is needed, then submit the job, or join the one that a killed supervisor left running.
2. While the job runs, write a heartbeat, start the MLflow server again if it dies, and deploy again what Serve ran on
   a head that died.
3. When the job ends, ask the policy. If another attempt is worth it, wait, bring back what is missing and submit
   `<run>-<next attempt>`, which goes on from the newest checkpoint. Otherwise return the job's own exit code.

Nothing is kept in memory that a successor needs: kill this process at any time and run the same command again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cluster import head, product, redeploy, services, submit, tracking_server
from cluster.heartbeat import heartbeat_path, read_heartbeat, write_heartbeat
from cluster.restart_policy import End, Finish, History, Kind, decide
from cluster.settings import Settings, SettingsError

LOOK_S = 2.0  # between heartbeats, and between looks at the MLflow server
TRACKING_RETRY_S = 60.0
SERVICE_LOOK_S = 15.0
EXPLAINED = (submit.DONE, submit.STOPPED)  # exit codes that need no word of ours


@dataclass
class Supervisor:
    """One command's care for one run; the clock can be replaced."""

    settings: Settings
    run: product.Run
    caller: Path
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    attempt: int = 0
    job_id: str | None = None
    _history: History = field(default_factory=History)
    _next_look_s: float = 0.0
    _next_tracking_s: float = 0.0
    _next_service_s: float = 0.0

    def keep_running(self) -> int:
        """Runs the job to an end that is final and returns its exit code.

        Raises:
            SettingsError, HeadError: what is needed could not be started the first time.
            UploadError: the repository is too big to be sent along.
            KeyboardInterrupt: while no job was running, or for the second time.
        """
        try:
            return self._keep_running()
        except KeyboardInterrupt:  # between two jobs, as far as this process knew
            end = submit.stop_left(self.settings, self.run, self._look)
            if end is None:
                raise
            return end.exit_code

    def _keep_running(self) -> int:
        services.start(self.settings, self.run.storage)
        before = read_heartbeat(heartbeat_path(self.settings, self.run))
        self.attempt = before.attempt if before else 0
        self._beat("start")
        end = self._follow_job()
        while True:
            ended_at_s = self.now()
            self._history, decision = decide(self._history, self.run.budgets, end, self._read_step(end))
            if isinstance(decision, Finish):
                self._beat("end")
                if decision.exit_code not in EXPLAINED:
                    print(f"error: {decision.reason}.", file=sys.stderr)
                return decision.exit_code
            print(f"Restarting in {decision.delay_s:.0f} s: {decision.reason}.", flush=True)
            self._beat("wait")
            self.sleep(max(0.0, ended_at_s + decision.delay_s - self.now()))
            end = self._restart()

    def _restart(self) -> End:
        """Brings back what is missing and runs the next attempt; returns how it ended."""
        self._beat("start")
        try:
            services.start(self.settings, self.run.storage)
        except (SettingsError, head.HeadError, OSError) as error:
            return End(Kind.FAILED, submit.FAILED, f"the cluster does not come up again: {error}")
        self._next_service_s = 0.0  # a new head may have to be given what the last one ran
        return self._follow_job()

    def _follow_job(self) -> End:
        """Runs or joins the job; returns how that ended, also if it was not by the job's own doing."""
        try:
            end = submit.run_job(self.settings, self.run, self._look, self.attempt)
        except (submit.JobError, OSError, RuntimeError) as error:  # Ray's client raises the last for all but 200
            end = End(Kind.FAILED, submit.FAILED, str(error))
        # A driver whose head goes away may fail before anybody notices what it failed of.
        if end.kind is not Kind.FINAL and not head.running_ports(self.settings):
            return End(Kind.LOST, submit.FAILED, "the Ray head died")
        return end

    def _look(self, job_id: str) -> None:
        """Notes that the job is followed, and cares for what is beside it, every LOOK_S seconds."""
        if job_id == self.job_id and self.now() < self._next_look_s:
            return
        self._next_look_s = self.now() + LOOK_S
        self.job_id = job_id
        self.attempt = max(self.attempt, submit.attempt_of(self.run.name, job_id))
        self._beat("run")
        self._keep_tracking_server()
        self._keep_service()

    def _keep_tracking_server(self) -> None:
        """Starts the MLflow server again if it died; the job does not need it, so a failure is only told."""
        if self.now() < self._next_tracking_s or tracking_server.running_ports(self.settings):
            return
        print("The MLflow server is gone: starting it again.", flush=True)
        try:
            services.start_tracking_server(self.settings, self.run.storage)
        except (SettingsError, tracking_server.TrackingServerError, OSError) as error:
            print(f"warning: {error}; trying again in {TRACKING_RETRY_S:.0f} s.", file=sys.stderr)
            self._next_tracking_s = self.now() + TRACKING_RETRY_S

    def _keep_service(self) -> None:
        """Has Serve run what it ran before the head was lost; the job comes first, so a failure is only told."""
        if self.now() < self._next_service_s:
            return
        self._next_service_s = self.now() + SERVICE_LOOK_S
        try:
            redeploy.keep(self.settings)
        except (OSError, RuntimeError) as error:  # Ray's client raises the second for all but 200
            print(f"warning: the service was not looked after: {error}.", file=sys.stderr)

    def _read_step(self, end: End) -> int | None:
        """Returns the run's step, None if it is not needed or not to be had."""
        if end.kind is Kind.FINAL:
            return None
        try:
            return int(product.read_status(self.run, self.caller)["step"])
        except product.CommandError:
            return None

    def _beat(self, stage: str) -> None:
        path = heartbeat_path(self.settings, self.run)
        try:
            write_heartbeat(path, attempt=self.attempt, job_id=self.job_id, stage=stage)
        except OSError as error:  # a full disk, say: no reason to let go of a job that runs
            print(f"warning: no heartbeat: {error}.", file=sys.stderr)
