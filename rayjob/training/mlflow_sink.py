"""MLflow: one run from start to end across restarts, metrics by step, config, corpus card, samples, best checkpoint."""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.checkpoint import best_checkpoint, latest_checkpoint, read_trainer_state
from model.complete import CheckpointError
from rayjob.atomic import write_atomically
from rayjob.config import JobConfig
from rayjob.config_file import flatten_tree, to_tree
from rayjob.corpus.card import CARD_FILES
from rayjob.training.metrics import MetricsRow
from rayjob.training.sample import SAMPLES_FOLDER
from rayjob.training.tracking import metrics_of

logger = logging.getLogger(__name__)

_MAX_VALUE_CHARS = 3_900  # MLflow's own limits: 6,000 for a parameter, 8,000 for a tag, which may hold two values
_RUN_ID_FILE = "mlflow_run_id"
_RUN_ID = re.compile("[0-9a-f]{32}")
_FOUND_MICRO_BATCH = "found.micro_batch_size"  # where `auto` or too little memory chose it


def tracking_uri(config: JobConfig) -> str:
    """Returns the configured server, or the sqlite store in storage."""
    if config.tracking.mlflow_uri:
        return config.tracking.mlflow_uri
    path = str(config.storage_folder / "mlflow" / "mlflow.db")
    return "sqlite:///" + path.replace("%", "%25").replace("?", "%3F")  # the two that mean something in a URI


def read_run_id(run_folder: Path) -> str | None:
    """Returns the MLflow run that belongs to a run folder, or None before the first contact.

    Where the file is lost or damaged, the newest checkpoint knows.
    """
    path = run_folder / _RUN_ID_FILE
    if path.exists() and _RUN_ID.fullmatch(run_id := path.read_text(errors="replace").strip()):
        return run_id
    latest = latest_checkpoint(run_folder)
    try:
        return read_trainer_state(latest).get("mlflow_run_id") if latest else None
    except CheckpointError:
        return None


class MlflowSink:
    """Implements `Sink`; MLflow is imported in its thread, for the import alone takes seconds."""

    name = "mlflow"

    def __init__(self, config: JobConfig, tokens_folder: Path) -> None:
        self._config = config
        self._tokens_folder = tokens_folder
        self._run_folder = config.run_folder
        self._client: Any = None
        self._run_id = ""
        self._is_artifact_store_away = False
        self._is_micro_batch_logged = False

    def open(self) -> int:
        # A server that is away must not hold the thread for MLflow's default of minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing about a run goes to anybody else
        from mlflow import MlflowClient

        # What goes wrong is raised too, and told once; MLflow prints a traceback at every try.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        if self._config.tracking.mlflow_uri is None:
            (self._config.storage_folder / "mlflow").mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(tracking_uri(self._config))
        self._run_id = self._find_run() or self._create_run()
        write_atomically(self._run_folder / _RUN_ID_FILE, f"{self._run_id}\n".encode())
        self._client.update_run(self._run_id, status="RUNNING")
        self._log_params()
        self._log_artifact(self._run_folder / "config.yaml")
        for name in CARD_FILES:
            self._log_artifact(self._tokens_folder / name, "corpus")
        history = self._client.get_metric_history(self._run_id, "train/loss")
        return max((metric.step for metric in history), default=0)

    def send(self, rows: Sequence[MetricsRow]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(key, value, int(row.wall_time * 1000), row.step)
            for row in rows
            for key, value in metrics_of(row).items()
        ]
        for row in rows:
            sample = self._run_folder / SAMPLES_FOLDER / f"step_{row.step:08d}.txt"
            if sample.exists():
                self._log_artifact(sample, SAMPLES_FOLDER)
        self._client.log_batch(self._run_id, metrics=metrics)
        self._log_micro_batch(rows[-1].micro_batch_size)

    def close(self, status: str) -> None:
        best = best_checkpoint(self._run_folder)
        if status == "FINISHED" and best:
            self._log_checkpoint(best)
        self._client.set_terminated(self._run_id, status)

    def _find_run(self) -> str | None:
        from mlflow.exceptions import MlflowException

        run_id = read_run_id(self._run_folder)
        if run_id is None:
            return None
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning("MLflow run %s is not in this store any more: a new one takes its place.", run_id)
            return None
        return None if run.info.lifecycle_stage == "deleted" else run_id

    def _create_run(self) -> str:
        name = self._config.tracking.experiment
        experiment = self._client.get_experiment_by_name(name)
        if experiment:
            experiment_id = experiment.experiment_id
        else:
            artifacts = self._config.storage_folder / "mlflow" / "artifacts"
            location = artifacts.as_uri() if self._config.tracking.mlflow_uri is None else None
            experiment_id = self._client.create_experiment(name, location)
        return str(self._client.create_run(experiment_id, run_name=self._config.run_name).info.run_id)

    def _log_params(self) -> None:
        """Logs every key; one that changed since the first attempt becomes a tag, for MLflow's params are final."""
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self._run_id).data.params
        now = {key: str(value)[:_MAX_VALUE_CHARS] for key, value in flatten_tree(to_tree(self._config)).items()}
        params = [Param(key, value) for key, value in now.items() if key not in known]
        tags = [
            RunTag(f"changed.{key}", f"{known[key]} -> {value}")
            for key, value in now.items()
            if key in known and known[key] != value
        ]
        self._client.log_batch(self._run_id, params=params, tags=tags)

    def _log_micro_batch(self, size: int) -> None:
        """Logs the first size that was found; the metric tells where another number of workers found another."""
        if self._is_micro_batch_logged or size in (0, self._config.train.micro_batch_size):
            return
        if _FOUND_MICRO_BATCH not in self._client.get_run(self._run_id).data.params:
            self._client.log_param(self._run_id, _FOUND_MICRO_BATCH, size)
        self._is_micro_batch_logged = True

    def _log_checkpoint(self, folder: Path) -> None:
        for path in sorted(folder.iterdir()):
            if path.is_file():  # trainer/ is for resuming only
                self._log_artifact(path, f"checkpoints/{folder.name}")

    def _log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Uploads a file; metrics do not wait for an artifact store that is away, and the file stays in the run."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_artifact(self._run_id, str(path), folder)
        except (OSError, MlflowException) as error:
            if not self._is_artifact_store_away:
                logger.warning("MLflow's artifact store did not take %s: %s Metrics go on.", path.name, error)
            self._is_artifact_store_away = True
