"""Ray nodes that come and go, each a process tree as a pod has it; nodes of one machine stand for machines."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import psutil

from tests.integration.jobs import wait_until

PREEMPTION_S = 5.0  # from SIGTERM to SIGKILL


class Node:
    """A Ray node of its own in the foreground, as a pod runs it; the first is the head."""

    def __init__(self, folder: Path, port: int, environment: dict[str, str], *, is_head: bool, n_cpus: int) -> None:
        place = (
            ["--head", f"--port={port}", "--include-dashboard=false"] if is_head else [f"--address=127.0.0.1:{port}"]
        )
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *place, f"--num-cpus={n_cpus}"]
        command += ["--node-ip-address=127.0.0.1", "--min-worker-port=0", "--max-worker-port=0"]
        command += [f"--temp-dir={folder}", "--object-store-memory=100000000", "--disable-usage-stats"]
        self.log = folder / f"node-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        wait_until(lambda: b"block forever" in self.log.read_bytes(), self.process, self.log)

    def processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def take_away(self, *others: subprocess.Popen[bytes]) -> None:
        """SIGTERM, and after the time that a pod has, SIGKILL to all that is still there."""
        known, ends_at_s = set(self.processes()), time.monotonic() + PREEMPTION_S
        self.process.terminate()
        while time.monotonic() < ends_at_s:
            known |= set(self.processes())
            time.sleep(0.05)
        self._kill(known | {psutil.Process(other.pid) for other in others})

    def close(self) -> None:
        self._kill(set(self.processes()))

    def _kill(self, processes: set[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(timeout=30)


class Cluster:
    """Nodes that are started one after another, in a short temporary folder for Ray's sockets.

    `environment` has what a driver needs to find the cluster.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.nodes: list[Node] = []
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "4",  # as cluster/ sets it for a pod
            "PYTHONPATH": os.getcwd(),
            "TMPDIR": str(self.folder),
            "RAY_ADDRESS": f"127.0.0.1:{self.port}",
        }

    def add(self, n_cpus: int) -> Node:
        self.nodes.append(Node(self.folder, self.port, self.environment, is_head=not self.nodes, n_cpus=n_cpus))
        return self.nodes[-1]

    def processes(self) -> list[psutil.Process]:
        return [process for node in self.nodes for process in node.processes()]

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for node in reversed(self.nodes):
            node.close()
        shutil.rmtree(self.folder, ignore_errors=True)
