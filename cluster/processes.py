"""Which processes are ours, and ending them: read from /proc, since a process id alone may have been reused.

A process is ours if it is one that we recorded (same id, start time and boot), or carries our marker in its
environment, or descends from such a process. Ray's agents overwrite their environment with their title, so
an agent left over after its raylet died is known by its session and its title.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.settings import MARKER, replace_json

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """One process as /proc shows it; (pid, started_ticks, boot) names it for ever."""

    pid: int
    started_ticks: int
    boot: str
    parent: int
    session: int
    command: str

    def is_same(self, other: Process) -> bool:
        """Says whether both are one process, seen at two times."""
        return (self.pid, self.started_ticks, self.boot) == (other.pid, other.started_ticks, other.boot)


def look(pid: int) -> Process | None:
    """Returns the process with this id, or None if there is none or it is only a zombie."""
    try:
        # The second field is the program's name in brackets and may hold anything, brackets too.
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        command = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[19]), boot, int(fields[1]), int(fields[3]), command.strip())


def is_alive(process: Process) -> bool:
    """Says whether the recorded process still runs."""
    found = look(process.pid)
    return found is not None and found.is_same(process)


def all_processes() -> dict[int, Process]:
    """Returns every process that can be seen, by id."""
    pids = (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())
    return {process.pid: process for pid in pids if (process := look(pid)) is not None}


def carries_marker(pid: int, marker: str) -> bool:
    """Says whether the process was started with our marker in its environment."""
    return environment_of(pid).get(MARKER) == marker


def environment_of(pid: int) -> dict[str, str]:
    """Returns the variables that a process was started with; empty if it may not be looked into."""
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    return dict(line.split("=", 1) for line in os.fsdecode(environment).split("\0") if "=" in line)


def find_ours(marker: str, recorded: Iterable[Process] = ()) -> list[Process]:
    """Returns the processes of our cluster, children included; never the caller or its ancestors.

    Args:
        marker: the value of the marker variable.
        recorded: processes that we noted when we started them; those that are gone are left out.
    """
    recorded = list(recorded)
    running = all_processes()
    sessions = {process.session for process in recorded}
    ours = {
        process.pid
        for process in running.values()
        if any(process.is_same(one) for one in recorded)
        or carries_marker(process.pid, marker)
        or (process.session in sessions and process.command.startswith("ray::"))
    }
    while True:
        children = {process.pid for process in running.values() if process.parent in ours} - ours
        if not children:
            break
        ours |= children
    ours -= ancestors(os.getpid(), running)
    return [running[pid] for pid in sorted(ours)]


def ancestors(pid: int, running: Mapping[int, Process]) -> set[int]:
    """Returns the id itself and those of its parents."""
    found: set[int] = set()
    while pid in running and pid not in found:
        found.add(pid)
        pid = running[pid].parent
    return found


def send(processes: Iterable[Process], signal_number: int) -> None:
    """Sends a signal to those of the processes that still are what they were."""
    for process in processes:
        if is_alive(process):
            try:
                os.kill(process.pid, signal_number)
            except ProcessLookupError:
                continue


def end(processes: Iterable[Process], grace_s: float) -> None:
    """Asks the processes to end, kills those that have not after `grace_s`, and waits until all are gone."""
    processes = list(processes)
    send(processes, signal.SIGTERM)
    wait_gone(processes, grace_s)
    send(processes, signal.SIGKILL)
    wait_gone(processes, 10)


def wait_gone(processes: Iterable[Process], timeout_s: float) -> bool:
    """Waits until none of the processes is left; returns whether that came about."""
    deadline_s = time.monotonic() + timeout_s
    left = list(processes)
    while left := [process for process in left if is_alive(process)]:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def save_record(path: Path, processes: Iterable[Process], **facts: Any) -> None:
    """Notes started processes and what else the next call must know; replaces an old note whole."""
    replace_json(path, {**facts, "processes": [asdict(process) for process in processes]})


def load_record(path: Path) -> tuple[list[Process], dict[str, Any]]:
    """Returns the noted processes, dead ones too, and the facts; empty if there is no readable note."""
    try:
        facts = json.loads(path.read_text())
        processes = [Process(**one) for one in facts.pop("processes")]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return [], {}
    return processes, facts
