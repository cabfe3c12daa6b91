"""Rank 0's desk: clock, cost, the rows of metrics.csv, and what to wish for at the next step."""

import dataclasses
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rayjob.config import JobConfig
from rayjob.hardware import mfu_pct
from rayjob.lease import Fence
from rayjob.training.background_files import BackgroundFiles
from rayjob.training.feed import StepBatch
from rayjob.training.gradient_watch import OUTLIER_Z, GradientWatch
from rayjob.training.metrics import MetricsRow, MetricsWriter, Spent, parse_line, read_metrics, read_spent
from rayjob.training.peak import peak_of
from rayjob.training.preemption import StopListener
from rayjob.training.sample import write_sample
from rayjob.training.saving import RunState, SavePolicy
from rayjob.training.step import StepResult, Wishes
from rayjob.training.step_clock import StepSplit

logger = logging.getLogger(__name__)


class Recorder:
    """Records a run; only rank 0 has one.

    Args:
        config: the job's.
        state: where this attempt starts.
        spent: by earlier drivers.
        n_workers: in the group.
        device: of the worker.
        stop_signal: handle of a StopSignal actor.
        fence: of the driver's lease on the run.

    Raises:
        LeaseLostError: here or in a later call, and nothing is written any more, if another driver has the run.
    """

    def __init__(
        self,
        config: JobConfig,
        state: RunState,
        spent: Spent,
        n_workers: int,
        device: torch.device,
        stop_signal: Any,
        fence: Fence,
    ) -> None:
        fence.check()
        self._fence = fence
        self._config = config
        self._n_workers = n_workers
        self._stop = StopListener(stop_signal)
        self._policy = SavePolicy(config.checkpoint)
        # An earlier worker group of this driver may have come further than the driver knew of at its start.
        self._spent = max(spent, Spent(state.elapsed_s, state.cost_usd), read_spent(config.run_folder))
        self._metrics = MetricsWriter(config.run_folder, state.recorded_step)
        self._files = BackgroundFiles()
        self._gradients = GradientWatch(row.grad_norm for row in read_metrics(config.run_folder))
        self._started_at_s = time.monotonic()
        self._peak = peak_of(device, torch.bfloat16 if config.train.precision == "bf16" else torch.float32)

    def wishes(self, step: int) -> Wishes:
        """Returns what rank 0 asks of all workers at the end of `step`."""
        max_usd = self._config.cost.max_usd
        is_spent = max_usd is not None and self._spent_so_far().cost_usd >= max_usd
        return Wishes(stop=self._stop.is_requested or is_spent, save=self._policy.is_due(step))

    def record(
        self,
        state: RunState,
        epoch: int,
        batch: StepBatch,
        step_s: float,
        lr: float,
        result: StepResult,
        split: StepSplit | None = None,
    ) -> RunState:
        """Has the row of a step written and returns the state with the time so far.

        `split` is of an earlier step: that of this one is known when all of it is over.

        While the step's evaluation is owed its row waits in the state, for a row is written once.
        """
        state = state.at_cost(*self._spent_so_far())
        row = self._row(state, epoch, batch, step_s, lr, result)
        if split:
            row = dataclasses.replace(row, **dataclasses.asdict(split))
        if state.owes_evaluation:
            return state.with_owed_row(row.to_csv())
        self._submit(partial(self._metrics.write, row))
        return state

    def record_owed(self, state: RunState) -> RunState:
        """Writes the row that waited for its evaluation, which the state has now."""
        row = parse_line(state.owed_row)
        assert row is not None
        self._gradients.score(row.grad_norm)  # remembered for the next steps
        row = dataclasses.replace(
            row,
            val_loss=state.val_loss,
            val_accuracy=state.val_accuracy,
            val_bits_per_byte=state.val_bits_per_byte,
        )
        self._submit(partial(self._metrics.write, row))
        return state.with_owed_row("")

    def _row(
        self, state: RunState, epoch: int, batch: StepBatch, step_s: float, lr: float, result: StepResult
    ) -> MetricsRow:
        tokens_per_s = batch.n_tokens / step_s
        grad_z = self._gradients.score(result.grad_norm)
        if grad_z is not None and grad_z > OUTLIER_Z:
            logger.warning(
                "step %d: gradient norm %.3g is %.1f deviations above the steps before; its windows: %s",
                *(state.step, result.grad_norm, grad_z, " ".join(map(str, batch.all_window_ids))),
            )
        return MetricsRow(
            step=state.step,
            epoch=epoch,
            tokens=state.tokens,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            tokens_per_s=tokens_per_s,
            mfu_pct=self._mfu_pct(tokens_per_s),
            data_wait_pct=100 * batch.wait_s / step_s,
            val_loss=state.val_loss,
            val_accuracy=state.val_accuracy,
            val_bits_per_byte=state.val_bits_per_byte,
            cost_usd=state.cost_usd,
            elapsed_s=state.elapsed_s,
            wall_time=time.time(),
            workers=self._n_workers,
            windows=result.windows,
            skipped=int(result.is_skipped),
            grad_z=grad_z,
            micro_batch_size=batch.micro_batch_size,
        )

    def record_sample(self, step: int, sample: str) -> None:
        """Has a sample written; before the step's row, for trackers look for it when they read the row."""
        self._submit(partial(write_sample, self._config.run_folder, step, sample))

    def flush(self) -> None:
        """Waits until every row and sample so far is on disk.

        Raises:
            OSError: the storage does not take them.
            LeaseLostError: another driver has the run, so what depends on them must not be written either.
        """
        self._submit(self._metrics.sync)
        self._files.flush()

    def save_begun(self) -> None:
        self._policy.save_begun()

    def _submit(self, write: Callable[[], None]) -> None:
        def write_if_ours() -> None:
            self._fence.check()
            write()

        self._files.submit(write_if_ours)

    def _spent_so_far(self) -> Spent:
        elapsed_s = time.monotonic() - self._started_at_s
        usd_per_s = self._config.cost.gpu_usd_per_hour * self._n_workers / 3600
        return Spent(self._spent.elapsed_s + elapsed_s, self._spent.cost_usd + elapsed_s * usd_per_s)

    def _mfu_pct(self, tokens_per_s: float) -> float | None:
        if self._peak is None:
            return None
        return mfu_pct(self._config.model.flops_per_token, tokens_per_s, self._n_workers, self._peak.tflops)
