"""The golden curve: the first 50 steps of `small.yaml` on its demo corpus, as numbers that later versions must meet.

    python tests/golden/curve.py          makes tests/golden/small_curve.csv again

Whoever changes the numerics on purpose makes the file again and says in the commit why and by how much it moved.
One worker takes the steps, without Ray; `prepare` is the real one.
"""

import csv
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from rayjob.config_file import load_config  # noqa: E402
from rayjob.corpus.prepare import prepare  # noqa: E402
from rayjob.training.feed import open_windows  # noqa: E402
from rayjob.training.lone_worker import LoneWorker, lone_process_group  # noqa: E402

CURVE = Path(__file__).with_name("small_curve.csv")
N_STEPS = 50


@dataclass(frozen=True, slots=True)
class Point:
    step: int
    loss: float
    grad_norm: float


def make_curve(storage: Path, *overrides: str) -> list[Point]:
    """Returns the curve; Ray must be initialised."""
    config = load_config(REPOSITORY / "rayjob" / "configs" / "small.yaml", [f"storage={storage}", *overrides])
    corpus = prepare(config.data, config.tokenizer, config.storage_folder, config.model.max_seq_len)
    windows = open_windows(corpus.tokens_folder, "train", config.model.max_seq_len)
    assert config.train.max_steps
    with lone_process_group(use_gpu=False) as device:
        worker = LoneWorker(config, windows, device, config.train.max_steps, n_workers=1)
        results = [worker.step(index, worker.batch(index)) for index in range(N_STEPS)]
    return [Point(step, result.loss, result.grad_norm) for step, result in enumerate(results, start=1)]


def read_curve() -> list[Point]:
    with CURVE.open() as file:
        return [Point(int(row["step"]), float(row["loss"]), float(row["grad_norm"])) for row in csv.DictReader(file)]


def main() -> None:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray

    with tempfile.TemporaryDirectory() as storage, tempfile.TemporaryDirectory(prefix="ray-") as temp:
        environment = {"env_vars": {"PYTHONPATH": str(REPOSITORY)}}
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=temp, runtime_env=environment)
        points = make_curve(Path(storage), *sys.argv[1:])
        ray.shutdown()
    lines = [f"{point.step},{point.loss:.5f},{point.grad_norm:.4f}" for point in points]
    CURVE.write_text("\n".join(["step,loss,grad_norm", *lines]) + "\n")
    print(f"{CURVE}: loss {points[0].loss:.4f} -> {points[-1].loss:.4f}")


if __name__ == "__main__":
    main()
