"""The manifest of a finished corpus, summed up from its facts and its blocks."""

import dataclasses
from collections.abc import Mapping

from rayjob.corpus.blocks import DTYPE, SPLITS, Block, Manifest, SplitTotals, n_windows
from rayjob.corpus.facts import CorpusFacts
from rayjob.corpus.identity import Inputs, digest


def build_manifest(
    inputs: Inputs,
    origin: Mapping[str, str],
    facts: CorpusFacts,
    blocks: Mapping[str, list[Block]],
    max_seq_len: int,
) -> Manifest:
    """Adds up what was read and written."""
    sides = {
        split: SplitTotals(
            documents=facts.documents[split],
            tokens=sum(block.tokens for block in blocks[split]),
            windows=0,
            tail_tokens=0,
            bytes=sum(block.text_bytes for block in blocks[split]),
            documents_sha256=facts.sha256s[split],
            blocks=blocks[split],
        )
        for split in SPLITS
    }
    manifest = Manifest(
        hash=digest(inputs),
        inputs=inputs,
        tokenizer_hash=inputs["tokenizer_hash"],
        dtype=DTYPE,
        sources=facts.sources,
        origin=dict(origin),
        train=sides["train"],
        val=sides["val"],
        totals=facts.totals,
        statistics=facts.statistics,
        warnings=facts.warnings,
    )
    return with_windows(manifest, max_seq_len)


def with_windows(manifest: Manifest, max_seq_len: int) -> Manifest:
    """The same corpus cut into windows of another length."""
    train, val = (_cut(manifest.split(split), max_seq_len) for split in SPLITS)
    counted = {
        "tokens": train.tokens + val.tokens,
        "windows": train.windows + val.windows,
        "tail_tokens": train.tail_tokens + val.tail_tokens,
        "max_seq_len": max_seq_len,
    }
    return dataclasses.replace(manifest, totals=manifest.totals | counted, train=train, val=val)


def _cut(totals: SplitTotals, max_seq_len: int) -> SplitTotals:
    windows = n_windows(totals.tokens, max_seq_len)
    return dataclasses.replace(totals, windows=windows, tail_tokens=totals.tokens - windows * max_seq_len)
