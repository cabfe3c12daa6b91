"""The engine's queue, slots, cancellation and faults, with a decoder that the test holds in its hand."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from serving.engine import engine as engine_module
from serving.engine.engine import (
    Engine,
    EngineClosed,
    Load,
    QueueFull,
    RequestCancelled,
    RequestStream,
    SequenceFailed,
)
from serving.engine.sequence import Delta, SequenceSpec

FAULTY = 13
WAIT_S = 20.0  # far beyond what any of these waits takes; a hang then fails instead of blocking the suite


class HeldDecoder:
    """Stands in for `decode_sequence`: every token waits for a permit, and the prompt [13] raises."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.decoded = 0

    def __call__(self, served: Any, spec: SequenceSpec) -> Iterator[Delta]:
        for count in range(1, spec.max_new_tokens + 1):
            assert self.permits.acquire(timeout=WAIT_S)
            if spec.prompt == (FAULTY,):
                raise ValueError("a broken sequence")
            self.decoded += 1
            yield Delta(count, "x", -1.0, [], "length" if count == spec.max_new_tokens else None, None)

    def permit(self, tokens: int) -> None:
        self.permits.release(tokens)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> HeldDecoder:
    held = HeldDecoder()
    monkeypatch.setattr(engine_module, "decode_sequence", held)
    return held


def run(test: Callable[[Engine], Coroutine[Any, Any, None]], **limits: int) -> None:
    """Runs a coroutine with an engine of one slot, and closes it."""
    engine = Engine(None, **{"num_slots": 1, "max_waiting": 2, **limits})  # type: ignore[arg-type]
    try:
        asyncio.run(asyncio.wait_for(test(engine), WAIT_S))
    finally:
        engine.close()
    engine.join(WAIT_S)
    assert not engine.is_alive()


def sequence(prompt: int = 1, tokens: int = 1) -> SequenceSpec:
    return SequenceSpec(prompt=(prompt,), max_new_tokens=tokens, seed=0)


async def tokens_of(stream: RequestStream) -> list[tuple[int, int]]:
    return [(event.index, event.delta.token) async for event in stream]


async def reached(engine: Engine, load: Load) -> None:
    while engine.load() != load:
        await asyncio.sleep(0.001)


def test_all_tokens_of_all_sequences_arrive_in_order(decoder: HeldDecoder) -> None:
    async def test(engine: Engine) -> None:
        decoder.permit(5)
        stream = engine.submit([sequence(tokens=2), sequence(tokens=3)])
        assert await tokens_of(stream) == [(0, 1), (0, 2), (1, 1), (1, 2), (1, 3)]

    run(test)


def test_a_full_queue_refuses_the_whole_request(decoder: HeldDecoder) -> None:
    async def test(engine: Engine) -> None:
        first = engine.submit([sequence()])
        await reached(engine, Load(1, 0))
        with pytest.raises(QueueFull) as refused:
            engine.submit([sequence()] * 3)
        assert 1 <= refused.value.retry_after_s <= 60
        second = engine.submit([sequence()] * 2)
        assert engine.load() == Load(1, 2)
        decoder.permit(3)
        assert [len(await tokens_of(first)), len(await tokens_of(second))] == [1, 2]

    run(test)


def test_a_cancelled_request_frees_its_slot_before_its_next_token(decoder: HeldDecoder) -> None:
    async def test(engine: Engine) -> None:
        abandoned = engine.submit([sequence(tokens=100)])
        decoder.permit(1)
        await anext(abandoned)
        abandoned.cancel()
        with pytest.raises(RequestCancelled):
            await anext(abandoned)
        after = engine.submit([sequence(prompt=2, tokens=1)])
        decoder.permit(2)  # one for the token being decoded at the time of the cancellation
        assert await tokens_of(after) == [(0, 1)]
        assert decoder.decoded <= 3

    run(test)


def test_a_request_cancelled_while_waiting_leaves_the_queue_at_once(decoder: HeldDecoder) -> None:
    async def test(engine: Engine) -> None:
        running = engine.submit([sequence()])
        await reached(engine, Load(1, 0))
        waiting = engine.submit([sequence()] * 2)
        waiting.cancel()
        assert engine.load() == Load(1, 0)
        engine.submit([sequence()] * 2).cancel()
        decoder.permit(1)
        assert len(await tokens_of(running)) == 1
        assert decoder.decoded == 1

    run(test)


def test_a_fault_ends_its_own_request_only(decoder: HeldDecoder) -> None:
    async def test(engine: Engine) -> None:
        faulty, sound = engine.submit([sequence(FAULTY)]), engine.submit([sequence(tokens=2)])
        decoder.permit(3)
        with pytest.raises(SequenceFailed):
            await anext(faulty)
        assert await tokens_of(sound) == [(0, 1), (0, 2)]
        assert engine.is_alive()

    run(test)


def test_slots_decode_at_the_same_time(decoder: HeldDecoder) -> None:
    async def test(engine: Engine) -> None:
        streams = [engine.submit([sequence(tokens=2)]) for _ in range(2)]
        await reached(engine, Load(2, 0))
        decoder.permit(4)
        assert [len(await tokens_of(stream)) for stream in streams] == [2, 2]

    run(test, num_slots=2)


def test_a_closed_engine_finishes_what_it_took_and_refuses_more(decoder: HeldDecoder) -> None:
    async def test(engine: Engine) -> None:
        stream = engine.submit([sequence(), sequence()])
        engine.close()
        with pytest.raises(EngineClosed):
            engine.submit([sequence()])
        decoder.permit(2)
        assert len(await tokens_of(stream)) == 2

    run(test)


def test_a_consumer_whose_event_loop_is_gone_does_not_stop_the_slot(decoder: HeldDecoder) -> None:
    engine = Engine(None, num_slots=1, max_waiting=2)  # type: ignore[arg-type]

    async def submit_and_leave() -> RequestStream:
        return engine.submit([sequence(tokens=50)])

    abandoned = asyncio.run(submit_and_leave())
    decoder.permit(2)

    async def submit_again() -> list[tuple[int, int]]:
        return await asyncio.wait_for(tokens_of(engine.submit([sequence()])), WAIT_S)

    assert asyncio.run(submit_again()) == [(0, 1)]
    assert abandoned.is_cancelled
    engine.close()
    engine.join(WAIT_S)
