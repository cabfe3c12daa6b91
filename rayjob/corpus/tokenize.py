"""Ray Data over the units of work: each task writes its own block and returns only what the manifest needs.

Every unit is one row of a data set with as many Ray blocks as units, so a unit is a task of its own. Tasks
rather than actors: a pool of actors larger than the free CPUs waits for ever without a word. A task asks for
half a CPU, so the work goes on even where one core is left. Results come in any order; a block's number was
fixed before.
"""

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
from ray.exceptions import RayTaskError

from model.tokenizer import Tokenizer
from rayjob.corpus.blocks import Block, Row, write_block
from rayjob.corpus.documents import Document, read_document
from rayjob.corpus.errors import CorpusError, PrepareCancelled
from rayjob.corpus.units import Unit

logger = logging.getLogger(__name__)

CPUS_PER_TASK = 0.5
LOG_INTERVAL_S = 5.0


def write_blocks(
    units: Sequence[Unit],
    tokens_folder: Path,
    tokenizer_folder: Path,
    *,
    is_cancelled: Callable[[], bool],
    max_tasks: int | None = None,
) -> dict[tuple[str, str], Block]:
    """Tokenizes units into blocks under `tokens_folder`; the result is keyed by (split, block name).

    Args:
        units: what to write; must not be empty.
        max_tasks: most tasks at a time; None for as many as the cluster's CPUs take.

    Raises:
        CorpusError: a source changed or cannot be read on a node.
        PrepareCancelled: the caller asked to stop; finished blocks stay.
    """
    if not ray.is_initialized():
        raise RuntimeError("prepare needs Ray: call ray.init() first.")
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.from_items(
        [{"unit": unit.to_json()} for unit in units], override_num_blocks=len(units)
    ).map(
        functools.partial(
            _write_unit, tokens_folder=str(tokens_folder), tokenizer_folder=str(tokenizer_folder)
        ),
        num_cpus=CPUS_PER_TASK,
        compute=ray.data.TaskPoolStrategy(size=max_tasks),
    )
    progress = _Progress(len(units), sum(unit.text_bytes for unit in units))
    blocks = {}
    try:
        for row in _until_cancelled(rows.iter_rows(), is_cancelled):
            split = row.pop("split")
            block = Block(**row)
            blocks[split, block.name] = block
            progress.add(block)
    except RayTaskError as error:
        if isinstance(error.cause, CorpusError):
            raise CorpusError(error.cause.problems) from None
        raise
    return blocks


def encode_unit(unit: Unit, tokenizer: Tokenizer, read: Callable[[Document], str]) -> list[Row]:
    """The rows of a unit's block; EOS follows where a document ends and nowhere else."""
    rows = []
    for span in unit.spans:
        tokens = tokenizer.encode(read(span.document)[span.start : span.stop])
        if span.is_end:
            tokens.append(tokenizer.eos_id)
        rows.append(Row(span.document.doc_id, np.array(tokens, dtype=np.uint16)))
    return rows


def _write_unit(row: dict[str, Any], tokens_folder: str, tokenizer_folder: str) -> dict[str, Any]:
    unit = Unit.from_json(row["unit"])
    rows = encode_unit(
        unit,
        _load_tokenizer(tokenizer_folder),
        functools.partial(_read_text, tokenizer_folder=tokenizer_folder),
    )
    path = Path(tokens_folder) / unit.split / unit.block_name
    block = write_block(path, rows, unit_hash=unit.hash, text_bytes=unit.text_bytes)
    return {"split": unit.split, **asdict(block)}


@functools.lru_cache(maxsize=1)  # a worker process runs many units with one tokenizer
def _load_tokenizer(folder: str) -> Tokenizer:
    return Tokenizer.load(Path(folder))


@functools.lru_cache(maxsize=1)  # the units of one long document follow each other
def _read_text(document: Document, tokenizer_folder: str) -> str:
    return read_document(document, _load_tokenizer(tokenizer_folder).normalize)


def _until_cancelled(rows: Iterable[Any], is_cancelled: Callable[[], bool]) -> Iterator[Any]:
    for row in rows:
        yield row
        if is_cancelled():
            raise PrepareCancelled(
                "Stopped while tokenizing; finished blocks stay, run the same command again."
            )


class _Progress:
    """Logs blocks, rate and time to go, at most every LOG_INTERVAL_S."""

    def __init__(self, n_blocks: int, text_bytes: int) -> None:
        self.n_blocks, self.text_bytes = n_blocks, text_bytes
        self.done_blocks = self.done_bytes = self.tokens = 0
        self.started_at_s = self.logged_at_s = time.monotonic()

    def add(self, block: Block) -> None:
        self.done_blocks += 1
        self.done_bytes += block.text_bytes
        self.tokens += block.tokens
        now_s = time.monotonic()
        if now_s - self.logged_at_s >= LOG_INTERVAL_S or self.done_blocks == self.n_blocks:
            self.logged_at_s = now_s
            self._log(max(now_s - self.started_at_s, 1e-9))

    def _log(self, elapsed_s: float) -> None:
        rate = self.done_bytes / elapsed_s
        logger.info(
            "tokenize block %d/%d | %.1f/%.1f MB | %.2f MB/s | %s tokens | eta %.0fs",
            self.done_blocks,
            self.n_blocks,
            self.done_bytes / 1e6,
            self.text_bytes / 1e6,
            rate / 1e6,
            f"{self.tokens:,}",
            (self.text_bytes - self.done_bytes) / rate,
        )
