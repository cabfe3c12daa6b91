"""Starts the local Ray head, joins it if it is up, and clears away what a dead one left behind."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from cluster import ports, processes
from cluster.settings import LOOPBACK, Settings, auth_headers, prepare_folders, process_environment

# Without one of these there is no cluster; Ray does not start them again.
CORE = ("gcs/gcs_server", "raylet/raylet", "dashboard/dashboard.py")
START_TIMEOUT_S = 180
READY_TIMEOUT_S = 120  # generous: with all CPUs busy elsewhere everything is slow, but not broken
HEAD_PORTS = ("RAY_PORT", "DASHBOARD_PORT", "SERVE_PORT")


class HeadError(Exception):
    """Why there is no usable head, and what to do."""


def record_path(settings: Settings) -> Path:
    return settings.state / "head.json"


def running_ports(settings: Settings) -> dict[str, int]:
    """Returns the ports of our running head, or nothing if there is none."""
    recorded, facts = processes.load_record(record_path(settings))
    return dict(facts["ports"]) if is_complete(recorded) else {}


def identity(settings: Settings) -> str:
    """Returns what tells our running head from every other that was or will be; empty if there is none."""
    recorded, _ = processes.load_record(record_path(settings))
    return " ".join(f"{one.boot}/{one.pid}/{one.started_ticks}" for one in recorded if CORE[0] in one.command)


def is_complete(recorded: list[processes.Process]) -> bool:
    """Says whether all that a head consists of still runs."""
    return all(
        any(program in process.command and processes.is_alive(process) for process in recorded) for program in CORE
    )


def ensure_head(settings: Settings) -> None:
    """Joins our head if it is up, else clears what is left of an old one and starts a new one.

    Raises:
        HeadError: it runs with other settings, does not answer, or could not be started.
    """
    prepare_folders(settings)
    recorded, facts = processes.load_record(record_path(settings))
    if is_complete(recorded):
        check_same(settings, facts)
        wait_ready(settings)
        print(f"Joined the running Ray head (dashboard {settings.dashboard_url}).", flush=True)
        return
    clear(settings)
    start(settings)
    wait_ready(settings)
    print(f"Started a Ray head (dashboard {settings.dashboard_url}).", flush=True)


def check_same(settings: Settings, facts: dict[str, object]) -> None:
    """Raises HeadError if the running head differs from what is asked for."""
    differences = [
        f"{name} is {facts[name]}, not {wanted}" for name, wanted in facts_of(settings).items() if facts[name] != wanted
    ]
    if differences:
        raise HeadError(
            "the Ray head of this folder runs with other settings: " + "; ".join(differences) + ". "
            "Ask for the same, or end it first: bash cluster/stop.sh"
        )


def facts_of(settings: Settings) -> dict[str, object]:
    """Returns what a running head cannot change."""
    return {
        "ports": {name: settings.ports[name] for name in HEAD_PORTS},
        "node_ip": settings.node_ip,
        "ray": importlib.metadata.version("ray"),
    }


def clear(settings: Settings) -> None:
    """Ends what is left of a head that died, and removes its files but the newest session's logs."""
    recorded, _ = processes.load_record(record_path(settings))
    left = processes.find_ours(settings.marker("head"), recorded)
    if recorded or left:
        print(f"Clearing away a Ray head that is gone ({len(left)} processes left).", flush=True)
    processes.end(left, grace_s=1)
    record_path(settings).unlink(missing_ok=True)
    sessions = sorted(settings.ray_temp.glob("session_2*"))
    for session in sessions[:-1]:
        shutil.rmtree(session, ignore_errors=True)
    (settings.ray_temp / "ray_current_cluster").unlink(missing_ok=True)


def stop(settings: Settings) -> int:
    """Ends the head and all that runs on it; returns how many processes that were."""
    recorded, _ = processes.load_record(record_path(settings))
    ours = processes.find_ours(settings.marker("head"), recorded)
    raylets = [process for process in ours if "raylet/raylet" in process.command]
    # The raylet first: it ends its workers, and hangs if the others are gone before it.
    processes.end(raylets, grace_s=5)
    processes.send(ours, signal.SIGKILL)
    processes.wait_gone(ours, 10)
    record_path(settings).unlink(missing_ok=True)
    return len(ours)


def start(settings: Settings) -> None:
    """Runs `ray start --head` and notes the processes that it leaves running.

    Raises:
        HeadError: it failed; the message has the end of its output.
    """
    check_room(settings)
    log = settings.state / "head.log"
    command = [ray_python(settings), "-m", "ray.scripts.scripts", "start", "--head", *arguments(settings)]
    variables = process_environment(settings, os.environ, "head")
    with log.open("w") as output:
        # A session of its own, so that Ctrl-C in the terminal does not reach Ray.
        process = subprocess.Popen(
            command, env=variables, cwd=settings.state, stdout=output, stderr=output, start_new_session=True
        )
    try:
        returncode = process.wait(START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        returncode = None
    ours = [one for one in processes.all_processes().values() if one.session == process.pid]
    processes.save_record(record_path(settings), ours, **facts_of(settings))
    if returncode != 0 or not is_complete(ours):
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        stop(settings)
        raise HeadError(f"`{shlex.join(command)}` failed. The end of {log}:\n{tail}")


def arguments(settings: Settings) -> list[str]:
    """Returns the options of `ray start --head`."""
    return [
        f"--node-ip-address={settings.node_ip}",
        f"--port={settings.ports['RAY_PORT']}",
        f"--dashboard-host={LOOPBACK}",
        f"--dashboard-port={settings.ports['DASHBOARD_PORT']}",
        f"--temp-dir={settings.ray_temp}",
        "--disable-usage-stats",
        # Ray's fixed defaults would clash with a second cluster on the machine; 0 means any free port, and
        # the client server, which we do not use but cannot turn off, wants a number.
        "--dashboard-agent-listen-port=0",
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--ray-client-server-port={free_port()}",
    ]


def free_port() -> int:
    """Returns a port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def ray_python(settings: Settings) -> str:
    """Returns the path of our Python by which Ray can start workers.

    Ray puts it unquoted into shell commands, so that with a space in the repository's path every worker
    would fail to start: such an environment is reached through a link beside Ray's temporary folder.
    """
    if shlex.quote(sys.executable) == sys.executable:
        return sys.executable
    link = settings.temp / "venv"
    if not (link.is_symlink() and link.readlink() == Path(sys.prefix)):
        link.unlink(missing_ok=True)
        link.symlink_to(sys.prefix)
    return str(link / "bin" / "python")


def check_room(settings: Settings) -> None:
    """Raises HeadError if Ray's temporary folder has no room for its logs and objects."""
    free_gib = shutil.disk_usage(settings.temp).free / 2**30
    if free_gib < 1:
        raise HeadError(
            f"{settings.temp} has {free_gib:.2f} GiB free and Ray needs 1 GiB: free some, or set RAY_TMPDIR."
        )


def wait_ready(settings: Settings) -> None:
    """Waits until the head's job API answers.

    Raises:
        HeadError: a part of it died, or it does not answer although all parts run.
    """
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while not answers(settings):
        recorded, _ = processes.load_record(record_path(settings))
        if not is_complete(recorded):
            raise HeadError(f"the Ray head died at once; its logs: {settings.ray_temp}/session_latest/logs")
        if time.monotonic() > deadline_s:
            raise HeadError(
                f"the Ray head runs but {settings.dashboard_url} has not answered for {READY_TIMEOUT_S} s: "
                "bash cluster/stop.sh ends it, then try again."
            )
        time.sleep(0.2)


def answers(settings: Settings) -> bool:
    """Says whether the head's job API answers now."""
    return ports.answers(f"{settings.dashboard_url}/api/jobs/", auth_headers(settings))


def warn_exposed(settings: Settings) -> None:
    """Warns of every socket of the head and of what runs on it that other machines can reach.

    With NODE_IP on loopback that is one, which Ray Serve's replicas open on all interfaces whatever they are told;
    it refuses whoever has no token.
    """
    ours = [process.pid for process in processes.find_ours(settings.marker("head"))]
    for line in ports.find_exposed(ours):
        print(f"warning: other machines can reach {line}: without the cluster's token it refuses them.")
