"""From a window's id back to its document and text."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from model.tokenizer import Tokenizer
from rayjob.corpus.blocks import Block, Manifest, read_block


class WindowPart(NamedTuple):
    """What one document, or run of neighbouring rows, gives to a window.

    Attributes:
        doc_id: file name of a text, `file:line` of .jsonl, `file:row` of the first row of a run, or the document's
            name. block: the block's file. first_token: of the part, counted in that row of the block.
        tokens: how many. text: what they decode to.
    """

    doc_id: str
    block: str
    first_token: int
    tokens: int
    text: str


def find_window(
    tokens_folder: Path, manifest: Manifest, tokenizer: Tokenizer, split: str, window: int, max_seq_len: int
) -> list[WindowPart]:
    """The parts of a window: tokens [window * T, window * T + T + 1) of its side's stream.

    Raises:
        IndexError: there is no such window.
        BlocksError: a block is missing or is not the one that was written.
    """
    first, end = window * max_seq_len, window * max_seq_len + max_seq_len + 1
    if window < 0 or end > manifest.split(split).tokens:
        raise IndexError(window)
    parts: list[WindowPart] = []
    start = 0
    for block in manifest.split(split).blocks:
        if start < end and start + block.tokens > first:
            parts += _parts_of_block(tokens_folder / split, block, first - start, end - start, tokenizer)
        start += block.tokens
    return parts


def _parts_of_block(folder: Path, block: Block, first: int, end: int, tokenizer: Tokenizer) -> Iterator[WindowPart]:
    """The parts in tokens [first, end) of a block; either may lie outside of it."""
    table = read_block(folder, block)
    lists = table.column("tokens").combine_chunks()
    bounds = np.asarray(lists.offsets)
    tokens = lists.flatten().to_numpy()
    for row, doc_id in enumerate(table.column("doc_id").to_pylist()):
        start, stop = max(first, int(bounds[row])), min(end, int(bounds[row + 1]))
        if start < stop:
            text = tokenizer.decode(tokens[start:stop].tolist())
            yield WindowPart(doc_id, f"{folder.name}/{block.name}", start - int(bounds[row]), stop - start, text)
