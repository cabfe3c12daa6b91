"""The optimizer step under real DDP: gloo, one process per worker, fp32, tiny model."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from model.config import ModelConfig
from model.llama import Llama
from rayjob.config import OptimizerConfig, TrainConfig
from rayjob.training.bad_numbers import BadSteps
from rayjob.training.ddp import wrap
from rayjob.training.feed import StepFeed, Windows
from rayjob.training.optimizer import build_optimizer
from rayjob.training.schedule import WindowOrder
from rayjob.training.step import Wishes, train_step
from tests.ranks import run_ranks

CONFIG = ModelConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, max_seq_len=16)
N_STEPS, BATCH, MICRO = 20, 16, 2
FAULTY = 5


@dataclasses.dataclass(frozen=True)
class Case:
    n_workers: int
    micro_batch_size: int = MICRO
    n_windows: int = 200  # 13 steps an epoch, the last of 8 windows
    allreduce_dtype: Literal["fp32", "bf16"] = "fp32"
    fault: str = ""  # of the last worker: "data" or "gradient" in step FAULTY, "weight" from then on


def run_worker(rank: int, meeting: str, case: Case) -> dict[str, Any]:
    """Returns losses, norms, wishes, window ids and reduced bytes per step, and the final weights."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", meeting, rank=rank, world_size=case.n_workers)
    model = Llama(CONFIG)
    model.init_weights(0)
    ddp = wrap(model, TrainConfig(use_gpu=False, allreduce_dtype=case.allreduce_dtype), torch.device("cpu"))
    reduced: list[int] = []

    def count(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        reduced.append(bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer().div_(case.n_workers), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    if isinstance(ddp, DistributedDataParallel) and case.allreduce_dtype == "fp32":
        ddp.register_comm_hook(None, count)
    optimizer = build_optimizer(model, OptimizerConfig())
    stream = np.random.default_rng(1).integers(0, 64, case.n_windows * 16 + 1).astype(np.uint16)
    windows = Windows(stream, 16)
    order = WindowOrder(len(windows), BATCH, seed=7)
    feed = StepFeed(windows, order, case.micro_batch_size, rank, case.n_workers, torch.device("cpu"))
    bad_steps = BadSteps(model, torch.float32, max_in_row=5)
    result: dict[str, Any] = {"loss": [], "norm": [], "ids": [], "reduced": [], "wishes": [], "windows": []}
    result |= {"kept": [], "found": [], "reason": None}
    n_bad = 0
    for index in range(N_STEPS):
        batch = feed.step_batch(index)
        before = snapshot(model, optimizer)
        reduced.clear()
        with planted(case, model, index, rank):
            step = train_step(
                ddp,
                optimizer,
                batch,
                lr=1e-2,
                grad_clip=1.0,
                precision=torch.float32,
                wishes=lambda: Wishes(stop=rank == 1 and index == 3, save=rank == 0 and index == 2),  # noqa: B023
            )
            result["reduced"].append(sum(reduced))
            n_bad = n_bad + 1 if step.is_skipped else 0
            result["reason"] = bad_steps.take(index + 1, n_bad, step, batch)
        result["loss"].append(step.loss)
        result["norm"].append(step.grad_norm)
        result["wishes"].append(step.wishes)
        result["windows"].append(step.windows)
        result["ids"].append([inputs[targets[:, 0] >= 0].tolist() for inputs, targets in batch.micro_batches])
        result["kept"].append(all(a.equal(b) for a, b in zip(before, snapshot(model, optimizer), strict=False)))
        result["found"].append(list(bad_steps.found))
        if result["reason"]:
            break
    dist.destroy_process_group()
    result["weights"] = [parameter.detach().numpy() for parameter in model.parameters()]
    return result


def snapshot(model: Llama, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of weights, moments and the optimizer's own counts of updates, but for the weight that faults."""
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    weights = [parameter.detach() for name, parameter in model.named_parameters() if name != "model.norm.weight"]
    return [tensor.clone() for tensor in (*weights, *states)]


@contextlib.contextmanager
def planted(case: Case, model: Llama, index: int, rank: int) -> Iterator[None]:
    """Plants the fault of a case in the last worker."""
    hooks: list[Any] = []
    if rank == case.n_workers - 1:
        if case.fault == "weight" and index == FAULTY:
            model.model.norm.weight.data[0] = torch.nan
        if case.fault == "data" and index == FAULTY:
            hooks.append(model.model.embed_tokens.register_forward_hook(lambda _m, _i, output: output * torch.nan))
        if case.fault == "gradient" and index == FAULTY:
            hooks.append(model.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf))
    yield
    for hook in hooks:
        hook.remove()


def launch(case: Case) -> list[dict[str, Any]]:
    return run_ranks(run_worker, case.n_workers, case)


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
    assert split["windows"] == alone["windows"]


def test_gradients_are_reduced_once_per_step(four: list[dict[str, Any]]) -> None:
    model = Llama(CONFIG)
    n_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    # 2 micro-steps a step, and one in the last step of an epoch: without no_sync() it would be twice as many.
    assert all(worker["reduced"] == [n_bytes] * N_STEPS for worker in four)


def test_gradients_reduced_in_bf16_are_those_of_fp32_but_for_rounding(four: list[dict[str, Any]]) -> None:
    rounded = launch(Case(4, allreduce_dtype="bf16"))
    assert all(worker["norm"] == rounded[0]["norm"] for worker in rounded)
    assert rounded[0]["norm"] != four[0]["norm"]
    # The first step's weights are the same. Each gradient is rounded to bf16, by 1/256 at most, once a worker and once
    # a sum; their errors are independent, so neither the norm over all of them nor a loss moves by a whole rounding.
    assert rounded[0]["norm"][0] == pytest.approx(four[0]["norm"][0], rel=1 / 256)
    assert rounded[0]["loss"] == pytest.approx(four[0]["loss"], rel=1 / 256)


def test_a_wish_of_one_worker_reaches_all_at_the_same_step(four: list[dict[str, Any]]) -> None:
    for worker in four:
        assert [step for step, wishes in enumerate(worker["wishes"]) if wishes.stop] == [3]
        assert [step for step, wishes in enumerate(worker["wishes"]) if wishes.save] == [2]


def test_fingerprint_is_that_of_the_windows_however_they_are_dealt(
    alone: dict[str, Any], four: list[dict[str, Any]]
) -> None:
    assert all(worker["windows"] == alone["windows"] for worker in four)
    assert len(set(alone["windows"])) == N_STEPS, "each step has other windows"


@pytest.mark.parametrize(
    ("fault", "tensor"),
    [("data", "the output of model.embed_tokens"), ("gradient", "the gradient of model.norm.weight")],
)
def test_all_skip_a_step_whose_bad_number_is_one_workers_and_then_go_on(fault: str, tensor: str) -> None:
    workers = launch(Case(2, fault=fault))
    for worker in workers:
        assert worker["kept"] == [index == FAULTY for index in range(N_STEPS)], "nothing is updated by a skipped step"
        assert not np.isfinite(worker["norm"][FAULTY])
        assert worker["loss"][:FAULTY] + worker["loss"][FAULTY + 1 :] == pytest.approx(
            workers[0]["loss"][:FAULTY] + workers[0]["loss"][FAULTY + 1 :], abs=0
        )
        assert [bool(found) for found in worker["found"]] == [index == FAULTY for index in range(N_STEPS)]
        (found,) = worker["found"][FAULTY]
        assert (found.rank, found.tensor, found.is_weight) == (1, tensor, False)
        assert len(found.window_ids) == MICRO
        assert worker["reason"] is None
    for mine, theirs in zip(workers[0]["weights"], workers[1]["weights"], strict=True):
        assert (mine == theirs).all()


def test_bad_steps_in_a_row_end_the_run_naming_step_rank_tensor_and_windows() -> None:
    workers = launch(Case(2, fault="weight"))
    for worker in workers:
        assert len(worker["loss"]) == FAULTY + 5
        assert worker["reason"].startswith(f"5 bad steps in a row, the last step {FAULTY + 5}: loss nan")
        assert "rank 1: the weight model.norm.weight is not finite, windows" in worker["reason"]
        assert worker["found"][-1][0].is_weight
    assert all(np.isfinite(weights).all() for weights in workers[0]["weights"])
