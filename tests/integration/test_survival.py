"""A run whose worker is told to go, hangs, or always fails at the same step. Real Ray, DDP over gloo, and signals."""

import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from model.checkpoint import list_checkpoints, load_trainer_state
from rayjob.corpus.blocks import Manifest, token_stream
from rayjob.training.schedule import WindowOrder
from tests import kills
from tests.integration.jobs import Job, wait_until
from tests.integration.nodes import Cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = ["failure.max_failures=1", "tracking.tensorboard=false"]
STEP_TIMEOUT = "train.step_timeout_s=10"


def test_worker_told_to_go_and_worker_that_hangs_leave_the_run_as_the_undisturbed_one(
    undisturbed: Job, corpus: Path, storage: Path, cluster: Cluster
) -> None:
    job = Job(corpus, storage, "disturbed", *SETTINGS, STEP_TIMEOUT, environment=cluster.environment)
    process = job.start()
    parts = kills.Parts(cluster.processes, job.run_folder)
    job.wait_for_step(25, process)
    parts.workers()[1].send_signal(signal.SIGTERM)
    wait_until(lambda: "preemption notice" in job.log.read_text(), process, job.log)
    told = re.search(r"at step (\d+), saved step (\d+) in (\d+\.\d) s", job.log.read_text())
    assert told
    assert told[1] == told[2]
    assert float(told[3]) < 5
    assert (job.run_folder / f"step_{int(told[2]):08d}").exists()

    # All ranks stopped at that step: the next one goes on from there, and the failure budget is untouched.
    job.wait_for_step(int(told[2]) + 5, process)
    hung = parts.workers()[1]
    hung.suspend()
    assert process.wait(timeout=240) == 0, job.log.read_text()[-3000:]
    log = job.log.read_text()
    assert re.search(rf"health check has been hanging for .*pid={hung.pid}", log, re.DOTALL), "it is named"
    assert not hung.is_running() or hung.status() == psutil.STATUS_ZOMBIE
    assert job.status()["restarts"] == 2
    assert [repr(row.loss) for row in job.rows()] == [repr(row.loss) for row in undisturbed.rows()]
    assert [row.windows for row in job.rows()] == [row.windows for row in undisturbed.rows()]
    mine, theirs = (load_trainer_state(list_checkpoints(each.run_folder)[-1])[0] for each in (job, undisturbed))
    moments = [name for name in theirs if name.startswith("exp_avg")]
    assert moments
    assert all(mine[name].equal(theirs[name]) for name in moments)


def test_exception_that_comes_twice_at_a_step_ends_the_run_with_the_reason(
    corpus: Path, tmp_path: Path, cluster: Cluster
) -> None:
    # Another share held out makes other tokens: the copy that is damaged below is no other run's.
    settings = [*SETTINGS, "failure.max_failures=10", "data.val_fraction=0.2"]
    job = Job(corpus, tmp_path, "broken", *settings, environment=cluster.environment)
    assert job.run("prepare") == 0, job.log.read_text()[-3000:]
    (tokens_folder,) = (tmp_path / "tokens").iterdir()
    manifest = json.loads((tokens_folder / "manifest.json").read_text())
    n_windows = (manifest["train"]["tokens"] - 1) // 32
    plant_bad_token(tokens_folder, cluster.folder, WindowOrder(n_windows, 16, seed=7).window_ids(10)[3])
    assert job.run() == 1
    reason = r"IndexError: .*\(rank \d, after step 10\), for the second time at this step"
    assert re.search(reason, job.log.read_text())
    assert job.rows()[-1].step == 10
    assert job.status()["restarts"] == 1, "no third try"
    assert job.status()["stage"] == "failed"
    # A new driver knows what happened, and does not try twice.
    assert job.run() == 1
    assert len(re.findall(reason, job.log.read_text())) >= 2
    assert job.status()["restarts"] == 2


def plant_bad_token(tokens_folder: Path, temporary: Path, window: int) -> None:
    """Makes the node's flat copy of the training tokens, with a token of no vocabulary in a window."""
    stream = np.concatenate(list(token_stream(tokens_folder, "train")))
    stream[window * 32 + 5] = 65_000
    folder = temporary / f"rayjob-{os.getuid()}" / "streams"
    folder.mkdir(parents=True, exist_ok=True)
    flat = folder / f"{Manifest.load(tokens_folder).hash}-train.uint16"
    stream.astype(np.uint16).tofile(flat)
