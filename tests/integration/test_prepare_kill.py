"""kill -9 of the driver, of a task and of the whole head while rows are prepared; real processes, nothing faked."""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
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
    return {path: time for path, time in files.items() if not path.name.startswith(".")}


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


def test_task_killed_in_every_stage_is_done_again(
    tmp_path: Path, corpus: DataConfig, undisturbed: dict[str, str]
) -> None:
    """kill -9 of a worker process while it counts words and while it writes a block; Ray starts the task again."""
    killed: list[str] = []
    killer = threading.Thread(target=kill_tasks, args=(["_keep_words", "_write_unit"], killed))
    killer.start()
    assert finish(corpus, tmp_path / "s") == undisturbed
    killer.join()
    assert killed == ["_keep_words", "_write_unit"]


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


def kill_tasks(names: list[str], killed: list[str]) -> None:
    """Kills one worker of this session's Ray in each stage, in order."""
    for name in names:
        await_true(lambda n=name: kill_one(n))
        killed.append(name)


def kill_one(name: str) -> bool:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "".join(process.cmdline()).startswith(f"ray::Map({name})"):
                process.send_signal(signal.SIGKILL)
                return True
    return False


def await_true(condition: Callable[[], bool], seconds: float = 200) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.002)
