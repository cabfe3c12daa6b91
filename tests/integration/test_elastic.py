"""A run that loses workers and gets them back, 4 -> 2 -> 3 -> 4, on nodes that come and go; all of Ray is real."""

import dataclasses
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rayjob.training.feed import open_windows
from rayjob.training.lone_worker import LoneWorker, lone_process_group
from rayjob.training.metrics import MetricsRow
from rayjob.training.schedule import learning_rate
from rayjob.training.step import StepResult
from tests import kills
from tests.integration.jobs import REPOSITORY, Job, wait_until
from tests.integration.nodes import Cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = """
    train.max_steps=100000 train.eval_interval=100000 checkpoint.interval_steps=10 failure.max_failures=3
    model.d_model=256 model.n_layers=4 model.d_ff=704 optimizer.lr=1e-4 optimizer.min_lr=1e-4
    tracking.tensorboard=false
""".split()
# Ray looks for room every second instead of every minute.
DRIVER = """
import sys
from rayjob.training import job
from rayjob.__main__ import main
job._RESIZE_INTERVAL_S = 1.0
sys.exit(main(sys.argv[1:]))
"""
# Ray counts the cluster's resources every 20 s, and at once when it is asked to.
RECOUNT = """
import ray
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator
ray.init(log_to_driver=False)
ray.get(get_or_create_autoscaling_coordinator().get_reserved_resources.remote("nobody", recompute=True))
"""


class ElasticJob(Job):
    def start(self, command: str = "train") -> subprocess.Popen[bytes]:
        return self._start([sys.executable, "-c", DRIVER, command, *self._arguments])


def recount(cluster: Cluster) -> None:
    command = [sys.executable, "-c", RECOUNT]
    subprocess.run(command, cwd=REPOSITORY, env=cluster.environment, check=True, timeout=120)


def steps_with(job: Job, workers: int) -> list[int]:
    """The steps of the last stretch, if it has so many workers."""
    stretch: list[int] = []
    last = kills.last_row(job.run_folder)  # all rows are read only when it is worth it
    if last is None or last.workers != workers:
        return stretch
    for row in reversed(job.rows()):
        if row.workers != workers:
            break
        stretch.append(row.step)
    return stretch[::-1]


def test_run_of_4_then_2_then_3_then_4_workers_takes_the_steps_of_the_fixed_run(corpus: Path, tmp_path: Path) -> None:
    with Cluster() as cluster:
        cluster.add(n_cpus=2)
        spots = [cluster.add(n_cpus=1), cluster.add(n_cpus=1)]
        job = ElasticJob(
            corpus, tmp_path, "elastic", *SETTINGS, "train.num_workers=[1, 4]", environment=cluster.environment
        )
        driver = job.start()
        try:
            wait_until(lambda: len(steps_with(job, 4)) >= 25, driver, job.log)
            for node in spots:
                node.close()
            recount(cluster)
            changes = []
            for n_workers in (2, 3, 4):
                wait_until(lambda n=n_workers: len(steps_with(job, n)) >= 25, driver, job.log)  # type: ignore[misc]
                changes.append(steps_with(job, n_workers)[0])
                if n_workers < 4:
                    cluster.add(n_cpus=1)
                    recount(cluster)
            driver.send_signal(signal.SIGTERM)
            assert driver.wait(timeout=120) == 3, job.log.read_text()[-3000:]
        finally:
            driver.kill()
            driver.wait()
    assert_same_steps(job.rows(), fixed_run(job, len(job.rows())), changes)
    optimizer, n_steps = job.config.optimizer, job.config.train.max_steps
    assert n_steps
    assert [row.lr for row in job.rows()] == [learning_rate(optimizer, i, n_steps) for i in range(len(job.rows()))]
    assert job.status()["restarts"] == 3
    # Growing is announced, so nothing is done twice: only the loss of nodes cost steps.
    grown = re.findall(r"change to (\d) workers at step (\d+), saved step (\d+)", job.log.read_text())
    grown = dict.fromkeys(grown)  # each of the nodes, which share their logs here, repeats what one worker says
    assert [n_workers for n_workers, _, _ in grown] == ["3", "4"]
    assert all(step == saved for _, step, saved in grown)


def fixed_run(job: Job, n_steps: int) -> list[StepResult]:
    """Takes the job's first steps in one process and one forward each, without Ray and without a change."""
    train = dataclasses.replace(job.config.train, micro_batch_size=job.config.train.global_batch_size)
    config = dataclasses.replace(job.config, train=train)
    (tokens_folder,) = (config.storage_folder / "tokens").iterdir()
    windows = open_windows(tokens_folder, "train", config.model.max_seq_len)
    assert train.max_steps
    with lone_process_group(use_gpu=False) as device:
        worker = LoneWorker(config, windows, device, train.max_steps, n_workers=1)
        return [worker.step(index, worker.batch(index)) for index in range(n_steps)]


def assert_same_steps(rows: list[MetricsRow], others: list[StepResult], changes: list[int]) -> None:
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))
    assert [row.windows for row in rows] == [other.windows for other in others]
    for change in changes:
        for row, other in zip(rows[change - 1 : change + 19], others[change - 1 : change + 19], strict=True):
            # fp32 sums in another order; Adam carries the differences on.
            assert row.loss == pytest.approx(other.loss, rel=1e-4), f"{row.step - change} steps after the change"
    assert rows[-1].loss == pytest.approx(others[-1].loss, rel=1e-3)
