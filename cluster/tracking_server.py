"""Starts the MLflow server that shows the runs. The training job writes to the same store by itself."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from cluster import ports, processes
from cluster.settings import LOOPBACK, Settings, process_environment

START_TIMEOUT_S = 180
NICENESS = 19
SQLITE = "sqlite:///"


class TrackingServerError(Exception):
    """Why the MLflow server is not up, in one line."""


def record_path(settings: Settings) -> Path:
    return settings.state / "mlflow.json"


def running_ports(settings: Settings) -> dict[str, int]:
    """Returns the port of our running server, or nothing if there is none."""
    recorded, facts = processes.load_record(record_path(settings))
    return {"MLFLOW_PORT": facts["port"]} if any(map(processes.is_alive, recorded)) else {}


def launch(settings: Settings, storage: Path) -> bool:
    """Has a server show the store under `storage`; returns whether it is a new one, which does not answer yet."""
    recorded, facts = processes.load_record(record_path(settings))
    if any(map(processes.is_alive, recorded)):
        if (facts["storage"], facts["port"]) == (str(storage), settings.ports["MLFLOW_PORT"]):
            return False
        print(f"The MLflow server showed {facts['storage']}; it now shows {storage}.", flush=True)
    stop(settings)
    start(settings, storage)
    return True


def stop(settings: Settings) -> int:
    """Ends the server if it is up; returns how many processes that were."""
    recorded, _ = processes.load_record(record_path(settings))
    ours = processes.find_ours(settings.marker("mlflow"), recorded)
    processes.end(ours, grace_s=5)
    record_path(settings).unlink(missing_ok=True)
    return len(ours)


def start(settings: Settings, storage: Path) -> None:
    """Starts the server and notes its process."""
    folder = storage / "mlflow"
    folder.mkdir(parents=True, exist_ok=True)
    with log_path(settings).open("w") as output:
        server = subprocess.Popen(
            command(settings, folder),
            env=environment(settings),
            cwd=settings.state,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    _yield_cores(server.pid)
    process = processes.look(server.pid)
    facts = {"storage": str(storage), "port": settings.ports["MLFLOW_PORT"]}
    processes.save_record(record_path(settings), [process] if process else [], **facts)


def _yield_cores(pid: int) -> None:
    """Lets a server and what it starts yield to the training: one that comes back in a run would slow its steps."""
    os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
    # Where Linux shares the cores by session, a process yields to others of its session only, and this one has its own.
    with contextlib.suppress(OSError):  # such sharing is not built in
        Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS))


def log_path(settings: Settings) -> Path:
    return settings.state / "mlflow.log"


def await_ready(settings: Settings) -> None:
    """Waits until a new server answers.

    A job must not start before: two processes that both set up a fresh sqlite store at once break each other
    ("table … already exists").

    Raises:
        TrackingServerError: it ended or did not answer in time.
    """
    deadline_s = time.monotonic() + START_TIMEOUT_S
    storage = processes.load_record(record_path(settings))[1].get("storage")
    while not ports.answers(f"{settings.mlflow_url}/health"):
        if not running_ports(settings) or time.monotonic() > deadline_s:
            stop(settings)
            raise TrackingServerError(_reason(settings, storage))
        time.sleep(0.1)
    print(f"Started the MLflow server ({settings.mlflow_url}).", flush=True)


def _reason(settings: Settings, storage: str | None) -> str:
    lines = [line for line in log_path(settings).read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    last = [*lines, *errors][-1].strip() if lines else "it said nothing"
    return (
        f"the MLflow server did not come up: {last} ({log_path(settings)} has all of it). If its store "
        f"{storage}/mlflow/mlflow.db is damaged, move it away: a new one is made."
    )


def command(settings: Settings, folder: Path) -> list[str]:
    """Returns the command that serves the store in `folder` on loopback."""
    store = f"{folder}/mlflow.db".replace("%", "%25").replace("?", "%3F")  # the two that mean something in a URI
    return [
        *(sys.executable, "-m", "mlflow", "server"),
        *("--backend-store-uri", f"{SQLITE}{store}"),
        *("--artifacts-destination", str(folder / "artifacts")),
        *("--host", LOOPBACK),
        *("--port", str(settings.ports["MLFLOW_PORT"])),
        *("--workers", "1"),
    ]


def environment(settings: Settings) -> dict[str, str]:
    """Returns the server's environment."""
    return {
        **process_environment(settings, os.environ, "mlflow"),
        # The job queue of its language-model features: seven more processes, 1.5 GB of memory, no use here.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
