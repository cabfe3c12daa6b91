"""Sends hostile requests to the service and watches codes, slots and memory; the last stdout line is JSON.

python -m tests.bench.fuzz_serving --requests 10000

The server is this process: a tiny model behind uvicorn on loopback.
"""

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.serving_checkpoint import MAX_SEQ_LEN, VOCAB_SIZE, save_run
from tests.serving_fuzz import Model, cases, send, verdict
from tests.serving_server import Server, http_server


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        http_server(save_run(Path(folder) / "tiny"), num_slots=8, max_waiting=256) as server,
    ):
        # Pools and caches fill first: memory is compared after a tenth of the requests.
        asyncio.run(fuzz(server, arguments.seed + 1, arguments.requests // 10, arguments.clients))
        before_bytes = rss_bytes()
        started_at_s = time.monotonic()
        wrong, statuses = asyncio.run(fuzz(server, arguments.seed, arguments.requests, arguments.clients))
        elapsed_s = time.monotonic() - started_at_s
        asyncio.run(asyncio.wait_for(until_idle(server), timeout=30))
        grown_mb = (rss_bytes() - before_bytes) / 1e6
    report = {
        "requests": arguments.requests,
        "elapsed_s": round(elapsed_s, 1),
        "statuses": dict(sorted(statuses.items())),
        "wrong": len(wrong),
        "grown_mb": round(grown_mb, 1),
    }
    for problem in wrong[:20]:
        print(problem, file=sys.stderr)
    print(json.dumps(report))
    return 0 if not wrong and grown_mb < 50 else 1


async def fuzz(server: Server, seed: int, count: int, clients: int) -> tuple[list[str], Counter[str]]:
    """Sends the cases of a seed from several clients at once and returns what was wrong, and the statuses."""
    address = urlsplit(server.url)
    waiting = cases(seed, count, Model(MAX_SEQ_LEN, VOCAB_SIZE))
    wrong: list[str] = []
    statuses: Counter[str] = Counter()

    async def client() -> None:
        for case in waiting:
            answer = await send(str(address.hostname), int(address.port or 0), case)
            statuses["gone" if answer is None else str(answer[0])] += 1
            if (problem := verdict(case, answer)) is not None:
                wrong.append(problem)

    await asyncio.gather(*(client() for _ in range(clients)))
    return wrong, statuses


async def until_idle(server: Server) -> None:
    while server.service.health().running or server.service.health().waiting:
        await asyncio.sleep(0.01)


def rss_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    sys.exit(main())
