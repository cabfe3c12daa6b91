"""Hostile requests over real sockets: each gets the right code, and afterwards all is as before.

The long run, 10,000 requests with the memory watched, is tests/bench/fuzz_serving.py.
"""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

from tests.serving_checkpoint import MAX_SEQ_LEN, VOCAB_SIZE, save_run
from tests.serving_fuzz import Case, Model, cases, send, verdict
from tests.serving_server import http_server


def test_hostile_requests_get_the_right_code_and_leave_nothing_behind(tmp_path: Path) -> None:
    with http_server(save_run(tmp_path / "tiny"), num_slots=4) as server:
        address = urlsplit(server.url)
        host, port = str(address.hostname), int(address.port or 0)

        async def run() -> list[str]:
            wrong = []
            for case in cases(0, 380, Model(MAX_SEQ_LEN, VOCAB_SIZE)):
                if (problem := verdict(case, await send(host, port, case))) is not None:
                    wrong.append(problem)
            return wrong

        async def until_idle() -> None:
            while server.service.health().running or server.service.health().waiting:
                await asyncio.sleep(0.01)

        assert asyncio.run(run()) == []
        # Generous: the clients that went away are noticed within a token.
        asyncio.run(asyncio.wait_for(until_idle(), timeout=20))
        after = Case("after", 200, b'{"prompt":"Once","max_tokens":2}')
        assert verdict(after, asyncio.run(send(host, port, after))) is None


def test_the_verdict_of_the_fuzzer_can_be_negative() -> None:
    case = Case("x", 400, b"{}")
    assert verdict(case, (500, b"{}")) is not None
    assert verdict(case, (400, b'{"error": {"message": ""}}')) is not None
