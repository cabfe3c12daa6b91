"""Tiny training runs that are started through the command line, as a user does, for tests to disturb."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayjob.config import JobConfig
from rayjob.config_file import load_config
from rayjob.status import read_status
from rayjob.training.metrics import MetricsRow, read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
WORDS = "the old house stood by river and nobody knew who had lived there before war came again to valley".split()
SETTINGS = """
    data.source=text data.val_fraction=0.1 tokenizer.vocab_size=400
    model.d_model=32 model.n_layers=2 model.n_heads=4 model.n_kv_heads=2 model.d_ff=64 model.max_seq_len=32
    train.num_workers=2 train.use_gpu=false train.global_batch_size=16 train.micro_batch_size=2
    train.precision=fp32 train.eval_interval=50 train.max_steps=150
    optimizer.warmup_steps=5 optimizer.lr=1e-3 checkpoint.interval_steps=20 seed=7
    failure.max_failures=3 tracking.tensorboard=true
""".split()


def write_books(folder: Path, n_books: int) -> Path:
    """Writes small books of words, each in another order, and returns their folder."""
    folder.mkdir(exist_ok=True)
    for book in range(n_books):
        words = [WORDS[(i * (book + 3) + i // 7) % len(WORDS)] for i in range(900)]
        (folder / f"book_{book:02d}.txt").write_text(" ".join(words).capitalize() + ".\n")
    return folder


class Job:
    """A run and the ways to start it, follow it and ask about it.

    Args:
        environment: of its driver; without it the tests' own, and so a local Ray for each start.
    """

    def __init__(
        self, corpus: Path, storage: Path, run_name: str, *overrides: str, environment: dict[str, str] | None = None
    ) -> None:
        self._environment = environment
        self.run_folder = storage / "runs" / run_name
        self._arguments = [
            f"run_name={run_name}",
            f"storage={storage}",
            f"data.paths=[{corpus}]",
            *SETTINGS,
            *overrides,
        ]
        self.log = storage / f"{run_name}.log"

    @property
    def config(self) -> JobConfig:
        return load_config(None, self._arguments)

    def start(self, command: str = "run") -> subprocess.Popen[bytes]:
        return self._start([sys.executable, "-m", "rayjob", command, *self._arguments])

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(command, cwd=REPOSITORY, env=self._environment, stdout=log, stderr=log)

    def run(self, command: str = "run") -> int:
        return self.start(command).wait(timeout=480)

    def rows(self) -> list[MetricsRow]:
        return list(read_metrics(self.run_folder))

    def status(self) -> dict[str, Any]:
        return read_status(self.config)

    def mlflow_status(self) -> str:
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{self.run_folder.parents[1]}/mlflow/mlflow.db")
        return str(client.get_run(self.status()["mlflow_run_id"]).info.status)

    def wait_for_step(self, step: int, process: subprocess.Popen[bytes]) -> None:
        wait_until(lambda: bool(self.rows()) and self.rows()[-1].step >= step, process, self.log)


def wait_until(is_true: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 240  # a start takes ten seconds; a busy machine is given time
    while not is_true():
        assert process.poll() is None, f"the job ended: {log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"nothing happened: {log.read_text()[-3000:]}"
        time.sleep(0.02)


def assert_tracked(job: Job, storage: Path) -> Any:
    """Returns the job's MLflow run after a look at what every run has there."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{storage}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("pretraining")
    runs = client.search_runs([experiment.experiment_id], f"tags.mlflow.runName = '{job.run_folder.name}'")
    assert [run.info.run_id for run in runs] == [job.status()["mlflow_run_id"]]
    assert runs[0].info.status == "FINISHED"
    history = client.get_metric_history(runs[0].info.run_id, "train/loss")
    assert [(m.step, m.value) for m in sorted(history, key=lambda m: m.step)] == [
        (row.step, row.loss) for row in job.rows()
    ]
    artifacts = {item.path for item in client.list_artifacts(runs[0].info.run_id)}
    assert {"config.yaml", "samples", "checkpoints"} <= artifacts
    return runs[0]
