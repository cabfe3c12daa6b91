"""A run whose storage fails under it, on a real local Ray with real workers, MLflow and an ext4 of its own."""

import itertools
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.checkpoint import checkpoint_name, list_checkpoints
from tests.integration.jobs import Job, wait_until
from tests.integration.nodes import Cluster
from tests.mounts import fill, frozen, mounted_image

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

HANG_S = 30.0
SETTINGS = "train.max_steps=1000000 checkpoint.interval_steps=null checkpoint.interval_s=5".split()


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mounted_image(tmp_path_factory.mktemp("image") / "disk", 128 << 20) as disk:
        yield disk


def wait_for_new_checkpoint(job: Job, process: subprocess.Popen[bytes]) -> str:
    before = {folder.name for folder in list_checkpoints(job.run_folder)}
    wait_until(lambda: bool({f.name for f in list_checkpoints(job.run_folder)} - before), process, job.log)
    return list_checkpoints(job.run_folder)[-1].name


def test_full_and_hanging_storage_stops_no_step_and_damage_no_run(
    corpus: Path, disk: Path, tmp_path: Path, cluster: Cluster
) -> None:
    job = Job(corpus, disk, "outages", *SETTINGS, environment=cluster.environment)
    job.log = tmp_path / "outages.log"  # where there is room for what it tells
    process = job.start()
    checkpoint = wait_for_new_checkpoint(job, process)

    # Ray Train's controller, which no full disk may meet, writes its list after the checkpoint stands.
    snapshot = job.run_folder / "checkpoint_manager_snapshot.json"
    wait_until(lambda: snapshot.exists() and checkpoint in snapshot.read_text(), process, job.log)
    filler = fill(disk)
    wait_until(lambda: "failed save 1 of at most 3" in job.log.read_text(), process, job.log)
    assert re.search(r"could not be saved: rank \d: \[Errno 28\] No space left on device", job.log.read_text())
    filler.unlink()
    wait_for_new_checkpoint(job, process)

    with frozen(disk):
        began_s = time.time()
        time.sleep(HANG_S)  # the length of the outage is what is tried, not a wait for something
        ended_s = time.time()
    wait_until(lambda: job.rows()[-1].wall_time > ended_s, process, job.log)
    assert "the storage is slow or hangs" in job.log.read_text()
    wait_for_new_checkpoint(job, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 3, job.log.read_text()[-3000:]
    rows = job.rows()
    assert [row.step for row in rows] == list(range(1, rows[-1].step + 1)), "no row was lost or torn"
    times_s = [row.wall_time for row in rows if began_s < row.wall_time < ended_s]
    longest_s = max(b - a for a, b in itertools.pairwise([began_s, *times_s, ended_s]))
    assert longest_s < HANG_S / 3, "steps of milliseconds, some with a validation, on a machine that may be busy"

    before, newest = list_checkpoints(job.run_folder)[-2:]
    assert newest.name == checkpoint_name(rows[-1].step)
    weights = newest / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    (job.run_folder / "checkpoint_manager_snapshot.json").write_text('{"checkpoint_results": [{"checkpoint_dir')
    (job.run_folder / "step_99999999.0123456789ab.tmp" / "trainer").mkdir(parents=True)
    job.log.unlink()
    process = job.start()
    wait_until(lambda: job.rows()[-1].step > int(before.name[5:]), process, job.log)
    wait_for_new_checkpoint(job, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 3, job.log.read_text()[-3000:]
    log = job.log.read_text()
    assert f"resuming from {before}" in log
    assert log.count(f"{newest.name}/model.safetensors is damaged") == 1
    assert list(job.run_folder.glob("*.tmp")) == []
    state = json.loads((list_checkpoints(job.run_folder)[-1] / "trainer" / "state.json").read_text())
    assert state["mlflow_run_id"] == job.status()["mlflow_run_id"]
