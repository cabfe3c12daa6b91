"""Our training step against transformers' model and against a plain loop: speed, memory, and the same losses.

    python tests/bench/train_step.py                                   CPU, 4 x 512 tokens, bf16, the 128.3M model
    python tests/bench/train_step.py --device cuda --micro-batch 32

1. All contenders start from the same weights and take the same batches in the same dtype, in one process.
2. They step in turn, so that whatever else the machine does meets all of them; a ratio is the median over the rounds
   of a contender's time by ours in the same round.
3. Each one's peak memory is that of a process of its own that takes two steps.

The last line of stdout is the result as JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from plain_loop import PlainLlama  # noqa: E402

from model.config import ModelConfig  # noqa: E402
from model.llama import Llama  # noqa: E402
from rayjob.config import JobConfig, OptimizerConfig, TrainConfig  # noqa: E402
from rayjob.hardware import mfu_pct  # noqa: E402
from rayjob.training.feed import StepBatch, StepFeed  # noqa: E402
from rayjob.training.lone_worker import LoneWorker, lone_process_group, random_windows  # noqa: E402
from rayjob.training.peak import peak_of  # noqa: E402
from rayjob.training.schedule import WindowOrder  # noqa: E402

Step = Callable[[StepBatch], float]

N_STEPS = 100  # more than are taken


def build_ours(job: JobConfig, device: torch.device) -> Step:
    """Our own step, as a run takes it: DDP of one worker, compiled where a run would compile."""
    worker = LoneWorker(job, random_windows(job, job.train.global_batch_size), device, N_STEPS, 1)
    return lambda batch: worker.step(0, batch).loss


def build_transformers(job: JobConfig, device: torch.device) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**job.model.to_hf()))
    model.load_state_dict(initial_weights(job), strict=False)
    model.to(device).train()
    adamw = job.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=adamw.lr, betas=adamw.betas, weight_decay=adamw.weight_decay)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        return model(tokens, labels=targets, shift_labels=targets, use_cache=False).loss  # type: ignore[no-any-return]

    return usual_step(model, optimizer, loss_of, job)


def build_plain(job: JobConfig, device: torch.device) -> Step:
    model = PlainLlama(job.model)
    model.load_state_dict(initial_weights(job))
    model.to(device)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": job.optimizer.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # As nanoGPT does: fused where it first came, on GPUs.
    optimizer = torch.optim.AdamW(groups, lr=job.optimizer.lr, betas=job.optimizer.betas, fused=device.type == "cuda")
    return usual_step(model, optimizer, model, job)


CONTENDERS = {"ours": build_ours, "transformers": build_transformers, "plain": build_plain}


def initial_weights(job: JobConfig) -> dict[str, Tensor]:
    model = Llama(job.model)
    model.init_weights(job.seed)
    return model.state_dict()


def usual_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[Tensor, Tensor], Tensor], job: JobConfig
) -> Step:
    def step(batch: StepBatch) -> float:
        ((tokens, targets),) = batch.micro_batches
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            loss = loss_of(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def batches_of(job: JobConfig, device: torch.device) -> Callable[[int], StepBatch]:
    """Returns the batches of a run over random tokens, by step."""
    windows = random_windows(job, N_STEPS * job.train.global_batch_size)
    order = WindowOrder(len(windows), job.train.global_batch_size, job.seed)
    return StepFeed(windows, order, job.train.micro_batch_size, 0, 1, device).step_batch


def time_in_turn(
    steps: dict[str, Step], job: JobConfig, device: torch.device, args: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Returns seconds and losses of every contender, a value per round; the seconds are without the warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    ends_at_s = time.monotonic() + args.max_s
    losses: dict[str, list[float]] = {name: [] for name in steps}
    batch_of = batches_of(job, device)
    clock = time.process_time if args.cpu_time else time.perf_counter
    for index in range(args.warm_up + args.rounds):
        if time.monotonic() > ends_at_s and index > args.warm_up:
            break
        batch = batch_of(index)
        first = index % len(steps)
        for name in [*list(steps)[first:], *list(steps)[:first]]:
            started_at_s = clock()
            loss = steps[name](batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(clock() - started_at_s)
            losses[name].append(loss)
    return {name: times[args.warm_up :] for name, times in seconds.items()}, losses


def peak_bytes(name: str, args: argparse.Namespace) -> int:
    """Returns the peak memory of a process in which only `name` takes two steps."""
    command = [sys.executable, __file__, "--memory-of", name, "--device", args.device]
    command += ["--micro-batch", str(args.micro_batch)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def print_peak(name: str, job: JobConfig, device: torch.device) -> None:
    step, batch_of = CONTENDERS[name](job, device), batches_of(job, device)
    for index in range(2):
        step(batch_of(index))
    print(torch.cuda.max_memory_allocated() if device.type == "cuda" else _high_water_bytes())


def _high_water_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def report(job: JobConfig, device: torch.device, seconds: dict[str, list[float]]) -> dict[str, Any]:
    peak = peak_of(device, torch.bfloat16)
    found: dict[str, Any] = {}
    for name, times in seconds.items():
        tokens_per_s = job.tokens_per_step / statistics.median(times)
        mfu = mfu_pct(job.model.flops_per_token, tokens_per_s, 1, peak.tflops) if peak else None
        found[name] = {
            "step_s": round(statistics.median(times), 4),
            "tokens_per_s": round(tokens_per_s, 1),
            "mfu_pct": round(mfu, 1) if mfu else None,
            "ours_is_faster_by": round(
                statistics.median(t / o for t, o in zip(times, seconds["ours"], strict=True)), 3
            ),
        }
    return {"device": peak.name if peak else device.type, "peak_tflops": peak.tflops if peak else None} | found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Our training step against transformers and a plain loop.")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--micro-batch", type=int, default=4, help="windows of 512 tokens a step")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that do not count")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--max-s", type=float, default=1e9, help="begin no further round after so many seconds")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU seconds of the process, for a machine that does other work"
    )
    parser.add_argument("--skip-memory", action="store_true")
    parser.add_argument("--memory-of", choices=tuple(CONTENDERS), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    use_gpu = args.device == "cuda"
    if args.threads:
        torch.set_num_threads(args.threads)
    job = JobConfig(
        model=ModelConfig(vocab_size=50_304),
        train=TrainConfig(
            num_workers=1, use_gpu=use_gpu, global_batch_size=args.micro_batch, micro_batch_size=args.micro_batch
        ),
        optimizer=OptimizerConfig(warmup_steps=0),
    )
    with lone_process_group(use_gpu) as device:
        if args.memory_of:
            print_peak(args.memory_of, job, device)
            return
        peaks = {} if args.skip_memory else {name: peak_bytes(name, args) for name in CONTENDERS}
        steps = {name: build(job, device) for name, build in CONTENDERS.items()}
        seconds, losses = time_in_turn(steps, job, device, args)
        result = report(job, device, seconds) | {"losses": losses}
        result |= {"threads": torch.get_num_threads(), "clock": "CPU time" if args.cpu_time else "wall"}
        for name, peak in peaks.items():
            result[name] |= {"peak_bytes": peak, "ours_needs": round(peaks["ours"] / peak, 3)}
        print(json.dumps(result))


if __name__ == "__main__":
    main()
