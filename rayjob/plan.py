"""`plan`: what a run will take, before money is spent. Nothing is started and nothing is read but files of the run.

1. Tokens, steps and memory follow from the configuration and the corpus, or from an estimate of it.
2. The time is that of the stated MFU: of the run's own steps where it has some on a known GPU, else assumed.
3. Other numbers of GPUs follow from the model of a step in `rayjob/step_time.py`, fitted to that time.
"""

import dataclasses
import math
import statistics
from typing import Any

from rayjob.config import JobConfig
from rayjob.corpus.blocks import n_windows
from rayjob.corpus.prepare import find_prepared
from rayjob.corpus.rows import inspect_files
from rayjob.corpus.sources import find_sources
from rayjob.hardware import GPUS, Gpu
from rayjob.memory import activation_bytes, state_bytes
from rayjob.step_time import checkpoint_bytes, fit_efficiency, micro_batch_size, micro_steps, step_time
from rayjob.training.metrics import MetricsRow, read_metrics
from rayjob.training.schedule import WindowOrder, max_steps

ASSUMED_MFU_PCT = 50.0
GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)

# BookCorpus without the copies of whole books, in tokens of an own BPE of 50,304 pieces; with them 1.04 B.
_BOOKCORPUS_TOKENS = 0.65e9
_BOOKCORPUS_TOKENS_WITH_COPIES = 1.04e9
_BYTES_PER_TOKEN = 4.2  # English novels, own BPE; small vocabularies give fewer
_STORED_BYTES_PER_TOKEN = 2.0  # uint16; Parquet packs them a little
_FITTED_STEPS = 200  # the newest of the run
_GIB = 2**30


def make_plan(config: JobConfig) -> dict[str, Any]:
    """Returns parameters, FLOPs, steps and tokens, memory and disk, and time and cost for each known GPU type."""
    tokens, basis = _train_tokens(config)
    order = WindowOrder(
        max(1, n_windows(tokens, config.model.max_seq_len)), config.train.global_batch_size, config.seed
    )
    steps = max_steps(config, order)
    total_tokens = order.windows_seen(steps) * config.model.max_seq_len
    rows = list(read_metrics(config.run_folder))[-_FITTED_STEPS:]
    mfu_pct = _measured_gpu_mfu_pct(config, rows)
    micro_batch_size, micro_batch_basis = _micro_batch_basis(config, rows)
    least_memory_gib = _least_memory_gib(config)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=micro_batch_size))
    return {
        "parameters": config.model.n_params,
        "flops_per_token": config.model.flops_per_token,
        "mflop_per_token": round(config.model.flops_per_token / 1e6, 1),
        "tokens_per_step": config.tokens_per_step,
        "micro_batch_size": micro_batch_size,
        "micro_batch_basis": micro_batch_basis,
        "grad_accum_steps": config.train.grad_accum_steps,
        "corpus_tokens": tokens,
        "corpus_tokens_basis": basis,
        "steps": steps,
        "epochs": round(total_tokens / max(1, order.n_windows * config.model.max_seq_len), 3),
        "tokens": total_tokens,
        "mfu_pct": round(mfu_pct or ASSUMED_MFU_PCT, 1),
        "mfu_basis": f"measured over {len(rows)} steps of {config.run_name}" if mfu_pct else "assumed",
        "measured": _measured(config, rows, steps),
        "gpus": config.train.max_workers,
        "memory_per_gpu_gib": round(memory_per_gpu_gib(config, micro_batch_size), 1),
        "checkpoint_gib": round(checkpoint_bytes(config.model) / _GIB, 2),
        "disk_gib": round(_disk_bytes(config, tokens) / _GIB, 1),
        "gpu_types": {
            gpu.name: _on(gpu, config, total_tokens, mfu_pct or ASSUMED_MFU_PCT)
            | {"fits": least_memory_gib <= 0.95 * gpu.memory_gib}
            for gpu in GPUS
        },
    }


def memory_per_gpu_gib(config: JobConfig, micro_batch_size: int) -> float:
    """Returns an upper estimate of what training takes on each GPU."""
    return (state_bytes(config) + activation_bytes(config, micro_batch_size)) / _GIB


def _least_memory_gib(config: JobConfig) -> float:
    """Returns what each GPU must have: a micro-batch of `auto` may become a single window."""
    size = config.train.micro_batch_size
    return memory_per_gpu_gib(config, 1 if size == "auto" else size)


def _micro_batch_basis(config: JobConfig, rows: list[MetricsRow]) -> tuple[int, str]:
    """Returns the micro-batch to reckon with and where it comes from: the run's own one where `auto` has found it."""
    if isinstance(config.train.micro_batch_size, int):
        return config.train.micro_batch_size, "configured"
    if rows and rows[-1].micro_batch_size in config.train.micro_batch_sizes:
        return rows[-1].micro_batch_size, f"found by {config.run_name}"
    return config.train.assumed_micro_batch_size, "assumed: auto measures before the first step"


def _disk_bytes(config: JobConfig, train_tokens: int) -> float:
    """Checkpoints kept, the best one and one being written; blocks and the flat copy that training reads."""
    n_checkpoints = config.checkpoint.keep + 2
    corpus = 2 * _STORED_BYTES_PER_TOKEN * train_tokens / (1 - config.data.val_fraction)
    return n_checkpoints * checkpoint_bytes(config.model) + corpus


def _train_tokens(config: JobConfig) -> tuple[int, str]:
    prepared = find_prepared(config.data, config.tokenizer, config.storage_folder)
    if prepared:
        return prepared.manifest.train.tokens, f"counted: {prepared.tokens_folder}"
    share = 1 - config.data.val_fraction
    if config.data.source == "huggingface":
        tokens = _BOOKCORPUS_TOKENS if config.data.dedup else _BOOKCORPUS_TOKENS_WITH_COPIES
        return int(share * tokens), "estimated: BookCorpus, not prepared yet"
    n_bytes = _text_bytes(config)
    return int(share * n_bytes / _BYTES_PER_TOKEN), f"estimated: {n_bytes:,} bytes at {_BYTES_PER_TOKEN} a token"


def _text_bytes(config: JobConfig) -> int:
    """Bytes of text in the sources: of Parquet the unpacked column, as the footers tell it."""
    data = config.data
    sources = find_sources(data, config.storage_folder)
    if data.source == "parquet":
        return sum(sum(file.group_bytes) for file in inspect_files(sources, data.text_column, data.doc_column))
    return sum(source.bytes for source in sources)


def _on(gpu: Gpu, config: JobConfig, tokens: int, mfu_pct: float) -> dict[str, Any]:
    """Time and cost on the configured number of GPUs at `mfu_pct`, and on other numbers by the model of a step."""
    n_gpus = config.train.max_workers
    step_s = _step_s(config, gpu, n_gpus, mfu_pct)
    efficiency = fit_efficiency(config, gpu, n_gpus, step_s)
    counts = {n: step_time(config, gpu, n, efficiency).step_s for n in GPU_COUNTS}
    return {
        **_time_and_cost(gpu, config, n_gpus, tokens, step_s),
        "usd_per_gpu_hour": gpu.usd_per_hour,
        "peak_tflops": gpu.peak_tflops,
        "memory_gib": gpu.memory_gib,
        "counts": {
            str(n): _time_and_cost(gpu, config, n, tokens, seconds)
            | {
                "scaling_pct": round(100 * counts[1] / (n * seconds), 1),
                "micro_batch_size": micro_batch_size(config, n),
                "grad_accum_steps": micro_steps(config, n),
            }
            for n, seconds in counts.items()
            if n <= config.train.global_batch_size
        },
    }


def _step_s(config: JobConfig, gpu: Gpu, n_gpus: int, mfu_pct: float) -> float:
    flops = config.tokens_per_step * config.model.flops_per_token
    return flops / (n_gpus * gpu.peak_tflops * 1e12 * mfu_pct / 100)


def _time_and_cost(gpu: Gpu, config: JobConfig, n_gpus: int, tokens: int, step_s: float) -> dict[str, Any]:
    time_s = step_s * tokens / config.tokens_per_step
    saves = _saves(config, time_s, tokens)
    return {
        "step_s": round(step_s, 4),
        "time_s": round(time_s, 1),
        "cost_usd": round(time_s / 3600 * gpu.usd_per_hour * n_gpus, 2),
        "saves": saves,
        "checkpoint_traffic_gib": round(saves * checkpoint_bytes(config.model) / _GIB, 1),
    }


def _saves(config: JobConfig, time_s: float, tokens: int) -> int:
    """Checkpoints written over the run: when due by time or steps, and at every validation."""
    steps = math.ceil(tokens / config.tokens_per_step)
    saves = steps / config.train.eval_interval
    if config.checkpoint.interval_s is not None:
        saves += time_s / config.checkpoint.interval_s
    if config.checkpoint.interval_steps is not None:
        saves += steps / config.checkpoint.interval_steps
    return math.ceil(min(saves, steps))


def _measured(config: JobConfig, rows: list[MetricsRow], steps: int) -> dict[str, Any] | None:
    """What the run's own newest steps say about the rest of it, on whatever it runs; None before its first step."""
    if not rows:
        return None
    tokens_per_s = statistics.median(row.tokens_per_s for row in rows)
    step_s = config.tokens_per_step / tokens_per_s
    left_s = max(0, steps - rows[-1].step) * step_s
    usd_per_s = config.cost.gpu_usd_per_hour * (rows[-1].workers or config.train.max_workers) / 3600
    return {
        "steps": len(rows),
        "tokens_per_s": round(tokens_per_s, 1),
        "step_s": round(step_s, 4),
        "time_left_s": round(left_s, 1),
        "cost_left_usd": round(left_s * usd_per_s, 2),
        "mfu_pct": _median_mfu_pct(rows),
    }


def _measured_gpu_mfu_pct(config: JobConfig, rows: list[MetricsRow]) -> float | None:
    """The MFU of the run's steps if they ran on GPUs; a CPU's says nothing about a GPU."""
    return _median_mfu_pct(rows) if config.train.use_gpu else None


def _median_mfu_pct(rows: list[MetricsRow]) -> float | None:
    found = [row.mfu_pct for row in rows if row.mfu_pct is not None]
    return statistics.median(found) if found else None


def render_plan(plan: dict[str, Any]) -> str:
    """Returns the plan as lines for people."""
    lines = [
        f"parameters        {plan['parameters']:,}",
        f"per token         {plan['mflop_per_token']} MFLOP",
        f"per step          {plan['tokens_per_step']:,} tokens ({plan['grad_accum_steps']} micro-steps "
        f"of {plan['micro_batch_size']} windows, {plan['micro_batch_basis']})",
        f"corpus            {plan['corpus_tokens']:,} tokens ({plan['corpus_tokens_basis']})",
        f"run               {plan['steps']:,} steps, {plan['tokens']:,} tokens, {plan['epochs']} epochs",
        f"memory per GPU    {plan['memory_per_gpu_gib']} GiB",
        f"storage           {plan['disk_gib']} GiB, {plan['checkpoint_gib']} GiB a checkpoint",
    ]
    if measured := plan["measured"]:
        lines.append(f"measured          {render_measured(measured)}")
    lines.append(f"at {plan['mfu_pct']:.0f} % MFU ({plan['mfu_basis']}) on {plan['gpus']} GPUs:")
    is_auto = plan["micro_batch_basis"] != "configured"
    remedy = "lower model.max_seq_len, or take a smaller model" if is_auto else "lower train.micro_batch_size"
    for name, on in plan["gpu_types"].items():
        fits = "" if on["fits"] else f"  does not fit in {on['memory_gib']} GiB: {remedy}"
        lines.append(
            f"  {name:<10} {on['time_s'] / 3600:6.2f} h  ${on['cost_usd']:<8.2f} at ${on['usd_per_gpu_hour']:.2f}, "
            f"{on['checkpoint_traffic_gib']:.0f} GiB of checkpoints written{fits}"
        )
    lines.append("by number of GPUs, in hours and $ (modelled: see rayjob/step_time.py):")
    for name, on in plan["gpu_types"].items():
        counts = "  ".join(f"{n}: {at['time_s'] / 3600:.2f} h ${at['cost_usd']:.2f}" for n, at in on["counts"].items())
        lines.append(f"  {name:<10} {counts}")
    return "\n".join(lines)


def render_measured(measured: dict[str, Any]) -> str:
    """Returns a line about the run's own pace."""
    return (
        f"{measured['tokens_per_s']:,.0f} tokens/s over {measured['steps']} steps; "
        f"{measured['time_left_s'] / 3600:.2f} h and ${measured['cost_left_usd']:.2f} to go"
    )


def plan_line(config: JobConfig) -> str:
    """Returns the plan in one line, for the start of a run."""
    plan = make_plan(config)
    parts = [
        f"plan: {plan['steps']:,} steps, {plan['tokens']:,} tokens",
        f"{plan['parameters'] / 1e6:.1f} M parameters",
        f"storage {plan['disk_gib']} GiB",
    ]
    if plan["measured"]:
        parts.append(render_measured(plan["measured"]))
    elif config.train.use_gpu:
        types = ", ".join(
            f"{name} {on['time_s'] / 3600:.1f} h ${on['cost_usd']:.2f}" for name, on in plan["gpu_types"].items()
        )
        parts.append(f"at {plan['mfu_pct']:.0f} % MFU on {plan['gpus']} GPUs: {types}")
    else:
        parts.append("time and cost are known after the first steps")
    return " | ".join(parts)
