"""MLflow's sqlite store in storage: real, in a temporary folder."""

import dataclasses
import logging
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rayjob.config import DataConfig, JobConfig, TrainConfig
from rayjob.corpus.card import CARD_FILES
from rayjob.training.metrics import MetricsRow
from rayjob.training.mlflow_sink import MlflowSink, read_run_id, tracking_uri


def start(config: JobConfig, tokens_folder: Path) -> MlflowSink:
    config.run_folder.mkdir(parents=True, exist_ok=True)
    (config.run_folder / "config.yaml").write_text("seed: 0\n")
    for name in CARD_FILES:
        (tokens_folder / name).write_text("the corpus\n")
    sink = MlflowSink(config, tokens_folder)
    sink.open()
    return sink


def test_any_storage_folder_and_any_change_of_settings_is_tracked_in_one_run(tmp_path: Path) -> None:
    storage = tmp_path / "it's 100%20 a, b? #c"
    row = MetricsRow(1, 0, 100, 3.0, 0.8, 1e-3, 1000.0, None, 0.3, float("nan"), 0.3, 1.5, 0.0, 1.0, 2.0)
    start(JobConfig(storage=str(storage), data=DataConfig(paths=("a" * 7_000,))), tmp_path).send([row])
    changed = JobConfig(storage=str(storage), data=DataConfig(paths=("b" * 7_000,)))
    sink = MlflowSink(changed, tmp_path)
    assert sink.open() == 1, "the last step that is known"
    assert (storage / "mlflow" / "mlflow.db").exists()
    run_id = read_run_id(changed.run_folder)
    assert run_id
    client = MlflowClient(tracking_uri(changed))
    run = client.get_run(run_id)
    assert run.data.params["data.paths"].startswith("['aaa")
    assert "-> ['bbb" in run.data.tags["changed.data.paths"]
    assert [item.path for item in client.list_artifacts(run_id)] == ["config.yaml", "corpus"]


def test_micro_batch_that_was_found_is_a_parameter(tmp_path: Path) -> None:
    config = JobConfig(storage=str(tmp_path / "storage"), train=TrainConfig(micro_batch_size="auto"))
    row = MetricsRow(1, 0, 100, 3.0, 0.8, 1e-3, 1000.0, None, 0.3, None, None, None, 0.0, 1.0, 2.0)
    start(config, tmp_path).send([dataclasses.replace(row, micro_batch_size=16)])
    # A group of other workers has found another: MLflow's parameters are final, so the metric tells it.
    start(config, tmp_path).send([dataclasses.replace(row, step=2, micro_batch_size=24)])
    run = MlflowClient(tracking_uri(config)).get_run(read_run_id(config.run_folder))
    assert run.data.params["train.micro_batch_size"] == "auto"
    assert run.data.params["found.micro_batch_size"] == "16"
    assert run.data.metrics["speed/micro_batch_size"] == 24


@pytest.mark.parametrize("left", [b"", bytes(32), b"\xff\xfe", b"0123abcd"])
def test_a_run_id_that_a_machines_end_damaged_is_none(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "mlflow_run_id").write_bytes(left)
    assert read_run_id(tmp_path) is None


def test_metrics_do_not_wait_for_an_artifact_store_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError("no route to the store")

    monkeypatch.setattr(MlflowClient, "log_artifact", fail)
    config = JobConfig(storage=str(tmp_path / "storage"))
    row = MetricsRow(1, 0, 100, 3.0, 0.8, 1e-3, 1000.0, None, 0.3, None, None, None, 0.0, 1.0, 2.0)
    with caplog.at_level(logging.WARNING):
        start(config, tmp_path).send([row])
    assert caplog.text.count("artifact store did not take") == 1
    run_id = read_run_id(config.run_folder)
    assert run_id
    assert MlflowClient(tracking_uri(config)).get_run(run_id).data.metrics["train/loss"] == 3.0
