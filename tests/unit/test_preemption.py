"""A request to stop that no worker hears, and a worker that can hear none, with the actor and the clock faked."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rayjob.training import preemption
from rayjob.training.preemption import StopListener, StopRequest


@pytest.mark.parametrize(
    ("is_heard", "waited_s", "is_unheard"), [(False, 1.0, False), (False, 60.0, True), (True, 60.0, False)]
)
def test_request_is_given_up_only_when_nobody_hears_it_in_time(
    is_heard: bool, waited_s: float, is_unheard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(preemption.ray, "wait", lambda refs, timeout: (refs if is_heard else [], []))
    signal: Any = SimpleNamespace(request=SimpleNamespace(remote=object))
    request = StopRequest(signal)
    now[0] += waited_s
    assert request.is_unheard == is_unheard


@pytest.mark.parametrize("error", [ray.exceptions.RayActorError(), ray.exceptions.NodeDiedError("of the driver")])
def test_a_worker_that_can_hear_no_request_any_more_stops(
    error: ray.exceptions.RayError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_ref: object) -> None:
        raise error

    monkeypatch.setattr(preemption.ray, "get", fail)
    signal: Any = SimpleNamespace(wait=SimpleNamespace(remote=object))
    listener = StopListener(signal)
    assert listener._requested.wait(timeout=30.0)
    assert listener.is_requested
