"""One `prepare` at a time on a storage.

The kernel frees a flock when its holder dies, so a dead holder needs no clock and no heartbeat to be taken
over. Some network file systems have no flock: there two drivers would do the work twice, but not wrongly,
since every file is a pure function of its inputs and appears by rename.
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

from rayjob.corpus.errors import PrepareCancelled

logger = logging.getLogger(__name__)

POLL_S = 0.2


@contextmanager
def prepare_lock(storage: Path, is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """Holds `<storage>/prepare.lock`; waits for a living holder, whose name is logged.

    Raises:
        PrepareCancelled: the caller asked to stop while waiting.
    """
    storage.mkdir(parents=True, exist_ok=True)
    with (storage / "prepare.lock").open("a+", encoding="utf-8") as file:
        _acquire(file, is_cancelled)
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _acquire(file: TextIO, is_cancelled: Callable[[], bool]) -> None:
    is_named = False
    while not _try_acquire(file):
        if not is_named:
            file.seek(0)
            logger.warning(
                "%s is preparing this storage: waiting for it to end.", file.read() or "another process"
            )
            is_named = True
        if is_cancelled():
            raise PrepareCancelled("Stopped while waiting for another prepare on the same storage.")
        time.sleep(POLL_S)


def _try_acquire(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        logger.warning("%s cannot be locked (%s): start no second prepare on this storage.", file.name, error)
    return True
