"""What Ray Train has no public way for: hooks into its workers and its controller.

An exception in a hook of the controller would end the run without a retry, so none leaves these.
"""

import contextlib
import logging
import os
import queue
import signal
import time
from typing import Any

import ray
from ray.train.constants import TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.controller.state import ResizingState

from rayjob.training.notice import own_notice

logger = logging.getLogger(__name__)

_GIVE_WAY_TIMEOUT_S = 120.0  # a step, and a save of the state on a slow storage
_SHUTDOWN_TIMEOUT_S = "3"  # of a process group; Ray waits 30 s by default, which one stopped worker uses up


class SigtermIsNotice(WorkerCallback):
    """Makes SIGTERM to one worker process a notice; by default it would end in the middle of a step.

    Ray calls the hook in the process's main thread, the only one that may install a signal handler.
    """

    def after_init_train_context(self) -> None:
        signal.signal(signal.SIGTERM, lambda _number, _frame: own_notice.give("preemption notice"))


class SaveBeforeResize(ControllerCallback, WorkerGroupCallback):
    """Has the workers save before Ray restarts them as a group of another size."""

    def __init__(self) -> None:
        self._group: Any = None

    def after_controller_start(self, train_run_context: Any) -> None:
        os.environ.setdefault(TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S, _SHUTDOWN_TIMEOUT_S)

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._group = worker_group

    def after_worker_group_shutdown(self, worker_group_context: Any) -> None:
        self._group = None

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        if not isinstance(current_state, ResizingState) or self._group is None:
            return
        n_workers = current_state.scaling_decision.num_workers  # type: ignore[attr-defined]
        logger.warning("the group changes from %d to %d workers: it saves first.", len(self._group), n_workers)
        try:
            workers = self._group.get_workers()
            answers = [worker.execute_async(_give_notice_and_wait, n_workers) for worker in workers]
            ray.wait(answers, num_returns=len(answers), timeout=_GIVE_WAY_TIMEOUT_S)
        except ray.exceptions.RayError as error:  # a worker that has just died: the last checkpoint stands
            logger.warning("the workers could not be asked to save: %s", error)


def _give_notice_and_wait(n_workers: int) -> bool:
    """Runs in a worker's main thread; returns whether the training thread has answered in time."""
    own_notice.give(f"change to {n_workers} workers")
    deadline_s = time.monotonic() + _GIVE_WAY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if own_notice.wait_for_answer(0.1):
            return True
        _drop_report()
    return False


def _drop_report() -> None:
    """Makes room for a report: the controller takes none while it waits, and a full queue holds the training thread."""
    with contextlib.suppress(queue.Empty):
        get_train_context().execution_context.result_queue.get_nowait()
