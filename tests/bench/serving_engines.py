"""Engines as `bench_engine.py` measures them: ours bare, ours behind Ray Serve, and those people would take instead.

Each is a context manager that yields a `Decode` and is called in a process of its own, which ends with the turn.
"""

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp

from model.sampling import SamplingParams
from serving.benchmark.client import Target, measure

Prompts = list[tuple[int, ...]]
Decode = Callable[[Prompts, int], None]
"""Makes so many tokens for each prompt, all prompts at the same time."""
START_WITHIN_S = 120.0
MODEL_NAME = "model"


@dataclass(frozen=True)
class Setup:
    """What an engine needs to begin.

    Attributes:
        checkpoint: A Hugging Face folder; all engines have their weights from it.
        most_sequences: Sequences that are decoded at the same time, at most.
        llama_cpp: Source folder of llama.cpp with build/bin/llama-server.
    """

    checkpoint: Path
    most_sequences: int
    threads: int
    llama_cpp: Path | None


@contextmanager
def bare(setup: Setup, *, dtype: str) -> Iterator[Decode]:
    """Our engine in this process, without Ray and HTTP."""
    import torch

    from serving.engine.engine import Engine
    from serving.engine.loading import load_served_model
    from serving.engine.sequence import SequenceSpec

    engine = Engine(
        load_served_model(setup.checkpoint),
        num_slots=setup.most_sequences,
        max_waiting=0,
        dtype=getattr(torch, dtype),
        num_threads=setup.threads,
    )
    greedy = SamplingParams(temperature=0.0)

    async def ask(prompt: tuple[int, ...], n_tokens: int) -> None:
        count = 0
        async for _ in engine.submit([SequenceSpec(prompt, n_tokens, seed=0, params=greedy, ignore_eos=True)]):
            count += 1
        assert count == n_tokens

    async def decode(prompts: Prompts, n_tokens: int) -> None:
        await asyncio.gather(*(ask(prompt, n_tokens) for prompt in prompts))

    try:
        yield lambda prompts, n_tokens: asyncio.run(decode(prompts, n_tokens))
    finally:
        engine.close()
        engine.join()


@contextmanager
def http(setup: Setup, *, dtype: str, is_streamed: bool = False) -> Iterator[Decode]:
    """The service as it is deployed: Ray Serve's proxy and one replica; the client is in here."""
    import ray
    from ray import serve

    from serving.http.app import build_app

    with tempfile.TemporaryDirectory(prefix="bench-ray-", dir="/tmp") as scratch:  # Ray's sockets want a short path
        ray.init(address="local", include_dashboard=False, log_to_driver=False, _temp_dir=scratch)
        try:
            port = free_port()
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            config = {
                "checkpoint": str(setup.checkpoint),
                "model_name": MODEL_NAME,
                "dtype": dtype,
                "num_slots": setup.most_sequences,
                "num_threads": setup.threads,
            }
            serve.run(build_app(config), name="generator")
            yield over_http(f"http://127.0.0.1:{port}/v1", is_streamed=is_streamed)
        finally:
            serve.shutdown()
            ray.shutdown()


@contextmanager
def transformers(setup: Setup) -> Iterator[Decode]:
    """`generate` of transformers in bf16, on one batch of all prompts."""
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(setup.threads)
    model = LlamaForCausalLM.from_pretrained(setup.checkpoint, dtype=torch.bfloat16).eval()

    def decode(prompts: Prompts, n_tokens: int) -> None:
        inputs = torch.tensor(prompts)
        with torch.inference_mode():
            outputs = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                min_new_tokens=n_tokens,
                max_new_tokens=n_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        assert outputs.shape == (len(prompts), inputs.shape[1] + n_tokens)

    yield decode


@contextmanager
def ctranslate2(setup: Setup) -> Iterator[Decode]:
    """CTranslate2 in int8, on one batch of all prompts."""
    import ctranslate2

    with tempfile.TemporaryDirectory() as scratch:
        converted = Path(scratch) / "converted"
        ctranslate2.converters.TransformersConverter(str(setup.checkpoint)).convert(str(converted), quantization="int8")
        pieces = json.loads((converted / "vocabulary.json").read_text())
        generator = ctranslate2.Generator(str(converted), device="cpu", intra_threads=setup.threads, inter_threads=1)

        def decode(prompts: Prompts, n_tokens: int) -> None:
            results = generator.generate_batch(
                [[pieces[token] for token in prompt] for prompt in prompts],
                max_length=n_tokens,
                min_length=n_tokens,
                sampling_topk=1,
                include_prompt_in_result=False,
            )
            assert all(len(result.sequences_ids[0]) == n_tokens for result in results)

        yield decode


@contextmanager
def llama_cpp(setup: Setup) -> Iterator[Decode]:
    """llama.cpp's own server with weights of 8 bits (q8_0) and a slot per sequence; the client is in here."""
    assert setup.llama_cpp is not None
    with tempfile.TemporaryDirectory() as scratch:
        weights, log = Path(scratch) / "model.gguf", Path(scratch) / "log"
        convert = [sys.executable, setup.llama_cpp / "convert_hf_to_gguf.py", setup.checkpoint]
        subprocess.run(
            [*map(str, convert), "--outtype", "q8_0", "--outfile", str(weights)], check=True, stderr=log.open("wb")
        )
        port = free_port()
        options = f"--port {port} -np {setup.most_sequences} -c {512 * setup.most_sequences} --no-webui --cache-ram 0"
        threads = f"-t {setup.threads} -tb {setup.threads}"
        server = subprocess.Popen(
            [setup.llama_cpp / "build/bin/llama-server", "-m", weights, *options.split(), *threads.split()],
            stdout=subprocess.DEVNULL,
            stderr=log.open("wb"),
        )
        try:
            wait_until_up(f"http://127.0.0.1:{port}/health", server, log)
            yield over_http(f"http://127.0.0.1:{port}/v1", is_streamed=False)
        finally:
            server.kill()
            server.wait()


ENGINES: dict[str, Callable[[Setup], AbstractContextManager[Decode]]] = {
    "http_int8": partial(http, dtype="int8"),
    "http_bfloat16": partial(http, dtype="bfloat16"),
    "http_int8_streamed": partial(http, dtype="int8", is_streamed=True),
    "bare_int8": partial(bare, dtype="int8"),
    "bare_bfloat16": partial(bare, dtype="bfloat16"),
    "transformers_bfloat16": transformers,
    "ctranslate2_int8": ctranslate2,
    "llama_cpp_q8_0": llama_cpp,
}


def over_http(url: str, *, is_streamed: bool) -> Decode:
    """Returns a decode against an OpenAI-compatible server: a request for each prompt."""

    async def whole(session: aiohttp.ClientSession, target: Target, prompt: tuple[int, ...]) -> int:
        async with session.post(f"{target.url}/completions", json={**target.body, "prompt": prompt}) as response:
            return int((await response.json())["usage"]["completion_tokens"])

    async def streamed(session: aiohttp.ClientSession, target: Target, prompt: tuple[int, ...]) -> int:
        return (await measure(session, target, prompt)).completion_tokens

    async def decode(prompts: Prompts, n_tokens: int) -> None:
        target = Target(url, {"model": MODEL_NAME, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True})
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
        ask = streamed if is_streamed else whole
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, raise_for_status=True) as session:
            made = await asyncio.gather(*(ask(session, target, prompt) for prompt in prompts))
        assert made == [n_tokens] * len(prompts)

    return lambda prompts, n_tokens: asyncio.run(decode(prompts, n_tokens))


def free_port() -> int:
    """Returns a TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Waits for a 200.

    Raises:
        RuntimeError: The server has ended, or is not up within START_WITHIN_S; with the end of its log.
    """
    end_s = time.monotonic() + START_WITHIN_S
    while time.monotonic() < end_s and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"{url} does not answer: {log.read_text(errors='replace')[-2000:]}")
