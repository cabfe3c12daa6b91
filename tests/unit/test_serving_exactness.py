"""The engine's tokens are those of naive generation and of transformers, whatever runs beside a sequence."""

import asyncio
import random
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from model.sampling import SamplingParams
from serving.engine.engine import Engine, Load, RequestCancelled, SequenceFailed
from serving.engine.loading import ServedModel, load_served_model
from serving.engine.runner import Runner
from serving.engine.sequence import Delta, SequenceSpec, decode_sequence
from serving.engine.slots import Piece
from tests.serving_checkpoint import save_run
from tests.serving_engine import Gate, decode, deltas_of, gate, reached, run, running_engine

__all__ = ["gate"]
MAX_SEQ_LEN = 300  # so that the cache is read at three lengths
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("runs") / "tiny", max_seq_len=MAX_SEQ_LEN)


@pytest.fixture(scope="module")
def served(folder: Path) -> ServedModel:
    return load_served_model(folder)


def random_prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(3, 320) for _ in range(length))


def random_spec(rng: random.Random, number: int) -> SequenceSpec:
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.5, 1.0, 2.0]),
        top_k=rng.choice([0, 5, 50, 200]),
        top_p=rng.choice([0.5, 0.95, 1.0]),
        min_p=rng.choice([0.0, 0.1]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.5]),
    )
    prompt = random_prompt(rng, rng.choice([1, 7, 100, 127, 128, 129, 250]))
    return SequenceSpec(prompt, rng.randint(1, 40), seed=number, params=params, n_top_logprobs=rng.choice([0, 3]))


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [delta.token for delta in deltas]


async def decode_alone(engine: Engine, specs: list[SequenceSpec]) -> list[list[Delta]]:
    return [(await decode(engine, [spec]))[0] for spec in specs]


def transformers_tokens(folder: Path, specs: list[SequenceSpec]) -> list[list[int]]:
    """Greedy tokens of transformers' generate, prompts of one length together."""
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    of_length: defaultdict[int, list[int]] = defaultdict(list)
    for index, spec in enumerate(specs):
        of_length[len(spec.prompt)].append(index)
    found: dict[int, list[int]] = {}
    for length, indices in of_length.items():
        inputs = torch.tensor([specs[index].prompt for index in indices])
        longest = max(specs[index].max_new_tokens for index in indices)
        outputs = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=longest,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        for index, output in zip(indices, outputs[:, length:].tolist(), strict=True):
            found[index] = output[: specs[index].max_new_tokens]
    return [found[index] for index in range(len(specs))]


def test_200_greedy_prompts_equal_naive_generation_and_transformers_alone_and_together(
    served: ServedModel, folder: Path
) -> None:
    rng = random.Random(0)
    lengths = [1, 2, 5, 16, 63, 100, 127, 128, 129, 200, 256, 257, 285]
    specs = [
        SequenceSpec(random_prompt(rng, rng.choice(lengths)), rng.randint(1, 15), 0, params=GREEDY, ignore_eos=True)
        for _ in range(200)
    ]
    wanted = [tokens_of(list(decode_sequence(served, spec))) for spec in specs]
    assert wanted == transformers_tokens(folder, specs)

    async def together_with_cancels(engine: Engine) -> list[list[Delta]]:
        streams = [engine.submit([spec]) for spec in specs]
        others = []
        for _ in range(100):
            others.append(engine.submit([random_spec(rng, 1)] * rng.randint(1, 3)))
            await asyncio.sleep(0.001)
            rng.choice(others).cancel()
        found = [(await deltas_of(stream))[0] for stream in streams]
        for stream in others:
            stream.cancel()
        return found

    with running_engine(served, max_waiting=1000) as engine:
        assert [tokens_of(deltas) for deltas in run(decode_alone(engine, specs))] == wanted
        assert [tokens_of(deltas) for deltas in run(together_with_cancels(engine))] == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_same_seed_gives_the_same_deltas_alone_among_8_among_64_and_after_cancels(
    served: ServedModel, dtype: torch.dtype
) -> None:
    rng = random.Random(1)
    specs = [random_spec(rng, number) for number in range(64)]

    async def test(engine: Engine) -> None:
        alone = await decode_alone(engine, specs)
        for size in (8, 64):
            for start in range(0, 64, size):
                assert await decode(engine, specs[start : start + size]) == alone[start : start + size]
        cancelled = engine.submit([random_spec(rng, 99) for _ in range(40)])
        later = engine.submit(specs[:40])
        await anext(cancelled)
        cancelled.cancel()
        assert await deltas_of(later) == alone[:40]

    with running_engine(served, dtype=dtype) as engine:
        run(test(engine))


def test_sampled_text_is_that_of_naive_generation(served: ServedModel) -> None:
    rng = random.Random(2)
    specs = [random_spec(rng, number) for number in range(40)]
    wanted = [list(decode_sequence(served, spec)) for spec in specs]
    with running_engine(served) as engine:
        found = run(decode(engine, specs))
    for ours, oracle in zip(found, wanted, strict=True):
        assert [(d.token, d.text, d.finish_reason) for d in ours] == [
            (d.token, d.text, d.finish_reason) for d in oracle
        ]
        # 1e-4: fp32 products of other shapes sum in another order.
        assert [d.logprob for d in ours] == pytest.approx([d.logprob for d in oracle], abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_logits_in_fewer_bits_are_those_of_fp32_but_for_rounding(served: ServedModel, dtype: torch.dtype) -> None:
    rng = random.Random(3)
    prompts = [random_prompt(rng, 40) for _ in range(20)]
    runners = [Runner(served.model, num_slots=20, dtype=one) for one in (torch.float32, dtype)]
    tokens = [rng.randrange(3, 320) for _ in prompts]
    for row, prompt in enumerate(prompts):
        exact, rounded = [runner.prefill([Piece(row, 0, prompt, is_last=True)]) for runner in runners]
        assert relative_error(rounded, exact) < 0.05
    exact, rounded = [runner.decode(tokens, [40] * len(prompts)) for runner in runners]
    # Both round at 1/256; a wrong scale or a matrix in another's place would give an error of about 1.
    assert relative_error(rounded, exact) < 0.05


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.float() - wanted).norm() / wanted.norm()).item()


def test_200_random_disconnects_leave_every_slot_free_and_their_neighbours_unchanged(served: ServedModel) -> None:
    rng = random.Random(4)
    kept = [random_spec(rng, number) for number in range(16)]

    async def test(engine: Engine) -> None:
        alone = await decode(engine, kept)
        survivors, leaving = [], []
        for number in range(200):
            if number % 13 == 0 and len(survivors) < len(kept):
                survivors.append(engine.submit([kept[len(survivors)]]))
            leaving.append(engine.submit([random_spec(rng, number)] * rng.randint(1, 2)))
            if rng.random() < 0.5:  # in prefill or decode; the others while they wait or after their end
                await anext(leaving[-1])
            leaving[rng.randrange(len(leaving))].cancel()
        for stream in leaving:
            stream.cancel()
        assert [(await deltas_of(stream))[0] for stream in survivors] == alone
        await reached(engine, lambda load: load == Load(0, 0))

    with running_engine(served, num_slots=8, max_waiting=1000) as engine:
        run(test(engine))


def test_a_cancelled_request_has_left_its_slots_after_one_more_step(served: ServedModel, gate: Gate) -> None:
    async def test(engine: Engine) -> None:
        stream = engine.submit([SequenceSpec((5, 6), 200, seed, ignore_eos=True) for seed in range(8)])
        await anext(stream)
        gate.hold()
        taken_before = gate.taken
        stream.cancel()
        gate.permit(100)
        with pytest.raises(RequestCancelled):
            await deltas_of(stream)
        await reached(engine, lambda load: load == Load(0, 0))
        assert gate.taken - taken_before <= 8

    with running_engine(served, num_slots=8) as engine:
        run(test(engine))


def test_a_nan_in_one_row_fails_that_row_alone_and_not_the_next_one_in_its_slot(
    served: ServedModel, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    specs = [random_spec(rng, number) for number in range(6)]
    victim = SequenceSpec((3, 4, 5), 200, 0, ignore_eos=True)

    async def test(engine: Engine) -> None:
        wanted = await decode(engine, specs)
        poisoned = engine.submit([victim])
        await anext(poisoned)
        gate.hold()  # the engine's thread stands still between two steps while the cache is changed
        others = engine.submit(specs)
        row = engine._scheduler.running.index(next(s for s in engine._scheduler.running if s.spec is victim))
        engine._runner._cache._values[1][row] = float("nan")
        gate.release()
        with pytest.raises(SequenceFailed):
            await deltas_of(poisoned)
        assert await deltas_of(others) == wanted
        assert await decode(engine, specs) == wanted

    with running_engine(served, num_slots=4) as engine:
        run(test(engine))


def test_prompt_scores_are_the_log_softmax_of_a_direct_forward(served: ServedModel) -> None:
    rng = random.Random(6)
    lengths = [1, 2, 64, 65, 66, 129, MAX_SEQ_LEN]
    specs = [SequenceSpec(random_prompt(rng, n), 0, 0, prompt_logprobs=n % 4) for n in lengths]

    async def score(engine: Engine) -> None:
        stream = engine.submit(specs)
        assert await deltas_of(stream) == [[] for _ in specs]
        for spec, scores in zip(specs, stream.prompt_scores, strict=True):
            assert scores is not None
            logprobs = served.model(torch.tensor([spec.prompt]))[0].log_softmax(-1)[:-1]
            own = [row[token].item() for row, token in zip(logprobs, spec.prompt[1:], strict=True)]
            # 1e-4: fp32 products of other shapes sum in another order.
            assert scores.logprobs == pytest.approx(own, abs=1e-4)
            for row, top in zip(logprobs, scores.top_logprobs, strict=True):
                values, tokens = row.topk(spec.prompt_logprobs or 0)
                assert [token for token, _ in top] == tokens.tolist()
                assert [value for _, value in top] == pytest.approx(values.tolist(), abs=1e-4)

    with running_engine(served, num_slots=2, dtype=torch.bfloat16) as engine:
        run(score(engine))


def test_scores_come_before_the_first_delta_and_do_not_change_the_text(served: ServedModel) -> None:
    plain = SequenceSpec(random_prompt(random.Random(7), 150), 5, 1, ignore_eos=True)
    scored = SequenceSpec(plain.prompt, 5, 1, ignore_eos=True, prompt_logprobs=1)

    async def test(engine: Engine) -> None:
        wanted = (await decode(engine, [plain]))[0]
        stream = engine.submit([plain, scored, SequenceSpec(plain.prompt, 0, 0, prompt_logprobs=0)])
        deltas: list[list[Delta]] = [[], [], []]
        async for event in stream:
            deltas[event.index].append(event.delta)
            assert event.index == 0 or stream.prompt_scores[1] is not None
        assert deltas == [wanted, wanted, []]
        assert stream.prompt_scores[0] is None
        assert stream.prompt_scores[2] is not None
        assert len(stream.prompt_scores[2].logprobs) == 149

    with running_engine(served, num_slots=1) as engine:
        run(test(engine))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_prompt_gives_the_same_logits_alone_and_packed_with_others(served: ServedModel, dtype: torch.dtype) -> None:
    rng = random.Random(8)
    alone, packed = [Runner(served.model, num_slots=12, dtype=dtype) for _ in range(2)]
    for lengths in ([1, 1], [3, 5, 1, 9], [64, 64], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [127, 1], [16] * 8):
        prompts = [random_prompt(rng, length) for length in lengths]
        pieces = [Piece(row, 0, prompt, is_last=True) for row, prompt in enumerate(prompts)]
        wanted = torch.cat([alone.prefill([piece]) for piece in pieces])
        assert torch.equal(packed.prefill(pieces), wanted)
