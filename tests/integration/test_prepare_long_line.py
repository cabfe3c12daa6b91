"""A line of 50 MB through the whole of `prepare`: real Ray Data, real files, the real sizes of blocks."""

import contextlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.normalizer import Normalizer
from model.tokenizer import Tokenizer
from rayjob.config import DataConfig, TokenizerConfig
from rayjob.corpus.blocks import token_stream
from rayjob.corpus.prepare import prepare

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

LINE_BYTES = 50_000_000
# The line as bytes and as text, normalised, its words (8 bytes for the place of each, 4 for its number) and its tokens.
MOST_BYTES = 30 * LINE_BYTES
SAMPLE_S = 0.05


@pytest.fixture(scope="module")
def line() -> str:
    words = random.Random(1)
    nouns = ["".join(words.choices("etaoinshrdlu", k=words.randint(2, 9))) for _ in range(5_000)]
    text = " ".join(words.choices(nouns, k=200_000))
    return (text + " ") * (LINE_BYTES // (len(text) + 1) + 1)


def write_text(folder: Path, line: str) -> DataConfig:
    (folder / "long.txt").write_text(line)
    (folder / "short.txt").write_text("it was a dark night , and nobody came . " * 5_000)
    return DataConfig(source="text", paths=(str(folder),), val_fraction=0.01)


def write_rows(folder: Path, line: str) -> DataConfig:
    short = [f"it was night {number} , and nobody came ." for number in range(4_000)]
    pq.write_table(pa.table({"text": [*short[:2_000], line, *short[2_000:]]}), folder / "a.parquet", row_group_size=500)
    return DataConfig(source="parquet", paths=(str(folder),), val_fraction=0.01)


@pytest.mark.parametrize("write", [write_text, write_rows])
def test_line_of_fifty_megabytes_is_lossless_in_bounded_memory(tmp_path: Path, line: str, write: Any) -> None:
    (tmp_path / "corpus").mkdir()
    data = write(tmp_path / "corpus", line)
    with peak_of_processes() as peak:
        prepared = prepare(data, TokenizerConfig(vocab_size=2_000), tmp_path / "s", 512)
    assert max(peak.values()) < MOST_BYTES
    tokenizer = Tokenizer.load(prepared.tokenizer_folder)
    texts = [
        tokenizer.decode(np.concatenate(list(token_stream(prepared.tokens_folder, split))).tolist())
        for split in ("train", "val")
    ]
    assert sum(map(len, texts)) == prepared.manifest.train.bytes + prepared.manifest.val.bytes
    # A single long document may be cut at a word; a row never is.
    assert Normalizer(False, False)(line) in ("".join(texts) if write is write_text else texts[0] + texts[1])


@contextmanager
def peak_of_processes() -> Iterator[dict[int, int]]:
    """Unique memory of each of this session's processes at its highest, above what it had at first."""
    peak: dict[int, int] = {}
    first: dict[int, int] = {}
    is_over = threading.Event()

    def look() -> None:
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                n_bytes = process.memory_full_info().uss
                above = n_bytes - first.setdefault(process.pid, n_bytes)
                peak[process.pid] = max(peak.get(process.pid, 0), above)

    def watch() -> None:
        while not is_over.wait(SAMPLE_S):
            look()

    look()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()
