"""From units to blocks: each Ray task writes its own block and returns only what the manifest needs.

A block's number was fixed before, so neither the number of tasks nor their order changes a byte.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from model.tokenizer import CONFIG_FILE, Tokenizer
from rayjob.corpus.blocks import Block, Row, read_finished_block, write_block
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.tasks import Progress, run_tasks
from rayjob.corpus.units import AnyUnit, load_unit
from rayjob.corpus.words import Words, fetch_words, load_words, split_words, words_path
from rayjob.store.fetch import fetch_folder

SLAB_WORDS = 2**20  # turned into tokens at a time
MOST_KNOWN_WORDS = 2**18  # about 50 MB
PROBE_WORDS = 2_000  # of each unit, encoded as one text too


class Folders(NamedTuple):
    """Where a task finds the tokenizer and kept words, and writes blocks; plain text, as every node sees them."""

    tokens: str
    tokenizer: str
    words: str


def write_blocks(
    units: Sequence[AnyUnit], folders: Folders, *, is_cancelled: Callable[[], bool], max_tasks: int | None = None
) -> dict[tuple[str, str], Block]:
    """Tokenizes units into blocks; the result is keyed by (split, block name).

    Args:
        units: what to write; must not be empty.
        max_tasks: most tasks at a time; None for the number of the cluster's CPUs.

    Raises:
        CorpusError: a source changed or cannot be read on a node, or storage cannot be written.
        PrepareCancelled: the caller asked to stop; finished blocks stay.
    """
    progress = Progress("tokenize", len(units), "blocks")
    items = [unit.to_json() for unit in units]
    blocks = {}
    function = functools.partial(_write_unit, folders=folders)
    for result in run_tasks(function, items, is_cancelled=is_cancelled, max_tasks=max_tasks):
        split = result.pop("split")
        block = Block(**result)
        blocks[split, block.name] = block
        progress.add(1, block.text_bytes)
    return blocks


def encode_words(words: Words, tokenizer: Tokenizer) -> list[Row]:
    """The rows of a block; EOS follows where a document ends and nowhere else.

    Every distinct word is encoded once: ten times the speed of encoding the text. It gives the same tokens because
    no piece of the vocabulary reaches across words, and the beginning of every unit is encoded both ways to see it.
    """
    encoded = _encode_distinct(words.words, tokenizer)
    lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    vocabulary = _Vocabulary(
        np.fromiter(chain.from_iterable(encoded), dtype=np.uint16, count=int(lengths.sum())), lengths
    )
    _probe(words, vocabulary, tokenizer)
    rows = []
    first = 0
    for row in words.rows:
        tokens = vocabulary.tokens(words.order[first : first + row.n_words])
        if row.is_end:
            tokens = np.append(tokens, np.uint16(tokenizer.eos_id))
        rows.append(Row(row.doc_id, tokens))
        first += row.n_words
    return rows


def _encode_distinct(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens of each word; the frequent ones are known from the units before."""
    known = _known_words(tokenizer.hash)
    if len(known) > MOST_KNOWN_WORDS:
        known.clear()
    new = [word for word in words if word not in known]
    known.update(zip(new, tokenizer.encode_all(new), strict=True))
    return [known[word] for word in words]


@functools.lru_cache(maxsize=1)
def _known_words(tokenizer_hash: str) -> dict[str, list[int]]:
    """Words that this process has encoded with a tokenizer."""
    return {}


class _Vocabulary:
    """Tokens of every distinct word, one after another."""

    def __init__(self, flat: npt.NDArray[np.uint16], lengths: npt.NDArray[np.int64]) -> None:
        self._flat = flat
        self._lengths = lengths
        self._starts = np.cumsum(lengths) - lengths

    def tokens(self, order: npt.NDArray[np.int32]) -> npt.NDArray[np.uint16]:
        """(M,) tokens of the words in an order."""
        slabs = [self._tokens(order[i : i + SLAB_WORDS]) for i in range(0, len(order), SLAB_WORDS)]
        return np.concatenate([np.empty(0, dtype=np.uint16), *slabs])

    def _tokens(self, order: npt.NDArray[np.int32]) -> npt.NDArray[np.uint16]:
        lengths = self._lengths[order]
        ends = np.cumsum(lengths)
        # Place of each token in `flat`: the start of its word plus its place in the word.
        places = np.repeat(self._starts[order] - (ends - lengths), lengths) + np.arange(ends[-1])
        return np.take(self._flat, places)


def _probe(words: Words, vocabulary: _Vocabulary, tokenizer: Tokenizer) -> None:
    """Row by row, as the end of a document and the beginning of the next are no neighbours."""
    first = 0
    for row in words.rows:
        end = min(first + row.n_words, PROBE_WORDS)
        order = words.order[first:end]
        text = "".join(words.words[number] for number in order)
        if tokenizer.encode(text) != vocabulary.tokens(order).tolist():
            raise CorpusError(
                [
                    "the tokenizer on storage has pieces that reach across words, so this program did not train it: "
                    "remove tokenizers/ from the storage folder and run the same command again."
                ]
            )
        if end == PROBE_WORDS:
            return
        first = end


def _write_unit(item: dict[str, Any], folders: Folders) -> dict[str, Any]:
    unit = load_unit(item["item"])
    path = Path(folders.tokens) / unit.split / unit.block_name
    finished = read_finished_block(path, unit_hash=unit.hash)
    if finished:  # by this task, before its process was killed and Ray started it again
        return {"split": unit.split, **asdict(finished)}
    tokenizer = _load_tokenizer(folders.tokenizer)
    kept_at = words_path(Path(folders.words), unit, tokenizer.normalizer)
    fetch_words(kept_at)
    kept = load_words(kept_at)
    words = split_words(unit.texts(tokenizer.normalizer)) if kept is None else kept
    block = write_block(path, encode_words(words, tokenizer), unit_hash=unit.hash, text_bytes=words.text_bytes)
    return {"split": unit.split, **asdict(block)}


@functools.lru_cache(maxsize=1)  # a worker process runs many units with one tokenizer
def _load_tokenizer(folder: str) -> Tokenizer:
    fetch_folder(Path(folder), CONFIG_FILE)
    return Tokenizer.load(Path(folder))
