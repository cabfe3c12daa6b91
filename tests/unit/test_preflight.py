"""The checks before training: real gloo in real processes, a real disk; what fails is faked."""

import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayjob.config import JobConfig, TrainConfig
from rayjob.step_time import checkpoint_bytes
from rayjob.training import preflight, storage_probe
from rayjob.training.failure import StartRefusedError
from rayjob.training.link import HangError, Link, measure_link, require_link, within
from rayjob.training.preflight import FAILED, OK, SLOW, Check, run_preflight
from rayjob.training.storage_probe import PROBE_FILE, measure_storage, missing_bytes
from tests.ranks import CPU, TINY, TinyWorker, run_ranks

N_RANKS = 2


def config_of(storage: Path, n_workers: int = 1) -> JobConfig:
    train = TrainConfig(
        num_workers=n_workers, use_gpu=False, precision="fp32", global_batch_size=16, micro_batch_size=4
    )
    config = JobConfig(storage=str(storage), model=TINY, train=train)
    config.run_folder.mkdir(parents=True, exist_ok=True)
    return config


class Worker(TinyWorker):
    """A worker that can check and take a step."""

    def __init__(self, config: JobConfig) -> None:
        super().__init__(config)
        self.feed = self.open_feed(config.train.assumed_micro_batch_size)

    def check(self, step: int = 0) -> list[Check]:
        return run_preflight(self.config, self.ddp, self.feed, step, first_s=0.5)


def run_worker(rank: int, meeting: str, storage: Path) -> dict[str, Any]:
    """Trains three steps with preflights before the first and the third, and three without; then rank 1 stays away."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", meeting, rank=rank, world_size=N_RANKS)
    config = config_of(storage, N_RANKS)
    require_link(CPU, limit_s=60.0)
    checked, plain = Worker(config), Worker(config)
    result: dict[str, Any] = {"checks": []}
    for index in range(3):
        if index != 1:
            result["checks"].append(checked.check(index))
        checked.step(checked.feed, index)
        plain.step(plain.feed, index)
    mine, others = checked.tensors(), plain.tensors()
    result["is_same"] = all(mine[name].equal(others[name]) for name in others)
    with pytest.MonkeyPatch.context() as patch:  # of rank 0 alone, which is who looks
        if rank == 0:
            patch.setattr(storage_probe.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
        with pytest.raises(StartRefusedError) as refused:
            checked.check()
    result["refused"] = str(refused.value)
    gone = storage / "gone"
    if rank == 0:
        with pytest.raises(HangError) as hung:
            require_link(CPU, limit_s=0.5)
        result["hung"] = str(hung.value)
        gone.touch()
    deadline_s = time.monotonic() + 120  # should rank 0 end otherwise
    while not gone.exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return result


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    storage = tmp_path_factory.mktemp("storage")
    return run_ranks(run_worker, N_RANKS, storage)


def test_run_with_preflights_is_bit_for_bit_the_one_without(workers: list[dict[str, Any]]) -> None:
    assert all(worker["is_same"] for worker in workers)


def test_every_rank_knows_every_check_with_its_figure(workers: list[dict[str, Any]]) -> None:
    for worker in workers:
        for checks in worker["checks"]:
            assert [check.name for check in checks] == ["all-reduce", "step", "storage", "free space"]
            assert {check.verdict for check in checks} == {OK}
            assert "GB/s" in checks[0].figure
            assert "MB/s" in checks[2].figure
    # The storage is looked at by one rank, for all.
    assert workers[0]["checks"][0][2:] == workers[1]["checks"][0][2:]


def test_what_fails_on_rank_0_refuses_the_start_on_all_ranks_alike(workers: list[dict[str, Any]]) -> None:
    assert workers[0]["refused"] == workers[1]["refused"]
    assert "free space: 0.00 GiB" in workers[0]["refused"]
    assert "lower checkpoint.keep" in workers[0]["refused"]


def test_rank_that_stays_away_is_an_error_in_time_that_names_the_remedies(workers: list[dict[str, Any]]) -> None:
    assert "rank 0 of 2 waited 0 s" in workers[0]["hung"]
    for remedy in ("NCCL_P2P_DISABLE=1", "NCCL_IB_DISABLE=1", "NCCL_SOCKET_IFNAME"):
        assert remedy in workers[0]["hung"]


@pytest.mark.usefixtures("one_worker")
def test_lone_worker_has_no_link_to_check_and_the_table_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    require_link(CPU, limit_s=0.0)
    assert measure_link(100, CPU, limit_s=0.0) is None
    with caplog.at_level(logging.INFO):
        checks = Worker(config_of(tmp_path)).check()
    assert [check.name for check in checks] == ["step", "storage", "free space"]
    for check in checks:
        assert check.figure in caplog.text
    assert sorted(path.name for path in (tmp_path / "runs" / "run").iterdir()) == [], "nothing is left"


@pytest.mark.usefixtures("one_worker")
@pytest.mark.parametrize("fault", ["read-only", "changed", "hang"])
def test_storage_that_cannot_be_used_refuses_the_start(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(config_of(tmp_path))

    def read_only(_descriptor: int) -> None:
        raise OSError(30, "Read-only file system")

    def change(_descriptor: int, *_: object) -> None:
        worker.config.run_folder.joinpath(PROBE_FILE).write_bytes(b"others")

    def hang(_descriptor: int) -> None:
        raise HangError("its storage hangs")

    if fault == "changed":
        monkeypatch.setattr(os, "posix_fadvise", change)
    else:
        monkeypatch.setattr(os, "fsync", {"read-only": read_only, "hang": hang}[fault])
    expected: dict[str, tuple[type[Exception], str]] = {
        "read-only": (StartRefusedError, "storage: .*Read-only file system; make `storage` writable"),
        "changed": (StartRefusedError, "does not read as it was written"),
        "hang": (HangError, "its storage hangs"),
    }
    error, message = expected[fault]
    with pytest.raises(error, match=message):
        worker.check()
    assert not (worker.config.run_folder / PROBE_FILE).exists()


def test_work_that_hangs_is_left_behind_and_an_error_comes_through() -> None:
    import threading

    assert within(60.0, lambda: 5, "late") == 5
    assert within(60.0, lambda: None, "late") is None
    with pytest.raises(HangError, match="late"):
        within(0.01, threading.Event().wait, "late")
    with pytest.raises(ZeroDivisionError):
        within(60.0, lambda: 1 / 0, "late")


def test_storage_is_given_no_more_than_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def fsync(descriptor: int) -> None:
        written.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(storage_probe, "_PIECE_BYTES", 1_000)
    speed = measure_storage(tmp_path, 2_500)
    assert written == [1_000, 2_000, 3_000], "piece by piece"
    assert speed.write_bytes_per_s > 0
    assert speed.read_bytes_per_s > 0
    monkeypatch.setattr(storage_probe, "_MOST_S", 0.0)
    measure_storage(tmp_path, 2_500)
    assert written[3:] == [1_000], "a slow storage only the first piece"


def test_space_is_needed_for_the_checkpoints_that_are_not_there_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_bytes = checkpoint_bytes(TINY)
    assert missing_bytes(tmp_path, n_bytes, keep=2) == 4 * n_bytes, "two, the best one, and one being written"
    for n_saved, n_missing in ((1, 3), (3, 1), (5, 1)):
        monkeypatch.setattr(storage_probe, "list_checkpoints", lambda _, n=n_saved: [tmp_path] * n)
        assert missing_bytes(tmp_path, n_bytes, keep=2) == n_missing * n_bytes


@pytest.mark.parametrize(("name", "gb_per_s", "verdict"), [("NVIDIA H200", 10.0, SLOW), ("NVIDIA H200", 300.0, OK)])
def test_link_far_below_the_usual_of_its_gpu_is_slow(
    monkeypatch: pytest.MonkeyPatch, name: str, gb_per_s: float, verdict: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    check = preflight._judge_link(Link(gb_per_s, 0.1), torch.device("cuda"))
    assert check.verdict == verdict
    assert "(usual: 360)" in check.figure
    assert "NCCL_P2P_DISABLE=1" in check.remedy


@pytest.mark.usefixtures("one_worker")
def test_slow_save_is_warned_of_and_no_reason_not_to_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preflight, "_SLOW_SAVE_S", 0.0)
    checks = Worker(config_of(tmp_path)).check()
    assert {check.name: check.verdict for check in checks}["storage"] == SLOW
    assert "preflight: storage is slow" in caplog.text
    assert FAILED not in {check.verdict for check in checks}
