"""Corpus -> tokenizer -> Parquet blocks, each step skipped where its result is on storage.

sources (hashed)          sources.py, demo.py
  -> catalog              documents.py, dedup.py, split.py, catalog.py: read, drop copies, hold out validation
  -> tokenizer            <storage>/tokenizers/<hash>/, trained on the training documents only
  -> units -> blocks      units.py, tokenize.py: <storage>/tokens/<hash>/, one Ray task a block
  -> manifest.json        blocks.py, last: without it nothing was prepared
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from model.normalizer import Normalizer
from model.tokenizer import Tokenizer, VocabularyTooLarge, train_tokenizer
from rayjob.atomic import new_folder, remove_temporary
from rayjob.config import DataConfig, TokenizerConfig
from rayjob.corpus import demo
from rayjob.corpus.blocks import (
    SPLITS,
    Block,
    BlocksError,
    Manifest,
    missing_blocks,
    read_finished_block,
)
from rayjob.corpus.catalog import Catalog, CatalogSettings, Stretch, build_catalog, read_texts
from rayjob.corpus.errors import CorpusError, PrepareCancelled
from rayjob.corpus.identity import digest, explain_rebuild, tokenizer_inputs, tokens_inputs
from rayjob.corpus.manifest import build_manifest
from rayjob.corpus.sources import Source, find_sources
from rayjob.corpus.tokenize import write_blocks
from rayjob.corpus.units import Unit, plan_units
from rayjob.lock import exclusive_after_wait

logger = logging.getLogger(__name__)

# `check` trains the tokenizer for up to this much text, in seconds; more text fills any vocabulary.
SMALL_CORPUS_BYTES = 64 * 2**20


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
        if not tokenizer_folder.is_dir():
            return None
        inputs = tokens_inputs(inputs, _load_tokenizer(tokenizer_folder))
        tokens_folder = storage / "tokens" / digest(inputs)
        manifest = Manifest.load(tokens_folder)
    except (CorpusError, BlocksError):
        return None  # whoever needs the corpus then meets the same error in `check` or `prepare`
    if missing_blocks(tokens_folder, manifest):
        return None
    return PreparedCorpus(tokenizer_folder, tokens_folder, manifest)


def check(data: DataConfig, tokenizer: TokenizerConfig, storage: Path, max_seq_len: int) -> list[str]:
    """Every problem that would stop `prepare`, in full sentences, found without Ray.

    A small corpus gets its tokenizer here, which `prepare` then finds; a prepared one is only looked up.
    """
    prepared = find_prepared(data, tokenizer, storage)
    if prepared is not None:
        return _window_problems(prepared.manifest, max_seq_len)
    try:
        sources = _obtain_sources(data, storage)
        catalog = build_catalog(sources, _settings(data))
        problems = _size_problems(catalog, max_seq_len)
        if not problems and _size(catalog.train) <= SMALL_CORPUS_BYTES:
            folder = _ensure_tokenizer(data, tokenizer, storage, sources, catalog)
            problems = _short_problems(data, catalog, _load_tokenizer(folder), max_seq_len)
    except CorpusError as error:
        return error.problems
    return problems


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
        CorpusError: what `check` would have told.
        PrepareCancelled, WaitCancelled: `is_cancelled` turned true; the next call goes on from there.
    """
    is_cancelled = is_cancelled or (lambda: False)
    prepared = find_prepared(data, tokenizer, storage)
    if prepared is None:
        with exclusive_after_wait(storage / "prepare.lock", f"storage {storage}", is_cancelled):
            # Whoever held the lock may have done the work.
            prepared = find_prepared(data, tokenizer, storage)
            if prepared is None:
                prepared = _prepare_locked(data, tokenizer, storage, max_seq_len, is_cancelled)
    problems = _window_problems(prepared.manifest, max_seq_len)
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
    sources = _obtain_sources(data, storage)
    catalog = build_catalog(sources, _settings(data))
    for warning in catalog.warnings:
        logger.warning("%s", warning)
    if problems := _size_problems(catalog, max_seq_len):
        raise CorpusError(problems)
    _stop_if(is_cancelled, "before training the tokenizer")
    tokenizer_folder = _ensure_tokenizer(data, tokenizer, storage, sources, catalog)
    _stop_if(is_cancelled, "before tokenizing")
    inputs = tokens_inputs(tokenizer_inputs(data, tokenizer, sources), _load_tokenizer(tokenizer_folder))
    tokens_folder = storage / "tokens" / digest(inputs)
    for reason in explain_rebuild(storage, inputs):
        logger.info("%s", reason)
    blocks = _ensure_blocks(catalog, tokens_folder, tokenizer_folder, is_cancelled)
    manifest = build_manifest(inputs, sources, catalog, blocks)
    manifest.save(tokens_folder)
    return PreparedCorpus(tokenizer_folder, tokens_folder, manifest)


def _obtain_sources(data: DataConfig, storage: Path) -> tuple[Source, ...]:
    if data.source == "demo":
        demo.fetch(storage)
    return find_sources(data, storage)


def _settings(data: DataConfig) -> CatalogSettings:
    normalizer = Normalizer(detokenize=data.detokenize, lowercase=data.lowercase)
    return CatalogSettings(normalizer, data.text_column, data.dedup, data.val_fraction)


def _ensure_tokenizer(
    data: DataConfig, config: TokenizerConfig, storage: Path, sources: tuple[Source, ...], catalog: Catalog
) -> Path:
    folder = storage / "tokenizers" / digest(tokenizer_inputs(data, config, sources))
    if folder.is_dir():
        return folder
    settings = _settings(data)
    logger.info("training a tokenizer of %d pieces on %.1f MB", config.vocab_size, _size(catalog.train) / 1e6)
    try:
        model = train_tokenizer(
            read_texts(catalog.train, settings), vocab_size=config.vocab_size, model_type=config.model_type
        )
    except VocabularyTooLarge as error:
        raise CorpusError(
            [
                f"tokenizer.vocab_size={config.vocab_size} is too large for this corpus "
                f"({_size(catalog.train):,} bytes of training text): the largest possible is {error.largest}."
            ]
        ) from None
    except ValueError as error:  # too few pieces for the characters of the text, or nothing but white space
        raise CorpusError([str(error)]) from error
    with new_folder(folder) as fresh:
        Tokenizer(model, settings.normalizer).save(fresh)
    return folder


def _load_tokenizer(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.load(folder)
    except ValueError as error:
        raise CorpusError([f"{error} Delete {folder}, then it is made anew."]) from error


def _ensure_blocks(
    catalog: Catalog, tokens_folder: Path, tokenizer_folder: Path, is_cancelled: Callable[[], bool]
) -> dict[str, list[Block]]:
    """The blocks of each side in order; only missing ones are written."""
    units = [unit for split, stretches in catalog.splits().items() for unit in plan_units(split, stretches)]
    finished = _finished_blocks(units, tokens_folder)
    missing = [unit for unit in units if (unit.split, unit.block_name) not in finished]
    if finished:
        logger.info("%d of %d blocks are there already", len(finished), len(units))
    if missing and (tokens_folder / "manifest.json").exists():
        names = ", ".join(f"{unit.split}/{unit.block_name}" for unit in missing)
        logger.warning("%s: gone or damaged, written again: %s", tokens_folder, names)
    if missing:
        finished |= write_blocks(missing, tokens_folder, tokenizer_folder, is_cancelled=is_cancelled)
    return {split: [finished[unit.split, unit.block_name] for unit in units if unit.split == split] for split in SPLITS}


def _finished_blocks(units: Sequence[Unit], tokens_folder: Path) -> dict[tuple[str, str], Block]:
    finished = {}
    for split in SPLITS:
        remove_temporary(tokens_folder / split)
    for unit in units:
        path = tokens_folder / unit.split / unit.block_name
        block = read_finished_block(path, unit_hash=unit.hash, text_bytes=unit.text_bytes)
        if block is not None:
            finished[unit.split, unit.block_name] = block
    return finished


def _size(stretches: Sequence[Stretch]) -> int:
    return sum(stretch.bytes for stretch in stretches)


def _size_problems(catalog: Catalog, max_seq_len: int) -> list[str]:
    """Sides that cannot fill a window whatever the tokenizer: a token is a byte at least, or a document's EOS."""
    return [
        _too_short(split, f"at most {most} tokens", max_seq_len)
        for split, stretches in catalog.splits().items()
        if (most := _size(stretches) + len(stretches)) <= max_seq_len
    ]


def _short_problems(data: DataConfig, catalog: Catalog, tokenizer: Tokenizer, max_seq_len: int) -> list[str]:
    """Sides that do not fill one window with this tokenizer; encodes no more text than it takes to know."""
    problems = []
    for split, stretches in catalog.splits().items():
        tokens = 0
        texts = read_texts(stretches, _settings(data))
        for tokens_of_piece in itertools.chain.from_iterable(map(tokenizer.encode_pieces, texts)):
            tokens += len(tokens_of_piece)
            if tokens > max_seq_len:
                break
        else:
            tokens += sum(stretch.pieces[-1].stop == stretch.document.chars for stretch in stretches)
            if tokens <= max_seq_len:
                problems.append(_too_short(split, f"{tokens} tokens", max_seq_len))
    return problems


def _window_problems(manifest: Manifest, max_seq_len: int) -> list[str]:
    return [
        _too_short(split, f"{tokens} tokens", max_seq_len)
        for split in SPLITS
        if (tokens := manifest.split(split).tokens) <= max_seq_len
    ]


def _too_short(split: str, amount: str, max_seq_len: int) -> str:
    side = {"train": "training", "val": "validation"}[split]
    remedy = "add text or lower model.max_seq_len" + (" or raise data.val_fraction" if split == "val" else "")
    return (
        f"The corpus is too small: its {side} part has {amount}, one window of "
        f"model.max_seq_len={max_seq_len} needs {max_seq_len + 1}; {remedy}."
    )


def _stop_if(is_cancelled: Callable[[], bool], when: str) -> None:
    if is_cancelled():
        raise PrepareCancelled(f"Stopped {when}; run the same command again to go on.")


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
