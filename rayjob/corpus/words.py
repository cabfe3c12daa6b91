"""Units as words: the distinct words, how often each occurs, and their order.

1. A unit's normalised text is cut before every space and every line break; so a word takes that with it. Joined, the
   words are the text.
2. The tokenizer is trained on the counts of the training units, all of them. No piece of it reaches across words,
   so the tokens of a text are those of its words, and each distinct word has to be encoded only once.
3. Parts are kept on storage. So the text is read and normalised once for both purposes, and another vocabulary
   needs no reading at all.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from model.normalizer import Normalizer
from rayjob.corpus.documents import FORMAT
from rayjob.corpus.parts import read_part, write_part
from rayjob.corpus.tasks import Progress, run_tasks
from rayjob.corpus.text import Text
from rayjob.corpus.units import AnyUnit, load_unit
from rayjob.store.fetch import fetch_file, fetch_some

LEAST_WAITING_WORDS = 2**20  # about 20 MB


@dataclass(frozen=True, slots=True)
class WordRow:
    """A row of a block before it has tokens: its document, number of words, and whether the document ends."""

    doc_id: str
    n_words: int
    is_end: bool


@dataclass(frozen=True, slots=True)
class Words:
    """The text of a unit.

    Attributes:
        words: the distinct words in order of their first occurrence.
        order: (N,) int32, which word stands at each place of the text.
        rows: of the block, in order.
        text_bytes: size of the text in UTF-8.
    """

    words: list[str]
    order: npt.NDArray[np.int32]
    rows: tuple[WordRow, ...]
    text_bytes: int


def split_words(texts: Iterator[Text]) -> Words:
    """Cuts texts into words; Arrow numbers them, at six times the speed of a dict."""
    pieces = []
    rows = []
    text_bytes = 0
    for doc_id, parts, is_end in texts:
        n_words = 0
        for content in _whole_words(parts):
            pieces.append(_cut(content))
            n_words += len(pieces[-1])
            text_bytes += len(content)
        rows.append(WordRow(doc_id, n_words, is_end))
    numbered = pa.chunked_array(pieces, pa.large_string()).dictionary_encode().combine_chunks()
    return Words(numbered.dictionary.to_pylist(), numbered.indices.to_numpy(), tuple(rows), text_bytes)


def words_path(folder: Path, unit: AnyUnit, normalizer: Normalizer) -> Path:
    """Where the words of a unit lie; their counts lie beside them."""
    # The format too: a normaliser with the same settings and other rules gives other words.
    key = hashlib.sha256(f"{FORMAT} {unit.content_hash} {normalizer.to_json()}".encode()).hexdigest()[:32]
    return folder / f"{key}.words.parquet"


def load_words(path: Path) -> Words | None:
    """The words kept at a path, or None if they are absent or damaged."""
    order, counts = read_part(_order_path(path)), read_part(path)
    if order is None or counts is None:
        return None
    facts = counts[1]
    rows = tuple(WordRow(*row) for row in facts["rows"])
    return Words(counts[0]["word"].to_pylist(), order[0]["order"].to_numpy(), rows, facts["text_bytes"])


def fetch_words(path: Path) -> None:
    """Fetches words that another node kept, if it did."""
    fetch_file(_order_path(path))
    fetch_file(path)


def save_words(path: Path, words: Words) -> None:
    """Keeps words at a path; the counts, written last, make them complete."""
    counts = np.bincount(words.order, minlength=len(words.words))
    rows = [(row.doc_id, row.n_words, row.is_end) for row in words.rows]
    write_part(_order_path(path), {"order": words.order}, {})
    columns = {"word": pa.array(words.words, pa.large_string()), "count": counts}
    write_part(path, columns, {"rows": rows, "text_bytes": words.text_bytes})


def count_words(
    units: Sequence[AnyUnit], folder: Path, normalizer: Normalizer, is_cancelled: Callable[[], bool]
) -> dict[str, int]:
    """How often each word occurs in the units, in Ray tasks; makes only parts that are missing.

    Raises:
        CorpusError: a source cannot be read, or storage cannot be written.
        PrepareCancelled: the caller asked to stop; finished parts stay.
    """
    counts = _Counts()
    fetch_some(folder, [words_path(folder, unit, normalizer) for unit in units])
    missing = [unit for unit in units if not counts.add(words_path(folder, unit, normalizer))]
    if missing:
        progress = Progress("words", len(missing), "units")
        function = functools.partial(_keep_words, folder=str(folder), normalizer=normalizer)
        for result in run_tasks(function, [unit.to_json() for unit in missing], is_cancelled=is_cancelled):
            fetch_words(Path(result["path"]))
            is_added = counts.add(Path(result["path"]))
            assert is_added  # it was just written
            progress.add(1, result["bytes"])
    return counts.to_dict()


def _keep_words(item: dict[str, Any], folder: str, normalizer: Normalizer) -> dict[str, Any]:
    unit = load_unit(item["item"])
    path = words_path(Path(folder), unit, normalizer)
    words = load_words(path)  # there if this task's process was killed and Ray started it again
    if words is None:
        words = split_words(unit.texts(normalizer))
        save_words(path, words)
    return {"path": str(path), "bytes": words.text_bytes}


class _Counts:
    """Counts of many parts, added up by Arrow; what waits to be added is at most as much as was added before."""

    def __init__(self) -> None:
        self._words: list[pa.Array] = []
        self._counts: list[npt.NDArray[np.int64]] = []
        self._n_added = self._n_waiting = 0

    def add(self, path: Path) -> bool:
        """Adds the counts kept at a path; False if there are none."""
        part = read_part(path)
        if part is None:
            return False
        self._words += part[0]["word"].chunks
        self._counts.append(part[0]["count"].to_numpy())
        self._n_waiting += len(part[0])
        if self._n_waiting > max(self._n_added, LEAST_WAITING_WORDS):
            self._add_up()
        return True

    def to_dict(self) -> dict[str, int]:
        """How often each word occurs, in no particular order."""
        if not self._counts:
            return {}
        self._add_up()
        return dict(zip(self._words[0].to_pylist(), self._counts[0].tolist(), strict=True))

    def _add_up(self) -> None:
        numbered = pa.chunked_array(self._words, pa.large_string()).dictionary_encode().combine_chunks()
        counts = np.zeros(len(numbered.dictionary), dtype=np.int64)
        np.add.at(counts, numbered.indices.to_numpy(), np.concatenate(self._counts))
        self._words, self._counts = [numbered.dictionary], [counts]
        self._n_added, self._n_waiting = len(counts), 0


def _cut(content: bytes) -> pa.Array:
    """The words of a text as an array over its bytes: none of the other bytes of a character looks like a space."""
    codes = np.frombuffer(content, dtype=np.uint8)
    starts = np.flatnonzero((codes == ord(" ")) | (codes == ord("\n")))
    if content and (not len(starts) or starts[0] > 0):
        starts = np.concatenate([[0], starts])  # the first word has neither
    ends = np.append(starts, len(content)).astype(np.int64)
    return pa.LargeStringArray.from_buffers(len(starts), pa.py_buffer(ends), pa.py_buffer(content))


def _whole_words(parts: Iterable[str]) -> Iterator[bytes]:
    """The UTF-8 of a text, cut before words only: a part may end within one that is longer than a slab."""
    waiting: list[bytes] = []
    for part in parts:
        content = part.encode()
        end = max(content.rfind(b" "), content.rfind(b"\n"))
        if end >= 0:
            yield b"".join([*waiting, content[:end]])
            waiting = []
        waiting.append(content[max(end, 0) :])
    yield b"".join(waiting)


def _order_path(path: Path) -> Path:
    return path.with_name(path.name.replace(".words.", ".order."))
