"""SIGTERM to a `ray start --block` node, and five seconds later SIGKILL to all of it, as a spot pod is taken back.

Real: Ray's nodes, each with its processes, the drain, the workers, 200 MB of state on the local disk. Nodes of one
machine stand for machines.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.checkpoint import latest_checkpoint, step_of, verify_checkpoint
from tests.integration.jobs import Job, write_books
from tests.integration.nodes import PREEMPTION_S, Cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

# 17.3 million parameters: 207 MB of weights and moments. Nothing but a notice saves.
SETTINGS = """
    model.d_model=512 model.n_layers=6 model.n_heads=8 model.n_kv_heads=4 model.d_ff=1408
    train.global_batch_size=4 train.micro_batch_size=2 train.max_steps=1000 train.eval_interval=1000
    checkpoint.interval_steps=null checkpoint.interval_s=null failure.max_failures=0 tracking.tensorboard=false
""".split()
NOTICE = re.compile(r"preemption notice at step (\d+), saved step (\d+) in (\d+\.\d) s")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_books(tmp_path_factory.mktemp("books"), 4)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as made:
        yield made


def assert_saved(job: Job, step_before: int) -> int:
    """No more than the step under way is lost, and the log tells it."""
    saved = latest_checkpoint(job.run_folder)
    assert saved, job.log.read_text()[-3000:]
    verify_checkpoint(saved)
    assert step_of(saved) >= step_before
    assert sum(path.stat().st_size for path in saved.rglob("*")) > 200e6
    told = NOTICE.findall(job.log.read_text())
    assert told, job.log.read_text()[-3000:]
    step, saved_step, seconds = told[-1]
    assert int(step) == int(saved_step) == step_of(saved) == job.rows()[-1].step
    assert float(seconds) < PREEMPTION_S
    return step_of(saved)


def test_only_node_saves_its_last_step_before_it_is_taken_away(corpus: Path, tmp_path: Path, cluster: Cluster) -> None:
    head = cluster.add(n_cpus=2)
    job = Job(corpus, tmp_path, "alone", *SETTINGS, environment=cluster.environment)
    driver = job.start("train")
    try:
        job.wait_for_step(3, driver)
        step = job.rows()[-1].step
        head.take_away(driver)
    finally:
        driver.kill()
        driver.wait()
    assert_saved(job, step)


def test_one_of_two_nodes_is_taken_away_and_the_run_goes_on_when_there_is_another(
    corpus: Path, tmp_path: Path, cluster: Cluster
) -> None:
    cluster.add(n_cpus=1)
    spot = cluster.add(n_cpus=1)
    job = Job(corpus, tmp_path, "two", *SETTINGS, environment=cluster.environment)
    driver = job.start("train")
    try:
        job.wait_for_step(3, driver)
        step = job.rows()[-1].step
        spot.take_away()
        saved = assert_saved(job, step)
        cluster.add(n_cpus=1)
        job.wait_for_step(saved + 1, driver)  # no failure is allowed, so this was none
        driver.terminate()
        assert driver.wait(timeout=120) == 3, job.log.read_text()[-3000:]
    finally:
        driver.kill()
        driver.wait()
    assert [row.step for row in job.rows()] == list(range(1, job.rows()[-1].step + 1))
    assert job.status()["restarts"] == 1
