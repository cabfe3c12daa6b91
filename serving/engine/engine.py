"""The engine: a bounded queue of sequences and a fixed number of slots that decode them.

1. `submit` puts all sequences of a request into the queue, or none when it is full.
2. Each slot is a thread: it takes the oldest sequence and decodes it alone, so a result never depends on
   what runs beside it.
3. Every token is handed to the request's event loop at once. Before every token the slot looks whether the
   request was cancelled.
4. A fault ends the request it belongs to and nothing else.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from serving.engine.loading import ServedModel
from serving.engine.sequence import Delta, PromptScores, SequenceSpec, decode_sequence, score_prompt

logger = logging.getLogger(__name__)


class QueueFull(RuntimeError):
    """The queue has no room for a request; `retry_after_s` estimates when it will."""

    def __init__(self, retry_after_s: int) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"the queue is full: try again in {retry_after_s} s.")


class EngineClosed(RuntimeError):
    """The engine takes no more requests."""


class SequenceFailed(RuntimeError):
    """Decoding one sequence raised; the cause is in the log."""


class RequestCancelled(RuntimeError):
    """The request was cancelled before all of its sequences were finished."""


class Load(NamedTuple):
    """Sequences in the engine at one instant."""

    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class IndexedDelta:
    """A delta and the sequence of the request that it belongs to."""

    index: int
    delta: Delta


class RequestStream:
    """Deltas of all sequences of one request in the order of their making; consumed by one asyncio task.

    Attributes:
        started_at_s: `time.monotonic()` when a slot took the first sequence; None while waiting.
    """

    def __init__(self, num_sequences: int) -> None:
        self.started_at_s: float | None = None
        self._unfinished = num_sequences
        self._is_cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()
        self.prompt_scores: list[PromptScores | None] = [None] * num_sequences
        self._events: asyncio.Queue[IndexedDelta | RuntimeError | None] = asyncio.Queue()

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> IndexedDelta:
        """Returns the next delta.

        Raises:
            SequenceFailed: One of the sequences failed.
            RequestCancelled: `cancel` was called.
        """
        event = None
        while event is None:
            if self._unfinished == 0:
                raise StopAsyncIteration
            event = await self._events.get()
            self._unfinished -= event is None
        if isinstance(event, RuntimeError):
            raise event
        self._unfinished -= event.delta.finish_reason is not None
        return event

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled.is_set()

    def cancel(self) -> None:
        """Makes the slots drop this request before their next token; calling it again changes nothing."""
        if not self.is_cancelled:
            self._is_cancelled.set()
            self.post(RequestCancelled("the request was cancelled."))

    def post(self, event: IndexedDelta | RuntimeError | None) -> None:
        """Hands an event to the consumer, from any thread; None is the end of a sequence without a token."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:  # the consumer's event loop is closed: nobody listens any more
            self._is_cancelled.set()


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    index: int
    spec: SequenceSpec
    request: RequestStream


class Engine:
    """Decodes sequences of one model in `num_slots` threads; at most `max_waiting` more wait in line."""

    def __init__(self, served: ServedModel, *, num_slots: int, max_waiting: int) -> None:
        self.served = served
        self.num_slots = num_slots
        self._capacity = num_slots + max_waiting
        self._waiting: deque[_Sequence] = deque()
        self._num_running = 0
        self._mean_sequence_s = 1.0
        self._is_closed = False
        self._changed = threading.Condition()
        self._slots = [
            threading.Thread(target=self._run_slot, name=f"slot-{number}", daemon=True) for number in range(num_slots)
        ]
        for slot in self._slots:
            slot.start()

    def submit(self, specs: Sequence[SequenceSpec]) -> RequestStream:
        """Puts the sequences of one request in line; call it from the event loop that consumes the stream.

        Raises:
            QueueFull: There is no room for all of them.
            EngineClosed: `close` was called.
        """
        request = RequestStream(len(specs))
        with self._changed:
            self.check_room(len(specs))
            self._waiting.extend(_Sequence(index, spec, request) for index, spec in enumerate(specs))
            self._changed.notify(len(specs))
        return request

    def check_room(self, num_sequences: int) -> None:
        """Raises what `submit` would raise for so many sequences, before any work is done for them."""
        with self._changed:
            if self._is_closed:
                raise EngineClosed("the engine is closed.")
            self._drop_cancelled()
            if self._num_running + len(self._waiting) + num_sequences > self._capacity:
                raise QueueFull(self._retry_after_s())

    def load(self) -> Load:
        """Returns how many sequences run and wait, without those that were cancelled while waiting."""
        with self._changed:
            self._drop_cancelled()
            return Load(self._num_running, len(self._waiting))

    def is_alive(self) -> bool:
        """Tells whether every slot's thread runs."""
        return all(slot.is_alive() for slot in self._slots)

    def close(self) -> None:
        """Takes no more requests; those already taken are finished, then the threads end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until a closed engine's threads have ended."""
        for slot in self._slots:
            slot.join(timeout_s)

    def _run_slot(self) -> None:
        while (sequence := self._take()) is not None:
            started_at_s = time.monotonic()
            last: IndexedDelta | RuntimeError | None
            try:
                last = self._decode(sequence)
            except Exception:
                # One request's fault must not end the slot that serves everybody.
                logger.exception("decoding a sequence failed; its request is answered with an error")
                last = SequenceFailed("decoding failed.")
            # First free the slot: a client that has its answer finds room for its next request.
            self._release(time.monotonic() - started_at_s)
            if last is not None or sequence.spec.max_new_tokens == 0:
                sequence.request.post(last)

    def _decode(self, sequence: _Sequence) -> IndexedDelta | None:
        """Posts every delta but the last, which it returns; None if the request was cancelled."""
        request = sequence.request
        request.started_at_s = request.started_at_s or time.monotonic()
        spec = sequence.spec
        if spec.prompt_logprobs is not None:
            request.prompt_scores[sequence.index] = score_prompt(self.served, spec.prompt, spec.prompt_logprobs)
        if spec.max_new_tokens == 0:
            return None
        deltas = decode_sequence(self.served, spec)
        while not request.is_cancelled:
            event = IndexedDelta(sequence.index, next(deltas))
            if event.delta.finish_reason is not None:
                return event
            request.post(event)
        return None

    def _take(self) -> _Sequence | None:
        """The oldest sequence that waits; None once the engine is closed and empty."""
        with self._changed:
            while True:
                self._drop_cancelled()
                if self._waiting:
                    self._num_running += 1
                    return self._waiting.popleft()
                if self._is_closed:
                    return None
                self._changed.wait()

    def _release(self, took_s: float) -> None:
        with self._changed:
            self._num_running -= 1
            self._mean_sequence_s += 0.1 * (took_s - self._mean_sequence_s)

    def _drop_cancelled(self) -> None:
        if any(sequence.request.is_cancelled for sequence in self._waiting):
            self._waiting = deque(s for s in self._waiting if not s.request.is_cancelled)

    def _retry_after_s(self) -> int:
        estimate_s = len(self._waiting) * self._mean_sequence_s / self.num_slots
        return min(max(math.ceil(estimate_s), 1), 60)
