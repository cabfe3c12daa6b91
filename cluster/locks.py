"""Locks between calls of the scripts on one machine; the system drops them when their holder dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class BusyError(Exception):
    """Another call holds the lock; its process id is in the message."""


@contextmanager
def hold(path: Path, *, wait: bool, purpose: str) -> Iterator[None]:
    """Holds the lock file while the body runs.

    Args:
        path: the lock file, made if missing and never removed: removing it would split the lock in two.
        wait: whether to wait for another holder.
        purpose: what the lock stands for, for the message.

    Raises:
        BusyError: another process holds it and `wait` is false.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            if not wait:
                raise BusyError(f"{purpose} is at work already, as process {holder}.") from None
            print(f"Waiting for process {holder} ({purpose}).", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def holder_of(path: Path) -> int | None:
    """Returns the process that holds the lock; None if there is none, or it took the lock this very moment."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = file.read().strip()
        else:
            return None
    return int(pid) if pid.isdigit() and _has_open(int(pid), path) else None


def _has_open(pid: int, path: Path) -> bool:
    """Says whether the id in a lock file is that of its holder, and not of a holder before it."""
    try:
        return any(descriptor.samefile(path) for descriptor in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
