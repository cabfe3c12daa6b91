"""A tiny checkpoint with random weights, made through the product's own save, and an app around it."""

import asyncio
import functools
import json
import types
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import torch
from fastapi import FastAPI

from model.checkpoint_writer import save_checkpoint
from model.config import ModelConfig
from model.llama import Llama
from model.normalizer import Normalizer
from model.tokenizer import Tokenizer, train_tokenizer
from serving.http.routes import create_app
from serving.http.service import Service

SENTENCES = [
    "Once upon a time the small grey parrot said naïve things, twice a day, every day.",
    "The river ran past the house, and the light of the morning fell on the stone door.",
    "It was not the queen who knew the road, it was the king's old ship.",
]
MAX_SEQ_LEN = 64
VOCAB_SIZE = 320


@functools.cache
def trained_tokenizer(vocab_size: int) -> Tokenizer:
    normalizer = Normalizer(detokenize=True, lowercase=False)
    model = train_tokenizer(map(normalizer, SENTENCES * 20), vocab_size=vocab_size)
    return Tokenizer(model, normalizer)


def save_run(
    run_folder: Path,
    *,
    step: int = 1200,
    seed: int = 1,
    val_loss: float = 3.0,
    vocab_size: int = VOCAB_SIZE,
    max_seq_len: int = MAX_SEQ_LEN,
    change: Callable[[dict[str, torch.Tensor]], None] = lambda weights: None,
) -> Path:
    """Saves one checkpoint into a run folder and returns the checkpoint's folder."""
    tokenizer_folder = run_folder.parent / f"tokenizer-{vocab_size}"
    tokenizer = trained_tokenizer(vocab_size)
    tokenizer.save(tokenizer_folder)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        d_ff=64,
        max_seq_len=max_seq_len,
    )
    model = Llama(config)
    model.init_weights(seed)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    # Freshly initialised logits are nearly flat; ten times larger ones make some tokens likely.
    weights["model.norm.weight"] *= 10
    change(weights)
    return save_checkpoint(
        run_folder,
        step,
        model=weights,
        config=config,
        tokenizer_folder=tokenizer_folder,
        trainer_tensors={"rng": torch.zeros(1)},
        trainer_state={"step": step, "val_loss": val_loss},
    )


class Client:
    """Sends requests to an ASGI app from a test that is no coroutine."""

    def __init__(self, app: FastAPI, runner: asyncio.Runner) -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)
        self.run: Callable[[Coroutine[Any, Any, Any]], Any] = runner.run

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        response: httpx.Response = self.run(self._http.request(method, path, **options))
        return response

    def generate(self, body: Any = None, **fields: Any) -> httpx.Response:
        """POST /generate with raw bytes or text, or with fields."""
        content = json.dumps(fields) if body is None else body
        return self.request("POST", "/generate", content=content)

    async def post(self, body: dict[str, Any] | str) -> httpx.Response:
        content = body if isinstance(body, str) else json.dumps(body)
        return await self._http.post("/generate", content=content)

    async def get(self, path: str) -> httpx.Response:
        return await self._http.get(path)

    def generate_together(self, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
        async def send_all() -> list[httpx.Response]:
            return await asyncio.gather(*map(self.post, bodies))

        responses: list[httpx.Response] = self.run(send_all())
        return responses


class Served(types.SimpleNamespace):
    """A service, its client and the runner whose loop both use."""

    service: Service
    client: Client
    runner: asyncio.Runner


def serve_run(checkpoint: Path, *, api_key: str | None = None, **limits: Any) -> Served:
    """Starts a service of a checkpoint in this process, without Ray."""
    runner = asyncio.Runner()
    service = Service()
    # One thread: the model is tiny, a second one costs more in waiting than it computes.
    runner.run(service.update({"checkpoint": str(checkpoint), "num_threads": 1, **limits}))
    return Served(service=service, runner=runner, client=Client(create_app(service, api_key=api_key), runner))


def close(served: Served) -> None:
    served.service.close()
    served.runner.close()
