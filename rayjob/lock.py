"""Locks that name their holder: one `prepare` at a time on a storage, one driver at a time on a run.

The kernel frees a flock when its holder dies, so a dead holder needs no clock and no heartbeat to be taken over. Some
network file systems have no flock: there a warning says so, and a driver has its lease beside it (`lease.py`).
"""

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)

POLL_S = 0.2


class LockedError(RuntimeError):
    """Another process holds the lock; the message names it."""


class WaitCancelled(RuntimeError):
    """The caller asked to stop before the lock was free."""


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Holds the lock file `path` for the block.

    Raises:
        LockedError: a living process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        if not _try_acquire(file):
            raise LockedError(f"{what} is in use by {_holder(file)}: wait for it, or stop it first.")
        _sign(file)
        yield


@contextmanager
def exclusive_after_wait(path: Path, what: str, is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """Holds the lock file `path` for the block; waits for a living holder, whose name is logged.

    Raises:
        WaitCancelled: `is_cancelled` turned true while waiting.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        is_named = False
        while not _try_acquire(file):
            if not is_named:
                logger.warning("%s is in use by %s: waiting for it to end.", what, _holder(file))
                is_named = True
            if is_cancelled():
                raise WaitCancelled(f"stopped while waiting for {what}, in use by {_holder(file)}.")
            time.sleep(POLL_S)
        _sign(file)
        yield


def _holder(file: TextIO) -> str:
    file.seek(0)
    return file.read() or "another process"


def _sign(file: TextIO) -> None:
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()


def _try_acquire(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        logger.warning("%s keeps no second process out: its file system has no locks (%s).", file.name, error)
    return True
