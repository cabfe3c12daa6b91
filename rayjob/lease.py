"""A lease on a run's folder: one driver at a time writes it, on any file system, and one that was passed over stops.

1. The kernel's lock is asked first (`lock.py`). It is sure, but some network file systems do not carry it from one
   machine to another, or have none.
2. A lease is a file `lease/00000007.json`: the highest number is in force, and whoever holds it is that attempt.
3. Its holder changes it every BEAT_S. Who wants the run watches the content by its own monotonic clock, so no time of
   day and no clock of another machine decides anything.
4. A holder that said it is done, or whose process is gone from this machine, is passed over at once; one that could
   live elsewhere after SILENT_S without a change.
5. Passing over makes the next number, which of several drivers one can (O_EXCL), and removes the lower ones.
6. A holder whose file is gone has lost the run. Its workers ask their `Fence` before they write; its driver ends itself
   at the next beat, for whatever it did now would be done to another's run.
"""

import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rayjob.lock import LockedError, exclusive

logger = logging.getLogger(__name__)

BEAT_S = 1.0
SILENT_S = 10.0  # ten beats: on a machine with all CPUs busy a beat comes late
_POLL_S = 0.2
_GONE = (errno.ENOENT, errno.ESTALE)  # the second from network file systems


class LeaseLostError(RuntimeError):
    """Another driver has taken the run over, so nothing of it may be written here any more."""


@dataclass(frozen=True, slots=True)
class Fence:
    """What a driver hands to its workers: whether its lease is still in force."""

    path: Path

    @property
    def attempt(self) -> int:
        """The number of this driver among all that have had the run, from 1."""
        return int(self.path.stem)

    def check(self) -> None:
        """Raises LeaseLostError if another driver has the run. Opens a file: network file systems then look anew."""
        try:
            os.close(os.open(self.path, os.O_RDONLY))
        except OSError as error:
            if error.errno not in _GONE:
                raise
            raise LeaseLostError(
                f"attempt {self.attempt} has lost {self.path.parents[1]}: another driver took it over, since this one "
                f"gave no sign of life for {SILENT_S:.0f} s."
            ) from None


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a lease. `machine` is the boot and the process id namespace, in which (pid, started) is one process."""

    pid: int
    started: str
    machine: str
    host: str

    @classmethod
    def this_process(cls) -> "Holder":
        return cls(os.getpid(), _started(os.getpid()) or "", _this_machine(), socket.gethostname())

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def is_dead(self) -> bool:
        """Whether it is known to be gone; of another machine nothing is known."""
        return self.machine == _this_machine() and _started(self.pid) != self.started


def _this_machine() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> str | None:
    """Returns when a process was started, in ticks since boot; None if it is gone or only waited for."""
    try:
        # The second field is the program's name in brackets and may hold anything, brackets too.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


@contextmanager
def hold_run(run_folder: Path, what: str, on_loss: Callable[[LeaseLostError], None] | None = None) -> Iterator[Fence]:
    """Holds a run for the block and gives its fence.

    Args:
        run_folder: the run's folder; made if missing.
        what: the run in words, for messages.
        on_loss: called in another thread once the lease is lost; None ends this process.

    Raises:
        LockedError: a living driver has the run; the message names it.
    """
    with exclusive(run_folder / "driver.lock", what):
        lease = _Lease(_take(run_folder / "lease", what), on_loss or _end_process)
        try:
            yield lease.fence
        finally:
            lease.release()


def reserve(run_folder: Path, what: str) -> AbstractContextManager[None]:
    """Keeps every other driver of this machine out for the block, before anything slow is loaded to hold the run.

    Raises LockedError, naming it, if there is one already.
    """
    return exclusive(run_folder / "start.lock", what)


def _end_process(error: LeaseLostError) -> None:
    logger.error("%s It ends here, without another write.", error)
    os._exit(1)


class _Lease:
    """Keeps a lease alive from a thread of its own."""

    def __init__(self, path: Path, on_loss: Callable[[LeaseLostError], None]) -> None:
        self.fence = Fence(path)
        self._on_loss = on_loss
        self._holder = Holder.this_process()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Says that the run is free."""
        self._released.set()
        self._thread.join()
        with suppress(OSError):  # then the next driver waits for a sign of life that does not come
            _write(self.fence.path, self._holder, "released")

    def _beat(self) -> None:
        beats = 0
        while not self._released.wait(BEAT_S):
            beats += 1
            try:
                _write(self.fence.path, self._holder, f"beat {beats}")
                self.fence.check()
            except LeaseLostError as error:
                self._on_loss(error)
                return
            except OSError as error:  # storage that is full or away for a while; the next beat tells
                logger.warning("the lease of %s could not be renewed: %s", self.fence.path.parents[1], error)


def _write(path: Path, holder: Holder, state: str) -> None:
    """Writes over a lease that exists; one that is gone stays gone, and is noticed by the fence.

    Only its holder does, so there is nothing to be lost: a reader that sees half of it sees a change.
    """
    text = json.dumps({name: getattr(holder, name) for name in holder.__slots__} | {"state": state})
    try:
        descriptor = os.open(path, os.O_WRONLY)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return
    with os.fdopen(descriptor, "wb") as file:
        file.write(text.ljust(400).encode())  # one length, so that a shorter text leaves no tail of a longer one


def _take(folder: Path, what: str) -> Path:
    """Makes the next lease, once the one in force is free."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        leases = sorted(folder.glob("[0-9]*.json"))
        if leases:
            _await_free(leases[-1], what)
        path = folder / f"{int(leases[-1].stem) + 1 if leases else 1:08d}.json"
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            continue  # another driver was quicker: now it is the one to look at
        if max(folder.glob("[0-9]*.json")) != path:
            path.unlink(missing_ok=True)  # others were so much quicker that this number had been given up already
            continue
        _write(path, Holder.this_process(), "beat 0")
        for older in leases:
            older.unlink(missing_ok=True)
        return path


def _await_free(path: Path, what: str) -> None:
    """Returns once the lease is released, its holder dead, or nothing has changed in it for SILENT_S.

    Raises:
        LockedError: it has changed, so its holder lives.
    """
    seen = _read(path)
    holder, state = _parse(seen)
    if _is_free(holder, state):
        return
    logger.warning("%s was last in use by %s: watching for %.0f s whether it lives.", what, holder, SILENT_S)
    deadline_s = time.monotonic() + SILENT_S
    while time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        if (now := _read(path)) != seen:
            if _is_free(*_parse(now)):
                return
            raise LockedError(f"{what} is in use by {holder}: wait for it, or stop it first.")
    logger.warning("%s has given no sign of life: taking %s over from it.", holder, what)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None


def _parse(text: bytes | None) -> tuple[Holder | str, str]:
    """Returns holder and state of a lease; of one that is half written, or gone, what can be said."""
    if text is None:
        return "nobody", "released"
    try:
        fields = json.loads(text)
        state = str(fields.pop("state"))
        return Holder(**fields), state
    except (ValueError, KeyError, TypeError, AttributeError):
        return "another process", ""


def _is_free(holder: Holder | str, state: str) -> bool:
    return state == "released" or (isinstance(holder, Holder) and holder.is_dead)
