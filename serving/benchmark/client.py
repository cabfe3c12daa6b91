"""One streamed completion against any OpenAI-compatible server, with the times of its tokens.

Parsing is kept to what the times need: client and server often share the cores that are measured.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the body that every request to it has, but for its prompt.

    Attributes:
        url: Its base, such as http://127.0.0.1:8000/v1.
    """

    url: str
    body: dict[str, Any]
    api_key: str | None = None

    def headers(self) -> dict[str, str]:
        """Returns the headers of a request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(slots=True)
class Measurement:
    """What happened to one request; times in seconds of `time.perf_counter()`.

    Attributes:
        sent_at_s: When it was sent.
        first_at_s: When its first token came; 0 if none did.
        last_at_s: When its last token came.
        problem: None, or why there is no whole answer: a status, or the kind of exception.
    """

    sent_at_s: float
    first_at_s: float = 0.0
    last_at_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    problem: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_at_s - self.sent_at_s

    @property
    def e2e_s(self) -> float:
        return self.last_at_s - self.sent_at_s

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between the tokens after the first; None for fewer than two."""
        if self.completion_tokens < 2:
            return None
        return (self.last_at_s - self.first_at_s) / (self.completion_tokens - 1)


async def measure(session: aiohttp.ClientSession, target: Target, prompt: str | Sequence[int]) -> Measurement:
    """Sends one request, reads its stream to the end and returns what happened; the server's faults do not raise."""
    measured = Measurement(time.perf_counter())
    body = {**target.body, "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with session.post(f"{target.url}/completions", json=body, headers=target.headers()) as response:
            if response.status != 200:
                measured.problem = await _error_code(response)
            else:
                await _read(response, measured)
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        measured.problem = type(error).__name__
    if measured.problem is None and not measured.first_at_s:
        measured.problem = "no token"
    return measured


async def _read(response: aiohttp.ClientResponse, measured: Measurement) -> None:
    chunks = 0
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        now_s = time.perf_counter()
        if b'"usage":' in line and (usage := json.loads(line[6:]).get("usage")):
            measured.prompt_tokens, measured.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if line.startswith(b'data: {"error"'):
            measured.problem = "error event"
        elif b'"choices": []' not in line and b'"choices":[]' not in line:
            chunks += 1
            measured.first_at_s = measured.first_at_s or now_s
            measured.last_at_s = now_s
    measured.completion_tokens = measured.completion_tokens or chunks


async def _error_code(response: aiohttp.ClientResponse) -> str:
    """The status and, where the body has one, the code."""
    try:
        code = (await response.json(content_type=None))["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return str(response.status)
    return f"{response.status} {code}"
