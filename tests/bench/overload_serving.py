"""Ten times as many clients as the service can take, then silence; the last stdout line is JSON.

    python -m tests.bench.overload_serving --checkpoint storage/runs/small --duration_s 120

Reported: how fast refusals come, the TPOT of accepted requests beside that of a service whose slots are just full,
how much memory grew, and how long after the flood a request is answered again.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

import aiohttp
import psutil

from serving.benchmark.client import Measurement, Target, measure
from tests.serving_server import Server, http_server

SLOTS, WAITING, TIMES = 16, 16, 10
PROMPT = "The old man opened the door, and"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--duration_s", type=float, default=120)
    arguments = parser.parse_args()
    with http_server(arguments.checkpoint.resolve(), num_slots=SLOTS, max_waiting=WAITING) as server:
        report = asyncio.run(flood(server, arguments.duration_s))
    print(json.dumps(report))
    is_calm = report["tpot_ratio"] <= 3 and report["recovered_s"] <= 5 and report["grown_mb"] <= 50
    return 0 if is_calm and report["refused"] and not report["other"] else 1


async def flood(server: Server, duration_s: float) -> dict[str, float]:
    """Runs the three phases against a server of this process and returns what was seen."""
    body = {"max_tokens": 64, "temperature": 0, "ignore_eos": True}
    target = Target(f"{server.url}/v1", body)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        full = await clients(session, target, SLOTS, duration_s / 10)
        before_bytes = psutil.Process().memory_info().rss
        flooded = await clients(session, target, TIMES * (SLOTS + WAITING), duration_s)
        started_at_s = time.perf_counter()
        while (await measure(session, target, PROMPT)).problem is not None:
            await asyncio.sleep(0.05)
        recovered_s = time.perf_counter() - started_at_s
    grown = psutil.Process().memory_info().rss - before_bytes
    accepted = [one for one in flooded if one.problem is None]
    refused = sorted(one.last_at_s - one.sent_at_s for one in flooded if one.problem == "429 queue_full")
    return {
        "accepted": len(accepted),
        "refused": len(refused),
        "other": len(flooded) - len(accepted) - len(refused),
        "refusal_p50_ms": round(1000 * statistics.median(refused or [0.0]), 1),
        "tpot_full_ms": round(1000 * tpot_s(full), 2),
        "tpot_flooded_ms": round(1000 * tpot_s(accepted), 2),
        "tpot_ratio": round(tpot_s(accepted) / tpot_s(full), 2),
        "recovered_s": round(recovered_s, 2),
        "grown_mb": round(grown / 1e6, 1),
    }


async def clients(session: aiohttp.ClientSession, target: Target, count: int, duration_s: float) -> list[Measurement]:
    """Lets `count` clients send one request after another for so long; a refused one waits a second."""
    measured: list[Measurement] = []
    end_s = time.perf_counter() + duration_s

    async def client() -> None:
        while time.perf_counter() < end_s:
            one = await measure(session, target, PROMPT)
            if one.problem is not None:
                one.last_at_s = time.perf_counter()
                await asyncio.sleep(1)
            measured.append(one)

    await asyncio.gather(*(client() for _ in range(count)))
    return measured


def tpot_s(measured: list[Measurement]) -> float:
    """Returns the median of the requests' TPOT."""
    return statistics.median(value for one in measured if (value := one.tpot_s) is not None)


if __name__ == "__main__":
    sys.exit(main())
