"""Tokens per second through HTTP and of the bare engine against other engines on the same weights, as one JSON line.

    python -m tests.bench.bench_engine [--checkpoint FOLDER] [--concurrency 1 8 64] [--tokens 128] [--repeats 3]

1. Without a checkpoint, one of the reference model's size is made with random weights: speed does not depend on them.
2. Every engine gets the same prompts of 64 tokens, `concurrency` of them at once, and makes 128 tokens for each,
   greedily, EOS ignored. Prefill and, where there is one, the HTTP client count.
3. Engines take turns, so that a change of the machine's speed meets all of them. A turn has a process of its own and
   the machine for itself: threads of one engine slow another (`serving/engine/own_thread.py`), and so does an idle Ray.
4. Peers: transformers' generate in bf16; CTranslate2 (int8) where it is installed; llama.cpp's server (q8_0) from the
   folder that `--llama_cpp` names. The first two are called as libraries, which spares them HTTP.
5. The time to the first token is that of one request of one token on the idle engine.

Run it on an idle machine.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model.checkpoint import resolve_checkpoint
from model.checkpoint_writer import save_checkpoint
from model.config import ModelConfig
from model.llama import Llama
from model.normalizer import Normalizer
from model.tokenizer import Tokenizer, train_tokenizer
from tests.bench.serving_engines import ENGINES, Decode, Prompts, Setup

N_FIRST_TOKENS = 11


@dataclass(frozen=True)
class Turn:
    """What an engine did in one turn: tokens per second by concurrency, and the median time to the first token."""

    tokens_per_s: dict[int, float]
    ttft_ms: float


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        folder = resolve_checkpoint(args.checkpoint) if args.checkpoint else make_checkpoint(Path(scratch))
        setup = Setup(folder, max(args.concurrency), args.threads, args.llama_cpp)
        turns = take_turns(setup, args)
    print(json.dumps(report(turns, args)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint or run folder; random weights if absent")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), help="default: all that are at hand")
    parser.add_argument("--llama_cpp", type=Path, help="source folder of llama.cpp with build/bin/llama-server")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="tokens to make for each prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    at_hand = [name for name in ENGINES if is_at_hand(name, args.llama_cpp)]
    args.engines = args.engines or at_hand
    if missing := set(args.engines) - set(at_hand):
        parser.error(f"not at hand: {', '.join(missing)}. Install ctranslate2; give the folder of llama.cpp.")
    return args


def is_at_hand(name: str, llama_cpp: Path | None) -> bool:
    if name.startswith("ctranslate2"):
        return importlib.util.find_spec("ctranslate2") is not None
    return llama_cpp is not None or not name.startswith("llama_cpp")


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


def take_turns(setup: Setup, args: argparse.Namespace) -> dict[str, list[Turn]]:
    """Lets each engine have `repeats` turns, one after another."""
    turns: dict[str, list[Turn]] = {name: [] for name in args.engines}
    for repeat in range(args.repeats):
        for name in args.engines:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                turn = process.submit(take_turn, name, setup, args.concurrency, args.prompt_tokens, args.tokens, repeat)
                turns[name].append(turn.result())
            print(name, turns[name][-1], file=sys.stderr, flush=True)
    return turns


def take_turn(
    name: str, setup: Setup, concurrency: Sequence[int], prompt_tokens: int, new_tokens: int, seed: int
) -> Turn:
    """Measures one engine; runs in a process of its own."""
    rng = random.Random(seed)
    with ENGINES[name](setup) as decode:
        decode(random_prompts(rng, setup.most_sequences, prompt_tokens), 2)  # sets things up, at the full size
        first = [seconds(decode, random_prompts(rng, 1, prompt_tokens), 1) for _ in range(N_FIRST_TOKENS)]
        rates = {
            count: count * new_tokens / seconds(decode, random_prompts(rng, count, prompt_tokens), new_tokens)
            for count in concurrency
        }
    return Turn(rates, 1000 * statistics.median(first))


def random_prompts(rng: random.Random, count: int, length: int) -> Prompts:
    return [tuple(rng.randrange(3, 250) for _ in range(length)) for _ in range(count)]


def seconds(decode: Decode, prompts: Prompts, new_tokens: int) -> float:
    started_s = time.perf_counter()
    decode(prompts, new_tokens)
    return time.perf_counter() - started_s


def report(turns: dict[str, list[Turn]], args: argparse.Namespace) -> dict[str, Any]:
    """Returns medians over the turns; every engine of ours by every peer, and Ray Serve's share of the bare engine."""

    def ratios(ours: str, theirs: str) -> dict[int, float]:
        pairs = list(zip(turns[ours], turns[theirs], strict=True))
        return {n: median(a.tokens_per_s[n] / b.tokens_per_s[n] for a, b in pairs) for n in args.concurrency}

    ours = [name for name in turns if name.startswith(("http", "bare"))]
    bare = {name: "bare_" + name.split("_")[1] for name in ours if name.startswith("http")}
    return {
        "tokens_per_s": {
            name: {count: median(turn.tokens_per_s[count] for turn in taken) for count in args.concurrency}
            for name, taken in turns.items()
        },
        "ratio": {name: {peer: ratios(name, peer) for peer in turns if peer not in ours} for name in ours},
        "serve_share": {name: ratios(name, of) for name, of in bare.items() if of in turns},
        "ttft_ms": {name: median(turn.ttft_ms for turn in taken) for name, taken in turns.items()},
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.tokens,
        "threads": args.threads,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
        "torch": torch.__version__,
    }


def median(values: Any) -> float:
    return round(statistics.median(values), 2)


if __name__ == "__main__":
    main()
