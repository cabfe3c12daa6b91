"""Which sequence runs when, in which slot: plain bookkeeping, without model, tensors or threads.

1. Sequences wait in line. While a slot is free the oldest gets it and is prefilled, in chunks whose borders depend
   on its prompt alone: what a chunk computes is then the same whatever runs beside it.
2. A turn prefills until its budget of tokens is used up, at least one chunk, then decodes once: long prompts cannot
   hold up the sequences that run.
3. A sequence that wants its prompt scored is scored first, one such sequence at a time, without a slot.
4. Slots are rows of the cache. Running sequences hold the rows 0..n-1, the one that is being prefilled holds row n.
   When some leave, the last ones move into the gaps, so that a decode step reads the first n rows and no other.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar


class Schedulable(Protocol):
    """What the scheduler asks of a sequence."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens to prefill; at least one."""

    @property
    def wants_scores(self) -> bool:
        """Whether the prompt is to be scored before anything is decoded."""


S = TypeVar("S", bound=Schedulable)


class Move(NamedTuple):
    """What one row of the cache holds goes to another."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Chunk(Generic[S]):
    """Prompt tokens `start` to `end` of a sequence, to be computed in its row."""

    sequence: S
    row: int
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.sequence.num_prompt_tokens


class Scheduler(Generic[S]):
    """Line and slots.

    Attributes:
        running: The sequences that decode; the index is the row.
        waiting: The line, oldest first.
        scoring: Those whose prompts are still to be scored; the first one is being scored.
    """

    def __init__(self, *, num_slots: int, max_waiting: int, chunk_tokens: int) -> None:
        """Starts empty.

        Args:
            num_slots: Rows of the cache.
            max_waiting: Sequences that may wait beyond those that hold a row.
            chunk_tokens: Prompt tokens computed at once; the borders of chunks are its multiples.
        """
        self.running: list[S] = []
        self.waiting: deque[S] = deque()
        self.scoring: deque[S] = deque()
        self._next: Chunk[S] | None = None  # of the sequence that is being prefilled
        self._num_slots = num_slots
        self._max_waiting = max_waiting
        self._chunk_tokens = chunk_tokens

    @property
    def prefilling(self) -> S | None:
        """The sequence that is being prefilled."""
        return self._next.sequence if self._next is not None else None

    @property
    def is_empty(self) -> bool:
        return self.num_running == 0 and not self.waiting

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot or are being scored."""
        return len(self.running) + (self._next is not None) + bool(self.scoring)

    @property
    def num_waiting(self) -> int:
        """Sequences for which nothing has been computed yet, or only the scores."""
        return len(self.waiting) + max(len(self.scoring) - 1, 0)

    def has_room(self, num_sequences: int) -> bool:
        """Tells whether so many more sequences may come."""
        return self.num_running + self.num_waiting + num_sequences <= self._num_slots + self._max_waiting

    def add(self, sequences: Sequence[S]) -> None:
        """Puts sequences at the end of their line."""
        for sequence in sequences:
            (self.scoring if sequence.wants_scores else self.waiting).append(sequence)

    def complete_scoring(self, sequence: S, *, decodes: bool) -> None:
        """Notes that a prompt is scored; if the sequence decodes too and was not dropped, it waits for a slot now."""
        if sequence in self.scoring:
            self.scoring.remove(sequence)
            if decodes:
                self.waiting.append(sequence)

    def next_chunk(self, budget_tokens: int) -> Chunk[S] | None:
        """Returns what to prefill next, if it is within the budget; call `complete` when it is computed."""
        if self._next is None and self.waiting and len(self.running) < self._num_slots:
            self._next = self._chunk(self.waiting.popleft(), 0)
        chunk = self._next
        return chunk if chunk is not None and chunk.end - chunk.start <= budget_tokens else None

    def complete(self, chunk: Chunk[S]) -> None:
        """Notes that the chunk that `next_chunk` returned is computed; after its last one a sequence runs."""
        if chunk.is_last:
            self._next = None
            self.running.append(chunk.sequence)
        else:
            self._next = self._chunk(chunk.sequence, chunk.end)

    def drop_waiting(self, is_gone: Callable[[S], bool]) -> None:
        """Takes sequences out of the lines."""
        if any(map(is_gone, self.waiting)):
            self.waiting = deque(sequence for sequence in self.waiting if not is_gone(sequence))
        if any(map(is_gone, self.scoring)):
            self.scoring = deque(sequence for sequence in self.scoring if not is_gone(sequence))

    def drop_running(self, is_gone: Callable[[S], bool]) -> list[Move]:
        """Frees the slots of sequences; the moves, in this order, keep the rows of the others together."""
        chunk = self._next
        if chunk is not None and is_gone(chunk.sequence):
            self._next = chunk = None
        # Each is asked once: a request may be cancelled by another thread at any time.
        gaps = [row for row, sequence in enumerate(self.running) if is_gone(sequence)]
        num_left = len(self.running) - len(gaps)
        movers = sorted(set(range(num_left, len(self.running))) - set(gaps))
        moves = [Move(source, target) for source, target in zip(movers, gaps, strict=False)]
        for source, target in moves:
            self.running[target] = self.running[source]
        if chunk is not None and gaps:
            moves.append(Move(chunk.row, num_left))
            self._next = Chunk(chunk.sequence, num_left, chunk.start, chunk.end)
        del self.running[num_left:]
        return moves

    def clear_running(self) -> list[S]:
        """Frees all slots and returns the sequences that held them."""
        held = [*self.running, *([self._next.sequence] if self._next is not None else [])]
        self.running, self._next = [], None
        return held

    def clear(self) -> list[S]:
        """Empties slots and lines, and returns the sequences that were there."""
        left = [*self.clear_running(), *self.waiting, *self.scoring]
        self.waiting.clear()
        self.scoring.clear()
        return left

    def _chunk(self, sequence: S, start: int) -> Chunk[S]:
        end = min(start + self._chunk_tokens, sequence.num_prompt_tokens)
        return Chunk(sequence, len(self.running), start, end)
