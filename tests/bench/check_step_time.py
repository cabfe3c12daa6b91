"""Holds the model of a step in rayjob/step_time.py against measured steps on this machine's cores.

    python tests/bench/check_step_time.py [--steps 12]

1. A core stands for a GPU: its peak, its memory and the link between two processes (gloo) are measured first.
2. The model's one free number, the efficiency, is fitted to the steps of one worker at the smallest batch.
3. Every other point, of one and of two workers, is then foretold and measured.

An idle machine is needed, with a core for each worker: gloo computes on the cores that the model takes for idle while
gradients are reduced, so on CPUs it is the model's worst case. The last line of stdout is the result as JSON.
"""

import argparse
import dataclasses
import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from model.config import ModelConfig  # noqa: E402
from rayjob.config import JobConfig, TrainConfig  # noqa: E402
from rayjob.hardware import Gpu  # noqa: E402
from rayjob.step_time import fit_efficiency, micro_steps, step_time  # noqa: E402
from rayjob.training.link import measure_link  # noqa: E402
from rayjob.training.lone_worker import LoneWorker, random_windows  # noqa: E402
from rayjob.training.peak import peak_of  # noqa: E402

CPU = torch.device("cpu")
MODEL = ModelConfig(4096, d_model=256, n_layers=4, n_heads=8, n_kv_heads=4, d_ff=704, max_seq_len=256)
MICRO_BATCH = 4
POINTS = [(1, 8), (1, 16), (2, 8), (2, 16), (2, 32)]  # workers and windows of a step; the first is fitted to
N_WARM_UP = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    step_s: float
    peak_tflops: float
    link_gb_per_s: float
    memory_gb_per_s: float


def config_of(n_workers: int, global_batch_size: int) -> JobConfig:
    train = TrainConfig(
        num_workers=n_workers, use_gpu=False, global_batch_size=global_batch_size, micro_batch_size=MICRO_BATCH
    )
    return JobConfig(model=MODEL, train=train)


def run_worker(rank: int, n_workers: int, global_batch_size: int, port: int, n_steps: int) -> Measured:
    """Returns the median step of a worker, and what its core is able to do."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=n_workers)
    config = config_of(n_workers, global_batch_size)
    link = measure_link(config.train.gradient_bytes * config.model.n_params, CPU, limit_s=60.0)
    windows = random_windows(config, (N_WARM_UP + n_steps) * global_batch_size)
    worker = LoneWorker(config, windows, CPU, N_WARM_UP + n_steps, n_workers, rank)
    seconds = []
    for index in range(N_WARM_UP + n_steps):
        batch = worker.batch(index)
        worker.step(index, batch)
        seconds.append(batch.seconds_since_start())
    peak = peak_of(CPU, worker.precision)
    assert peak
    dist.destroy_process_group()
    step_s = statistics.median(seconds[N_WARM_UP:])
    return Measured(step_s, peak.tflops, link.bus_gb_per_s if link else 0.0, memory_gb_per_s())


def memory_gb_per_s() -> float:
    """Returns what a copy that no cache holds reads and writes."""
    source = torch.ones(1 << 25)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(5):
        started_at_s = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started_at_s)
    return 2 * source.nbytes / min(seconds) / 1e9


def measure(n_workers: int, global_batch_size: int, n_steps: int) -> Measured:
    """Returns what rank 0 of a group measures; the steps of all end together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    calls = [(rank, n_workers, global_batch_size, port, n_steps) for rank in range(n_workers)]
    with mp.get_context("spawn").Pool(n_workers) as pool:
        return pool.starmap(run_worker, calls, chunksize=1)[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    n_steps = parser.parse_args().steps
    load_average = round(os.getloadavg()[0], 1)
    measured = {point: measure(*point, n_steps) for point in POINTS}
    alone, pair = measured[POINTS[0]], measured[POINTS[-1]]
    core = Gpu("core", (), alone.peak_tflops, "measured", 0, alone.memory_gb_per_s, pair.link_gb_per_s, 0)
    efficiency = fit_efficiency(config_of(*POINTS[0]), core, 1, alone.step_s)
    points = []
    for (n_workers, batch), found in measured.items():
        config = config_of(n_workers, batch)
        foretold = step_time(config, core, n_workers, efficiency)
        error_pct = 100 * (foretold.step_s / found.step_s - 1)
        points.append(
            {"workers": n_workers, "windows": batch, "micro_steps": micro_steps(config, n_workers)}
            | {"measured_s": round(found.step_s, 4), "model_s": round(foretold.step_s, 4)}
            | {"exposed_all_reduce_s": round(foretold.exposed_s, 4), "error_pct": round(error_pct, 1)}
        )
    result = {
        "load_average": load_average,  # before: with others on the cores it says nothing about the model
        "peak_tflops": round(core.peak_tflops, 4),
        "memory_gb_per_s": round(core.memory_gb_per_s, 2),
        "link_gb_per_s": round(core.link_gb_per_s, 3),
        "efficiency": round(efficiency, 3),
        "points": points,
        "largest_error_pct": max(abs(float(str(point["error_pct"]))) for point in points[1:]),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
