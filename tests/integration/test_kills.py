"""kill -9 of every part of a run at every kind of moment: it ends as the run that nothing happened to.

Real: the command line, Ray's processes, DDP over gloo, MLflow's store, and every SIGKILL. Only model and corpus are
tiny, and the validation split is large, so that a validation lasts. The parts that need a supervisor (head, raylet,
the supervisor itself) are killed in tests/e2e/test_supervise.py.
"""

import random
from pathlib import Path

import pytest

from model.checkpoint import list_checkpoints
from tests import kills
from tests.integration.jobs import WORDS, Job, assert_tracked
from tests.integration.nodes import Cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

# 3 epochs; validations and saves on steps of their own, and none at an epoch's last step but the run's.
SETTINGS = """
    train.epochs=3 train.max_steps=null train.eval_interval=40 checkpoint.interval_steps=25 data.val_fraction=0.4
    failure.max_failures=20
""".split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty small books of words in another order each."""
    folder = tmp_path_factory.mktemp("books")
    for book in range(60):
        words = [WORDS[(i * (book + 3) + i // (7 + book % 5)) % len(WORDS)] for i in range(900)]
        (folder / f"book_{book:02d}.txt").write_text(" ".join(words).capitalize() + ".\n")
    return folder


def local_parts(job: Job, pid: int) -> kills.Parts:
    """The processes of a driver that has a local Ray of its own."""
    return kills.Parts(lambda: kills.family(pid), job.run_folder)


def test_run_killed_everywhere_at_every_kind_of_moment_ends_as_the_undisturbed_one(
    corpus: Path, tmp_path: Path, cluster: Cluster
) -> None:
    undisturbed = Job(corpus, tmp_path, "undisturbed", *SETTINGS, environment=cluster.environment)
    assert undisturbed.run() == 0, undisturbed.log.read_text()[-3000:]
    n_steps = kills.last_step(undisturbed.run_folder)
    assert n_steps % 3 == 0
    epoch = n_steps // 3
    assert 40 < epoch < 80, "the moments below lie in the epochs that they are meant for"
    rng = random.Random(20)

    job = Job(corpus, tmp_path, "killed", *SETTINGS)
    driver = job.start()
    parts, folder = local_parts(job, driver.pid), job.run_folder

    # Before there is any checkpoint.
    kills.wait_until(kills.from_step(folder, rng.randint(5, 20)), "a step")
    parts.kill("worker")
    # Twice in a row, the second time before there is a newer checkpoint: inside a save, then as soon as it trains.
    kills.kill([kills.stop_rank_0(parts, kills.in_save(folder), "a save")])
    begun, complete = kills.starts(folder), list_checkpoints(folder)
    kills.wait_until(lambda: kills.starts(folder) > begun and bool(parts.rank_0()), "the next start")
    kills.kill(parts.workers())
    assert list_checkpoints(folder) == complete
    # Ray Train's controller, at an epoch's last step. Nothing brings it back within a driver, which says so.
    kills.stop_rank_0(parts, kills.at_steps(folder, {epoch, 2 * epoch}), "the last step of an epoch")
    kills.kill([*parts.of_kind("controller"), *parts.workers()])
    assert driver.wait(timeout=120) == 1
    assert "the same command goes on from the last checkpoint" in job.log.read_text()
    driver = job.start()
    parts = local_parts(job, driver.pid)
    # All workers, inside a validation after the first epoch.
    kills.stop_rank_0(parts, kills.in_validation(folder, {80, 120, 160}), "a validation")
    kills.kill(parts.workers())
    assert kills.last_step(folder) > epoch
    # The driver with its cluster, further on.
    kills.wait_until(kills.from_step(folder, kills.last_step(folder) + rng.randint(5, 20)), "a further step")
    kills.kill(kills.family(driver.pid))
    driver.wait()
    assert kills.last_step(folder) < n_steps, "it was to be killed before its end"

    assert job.run() == 0, job.log.read_text()[-3000:]
    assert kills.differences(undisturbed.run_folder, folder) == []
    assert kills.starts(folder) == 7
    assert_tracked(job, tmp_path)
