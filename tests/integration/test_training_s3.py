"""A run whose storage is an S3 server (moto's, on a loopback port); jobs are real ones with a Ray of their own."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load

from rayjob.__main__ import main
from rayjob.store.address import mirror_of
from rayjob.training.metrics import read_metrics
from tests import kills
from tests.integration.jobs import REPOSITORY, write_books
from tests.integration.nodes import Cluster
from tests.ray_tasks import await_true
from tests.s3_server import S3Server, running_server

STORAGE = "s3://books/jobs"
RUN = "books/jobs/runs/tiny"
LAST = "step_00000040"
TRAINER_TENSORS = "trainer/tensors.safetensors"
LIMIT_S = 300  # of one job; on a machine of its own it takes a tenth of it
SETTINGS = """
    run_name=tiny data.source=text data.val_fraction=0.1 tokenizer.vocab_size=400
    model.d_model=32 model.n_layers=2 model.n_heads=4 model.n_kv_heads=2 model.d_ff=64 model.max_seq_len=32
    train.num_workers=1 train.use_gpu=false train.global_batch_size=16 train.micro_batch_size=4
    train.precision=fp32 train.eval_interval=20 train.max_steps=40
    optimizer.warmup_steps=5 optimizer.lr=1e-3 checkpoint.interval_steps=10 tracking.tensorboard=false
""".split()

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with running_server() as server:
        server.make_bucket("books")
        yield server


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    return [*SETTINGS, f"data.paths=[{write_books(tmp_path / 'books', 10)}]"]


@pytest.fixture
def start(settings: list[str], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a job that logs to `<name>.log`; one that a failed test leaves behind is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, storage: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rayjob", "run", f"storage={storage}", *settings]
        environment = {**os.environ, "RAY_AUTH_MODE": "disabled", **environment}
        with (tmp_path / f"{name}.log").open("wb") as log:
            started.append(subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log, env=environment))
        return started[-1]

    yield start
    for process in started:
        kill_all(process)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of a job with its Ray and its workers."""
    if process.poll() is None:
        kills.kill(kills.family(process.pid))
        process.wait()


def moments(tensors: bytes) -> dict[str, list[float]]:
    """The optimizer's; the state of the random numbers, which nothing draws from, is that of each process."""
    found = {name: tensor.flatten().tolist() for name, tensor in load(tensors).items() if name.startswith("exp_avg")}
    assert found
    return found


def losses(run_folder: Path) -> list[str]:
    return [repr(row.loss) for row in read_metrics(run_folder)]


def test_run_killed_in_an_upload_goes_on_from_the_newest_complete_checkpoint_on_a_new_machine(
    tmp_path: Path,
    server: S3Server,
    settings: list[str],
    start: Callable[..., subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cluster: Cluster,
) -> None:
    local = start("local", str(tmp_path / "local"), cluster.environment)
    assert local.wait(LIMIT_S) == 0, (tmp_path / "local.log").read_text()[-3000:]

    reached, killed = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> None:
        if method in ("PUT", "POST") and "step_00000020/model.safetensors" in path:
            reached.set()
            killed.wait(LIMIT_S)

    server.intercept = hold
    machine = {**server.environment, "RAYJOB_CACHE": str(tmp_path / "first-machine")}
    first = start("first", STORAGE, machine)
    assert reached.wait(LIMIT_S), (tmp_path / "first.log").read_text()[-3000:]
    for name, value in machine.items():
        monkeypatch.setenv(name, value)
    mirror = mirror_of(STORAGE) / "runs" / "tiny"
    await_true(lambda: len(losses(mirror)) > 25)  # the upload of step 20 is held up, and training goes on
    kill_all(first)
    server.intercept = lambda _method, _path: None
    killed.set()
    stored = server.objects(RUN)
    assert "step_00000010/COMPLETE" in stored
    assert "step_00000020/COMPLETE" not in stored

    machine["RAYJOB_CACHE"] = str(tmp_path / "second-machine")
    second = start("second", STORAGE, machine)
    assert second.wait(LIMIT_S) == 0, (tmp_path / "second.log").read_text()[-3000:]
    assert "resuming from" in (tmp_path / "second.log").read_text()
    assert "step_00000010" in (tmp_path / "second.log").read_text()

    undisturbed = tmp_path / "local" / "runs" / "tiny"
    monkeypatch.setenv("RAYJOB_CACHE", machine["RAYJOB_CACHE"])
    assert losses(mirror_of(STORAGE) / "runs" / "tiny") == losses(undisturbed)
    stored = server.objects(RUN)
    for name in ("model.safetensors", "tokenizer.model"):
        assert stored[f"{LAST}/{name}"] == (undisturbed / LAST / name).read_bytes()
    assert moments(stored[f"{LAST}/{TRAINER_TENSORS}"]) == moments((undisturbed / LAST / TRAINER_TENSORS).read_bytes())
    assert {"metrics.csv", "config.yaml", "evaluation.json", "samples/step_00000040.txt"} <= stored.keys()
    assert not [name for name in stored if name.endswith((".lock", ".tmp"))]
    assert server.objects("books/jobs/mlflow")["mlflow.db"].startswith(b"SQLite format 3")
    # Pruned here, pruned there: the newest two, and the best, which is one of them.
    kept = {path.name for path in (mirror_of(STORAGE) / "runs" / "tiny").glob("step_*")}
    assert {name.partition("/")[0] for name in stored if name.startswith("step_")} == kept

    monkeypatch.setenv("RAYJOB_CACHE", str(tmp_path / "third-machine"))
    assert main(["status", "--json", f"storage={STORAGE}", *settings]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["stage"], status["step"], status["restarts"]) == ("done", 40, 1)
    assert main(["eval", "--checkpoint", f"{STORAGE}/runs/tiny", f"storage={STORAGE}", *settings]) == 0
    evaluation = json.loads(capsys.readouterr().out)
    assert evaluation["val_loss"] == json.loads(stored["evaluation.json"])["val_loss"]
