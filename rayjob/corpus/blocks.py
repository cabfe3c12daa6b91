"""Parquet blocks of tokens and their manifest: the format that the feed reads.

    <folder>/train/part-00000.parquet …
    <folder>/val/part-00000.parquet …
    <folder>/manifest.json               written last

A row is one document or a piece of one: `doc_id: string`, `tokens: list<uint16>`, with EOS where the document
ends. The rows of all blocks in order are the token stream. Nothing in a block or a manifest depends on the
time, the machine or the number of tasks.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rayjob.atomic import write_atomically
from rayjob.corpus.parts import decode_table, encode_table
from rayjob.store.fetch import fetch_file
from rayjob.store.s3 import stored_below

DTYPE = "uint16"  # vocabularies have at most 65,536 pieces
SPLITS = ("train", "val")
MANIFEST_FILE = "manifest.json"
SCHEMA = pa.schema([("doc_id", pa.string()), ("tokens", pa.list_(pa.uint16()))])
UNIT_KEY = b"unit"
TEXT_BYTES_KEY = b"text_bytes"


class BlocksError(ValueError):
    """A manifest or a block is missing, damaged or not the one that was written."""


@dataclass(frozen=True, slots=True)
class Block:
    """One Parquet file: its name, rows, tokens, size and sha256 of the file, and bytes of the text inside."""

    name: str
    rows: int
    tokens: int
    bytes: int
    sha256: str
    text_bytes: int


@dataclass(frozen=True, slots=True)
class SplitTotals:
    """One side of the split.

    `documents` counts one that was cut between the sides on both, and where none are known the runs of neighbouring
    rows; `bytes` is the size of its normalised text in UTF-8; `documents_sha256` covers the contents of its
    documents whatever the tokenizer, so that equal values mean comparable losses per byte. tokens = windows x
    max_seq_len + tail_tokens.
    """

    documents: int
    tokens: int
    windows: int
    tail_tokens: int
    bytes: int
    documents_sha256: str
    blocks: list[Block]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the blocks were made from, and what they hold.

    Attributes:
        hash: of everything that decides the tokens; the folder's name. inputs: what `hash` covers: settings,
        sources, tokenizer hash. tokenizer_hash: `Tokenizer.hash` of the tokenizer that made the tokens.
        dtype: of a token. sources: per file name, bytes, sha256 and what was found in it. origin: repository, revision
        and commit of a data set from the hub, else empty. train, val: the two sides.
        totals: rows_in = rows_empty + rows_boilerplate + rows_duplicate + rows_kept; bytes_in = bytes_removed +
            bytes_kept, of the text as it stands in the sources; tokens = windows x max_seq_len + tail_tokens, over
            both sides. A row is a document, or a row of Parquet, whose line break counts. max_seq_len is that of the
            last `prepare`; the tokens do not depend on it.
        statistics: row_bytes, how many rows have at most so many bytes; removed_lines, the most frequent boilerplate.
        warnings: what a person should know about the sources, in full sentences.
    """

    hash: str
    inputs: dict[str, Any]
    tokenizer_hash: str
    dtype: str
    sources: list[dict[str, Any]]
    origin: dict[str, str]
    train: SplitTotals
    val: SplitTotals
    totals: dict[str, int]
    statistics: dict[str, dict[str, int]]
    warnings: list[str]

    def save(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False)
        write_atomically(folder / MANIFEST_FILE, text.encode() + b"\n")

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Reads `<folder>/manifest.json`.

        Raises:
            BlocksError: it is missing, so the blocks are not finished, or it is not a manifest.
        """
        path = Path(folder) / MANIFEST_FILE
        fetch_file(path)
        try:
            fields = json.loads(path.read_bytes())
            sides = {split: _load_totals(fields[split]) for split in SPLITS}
            return cls(**{**fields, **sides})
        except FileNotFoundError:
            raise BlocksError(f"{path} does not exist: the blocks are not finished, run prepare again.") from None
        except (ValueError, KeyError, TypeError) as error:
            raise BlocksError(f"{path} is not a manifest ({error!r}): delete it and run prepare again.") from None

    def split(self, name: str) -> SplitTotals:
        return {"train": self.train, "val": self.val}[name]


def n_windows(n_tokens: int, max_seq_len: int) -> int:
    """How many whole windows of max_seq_len + 1 tokens, each overlapping the next by one, fit."""
    return max(0, (n_tokens - 1) // max_seq_len)


class Row(NamedTuple):
    """One row of a block: the document's id and token ids (N,) uint16."""

    doc_id: str
    tokens: np.ndarray


def write_block(path: Path, rows: Sequence[Row], *, unit_hash: str, text_bytes: int) -> Block:
    """Writes a block whole or not at all, and describes it."""
    ends = np.cumsum([0, *(len(row.tokens) for row in rows)], dtype=np.int32)
    tokens = np.concatenate([row.tokens for row in rows])
    lists = pa.ListArray.from_arrays(pa.array(ends), pa.array(tokens, type=pa.uint16()))
    schema = SCHEMA.with_metadata({UNIT_KEY: unit_hash.encode(), TEXT_BYTES_KEY: str(text_bytes).encode()})
    table = pa.table([pa.array([row.doc_id for row in rows], pa.string()), lists], schema=schema)
    content = encode_table(table)
    write_atomically(path, content)
    return _describe(path.name, content, len(rows), len(tokens), text_bytes)


def read_finished_block(path: Path, *, unit_hash: str) -> Block | None:
    """The block at `path` if it is whole and was written for this unit, else None."""
    try:
        content = path.read_bytes()
        table = decode_table(content)
    except (OSError, pa.ArrowException):
        return None
    facts = table.schema.metadata or {}
    if facts.get(UNIT_KEY) != unit_hash.encode() or not table.schema.equals(SCHEMA):
        return None
    text_bytes = int(facts[TEXT_BYTES_KEY])
    return _describe(path.name, content, table.num_rows, len(_tokens_of(table)), text_bytes)


def token_stream(tokens_folder: Path, split: str) -> Iterator[np.ndarray]:
    """Yields the tokens of each block, (N,) uint16, in block order; only the manifest's blocks are read.

    Raises:
        BlocksError: a block is missing, or its bytes are not those that the manifest describes.
    """
    for block in Manifest.load(tokens_folder).split(split).blocks:
        yield _tokens_of(read_block(tokens_folder / split, block))


def read_block(folder: Path, block: Block) -> pa.Table:
    """The rows of a block that the manifest names.

    Raises:
        BlocksError: it is missing, or its bytes are not those that the manifest describes.
    """
    path = Path(folder) / block.name
    fetch_file(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise BlocksError(f"{path} is missing: run prepare again.") from None
    if hashlib.sha256(content).hexdigest() != block.sha256:
        raise BlocksError(f"{path} is not the block that was written: delete it and run prepare again.")
    return decode_table(content)


def missing_blocks(tokens_folder: Path, manifest: Manifest) -> list[Path]:
    """Blocks that the manifest names and that are gone or of another size, here and in the store."""
    sizes = {
        tokens_folder / split / block.name: block.bytes for split in SPLITS for block in manifest.split(split).blocks
    }
    missing = [path for path, n_bytes in sizes.items() if not path.exists() or path.stat().st_size != n_bytes]
    stored = stored_below(tokens_folder) if missing else {}
    # One that is fetched when it is read is not missing; one that is here and damaged is.
    return [path for path in missing if path.exists() or path not in stored or stored[path].bytes != sizes[path]]


def _tokens_of(table: pa.Table) -> np.ndarray:
    tokens: np.ndarray = table.column("tokens").combine_chunks().flatten().to_numpy()
    return tokens


def _describe(name: str, content: bytes, rows: int, tokens: int, text_bytes: int) -> Block:
    return Block(name, rows, tokens, len(content), hashlib.sha256(content).hexdigest(), text_bytes)


def _load_totals(fields: dict[str, Any]) -> SplitTotals:
    return SplitTotals(**{**fields, "blocks": [Block(**block) for block in fields["blocks"]]})
