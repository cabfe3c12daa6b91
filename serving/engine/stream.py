"""What a request receives from the engine: deltas, in the order of their making, across the border of threads."""

import asyncio
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass

from serving.engine.sequence import Delta, PromptScores


class SequenceFailed(RuntimeError):
    """Decoding one sequence raised; the cause is in the log."""


class RequestCancelled(RuntimeError):
    """The request was cancelled before all of its sequences were finished."""


@dataclass(frozen=True, slots=True)
class IndexedDelta:
    """A delta, the sequence of the request that it belongs to, and when it was made in `time.monotonic()`."""

    index: int
    delta: Delta
    made_at_s: float


@dataclass(frozen=True, slots=True)
class IndexedScores:
    """The scores of a sequence's prompt; `is_last` when no token follows."""

    index: int
    scores: PromptScores
    is_last: bool


Event = IndexedDelta | IndexedScores | RuntimeError


class RequestStream:
    """Deltas of all sequences of one request in the order of their making; consumed by one asyncio task.

    Attributes:
        started_at_s: `time.monotonic()` when a slot took the first sequence; None while waiting.
        prompt_scores: For each sequence the scores of its prompt, from its first delta on; None if not asked for.
    """

    def __init__(self, num_sequences: int) -> None:
        self.started_at_s: float | None = None
        self.prompt_scores: list[PromptScores | None] = [None] * num_sequences
        self.loop = asyncio.get_running_loop()
        self._to_come = num_sequences  # sequences whose last event is still to be put,
        self._unfinished = num_sequences  # and to be taken
        self._has_ended = asyncio.Event()
        self._failure: RuntimeError | None = None
        self._is_cancelled = threading.Event()
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> IndexedDelta:
        """Returns the next delta.

        Raises:
            SequenceFailed: One of the sequences failed.
            RequestCancelled: `cancel` was called.
        """
        while self._unfinished:
            delta = self._take(await self._events.get()) if self._failure is None else None
            if self._failure is not None:
                raise self._failure
            if delta is not None:
                return delta
        raise StopAsyncIteration

    def ready(self) -> list[IndexedDelta]:
        """Takes the deltas that are there already; a failure among them is raised by the next `anext`."""
        deltas = []
        while self._unfinished and self._failure is None and not self._events.empty():
            if (delta := self._take(self._events.get_nowait())) is not None:
                deltas.append(delta)
        return deltas

    async def wait_end(self, until_s: float) -> None:
        """Waits until nothing more will come, or until a time of the event loop."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await self._has_ended.wait()

    def _take(self, event: Event) -> IndexedDelta | None:
        """Notes what an event says, and returns it if it is a delta."""
        if isinstance(event, RuntimeError):
            self._failure = event
            return None
        self._unfinished -= _is_last(event)
        if isinstance(event, IndexedDelta):
            return event
        self.prompt_scores[event.index] = event.scores
        return None

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled.is_set()

    def cancel(self) -> None:
        """Makes the engine drop this request before its next token; calling it again changes nothing."""
        if not self.is_cancelled:
            self._is_cancelled.set()
            deliver([(self, RequestCancelled("the request was cancelled."))])

    def abandon(self) -> None:
        """Cancels without telling anybody: the consumer's event loop is gone."""
        self._is_cancelled.set()

    def put(self, event: Event) -> None:
        """Adds an event; only in the thread of the consumer's event loop."""
        self._events.put_nowait(event)
        self._to_come -= not isinstance(event, RuntimeError) and _is_last(event)
        if not self._to_come or isinstance(event, RuntimeError):
            self._has_ended.set()


def _is_last(event: IndexedDelta | IndexedScores) -> bool:
    """Whether nothing more comes of the event's sequence."""
    return event.delta.finish_reason is not None if isinstance(event, IndexedDelta) else event.is_last


def deliver(events: list[tuple[RequestStream, Event]]) -> None:
    """Hands events to their consumers, from any thread, with one call into each event loop."""
    of_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[RequestStream, Event]]] = defaultdict(list)
    for stream, event in events:
        of_loop[stream.loop].append((stream, event))
    for loop, of_one in of_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, of_one)
        except RuntimeError:  # the loop is closed: nobody listens any more
            for stream, _ in of_one:
                stream.abandon()


def _put_all(events: list[tuple[RequestStream, Event]]) -> None:
    for stream, event in events:
        stream.put(event)
