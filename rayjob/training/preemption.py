"""A request to stop: from a signal in the driver to all workers at the end of the same step.

Signals reach the driver's main thread only, and training runs elsewhere. So the driver tells a small actor, a thread
in rank 0 waits on it, and rank 0's wish travels with the all-reduce of the step.
"""

import asyncio
import logging
import threading
from typing import Any

import ray

logger = logging.getLogger(__name__)


@ray.remote(num_cpus=0)
class StopSignal:
    """Holds one bit for the life of the driver; `wait` returns when it is set."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def request(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


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
        except ray.exceptions.RayActorError:
            logger.warning("The driver is gone, so nobody waits for this run any more: it stops after this step.")
        self._requested.set()
