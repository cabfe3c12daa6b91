"""Measures any OpenAI-compatible server: TTFT, TPOT, end-to-end times, tokens/s, and how near memory's limit.

python -m serving.bench --concurrency 1,8,64 --plot bench.svg --json bench.json
python -m serving.bench --url http://HOST/v1 --label peer --concurrency 1,8,64 --with bench.json --plot both.svg

A table goes to stderr, one JSON object to the last line of stdout.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from serving.benchmark.ceiling import KV_BYTES_PER_TOKEN, WEIGHT_BYTES, Ceiling, measure_bandwidth_gb_s
from serving.benchmark.client import Target
from serving.benchmark.load import Load, run_load
from serving.benchmark.plot import render
from serving.benchmark.prompts import BenchmarkError, fixed_prompts, make_prompts
from serving.benchmark.summary import summarize


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns its exit code: 0 done, 2 bad usage, 1 when requests failed."""
    arguments = _parse(argv)
    try:
        earlier = [json.loads(path.read_text()) for path in arguments.others]
        report = asyncio.run(_measure(arguments))
    except (BenchmarkError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot is not None:
        kind = "rate" if arguments.rate and not arguments.concurrency else "concurrency"
        arguments.plot.write_text(render([report, *earlier], kind))
    print(json.dumps(report))
    return 0 if all(not point["problems"] for point in report["points"]) else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m serving.bench", description="Measure an OpenAI-compatible server.")
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000/v1", help="base of the server's API")
    add("--model", help="default: the first that the server lists")
    add("--label", help="name in the plot; default: the URL")
    add("--concurrency", type=_numbers, default=[], metavar="N,N", help="numbers of clients; default: 1,8,64")
    add("--rate", type=_numbers, default=[], metavar="R,R", help="requests a second that arrive at random")
    add("--requests", type=int, help="requests of each point; default: 4 a client, 32 at least")
    add("--prompt_tokens", type=int, default=64)
    add("--max_tokens", type=int, default=128)
    add("--prompts", type=Path, metavar="FILE", help="a prompt a line, in place of random words")
    add("--warmup", type=int, default=2, help="requests before the first point")
    add("--timeout_s", type=float, default=300)
    add("--seed", type=int, default=0, help="of prompts and arrivals")
    add("--stop_at_eos", action="store_true", help="do not ask for exactly max_tokens tokens by ignore_eos")
    add("--bandwidth_gb_s", help='memory bandwidth, or "measure" for that of this machine: adds the ceiling')
    add("--weight_bytes", type=int, default=WEIGHT_BYTES, help="default: the reference model in bf16")
    add("--kv_bytes_per_token", type=int, default=KV_BYTES_PER_TOKEN)
    add("--json", type=Path, metavar="FILE", help="write the report")
    add("--plot", type=Path, metavar="FILE", help="write an SVG")
    add("--with", type=Path, dest="others", action="append", default=[], metavar="FILE", help="reports to draw too")
    return parser.parse_args(argv)


def _numbers(text: str) -> list[float]:
    """Several positive numbers, separated by commas."""
    values = [float(part) for part in text.split(",")]
    if not all(0 < value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"expected numbers above 0, got {text}")
    return values


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    ceiling = _ceiling(arguments)
    target = await _target(arguments)
    loads = _loads(arguments)
    prompts = await _prompts(arguments, target, most=max(load.num_requests for load in loads))
    options = {"seed": arguments.seed, "timeout_s": arguments.timeout_s}
    if arguments.warmup:
        await run_load(target, Load("concurrency", 1, arguments.warmup), prompts, **options)
    points = []
    for load in loads:
        points.append(_with_ceiling(summarize(await run_load(target, load, prompts, **options)), ceiling))
        _say(points[-1])
    return {
        "label": arguments.label or arguments.url,
        "url": arguments.url,
        "model": target.body["model"],
        "client": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
        "prompt_tokens": arguments.prompt_tokens,
        "max_tokens": arguments.max_tokens,
        "bandwidth_gb_s": None if ceiling is None else round(ceiling.bandwidth_gb_s, 1),
        "points": points,
    }


def _ceiling(arguments: argparse.Namespace) -> Ceiling | None:
    """The limit that was asked for; measured before the load, on an idle machine."""
    if arguments.bandwidth_gb_s is None:
        return None
    is_measured = arguments.bandwidth_gb_s == "measure"
    bandwidth_gb_s = measure_bandwidth_gb_s() if is_measured else float(arguments.bandwidth_gb_s)
    return Ceiling(bandwidth_gb_s, arguments.weight_bytes, arguments.kv_bytes_per_token)


async def _target(arguments: argparse.Namespace) -> Target:
    """The server with the one body of all requests; its key comes from the environment, not from the command line."""
    body = {"model": arguments.model, "max_tokens": arguments.max_tokens, "temperature": 0}
    if not arguments.stop_at_eos:
        body["ignore_eos"] = True
    target = Target(arguments.url.rstrip("/"), body, os.environ.get("API_KEY"))
    if arguments.model is None:
        body["model"] = await _first_model(target)
    return target


async def _first_model(target: Target) -> str:
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{target.url}/models", headers=target.headers()) as response,
        ):
            return str((await response.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
        message = f"{target.url}/models does not list a model ({type(error).__name__}): give --model, or API_KEY."
        raise BenchmarkError(message) from None


def _loads(arguments: argparse.Namespace) -> list[Load]:
    concurrency = arguments.concurrency or ([] if arguments.rate else [1, 8, 64])
    values = [("concurrency", value) for value in concurrency] + [("rate", value) for value in arguments.rate]
    return [Load(kind, value, arguments.requests or max(32, int(4 * value))) for kind, value in values]


async def _prompts(arguments: argparse.Namespace, target: Target, *, most: int) -> list[str]:
    if arguments.prompts is not None:
        return fixed_prompts(arguments.prompts.read_text(encoding="utf-8").splitlines())
    options = {"seed": arguments.seed, "timeout_s": arguments.timeout_s}
    return await make_prompts(target, arguments.prompt_tokens, most, **options)


def _with_ceiling(point: dict[str, Any], ceiling: Ceiling | None) -> dict[str, Any]:
    """Adds the ceiling of a fixed number of clients, at the mean length of a sequence while it is decoded."""
    if ceiling is None or "concurrency" not in point:
        return point
    context = point["prompt_tokens_mean"] + point["completion_tokens_mean"] / 2
    limit = ceiling.tokens_per_s(point["concurrency"], context)
    share = round(100 * point["tokens_per_s"] / limit, 1)
    return {**point, "ceiling_tokens_per_s": round(limit, 1), "ceiling_pct": share}


def _say(point: dict[str, Any]) -> None:
    kind = "concurrency" if "concurrency" in point else "rate"
    times = " | ".join(
        f"{name} {'/'.join(map(str, point[f'{name}_ms'].values()))} ms" for name in ("ttft", "tpot", "e2e")
    )
    share = f" | {point['ceiling_pct']} % of the ceiling" if "ceiling_pct" in point else ""
    problems = f" | problems {point['problems']}" if point["problems"] else ""
    print(f"{kind} {point[kind]:g} | {point['tokens_per_s']} tokens/s{share} | {times}{problems}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
