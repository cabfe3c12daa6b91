"""A request to stop that no worker hears, with the actor and the clock faked."""

from types import SimpleNamespace
from typing import Any

import pytest

from rayjob.training import preemption
from rayjob.training.preemption import StopRequest


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
