"""kill -9 of the driver, of a task and of the whole head while rows are prepared; real processes, nothing faked."""

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from rayjob.config import DataConfig, TokenizerConfig
from rayjob.corpus import rows
from rayjob.corpus.prepare import find_prepared, prepare
from tests.ray_tasks import await_true, kill_tasks

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

REPOSITORY = Path(__file__).resolve().parents[2]
RANGE_BYTES = 30_000
VOCAB = TokenizerConfig(vocab_size=400)

DRIVER = """
import json, sys
from pathlib import Path
import ray
from rayjob.config import DataConfig, TokenizerConfig
from rayjob.corpus import row_units, rows
from rayjob.corpus.prepare import prepare
settings = json.loads(sys.argv[1])
rows.RANGE_BYTES = row_units.RANGE_BYTES = settings["range_bytes"]
ray.init(log_to_driver=False, **settings["ray"])
data = DataConfig(source="parquet", paths=(settings["corpus"],), val_fraction=0.1)
prepare(data, TokenizerConfig(vocab_size=400), Path(settings["storage"]), 64)
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    folder = tmp_path_factory.mktemp("corpus")
    words = random.Random(1)
    nouns = ["".join(words.choices("etaoinshrdlu", k=words.randint(2, 8))) for _ in range(300)]
    text = [f"{' '.join(words.choices(nouns, k=12))} ." for _ in range(15_000)]
    pq.write_table(pa.table({"text": text}), folder / "a.parquet", row_group_size=100)
    return DataConfig(source="parquet", paths=(str(folder),), val_fraction=0.1)


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "RANGE_BYTES", RANGE_BYTES)
    monkeypatch.setattr("rayjob.corpus.row_units.RANGE_BYTES", RANGE_BYTES)


@pytest.fixture(scope="module")
def undisturbed(corpus: DataConfig, tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> dict[str, str]:
    """The bytes that every run must end with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "RANGE_BYTES", RANGE_BYTES)
        patch.setattr("rayjob.corpus.row_units.RANGE_BYTES", RANGE_BYTES)
        return finish(corpus, tmp_path_factory.mktemp("undisturbed"))


def finish(corpus: DataConfig, storage: Path) -> dict[str, str]:
    folder = prepare(corpus, VOCAB, storage, 64).tokens_folder
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@contextmanager
def driver(corpus: DataConfig, storage: Path, **ray_settings: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process that prepares the corpus; killed with the block's end if it still lives."""
    settings = {"corpus": corpus.paths[0], "storage": str(storage), "range_bytes": RANGE_BYTES, "ray": ray_settings}
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, "-c", DRIVER, json.dumps(settings)], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def finished_files(storage: Path) -> dict[Path, int]:
    """Parts and blocks that are complete, with their times."""
    found = [*storage.glob("cache/*/*.parquet"), *storage.glob("tokens/*/*/part-*.parquet")]
    files = {}
    for path in found:
        with contextlib.suppress(FileNotFoundError):  # a temporary name that was renamed meanwhile
            files[path] = path.stat().st_mtime_ns
    # The order of a unit's words is written before its counts, which complete it.
    return {path: time for path, time in files.items() if not path.name.startswith(".") and ".order." not in path.name}


def test_driver_killed_at_five_moments_ends_with_the_same_bytes(
    tmp_path: Path, corpus: DataConfig, undisturbed: dict[str, str]
) -> None:
    """Each driver dies when a random further number of files is finished; the tasks of the dead may finish theirs."""
    storage = tmp_path / "s"
    address = ray.get_runtime_context().gcs_address
    steps = random.Random(5)
    for _ in range(5):
        target = len(finished_files(storage)) + steps.randint(1, 30)
        with driver(corpus, storage, address=address) as process:
            await_true(lambda n=target: len(finished_files(storage)) >= n or process.poll() is not None)
            assert process.poll() is None, "the driver must not have ended by itself"
        assert find_prepared(corpus, VOCAB, storage) is None
    before = finished_files(storage)
    assert finish(corpus, storage) == undisturbed
    after = finished_files(storage)
    again = [path for path, time in before.items() if after[path] != time]
    # A file that was finished is never made again; the grace is for tasks of the dead driver that were in mid-write.
    assert len(again) <= 4


def test_task_killed_in_every_stage_goes_on_with_what_it_had_not_finished(
    tmp_path: Path, corpus: DataConfig, undisturbed: dict[str, str]
) -> None:
    """kill -9 of all worker processes while they count words and while they write blocks; Ray starts the tasks again.

    A task has up to four units. What it had finished when it was killed is not made again.
    """
    storage = tmp_path / "s"
    finished: list[dict[Path, int]] = []

    def kill_when_some_are_finished(function: str, pattern: str) -> bool:
        if len(list(storage.glob(pattern))) < 3 or not kill_tasks(function):
            return False
        finished.append(finished_files(storage))
        return True

    def kill_in_each_stage() -> None:
        await_true(lambda: kill_when_some_are_finished("_keep_words", "cache/words/*.words.parquet"))
        await_true(lambda: kill_when_some_are_finished("_write_unit", "tokens/*/train/part-*.parquet"))

    killer = threading.Thread(target=kill_in_each_stage)
    killer.start()
    assert finish(corpus, storage) == undisturbed
    killer.join()
    after = finished_files(storage)
    assert len(finished) == 2
    again = {path for files in finished for path, time in files.items() if after[path] != time}
    assert again == set()


def test_whole_head_killed_and_started_again(tmp_path: Path, corpus: DataConfig, undisturbed: dict[str, str]) -> None:
    """Driver, GCS, raylet and workers of a cluster of its own die at once; another cluster goes on."""
    storage = tmp_path / "s"
    # Ray's sockets lie in this folder and a socket's path is at most 107 characters: not pytest's own.
    with (
        tempfile.TemporaryDirectory(prefix="ray-") as folder,
        driver(corpus, storage, num_cpus=2, include_dashboard=False, _temp_dir=folder) as process,
    ):
        await_true(lambda: bool(list(storage.glob("tokens/*/*/part-*.parquet"))) or process.poll() is not None)
        assert process.poll() is None, "the driver must not have ended by itself"
        cluster = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in cluster:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(cluster[1:], timeout=60)
    assert len(cluster) > 3
    assert find_prepared(corpus, VOCAB, storage) is None
    before = finished_files(storage)
    assert finish(corpus, storage) == undisturbed
    after = finished_files(storage)
    assert all(after[path] == time for path, time in before.items())
