"""Gaps between the tokens of running streams, before and while 100 long prompts arrive; the last stdout line is JSON.

    python -m tests.bench.stream_gaps --checkpoint storage/runs/small [--streams 32]

Reported: the 50th and 99th percentile of the gaps in both phases, over all streams, and that of the second phase by
those of the first.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from tests.serving_server import http_server

LONG_PROMPTS, LONG_TOKENS, STREAM_TOKENS, QUIET_TOKENS = 100, 400, 480, 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    options = {"num_slots": 64, "max_waiting": 128, "num_threads": args.threads, "dtype": args.dtype}
    with http_server(args.checkpoint.resolve(), **options) as server:
        report = asyncio.run(measure(f"{server.url}/generate", args.streams))
    print(json.dumps(report))
    return 0 if report["p99_ratio"] <= 3 else 1


class Stream:
    """A running stream: when each of its tokens came, and whether QUIET_TOKENS are there."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.is_under_way = asyncio.Event()

    async def read(self, session: aiohttp.ClientSession, url: str, tokens: list[int]) -> None:
        body = {"prompt": tokens, "max_new_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
        async with session.post(url, json=body) as response:
            async for line in response.content:
                if b'"token"' in line:
                    self.times_s.append(time.perf_counter())
                if len(self.times_s) == QUIET_TOKENS:
                    self.is_under_way.set()


async def measure(url: str, num_streams: int) -> dict[str, float]:
    """Runs both phases against a server of this process."""
    rng = random.Random(0)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, raise_for_status=True) as session:
        streams = [Stream() for _ in range(num_streams)]
        async with asyncio.TaskGroup() as group:  # a stream that fails ends the rest
            for one in streams:
                group.create_task(one.read(session, url, prompt(rng, 16)))
            await asyncio.gather(*(one.is_under_way.wait() for one in streams))
            arrived_at_s = time.perf_counter()
            bodies = [{"prompt": prompt(rng, LONG_TOKENS), "max_new_tokens": 1} for _ in range(LONG_PROMPTS)]
            await asyncio.gather(*(answer(session, url, body) for body in bodies))
            answered_at_s = time.perf_counter()
    times_s = [one.times_s for one in streams]
    joined = max(times[0] for times in times_s)  # from here on all streams run
    quiet, crowded = gaps_ms(times_s, joined, arrived_at_s), gaps_ms(times_s, arrived_at_s, answered_at_s)
    report = {
        f"{name}_p{percent}_ms": round(float(np.percentile(gaps, percent)), 1)
        for name, gaps in (("quiet", quiet), ("crowded", crowded))
        for percent in (50, 99)
    }
    return {
        **report,
        "p99_ratio": round(report["crowded_p99_ms"] / report["quiet_p99_ms"], 2),
        "p99_by_quiet_median": round(report["crowded_p99_ms"] / report["quiet_p50_ms"], 2),
        "long_prompts_s": round(answered_at_s - arrived_at_s, 2),
        "gaps": len(crowded),
    }


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(3, 250) for _ in range(num_tokens)]


async def answer(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with session.post(url, json=body) as response:
        await response.read()


def gaps_ms(times_s: list[list[float]], start_s: float, end_s: float) -> list[float]:
    """Returns the gaps of all streams that end in a span of time."""
    return [
        1000 * (later - earlier)
        for times in times_s
        for earlier, later in zip(times, times[1:], strict=False)
        if start_s < later <= end_s
    ]


if __name__ == "__main__":
    sys.exit(main())
