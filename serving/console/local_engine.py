"""The service's engine in this process, for code that is no coroutine."""

import asyncio
import os
from collections.abc import Generator, Sequence

from serving.engine.engine import Engine, IndexedDelta, RequestStream
from serving.engine.loading import ServedModel
from serving.engine.sequence import SequenceSpec
from serving.engine.weights import decoding_dtype


class LocalEngine:
    """An engine and the event loop that its streams need. Ctrl-C ends a text and leaves the engine running."""

    def __init__(self, served: ServedModel, *, num_slots: int, max_waiting: int = 0) -> None:
        self.served = served
        self._engine = Engine(
            served,
            num_slots=num_slots,
            max_waiting=max_waiting,
            dtype=decoding_dtype("auto", served.model),  # this and the next as the service's, for the same text
            num_threads=len(os.sched_getaffinity(0)),
        )
        self._runner = asyncio.Runner()

    def submit(self, specs: Sequence[SequenceSpec]) -> RequestStream:
        """Puts the sequences of one request in line; read the stream by `deltas`."""

        async def submit() -> RequestStream:
            return self._engine.submit(specs)

        return self._runner.run(submit())

    def deltas(self, stream: RequestStream) -> Generator[IndexedDelta, None, None]:
        """Yields the deltas of a request; leaving the loop early, by Ctrl-C too, cancels it."""

        async def following() -> IndexedDelta | None:
            return await anext(stream, None)

        try:
            while (delta := self._runner.run(following())) is not None:
                yield delta
        finally:
            stream.cancel()

    def close(self) -> None:
        """Ends the engine's threads once what runs is finished."""
        self._engine.close()
        self._engine.join()
        self._runner.close()
