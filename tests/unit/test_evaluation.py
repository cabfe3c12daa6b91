"""An evaluation that one of two workers wishes to break off, with real gloo."""

import numpy as np
import torch
import torch.distributed as dist

from model.config import ModelConfig
from model.llama import Llama
from rayjob.training.evaluation import EvaluationAbandoned, evaluate
from rayjob.training.feed import Windows
from rayjob.training.step import Wishes
from tests.ranks import run_ranks

CONFIG = ModelConfig(vocab_size=64, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=16, max_seq_len=8)


def run_worker(rank: int, meeting: str) -> tuple[int, Wishes | None, float]:
    """Returns the batches until it was broken off, what the workers wished, and the loss of a second evaluation."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", meeting, rank=rank, world_size=2)
    model = Llama(CONFIG)
    model.init_weights(0)
    windows = Windows(np.random.default_rng(1).integers(0, 64, 8 * 13 + 3).astype(np.uint16), 8)
    lengths = np.ones(64, dtype=np.int64)
    batches, wishes = 0, None

    def wish() -> Wishes:
        nonlocal batches
        batches += 1
        return Wishes(leave=rank == 1 and batches == 3)

    try:
        evaluate(model, windows, lengths, batch_size=2, precision=torch.float32, wishes=wish)
    except EvaluationAbandoned as abandoned:
        wishes = abandoned.wishes
    whole = evaluate(model, windows, lengths, batch_size=2, precision=torch.float32)
    dist.destroy_process_group()
    return batches, wishes, whole.val_loss


def test_all_workers_abandon_an_evaluation_at_the_same_batch_and_can_do_it_again() -> None:
    first, second = run_ranks(run_worker, 2)
    assert first == second
    assert first[:2] == (3, Wishes(leave=True))
    model = Llama(CONFIG)
    model.init_weights(0)
    windows = Windows(np.random.default_rng(1).integers(0, 64, 8 * 13 + 3).astype(np.uint16), 8)
    alone = evaluate(model, windows, np.ones(64, dtype=np.int64), batch_size=2, precision=torch.float32)
    # The same batches, dealt to one instead of two: only the order of float64 sums differs.
    assert abs(first[2] - alone.val_loss) < 1e-9
