"""Whether a corpus is large enough: each side of the split must fill one window of max_seq_len + 1 tokens."""

import itertools
from collections.abc import Iterator, Sequence

from model.tokenizer import Tokenizer
from rayjob.corpus.blocks import SPLITS, Manifest
from rayjob.corpus.units import AnyUnit


def size_bytes(units: Sequence[AnyUnit]) -> int:
    """Bytes of text that units stand for, as they are in the sources."""
    return sum(unit.source_bytes for unit in units)


def size_problems(units: Sequence[AnyUnit], max_seq_len: int) -> list[str]:
    """Sides that cannot fill a window whatever the tokenizer: a token is a byte at least, or a document's EOS."""
    problems = []
    for split in SPLITS:
        of_split = [unit for unit in units if unit.split == split]
        most = size_bytes(of_split) + sum(len(unit.spans) for unit in of_split)
        if most <= max_seq_len:
            problems.append(_too_short(split, f"at most {most} tokens", max_seq_len))
    return problems


def short_problems(units: Sequence[AnyUnit], tokenizer: Tokenizer, max_seq_len: int) -> list[str]:
    """Sides that do not fill one window with this tokenizer; encodes no more text than it takes to know."""
    problems = []
    for split in SPLITS:
        tokens = 0
        for n_tokens in _token_counts([unit for unit in units if unit.split == split], tokenizer):
            tokens += n_tokens
            if tokens > max_seq_len:
                break
        else:
            problems.append(_too_short(split, f"{tokens} tokens", max_seq_len))
    return problems


def _token_counts(units: Sequence[AnyUnit], tokenizer: Tokenizer) -> Iterator[int]:
    for text in itertools.chain.from_iterable(unit.texts(tokenizer.normalizer) for unit in units):
        for part in text.parts:
            yield from map(len, tokenizer.encode_pieces(part))
        yield int(text.is_end)


def window_problems(manifest: Manifest, max_seq_len: int) -> list[str]:
    """Sides of a finished corpus that do not fill one window."""
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
