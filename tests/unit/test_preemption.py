"""A request to stop that no worker hears, and a worker that can hear none, with the actor and the clock faked."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rayjob.training import preemption
from rayjob.training.preemption import StopListener, StopRequest, StopSignal


@pytest.mark.parametrize(
    ("answer", "waited_s", "is_unheard"),
    [(None, 1.0, False), (None, 60.0, True), (True, 60.0, False), (True, 1.0, False), (False, 1.0, True)],
)
def test_request_is_given_up_when_nobody_listens_or_hears_it_in_time(
    answer: bool | None, waited_s: float, is_unheard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(preemption.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(preemption.ray, "wait", lambda refs, timeout: ([] if answer is None else refs, []))
    monkeypatch.setattr(preemption.ray, "get", lambda _ref: answer)
    signal: Any = SimpleNamespace(request=SimpleNamespace(remote=object))
    request = StopRequest(signal)
    now[0] += waited_s
    assert request.is_unheard == is_unheard


def test_request_to_an_actor_that_is_gone_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that listen to it notice too, and stop and save; the driver used to leave before they had."""

    def lose(_ref: object) -> None:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(preemption.ray, "wait", lambda refs, timeout: (refs, []))
    monkeypatch.setattr(preemption.ray, "get", lose)
    signal: Any = SimpleNamespace(request=SimpleNamespace(remote=object))
    assert not StopRequest(signal).is_unheard


def test_request_is_answered_at_once_where_no_worker_listens_and_else_when_one_has_heard() -> None:
    async def ask() -> tuple[bool, bool]:
        signal = StopSignal.__ray_actor_class__()  # type: ignore[attr-defined]
        before = await signal.request()
        listener = asyncio.create_task(signal.wait())
        await asyncio.sleep(0)
        request = asyncio.create_task(signal.request())
        await listener
        assert not request.done()
        await signal.acknowledge()
        return before, await request

    assert asyncio.run(ask()) == (False, True)


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
