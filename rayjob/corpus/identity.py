"""What a tokenizer and a set of blocks are made from, and the folder names that follow.

A folder is named by the hash of its inputs, so changed text, cleaning or tokenizer never meets old tokens: it
leads to another folder. A file's date and place do not enter.
"""

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.normalizer import Normalizer
from model.tokenizer import Tokenizer
from rayjob.config import DataConfig, TokenizerConfig
from rayjob.corpus.blocks import BlocksError, Manifest
from rayjob.corpus.boilerplate import PATTERN
from rayjob.corpus.decoding import SLAB_BYTES
from rayjob.corpus.documents import FORMAT
from rayjob.corpus.repeats import REPEAT_ROWS
from rayjob.corpus.rows import RANGE_BYTES
from rayjob.corpus.sources import ROW_SOURCES, Source
from rayjob.corpus.stretches import MEAN_ROWS
from rayjob.corpus.units import BLOCK_BYTES

ROW_RULES = {
    "boilerplate": hashlib.sha256(PATTERN.encode()).hexdigest()[:16],
    "repeat_rows": REPEAT_ROWS,
    "mean_rows": MEAN_ROWS,
    "range_bytes": RANGE_BYTES,
}

NAMED_SOURCES = 5  # sources written out when inputs changed; the rest are counted

Inputs = dict[str, Any]


def tokenizer_inputs(data: DataConfig, tokenizer: TokenizerConfig, sources: Sequence[Source]) -> Inputs:
    """Everything that decides the tokenizer's pieces."""
    normalizer = Normalizer(detokenize=data.detokenize, lowercase=data.lowercase)
    rules = ROW_RULES | {"doc_column": data.doc_column} if data.source in ROW_SOURCES else {}
    return {
        "format": FORMAT,
        "sources": [source.identity() for source in sources],
        "text_column": data.text_column if any(source.has_rows for source in sources) else None,
        "normalizer": json.loads(normalizer.to_json()),
        "dedup": data.dedup,
        "val_fraction": data.val_fraction,
        "vocab_size": tokenizer.vocab_size,
        "model_type": tokenizer.model_type,
        "sentencepiece": importlib.metadata.version("sentencepiece"),
        **rules,
    }


def tokens_inputs(inputs: Inputs, tokenizer: Tokenizer) -> Inputs:
    """Everything that decides the blocks: the tokenizer's inputs, and the tokenizer as it is on storage."""
    return inputs | {"tokenizer_hash": tokenizer.hash, "slab_bytes": SLAB_BYTES, "block_bytes": BLOCK_BYTES}


def inputs_of_tokenizer(inputs: Inputs) -> Inputs:
    """The way back from `tokens_inputs`."""
    return {key: value for key, value in inputs.items() if key not in ("tokenizer_hash", "slab_bytes", "block_bytes")}


def have_same_settings(inputs: Inputs, others: Inputs) -> bool:
    """Whether inputs of two tokenizers differ in nothing but the sources."""
    of_sources = ("sources", "text_column")
    return all(inputs.get(key) == others.get(key) for key in inputs.keys() | others if key not in of_sources)


def digest(inputs: Inputs) -> str:
    """Folder name for inputs: 16 hex digits."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def explain_rebuild(storage: Path, inputs: Inputs) -> list[str]:
    """How `inputs` differ from those of the blocks on storage that have most sources in common with them.

    Empty when no blocks have any.
    """
    names = {source["name"] for source in inputs["sources"]}
    candidates = []
    for path in sorted((storage / "tokens").glob("*/manifest.json")):
        with contextlib.suppress(BlocksError):  # a damaged manifest explains nothing, and nobody reads its blocks
            old = Manifest.load(path.parent).inputs
            common = names & {source["name"] for source in old["sources"]}
            candidates.append((len(common), path.stat().st_mtime_ns, path.parent, old))
    if not candidates or not max(candidate[0] for candidate in candidates):
        return []
    _, _, folder, old = max(candidates, key=lambda candidate: candidate[:2])
    changes = _changed_sources(old["sources"], inputs["sources"])
    changes += [
        f"{key} {old.get(key)} -> {new}" for key, new in inputs.items() if key != "sources" and old.get(key) != new
    ]
    return [f"{folder} does not fit: {change}" for change in changes]


def _changed_sources(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    before = {source["name"]: source["sha256"] for source in old}
    after = {source["name"]: source["sha256"] for source in new}
    return [
        *_name([name for name in after if name not in before], "new"),
        *_name([name for name in before if name not in after], "gone"),
        *_name([name for name in after if before.get(name, after[name]) != after[name]], "changed"),
    ]


def _name(sources: list[str], what: str) -> list[str]:
    if not sources:
        return []
    more = f" and {len(sources) - NAMED_SOURCES} more" if len(sources) > NAMED_SOURCES else ""
    return [f"{what}: {', '.join(sources[:NAMED_SOURCES])}{more}"]
