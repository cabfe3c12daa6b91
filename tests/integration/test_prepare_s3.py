"""Sources under s3:// through pyarrow, against a real S3 server (moto's) on a loopback port."""

import os
import random
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from rayjob.config import DataConfig, TokenizerConfig
from rayjob.corpus import files
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.prepare import check
from rayjob.corpus.sources import find_sources

moto_server = pytest.importorskip("moto.server", reason="the extra `test` installs moto, which serves S3")
REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[pa.fs.S3FileSystem]:
    """An empty bucket `books`, and an environment that leads there."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
        monkeypatch.setenv(name, value)
    files._s3.cache_clear()
    s3 = pa.fs.S3FileSystem(
        region=ENVIRONMENT["AWS_REGION"],
        scheme="http",
        endpoint_override=f"{host}:{port}",
        allow_bucket_creation=True,
    )
    urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", data=b"").close()  # the process has one memory
    s3.create_dir("books")
    try:
        yield s3
    finally:
        files._s3.cache_clear()
        server.stop()


def sentences(count: int, seed: int = 1) -> list[str]:
    words = random.Random(seed)
    return [" ".join("".join(words.choices("etaoinshrdlu", k=5)) for _ in range(8)) + " ." for _ in range(count)]


def put(s3: pa.fs.S3FileSystem, path: str, content: bytes) -> None:
    with s3.open_output_stream(path) as stream:
        stream.write(content)


def names(storage: Path, source: Any, *paths: str) -> list[str]:
    return [found.name for found in find_sources(DataConfig(source=source, paths=paths), storage)]


def test_folders_files_and_globs_are_found_as_on_a_disk(tmp_path: Path, bucket: pa.fs.S3FileSystem) -> None:
    for name in ("a/one.txt", "a/deep/two.txt", "a/readme.md", "b/three.txt", "b/x.parquet"):
        put(bucket, f"books/{name}", b"text")
    assert names(tmp_path, "text", "s3://books/a") == ["deep/two.txt", "one.txt"]
    assert names(tmp_path, "text", "s3://books/a/", "s3://books/b/three.txt") == [
        "a/deep/two.txt",
        "a/one.txt",
        "b/three.txt",
    ]
    assert names(tmp_path, "text", "s3://books/*/*.txt") == ["a/one.txt", "b/three.txt"]
    assert names(tmp_path, "text", "s3://books/**/t*.txt") == ["a/deep/two.txt", "b/three.txt"]
    assert names(tmp_path, "parquet", "s3://books") == ["b/x.parquet"]


def test_what_is_not_there_is_named(tmp_path: Path, bucket: pa.fs.S3FileSystem) -> None:
    with pytest.raises(CorpusError) as raised:
        names(tmp_path, "text", "s3://books/absent", "s3://nowhere/x", "s3://books/*.txt")
    absent, nowhere, pattern = raised.value.problems
    assert "s3://books/absent does not exist" in absent
    assert "s3://nowhere/x" in nowhere
    assert "matches no file" in pattern


def test_server_that_is_away_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    files._s3.cache_clear()
    with pytest.raises(CorpusError, match="s3://books/x cannot be listed"):
        names(tmp_path, "text", "s3://books/x")
    files._s3.cache_clear()


def test_documents_in_s3_are_checked_and_read(tmp_path: Path, bucket: pa.fs.S3FileSystem) -> None:
    for number in range(4):
        put(bucket, f"books/{number}.txt", " ".join(sentences(200, seed=number)).encode())
    data = DataConfig(source="text", paths=("s3://books",), val_fraction=0.2)
    assert check(data, TokenizerConfig(vocab_size=300), tmp_path / "s", 64) == []


DRIVER = """
import sys
from pathlib import Path
import ray
from rayjob.config import DataConfig, TokenizerConfig
from rayjob.corpus.prepare import prepare
_, temp, storage, *folders = sys.argv
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=temp)
for number, folder in enumerate(folders):
    data = DataConfig(source="parquet", paths=(folder,), val_fraction=0.1)
    prepared = prepare(data, TokenizerConfig(vocab_size=350), Path(storage) / str(number), 64)
    blocks = [*prepared.manifest.train.blocks, *prepared.manifest.val.blocks]
    print("RESULT", prepared.manifest.hash, *(block.sha256 for block in blocks))
"""


@pytest.mark.ray
def test_rows_in_s3_give_the_bytes_of_the_same_rows_on_disk(tmp_path: Path, bucket: pa.fs.S3FileSystem) -> None:
    """A process with a Ray of its own, whose workers inherit the credentials from its environment."""
    text = sentences(4_000)
    (tmp_path / "local").mkdir()
    for part in range(2):
        path = tmp_path / "local" / f"{part}.parquet"
        pq.write_table(pa.table({"text": text[2_000 * part : 2_000 * (part + 1)]}), path, row_group_size=100)
        put(bucket, f"books/rows/{path.name}", path.read_bytes())
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_AUTH_MODE": "disabled"}
    # Ray's sockets lie in this folder and a socket's path is at most 107 characters: not pytest's own.
    with tempfile.TemporaryDirectory(prefix="ray-") as temp:
        command = [sys.executable, "-c", DRIVER, temp, str(tmp_path / "s"), str(tmp_path / "local"), "s3://books/rows"]
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    local, remote = [line.split()[1:] for line in output.splitlines() if line.startswith("RESULT")]
    assert local == remote
    assert len(local) >= 3
