"""Joins this machine to the cluster of a head elsewhere. Called by worker.sh.

The node runs as a child. SIGTERM, the notice of a pod, is passed on to it, and Ray then drains the node by itself; a
notice that only the metadata server of AWS or Google Cloud gives is turned into a drain here. The job saves in both.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from cluster import head, spot
from cluster.settings import Settings, SettingsError, prepare_folders, process_environment, read_settings
from cluster.shell_parent import follow_shell

USAGE = """usage: bash cluster/worker.sh HEAD_IP:PORT TOKEN_FILE

HEAD_IP:PORT is what cluster/head.sh printed on the head; TOKEN_FILE a copy of its token.
Environment: NODE_IP, the address of this machine that the head can reach (default: found by Ray)."""


def fail(message: str) -> NoReturn:
    """Ends with the message and the exit code of bad usage."""
    print(message, file=sys.stderr)
    sys.exit(2)


def main(arguments: Sequence[str]) -> int:
    """Runs a Ray node in the foreground and returns its exit code; exits with 2 if that is not possible."""
    if len(arguments) != 2 or ":" not in arguments[0]:
        fail(USAGE)
    address, token = arguments[0], Path(os.environ.get("CALLER_DIR", ""), arguments[1])
    if not token.is_file():
        fail(f"error: {token} is not a file: copy the head's .cluster/token there.")
    try:
        settings = dataclasses.replace(read_settings(os.environ), node_ip=os.environ.get("NODE_IP", ""))
        prepare_folders(settings)
    except (SettingsError, OSError) as error:
        fail(f"error: {error}")
    variables = process_environment(settings, os.environ, "head")
    variables["RAY_AUTH_TOKEN_PATH"] = str(token)
    command = [
        head.ray_python(settings),
        "-m",
        "ray.scripts.scripts",
        "start",
        f"--address={address}",
        "--block",
    ]
    command += [f"--temp-dir={settings.ray_temp}", "--dashboard-agent-listen-port=0"]
    command += [f"--node-ip-address={settings.node_ip}"] if settings.node_ip else []
    return run_node(settings, command, variables)


def run_node(settings: Settings, command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Runs the command, which is a Ray node, until it ends; sees to it that a notice drains it first."""
    node = subprocess.Popen(command, env=variables)

    def pass_on(number: int, _frame: FrameType | None) -> None:
        node.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    follow_shell()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal gives it to the node as well
    stop = spot.watch_clouds(variables, lambda notice: drain(settings, notice))
    try:
        return node.wait()
    finally:
        stop.set()


def drain(settings: Settings, notice: spot.Notice) -> None:
    """Drains this machine's node; where that fails, its loss will be noticed like any other."""
    print(f"Preemption notice from {notice.source}: {notice.grace_s:.0f} s left. Draining the node.", flush=True)
    try:
        spot.drain(spot.find_node(settings), notice)
    except spot.SpotError as error:
        print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
