"""`profile`: where the time of a step goes, on this machine and without Ray.

One process takes a worker's share of a few steps, with the configuration's model, optimizer, precision and compilation,
on random tokens: so nothing has to be prepared, and nothing but `profile/` of the run's folder is written. It waits for
no other worker, so the all-reduce of the gradients is not in it.
"""

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rayjob.config import JobConfig
from rayjob.hardware import mfu_pct
from rayjob.training.lone_worker import LoneWorker, lone_process_group, random_windows
from rayjob.training.peak import peak_of

TRACE_FILE = "trace.json.gz"
N_OPERATORS = 10
_WARM_UP_STEPS = 2  # the first compiles, or fills the allocator; the second is like all others


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator over all profiled steps."""

    name: str
    calls: int
    time_s: float  # of its own, without what it calls
    share_pct: float  # of the time of all operators


@dataclass(frozen=True, slots=True)
class Profile:
    trace: Path  # opens in https://ui.perfetto.dev
    device: str
    steps: int
    step_s: float  # median, measured with the profiler off
    tokens_per_s: float
    mfu_pct: float | None
    peak: str | None
    operators: list[Operator]  # the dearest, by their own time on the device

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"trace": str(self.trace)}


def profile_steps(config: JobConfig, n_steps: int = 3) -> Profile:
    """Runs `n_steps` without the profiler and as many with it, and writes the trace into the run's folder.

    Raises:
        ConfigError: train.use_gpu without a GPU.
    """
    folder = config.run_folder / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    n_workers = config.train.max_workers
    windows = random_windows(config, config.train.global_batch_size)
    with lone_process_group(config.train.use_gpu) as device:
        worker = LoneWorker(config, windows, device, _WARM_UP_STEPS + 2 * n_steps, n_workers)
        return _profile(worker, config, device, n_steps, folder / TRACE_FILE)


def _profile(worker: LoneWorker, config: JobConfig, device: torch.device, n_steps: int, trace: Path) -> Profile:
    is_gpu = device.type == "cuda"
    batch = worker.batch(0)

    def timed_step() -> float:
        started_at_s = time.perf_counter()
        worker.step(0, batch)
        if is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - started_at_s

    for _ in range(_WARM_UP_STEPS):
        timed_step()
    step_s = statistics.median(timed_step() for _ in range(n_steps))
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(n_steps):
            with record_function("step"):
                timed_step()
    profiler.export_chrome_trace(str(trace))
    peak = peak_of(device, worker.precision)
    tokens_per_s = sum(targets.numel() for _, targets in batch.micro_batches) / step_s
    return Profile(
        trace=trace,
        device=torch.cuda.get_device_name() if is_gpu else f"CPU, {torch.get_num_threads()} threads",
        steps=n_steps,
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        mfu_pct=mfu_pct(config.model.flops_per_token, tokens_per_s, 1, peak.tflops) if peak else None,
        peak=f"{peak.tflops:.2f} TFLOPS ({peak.basis})" if peak else None,
        operators=_dearest(profiler, is_gpu),
    )


def _dearest(profiler: profile, is_gpu: bool) -> list[Operator]:
    """The operators with the most time of their own, on the GPU where there is one."""
    times_us = {
        event.key: (event.self_device_time_total if is_gpu else event.self_cpu_time_total, event.count)
        for event in profiler.key_averages()
        if event.key != "step"
    }
    total_us = sum(time_us for time_us, _ in times_us.values()) or 1.0
    dearest = sorted(times_us.items(), key=lambda item: -item[1][0])[:N_OPERATORS]
    return [
        Operator(name, calls, time_us / 1e6, round(100 * time_us / total_us, 1)) for name, (time_us, calls) in dearest
    ]


def render_profile(found: Profile) -> str:
    """Returns the profile as lines for people."""
    mfu = f", {found.mfu_pct:.1f} % of {found.peak}" if found.mfu_pct is not None else ""
    lines = [
        f"{found.step_s:.3f} s a step, {found.tokens_per_s:,.0f} tokens/s on {found.device}{mfu}",
        f"{'operator':<56} {'calls':>7} {'self s':>9} {'share':>7}",
    ]
    lines += [f"{o.name[:56]:<56} {o.calls:>7} {o.time_s:>9.3f} {o.share_pct:>6.1f}%" for o in found.operators]
    return "\n".join([*lines, f"trace: {found.trace} (open in https://ui.perfetto.dev)"])
