"""Small files on storage: written whole or not at all, and a lock that names its holder."""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Writes a file under a temporary name and renames it, so a reader sees the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, {} if there is none."""
    try:
        loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return loaded


class LockedError(RuntimeError):
    """Another process holds the lock; the message names it."""


@contextlib.contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Holds the lock file `path`; the system frees it when its holder dies.

    Raises:
        LockedError: if another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise LockedError(f"{what} is in use by {holder}: wait for it, or stop it first.") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
