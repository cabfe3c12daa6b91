import hashlib
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rayjob.corpus.blocks import (
    Block,
    BlocksError,
    Manifest,
    Row,
    SplitTotals,
    missing_blocks,
    read_finished_block,
    token_stream,
    write_block,
)

ROWS = [
    Row("a.txt", np.array([5, 65_535, 0, 2], np.uint16)),
    Row("empty", np.array([], np.uint16)),
    Row("b.txt", np.array([7, 2], np.uint16)),
]


def write(path: Path, rows: list[Row] = ROWS, unit_hash: str = "unit") -> Block:
    return write_block(path, rows, unit_hash=unit_hash, text_bytes=11)


@pytest.fixture
def tokens_folder(tmp_path: Path) -> Path:
    train = [write(tmp_path / "train" / f"part-{number:05d}.parquet", ROWS[number:]) for number in range(3)]
    val = [write(tmp_path / "val" / "part-00000.parquet")]
    sides = [SplitTotals(1, sum(block.tokens for block in blocks), 1, 0, 11, "sha", blocks) for blocks in (train, val)]
    inputs = {"sources": [], "val_fraction": 0.1}
    Manifest("hash", inputs, "tokenizer", "uint16", [], {}, *sides, {"rows_in": 2}, {}, ["naïve"]).save(tmp_path)
    return tmp_path


def test_block_describes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "train" / "part-00000.parquet"
    block = write(path)
    assert (block.name, block.rows, block.tokens, block.text_bytes) == ("part-00000.parquet", 3, 6, 11)
    assert block.bytes == path.stat().st_size
    assert block.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_block_is_a_parquet_file_with_the_documented_schema(tmp_path: Path) -> None:
    write(tmp_path / "part-00000.parquet")
    table = pq.read_table(tmp_path / "part-00000.parquet")
    assert [str(field.type) for field in table.schema] == ["string", "list<element: uint16>"]
    assert table.to_pylist() == [{"doc_id": row.doc_id, "tokens": row.tokens.tolist()} for row in ROWS]
    column = pq.ParquetFile(tmp_path / "part-00000.parquet").metadata.row_group(0).column(1)
    assert (column.compression, column.has_dictionary_page, column.statistics) == ("ZSTD", False, None)


def test_equal_rows_give_equal_bytes(tmp_path: Path) -> None:
    assert write(tmp_path / "one") == Block(**{**_fields(write(tmp_path / "two")), "name": "one"})


def test_no_temporary_file_stays(tmp_path: Path) -> None:
    write(tmp_path / "train" / "part-00000.parquet")
    assert [path.name for path in (tmp_path / "train").iterdir()] == ["part-00000.parquet"]


def test_finished_block_is_recognised_by_its_unit(tmp_path: Path) -> None:
    path = tmp_path / "part-00000.parquet"
    block = write(path)
    assert read_finished_block(path, unit_hash="unit") == block
    assert read_finished_block(path, unit_hash="another") is None


def test_absent_torn_and_foreign_blocks_are_not_finished(tmp_path: Path) -> None:
    path = tmp_path / "part-00000.parquet"
    assert read_finished_block(path, unit_hash="unit") is None
    write(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert read_finished_block(path, unit_hash="unit") is None
    path.write_bytes(b"no parquet at all")
    assert read_finished_block(path, unit_hash="unit") is None


def test_block_with_a_changed_token_is_not_finished(tmp_path: Path) -> None:
    """Its tokens are stored plainly when they do not compress, so that Parquet alone would read others."""
    path = tmp_path / "part-00000.parquet"
    tokens = np.random.default_rng(1).integers(0, 65_536, 5_000).astype(np.uint16)
    write(path, [Row("a", tokens)])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert read_finished_block(path, unit_hash="unit") is None


def test_manifest_reads_back_as_it_was_saved(tokens_folder: Path) -> None:
    manifest = Manifest.load(tokens_folder)
    content = (tokens_folder / "manifest.json").read_bytes()
    manifest.save(tokens_folder)
    assert (tokens_folder / "manifest.json").read_bytes() == content
    assert [block.tokens for block in manifest.train.blocks] == [6, 2, 2]


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"train": 3}'])
def test_damaged_manifest_is_named(tokens_folder: Path, content: bytes) -> None:
    (tokens_folder / "manifest.json").write_bytes(content)
    with pytest.raises(BlocksError, match="manifest.json is not a manifest"):
        Manifest.load(tokens_folder)


def test_folder_without_manifest_is_not_finished(tokens_folder: Path) -> None:
    (tokens_folder / "manifest.json").unlink()
    with pytest.raises(BlocksError, match="not finished"):
        next(token_stream(tokens_folder, "train"))


def test_stream_gives_the_tokens_in_block_order(tokens_folder: Path) -> None:
    stream = list(token_stream(tokens_folder, "train"))
    assert [tokens.dtype for tokens in stream] == [np.uint16] * 3
    assert np.concatenate(stream).tolist() == [5, 65_535, 0, 2, 7, 2, 7, 2, 7, 2]


def test_stream_never_reads_a_foreign_block(tokens_folder: Path) -> None:
    before = np.concatenate(list(token_stream(tokens_folder, "train"))).tolist()
    write(tokens_folder / "train" / "part-99999.parquet")
    assert np.concatenate(list(token_stream(tokens_folder, "train"))).tolist() == before


def test_stream_refuses_a_block_that_was_exchanged(tokens_folder: Path) -> None:
    write(tokens_folder / "train" / "part-00001.parquet", ROWS[:1])
    stream = token_stream(tokens_folder, "train")
    next(stream)
    with pytest.raises(BlocksError, match="part-00001.parquet is not the block that was written"):
        next(stream)


def test_missing_and_short_blocks_are_found(tokens_folder: Path) -> None:
    manifest = Manifest.load(tokens_folder)
    assert missing_blocks(tokens_folder, manifest) == []
    lost, short = tokens_folder / "train" / "part-00002.parquet", tokens_folder / "val" / "part-00000.parquet"
    lost.unlink()
    short.write_bytes(short.read_bytes()[:-1])
    assert missing_blocks(tokens_folder, manifest) == [lost, short]


def _fields(block: Block) -> dict[str, object]:
    return {name: getattr(block, name) for name in Block.__dataclass_fields__}
