"""The documented commands as a user types them, on a tiny corpus and model.

Real: the scripts, the environment in .venv (made if missing), Ray, the job, MLflow, Serve, HTTP. Nothing is faked.
State, ports and storage are this module's own: a cluster of the developer's on the same checkout is left alone.
"""

import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster import ports, processes
from cluster.settings import DEFAULT_PORTS, REPOSITORY, read_settings
from model.checkpoint import list_checkpoints, step_of
from tests import kills

# The first test may have to install everything.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

WORDS = "the a old man woman sea house door said went came looked and but then never little dark light river".split()
TINY = [
    "data.source=text",
    "data.paths=[books]",
    "storage=store",
    "data.val_fraction=0.1",
    "tokenizer.vocab_size=300",
    "model.d_model=32",
    "model.n_layers=2",
    "model.n_heads=4",
    "model.n_kv_heads=2",
    "model.d_ff=64",
    "model.max_seq_len=64",
    "train.global_batch_size=8",
    "train.micro_batch_size=4",
    "train.eval_interval=20",
    "optimizer.warmup_steps=5",
]


@dataclass
class Machine:
    """A folder to call the scripts from, and the environment variables that keep this module's cluster apart."""

    folder: Path
    variables: dict[str, str]

    def start(self, script: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(REPOSITORY / "cluster" / script), *arguments],
            cwd=self.folder,
            env={**os.environ, **self.variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def call(self, script: str, *arguments: str) -> tuple[int, str]:
        """Returns the exit code and all output of a script."""
        process = self.start(script, *arguments)
        output, _ = process.communicate()
        return process.returncode, output

    def run_all(self, run_name: str, max_steps: int) -> tuple[int, str]:
        return self.call("run_all.sh", *self.arguments(run_name, max_steps))

    @staticmethod
    def arguments(run_name: str, max_steps: int) -> list[str]:
        return [*TINY, f"run_name={run_name}", f"train.max_steps={max_steps}"]

    def steps_of(self, run_name: str) -> list[int]:
        """Returns the steps of the run's metrics.csv."""
        lines = (self.folder / "store" / "runs" / run_name / "metrics.csv").read_text().splitlines()
        return [int(line.partition(",")[0]) for line in lines[1:]]

    def left_processes(self) -> list[processes.Process]:
        return [one for part in ("head", "mlflow") for one in self.processes_of(part)]

    def processes_of(self, part: str) -> list[processes.Process]:
        """Returns the processes of the Ray head and all that runs on it, `head`, or of the MLflow server, `mlflow`."""
        return processes.find_ours(read_settings(self.variables).marker(part))

    def parts(self, run_name: str) -> kills.Parts:
        """Returns the processes of the cluster by what they do for a run."""

        return kills.Parts(lambda: handles(self.left_processes()), self.folder / "store" / "runs" / run_name)

    def url(self, port: str, path: str) -> str:
        return f"http://127.0.0.1:{self.variables[port]}{path}"


def handles(found: list[processes.Process]) -> list[psutil.Process]:
    """Returns those of the processes that are still there, as what can be stopped and killed."""
    living = []
    for process in found:
        with suppress(psutil.NoSuchProcess):
            living.append(psutil.Process(process.pid))
    return living


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return found


def write_books(folder: Path) -> None:
    """Writes three books of 30 kB, each of its own random sentences."""
    folder.mkdir()
    for number in range(3):
        rng = random.Random(number)
        sentences = [" ".join(rng.choices(WORDS, k=rng.randint(5, 12))).capitalize() + "." for _ in range(700)]
        paragraphs = [" ".join(sentences[i : i + 5]) for i in range(0, len(sentences), 5)]
        (folder / f"{number}.txt").write_text("\n\n".join(paragraphs))


@contextmanager
def machine_in(folder: Path) -> Iterator[Machine]:
    """Offers a machine with a corpus in `folder`; afterwards all that was started on it is gone."""
    write_books(folder / "books")
    variables = {"RAYJOB_STATE": str(folder / "state")}
    variables |= {name: str(port) for name, port in zip(DEFAULT_PORTS, free_ports(4), strict=True)}
    machine = Machine(folder, variables)
    try:
        yield machine
    finally:
        machine.call("stop.sh")
    assert machine.left_processes() == []
    shutil.rmtree(read_settings(variables).temp, ignore_errors=True)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("run all") / "with space"
    folder.mkdir()
    with machine_in(folder) as machine:
        yield machine


@pytest.fixture(scope="module")
def first_run(machine: Machine) -> tuple[int, str, float]:
    """The first run of `tiny`: exit code, output, seconds without a possible installation."""
    assert machine.call("run_all.sh", "--help")[0] == 0  # installs if needed
    started_at_s = time.monotonic()
    exit_code, output = machine.run_all("tiny", 40)
    return exit_code, output, time.monotonic() - started_at_s


def last_json(output: str) -> dict[str, Any]:
    found = json.loads(output.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_first_run_trains_serves_and_prints_a_text(machine: Machine, first_run: tuple[int, str, float]) -> None:
    exit_code, output, _ = first_run
    assert exit_code == 0, output
    status = last_json(output)
    assert (status["stage"], status["step"]) == ("done", 40)
    assert machine.steps_of("tiny") == list(range(1, 41))
    text = output.partition("Text:")[2].partition("Service:")[0]
    assert text.strip()
    assert Path(status["best_checkpoint"], "COMPLETE").is_file()
    with urllib.request.urlopen(machine.url("MLFLOW_PORT", "/health")) as response:
        assert response.status == 200


def test_second_run_does_no_work_twice(machine: Machine, first_run: tuple[int, str, float]) -> None:
    run_folder = machine.folder / "store" / "runs" / "tiny"
    before = (run_folder / "metrics.csv").read_bytes()
    checkpoints = {path: path.stat().st_mtime_ns for path in run_folder.glob("step_*/COMPLETE")}
    started_at_s = time.monotonic()
    exit_code, output = machine.run_all("tiny", 40)
    elapsed_s = time.monotonic() - started_at_s
    assert exit_code == 0, output
    assert (run_folder / "metrics.csv").read_bytes() == before
    assert {path: path.stat().st_mtime_ns for path in run_folder.glob("step_*/COMPLETE")} == checkpoints
    assert "The service has" in output
    # It starts no head, trains nothing and deploys nothing. Seconds would depend on what else the machine does.
    assert elapsed_s < first_run[2]


def is_saved_from(run_folder: Path, step: int) -> bool:
    """Says whether there is a checkpoint of this step or a later one."""
    complete = list_checkpoints(run_folder)
    return bool(complete) and step_of(complete[-1]) >= step


def test_interrupted_run_saves_and_goes_on(machine: Machine, first_run: tuple[int, str, float]) -> None:
    """With the service of the first run still up, so that this also shows that both fit on the machine."""
    run = machine.start("run_all.sh", *machine.arguments("interrupted", 1500))
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("step "):
            break
    assert machine.run_all("interrupted", 1500)[0] == 1, "a second call while the first runs must be refused"
    run.send_signal(signal.SIGINT)
    output = run.communicate()[0]
    assert run.returncode == 3, output
    status = last_json(output)
    assert status["stage"] == "stopped"
    assert 0 < status["step"] < 1500
    assert Path(status["latest_checkpoint"]).name == f"step_{status['step']:08d}"

    # SIGTERM as a pod gets it: to its first process alone, here a shell with the command, and with five seconds left.
    script = shlex.join(["bash", str(REPOSITORY / "cluster" / "run_all.sh"), *machine.arguments("interrupted", 3000)])
    parts = machine.parts("interrupted")
    pod = subprocess.Popen(
        ["sh", "-c", script],
        cwd=machine.folder,
        env={**os.environ, **machine.variables},
        stdout=subprocess.PIPE,
        text=True,
    )
    kills.wait_until(kills.from_step(parts.run_folder, status["step"] + 5), "a further step")
    at_notice, noticed_at_s = kills.last_step(parts.run_folder), time.monotonic()
    pod.send_signal(signal.SIGTERM)
    kills.wait_until(lambda: is_saved_from(parts.run_folder, at_notice), "a save at the notice")
    saved_s = time.monotonic() - noticed_at_s
    output = pod.communicate()[0]
    ended_s = time.monotonic() - noticed_at_s
    print(f"saved after {saved_s:.1f} s, ended after {ended_s:.1f} s")
    assert saved_s < 10  # five on a machine of its own, which is what a pod has left
    status = last_json(output)
    assert status["stage"] == "stopped"

    steps = status["step"] + 20
    exit_code, output = machine.run_all("interrupted", steps)
    assert exit_code == 0, output
    assert machine.steps_of("interrupted") == list(range(1, steps + 1))


def test_only_loopback_listens(machine: Machine, first_run: tuple[int, str, float]) -> None:
    exposed = ports.find_exposed([process.pid for process in machine.left_processes()])
    # Ray Serve's replica opens one port on all interfaces, which asks for the token; nothing of ours can close it.
    assert [line for line in exposed if "ServeReplica" not in line] == []


@pytest.mark.parametrize("path", ["/api/jobs/", "/api/serve/applications/", "/api/v0/nodes"])
def test_dashboard_refuses_whoever_has_no_token(machine: Machine, first_run: tuple[int, str, float], path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(machine.url("DASHBOARD_PORT", path))
    assert caught.value.code in (401, 403)


def test_taken_port_is_named_before_anything_starts(tmp_path: Path, machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        other = Machine(machine.folder, {**machine.variables, "RAYJOB_STATE": str(tmp_path), "SERVE_PORT": port})
        for name, free in zip(("RAY_PORT", "DASHBOARD_PORT", "MLFLOW_PORT"), free_ports(3), strict=True):
            other.variables[name] = str(free)
        exit_code, output = other.run_all("tiny", 40)
    assert exit_code == 2
    assert f"port {port} is taken" in output
    assert "set SERVE_PORT" in output
    assert other.left_processes() == []


def test_wrong_config_is_refused_before_anything_starts(tmp_path: Path, machine: Machine) -> None:
    other = Machine(machine.folder, {**machine.variables, "RAYJOB_STATE": str(tmp_path)})
    exit_code, output = other.call("run_all.sh", "model.n_heeds=4")
    assert exit_code == 2
    assert "model.n_heads" in output
    assert other.left_processes() == []


def test_stop_leaves_no_process_and_may_be_repeated(machine: Machine, first_run: tuple[int, str, float]) -> None:
    exit_code, output = machine.call("stop.sh")
    assert exit_code == 0, output
    assert machine.left_processes() == []
    assert machine.call("stop.sh") == (0, "Nothing was running.\n")
