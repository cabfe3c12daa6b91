"""The notice of a worker process: its machine is about to go, or the group to change, so save and give way.

It comes in one of three ways, and whichever rank hears it first, all take it up at the end of the same step:
1. Ray drains a node of the group, and its watcher leaves a mark in every worker.
2. SIGTERM to this process alone.
3. Ray has room for more workers, and its controller asks.

Every process has one; the other modules give it and the training loop reads it.
"""

import threading
import time

import ray.exceptions
from ray.train.v2._internal.execution.context import get_train_context


class GaveWay(ray.exceptions.RayActorError):
    """The workers have saved and given way; Ray counts it as a preemption and starts the group again on what is left.

    Ray asks the errors of a group for `preempted`, which only errors of actors have.
    """

    def __init__(self, message: str) -> None:
        super().__init__(error_msg=message, preempted=True)

    def __reduce__(self) -> tuple[type["GaveWay"], tuple[str]]:
        return GaveWay, (self.error_msg,)


class Notice:
    """One bit that is set once, with what it is and when it came; reading it costs nothing."""

    def __init__(self) -> None:
        self._given, self._answered = threading.Event(), threading.Event()
        self._given_at_s = 0.0
        self.source = ""

    def give(self, source: str) -> None:
        """Gives the notice; safe in a signal handler and from any thread. The first one counts."""
        if not self._given.is_set():
            self.source, self._given_at_s = source, time.monotonic()
            self._given.set()

    @property
    def is_given(self) -> bool:
        if not self._given.is_set() and is_node_of_group_draining():
            self.give("preemption notice")
        return self._given.is_set()

    @property
    def age_s(self) -> float:
        """Seconds since the notice came, or was seen where Ray leaves a mark; 0 without one."""
        return time.monotonic() - self._given_at_s if self._given.is_set() else 0.0

    def answer(self) -> None:
        """Says that this worker has saved, or had nothing to save, and will train no more."""
        self._answered.set()

    def wait_for_answer(self, timeout_s: float) -> bool:
        return self._answered.wait(timeout_s)


def is_node_of_group_draining() -> bool:
    """Returns the mark that Ray Train's preemption watcher leaves in every worker.

    The public `ray.train.get_preemption_info()` is a collective barrier of milliseconds; this is a local attribute.
    """
    try:
        return get_train_context().preemption_context.preemption_info is not None
    except RuntimeError:  # not in a worker of Ray Train
        return False


own_notice = Notice()
