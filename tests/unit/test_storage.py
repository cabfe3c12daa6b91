"""A mirror and its object store, against moto's real S3 server; checkpoints are real ones of a tiny model."""

import io
import json
import shutil
import socket
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.checkpoint import latest_checkpoint, verify_checkpoint
from model.complete import CheckpointError
from rayjob.__main__ import main
from rayjob.atomic import new_folder, write_atomically
from rayjob.config import DataConfig, JobConfig
from rayjob.corpus.huggingface import CHOICES
from rayjob.corpus.plans import obtain_sources
from rayjob.store.address import mirror_of
from rayjob.store.checkpoints import fetch_checkpoint, find_checkpoints, local_checkpoint, publish_checkpoint
from rayjob.store.errors import StoreError
from rayjob.store.fetch import fetch_file, fetch_folder, fetch_tree
from rayjob.store.publish import publish_missing
from rayjob.store.runs import adopt_run, publish_run
from rayjob.store.shared import check_shared
from rayjob.training.storage_probe import PROBE_FILE, measure_storage
from tests.hub_stub import Hub, running
from tests.s3_server import S3Server, running_server
from tests.serving_checkpoint import save_run

LIMIT_S = 30  # the promise for a store that cannot be used


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_server() as server:
        yield server


@pytest.fixture
def bucket(server: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty bucket, and an environment that leads there."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.intercept = lambda _method, _path: None
    name = f"b{abs(hash(request.node.name))}"
    server.make_bucket(name)
    return name


class Machine:
    """A machine with a mirror of its own."""

    def __init__(self, folder: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._cache, self._patch, self._bucket = folder, monkeypatch, bucket

    @property
    def storage(self) -> Path:
        self._patch.setenv("RAYJOB_CACHE", str(self._cache))
        return mirror_of(f"s3://{self._bucket}/p")

    @property
    def run(self) -> Path:
        return self.storage / "runs" / "small"


@pytest.fixture
def here(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "here", bucket, monkeypatch)


@pytest.fixture
def there(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "there", bucket, monkeypatch)


def test_what_is_written_here_is_read_there(here: Machine, there: Machine) -> None:
    write_atomically(here.storage / "tokens" / "x" / "part.parquet", b"block")
    with new_folder(here.storage / "tokenizers" / "y") as folder:
        (folder / "a.model").write_bytes(b"model")
        (folder / "b.json").write_bytes(b"{}")
    assert fetch_file(there.storage / "tokens" / "x" / "part.parquet")
    assert (there.storage / "tokens" / "x" / "part.parquet").read_bytes() == b"block"
    assert fetch_folder(there.storage / "tokenizers" / "y", "b.json")
    assert (there.storage / "tokenizers" / "y" / "a.model").read_bytes() == b"model"
    assert not fetch_file(there.storage / "tokens" / "x" / "absent")
    assert not fetch_folder(there.storage / "tokenizers" / "absent", "b.json")
    assert not [path for path in there.storage.rglob("*") if path.name.endswith(".tmp")]


def test_probe_of_a_mirrored_run_goes_through_the_store_and_leaves_nothing(
    here: Machine, server: S3Server, bucket: str
) -> None:
    run_folder, asked = here.storage / "runs" / "r", []
    server.intercept = lambda method, path: asked.append((method, path))
    speed = measure_storage(run_folder, 1_000)
    assert speed.write_bytes_per_s > 0
    assert speed.read_bytes_per_s > 0
    assert {("PUT", f"/{bucket}/p/runs/r/{PROBE_FILE}"), ("GET", f"/{bucket}/p/runs/r/{PROBE_FILE}")} <= set(asked)
    assert server.objects(bucket) == {}
    assert list(run_folder.iterdir()) == []


def test_folder_without_its_last_file_is_absent(here: Machine, there: Machine, server: S3Server, bucket: str) -> None:
    server.put(f"{bucket}/p/tokenizers/y/a.model", b"model")
    assert not fetch_folder(there.storage / "tokenizers" / "y", "b.json")
    assert not (there.storage / "tokenizers" / "y").exists()


def test_what_was_finished_and_not_sent_is_sent_later(here: Machine, server: S3Server, bucket: str) -> None:
    folder = here.storage / "tokens" / "x"
    (folder / "train").mkdir(parents=True)
    for name in ("train/part-0", "train/part-1", "manifest.json"):
        (folder / name).write_bytes(name.encode())
    sent: list[str] = []
    server.intercept = lambda method, path: sent.append(path) if method == "PUT" else None
    publish_missing(folder, "manifest.json")
    assert [path.rpartition("/")[2] for path in sent][-1] == "manifest.json"
    assert len(server.objects(f"{bucket}/p/tokens/x")) == 3
    sent.clear()
    publish_missing(folder, "manifest.json")
    assert not sent


def test_file_that_the_store_refuses_stays_here(here: Machine, server: S3Server) -> None:
    server.intercept = lambda method, _path: "403 Forbidden" if method == "PUT" else None
    with pytest.raises(StoreError, match="s3://.*/x cannot be written at http://127.0.0.1"):
        write_atomically(here.storage / "x", b"x")
    assert (here.storage / "x").read_bytes() == b"x"


def test_files_of_a_run_wait_for_its_next_save(here: Machine, server: S3Server, bucket: str) -> None:
    server.intercept = lambda method, _path: "403 Forbidden" if method == "PUT" else None
    write_atomically(here.run / "stage.json", b"{}")
    server.intercept = lambda _method, _path: None
    publish_run(here.run)
    assert server.objects(f"{bucket}/p/runs/small") == {"stage.json": b"{}"}
    (here.run / "stage.json").unlink()
    publish_run(here.run)
    assert server.objects(f"{bucket}/p/runs/small") == {}


def test_checkpoint_whose_upload_was_cut_is_absent(here: Machine, there: Machine, server: S3Server) -> None:
    """The store takes all but COMPLETE, as when the process is killed before its last request."""
    save_run(here.run, step=10)
    publish_run(here.run)
    save_run(here.run, step=20)
    server.intercept = lambda method, path: "403 Forbidden" if method == "PUT" and "COMPLETE" in path else None
    with pytest.raises(StoreError):
        publish_run(here.run)
    server.intercept = lambda _method, _path: None
    adopt_run(there.run)
    assert latest_checkpoint(there.run) == there.run / "step_00000010"
    verify_checkpoint(there.run / "step_00000010")
    publish_run(here.run)  # the retry, or the next save
    adopt_run(there.run)
    assert latest_checkpoint(there.run) == there.run / "step_00000020"


def test_checkpoint_with_a_damaged_object_is_left_out(
    here: Machine, there: Machine, server: S3Server, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20):
        save_run(here.run, step=step)
    publish_run(here.run)
    weights = bytearray((here.run / "step_00000020" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    server.put(f"{bucket}/p/runs/small/step_00000020/model.safetensors", bytes(weights))
    adopt_run(there.run)
    assert latest_checkpoint(there.run) == there.run / "step_00000010"
    assert "step_00000020 is not sound in the store" in caplog.text


def test_checkpoint_that_was_sent_is_not_sent_again(here: Machine, server: S3Server) -> None:
    save_run(here.run, step=10)
    publish_run(here.run)
    sent: list[str] = []
    server.intercept = lambda method, path: sent.append(path) if method == "PUT" else None
    publish_run(here.run)
    assert not [path for path in sent if "step_" in path]


def test_checkpoints_removed_here_are_removed_there(here: Machine, server: S3Server, bucket: str) -> None:
    for step in (10, 20):
        save_run(here.run, step=step)
    publish_run(here.run)
    shutil.rmtree(here.run / "step_00000010")
    publish_run(here.run)
    left = {path.partition("/")[0] for path in server.objects(f"{bucket}/p/runs/small")}
    assert left == {"step_00000020"}


def test_machine_that_is_behind_follows_and_one_that_is_ahead_is_followed(here: Machine, there: Machine) -> None:
    save_run(here.run, step=10)
    (here.run / "metrics.csv").write_text("ten")
    publish_run(here.run)
    adopt_run(there.run)
    save_run(there.run, step=20)
    (there.run / "metrics.csv").write_text("twenty")
    (there.run / "driver.lock").write_text("of that machine")
    publish_run(there.run)
    (here.run / "metrics.csv").write_text("ten and some that were lost")
    adopt_run(here.run)
    assert (here.run / "metrics.csv").read_text() == "twenty"
    assert latest_checkpoint(here.run) == here.run / "step_00000020"
    assert not (here.run / "driver.lock").exists()
    save_run(here.run, step=30)  # and not published
    (here.run / "metrics.csv").write_text("thirty")
    adopt_run(here.run)
    adopt_run(there.run)
    assert (there.run / "metrics.csv").read_text() == "thirty"
    assert latest_checkpoint(there.run) == there.run / "step_00000030"


def test_run_that_is_not_here_can_be_asked_about(
    here: Machine, there: Machine, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20):
        save_run(here.run, step=step)
    write_atomically(here.run / "stage.json", json.dumps({"stage": "done", "max_steps": 20}).encode())
    publish_run(here.run)
    assert there.storage
    assert main(["status", "--json", "run_name=small", f"storage=s3://{bucket}/p"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["stage"] == "done"
    assert status["latest_checkpoint"] == f"s3://{bucket}/p/runs/small/step_00000020"
    assert find_checkpoints(there.run)[1] == status["latest_checkpoint"]
    folder = local_checkpoint(status["latest_checkpoint"], f"s3://{bucket}/p")
    assert folder == there.run / "step_00000020"
    verify_checkpoint(folder)
    verify_checkpoint(local_checkpoint(f"s3://{bucket}/p/runs/small", "/elsewhere"))
    with pytest.raises(CheckpointError, match="s3://.*/runs/absent should be a complete checkpoint or hold one"):
        local_checkpoint(f"s3://{bucket}/p/runs/absent", "/elsewhere")


def test_mlflow_store_is_copied_whole_while_it_is_in_use(here: Machine, there: Machine) -> None:
    database = here.storage / "mlflow" / "mlflow.db"
    database.parent.mkdir(parents=True)
    here.run.mkdir(parents=True)
    with sqlite3.connect(database) as connection:
        connection.execute("create table metrics (step)")
        connection.execute("insert into metrics values (1)")
        connection.commit()
        connection.execute("insert into metrics values (2)")  # not committed
        publish_run(here.run)
    adopt_run(there.run)
    copied = sqlite3.connect(there.storage / "mlflow" / "mlflow.db").execute("select step from metrics").fetchall()
    assert copied == [(1,)]


def test_download_of_one_machine_serves_the_others(
    here: Machine, there: Machine, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is a stub on a loopback port; its client is the real one."""
    data = DataConfig(source="huggingface")
    rows = io.BytesIO()
    pq.write_table(pa.table({"text": ["a row ."]}), rows)
    first = CHOICES[0]
    with running(Hub({(first.repo, first.revision): {"plain_text/train/0000.parquet": rows.getvalue()}})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        sources = obtain_sources(data, here.storage)
    assert [source.name for source in sources] == ["plain_text/train/0000.parquet"]
    assert sources[0].path.startswith(f"s3://{bucket}/p/sources/huggingface/")
    assert obtain_sources(data, there.storage) == sources
    assert not list(there.storage.rglob("*.parquet"))


def test_paths_outside_of_mirrors_ask_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens: a request would fail
    run = tmp_path / "runs" / "small"
    save_run(run, step=10)
    for act in (publish_run, adopt_run, fetch_tree, publish_checkpoint):
        act(run if act is not publish_checkpoint else run / "step_00000010")
    write_atomically(run / "x", b"x")
    assert fetch_checkpoint(run / "step_00000010")
    assert find_checkpoints(run)[1] == str(run / "step_00000010")


def refused(storage: str, capsys: pytest.CaptureFixture[str], command: str = "run") -> str:
    """What the command says; it must end with code 2 in time, before it has done anything."""
    started_s = time.monotonic()
    assert main([command, f"storage={storage}"]) == 2
    assert time.monotonic() - started_s < LIMIT_S
    return capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "status"])
def test_bucket_that_does_not_exist_is_refused(command: str, here: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert not here.storage.exists()
    assert "there is no bucket nowhere at http://127.0.0.1" in refused("s3://nowhere/p", capsys, command)


def test_server_that_is_away_is_refused(
    here: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "cannot be written at http://127.0.0.1:9" in refused("s3://books/p", capsys)


def test_server_that_does_not_answer_is_refused(
    here: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "cannot be written at http://127.0.0.1" in refused("s3://books/p", capsys)


def test_missing_credentials_are_refused_with_what_to_set(
    bucket: str, here: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert here.storage.name
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # there is none here, and asking takes seconds
    monkeypatch.setenv("HOME", "/nonexistent")
    assert "Set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY" in refused(f"s3://{bucket}/p", capsys)


def test_bucket_that_may_only_be_read_is_refused_for_work_and_not_for_status(
    bucket: str, here: Machine, server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here.storage.name
    server.intercept = lambda method, _path: "403 Forbidden" if method in ("PUT", "POST") else None
    assert "cannot be written" in refused(f"s3://{bucket}/p", capsys)
    assert main(["status", f"storage=s3://{bucket}/p"]) == 0


def test_worker_that_does_not_see_the_run_is_told(tmp_path: Path) -> None:
    config = JobConfig(storage=str(tmp_path))
    with pytest.raises(RuntimeError, match="does not see .*runs/run.* Put `storage` on a file system"):
        check_shared(config)
    write_atomically(config.run_folder / "config.yaml", b"")
    check_shared(config)
