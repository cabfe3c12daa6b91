"""What belongs to which step: windows, epoch and learning rate, each a pure function of the step.

Steps count finished optimizer updates, so the update that leads from step s to s + 1 has index s. Nothing here has
state: resuming at any step is O(1) and gives what the undisturbed run would have seen.
"""

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rayjob.config import JobConfig, OptimizerConfig


class WindowOrder:
    """The order of windows: every window once an epoch, in another order each epoch.

    The last step of an epoch holds what is left, so it may have fewer windows than the global batch.

    Args:
        n_windows: training windows in the corpus.
        global_batch_size: windows per step.
        seed: the run's seed.
    """

    def __init__(self, n_windows: int, global_batch_size: int, seed: int) -> None:
        if n_windows < 1:
            raise ValueError(f"the corpus has {n_windows} training windows; at least 1 is needed.")
        self.n_windows = n_windows
        self.global_batch_size = global_batch_size
        self.seed = seed

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.n_windows / self.global_batch_size)

    def epoch(self, index: int) -> int:
        return index // self.steps_per_epoch

    def window_ids(self, index: int) -> npt.NDArray[np.int64]:
        """Returns the ids of the windows of update `index`, (global_batch_size,) or fewer at an epoch's end."""
        epoch, position = divmod(index, self.steps_per_epoch)
        begin = position * self.global_batch_size
        return _permutation(self.n_windows, self.seed, epoch)[begin : begin + self.global_batch_size]

    def windows_seen(self, step: int) -> int:
        """Returns the number of windows trained on after `step` updates."""
        epochs, position = divmod(step, self.steps_per_epoch)
        return epochs * self.n_windows + min(position * self.global_batch_size, self.n_windows)


@lru_cache(maxsize=2)
def _permutation(n_windows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    # NumPy keeps a bit generator's raw output the same in every release, but not what Generator makes of it.
    raw = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n_windows)
    return np.argsort(raw, kind="stable")


def deal(ids: npt.NDArray[np.int64], rank: int, n_workers: int, micro_batch_size: int) -> list[npt.NDArray[np.int64]]:
    """Returns the micro-batches of one worker, in order.

    The step's windows are cut into micro-batches first and those are dealt round, so what a micro-batch holds does
    not depend on the number of workers. All workers get equally many, the last ones possibly short or empty.
    """
    n_micro_batches = math.ceil(len(ids) / micro_batch_size)
    rounds = math.ceil(n_micro_batches / n_workers)
    starts = ((r * n_workers + rank) * micro_batch_size for r in range(rounds))
    return [ids[start : start + micro_batch_size] for start in starts]


def max_steps(config: JobConfig, order: WindowOrder) -> int:
    """Returns the number of updates of the run: `train.max_steps`, else whole epochs."""
    return config.train.max_steps or config.train.epochs * order.steps_per_epoch


def learning_rate(optimizer: OptimizerConfig, index: int, n_steps: int) -> float:
    """Returns the rate of update `index`: linear warm-up, then the schedule's fall, which ends at min_lr.

    The first update has lr / warmup_steps, update warmup_steps - 1 the peak, update n_steps - 1 min_lr. With a
    warm-up that fills the run the rate only rises.
    """
    done = index + 1
    if done <= optimizer.warmup_steps:
        return optimizer.lr * done / optimizer.warmup_steps
    begin = optimizer.warmup_steps
    if optimizer.schedule == "wsd":
        begin = max(begin, n_steps - math.ceil(optimizer.decay_fraction * n_steps))
        if done <= begin:
            return optimizer.lr
    progress = min(1.0, (done - begin) / (n_steps - begin))
    if optimizer.schedule == "wsd":
        return optimizer.lr + progress * (optimizer.min_lr - optimizer.lr)
    return optimizer.min_lr + 0.5 * (optimizer.lr - optimizer.min_lr) * (1 + math.cos(math.pi * progress))
