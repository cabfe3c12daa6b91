"""The engine's line, slots, cancellation and faults; the test lets each token through by hand."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

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
from serving.engine.loading import ServedModel, load_served_model
from serving.engine.sequence import SequenceSpec
from serving.engine.slots import Piece
from serving.http.errors import ApiError
from serving.http.service import Service
from tests.serving_checkpoint import save_run
from tests.serving_engine import WAIT_S, Gate, decode, gate, reached, run, running_engine

__all__ = ["gate"]
FAULTY = 13


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load_served_model(save_run(tmp_path_factory.mktemp("runs") / "tiny"))


@pytest.fixture
def engine(served: ServedModel, gate: Gate) -> Iterator[Engine]:
    """One slot, two places in line."""
    with running_engine(served, num_slots=1, max_waiting=2) as one:
        gate.hold()
        yield one
        gate.release()


def sequence(prompt: int = 1, tokens: int = 1) -> SequenceSpec:
    return SequenceSpec(prompt=(prompt, prompt), max_new_tokens=tokens, seed=0, ignore_eos=True)


def faulty() -> SequenceSpec:
    return SequenceSpec(prompt=(FAULTY,), max_new_tokens=5, seed=0)


async def indices_of(stream: RequestStream) -> list[int]:
    return [event.index async for event in stream]


def test_all_tokens_of_all_sequences_arrive_in_order(engine: Engine, gate: Gate) -> None:
    async def test() -> None:
        gate.permit(5)
        assert await indices_of(engine.submit([sequence(tokens=2), sequence(tokens=3)])) == [0, 0, 1, 1, 1]

    run(test())


def test_a_full_queue_refuses_the_whole_request(engine: Engine, gate: Gate) -> None:
    async def test() -> None:
        first = engine.submit([sequence()])
        await reached(engine, lambda load: load == Load(1, 0))
        with pytest.raises(QueueFull) as refused:
            engine.submit([sequence()] * 3)
        assert 1 <= refused.value.retry_after_s <= 60
        second = engine.submit([sequence()] * 2)
        assert engine.load() == Load(1, 2)
        gate.permit(3)
        assert [len(await indices_of(first)), len(await indices_of(second))] == [1, 2]

    run(test())


def test_a_cancelled_request_frees_its_slot_before_its_next_token(engine: Engine, gate: Gate) -> None:
    async def test() -> None:
        abandoned = engine.submit([sequence(tokens=60)])
        gate.permit(1)
        await anext(abandoned)
        abandoned.cancel()
        with pytest.raises(RequestCancelled):
            await anext(abandoned)
        after = engine.submit([sequence(prompt=2)])
        gate.permit(100)
        assert await indices_of(after) == [0]
        assert gate.taken <= 3, "one before the cancellation, at most one that was being decoded then, and the other's"

    run(test())


def test_when_the_thread_dies_nobody_is_left_waiting(
    engine: Engine, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise SystemExit

    async def test() -> None:
        monkeypatch.setattr(engine, "_decode", die)
        streams = [engine.submit([sequence(tokens=5)]) for _ in range(3)]  # one slot, two in line
        gate.permit(1)
        for stream in streams:
            with pytest.raises(SequenceFailed, match="stopped"):
                await indices_of(stream)
        with pytest.raises(EngineClosed):
            engine.submit([sequence()])

    run(test())
    engine.join(WAIT_S)
    assert not engine.is_alive()


def test_a_request_cancelled_while_waiting_leaves_the_queue_at_once(engine: Engine, gate: Gate) -> None:
    async def test() -> None:
        running = engine.submit([sequence()])
        await reached(engine, lambda load: load == Load(1, 0))
        waiting = engine.submit([sequence()] * 2)
        waiting.cancel()
        assert engine.load() == Load(1, 0)
        engine.submit([sequence()] * 2).cancel()
        gate.permit(1)
        assert len(await indices_of(running)) == 1
        assert gate.taken == 1

    run(test())


def test_a_fault_ends_its_own_request_only(engine: Engine, gate: Gate) -> None:
    async def test() -> None:
        broken, sound = engine.submit([faulty()]), engine.submit([sequence(tokens=2)])
        gate.permit(3)
        with pytest.raises(SequenceFailed):
            await anext(broken)
        assert await indices_of(sound) == [0, 0]
        assert engine.is_alive()

    run(test())


def test_a_closed_engine_finishes_what_it_took_and_refuses_more(engine: Engine, gate: Gate) -> None:
    async def test() -> None:
        stream = engine.submit([sequence(tokens=2), sequence()])
        engine.close()
        with pytest.raises(EngineClosed):
            engine.submit([sequence()])
        gate.permit(3)
        assert await indices_of(stream) == [0, 0, 1]

    run(test())
    engine.join(WAIT_S)
    assert not engine.is_alive()


def test_a_drained_engine_is_freed_with_its_thread_and_cache(served: ServedModel) -> None:
    async def close_while_decoding(engine: Engine) -> int:
        stream = engine.submit([sequence(tokens=20)])
        engine.close()
        return len(await indices_of(stream))

    def use() -> weakref.ref[Engine]:
        engine = Engine(served, num_slots=8, max_waiting=0)
        assert run(close_while_decoding(engine)) == 20
        engine.join(WAIT_S)
        return weakref.ref(engine)

    left = use()
    gc.collect()
    assert left() is None


def test_a_consumer_whose_event_loop_is_gone_does_not_stop_the_engine(engine: Engine, gate: Gate) -> None:
    async def submit_and_leave() -> RequestStream:
        return engine.submit([sequence(tokens=50)])

    abandoned = asyncio.run(submit_and_leave())
    gate.permit(3)
    assert run(indices_of_new(engine)) == [0]
    assert abandoned.is_cancelled


async def indices_of_new(engine: Engine) -> list[int]:
    return await indices_of(engine.submit([sequence()]))


def test_sequences_decode_together_and_a_fault_leaves_the_others_of_its_step_alone(
    served: ServedModel, gate: Gate
) -> None:
    async def test(engine: Engine) -> None:
        wanted = await decode(engine, [sequence(tokens=4)])
        gate.hold()
        streams = [engine.submit([spec]) for spec in (sequence(tokens=4), faulty(), sequence(tokens=4))]
        await reached(engine, lambda load: load.running + load.waiting == 3)
        gate.permit(9)
        with pytest.raises(SequenceFailed):
            await anext(streams[1])
        for stream in (streams[0], streams[2]):
            assert [[event.delta async for event in stream]] == wanted

    with running_engine(served, num_slots=4) as engine:
        run(test(engine))


def test_a_fault_of_a_whole_step_fails_what_was_in_it_and_the_engine_goes_on(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(engine: Engine) -> None:
        wanted = await decode(engine, [sequence(tokens=4)])
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "decode", lambda tokens, positions: 1 / 0)
            stream = engine.submit([sequence(tokens=4)])
            await anext(stream)
            with pytest.raises(SequenceFailed):
                await anext(stream)
        assert await decode(engine, [sequence(tokens=4)]) == wanted
        assert engine.load() == Load(0, 0)

    with running_engine(served) as engine:
        run(test(engine))


@pytest.mark.parametrize("where", ["prefill", "decode", "sample", "take_token"])
def test_after_a_fault_of_the_device_the_engine_ends_and_its_service_is_to_be_replaced(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    async def test(engine: Engine) -> None:
        owner = engine._runner if where in ("prefill", "decode") else engine_module
        monkeypatch.setattr(owner, where, fail)
        streams = [engine.submit([sequence(tokens=4)]) for _ in range(3)]
        for stream in streams:
            with pytest.raises(SequenceFailed, match="stopped"):
                await indices_of(stream)
        with pytest.raises(EngineClosed):
            engine.submit([sequence()])

    with running_engine(served) as engine:
        run(test(engine))
        engine.join(WAIT_S)
        service = Service()
        service._engine = engine
        with pytest.raises(ApiError) as refused:
            service.engine()
        assert refused.value.code == "engine_dead", "Ray Serve's health check asks the same and replaces the replica"


def test_a_fault_in_prefill_fails_its_own_request_only(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: Engine) -> None:
        wanted = await decode(engine, [sequence(tokens=4)])
        prefill = engine._runner.prefill

        def fail_on_5(pieces: list[Piece]) -> object:
            return 1 / 0 if any(piece.tokens[0] == 5 for piece in pieces) else prefill(pieces)

        monkeypatch.setattr(engine._runner, "prefill", fail_on_5)
        streams = [engine.submit([sequence(prompt, 4)]) for prompt in (1, 5, 1)]
        with pytest.raises(SequenceFailed):
            await anext(streams[1])
        for stream in (streams[0], streams[2]):
            assert [[event.delta async for event in stream]] == wanted

    with running_engine(served) as engine:
        run(test(engine))
