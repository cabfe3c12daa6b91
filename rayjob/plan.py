"""`plan`: what a run will take, before money is spent. Nothing is started and nothing is read but the manifest."""

from typing import Any

from rayjob.config import JobConfig
from rayjob.corpus.blocks import n_windows
from rayjob.corpus.prepare import find_prepared
from rayjob.corpus.rows import inspect_files
from rayjob.corpus.sources import find_sources
from rayjob.hardware import GPUS, Gpu
from rayjob.training.schedule import WindowOrder, max_steps

ASSUMED_MFU_PCT = 50.0

# BookCorpus without the copies of whole books, in tokens of an own BPE of 50,304 pieces; with them 1.04 B.
_BOOKCORPUS_TOKENS = 0.65e9
_BOOKCORPUS_TOKENS_WITH_COPIES = 1.04e9
_BYTES_PER_TOKEN = 4.2  # English novels, own BPE; small vocabularies give fewer
_GIB = 2**30


def make_plan(config: JobConfig) -> dict[str, Any]:
    """Returns parameters, FLOPs, steps and tokens, and time and cost for each known GPU type."""
    tokens, basis = _train_tokens(config)
    order = WindowOrder(
        max(1, n_windows(tokens, config.model.max_seq_len)), config.train.global_batch_size, config.seed
    )
    steps = max_steps(config, order)
    total_tokens = order.windows_seen(steps) * config.model.max_seq_len
    flops = config.model.flops_per_token * total_tokens
    return {
        "parameters": config.model.n_params,
        "flops_per_token": config.model.flops_per_token,
        "mflop_per_token": round(config.model.flops_per_token / 1e6, 1),
        "tokens_per_step": config.tokens_per_step,
        "grad_accum_steps": config.train.grad_accum_steps,
        "corpus_tokens": tokens,
        "corpus_tokens_basis": basis,
        "steps": steps,
        "epochs": round(total_tokens / max(1, order.n_windows * config.model.max_seq_len), 3),
        "tokens": total_tokens,
        "mfu_pct": ASSUMED_MFU_PCT,
        "gpus": config.train.max_workers,
        "memory_per_gpu_gib": round(memory_per_gpu_gib(config), 1),
        "gpu_types": {gpu.name: _on(gpu, config, flops) for gpu in GPUS},
    }


def memory_per_gpu_gib(config: JobConfig) -> float:
    """Returns an upper estimate: weights, gradients and moments in fp32, bf16 copies, activations and logits.

    Activations of a layer per token, kept for backward in bf16: about 10 vectors of d_model and 4 of d_ff.
    """
    model, tokens = config.model, config.train.micro_batch_size * config.model.max_seq_len
    width_bytes = 2 if config.train.precision == "bf16" else 4
    state = model.n_params * (16 + width_bytes)
    activations = tokens * model.n_layers * (10 * model.d_model + 4 * model.d_ff) * width_bytes
    logits = tokens * model.vocab_size * (width_bytes + 4)
    return (state + activations + logits) / _GIB


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


def _on(gpu: Gpu, config: JobConfig, flops: float) -> dict[str, Any]:
    n_gpus = config.train.max_workers
    time_s = flops / (n_gpus * gpu.peak_tflops * 1e12 * ASSUMED_MFU_PCT / 100)
    price = gpu.usd_per_hour
    return {
        "time_s": round(time_s, 1),
        "cost_usd": round(time_s / 3600 * price * n_gpus, 2),
        "usd_per_gpu_hour": price,
        "peak_tflops": gpu.peak_tflops,
        "memory_gib": gpu.memory_gib,
        "fits": memory_per_gpu_gib(config) <= 0.95 * gpu.memory_gib,
    }


def render_plan(plan: dict[str, Any]) -> str:
    """Returns the plan as lines for people."""
    lines = [
        f"parameters        {plan['parameters']:,}",
        f"per token         {plan['mflop_per_token']} MFLOP",
        f"per step          {plan['tokens_per_step']:,} tokens ({plan['grad_accum_steps']} micro-steps)",
        f"corpus            {plan['corpus_tokens']:,} tokens ({plan['corpus_tokens_basis']})",
        f"run               {plan['steps']:,} steps, {plan['tokens']:,} tokens, {plan['epochs']} epochs",
        f"memory per GPU    {plan['memory_per_gpu_gib']} GiB",
        f"at {plan['mfu_pct']:.0f} % MFU on {plan['gpus']} GPUs:",
    ]
    for name, on in plan["gpu_types"].items():
        fits = "" if on["fits"] else f"  does not fit in {on['memory_gib']} GiB: lower train.micro_batch_size"
        lines.append(
            f"  {name:<10} {on['time_s'] / 3600:6.2f} h  ${on['cost_usd']:<8.2f} at ${on['usd_per_gpu_hour']:.2f}{fits}"
        )
    return "\n".join(lines)
