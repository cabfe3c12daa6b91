"""Rank 0's desk: clock, cost, the rows of metrics.csv, and what to wish for at the next step."""

import json
import logging
import time
from typing import Any

import torch

from rayjob.config import JobConfig
from rayjob.hardware import mfu_pct
from rayjob.training.feed import StepBatch
from rayjob.training.metrics import MetricsRow, MetricsWriter, Spent, read_spent
from rayjob.training.peak import peak_of
from rayjob.training.preemption import StopListener
from rayjob.training.saving import RunState, SavePolicy
from rayjob.training.step import StepResult, Wishes

logger = logging.getLogger(__name__)

STARTS_FILE = "starts.jsonl"


class Recorder:
    """Records a run; only rank 0 has one.

    Args:
        config: the job's.
        state: where this attempt starts.
        spent: by earlier drivers.
        device: of the worker.
        stop_signal: handle of a StopSignal actor.
    """

    def __init__(
        self, config: JobConfig, state: RunState, spent: Spent, device: torch.device, stop_signal: Any
    ) -> None:
        self._config = config
        self._stop = StopListener(stop_signal)
        self._policy = SavePolicy(config.checkpoint)
        # An earlier worker group of this driver may have come further than the driver knew of at its start.
        self._spent = max(spent, Spent(state.elapsed_s, state.cost_usd), read_spent(config.run_folder))
        self._metrics = MetricsWriter(config.run_folder, state.step)
        self._started_at_s = time.monotonic()
        self._peak = peak_of(device, torch.bfloat16 if config.train.precision == "bf16" else torch.float32)
        with (config.run_folder / STARTS_FILE).open("a") as file:
            file.write(json.dumps({"step": state.step, "wall_time": time.time()}) + "\n")

    def wishes(self, step: int) -> Wishes:
        """Returns what rank 0 asks of all workers at the end of `step`."""
        max_usd = self._config.cost.max_usd
        is_spent = max_usd is not None and self._spent_so_far().cost_usd >= max_usd
        return Wishes(stop=self._stop.is_requested or is_spent, save=self._policy.is_due(step))

    def record(
        self, state: RunState, epoch: int, batch: StepBatch, step_s: float, lr: float, result: StepResult
    ) -> RunState:
        """Writes the row of a step and returns the state with the time so far."""
        state = state.at_cost(*self._spent_so_far())
        tokens_per_s = batch.n_tokens / step_s
        self._metrics.write(
            MetricsRow(
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
            )
        )
        return state

    def saved(self) -> None:
        self._policy.saved()

    def _spent_so_far(self) -> Spent:
        elapsed_s = time.monotonic() - self._started_at_s
        usd_per_s = self._config.cost.gpu_usd_per_hour * self._config.train.num_workers / 3600
        return Spent(self._spent.elapsed_s + elapsed_s, self._spent.cost_usd + elapsed_s * usd_per_s)

    def _mfu_pct(self, tokens_per_s: float) -> float | None:
        if self._peak is None:
            return None
        n_workers, flops = self._config.train.num_workers, self._config.model.flops_per_token
        return mfu_pct(flops, tokens_per_s, n_workers, self._peak.tflops)
