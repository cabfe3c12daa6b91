"""Corpus -> tokenizer -> Parquet blocks, each step skipped where its result is on storage.

sources (hashed)          sources.py, demo.py, huggingface.py
  -> plan                 plans.py: drop copies and boilerplate, hold out validation, deal units of work
       documents          documents.py, dedup.py, split.py, catalog.py, units.py
       rows               rows.py, scan.py, repeats.py, stretches.py, row_catalog.py, row_units.py
  -> tokenizer            vocabulary.py: <storage>/tokenizers/<hash>/, from the words of the training side only
  -> blocks               tokenize.py: <storage>/tokens/<hash>/, by Ray tasks
  -> corpus card          card.py: corpus.html and corpus.md beside the blocks
  -> manifest.json        blocks.py, last: without it nothing was prepared

<storage>/cache/ keeps scan parts and words, so that a change costs only what depends on it; it can be deleted.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from model.tokenizer import CONFIG_FILE
from rayjob.atomic import remove_temporary, write_atomically
from rayjob.config import DataConfig, TokenizerConfig
from rayjob.corpus.blocks import (
    MANIFEST_FILE,
    SPLITS,
    Block,
    BlocksError,
    Manifest,
    missing_blocks,
    read_finished_block,
)
from rayjob.corpus.card import write_card
from rayjob.corpus.errors import CorpusError, PrepareCancelled
from rayjob.corpus.identity import (
    digest,
    explain_rebuild,
    have_same_settings,
    inputs_of_tokenizer,
    tokenizer_inputs,
    tokens_inputs,
)
from rayjob.corpus.manifest import build_manifest, with_windows
from rayjob.corpus.plans import Plan, catalog_of, has_rows, make_plan, obtain_sources, origin, unchanged_sources
from rayjob.corpus.rows import inspect_files
from rayjob.corpus.sizes import short_problems, size_bytes, size_problems, window_problems
from rayjob.corpus.sources import Source, find_sources
from rayjob.corpus.tasks import storage_error
from rayjob.corpus.tokenize import Folders, write_blocks
from rayjob.corpus.units import AnyUnit, plan_units
from rayjob.corpus.vocabulary import SMALL_CORPUS_BYTES, ensure_tokenizer, load_tokenizer
from rayjob.lock import exclusive_after_wait
from rayjob.store.fetch import fetch_folder, fetch_tree
from rayjob.store.publish import publish_missing

logger = logging.getLogger(__name__)

REPEATS_FILE = "repeats.csv"


@dataclass(frozen=True, slots=True)
class PreparedCorpus:
    """A finished corpus on storage."""

    tokenizer_folder: Path
    tokens_folder: Path
    manifest: Manifest


def find_prepared(data: DataConfig, tokenizer: TokenizerConfig, storage: Path) -> PreparedCorpus | None:
    """The finished corpus for these settings and the sources as they are now, or None; without Ray, cheap."""
    try:
        inputs = tokenizer_inputs(data, tokenizer, find_sources(data, storage))
        tokenizer_folder = storage / "tokenizers" / digest(inputs)
        if not fetch_folder(tokenizer_folder, CONFIG_FILE):
            return None
        inputs = tokens_inputs(inputs, load_tokenizer(tokenizer_folder))
        tokens_folder = storage / "tokens" / digest(inputs)
        manifest = Manifest.load(tokens_folder)
    except (CorpusError, BlocksError):
        return None  # whoever needs the corpus then meets the same error in `check` or `prepare`
    if missing_blocks(tokens_folder, manifest):
        return None
    return PreparedCorpus(tokenizer_folder, tokens_folder, manifest)


def find_without_sources(data: DataConfig, tokenizer: TokenizerConfig, storage: Path) -> list[PreparedCorpus]:
    """The finished corpora for these settings from their manifests alone, whatever has become of the sources.

    The newest comes first.
    """
    wanted = tokenizer_inputs(data, tokenizer, ())
    paths = (storage / "tokens").glob(f"*/{MANIFEST_FILE}")
    found = []
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        with suppress(BlocksError):  # a damaged one is as good as none
            manifest = Manifest.load(path.parent)
            inputs = inputs_of_tokenizer(manifest.inputs)
            if have_same_settings(inputs, wanted):
                found.append(PreparedCorpus(storage / "tokenizers" / digest(inputs), path.parent, manifest))
    return found


def check(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    storage: Path,
    max_seq_len: int,
    *,
    is_cancelled: Callable[[], bool] | None = None,
) -> list[str]:
    """Every problem that would stop `prepare` and can be found without Ray, in full sentences.

    A small corpus of documents gets its tokenizer here, which `prepare` then finds; of rows only the footers are
    read; a prepared corpus is only looked up.

    Raises:
        PrepareCancelled: `is_cancelled` turned true.
    """
    is_cancelled = is_cancelled or (lambda: False)
    prepared = find_prepared(data, tokenizer, storage)
    if prepared is not None:
        return window_problems(prepared.manifest, max_seq_len)
    try:
        with _storage_errors():
            sources = obtain_sources(data, storage)
            _stop_if(is_cancelled, "before looking into the sources")
            if has_rows(data):
                inspect_files(sources, data.text_column, data.doc_column)
                return []
            return _check_documents(data, tokenizer, storage, sources, max_seq_len, is_cancelled)
    except CorpusError as error:
        return error.problems


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    storage: Path,
    max_seq_len: int,
    *,
    is_cancelled: Callable[[], bool] | None = None,
) -> PreparedCorpus:
    """Makes what is missing of tokenizer and blocks, and returns the finished corpus.

    Ray must be initialised unless everything is there already.

    Raises:
        CorpusError: what `check` would have told, and what only reading the text can tell.
        PrepareCancelled, WaitCancelled: `is_cancelled` turned true; the next call goes on from there.
    """
    is_cancelled = is_cancelled or (lambda: False)
    prepared = find_prepared(data, tokenizer, storage)
    if prepared is None or prepared.manifest.totals["max_seq_len"] != max_seq_len:
        with _storage_errors(), exclusive_after_wait(storage / "prepare.lock", f"storage {storage}", is_cancelled):
            # Whoever held the lock may have done the work.
            prepared = find_prepared(data, tokenizer, storage)
            if prepared is None:
                prepared = _prepare_locked(data, tokenizer, storage, max_seq_len, is_cancelled)
            prepared = _with_windows(prepared, max_seq_len)
    with _storage_errors():  # what a killed process had finished and not published
        _publish(prepared)
    problems = window_problems(prepared.manifest, max_seq_len)
    if problems:
        raise CorpusError(problems)
    _log_prepared(prepared)
    return prepared


def _prepare_locked(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    storage: Path,
    max_seq_len: int,
    is_cancelled: Callable[[], bool],
) -> PreparedCorpus:
    sources = obtain_sources(data, storage)
    inputs = tokenizer_inputs(data, tokenizer, sources)
    tokenizer_folder = storage / "tokenizers" / digest(inputs)
    made = [storage / "cache"]
    if not fetch_folder(tokenizer_folder, CONFIG_FILE):
        made.append(tokenizer_folder)
    with unchanged_sources(data, storage, sources, made):
        plan = make_plan(data, sources, storage / "cache", is_cancelled)
        for warning in plan.facts.warnings:
            logger.warning("%s", warning)
        if problems := size_problems(plan.units, max_seq_len):
            raise CorpusError(problems)
        _stop_if(is_cancelled, "before training the tokenizer")
        ensure_tokenizer(data, tokenizer, storage, inputs, plan.of("train"), is_cancelled)
        _stop_if(is_cancelled, "before tokenizing")
        inputs = tokens_inputs(inputs, load_tokenizer(tokenizer_folder))
        tokens_folder = storage / "tokens" / digest(inputs)
        for reason in explain_rebuild(storage, inputs):
            logger.info("%s", reason)
        made.append(tokens_folder)
        folders = Folders(str(tokens_folder), str(tokenizer_folder), str(storage / "cache" / "words"))
        blocks = _ensure_blocks(plan, folders, is_cancelled)
    manifest = build_manifest(inputs, origin(data, storage), plan.facts, blocks, max_seq_len)
    if plan.facts.repeats is not None:
        write_atomically(tokens_folder / REPEATS_FILE, plan.facts.repeats)
    return _finish(PreparedCorpus(tokenizer_folder, tokens_folder, manifest))


def _check_documents(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    storage: Path,
    sources: tuple[Source, ...],
    max_seq_len: int,
    is_cancelled: Callable[[], bool],
) -> list[str]:
    splits = catalog_of(data, sources, storage / "cache", is_cancelled).splits()
    _stop_if(is_cancelled, "before training the tokenizer")
    units: list[AnyUnit] = [unit for split, stretches in splits.items() for unit in plan_units(split, stretches)]
    train = [unit for unit in units if unit.split == "train"]
    problems = size_problems(units, max_seq_len)
    if not problems and size_bytes(train) <= SMALL_CORPUS_BYTES:
        inputs = tokenizer_inputs(data, tokenizer, sources)
        folder = ensure_tokenizer(data, tokenizer, storage, inputs, train, is_cancelled)
        problems = short_problems(units, load_tokenizer(folder), max_seq_len)
    return problems


def _ensure_blocks(plan: Plan, folders: Folders, is_cancelled: Callable[[], bool]) -> dict[str, list[Block]]:
    """The blocks of each side in order; only missing ones are written."""
    tokens_folder = Path(folders.tokens)
    finished = _finished_blocks(plan.units, tokens_folder)
    missing = [unit for unit in plan.units if (unit.split, unit.block_name) not in finished]
    if finished:
        logger.info("%d of %d blocks are there already", len(finished), len(plan.units))
    if missing and (tokens_folder / MANIFEST_FILE).exists():
        names = ", ".join(f"{unit.split}/{unit.block_name}" for unit in missing)
        logger.warning("%s: gone or damaged, written again: %s", tokens_folder, names)
    if missing:
        finished |= write_blocks(missing, folders, is_cancelled=is_cancelled)
    return {split: [finished[split, unit.block_name] for unit in plan.of(split)] for split in SPLITS}


def _finished_blocks(units: Sequence[AnyUnit], tokens_folder: Path) -> dict[tuple[str, str], Block]:
    finished = {}
    fetch_tree(tokens_folder)
    for split in SPLITS:
        remove_temporary(tokens_folder / split)
    for unit in units:
        block = read_finished_block(tokens_folder / unit.split / unit.block_name, unit_hash=unit.hash)
        if block is not None:
            finished[unit.split, unit.block_name] = block
    return finished


def _with_windows(prepared: PreparedCorpus, max_seq_len: int) -> PreparedCorpus:
    """Counts the windows of another max_seq_len; the tokens stay as they are."""
    if prepared.manifest.totals["max_seq_len"] == max_seq_len:
        return prepared
    return _finish(dataclasses.replace(prepared, manifest=with_windows(prepared.manifest, max_seq_len)))


def _finish(prepared: PreparedCorpus) -> PreparedCorpus:
    """Writes the card and then the manifest, which makes the corpus complete."""
    if not window_problems(prepared.manifest, prepared.manifest.totals["max_seq_len"]):
        write_card(prepared.tokens_folder, prepared.manifest, load_tokenizer(prepared.tokenizer_folder))
    _publish(prepared)
    prepared.manifest.save(prepared.tokens_folder)
    return prepared


def _publish(prepared: PreparedCorpus) -> None:
    publish_missing(prepared.tokenizer_folder, CONFIG_FILE)
    publish_missing(prepared.tokens_folder, MANIFEST_FILE)


def _stop_if(is_cancelled: Callable[[], bool], when: str) -> None:
    if is_cancelled():
        raise PrepareCancelled(f"Stopped {when}; run the same command again to go on.")


@contextmanager
def _storage_errors() -> Iterator[None]:
    """A full or read-only storage stops the work with a sentence; what is finished stays."""
    try:
        yield
    except OSError as error:
        raise storage_error(error) from error


def _log_prepared(prepared: PreparedCorpus) -> None:
    for split in SPLITS:
        totals = prepared.manifest.split(split)
        logger.info(
            "%s: documents %d, %.1f MB, %s tokens in %d blocks",
            prepared.tokens_folder / split,
            totals.documents,
            totals.bytes / 1e6,
            f"{totals.tokens:,}",
            len(totals.blocks),
        )
