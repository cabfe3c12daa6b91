"""Saves in the background, on all ranks: training stops only while its state is copied to host memory.

1. At the end of a step every rank copies its share of the state, before the next update changes it.
2. A thread of each rank writes the share, hashing while it writes, and syncs it to disk.
3. The threads tell one another how that went, over a process group of their own, so no step waits for a save.
4. When all shares are on disk, rank 0 writes COMPLETE, renames the folder and removes what is no longer kept.
5. That it has ended travels with rank 0's wishes of the next step; then all ranks report the checkpoint to Ray.

Two saves never overlap. A validated state that comes while another is being written waits in a second host copy, so
that the best is not missed; any other save stays due.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from model.checkpoint import checkpoint_name
from model.checkpoint_writer import Draft, check_state_dict
from model.complete import Files
from model.llama import Llama
from rayjob.training.attempt import Attempt, is_newest
from rayjob.training.host_copy import HostCopy, deal_shares
from rayjob.training.saving import RunState, prune

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # saves in a row
_N_TRIES = 2  # of one save
_RETRY_S = 1.0
_SLOW_S = 20.0  # a save that takes longer is warned about
_AGREEMENT_TIMEOUT = timedelta(minutes=30)  # how long a rank's storage may hang before the save counts as failed
_NICENESS = 10  # more of it for the writing thread than the step's threads have; Ray starts workers at 15, of 19


class SaveFailedError(RuntimeError):
    """So many saves in a row failed that training on would only risk more work; all ranks raise it alike."""


class PeersLostError(RuntimeError):
    """Saves failed because other ranks are gone: the storage has no part in it, and a new worker group is to go on."""


class Outcome(NamedTuple):
    folder: Path | None  # None if the save failed
    error: str = ""  # the first cause
    are_peers_lost: bool = False


@dataclass
class _Save:
    state: RunState
    copy: HostCopy
    ended: threading.Event = field(default_factory=threading.Event)
    outcome: Outcome = Outcome(None, "the saving thread has broken down")
    began_at_s: float = field(default_factory=time.monotonic)
    is_told_slow: bool = False


@dataclass(frozen=True, kw_only=True)
class SaverHooks:
    """What a run does around its saves. All but `report` are called in rank 0's background thread."""

    describe: Callable[[RunState], dict[str, Any]]  # the content of trainer/state.json
    flush: Callable[[], None]  # puts on disk what must not be behind the checkpoint
    committed: Callable[[Path], None]  # after the rename; an error makes the save a failed one
    report: Callable[[Path | None, RunState], None]  # in every rank's training thread; the folder on rank 0 only


class Saver:
    """Every rank has one, and all call the same methods at the same steps.

    Args:
        run_folder: on storage that all ranks share.
        tokenizer_folder: its files go into each checkpoint.
        keep: newest checkpoints that stay, beside the best.
        model: unwrapped.
        optimizer: the model's.
        attempt: the same on all ranks.
        hooks: see there.
    """

    def __init__(
        self,
        run_folder: Path,
        tokenizer_folder: Path,
        keep: int,
        model: Llama,
        optimizer: torch.optim.Optimizer,
        attempt: Attempt,
        hooks: SaverHooks,
    ) -> None:
        self._run_folder, self._tokenizer_folder, self._keep = run_folder, tokenizer_folder, keep
        self._model, self._optimizer, self._attempt, self._hooks = model, optimizer, attempt, hooks
        self._rank, self._n_ranks = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_AGREEMENT_TIMEOUT)
        self._share = deal_shares(model, optimizer, self._n_ranks)[self._rank]
        self._free_copies = [HostCopy(model, optimizer, self._share)]
        self._running: _Save | None = None
        self._waiting: _Save | None = None
        self._thread: threading.Thread | None = None
        self._n_failures = 0
        check_state_dict(model.state_dict(), model.config)

    @property
    def is_saving(self) -> bool:
        """Whether a save has begun whose end was not taken up yet; the same on all ranks."""
        return self._running is not None

    @property
    def has_ended(self) -> bool:
        """Whether there is an end to take up; each rank sees it at a moment of its own."""
        save = self._running
        if save is None:
            return False
        elapsed_s = time.monotonic() - save.began_at_s
        if not save.ended.is_set() and not save.is_told_slow and elapsed_s > _SLOW_S:
            save.is_told_slow = True
            logger.warning(
                "%s has been being written for %.0f s: the storage is slow or hangs. Training goes on.",
                checkpoint_name(save.state.step),
                elapsed_s,
            )
        return save.ended.is_set()

    def save(self, state: RunState) -> bool:
        """Copies the state and has it written; returns False, the same on all ranks, if another save is in the way."""
        if self._running is None:
            self._start(self._copy(state))
            return True
        if state.val_loss is None:
            return False
        if self._waiting is not None:
            if self._waiting.state.best_step == state.best_step:
                return False  # the one that waits is no worse
            self._free_copies.append(self._waiting.copy)
        self._waiting = self._copy(state)
        return True

    def take_up(self, is_reported: bool = True) -> None:
        """Ends the running save, which all ranks know to have ended, and starts the one that waits.

        Args:
            is_reported: whether to call the hook `report`.

        Raises:
            SaveFailedError, PeersLostError: MAX_FAILURES saves in a row failed.
        """
        save, self._running = self._running, None
        assert save is not None
        save.ended.wait()
        self._free_copies.append(save.copy)
        waiting, self._waiting = self._waiting, None
        if waiting:
            self._start(waiting)
        if save.outcome.folder is None:
            self._count_failure(save)
        else:
            self._n_failures = 0
            if self._rank == 0:
                elapsed_s = time.monotonic() - save.began_at_s
                logger.info("saved %s in %.1f s", checkpoint_name(save.state.step), elapsed_s)
            if is_reported:
                self._hooks.report(save.outcome.folder if self._rank == 0 else None, save.state)

    def finish(self, state: RunState | None = None, is_reported: bool = True) -> None:
        """Waits for all that is being saved, then saves `state` and waits for that too.

        Raises:
            SaveFailedError, PeersLostError: MAX_FAILURES saves in a row failed.
        """
        while self._running:
            self.take_up(is_reported)
        is_saved = state is None
        while state and not is_saved:
            self._start(self._copy(state))
            self.take_up(is_reported)
            is_saved = self._n_failures == 0
        if self._thread:
            self._thread.join()  # it may still be removing old checkpoints

    def _copy(self, state: RunState) -> _Save:
        copy = self._free_copies.pop() if self._free_copies else HostCopy(self._model, self._optimizer, self._share)
        copy.fill(self._model, self._optimizer)
        return _Save(state, copy)

    def _start(self, save: _Save) -> None:
        self._running = save
        thread = threading.Thread(target=self._run, args=(save, self._thread), name="saver", daemon=True)
        self._thread = thread
        thread.start()

    def _count_failure(self, save: _Save) -> None:
        self._n_failures += 1
        name, error = checkpoint_name(save.state.step), save.outcome.error
        if self._n_failures >= MAX_FAILURES:
            if save.outcome.are_peers_lost:
                raise PeersLostError(f"{name} could not be saved: {error}")
            raise SaveFailedError(
                f"{name} could not be saved: {error}. {self._n_failures} saves in a row failed, so training stops. "
                "Make the storage writable or free space there; the same command then goes on from the last checkpoint"
            )
        if self._rank == 0:
            logger.warning(
                "%s could not be saved: %s. Training goes on from memory; failed save %d of at most %d in a row.",
                *(name, error, self._n_failures, MAX_FAILURES),
            )

    def _run(self, save: _Save, previous: threading.Thread | None) -> None:
        draft = Draft(self._run_folder, save.state.step, self._attempt.id)
        try:
            if previous:
                previous.join()
            _be_nice()
            self._write(draft, save)
            if self._rank == 0 and not save.outcome.folder:
                draft.discard()
        finally:
            save.ended.set()  # whatever happened here, the training thread must not wait for it without end
        # One that owes its evaluation will be replaced by one with a score, and until then another must stand.
        if self._rank == 0 and save.outcome.folder and not save.state.owes_evaluation:
            prune(self._run_folder, save.state.step, self._keep)

    def _write(self, draft: Draft, save: _Save) -> None:
        for n_tries in range(1, _N_TRIES + 1):
            save.outcome = self._try(draft, save)
            if save.outcome.folder or n_tries == _N_TRIES:
                return
            threading.Event().wait(_RETRY_S)

    def _try(self, draft: Draft, save: _Save) -> Outcome:
        """Writes, agrees, commits, agrees: the same outcome on all ranks."""
        mine = self._write_share(draft, save)
        outcome: list[Any] = [None]
        try:
            parts = self._gather(mine)
            if self._rank == 0:
                outcome[0] = self._commit(draft, parts)
            dist.broadcast_object_list(outcome, src=0, group=self._group)
        except (RuntimeError, ValueError) as error:  # torch has no type for a peer or a group that is gone
            return Outcome(None, f"rank {self._rank} has lost the other workers' savers: {error}", are_peers_lost=True)
        result: Outcome = outcome[0]
        return result

    def _gather(self, mine: Any) -> list[Any]:
        """Returns what each rank has to tell the savers of all."""
        told: list[Any] = [None] * self._n_ranks
        dist.all_gather_object(told, mine, group=self._group)
        return told

    def _write_share(self, draft: Draft, save: _Save) -> Files | str:
        """Returns the entries of this rank's files, or why they could not be written."""
        copy = save.copy
        files: Files = {}
        try:
            if self._share.has_weights:
                files = draft.write_model(
                    copy.weights, self._model.config, self._tokenizer_folder, self._hooks.describe(save.state)
                )
            tensors = copy.moments | (copy.rng if self._rank == 0 else {})
            return files | draft.write_trainer_tensors(tensors, self._rank, self._n_ranks)
        except Exception as error:  # whatever it is, the other ranks wait for an answer
            return f"rank {self._rank}: {_reason(error)}"

    def _commit(self, draft: Draft, parts: list[Files | str]) -> Outcome:
        files: Files = {}
        for part in parts:
            if isinstance(part, str):
                return Outcome(None, part)
            files |= part
        try:
            self._hooks.flush()
            if not is_newest(self._run_folder, self._attempt):
                return Outcome(None, "another worker group has taken over this run")
            folder = draft.commit(files)
            self._hooks.committed(folder)
        except Exception as error:  # as above
            return Outcome(None, f"rank 0: {_reason(error)}")
        return Outcome(folder)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError | ValueError):
        return str(error)
    logger.exception("a save failed")
    return f"{type(error).__name__}: {error}"


def _be_nice() -> None:
    """Lets this thread stand back behind those that compute the steps."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # a sandbox that forbids it: the save is only less polite
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS))
