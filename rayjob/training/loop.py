"""The training recipe, top to bottom: what each Ray Train worker runs.

1. Open the windows; build the model or go on from the newest sound checkpoint.
2. Wrap in DDP ourselves: Ray's own wrapper leaves a single worker bare, without no_sync(). Find the micro-batch, and
   check link, step, storage and space before paid work.
3. Per step: the step's windows -> micro-batches -> train_step -> a row of metrics.csv.
4. At eval_interval and at the end: validate on all workers, draw a sample.
5. Save in the background when validated or when due; wait for it before a stop, before giving way and at the end.
   Report the checkpoint to Ray when it is on disk.

A validation that is broken off by a stop or a notice is owed: its step is saved without it, and the next start makes
it up before anything else, so that the finished run is the one that would have been.
"""

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointUploadMode

from model.tokenizer import Tokenizer
from rayjob.config import JobConfig
from rayjob.corpus.blocks import Manifest
from rayjob.lease import Fence
from rayjob.store.runs import publish_run
from rayjob.training.attempt import Attempt
from rayjob.training.bad_numbers import BadSteps
from rayjob.training.ddp import wrap
from rayjob.training.evaluation import Evaluation, EvaluationAbandoned, evaluate
from rayjob.training.failure import forget_passed_errors, write_bad_numbers, write_failure
from rayjob.training.feed import StepFeed, open_windows
from rayjob.training.host_copy import restore_rng
from rayjob.training.metrics import Spent
from rayjob.training.micro_batch import settle_micro_batch
from rayjob.training.notice import GaveWay, own_notice
from rayjob.training.preflight import run_preflight
from rayjob.training.recorder import Recorder
from rayjob.training.sample import draw_sample
from rayjob.training.saver import SaveFailedError, Saver, SaverHooks
from rayjob.training.saving import RunIdentity, RunState, state_document
from rayjob.training.schedule import WindowOrder, learning_rate, max_steps
from rayjob.training.start import begin_group_attempt, settle_buckets, start_or_resume
from rayjob.training.step import Wishes, train_step
from rayjob.training.step_clock import StepClock
from rayjob.training.trial import MicroBatchTrial

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainTask:
    """What the driver hands to every worker."""

    config: JobConfig
    tokens_folder: Path
    tokenizer_folder: Path
    spent: Spent  # before this driver, steps that are done again included
    stop_signal: Any  # handle of a StopSignal actor
    fence: Fence  # asked before anything of the run is written


class TrainWorker:
    """One worker of the group. All do the same at the same time, and rank 0 also records."""

    def __init__(self, task: TrainTask, device: torch.device) -> None:
        self.task, config = task, task.config
        self.config, self.device = config, device
        self.precision = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        rank, n_workers = dist.get_rank(), dist.get_world_size()

        windows = open_windows(task.tokens_folder, "train", config.model.max_seq_len)
        self.val_windows = open_windows(task.tokens_folder, "val", config.model.max_seq_len)
        self.order = WindowOrder(len(windows), config.train.global_batch_size, config.seed)
        self.n_steps = max_steps(config, self.order)

        self.tokenizer = Tokenizer.load(task.tokenizer_folder)
        manifest = Manifest.load(task.tokens_folder)
        start = start_or_resume(config, RunIdentity.of(config, manifest.hash, self.tokenizer.hash), device)
        if start.folder:
            _report(start.folder if rank == 0 else None, start.state)
        attempt = begin_group_attempt(config.run_folder, task.fence, start.state, device)
        self.model, self.optimizer = start.model, start.optimizer
        self.state = dataclasses.replace(start.state, run_id=attempt.run_id)
        self.ddp = wrap(self.model, config.train, device)
        trial = MicroBatchTrial(config, self.model, self.optimizer, device, self.precision)
        self.micro_batch_size = settle_micro_batch(config, trial, device, task.fence)
        self.feed = StepFeed(windows, self.order, self.micro_batch_size, rank, n_workers, device)
        self.clock = StepClock(device)
        first_s = settle_buckets(self.ddp, self.feed, self.precision)
        if config.train.preflight:
            run_preflight(config, self.ddp, self.feed, self.state.step, first_s)
        self.bad_steps = BadSteps(self.model, self.precision, config.failure.max_bad_steps)
        self.recorder = (
            Recorder(config, self.state, task.spent, n_workers, device, task.stop_signal, task.fence)
            if rank == 0
            else None
        )
        self.saver = self._open_saver(attempt)
        # Last of all, for setting up may draw, and a resumed run sets up more often than the undisturbed one.
        if start.rng:
            restore_rng(start.rng, device)
        else:
            torch.manual_seed(config.seed)

    def _open_saver(self, attempt: Attempt) -> Saver:
        config = self.config
        hooks = SaverHooks(
            describe=lambda state: state_document(config, attempt, state),
            flush=self.recorder.flush if self.recorder else lambda: None,
            committed=lambda folder: publish_run(folder.parent),
            report=lambda folder, state: _report(folder, state),
        )
        tokenizer_folder, keep = self.task.tokenizer_folder, config.checkpoint.keep
        return Saver(config.run_folder, tokenizer_folder, keep, self.model, self.optimizer, attempt, hooks)

    def train(self) -> None:
        """Trains on from `state`.

        Raises:
            GaveWay: after a notice, with all saved that there was to save.
        """
        if self.recorder:
            forget_passed_errors(self.config.run_folder, self.state.step)
        wishes = self._wishes().of_all(self.device)
        if not wishes.ends_training and self.state.owes_evaluation:
            wishes = self._make_up_evaluation()
        try:
            while self.state.step < self.n_steps and not wishes.ends_training:
                wishes = self._step()
            self.saver.finish(is_reported=not wishes.leave)
        except SaveFailedError as error:
            if self.recorder:
                self._end_unsaved(error)
            return
        if self.recorder:
            self.recorder.flush()
            if self.state.step == self.n_steps and self.bad_steps.are_weights_bad:
                reason = "the weights after the run's last step are not finite"
                write_bad_numbers(self.config.run_folder, reason, self.bad_steps.window_ids())
        if wishes.leave:
            self._give_way()

    def _end_unsaved(self, error: SaveFailedError) -> None:
        """Writes down why, or says it where the storage takes no small file either.

        Raises:
            LeaseLostError: another driver has the run, so why this one's saves failed must not end that one.
        """
        try:
            self.task.fence.check()
            write_failure(self.config.run_folder, f"{error}.")
        except OSError:
            logger.error("%s.", error)
            raise error from None

    def _wishes(self) -> Wishes:
        """What this worker wishes now."""
        own = Wishes(leave=own_notice.is_given, saved=self.recorder is not None and self.saver.has_ended)
        return own | self.recorder.wishes(self.state.step + 1) if self.recorder else own

    def _step(self) -> Wishes:
        """Does a step with all that belongs to it, and returns what the workers wish then."""
        index, train = self.state.step, self.config.train
        self.clock.begin(index)
        batch = self.feed.step_batch(index)
        self.clock.mark("data")
        lr = learning_rate(self.config.optimizer, index, self.n_steps)
        result = train_step(
            self.ddp,
            self.optimizer,
            batch,
            lr=lr,
            grad_clip=train.grad_clip,
            precision=self.precision,
            wishes=self._wishes,
            mark=self.clock.mark,
        )
        step_s = batch.seconds_since_start()
        self.state = self.state.after_step(batch.n_tokens, result.is_skipped)
        if result.wishes.saved:
            self.saver.take_up()
        reason = self.bad_steps.take(self.state.step, self.state.bad_in_row, result, batch)
        evaluation, wishes = None, result.wishes
        if reason:
            wishes = Wishes(stop=True)
        elif self.state.step % train.eval_interval == 0 or self.state.step == self.n_steps:
            evaluation, wishes = self._evaluate(wishes)
        self.clock.mark("evaluation")
        if self.recorder:
            if evaluation and self._is_worth_saving():
                self._record_sample(self.recorder)
            epoch, split = self.order.epoch(index), self.clock.take()
            self.state = self.recorder.record(self.state, epoch, batch, step_s, lr, result, split)
            self.clock.mark("logging")
            if reason:
                write_bad_numbers(self.config.run_folder, reason, self.bad_steps.window_ids())
        if wishes.leave:
            own_notice.give("preemption notice")  # if another worker has heard it, the time counts from here
        if self._is_worth_saving() and not reason:  # what ends the run is not to be gone on from
            if wishes.ends_training or self.state.step == self.n_steps:
                self.saver.finish(self.state, is_reported=not wishes.leave)
            elif evaluation or wishes.save:
                self._save()
        return wishes

    def _evaluate(self, wishes: Wishes) -> tuple[Evaluation | None, Wishes]:
        """Returns the evaluation of this step, and what the workers wish; None if they wish no more than to end."""
        try:
            if wishes.ends_training:
                raise EvaluationAbandoned(wishes)
            evaluation = evaluate(
                self.model,
                self.val_windows,
                self.tokenizer.byte_lengths(),
                batch_size=self.micro_batch_size,
                precision=self.precision,
                wishes=self._wishes,
            )
        except EvaluationAbandoned as abandoned:
            self.state = self.state.owing_evaluation()
            return None, abandoned.wishes
        self.state = self.state.evaluated(evaluation)
        return evaluation, wishes

    def _make_up_evaluation(self) -> Wishes:
        """Does the evaluation that an earlier start broke off, and saves the step again, now with its score."""
        evaluation, wishes = self._evaluate(Wishes())
        if evaluation:
            if self.recorder:
                self._record_sample(self.recorder)
                self.state = self.recorder.record_owed(self.state)
            self._save()
        return wishes

    def _record_sample(self, recorder: Recorder) -> None:
        recorder.record_sample(self.state.step, draw_sample(self.model, self.tokenizer, self.config.seed))

    def _is_worth_saving(self) -> bool:
        """Whether the weights may be trusted: a step that was skipped leaves them as they were."""
        return not self.bad_steps.are_weights_bad

    def _save(self) -> None:
        if self.saver.save(self.state) and self.recorder:
            self.recorder.save_begun()

    def _give_way(self) -> None:
        """Ends this worker, when all have saved, so that Ray starts a group on the machines that are left."""
        dist.barrier()
        own_notice.give("preemption notice")  # if another worker has heard it, and before the first step
        told = f"{own_notice.source} at step {self.state.step}"
        if self.recorder:
            saved = (
                f"saved step {self.state.step}"
                if self._is_worth_saving()
                else "saved nothing, for its weights are not finite"
            )
            logger.warning("%s, %s in %.1f s", told, saved, own_notice.age_s)
        raise GaveWay(told)


def _report(folder: Path | None, state: RunState) -> None:
    """Tells Ray of a checkpoint; a barrier of all workers, of which those without the folder report only numbers.

    Workers that give way report nothing: their controller may be gone or wait for them, and the folder is the truth.
    """
    metrics: dict[str, float] = {"step": state.step}
    if state.val_loss is not None:
        metrics |= {"val_loss": state.val_loss, "score": -state.val_loss}
    ray.train.report(
        metrics,
        checkpoint=Checkpoint.from_directory(str(folder)) if folder else None,
        checkpoint_dir_name=folder.name if folder else None,
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )
