"""What a tokenizer and a set of blocks are made from, and the folder names that follow.

A folder is named by the hash of its inputs, so changed text, cleaning or tokenizer never meets old tokens: it
leads to another folder. A file's date and place do not enter.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from model.normalizer import Normalizer
from model.tokenizer import Tokenizer
from rayjob.config import DataConfig, TokenizerConfig
from rayjob.corpus.blocks import BlocksError, Manifest
from rayjob.corpus.documents import PIECE_CHARS
from rayjob.corpus.sources import Source
from rayjob.corpus.units import BLOCK_BYTES

FORMAT = 1  # raise it when the rules for cleaning, copies, the split or the blocks change

Inputs = dict[str, Any]


def tokenizer_inputs(data: DataConfig, tokenizer: TokenizerConfig, sources: Sequence[Source]) -> Inputs:
    """Everything that decides the tokenizer's pieces."""
    normalizer = Normalizer(detokenize=data.detokenize, lowercase=data.lowercase)
    return {
        "format": FORMAT,
        "sources": [source.identity() for source in sources],
        "text_column": data.text_column
        if any(source.name.endswith(".jsonl") for source in sources)
        else None,
        "normalizer": normalizer.to_json(),
        "dedup": data.dedup,
        "val_fraction": data.val_fraction,
        "vocab_size": tokenizer.vocab_size,
        "model_type": tokenizer.model_type,
        "sentencepiece": sentencepiece.__version__,
    }


def tokens_inputs(inputs: Inputs, tokenizer: Tokenizer) -> Inputs:
    """Everything that decides the blocks: the tokenizer's inputs, and the tokenizer as it is on storage."""
    return inputs | {"tokenizer_hash": tokenizer.hash, "piece_chars": PIECE_CHARS, "block_bytes": BLOCK_BYTES}


def digest(inputs: Inputs) -> str:
    """Folder name for inputs: 16 hex digits."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def explain_rebuild(storage: Path, inputs: Inputs) -> list[str]:
    """How `inputs` differ from those of the newest blocks on storage; empty when there are none."""
    manifests = sorted((storage / "tokens").glob("*/manifest.json"), key=lambda path: path.stat().st_mtime_ns)
    if not manifests:
        return []
    folder = manifests[-1].parent
    try:
        old = Manifest.load(folder).inputs
    except BlocksError as error:
        return [str(error)]
    changes = _changed_sources(old.get("sources", []), inputs["sources"])
    changes += [
        f"{key} {old.get(key)} -> {value}"
        for key, value in inputs.items()
        if key != "sources" and old.get(key) != value
    ]
    return [f"{folder} holds tokens of other inputs: {change}" for change in changes]


def _changed_sources(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    before = {source["name"]: source["sha256"] for source in old}
    after = {source["name"]: source["sha256"] for source in new}
    return [
        *(f"{name} is new" for name in after if name not in before),
        *(f"{name} is gone" for name in before if name not in after),
        *(f"{name} changed" for name in after if before.get(name, after[name]) != after[name]),
    ]
