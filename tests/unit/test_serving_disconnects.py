"""Clients that go away at random moments over real sockets: slots are free again, and neighbours notice nothing."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from serving.http import body
from tests.serving_checkpoint import save_run
from tests.serving_fuzz import Case, send
from tests.serving_server import Server, http_server

BODY = {"prompt": "Once upon a time", "ignore_eos": True, "temperature": 1.3}
NUM_VICTIMS = 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with http_server(save_run(tmp_path_factory.mktemp("runs") / "tiny"), num_slots=8) as running:
        yield running


def address_of(server: Server) -> tuple[str, int]:
    parts = urlsplit(server.url)
    return str(parts.hostname), int(parts.port or 0)


async def leave(server: Server, rng: random.Random) -> None:
    """Asks for a long answer and hangs up: at once, while waiting, in prefill, in decode or just after the end."""
    fields = {**BODY, "max_new_tokens": rng.choice([1, 40]), "n": rng.randint(1, 4), "stream": rng.random() < 0.5}
    raw = json.dumps(fields).encode()
    reader, writer = await asyncio.open_connection(*address_of(server))
    writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw)
    await writer.drain()
    try:
        async with asyncio.timeout(rng.random() * 0.1):
            await reader.readexactly(rng.randrange(2000))
    except (TimeoutError, asyncio.IncompleteReadError):
        pass
    writer.close()


async def outputs(client: httpx.AsyncClient, seed: int) -> Any:
    response = await client.post("/generate", json={**BODY, "seed": seed, "max_new_tokens": 45, "n": 2})
    assert response.status_code == 200, response.text
    return response.json()["outputs"]


def test_clients_that_leave_at_random_free_their_slots_and_change_no_neighbour(server: Server) -> None:
    rng = random.Random(0)

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            alone = [await outputs(client, seed) for seed in range(4)]
            victims = [leave(server, rng) for _ in range(NUM_VICTIMS)]
            for start in range(0, NUM_VICTIMS, 20):
                leaving = asyncio.gather(*victims[start : start + 20])
                neighbours = await asyncio.gather(*(outputs(client, seed) for seed in range(4)))
                await leaving
                assert neighbours == alone
            while (health := (await client.get("/health")).json())["running"] or health["waiting"]:
                await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(run(), timeout=120))  # a leaked slot ends here


def test_a_thousand_requests_on_one_connection_open_no_second_one(server: Server) -> None:
    opened: list[str] = []

    async def trace(name: str, info: dict[str, Any]) -> None:
        if name == "connection.connect_tcp.started":
            opened.append(name)

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            for number in range(1000):
                path, body = ("/tokenize", {}) if number % 10 else ("/generate", {"max_new_tokens": 1})
                sent = {"prompt": "a", **body}
                response = await client.post(path, json=sent, extensions={"trace": trace})
                assert response.status_code == 200

    asyncio.run(run())
    assert len(opened) == 1


def test_a_body_that_never_ends_is_a_408(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "READ_TIMEOUT_S", 0.1)
    headers = {"Content-Length": "100"}
    answer = asyncio.run(send(*address_of(server), Case("slow", 408, b'{"prompt":', headers=headers)))
    assert answer is not None
    assert answer[0] == 408
    assert json.loads(answer[1])["error"]["code"] == "timeout"


def test_a_half_closed_connection_is_answered(server: Server) -> None:
    """A client that has sent all it will, and says so, still wants its answer or gets none: it never hangs."""

    async def run() -> bytes:
        reader, writer = await asyncio.open_connection(*address_of(server))
        raw = json.dumps({**BODY, "max_new_tokens": 2}).encode()
        writer.write(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(raw)
        )
        writer.write(raw)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), timeout=30)
        writer.close()
        return answer

    answer = asyncio.run(run())
    assert answer == b"" or answer.startswith(b"HTTP/1.1 200")
    assert httpx.get(f"{server.url}/health").status_code == 200
