"""The corpus's own tokenizer: found on storage by the hash of what it depends on, or trained."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from model.tokenizer import (
    CONFIG_FILE,
    Tokenizer,
    VocabularyTooLarge,
    train_tokenizer,
    train_tokenizer_from_counts,
)
from rayjob.atomic import new_folder
from rayjob.config import DataConfig, TokenizerConfig
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.identity import Inputs, digest
from rayjob.corpus.plans import has_rows, normalizer_of
from rayjob.corpus.sizes import size_bytes
from rayjob.corpus.units import AnyUnit
from rayjob.corpus.words import count_words
from rayjob.store.fetch import fetch_folder

logger = logging.getLogger(__name__)

# Up to this much text of whole documents the driver trains the tokenizer itself, in seconds, so that `check` can.
SMALL_CORPUS_BYTES = 64 * 2**20


def ensure_tokenizer(
    data: DataConfig,
    config: TokenizerConfig,
    storage: Path,
    inputs: Inputs,
    units: Sequence[AnyUnit],
    is_cancelled: Callable[[], bool],
) -> Path:
    """Returns the folder of the tokenizer of these inputs, training it on the units of the training side if it is new.

    Raises:
        CorpusError: the text does not suffice for the vocabulary.
        PrepareCancelled: `is_cancelled` turned true.
    """
    folder = storage / "tokenizers" / digest(inputs)
    if fetch_folder(folder, CONFIG_FILE):
        return folder
    logger.info("training a tokenizer of %d pieces on %.1f MB", config.vocab_size, size_bytes(units) / 1e6)
    normalizer = normalizer_of(data)
    try:
        if not has_rows(data) and size_bytes(units) <= SMALL_CORPUS_BYTES:
            texts = ("".join(text.parts) for unit in units for text in unit.texts(normalizer))
            model = train_tokenizer(texts, vocab_size=config.vocab_size, model_type=config.model_type)
        else:
            counts = count_words(units, storage / "cache" / "words", normalizer, is_cancelled)
            model = train_tokenizer_from_counts(counts, vocab_size=config.vocab_size, model_type=config.model_type)
    except VocabularyTooLarge as error:
        raise CorpusError(
            [
                f"tokenizer.vocab_size={config.vocab_size} is too large for this corpus "
                f"({size_bytes(units):,} bytes of training text): the largest possible is {error.largest}."
            ]
        ) from None
    except CorpusError:
        raise
    except ValueError as error:  # too few pieces for the characters of the text, or nothing but white space
        raise CorpusError([str(error)]) from error
    with new_folder(folder) as fresh:
        Tokenizer(model, normalizer).save(fresh)
    return folder


def load_tokenizer(folder: Path) -> Tokenizer:
    """Returns a tokenizer of this storage; a damaged one is a CorpusError that says what to do."""
    try:
        return Tokenizer.load(folder)
    except ValueError as error:
        raise CorpusError([f"{error} Delete {folder}, then it is made anew."]) from error
