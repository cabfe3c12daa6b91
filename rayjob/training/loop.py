"""The training recipe, top to bottom: what each Ray Train worker runs.

1. Open the windows; build the model or go on from the newest sound checkpoint.
2. Wrap in DDP ourselves: Ray's own wrapper leaves a single worker bare, without no_sync().
3. Per step: the step's windows -> micro-batches -> train_step -> a row of metrics.csv.
4. At eval_interval and at the end: validate on all workers, draw a sample.
5. Save when validated, when due, or when asked to stop; report the checkpoint to Ray.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointUploadMode
from torch.nn.parallel import DistributedDataParallel

from model.checkpoint import load_model
from model.llama import Llama
from model.tokenizer import Tokenizer
from rayjob.config import JobConfig, TrainConfig
from rayjob.corpus.blocks import Manifest
from rayjob.store.shared import check_shared
from rayjob.training.evaluation import Evaluation, evaluate
from rayjob.training.failure import write_failure
from rayjob.training.feed import StepFeed, open_windows
from rayjob.training.metrics import Spent
from rayjob.training.optimizer import build_optimizer, load_optimizer_tensors
from rayjob.training.recorder import Recorder
from rayjob.training.recovery import find_sound_checkpoint, load_run
from rayjob.training.sample import write_sample
from rayjob.training.saving import RunIdentity, RunState, save_run
from rayjob.training.schedule import WindowOrder, learning_rate, max_steps
from rayjob.training.step import NonFiniteError, Wishes, autocast, train_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainTask:
    """What the driver hands to every worker."""

    config: JobConfig
    tokens_folder: Path
    tokenizer_folder: Path
    spent: Spent  # before this driver, steps that are done again included
    stop_signal: Any  # handle of a StopSignal actor


def train_loop(loop_config: dict[str, Any]) -> None:
    """Trains until the last step, a request to stop or the end of the budget; Ray Train calls it in every worker."""
    task: TrainTask = loop_config["task"]
    config, train = task.config, task.config.train
    _hide_reports_of_ray()
    check_shared(config)
    device = _set_up_device(dist.get_world_size())
    precision = torch.bfloat16 if train.precision == "bf16" else torch.float32

    windows = open_windows(task.tokens_folder, "train", config.model.max_seq_len)
    val_windows = open_windows(task.tokens_folder, "val", config.model.max_seq_len)
    order = WindowOrder(len(windows), train.global_batch_size, config.seed)
    n_steps = max_steps(config, order)
    feed = StepFeed(windows, order, train.micro_batch_size, dist.get_rank(), dist.get_world_size(), device)

    tokenizer = Tokenizer.load(task.tokenizer_folder)
    model, optimizer, state = _start_or_resume(config, Manifest.load(task.tokens_folder), tokenizer, device)
    ddp = _wrap(model, train, device)
    _settle_buckets(ddp, feed, precision)
    recorder = Recorder(config, state, task.spent, device, task.stop_signal) if dist.get_rank() == 0 else None

    for index in range(state.step, n_steps):
        batch = feed.step_batch(index)
        lr = learning_rate(config.optimizer, index, n_steps)
        try:
            result = train_step(
                ddp,
                optimizer,
                batch.micro_batches,
                n_tokens=batch.n_tokens,
                lr=lr,
                grad_clip=train.grad_clip,
                precision=precision,
                wishes=recorder.wishes(index + 1) if recorder else Wishes(),
            )
        except NonFiniteError as error:
            # The same step would fail in the same way again, so this is an end and not a failure to retry.
            if recorder:
                write_failure(config.run_folder, f"step {index + 1}: {error}", order.window_ids(index).tolist())
            return
        state = state.after_step(batch.n_tokens)
        step_s = batch.seconds_since_start()
        evaluation = None
        if state.step % train.eval_interval == 0 or state.step == n_steps:
            evaluation = evaluate(
                model,
                val_windows,
                tokenizer.byte_lengths(),
                batch_size=train.micro_batch_size,
                precision=precision,
            )
            state = state.evaluated(evaluation)
        if recorder:
            state = recorder.record(state, order.epoch(index), batch, step_s, lr, result)
        if evaluation or result.wishes.save or result.wishes.stop:
            _save_and_report(task, model, optimizer, state, evaluation, tokenizer, recorder)
        if result.wishes.stop:
            break


def _hide_reports_of_ray() -> None:
    """Keeps Ray Train's line about every report of every worker off the console; its warnings stay."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(lambda record: record.levelno >= logging.WARNING or "/ray/train/" not in record.pathname)


def _set_up_device(n_workers: int) -> torch.device:
    device = ray.train.torch.get_device()
    if device.type == "cpu":
        # Workers of one machine share its cores; the sums of a step are reproducible for a fixed number of threads.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // n_workers))
    return device


def _start_or_resume(
    config: JobConfig, manifest: Manifest, tokenizer: Tokenizer, device: torch.device
) -> tuple[Llama, torch.optim.AdamW, RunState]:
    identity = RunIdentity.of(config, manifest.hash, tokenizer.hash)
    # Rank 0 looks and tells the others, so that all go on from the same folder.
    found = [find_sound_checkpoint(config.run_folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, device=device)
    folder = found[0]
    if folder is None:
        model = Llama(config.model)
        model.init_weights(config.seed)
        state = RunState(identity)
        model.to(device)
        return model, build_optimizer(model, config.optimizer), state
    tensors, state = load_run(folder, config.model, identity)
    model = load_model(folder, device=str(device)).train()
    optimizer = build_optimizer(model, config.optimizer)
    load_optimizer_tensors(model, optimizer, tensors, state.step)
    if dist.get_rank() == 0:
        logger.warning("resuming from %s", folder)
    _report(folder, state)
    return model, optimizer, state


def _wrap(model: Llama, train: TrainConfig, device: torch.device) -> DistributedDataParallel:
    # compile() in place keeps the parameter names of checkpoints free of a wrapper's prefix.
    if train.compile:
        model.compile()
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
    )


def _settle_buckets(ddp: DistributedDataParallel, feed: StepFeed, precision: torch.dtype) -> None:
    """Lets DDP group its gradients before the first step.

    DDP regroups them after its first backward, and the order of summation depends on the groups. Without this a
    resumed run's first step would add in another order than the undisturbed run's.
    """
    with autocast(ddp.device, precision):  # as in a step: no other memory, and nothing compiled that no step uses
        sums = ddp(*feed.padding())
    sums.nats.backward()
    ddp.zero_grad(set_to_none=True)


def _save_and_report(
    task: TrainTask,
    model: Llama,
    optimizer: torch.optim.Optimizer,
    state: RunState,
    evaluation: Evaluation | None,
    tokenizer: Tokenizer,
    recorder: Recorder | None,
) -> None:
    """Rank 0 writes, all report: Ray commits a checkpoint when every worker has."""
    folder = task.config.run_folder
    if recorder:
        if evaluation:
            write_sample(folder, state.step, model, tokenizer, task.config.seed)
        saved = save_run(folder, model, optimizer, state, task.tokenizer_folder, task.config.checkpoint.keep)
        recorder.saved()
        _report(saved, state)
    else:
        _report(None, state)


def _report(folder: Path | None, state: RunState) -> None:
    metrics: dict[str, float] = {"step": state.step}
    if state.val_loss is not None:
        metrics |= {"val_loss": state.val_loss, "score": -state.val_loss}
    ray.train.report(
        metrics,
        checkpoint=Checkpoint.from_directory(str(folder)) if folder else None,
        checkpoint_dir_name=folder.name if folder else None,
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )
