"""Many requests: a fixed number of clients, or a fixed rate of arrivals."""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from serving.benchmark.client import Measurement, Target, measure


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive.

    Attributes:
        kind: "concurrency" for so many clients that each send the next request when the last is answered; "rate"
            for so many arrivals a second, at the random times of a Poisson process, however slow the answers are.
        value: Clients, or requests a second.
        num_requests: Requests in all.
    """

    kind: str
    value: float
    num_requests: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The measurements of one load and how long it took from the first request to the last answer."""

    load: Load
    measurements: list[Measurement]
    elapsed_s: float


async def run_load(target: Target, load: Load, prompts: Sequence[str], *, seed: int, timeout_s: float) -> Outcome:
    """Sends `load.num_requests` requests with the prompts in turn and returns what happened to each."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        sent = (prompts[number % len(prompts)] for number in range(load.num_requests))
        started_at_s = time.perf_counter()
        if load.kind == "concurrency":
            measurements = await _closed(session, target, sent, int(load.value))
        else:
            measurements = await _open(session, target, sent, load.value, random.Random(seed))
        return Outcome(load, measurements, time.perf_counter() - started_at_s)


async def _closed(
    session: aiohttp.ClientSession, target: Target, prompts: Iterator[str], clients: int
) -> list[Measurement]:
    measurements: list[Measurement] = []

    async def client() -> None:
        for prompt in prompts:  # one iterator for all: each takes the next prompt
            measurements.append(await measure(session, target, prompt))

    await asyncio.gather(*(client() for _ in range(clients)))
    return measurements


async def _open(
    session: aiohttp.ClientSession, target: Target, prompts: Iterator[str], rate: float, gaps: random.Random
) -> list[Measurement]:
    loop = asyncio.get_running_loop()
    due_at_s, requests = loop.time(), []
    for prompt in prompts:
        # Against the clock, not from request to request: a late start must not lower the rate.
        await asyncio.sleep(due_at_s - loop.time())
        requests.append(asyncio.create_task(measure(session, target, prompt)))
        due_at_s += gaps.expovariate(rate)
    return await asyncio.gather(*requests)
