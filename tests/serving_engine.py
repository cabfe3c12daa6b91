"""An engine of a tiny model, and ways to hold it, to look into it and to ask it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from model.generate import GeneratedToken
from serving.engine import engine as engine_module
from serving.engine.engine import Engine, EngineSequence, Load, RequestStream
from serving.engine.loading import ServedModel
from serving.engine.sequence import Delta, SequenceSpec

WAIT_S = 60.0  # far beyond what any of these waits takes; a hang then fails instead of blocking the suite


class Gate:
    """Lets tokens through, one a permit, once `hold` was called.

    The prompt (13,) raises instead, and while it `is_faulty` every one does.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.is_faulty = False
        self.taken = 0
        self._permits = threading.Semaphore(0)
        self._take_token = engine_module.take_token

    def hold(self) -> None:
        self.is_open = False

    def permit(self, tokens: int) -> None:
        if tokens:
            self._permits.release(tokens)

    def release(self) -> None:
        self.is_open = True
        self._permits.release(10_000)

    def __call__(self, sequence: EngineSequence, picked: GeneratedToken) -> Delta:
        if not self.is_open:
            assert self._permits.acquire(timeout=WAIT_S)
        if self.is_faulty or sequence.spec.prompt == (13,):
            raise ValueError("a secret inside")
        self.taken += 1
        return self._take_token(sequence, picked)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    held = Gate()
    monkeypatch.setattr(engine_module, "take_token", held)
    yield held
    held.release()


@contextmanager
def running_engine(served: ServedModel, **options: Any) -> Iterator[Engine]:
    """An engine that is closed at the end, its thread too."""
    engine = Engine(served, **{"num_slots": 64, "max_waiting": 256, **options})
    try:
        yield engine
    finally:
        engine.close()
        engine.join(WAIT_S)
        assert not engine.is_alive()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_S))


async def deltas_of(stream: RequestStream) -> list[list[Delta]]:
    """All deltas of a request by sequence."""
    deltas: list[list[Delta]] = [[] for _ in stream.prompt_scores]
    async for event in stream:
        deltas[event.index].append(event.delta)
    return deltas


async def decode(engine: Engine, specs: Sequence[SequenceSpec]) -> list[list[Delta]]:
    return await deltas_of(engine.submit(specs))


async def reached(engine: Engine, is_reached: Callable[[Load], bool]) -> None:
    while not is_reached(engine.load()):
        await asyncio.sleep(0.001)
