"""Tokens per second of the bare engine against other engines on the same weights, as one JSON line.

    python -m tests.bench.bench_engine [--checkpoint FOLDER] [--concurrency 1 8 64] [--tokens 128] [--repeats 3]

1. Without a checkpoint, one of the reference model's size is made with random weights: speed does not depend on them.
2. Every engine gets the same prompts of 64 tokens, `concurrency` of them at once, and makes 128 tokens for each,
   greedily, EOS ignored. Engines take turns, so that a change of the machine's speed meets all of them, and end with
   their turn, as far as they can: threads that stay in the process slow ours (`serving/engine/own_thread.py`), and
   with peers in it ours is measured at about half of what it does alone (`--no_peers`).
3. Peers: transformers' generate in bf16, and CTranslate2 (int8) where it is installed.
4. The time to the first token is that of one request on an idle engine.
5. Tokens per CPU second count the time of all threads: with `--threads 1` a busy machine does not distort them.

Run it on an idle machine. Nothing here starts Ray or HTTP.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from model.checkpoint import resolve_checkpoint
from model.checkpoint_writer import save_checkpoint
from model.config import ModelConfig
from model.llama import Llama
from model.normalizer import Normalizer
from model.sampling import SamplingParams
from model.tokenizer import Tokenizer, train_tokenizer
from serving.engine.engine import Engine
from serving.engine.loading import ServedModel, load_served_model
from serving.engine.own_thread import in_own_thread
from serving.engine.sequence import SequenceSpec

Prompts = list[tuple[int, ...]]
Decode = Callable[[Prompts], None]
Turn = Callable[[], AbstractContextManager[Decode]]
GREEDY = SamplingParams(temperature=0.0)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)  # of every thread that begins after this
    with tempfile.TemporaryDirectory() as scratch:
        folder = (
            resolve_checkpoint(args.checkpoint)
            if args.checkpoint
            else in_own_thread(lambda: make_checkpoint(Path(scratch)))
        )
        served = load_served_model(folder)
        rates = measure(make_engines(served, folder, Path(scratch), args), args)
        ttft_ms = {dtype: measure_ttft_ms(partial(our_engine, served, dtype, args, 1), args) for dtype in args.dtypes}
    print(json.dumps(report(args, rates, ttft_ms)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint or run folder; random weights if absent")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="tokens to make for each prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=["float32", "bfloat16", "int8"])
    parser.add_argument("--no_peers", action="store_true", help="measure our engine alone")
    return parser.parse_args()


def make_checkpoint(scratch: Path) -> Path:
    """Saves the reference model with random weights and a small tokenizer."""
    normalizer = Normalizer(detokenize=True, lowercase=False)
    Tokenizer(train_tokenizer(["a small text of few words"] * 50, vocab_size=280), normalizer).save(scratch / "words")
    config = ModelConfig(vocab_size=50_304)
    model = Llama(config)
    model.init_weights(0)
    return save_checkpoint(
        scratch / "random",
        1,
        model=model.state_dict(),
        config=config,
        tokenizer_folder=scratch / "words",
        trainer_tensors={"rng": torch.zeros(1)},
        trainer_state={"step": 1, "val_loss": 10.0},
    )


def make_engines(served: ServedModel, folder: Path, scratch: Path, args: argparse.Namespace) -> dict[str, Turn]:
    engines: dict[str, Turn] = {
        f"engine_{dtype}": partial(our_engine, served, dtype, args, args.tokens) for dtype in args.dtypes
    }
    if not args.no_peers:
        engines["transformers_bfloat16"] = partial(nullcontext, transformers_engine(folder, args))
        if importlib.util.find_spec("ctranslate2"):
            engines["ctranslate2_int8"] = ctranslate2_engine(folder, scratch, args)
    return engines


@contextmanager
def our_engine(served: ServedModel, dtype: str, args: argparse.Namespace, n_tokens: int) -> Iterator[Decode]:
    """An engine of ours that is gone with its threads before another has its turn."""
    engine = Engine(
        served, num_slots=max(args.concurrency), max_waiting=0, dtype=getattr(torch, dtype), num_threads=args.threads
    )
    try:
        yield lambda prompts: asyncio.run(decode_all(engine, prompts, n_tokens))
    finally:
        engine.close()
        engine.join()


async def decode_all(engine: Engine, prompts: Prompts, n_tokens: int) -> None:
    """Decodes one request per prompt at the same time."""

    async def consume(prompt: tuple[int, ...]) -> None:
        count = 0
        async for _ in engine.submit([SequenceSpec(prompt, n_tokens, seed=0, params=GREEDY, ignore_eos=True)]):
            count += 1
        assert count == n_tokens

    await asyncio.gather(*map(consume, prompts))


def transformers_engine(folder: Path, args: argparse.Namespace) -> Decode:
    from transformers import LlamaForCausalLM

    model = in_own_thread(lambda: LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval())

    def generate(prompts: Prompts) -> None:
        inputs = torch.tensor(prompts)
        with torch.inference_mode():
            outputs = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                min_new_tokens=args.tokens,
                max_new_tokens=args.tokens,
                do_sample=False,
                pad_token_id=0,
            )
        assert outputs.shape == (len(prompts), inputs.shape[1] + args.tokens)

    # A pool of threads that stayed would slow whoever decodes next.
    return lambda prompts: in_own_thread(lambda: generate(prompts))


def ctranslate2_engine(folder: Path, scratch: Path, args: argparse.Namespace) -> Turn:
    import ctranslate2

    converted = scratch / "ctranslate2"
    converter = ctranslate2.converters.TransformersConverter(str(folder))
    in_own_thread(lambda: converter.convert(str(converted), quantization="int8"))
    pieces = json.loads((converted / "vocabulary.json").read_text())

    @contextmanager
    def turn() -> Iterator[Decode]:
        generator = ctranslate2.Generator(str(converted), device="cpu", intra_threads=args.threads, inter_threads=1)

        def decode(prompts: Prompts) -> None:
            results = generator.generate_batch(
                [[pieces[token] for token in prompt] for prompt in prompts],
                max_length=args.tokens,
                min_length=args.tokens,
                sampling_topk=1,
                include_prompt_in_result=False,
            )
            assert all(len(result.sequences_ids[0]) == args.tokens for result in results)

        yield decode
        generator.unload_model()

    return turn


def random_prompts(rng: random.Random, count: int, length: int) -> Prompts:
    return [tuple(rng.randrange(3, 250) for _ in range(length)) for _ in range(count)]


def measure(engines: dict[str, Turn], args: argparse.Namespace) -> dict[str, Any]:
    """Returns the median tokens per second and per CPU second by engine and concurrency, prefill included."""
    rng = random.Random(0)
    rates: dict[str, Any] = {"tokens_per_s": defaultdict(dict), "tokens_per_cpu_s": defaultdict(dict)}
    for concurrency in args.concurrency:
        by_wall: defaultdict[str, list[float]] = defaultdict(list)
        by_cpu: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(args.repeats):
            prompts = random_prompts(rng, concurrency, args.prompt_tokens)
            for name, turn in engines.items():
                with turn() as decode:
                    decode(random_prompts(rng, 1, args.prompt_tokens))  # the first call sets things up
                    started_s, started_cpu_s = time.perf_counter(), time.process_time()
                    decode(prompts)
                    by_wall[name].append(concurrency * args.tokens / (time.perf_counter() - started_s))
                    by_cpu[name].append(concurrency * args.tokens / (time.process_time() - started_cpu_s))
                print(
                    f"{name} at {concurrency}: {by_wall[name][-1]:.1f} tokens/s, {by_cpu[name][-1]:.1f} per CPU second",
                    file=sys.stderr,
                    flush=True,
                )
        for name in engines:
            rates["tokens_per_s"][name][concurrency] = round(statistics.median(by_wall[name]), 1)
            rates["tokens_per_cpu_s"][name][concurrency] = round(statistics.median(by_cpu[name]), 1)
    return rates


def measure_ttft_ms(turn: Turn, args: argparse.Namespace) -> float:
    """Returns the median time to the first token of one request at a time."""
    rng, times_s = random.Random(1), []
    with turn() as decode:
        for _ in range(12):
            prompts = random_prompts(rng, 1, args.prompt_tokens)
            started_s = time.perf_counter()
            decode(prompts)
            times_s.append(time.perf_counter() - started_s)
    return round(statistics.median(times_s[2:]) * 1000, 1)


def report(args: argparse.Namespace, rates: dict[str, Any], ttft_ms: dict[str, float]) -> dict[str, Any]:
    return {
        **rates,
        "ratio": ratios(rates["tokens_per_s"], args),
        "cpu_ratio": ratios(rates["tokens_per_cpu_s"], args),
        "ttft_ms": ttft_ms,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.tokens,
        "threads": args.threads,
        "torch": torch.__version__,
    }


def ratios(rates: dict[str, dict[int, float]], args: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Returns our first dtype's rate over that of each peer."""
    ours = rates[f"engine_{args.dtypes[0]}"]
    peers = {name: by for name, by in rates.items() if not name.startswith("engine_")}
    return {name: {c: round(ours[c] / rate, 2) for c, rate in by.items()} for name, by in peers.items()}


if __name__ == "__main__":
    main()
