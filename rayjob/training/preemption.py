"""A request to stop: from a signal in the driver to all workers at the end of the same step.

Signals reach the driver's main thread only, and training runs elsewhere. So the driver tells a small actor, a thread
in rank 0 waits on it, and rank 0's wish travels with the all-reduce of the step.
"""

import asyncio
import logging
import threading
import time
from typing import Any

import ray

logger = logging.getLogger(__name__)

_HEARING_TIMEOUT_S = 30.0  # a worker that trains hears at once; a starved machine is given time


@ray.remote(num_cpus=0)
class StopSignal:
    """Holds one bit for the life of the driver; `wait` returns when it is set."""

    def __init__(self) -> None:
        self._requested, self._heard = asyncio.Event(), asyncio.Event()
        self._has_listener = False

    async def request(self) -> bool:
        """Returns True when rank 0 has heard, and False at once if no worker has listened yet."""
        self._requested.set()
        if not self._has_listener:
            return False
        return await self._heard.wait()

    async def wait(self) -> None:
        self._has_listener = True
        await self._requested.wait()

    async def acknowledge(self) -> None:
        self._heard.set()


class StopRequest:
    """The driver's request; unheard when no worker trains: they are starting, or Ray waits for room for them."""

    def __init__(self, signal: Any) -> None:
        self._answer = signal.request.remote()
        self._asked_at_s = time.monotonic()

    @property
    def is_unheard(self) -> bool:
        if ray.wait([self._answer], timeout=0)[0]:
            try:
                return not ray.get(self._answer)
            except ray.exceptions.RayError:  # the actor is gone: whoever listens to it stops for that (StopListener)
                return False
        return time.monotonic() - self._asked_at_s >= _HEARING_TIMEOUT_S


class StopListener:
    """Rank 0's ear: `is_requested` costs nothing to read in the loop."""

    def __init__(self, signal: Any) -> None:
        self._requested = threading.Event()
        threading.Thread(target=self._listen, args=(signal,), name="stop-listener", daemon=True).start()

    @property
    def is_requested(self) -> bool:
        return self._requested.is_set()

    def _listen(self, signal: Any) -> None:
        try:
            ray.get(signal.wait.remote())
            signal.acknowledge.remote()
        except ray.exceptions.RayError:  # whatever it is, no request to stop could come through any more
            logger.warning("The driver is gone, so nobody waits for this run any more: it stops after this step.")
        self._requested.set()
