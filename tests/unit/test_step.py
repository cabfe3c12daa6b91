"""The optimizer step under real DDP: gloo, one process per worker, fp32, tiny model."""

import dataclasses
import socket
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from model.config import ModelConfig
from model.llama import Llama
from rayjob.config import OptimizerConfig, TrainConfig
from rayjob.training.ddp import wrap
from rayjob.training.feed import StepFeed, Windows
from rayjob.training.optimizer import build_optimizer
from rayjob.training.schedule import WindowOrder
from rayjob.training.step import NonFiniteError, Wishes, train_step

CONFIG = ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, max_seq_len=16)
N_STEPS, BATCH, MICRO = 20, 16, 2


@dataclasses.dataclass(frozen=True)
class Case:
    n_workers: int
    micro_batch_size: int = MICRO
    n_windows: int = 200  # 13 steps an epoch, the last of 8 windows
    nan_step: int = -1


def run_worker(rank: int, case: Case, port: int) -> dict[str, Any]:
    """Returns losses, norms, wishes, window ids and reduced bytes per step, and the final weights."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=case.n_workers)
    model = Llama(CONFIG)
    model.init_weights(0)
    ddp = wrap(model, TrainConfig(use_gpu=False), torch.device("cpu"))
    reduced: list[int] = []

    def count(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        reduced.append(bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer().div_(case.n_workers), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    if isinstance(ddp, DistributedDataParallel):
        ddp.register_comm_hook(None, count)
    optimizer = build_optimizer(model, OptimizerConfig())
    stream = np.random.default_rng(1).integers(0, 64, case.n_windows * 16 + 1).astype(np.uint16)
    windows = Windows(stream, 16)
    order = WindowOrder(len(windows), BATCH, seed=7)
    feed = StepFeed(windows, order, case.micro_batch_size, rank, case.n_workers, torch.device("cpu"))
    result: dict[str, Any] = {"loss": [], "norm": [], "ids": [], "reduced": [], "wishes": [], "error": None}
    try:
        for index in range(N_STEPS):
            batch = feed.step_batch(index)
            if index == case.nan_step and rank == case.n_workers - 1:
                model.model.norm.weight.data[0] = torch.nan
            reduced.clear()
            step = train_step(
                ddp,
                optimizer,
                batch.micro_batches,
                n_tokens=batch.n_tokens,
                lr=1e-2,
                grad_clip=1.0,
                precision=torch.float32,
                wishes=Wishes(stop=rank == 1 and index == 3, save=rank == 0 and index == 2),
            )
            result["loss"].append(step.loss)
            result["norm"].append(step.grad_norm)
            result["wishes"].append(step.wishes)
            result["ids"].append([inputs[targets[:, 0] >= 0].tolist() for inputs, targets in batch.micro_batches])
            result["reduced"].append(sum(reduced))
    except NonFiniteError as error:
        result["error"] = str(error)
    finally:
        dist.destroy_process_group()
    result["weights"] = [parameter.detach().numpy() for parameter in model.parameters()]
    return result


def launch(case: Case) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with mp.get_context("spawn").Pool(case.n_workers) as pool:
        return pool.starmap(run_worker, [(rank, case, port) for rank in range(case.n_workers)], chunksize=1)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One worker with the whole batch in one micro-step: the slow, obvious form."""
    return launch(Case(1, micro_batch_size=BATCH))[0]


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    """Four workers with two micro-steps each."""
    return launch(Case(4))


def test_four_workers_with_accumulation_train_as_one(alone: dict[str, Any], four: list[dict[str, Any]]) -> None:
    # fp32 sums in another order; twenty steps of Adam carry the differences on.
    np.testing.assert_allclose(four[0]["loss"], alone["loss"], rtol=1e-4)
    np.testing.assert_allclose(four[0]["norm"], alone["norm"], rtol=1e-3)


def test_workers_agree_bit_for_bit(four: list[dict[str, Any]]) -> None:
    for worker in four[1:]:
        assert worker["loss"] == four[0]["loss"]
        for mine, theirs in zip(worker["weights"], four[0]["weights"], strict=True):
            assert (mine == theirs).all()


def test_four_workers_see_the_windows_of_one(alone: dict[str, Any], four: list[dict[str, Any]]) -> None:
    for index in range(N_STEPS):
        dealt = sorted(window for worker in four for micro in worker["ids"][index] for window in micro)
        assert dealt == sorted(window for micro in alone["ids"][index] for window in micro)


@pytest.mark.parametrize(("n_workers", "micro_batch_size"), [(1, 2), (2, 2), (3, 2)])
def test_any_split_of_the_batch_gives_the_same_gradient(
    alone: dict[str, Any], n_workers: int, micro_batch_size: int
) -> None:
    split = launch(Case(n_workers, micro_batch_size))[0]
    # One step in fp32: only the order of sums differs. Three workers have uneven hands, one with a padded micro-step.
    assert split["norm"][0] == pytest.approx(alone["norm"][0], rel=1e-5)
    assert split["loss"] == pytest.approx(alone["loss"], rel=1e-4)


def test_gradients_are_reduced_once_per_step(four: list[dict[str, Any]]) -> None:
    model = Llama(CONFIG)
    n_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    # 2 micro-steps a step, and one in the last step of an epoch: without no_sync() it would be twice as many.
    assert all(worker["reduced"] == [n_bytes] * N_STEPS for worker in four)


def test_a_wish_of_one_worker_reaches_all_at_the_same_step(four: list[dict[str, Any]]) -> None:
    for worker in four:
        assert [step for step, wishes in enumerate(worker["wishes"]) if wishes.stop] == [3]
        assert [step for step, wishes in enumerate(worker["wishes"]) if wishes.save] == [2]


def test_nan_of_one_worker_stops_all_before_the_update() -> None:
    workers = launch(Case(2, nan_step=5))
    for worker in workers:
        assert len(worker["loss"]) == 5
        assert "nan" in worker["error"]
    healthy = workers[0]["weights"]
    assert all(np.isfinite(weights).all() for weights in healthy)
