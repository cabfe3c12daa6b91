"""Where this machine's cluster keeps its state, which ports it uses, and the environment of its processes."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULT_PORTS = {"RAY_PORT": 6379, "DASHBOARD_PORT": 8265, "SERVE_PORT": 8000, "MLFLOW_PORT": 5000}
LOOPBACK = "127.0.0.1"
# Ray appends up to 62 characters to its folder for its sockets, and AF_UNIX allows 107.
LONGEST_TEMP_PATH = 107 - 62
# Every process that we start carries this variable, and its children inherit it, so that we know them again.
MARKER = "RAYJOB_CLUSTER"
ANSWER_TIMEOUT_S = 15  # for the dashboard, which may have lost its head
STOP_WAIT_S = 60  # what a job gets to save its checkpoint before it is killed


class SettingsError(ValueError):
    """Every problem of the environment variables, one a line."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One local cluster: its state folder identifies it."""

    state: Path
    temp: Path
    node_ip: str
    ports: Mapping[str, int]

    @property
    def ray_address(self) -> str:
        return f"{self.node_ip}:{self.ports['RAY_PORT']}"

    @property
    def dashboard_url(self) -> str:
        return f"http://{LOOPBACK}:{self.ports['DASHBOARD_PORT']}"

    @property
    def serve_url(self) -> str:
        return f"http://{LOOPBACK}:{self.ports['SERVE_PORT']}"

    @property
    def mlflow_url(self) -> str:
        return f"http://{LOOPBACK}:{self.ports['MLFLOW_PORT']}"

    @property
    def token_path(self) -> Path:
        return self.state / "token"

    def marker(self, part: str) -> str:
        """Returns the value of the marker variable for one part of the cluster, `head` or `mlflow`."""
        return f"{self.temp}/{part}"

    @property
    def ray_temp(self) -> Path:
        """Ray's own folder. Ray makes it writable for everybody, so it lies in one that is ours alone."""
        return self.temp / "ray"


def read_settings(environment: Mapping[str, str], running_ports: Mapping[str, int] | None = None) -> Settings:
    """Returns the settings that the environment variables ask for.

    Args:
        environment: the environment variables.
        running_ports: ports of what already runs, taken for those that no variable names.

    Raises:
        SettingsError: a port that is none, two equal ones, or a temporary folder too deep for Ray's sockets.
    """
    problems: list[str] = []
    defaults = {**DEFAULT_PORTS, **(running_ports or {})}
    ports = {name: read_port(environment, name, defaults[name], problems) for name in defaults}
    for name in ports:
        for other in ports:
            if name < other and ports[name] == ports[other]:
                problems.append(f"{name} and {other} are both {ports[name]}: give them different ports.")
    state = Path(environment.get("RAYJOB_STATE") or REPOSITORY / ".cluster").resolve()
    parent = Path(environment.get("RAY_TMPDIR") or "/tmp").resolve()
    digest = hashlib.sha256(str(state).encode()).hexdigest()[:8]
    temp = parent / f"rayjob-{os.getuid()}-{digest}"
    if len(str(temp / "ray")) > LONGEST_TEMP_PATH:
        problems.append(
            f"RAY_TMPDIR={parent} is too long for Ray's sockets: {temp}/ray may have {LONGEST_TEMP_PATH} "
            "characters; use a shorter folder such as /tmp."
        )
    if problems:
        raise SettingsError("\n".join(problems))
    return Settings(state, temp, environment.get("NODE_IP") or LOOPBACK, ports)


def read_port(environment: Mapping[str, str], name: str, default: int, problems: list[str]) -> int:
    """Returns the port that an environment variable asks for; a wrong one adds a line to `problems`."""
    text = environment.get(name) or str(default)
    if text.isascii() and text.isdigit() and 1024 <= int(text) <= 65535:
        return int(text)
    problems.append(f"{name}={text!r} must be a port number from 1024 to 65535.")
    return default


def prepare_folders(settings: Settings) -> None:
    """Makes the state and temporary folders, readable for this user alone, and the token.

    Raises:
        PermissionError: the temporary folder is somebody else's, or a link to where somebody chose.
    """
    for folder in (settings.state, settings.temp):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if settings.temp.is_symlink() or settings.temp.stat().st_uid != os.getuid():
        raise PermissionError(f"{settings.temp} was made by somebody else: set RAY_TMPDIR to another folder.")
    try:
        descriptor = os.open(settings.token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


def forget_other_clusters(environment: MutableMapping[str, str]) -> None:
    """Removes the variables that would send Ray's clients to another cluster, whatever address they are given."""
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        if address := environment.pop(name, None):
            print(f"{name}={address} is not used here: this folder has a head of its own.", flush=True)


def auth_headers(settings: Settings) -> dict[str, str]:
    """Returns the HTTP headers that the head lets in.

    Ray reads RAY_AUTH_MODE when it is imported, too early to be set by a program that uses it.
    """
    return {"Authorization": f"Bearer {settings.token_path.read_text()}"}


def replace_json(path: Path, contents: Any) -> None:
    """Replaces a file whole, so that no reader ever sees half of it."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(contents))
    temporary.replace(path)


def process_environment(settings: Settings, environment: Mapping[str, str], part: str) -> dict[str, str]:
    """Returns the environment of the processes of one part; workers and jobs inherit the head's."""
    # How fast Ray Train commits a report: 2 s by default, long enough to lose one to a preemption.
    # How long a node that got SIGTERM is drained: a pod is killed 5 s after it. More, where the cloud gives more.
    defaults = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.25", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "4"}
    fixed = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(settings.token_path),
        MARKER: settings.marker(part),
        # Parts of Ray Train look for "the" cluster of the machine and give up if they find two.
        "RAY_ADDRESS": settings.ray_address,
        "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
        "RAY_USAGE_STATS_ENABLED": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # Two fixed ports otherwise, so that a second cluster on the machine would log errors.
        "AUTOSCALER_METRIC_PORT": "0",
        "DASHBOARD_METRIC_PORT": "0",
    }
    if settings.node_ip == LOOPBACK:
        # Ray replaces a node's loopback address by its outer one, and its servers then listen there. With
        # "no multi-node clusters here", the default on Windows and macOS, it takes loopback at its word.
        fixed["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return {**defaults, **environment, **fixed}
