"""Training on a real local Ray: real workers, real DDP over gloo, real MLflow store; only model and corpus are tiny."""

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from model.checkpoint import list_checkpoints, load_model
from model.fused import split_parts
from model.tokenizer import Tokenizer
from rayjob.training.feed import open_windows
from tests import kills
from tests.integration.jobs import Job, assert_tracked, wait_until
from tests.integration.nodes import Cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_run_leaves_what_the_design_promises(undisturbed: Job) -> None:
    folder, status = undisturbed.run_folder, undisturbed.status()
    assert [row.step for row in undisturbed.rows()] == list(range(1, 151))
    assert [row.step for row in undisturbed.rows() if row.val_loss is not None] == [50, 100, 150]
    assert (folder / "config.yaml").exists()
    assert sorted(path.name for path in (folder / "samples").iterdir()) == [
        "step_00000050.txt",
        "step_00000100.txt",
        "step_00000150.txt",
    ]
    assert status["stage"] == "done"
    assert status["step"] == status["max_steps"] == 150
    assert status["restarts"] == 0
    assert status["best_val_loss"] == min(row.val_loss for row in undisturbed.rows() if row.val_loss)
    assert Path(status["latest_checkpoint"]).name == "step_00000150"
    evaluation = json.loads((folder / "evaluation.json").read_text())
    # The same windows in other batches and without DDP: only fp32 sums differ.
    assert evaluation["val_loss"] == pytest.approx(status["best_val_loss"], rel=1e-5)


def test_second_run_trains_nothing_again(undisturbed: Job) -> None:
    before = (undisturbed.run_folder / "metrics.csv").read_bytes()
    assert undisturbed.run() == 0
    assert (undisturbed.run_folder / "metrics.csv").read_bytes() == before
    assert undisturbed.status()["restarts"] == 0


def test_mlflow_has_one_run_with_each_step_once(undisturbed: Job, storage: Path) -> None:
    assert assert_tracked(undisturbed, storage).data.params["train.max_steps"] == "150"


def test_trained_checkpoint_is_the_same_model_in_transformers(undisturbed: Job, storage: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = list_checkpoints(undisturbed.run_folder)[-1]
    ours, theirs = load_model(folder), AutoModelForCausalLM.from_pretrained(folder)
    (tokens_folder,) = (storage / "tokens").iterdir()
    windows = open_windows(tokens_folder, "val", 32)
    inputs, targets = windows.batch(np.arange(len(windows)), len(windows))
    logits = theirs(inputs).logits
    assert (ours(inputs) - logits).abs().max() < 1e-4
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    sums = ours(inputs, targets)
    assert float((sums.nats / sums.tokens).detach()) == pytest.approx(float(loss.detach()), abs=1e-5)
    loss.backward()
    (sums.nats / sums.tokens).backward()
    gradients = dict(theirs.named_parameters())
    for name, gradient in split_parts(ours, {name: weight.grad for name, weight in ours.named_parameters()}).items():
        expected = gradients[name].grad
        assert (gradient - expected).norm() <= 1e-4 * expected.norm(), name
    # The evaluation also counts the tail after the last whole window.
    tail = windows.tail()
    assert tail
    tail_nats = torch.nn.functional.cross_entropy(
        theirs(tail[0]).logits.flatten(0, 1), tail[1].flatten(), reduction="sum"
    )
    n_tokens = targets.numel() + int((tail[1] >= 0).sum())
    expected_loss = (float(loss.detach()) * targets.numel() + float(tail_nats.detach())) / n_tokens
    evaluation = json.loads((undisturbed.run_folder / "evaluation.json").read_text())
    assert evaluation["val_loss"] == pytest.approx(expected_loss, abs=1e-3)
    assert evaluation["tokens"] == n_tokens
    text = "The old house\n\nstood  by 1917 rivers… 😀 and\tnobody knew."
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == Tokenizer.load(folder).encode_prompt(text)


def test_sigterm_saves_and_exits_3_and_the_same_command_goes_on(
    undisturbed: Job, corpus: Path, storage: Path, cluster: Cluster
) -> None:
    job = Job(corpus, storage, "stopped", environment=cluster.environment)
    process = job.start()
    wait_until(lambda: "Attempting to start training worker group" in job.log.read_text(), process, job.log)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 3, job.log.read_text()[-3000:]
    assert "no worker is training, so there is nothing to save" in job.log.read_text()
    assert job.status()["stage"] == "stopped"
    process = job.start()
    job.wait_for_step(30, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 3, job.log.read_text()[-3000:]
    stopped_at = job.rows()[-1].step
    assert list_checkpoints(job.run_folder)[-1].name == f"step_{stopped_at:08d}"
    assert job.status()["stage"] == "stopped"
    assert job.mlflow_status() == "KILLED"
    assert job.run() == 0
    assert kills.differences(undisturbed.run_folder, job.run_folder) == []
    assert f"resuming from {job.run_folder}/step_{stopped_at:08d}" in job.log.read_text()
    assert_tracked(job, storage)


def test_of_two_drivers_at_once_one_is_refused_and_one_that_lost_its_lease_writes_no_more(
    corpus: Path, storage: Path, cluster: Cluster
) -> None:
    """The takeover is what another driver does on storage without locks, once it takes this one for dead."""
    job = Job(corpus, storage, "twice", "train.max_steps=100000", environment=cluster.environment)
    drivers, begun_at_s = [job.start(), job.start()], time.monotonic()
    try:
        while all(driver.poll() is None for driver in drivers):
            assert time.monotonic() - begun_at_s < 15, "the second must be refused by then"
            time.sleep(0.1)
        refused, winner = sorted(drivers, key=lambda driver: driver.poll() is None)
        assert refused.returncode == 2
        assert f"run twice is in use by process {winner.pid}" in job.log.read_text()
        job.wait_for_step(30, winner)
        (lease,) = (job.run_folder / "lease").iterdir()
        assert lease.name == "00000001.json", "the refused one has taken none"

        lease.with_name("00000002.json").touch()
        lease.unlink()
        assert winner.wait(timeout=60) == 1
        assert "attempt 1 has lost" in job.log.read_text()
    finally:
        kills.kill([process for driver in drivers for process in kills.family(driver.pid)])
    left = {path: path.stat().st_mtime_ns for path in job.run_folder.rglob("*")}
    assert job.status()["stage"] == "train", "the stage is the other's to write"
    assert {path: path.stat().st_mtime_ns for path in job.run_folder.rglob("*")} == left


def test_loss_that_is_not_finite_ends_the_run_with_the_reason_and_a_sound_checkpoint(
    corpus: Path, storage: Path, cluster: Cluster
) -> None:
    settings = ["optimizer.lr=1e30", "optimizer.min_lr=1e30", "checkpoint.interval_steps=1"]
    job = Job(corpus, storage, "exploded", *settings, environment=cluster.environment)
    assert job.run() == 1
    assert job.status()["restarts"] == 0, "a retry would repeat it"
    assert job.status()["stage"] == "failed"
    assert job.mlflow_status() == "FAILED"
    rows = job.rows()
    assert [row.skipped for row in rows][-5:] == [1] * 5
    assert f"5 bad steps in a row, the last step {rows[-1].step}: loss" in job.log.read_text()
    assert "show-window" in job.log.read_text()
    for checkpoint in list_checkpoints(job.run_folder):
        load_model(checkpoint)  # refuses weights that are not finite
