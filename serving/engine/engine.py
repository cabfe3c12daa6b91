"""The engine: one thread that decodes all running sequences together, one token each per turn.

1. `submit` puts all sequences of a request into line, or none when it is full.
2. A turn of the thread: drop what was cancelled; score and prefill a bounded number of prompt tokens; then one
   decode step for all running sequences. Both end in one batch of tokens, and one call into each event loop.
3. A row's text depends on its own prompt, seed and parameters alone, whatever runs beside it.
4. A fault in one row ends its own request; one in a whole step ends those that were in it. The engine goes on,
   unless its device has failed: then it ends, for a new process to take its place.
"""

import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from model.generate import GeneratedToken
from serving.engine.loading import ServedModel
from serving.engine.progress import EngineSequence
from serving.engine.runner import DeviceFailed, Runner
from serving.engine.sampler import sample
from serving.engine.scheduler import Chunk, Scheduler
from serving.engine.scoring import PromptScorer
from serving.engine.sequence import Delta, SequenceSpec, Transcript
from serving.engine.slots import Piece
from serving.engine.stream import (
    Event,
    IndexedDelta,
    IndexedScores,
    RequestCancelled,
    RequestStream,
    SequenceFailed,
    deliver,
)

__all__ = [
    "Engine",
    "EngineClosed",
    "EngineSequence",
    "IndexedDelta",
    "Load",
    "QueueFull",
    "RequestCancelled",
    "RequestStream",
    "SequenceFailed",
]

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 128
TURN_TOKENS = 128
"""Prompt tokens of a turn: on a CPU about as much work as a decode step of 64 rows."""


class QueueFull(RuntimeError):
    """The queue has no room for a request; `retry_after_s` estimates when it will."""

    def __init__(self, retry_after_s: int) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"the queue is full: try again in {retry_after_s} s.")


class EngineClosed(RuntimeError):
    """The engine takes no more requests."""


class Load(NamedTuple):
    """Sequences in the engine at one instant."""

    running: int
    waiting: int


def take_token(sequence: EngineSequence, picked: GeneratedToken) -> Delta:
    """Adds the token that was picked for a sequence and returns its delta."""
    return sequence.transcript.push(picked)


class Engine:
    """Decodes up to `num_slots` sequences of one model together; at most `max_waiting` more wait in line."""

    def __init__(
        self,
        served: ServedModel,
        *,
        num_slots: int,
        max_waiting: int,
        dtype: torch.dtype = torch.float32,
        num_threads: int | None = None,
    ) -> None:
        """Starts the thread.

        Args:
            served: The model; its own weights stay as they are.
            num_slots: Sequences decoded together.
            max_waiting: Sequences that may wait beyond them.
            dtype: Of the weights and the cache while decoding; int8 stands for the weights of decode steps alone,
                all else is bfloat16 then.
            num_threads: CPUs that compute; None leaves what is set for the process.
        """
        self.served = served
        self.num_slots = num_slots
        self._scheduler: Scheduler[EngineSequence] = Scheduler(
            num_slots=num_slots, max_waiting=max_waiting, chunk_tokens=CHUNK_TOKENS
        )
        self._num_threads = num_threads
        self._mean_sequence_s = 1.0
        self._is_closed = False
        self._changed = threading.Condition()  # guards the scheduler; only the engine's thread moves rows
        made_runner: Future[Runner] = Future()
        self._thread = threading.Thread(target=self._run, args=(dtype, made_runner), name="engine", daemon=True)
        self._thread.start()
        self._runner = made_runner.result()

    def submit(self, specs: Sequence[SequenceSpec]) -> RequestStream:
        """Puts the sequences of one request in line; call it from the event loop that consumes the stream.

        Raises:
            QueueFull: There is no room for all of them.
            EngineClosed: `close` was called.
        """
        request = RequestStream(len(specs))
        sequences = [
            EngineSequence(index, spec, request, Transcript(spec, self.served.tokenizer))
            for index, spec in enumerate(specs)
        ]
        with self._changed:
            self.check_room(len(specs))
            self._scheduler.add(sequences)
            self._changed.notify()
        return request

    def check_room(self, num_sequences: int) -> None:
        """Raises what `submit` would raise for so many sequences, before any work is done for them."""
        with self._changed:
            if self._is_closed:
                raise EngineClosed("the engine is closed.")
            self._scheduler.drop_waiting(_is_gone)
            if not self._scheduler.has_room(num_sequences):
                raise QueueFull(self._retry_after_s())

    def load(self) -> Load:
        """Returns how many sequences run and wait, without those that were cancelled while waiting."""
        with self._changed:
            self._scheduler.drop_waiting(_is_gone)
            return Load(self._scheduler.num_running, self._scheduler.num_waiting)

    def is_alive(self) -> bool:
        """Tells whether the engine's thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Takes no more requests; those already taken are finished, then the thread ends."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def join(self, timeout_s: float | None = None) -> None:
        """Waits until a closed engine's thread has ended."""
        self._thread.join(timeout_s)

    def _run(self, dtype: torch.dtype, made_runner: Future[Runner]) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        try:
            # Here and not by the caller, for the reason of `own_thread`.
            made_runner.set_result(Runner(self.served.model, num_slots=self.num_slots, dtype=dtype))
        except BaseException as error:
            made_runner.set_exception(error)
            return
        try:
            while self._wait_for_work():
                try:
                    self._turn()
                except DeviceFailed:
                    logger.critical(
                        "the device has failed: the engine ends, its process must be replaced", exc_info=True
                    )
                    return
                except Exception:
                    # A fault in a whole step must not end the thread that serves everybody.
                    logger.exception("a step failed; all requests that were in it are answered with an error")
                    self._fail_running()
        finally:
            self._fail_all()

    def _wait_for_work(self) -> bool:
        """Returns True when there is something to do, False once the engine is closed and empty."""
        with self._changed:
            while self._scheduler.is_empty:
                if self._is_closed:
                    return False
                self._changed.wait()
            return True

    def _turn(self) -> None:
        self._free_slots()
        self._score()
        self._prefill()
        self._decode()

    def _score(self) -> None:
        """Scores the next chunk of the prompt that is first in line for it."""
        with self._changed:
            sequence = self._scheduler.scoring[0] if self._scheduler.scoring else None
        if sequence is None:
            return
        try:
            self._advance_scores(sequence)
        except DeviceFailed:
            raise
        except Exception:
            deliver([self._failure(sequence)])

    def _advance_scores(self, sequence: EngineSequence) -> None:
        spec = sequence.spec
        sequence.start()
        if sequence.scorer is None:
            sequence.scorer = PromptScorer(self.served.model, spec.prompt, spec.prompt_logprobs or 0)
        if not sequence.scorer.is_done:
            sequence.scorer.advance()
        if sequence.scorer.is_done:
            with self._changed:
                self._scheduler.complete_scoring(sequence, decodes=spec.max_new_tokens > 0)
            event = IndexedScores(sequence.index, sequence.scorer.scores, is_last=spec.max_new_tokens == 0)
            sequence.scorer = None  # its cache is large
            deliver([(sequence.request, event)])

    def _prefill(self) -> None:
        """Computes prompts within the budget of a turn, and the first token of those that became complete."""
        budget_tokens, most_at_once = TURN_TOKENS, self.num_slots
        while chunks := self._next_chunks(budget_tokens, most_at_once):
            try:
                logits = self._prefill_chunks(chunks)
            except DeviceFailed:
                raise
            except Exception:
                if len(chunks) > 1:
                    most_at_once = 1  # again, each by itself, to find the one at fault
                    continue
                deliver([self._failure(chunks[0].sequence)])
                self._free_slots()
                continue
            budget_tokens -= sum(chunk.num_tokens for chunk in chunks)
            self._complete(chunks, logits)

    def _next_chunks(self, budget_tokens: int, most: int) -> list[Chunk[EngineSequence]]:
        with self._changed:
            return self._scheduler.next_chunks(budget_tokens, most=most)

    def _prefill_chunks(self, chunks: Sequence[Chunk[EngineSequence]]) -> Tensor:
        for chunk in chunks:
            chunk.sequence.start()
        return self._runner.prefill(
            [
                Piece(chunk.row, chunk.start, chunk.sequence.spec.prompt[chunk.start : chunk.end], chunk.is_last)
                for chunk in chunks
            ]
        )

    def _complete(self, chunks: Sequence[Chunk[EngineSequence]], logits: Tensor) -> None:
        with self._changed:
            for chunk in chunks:
                self._scheduler.complete(chunk)
        if complete := [chunk.sequence for chunk in chunks if chunk.is_last]:
            self._take(complete, logits)

    def _decode(self) -> None:
        running = list(self._scheduler.running)
        if running:
            tokens = [sequence.transcript.output[-1] for sequence in running]
            self._take(running, self._runner.decode(tokens, [sequence.last_position for sequence in running]))

    def _take(self, sequences: Sequence[EngineSequence], logits: Tensor) -> None:
        """Gives each sequence the token that its row of logits (B, V) yields."""
        picked = sample(logits, [sequence.draw() for sequence in sequences])
        events = [self._event(*pair) for pair in zip(sequences, picked, strict=True)]
        # First free the slots: a client that has its answer finds room for its next request.
        self._free_slots()
        deliver(events)

    def _event(self, sequence: EngineSequence, picked: GeneratedToken | Exception) -> tuple[RequestStream, Event]:
        try:
            if isinstance(picked, Exception):
                raise picked
            delta = take_token(sequence, picked)
        except DeviceFailed:
            raise
        except Exception:
            return self._failure(sequence)
        sequence.is_done = delta.finish_reason is not None
        return sequence.request, IndexedDelta(sequence.index, delta, time.monotonic())

    def _failure(self, sequence: EngineSequence) -> tuple[RequestStream, Event]:
        """Ends a sequence whose exception is being handled."""
        logger.exception("decoding a sequence failed; its request is answered with an error")
        sequence.is_done = True
        return sequence.request, SequenceFailed("decoding failed.")

    def _free_slots(self) -> None:
        """Takes out of the engine what is finished or was cancelled."""
        with self._changed:
            gone = [sequence for sequence in self._scheduler.running if sequence.is_gone]
            self._scheduler.drop_waiting(_is_gone)
            moves = self._scheduler.drop_running(_is_gone)
            for sequence in gone:
                self._note_time(sequence)
        self._runner.move(moves)

    def _fail_running(self) -> None:
        with self._changed:
            failed = self._scheduler.clear_running()
        deliver([(sequence.request, SequenceFailed("decoding failed.")) for sequence in failed])

    def _fail_all(self) -> None:
        """Leaves nobody waiting for a thread that ends; after `close` there is nobody."""
        with self._changed:
            self._is_closed = True
            left = self._scheduler.clear()
        deliver([(sequence.request, SequenceFailed("the engine has stopped.")) for sequence in left])

    def _note_time(self, sequence: EngineSequence) -> None:
        if sequence.started_at_s is not None:
            took_s = time.monotonic() - sequence.started_at_s
            self._mean_sequence_s += 0.1 * (took_s - self._mean_sequence_s)

    def _retry_after_s(self) -> int:
        estimate_s = self._scheduler.num_waiting * self._mean_sequence_s / self.num_slots
        return min(max(math.ceil(estimate_s), 1), 60)


def _is_gone(sequence: EngineSequence) -> bool:
    return sequence.is_gone
