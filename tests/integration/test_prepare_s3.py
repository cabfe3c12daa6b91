"""Sources and storage under s3:// through pyarrow, against a real S3 server (moto's) on a loopback port."""

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayjob.config import DataConfig, TokenizerConfig
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.prepare import check, find_prepared, prepare
from rayjob.corpus.sources import find_sources
from rayjob.store.address import mirror_of
from rayjob.training.feed import open_windows
from tests.s3_server import CREDENTIALS, S3Server, running_server

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_server() as server:
        yield server


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    """A server with an empty bucket `books`, and an environment that leads there."""
    for name, value in {**server.environment, "RAYJOB_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    server.make_bucket("books")
    yield server
    server.client().delete_dir_contents("books")


def sentences(count: int, seed: int = 1) -> list[str]:
    words = random.Random(seed)
    return [" ".join("".join(words.choices("etaoinshrdlu", k=5)) for _ in range(8)) + " ." for _ in range(count)]


def names(storage: Path, source: Any, *paths: str) -> list[str]:
    return [found.name for found in find_sources(DataConfig(source=source, paths=paths), storage)]


def test_folders_files_and_globs_are_found_as_on_a_disk(tmp_path: Path, bucket: S3Server) -> None:
    for name in ("a/one.txt", "a/deep/two.txt", "a/readme.md", "b/three.txt", "b/x.parquet"):
        bucket.put(f"books/{name}", b"text")
    assert names(tmp_path, "text", "s3://books/a") == ["deep/two.txt", "one.txt"]
    assert names(tmp_path, "text", "s3://books/a/", "s3://books/b/three.txt") == [
        "a/deep/two.txt",
        "a/one.txt",
        "b/three.txt",
    ]
    assert names(tmp_path, "text", "s3://books/*/*.txt") == ["a/one.txt", "b/three.txt"]
    assert names(tmp_path, "text", "s3://books/**/t*.txt") == ["a/deep/two.txt", "b/three.txt"]
    assert names(tmp_path, "parquet", "s3://books") == ["b/x.parquet"]
    bucket.put("books/v[1]/four.txt", b"text")
    assert names(tmp_path, "text", "s3://books/v[1]") == ["four.txt"]
    assert names(tmp_path, "text", "s3://books/v[1]/four.txt") == ["four.txt"]


def test_what_is_not_there_is_named(tmp_path: Path, bucket: S3Server) -> None:
    with pytest.raises(CorpusError) as raised:
        names(tmp_path, "text", "s3://books/absent", "s3://nowhere/x", "s3://books/*.txt")
    absent, nowhere, pattern = raised.value.problems
    assert "s3://books/absent does not exist" in absent
    assert "s3://nowhere/x" in nowhere
    assert "matches no file" in pattern


def test_server_that_is_away_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CorpusError, match="s3://books/x cannot be listed"):
        names(tmp_path, "text", "s3://books/x")


def test_documents_in_s3_are_checked_and_read(tmp_path: Path, bucket: S3Server) -> None:
    for number in range(4):
        bucket.put(f"books/{number}.txt", " ".join(sentences(200, seed=number)).encode())
    data = DataConfig(source="text", paths=("s3://books",), val_fraction=0.2)
    assert check(data, TokenizerConfig(vocab_size=300), tmp_path / "s", 64) == []


DRIVER = """
import sys
from pathlib import Path
import ray
from rayjob.config import DataConfig, TokenizerConfig
from rayjob.corpus.prepare import prepare
from rayjob.store.address import mirror_of
_, temp, local, books, rows = sys.argv
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=temp)
for storage, folder in [(Path(local), rows), (Path(local + "-2"), books), (mirror_of("s3://books/storage"), books)]:
    data = DataConfig(source="parquet", paths=(folder,), val_fraction=0.1)
    prepare(data, TokenizerConfig(vocab_size=350), storage, 64)
"""
DATA = DataConfig(source="parquet", paths=("s3://books/rows",), val_fraction=0.1)
VOCAB = TokenizerConfig(vocab_size=350)


@pytest.mark.ray
def test_rows_and_storage_in_s3_give_the_bytes_of_the_same_on_disk(
    tmp_path: Path, bucket: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with a Ray of its own, whose workers inherit the credentials from its environment.

    Then another machine, with an empty cache, finds the corpus prepared and reads it, without Ray.
    """
    text = sentences(4_000)
    (tmp_path / "rows").mkdir()
    for part in range(2):
        path = tmp_path / "rows" / f"{part}.parquet"
        pq.write_table(pa.table({"text": text[2_000 * part : 2_000 * (part + 1)]}), path, row_group_size=100)
        bucket.put(f"books/rows/{path.name}", path.read_bytes())
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_AUTH_MODE": "disabled"}
    # Ray's sockets lie in this folder and a socket's path is at most 107 characters: not pytest's own.
    with tempfile.TemporaryDirectory(prefix="ray-") as temp:
        folders = [str(tmp_path / "s"), "s3://books/rows", str(tmp_path / "rows")]
        subprocess.run([sys.executable, "-c", DRIVER, temp, *folders], env=environment, check=True)
    local = finished(tmp_path / "s")
    assert len(local) >= 8  # two sides, manifest, card in two forms, repeats, tokenizer
    assert finished(tmp_path / "s-2") == local
    stored = bucket.objects("books/storage")
    assert {name: content for name, content in stored.items() if name in local} == local
    assert {name for name in stored if name.startswith(("tokens", "tokenizers"))} == set(local)

    monkeypatch.setenv("RAYJOB_CACHE", str(tmp_path / "new-machine"))
    storage = mirror_of("s3://books/storage")
    prepared = find_prepared(DATA, VOCAB, storage)
    assert prepared is not None
    assert not list(storage.rglob("*.parquet")), "blocks come when they are read"
    assert check(DATA, VOCAB, storage, 64) == []
    assert prepare(DATA, VOCAB, storage, 64).manifest == prepared.manifest
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    windows = open_windows(prepared.tokens_folder, "train", 64)
    assert windows.n_tokens == prepared.manifest.train.tokens
    blocks = {name: content for name, content in local.items() if "/train/" in name}
    assert {name: (storage / name).read_bytes() for name in blocks} == blocks


def finished(storage: Path) -> dict[str, bytes]:
    """All of a local storage that is a result."""
    paths = [path for folder in ("tokens", "tokenizers") for path in (storage / folder).rglob("*") if path.is_file()]
    return {path.relative_to(storage).as_posix(): path.read_bytes() for path in paths}
