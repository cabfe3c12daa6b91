"""What Ray costs a step: the same loop under TorchTrainer and under torchrun, with the same workers, and its feed.

    python tests/bench/bench_ray_share.py [--workers 4] [--steps 60] [--rounds 3]

1. The loop is the run's own step on random tokens over gloo, one thread a worker. It knows nothing of who started it.
2. torchrun and TorchTrainer take turns; rank 0 gives the median seconds of its steps without the first few.
3. The ratio is Ray's throughput by torchrun's, the median over the rounds.
4. The feed by itself: windows per second, and its share of a step.

The last line of stdout is the result as JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from model.config import ModelConfig  # noqa: E402
from rayjob.config import JobConfig, OptimizerConfig, TrainConfig  # noqa: E402
from rayjob.training.lone_worker import LoneWorker, random_windows  # noqa: E402

N_WARM_UP = 10


def configure(n_workers: int) -> JobConfig:
    return JobConfig(
        model=ModelConfig(4096, d_model=256, n_layers=4, n_heads=8, n_kv_heads=4, d_ff=704, max_seq_len=256),
        train=TrainConfig(num_workers=n_workers, use_gpu=False, global_batch_size=4 * n_workers, micro_batch_size=4),
        optimizer=OptimizerConfig(warmup_steps=0),
    )


def loop(n_workers: int, n_steps: int) -> dict[str, float]:
    """Takes steps in an open process group; returns what rank 0 measured."""
    torch.set_num_threads(1)
    config = configure(n_workers)
    windows = random_windows(config, 50 * config.train.global_batch_size)
    worker = LoneWorker(config, windows, torch.device("cpu"), n_steps, n_workers, rank=dist.get_rank())
    seconds, waits = [], []
    for index in range(n_steps):
        started_at_s = time.perf_counter()
        batch = worker.batch(index)
        worker.step(index, batch)
        seconds.append(time.perf_counter() - started_at_s)
        waits.append(batch.wait_s)
    return {"step_s": statistics.median(seconds[N_WARM_UP:]), "feed_s": statistics.median(waits[N_WARM_UP:])}


def under_torchrun(args: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.workers}"]
        command += [__file__, f"--workers={args.workers}", f"--steps={args.steps}", f"--result={result}"]
        subprocess.run(command, check=True)
        found: dict[str, float] = json.loads(result.read_text())
        return found


def torchrun_worker(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    found = loop(args.workers, args.steps)
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(found))
    dist.destroy_process_group()


def under_ray(args: argparse.Namespace) -> dict[str, float]:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        trainer = TorchTrainer(
            ray_worker,
            train_loop_config={"workers": args.workers, "steps": args.steps, "result": str(result)},
            scaling_config=ScalingConfig(num_workers=args.workers, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name="share", storage_path=folder),
        )
        trainer.fit()
        found: dict[str, float] = json.loads(result.read_text())
        return found


def ray_worker(task: dict[str, Any]) -> None:
    found = loop(task["workers"], task["steps"])
    if dist.get_rank() == 0:
        Path(task["result"]).write_text(json.dumps(found))


def windows_per_s(n_workers: int) -> float:
    """Returns the windows of 512 tokens a second that one worker's feed makes, as for the reference run."""
    config = JobConfig(
        model=ModelConfig(50_304, n_layers=1, d_model=64, n_heads=4, d_ff=64),
        train=TrainConfig(num_workers=n_workers, use_gpu=False, global_batch_size=96 * n_workers, micro_batch_size=32),
    )
    from rayjob.training.feed import StepFeed
    from rayjob.training.schedule import WindowOrder

    windows = random_windows(config, 20 * config.train.global_batch_size)
    order = WindowOrder(len(windows), config.train.global_batch_size, config.seed)
    feed = StepFeed(windows, order, config.train.micro_batch_size, 0, n_workers, torch.device("cpu"))
    feed.step_batch(0)
    started_at_s = time.perf_counter()
    for index in range(20):
        feed.step_batch(index)
    return 20 * 96 / (time.perf_counter() - started_at_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ray's share of a training step.")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.result:
        torchrun_worker(args)
        return
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_TRAIN_V2_ENABLED": "1", "OMP_NUM_THREADS": "1"}
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-") as temp:
        environment = {"env_vars": {"PYTHONPATH": str(REPOSITORY)}}
        ray.init(
            num_cpus=args.workers, include_dashboard=False, log_to_driver=False, _temp_dir=temp, runtime_env=environment
        )
        rounds = [(under_torchrun(args), under_ray(args)) for _ in range(args.rounds)]
        ray.shutdown()
    result = {
        "torchrun_step_s": [bare["step_s"] for bare, _ in rounds],
        "ray_step_s": [ray_["step_s"] for _, ray_ in rounds],
        "throughput_ratio": statistics.median(bare["step_s"] / ray_["step_s"] for bare, ray_ in rounds),
        "feed_pct_of_step": statistics.median(100 * ray_["feed_s"] / ray_["step_s"] for _, ray_ in rounds),
        "feed_windows_per_s_of_one_worker": windows_per_s(args.workers),
        # Four RTX 5090 at 60 % MFU on 826.3 MFLOP a token.
        "four_5090_take_windows_per_s": 4 * 209.5e12 * 0.6 / 826.3e6 / 512,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
