"""AdamW and Muon, cosine and warm-up/stable/decay: validation loss by tokens, same model, same tokens, three seeds.

    python tests/bench/optimizer_curves.py --storage FOLDER [--steps 400] [--lr 2e-3] [--seeds 3]

The corpus is the demo's with the tokenizer of `small.yaml`, prepared into FOLDER if it is not there; the model is
small.yaml's with half the width and depth. A seed decides the initial weights and the order of windows, and all
contenders share both. The last line of stdout is the result as JSON: mean and standard deviation over the seeds.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from rayjob.config import JobConfig  # noqa: E402
from rayjob.config_file import load_config  # noqa: E402
from rayjob.corpus.prepare import find_prepared, prepare  # noqa: E402
from rayjob.training.feed import Windows, open_windows  # noqa: E402
from rayjob.training.lone_worker import LoneWorker, lone_process_group  # noqa: E402

MODEL = "model.d_model=128 model.n_layers=2 model.n_heads=4 model.n_kv_heads=2 model.d_ff=352".split()
N_POINTS = 8
N_VAL_WINDOWS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description="Validation loss by tokens of the optimizers and schedules.")
    parser.add_argument("--storage", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, nargs="+", default=[2e-3])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"])
    parser.add_argument("--schedules", nargs="+", default=["cosine", "wsd"])
    args = parser.parse_args()
    results = {}
    for name, schedule, lr in itertools.product(args.optimizers, args.schedules, args.lr):
        contender = [f"optimizer.name={name}", f"optimizer.schedule={schedule}"]
        contender += [f"optimizer.lr={lr}", f"optimizer.min_lr={lr / 10}", f"train.max_steps={args.steps}"]
        curves = [curve(configure(args.storage, seed, contender), args.steps) for seed in range(args.seeds)]
        results[f"{name} {schedule} lr {lr:g}"] = summarise(curves)
        print(f"{name} {schedule} lr {lr:g}: {results[f'{name} {schedule} lr {lr:g}'][-1]}", flush=True)
    print(json.dumps(results))


def configure(storage: Path, seed: int, overrides: list[str]) -> JobConfig:
    small = REPOSITORY / "rayjob" / "configs" / "small.yaml"
    return load_config(small, [*MODEL, f"storage={storage}", f"seed={seed}", *overrides])


def curve(config: JobConfig, n_steps: int) -> list[tuple[int, float]]:
    """Returns (tokens, validation loss) at N_POINTS equal distances."""
    tokens_folder = prepared_tokens(config)
    windows = open_windows(tokens_folder, "train", config.model.max_seq_len)
    val_windows = open_windows(tokens_folder, "val", config.model.max_seq_len)
    points = []
    with lone_process_group(use_gpu=False) as device:
        worker = LoneWorker(config, windows, device, n_steps, n_workers=1)
        for index in range(n_steps):
            worker.step(index, worker.batch(index))
            if (index + 1) % (n_steps // N_POINTS) == 0:
                points.append(((index + 1) * config.tokens_per_step, validate(worker, val_windows)))
    return points


@torch.no_grad()
def validate(worker: LoneWorker, windows: Windows) -> float:
    nats = tokens = 0.0
    for ids in np.array_split(np.arange(min(N_VAL_WINDOWS, len(windows))), N_VAL_WINDOWS // 8):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            sums = worker.model(*windows.batch(ids, len(ids)))
        nats += sums.nats.item()
        tokens += sums.tokens.item()
    return nats / tokens


def summarise(curves: list[list[tuple[int, float]]]) -> list[dict[str, Any]]:
    return [
        {
            "tokens": points[0][0],
            "val_loss": round(statistics.mean(loss for _, loss in points), 4),
            "spread": round(statistics.stdev(loss for _, loss in points), 4) if len(points) > 1 else None,
        }
        for points in zip(*curves, strict=True)
    ]


def prepared_tokens(config: JobConfig) -> Path:
    """Returns the folder of the prepared demo corpus, with a Ray of its own if it has to be made."""
    prepared = find_prepared(config.data, config.tokenizer, config.storage_folder)
    if prepared is None:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        import ray

        with tempfile.TemporaryDirectory(prefix="ray-") as temp:
            environment = {"env_vars": {"PYTHONPATH": str(REPOSITORY)}}
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=temp, runtime_env=environment)
            prepared = prepare(config.data, config.tokenizer, config.storage_folder, config.model.max_seq_len)
            ray.shutdown()
    return prepared.tokens_folder


if __name__ == "__main__":
    main()
