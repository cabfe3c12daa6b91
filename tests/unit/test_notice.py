"""The notice of a worker process, with Ray's mark set in a real train context."""

import pickle
import threading

import pytest
import ray.exceptions
from ray.train.v2._internal.execution import context
from ray.train.v2._internal.execution.failure_handling.default import _is_preemption_failure
from ray.train.v2._internal.execution.preemption import PreemptionContext, PreemptionInfo
from ray.train.v2.api.exceptions import WorkerGroupError

from rayjob.training.notice import GaveWay, Notice


def test_mark_that_ray_leaves_in_a_worker_is_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    preemption = PreemptionContext()
    fields = dict.fromkeys(
        ("train_run_context", "distributed_context", "execution_context", "storage_context"), None
    ) | {"controller_actor": None, "dataset_shard_provider": None}
    worker = context.TrainContext(preemption_context=preemption, **fields)  # type: ignore[arg-type]
    monkeypatch.setattr(context, "_train_context", worker)
    notice = Notice()
    assert not notice.is_given
    preemption.preemption_info = PreemptionInfo(deadline_ms=1, preempted_node_to_ranks={"a": [1]})
    assert notice.is_given
    assert notice.source == "preemption notice"
    assert 0 <= notice.age_s < 60


def test_outside_a_worker_there_is_no_notice_until_one_is_given() -> None:
    notice = Notice()
    assert not notice.is_given
    assert notice.age_s == 0
    notice.give("first")
    notice.give("second")
    assert notice.is_given
    assert notice.source == "first"


def test_who_gave_notice_can_wait_for_the_answer() -> None:
    notice = Notice()
    assert not notice.wait_for_answer(0.01)
    threading.Timer(0.05, notice.answer).start()
    assert notice.wait_for_answer(30)


def test_ray_counts_workers_that_gave_way_as_a_preemption_and_not_as_a_failure() -> None:
    error = pickle.loads(pickle.dumps(GaveWay("preemption notice at step 7")))
    assert str(error) == "preemption notice at step 7"
    assert isinstance(error, ray.exceptions.RayActorError)
    assert _is_preemption_failure(WorkerGroupError("", {0: error}))
