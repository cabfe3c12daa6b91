"""Calls of the product's own command line: checking a config, asking for the status of a run.

The cluster scripts never import the product: they know it by its commands, as any user does.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.restart_policy import Budgets
from cluster.settings import REPOSITORY

DEFAULT_CONFIG = REPOSITORY / "rayjob" / "configs" / "small.yaml"


class CommandError(Exception):
    """A command of the product failed; it has said why itself."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Run:
    """A checked configuration: the same from whichever folder it is used."""

    name: str
    folder: str
    storage: Path
    arguments: tuple[str, ...]
    budgets: Budgets

    @property
    def key(self) -> str:
        """The name of this run's files in the state folder: another run folder has another."""
        return f"{self.name}-{hashlib.sha256(self.folder.encode()).hexdigest()[:16]}"


def split_arguments(arguments: Sequence[str], caller: Path) -> tuple[Path, list[str]]:
    """Returns the config file and the overrides of `[CONFIG] [KEY=VALUE …]`."""
    if arguments and ("=" not in arguments[0] or (caller / arguments[0]).is_file()):
        return caller / arguments[0], list(arguments[1:])
    return DEFAULT_CONFIG, list(arguments)


def check_config(config: Path, overrides: Sequence[str], caller: Path) -> Run:
    """Returns the run that the config describes, with every relative path in it made absolute.

    Raises:
        CommandError: the config has problems, and they have been printed.
    """
    arguments = ("--config", str(config.absolute()), *overrides)
    resolved = json.loads(call("show-config", *arguments, "--json", caller=caller))
    folder = str(resolved["derived"]["run_folder"])
    return Run(
        name=resolved["run_name"],
        folder=absolute(folder, caller),
        storage=Path(absolute(str(resolved["derived"]["storage_folder"]), caller)),
        arguments=(*arguments, *absolute_overrides(resolved, caller)),
        budgets=Budgets(resolved["failure"]["max_failures"], resolved["failure"]["max_preemptions"]),
    )


def absolute_overrides(resolved: dict[str, Any], caller: Path) -> list[str]:
    """Returns overrides that pin the config's paths: a job runs in another folder than its caller's."""
    overrides = [f"storage={json.dumps(absolute(resolved['storage'], caller))}"]
    paths = resolved.get("data", {}).get("paths")
    if paths:
        paths = [absolute(path, caller) for path in paths]
        overrides.append(f"data.paths={json.dumps(paths, ensure_ascii=False)}")
    return overrides


def absolute(path: str, caller: Path) -> str:
    """Returns a path as seen from anywhere; an address such as hf://… stays as it is."""
    return path if "://" in path else os.path.abspath(caller / Path(path).expanduser())


def read_status(run: Run, caller: Path) -> dict[str, Any]:
    """Returns the object that `status` prints.

    Raises:
        CommandError: it failed, and has said why.
    """
    status = json.loads(call("status", *run.arguments, "--json", caller=caller))
    assert isinstance(status, dict)
    return status


def call(command: str, *arguments: str, caller: Path) -> str:
    """Returns what a command of the product prints; its errors go where ours go.

    Raises:
        CommandError: its exit code was not 0.
    """
    # -P: a folder called `model` where the user happens to be must not stand in for ours.
    line = [sys.executable, "-P", "-m", "rayjob", command, *arguments]
    finished = subprocess.run(line, cwd=caller, stdout=subprocess.PIPE, text=True)
    if finished.returncode != 0:
        raise CommandError(finished.returncode)
    return finished.stdout.splitlines()[-1]
