"""The micro-batch of real workers: gloo, real processes, real forwards and backwards of a tiny model."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayjob.config import JobConfig, TrainConfig
from rayjob.lease import Fence
from rayjob.training.micro_batch import MICRO_BATCH_FILE, naming_smaller_size, settle_micro_batch
from rayjob.training.trial import MicroBatchTrial
from tests.ranks import CPU, TINY, TinyWorker, run_ranks

N_RANKS = 2


def config_of(storage: Path, micro_batch_size: Any, n_workers: int = 1, global_batch_size: int = 16) -> JobConfig:
    config = JobConfig(
        storage=str(storage),
        model=TINY,
        train=TrainConfig(
            num_workers=n_workers,
            use_gpu=False,
            precision="fp32",
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
        ),
    )
    (config.run_folder / "lease").mkdir(parents=True, exist_ok=True)
    (config.run_folder / "lease" / "00000001.json").touch()
    return config


class Worker(TinyWorker):
    """A worker that can try sizes and then take three steps with one."""

    def __init__(self, config: JobConfig) -> None:
        super().__init__(config)
        self.trial = MicroBatchTrial(config, self.model, self.optimizer, CPU, torch.float32)

    def train(self, micro_batch_size: int) -> None:
        feed = self.open_feed(micro_batch_size)
        for index in range(3):
            self.step(feed, index)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def run_worker(rank: int, meeting: str, storage: Path) -> dict[str, Any]:
    """Settles the size where rank 1 has room for 2 windows only, trains with it, and with the same size given."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", meeting, rank=rank, world_size=N_RANKS)
    config = config_of(storage, "auto", N_RANKS)
    automatic, given = Worker(config), Worker(config)
    fence = Fence(config.run_folder)

    def trial(size: int) -> float | None:
        seconds = automatic.trial(size)
        return None if rank == 1 and size > 2 else seconds

    size = settle_micro_batch(config, trial, CPU, fence)
    automatic.train(size)
    given.train(size)

    def forget(size: int) -> float | None:
        raise AssertionError(f"{size} windows are tried again")

    result = {
        "size": size,
        "again": settle_micro_batch(config, forget, CPU, fence),
        "is_same": same(automatic.tensors(), given.tensors()),
        "weights": [weight.detach().numpy() for weight in automatic.model.parameters()],
    }
    dist.destroy_process_group()
    return result


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    storage = tmp_path_factory.mktemp("storage")
    return run_ranks(run_worker, N_RANKS, storage)


def test_all_ranks_take_what_fits_on_the_smallest(workers: list[dict[str, Any]]) -> None:
    assert workers[0]["size"] == workers[1]["size"]
    assert workers[0]["size"] in (1, 2)


def test_a_later_group_of_as_many_workers_takes_the_same_without_measuring(workers: list[dict[str, Any]]) -> None:
    assert [worker["again"] for worker in workers] == [worker["size"] for worker in workers]


def test_steps_after_the_search_are_bit_for_bit_those_of_the_size_given(workers: list[dict[str, Any]]) -> None:
    for worker in workers:
        assert worker["is_same"]
    for mine, theirs in zip(workers[0]["weights"], workers[1]["weights"], strict=True):
        assert (mine == theirs).all()


@pytest.mark.usefixtures("one_worker")
@pytest.mark.parametrize("n_steps", [0, 3])
def test_trial_leaves_weights_moments_generators_and_gradients_alone(tmp_path: Path, n_steps: int) -> None:
    worker = Worker(config_of(tmp_path, "auto"))
    if n_steps:
        worker.train(4)
    before = worker.tensors()
    assert worker.trial(4) is not None
    assert same(worker.tensors(), before)
    assert all(weight.grad is None for weight in worker.model.parameters())
    assert worker.model.training


@pytest.mark.usefixtures("one_worker")
def test_out_of_memory_in_forward_or_backward_is_no_error_and_leaves_no_gradient(tmp_path: Path) -> None:
    worker = Worker(config_of(tmp_path, "auto"))

    def overflow(gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    # The embedding's gradient comes last, so there are gradients of all the layers by then.
    hook = worker.model.model.embed_tokens.weight.register_hook(overflow)
    assert worker.trial(4) is None
    assert all(weight.grad is None for weight in worker.model.parameters())
    hook.remove()
    assert worker.trial(4) is not None


@pytest.mark.usefixtures("one_worker")
def test_host_without_room_is_not_tried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    worker = Worker(config_of(tmp_path, "auto"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: dataclasses.make_dataclass("Memory", ["available"])(1_000))
    assert worker.trial(1) is None


@pytest.mark.usefixtures("one_worker")
def test_choice_of_other_circumstances_or_in_a_damaged_file_is_not_taken(tmp_path: Path) -> None:
    config = config_of(tmp_path, "auto")
    fence, path = Fence(config.run_folder), config.run_folder / MICRO_BATCH_FILE
    quick = {"fast": 4}

    def trial(size: int) -> float:
        return 0.1 if size == quick["fast"] else float(size)

    assert settle_micro_batch(config, trial, CPU, fence) == 4
    quick["fast"] = 8
    assert settle_micro_batch(config, trial, CPU, fence) == 4, "remembered"
    other = config_of(tmp_path, "auto", global_batch_size=32)
    assert settle_micro_batch(other, trial, CPU, fence) == 8
    assert len(json.loads(path.read_text())) == 2
    path.write_text("{torn")
    assert settle_micro_batch(config, trial, CPU, fence) == 8


@pytest.mark.usefixtures("one_worker")
def test_number_is_taken_untried_on_a_cpu(tmp_path: Path) -> None:
    config = config_of(tmp_path, 4)

    def trial(size: int) -> float:
        raise AssertionError("a number costs nothing")

    assert settle_micro_batch(config, trial, CPU, Fence(config.run_folder)) == 4
    assert not (config.run_folder / MICRO_BATCH_FILE).exists()


@pytest.mark.usefixtures("one_worker")
def test_number_that_does_not_fit_a_gpu_is_halved_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no GPU here: tensors are made on the CPU in its place, and a trial of more than 4 windows fails."""
    from rayjob.training import micro_batch

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    make = torch.tensor
    monkeypatch.setattr(micro_batch.torch, "tensor", lambda data, dtype, device: make(data, dtype=dtype))
    monkeypatch.setattr(micro_batch, "from_rank_0", lambda mine, _: mine)
    config, gpu = config_of(tmp_path, 16), torch.device("cuda")
    tried: list[int] = []

    def trial(size: int) -> float | None:
        tried.append(size)
        return None if size > 4 else 0.1

    with caplog.at_level(logging.INFO):
        assert settle_micro_batch(config, trial, gpu, Fence(config.run_folder)) == 4
        assert settle_micro_batch(config, trial, gpu, Fence(config.run_folder)) == 4
    assert tried == [16, 8, 4], "the second time it is known"
    assert "a micro-batch of 16 windows is out of memory: halved to 8" in caplog.text
    assert "micro-batch: 4 windows" in caplog.text


def test_out_of_memory_in_a_later_step_names_the_size_to_set(tmp_path: Path) -> None:
    config = config_of(tmp_path, "auto")
    told = r"set train\.micro_batch_size=4\. CUDA out of memory"
    with pytest.raises(torch.OutOfMemoryError, match=told), naming_smaller_size(config, 8):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(torch.OutOfMemoryError, match=r"lower model\.max_seq_len"), naming_smaller_size(config, 1):
        raise torch.OutOfMemoryError("CUDA out of memory.")
