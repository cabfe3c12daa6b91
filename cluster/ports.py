"""Which ports are taken and by whom, which can be reached from other machines, and which answer.

The kernel's tables in /proc/net say it: trying to bind would trip over sockets in TIME_WAIT.
"""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.processes import PROC, look

LISTENING = "0A"
# A busy machine answers late, which is not yet a failure.
ANSWER_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket."""

    address: str
    port: int
    inode: str

    @property
    def is_loopback(self) -> bool:
        return self.address.removeprefix("::ffff:").startswith("127.") or self.address == "::1"


def parse_listeners(table: str) -> list[Listener]:
    """Returns the listening sockets of a table in the format of /proc/net/tcp or tcp6."""
    listeners = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if fields[3] == LISTENING:
            address, port = fields[1].split(":")
            listeners.append(Listener(decode_address(address), int(port, 16), fields[9]))
    return listeners


def decode_address(text: str) -> str:
    """Returns an address of /proc/net (32-bit words, little-endian, in hexadecimal) as people write it."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words))


def listeners() -> list[Listener]:
    """Returns every listening TCP socket of this machine (or container)."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    return [one for table in tables if table.exists() for one in parse_listeners(table.read_text())]


def sockets_of(pid: int) -> set[str]:
    """Returns the inodes of the sockets that a process holds; empty if it may not be looked into."""
    links = []
    try:
        for descriptor in (PROC / str(pid) / "fd").iterdir():
            links.append(os.readlink(descriptor))
    except OSError:
        pass
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def owner_of(listener: Listener) -> int | None:
    """Returns the id of a process that holds the socket, or None if it is not for us to see."""
    pids = (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())
    return next((pid for pid in pids if listener.inode in sockets_of(pid)), None)


def find_taken(ports: Mapping[str, int], ours: Iterable[int]) -> list[str]:
    """Returns a line for each port that a stranger listens on, with the variable that changes it.

    Args:
        ports: port by the name of its environment variable.
        ours: ids of our own processes, whose ports are no problem.
    """
    own_sockets = {inode for pid in ours for inode in sockets_of(pid)}
    problems = []
    taken = {one.port: one for one in listeners() if one.inode not in own_sockets}
    for name, port in ports.items():
        if port in taken:
            problems.append(
                f"port {port} is taken by {describe(owner_of(taken[port]))}: "
                f"set {name} to a free one, as in {name}={port + 1} bash cluster/run_all.sh"
            )
    return problems


def describe(pid: int | None) -> str:
    """Returns a process in words."""
    process = look(pid) if pid is not None else None
    if process is None:
        return "another process"
    words = [word.rpartition("/")[2] if word.startswith("/") else word for word in process.command.split()[:3]]
    return f"process {process.pid} ({' '.join(words)[:60]})"


def find_exposed(ours: Iterable[int]) -> list[str]:
    """Returns a line for each socket of ours that other machines can reach."""
    lines = []
    found = listeners()
    for pid in ours:
        sockets = sockets_of(pid)
        lines += [
            f"port {one.port} on {one.address}, {describe(pid)}"
            for one in found
            if one.inode in sockets and not one.is_loopback
        ]
    return lines


def answers(url: str, headers: Mapping[str, str] | None = None) -> bool:
    """Says whether a GET of `url` is answered with 200 now."""
    request = urllib.request.Request(url, headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False
