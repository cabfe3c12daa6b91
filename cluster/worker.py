"""Joins this machine to the cluster of a head elsewhere. Called by worker.sh."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cluster import head
from cluster.settings import SettingsError, prepare_folders, process_environment, read_settings

USAGE = """usage: bash cluster/worker.sh HEAD_IP:PORT TOKEN_FILE

HEAD_IP:PORT is what cluster/head.sh printed on the head; TOKEN_FILE a copy of its token.
Environment: NODE_IP, the address of this machine that the head can reach (default: found by Ray)."""


def fail(message: str) -> NoReturn:
    """Ends with the message and the exit code of bad usage."""
    print(message, file=sys.stderr)
    sys.exit(2)


def main(arguments: Sequence[str]) -> NoReturn:
    """Turns into a Ray node that runs in the foreground; exits with 2 if that is not possible."""
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
    # In place of this process: a signal to it must reach Ray, which then drains the node.
    os.execve(command[0], command, variables)


if __name__ == "__main__":
    main(sys.argv[1:])
