"""Small writes to the run folder, in order, in a thread: no step waits for a storage that is slow, full or hangs."""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


class BackgroundFiles:
    """Carries out writes one after another; one that fails is tried again until it succeeds, and those behind it wait.

    So every write must be safe to repeat. A write that raises another error than OSError is the last one, and every
    call from then on raises that error.
    """

    def __init__(self) -> None:
        self._writes: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._changed = threading.Condition()
        self._submitted, self._done = 0, 0
        self._error: OSError | None = None
        self._end: Exception | None = None
        threading.Thread(target=self._run, name="background-files", daemon=True).start()

    def submit(self, write: Callable[[], None]) -> None:
        """Queues a write and returns at once."""
        with self._changed:
            self._raise_end()
            self._submitted += 1
        self._writes.put(write)

    def flush(self) -> None:
        """Waits until all that was submitted is done.

        Raises:
            OSError: the write at the head of the queue fails at present; it goes on being tried.
        """
        with self._changed:
            target = self._submitted
            self._changed.wait_for(lambda: self._done >= target or self._error is not None or self._end is not None)
            self._raise_end()
            if self._done < target:
                raise OSError(f"the run's small files cannot be written: {self._error}") from self._error

    def _run(self) -> None:
        try:
            while True:
                self._carry_out(self._writes.get())
        except Exception as error:  # it belongs to whoever submits next
            with self._changed:
                self._end = error
                self._changed.notify_all()

    def _carry_out(self, write: Callable[[], None]) -> None:
        while not self._is_done(write):
            threading.Event().wait(_RETRY_S)
        with self._changed:
            self._done += 1
            self._changed.notify_all()

    def _raise_end(self) -> None:
        if self._end is not None:
            raise self._end

    def _is_done(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except OSError as error:
            if self._error is None:
                logger.warning("%s The rows of metrics.csv wait in memory; training goes on.", error)
            self._set_error(error)
            return False
        if self._error is not None:
            logger.warning("the run folder can be written again.")
            self._set_error(None)
        return True

    def _set_error(self, error: OSError | None) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()
