"""Which sequence runs when, in which slot: plain bookkeeping, without model, tensors or threads.

1. Sequences wait in line. While a slot is free the oldest gets it and is prefilled, in chunks whose borders depend
   on its prompt alone: what a chunk computes is then the same whatever runs beside it.
2. A turn prefills until its budget of tokens is used up, at least one chunk, then decodes once: long prompts cannot
   hold up the sequences that run. Chunks of several prompts are computed in one go, all but the last to their ends.
3. A sequence that wants its prompt scored is scored first, one such sequence at a time, without a slot.
4. Slots are rows of the cache. Running sequences hold the rows 0..n-1, those that are being prefilled the next ones.
   When some leave, the last ones move into the gaps, so that a decode step reads the first n rows and no other.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
    def num_tokens(self) -> int:
        return self.end - self.start

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
        self._prefilling: list[Chunk[S]] = []  # next to be computed; only the first one may have had earlier ones
        self._num_slots = num_slots
        self._max_waiting = max_waiting
        self._chunk_tokens = chunk_tokens

    @property
    def is_empty(self) -> bool:
        return self.num_running == 0 and not self.waiting

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot or are being scored."""
        return len(self.running) + len(self._prefilling) + bool(self.scoring)

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

    def next_chunks(self, budget_tokens: int, *, most: int) -> list[Chunk[S]]:
        """Returns what to prefill next in one go, within the budget; call `complete` for each, in order, afterwards.

        Only the last one may leave some of its prompt for later: the rows of the others are then where they belong.
        """
        budget_tokens -= sum(chunk.num_tokens for chunk in self._prefilling)
        while self.waiting and self._has_free_row() and all(chunk.is_last for chunk in self._prefilling):
            chunk = self._chunk(self.waiting[0], len(self.running) + len(self._prefilling), 0)
            if chunk.num_tokens > budget_tokens:
                break
            budget_tokens -= chunk.num_tokens
            self._prefilling.append(chunk)
            self.waiting.popleft()
        return self._prefilling[:most] if budget_tokens >= 0 else []

    def complete(self, chunk: Chunk[S]) -> None:
        """Notes that the first of the chunks that `next_chunks` returned is computed; a whole prompt runs then."""
        assert self._prefilling[0] is chunk, "completed in their order"
        del self._prefilling[0]
        if chunk.is_last:
            self.running.append(chunk.sequence)
        else:
            self._prefilling.append(self._chunk(chunk.sequence, chunk.row, chunk.end))

    def drop_waiting(self, is_gone: Callable[[S], bool]) -> None:
        """Takes sequences out of the lines."""
        if any(map(is_gone, self.waiting)):
            self.waiting = deque(sequence for sequence in self.waiting if not is_gone(sequence))
        if any(map(is_gone, self.scoring)):
            self.scoring = deque(sequence for sequence in self.scoring if not is_gone(sequence))

    def drop_running(self, is_gone: Callable[[S], bool]) -> list[Move]:
        """Frees the slots of sequences; the moves, in this order, keep the rows of the others together."""
        # Each is asked once: a request may be cancelled by another thread at any time.
        gaps = [row for row, sequence in enumerate(self.running) if is_gone(sequence)]
        num_left = len(self.running) - len(gaps)
        movers = sorted(set(range(num_left, len(self.running))) - set(gaps))
        moves = [Move(source, target) for source, target in zip(movers, gaps, strict=False)]
        for source, target in moves:
            self.running[target] = self.running[source]
        del self.running[num_left:]
        return moves + self._close_up([chunk for chunk in self._prefilling if not is_gone(chunk.sequence)])

    def clear_running(self) -> list[S]:
        """Frees all slots and returns the sequences that held them."""
        held = [*self.running, *(chunk.sequence for chunk in self._prefilling)]
        self.running, self._prefilling = [], []
        return held

    def clear(self) -> list[S]:
        """Empties slots and lines, and returns the sequences that were there."""
        left = [*self.clear_running(), *self.waiting, *self.scoring]
        self.waiting.clear()
        self.scoring.clear()
        return left

    def _close_up(self, prefilling: list[Chunk[S]]) -> list[Move]:
        """Gives those that are still being prefilled the rows after the running ones."""
        self._prefilling = [replace(chunk, row=row) for row, chunk in enumerate(prefilling, start=len(self.running))]
        pairs = zip(prefilling, self._prefilling, strict=True)
        return [Move(old.row, new.row) for old, new in pairs if old.start > 0 and old.row != new.row]

    def _has_free_row(self) -> bool:
        return len(self.running) + len(self._prefilling) < self._num_slots

    def _chunk(self, sequence: S, row: int, start: int) -> Chunk[S]:
        return Chunk(sequence, row, start, min(start + self._chunk_tokens, sequence.num_prompt_tokens))
