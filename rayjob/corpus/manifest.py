"""The manifest of a finished corpus, summed up from the catalog and the blocks."""

import hashlib
from collections.abc import Mapping, Sequence

from rayjob.corpus.blocks import DTYPE, SPLITS, Block, Manifest, SplitTotals
from rayjob.corpus.catalog import Catalog, Stretch
from rayjob.corpus.identity import Inputs, digest
from rayjob.corpus.sources import Source


def build_manifest(
    inputs: Inputs, sources: Sequence[Source], catalog: Catalog, blocks: Mapping[str, list[Block]]
) -> Manifest:
    """Adds up what was read and written."""
    stretches = catalog.splits()
    sides = {split: _totals(stretches[split], blocks[split]) for split in SPLITS}
    described = [
        {**source.identity(), **facts._asdict()}
        for source, facts in zip(sources, catalog.source_facts, strict=True)
    ]
    totals = {
        "rows_in": catalog.rows_in,
        "rows_empty": catalog.rows_empty,
        "rows_boilerplate": 0,  # whole documents are never boilerplate
        "rows_duplicate": catalog.rows_duplicate,
        "rows_kept": catalog.rows_in - catalog.rows_empty - catalog.rows_duplicate,
        "bytes_in": sum(source.bytes for source in sources),
        "bytes_kept": sum(side.bytes for side in sides.values()),
        "tokens": sum(side.tokens for side in sides.values()),
    }
    return Manifest(
        hash=digest(inputs),
        inputs=inputs,
        tokenizer_hash=inputs["tokenizer_hash"],
        dtype=DTYPE,
        sources=described,
        train=sides["train"],
        val=sides["val"],
        totals=totals,
        warnings=list(catalog.warnings),
    )


def _totals(stretches: Sequence[Stretch], blocks: list[Block]) -> SplitTotals:
    texts = sorted(
        f"{stretch.document.sha256} {stretch.pieces[0].start} {stretch.bytes}" for stretch in stretches
    )
    return SplitTotals(
        documents=len(stretches),
        tokens=sum(block.tokens for block in blocks),
        bytes=sum(block.text_bytes for block in blocks),
        documents_sha256=hashlib.sha256("\n".join(texts).encode()).hexdigest(),
        blocks=blocks,
    )
