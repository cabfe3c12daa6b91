"""`ray job submit` as Ray documents it, against a head started by hand.

Real: the head with token authentication, Ray's own command line, the upload, the job. Only model and corpus are tiny.
"""

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.checkpoint import list_checkpoints, step_of
from rayjob.training.metrics import read_metrics
from tests import kills
from tests.e2e.test_run_all import TINY, free_ports, write_books

REPOSITORY = Path(__file__).resolve().parents[2]
RAY = Path(sys.executable).with_name("ray")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


class Head:
    """A Ray head of its own ports, folder and token."""

    def __init__(self, temp: Path, token: Path) -> None:
        self.temp = temp
        self.gcs_port, self.dashboard_port, self.agent_port, self.client_port = free_ports(4)
        token.write_text(secrets.token_hex(32))
        self._environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self._environment["RAY_JOB_STOP_WAIT_TIME_S"] = "60"  # three by default: too short for a busy machine
        self._environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "1"  # nothing runs any more when it is stopped
        self._environment.pop("RAY_ADDRESS", None)

    def start(self) -> subprocess.Popen[bytes]:
        """Starts the head as one blocking process, which takes the others with it when it ends."""
        ports = [f"--port={self.gcs_port}", f"--dashboard-port={self.dashboard_port}", "--min-worker-port=0"]
        options = ["--head", "--block", "--num-cpus=2", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
        command = [str(RAY), "start", *options, *ports, "--max-worker-port=0", f"--temp-dir={self.temp}"]
        # Fixed by default, and then taken by any other Ray of the machine.
        command += [f"--dashboard-agent-listen-port={self.agent_port}", f"--ray-client-server-port={self.client_port}"]
        return subprocess.Popen(command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def job(self, action: str, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(RAY), "job", action, "--address", f"http://127.0.0.1:{self.dashboard_port}", *words]
        return subprocess.run(command, cwd=REPOSITORY, env=self._environment, capture_output=True, text=True)

    def submit(self, submission_id: str, *entrypoint: str, wait: bool = True) -> subprocess.CompletedProcess[str]:
        options = ["--working-dir", ".", "--submission-id", submission_id, *([] if wait else ["--no-wait"])]
        return self.job("submit", *options, "--", *entrypoint)


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as temp:
        head = Head(Path(temp), tmp_path / "token")
        process = head.start()
        try:
            yield head
        finally:
            process.terminate()
            process.wait(timeout=60)


def test_submitted_job_trains_from_a_small_upload_is_stopped_and_goes_on_as_a_new_attempt(
    head: Head, tmp_path: Path
) -> None:
    write_books(tmp_path / "books")
    run_folder = tmp_path / "store" / "runs" / "submitted"
    overrides = [
        *(setting for setting in TINY if not setting.startswith(("data.paths", "storage"))),
        f"data.paths=[{tmp_path / 'books'}]",
        f"storage={tmp_path / 'store'}",
        "run_name=submitted",
    ]
    entrypoint = [sys.executable, "-m", "rayjob", "run", "--config", "rayjob/configs/small.yaml", *overrides]
    # The head takes jobs some seconds after its start; Ray's command line retries nothing.
    deadline_s = time.monotonic() + 120
    while True:
        job = head.submit("first", *entrypoint, "train.max_steps=100000", wait=False)
        if "submitted successfully" in job.stdout or time.monotonic() > deadline_s:
            break
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
    kills.wait_until(kills.from_step(run_folder, 5), "a step")
    stopped = head.job("stop", "first")
    assert "was stopped" in stopped.stdout + stopped.stderr
    # The row of a step that is still to be validated is written after its validation, so by the next attempt.
    last = step_of(list_checkpoints(run_folder)[-1])
    assert last - kills.last_step(run_folder) in (0, 1)
    assert "stopped on request: run the same command again" in head.job("logs", "first").stdout

    again = head.submit("first", *entrypoint, f"train.max_steps={last + 20}")
    assert again.returncode != 0, "Ray takes a submission id once"
    assert "already exists" in again.stdout + again.stderr
    job = head.submit("second", *entrypoint, f"train.max_steps={last + 20}")
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
    assert [row.step for row in read_metrics(run_folder)] == list(range(1, last + 21))
    (uploaded,) = (head.temp / "session_latest" / "runtime_resources" / "working_dir_files").glob("_ray_pkg_*/")
    n_bytes = sum(
        path.stat().st_size for path in uploaded.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    )
    assert n_bytes < 2**20, f"{n_bytes:,} bytes went up, before compression"
