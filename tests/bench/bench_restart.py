"""What a restart costs: from the kill of a worker, and from the command after the kill of everything, to the next step.

    python tests/bench/bench_restart.py FOLDER [--repeat 3]

The model and the two workers are those of rayjob/configs/small.yaml, on a made-up corpus. The last line is JSON, with
what the command printed on the way in seconds after it was given. Run it on an idle machine.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from cluster.settings import REPOSITORY
from tests import kills
from tests.bench.bench_soak import machine_in
from tests.e2e.test_run_all import Machine

MODEL = (
    "model.d_model=",
    "model.n_layers=",
    "model.n_heads=",
    "model.n_kv_heads=",
    "model.d_ff=",
    "model.max_seq_len=",
)
STEPS = 100_000  # it never ends by itself


class Command:
    """The one command, with a clock for what it prints."""

    def __init__(self, machine: Machine) -> None:
        small = [setting for setting in machine.arguments("restart", STEPS) if not setting.startswith(MODEL)]
        settings = [*small, "train.epochs=3", "checkpoint.interval_steps=20", "train.eval_interval=1000000"]
        self.begun_at_s = time.time()
        self.process = subprocess.Popen(
            ["bash", str(REPOSITORY / "cluster" / "run_all.sh"), *settings],
            cwd=machine.folder,
            env={**os.environ, **machine.variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.printed: list[tuple[float, str]] = []
        assert self.process.stdout is not None
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            self.printed.append((round(time.time() - self.begun_at_s, 1), line.strip()[:90]))


def await_step(is_new: Callable[[float], bool], run_folder: Path) -> float:
    """Returns the time of day at which the first step ended for which `is_new` holds."""
    for _ in kills.ticks("the next step"):
        row = kills.last_row(run_folder)
        if row and is_new(row.wall_time):
            new = [one.wall_time for one in kills.read_metrics(run_folder) if is_new(one.wall_time)]
            return min(new)
    raise AssertionError


def worker_restart_s(parts: kills.Parts) -> float:
    kills.wait_until(lambda: bool(parts.rank_0()) and any(parts.run_folder.glob("step_*/COMPLETE")), "a checkpoint")
    begun, killed_at_s = kills.starts(parts.run_folder), time.time()
    parts.kill("worker")
    kills.wait_until(lambda: kills.starts(parts.run_folder) > begun, "the next start")
    return await_step(lambda at_s: at_s > killed_at_s, parts.run_folder) - killed_at_s


def whole_restart_s(machine: Machine, parts: kills.Parts, command: Command) -> tuple[float, Command]:
    kills.kill([psutil.Process(command.process.pid), *parts.members()])
    command.process.wait()
    again = Command(machine)
    return await_step(lambda at_s: at_s > again.begun_at_s, parts.run_folder) - again.begun_at_s, again


def measure(machine: Machine, repeat: int) -> dict[str, Any]:
    parts, command = machine.parts("restart"), Command(machine)
    worker_s, whole_s, printed = [], [], []
    for _ in range(repeat):
        worker_s.append(round(worker_restart_s(parts), 1))
        seconds, command = whole_restart_s(machine, parts, command)
        whole_s.append(round(seconds, 1))
        printed = command.printed[:]
    command.process.terminate()
    command.process.wait()
    return {"worker_restart_s": worker_s, "whole_restart_s": whole_s, "printed": printed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    with machine_in(args.folder.absolute()) as machine:
        result = measure(machine, args.repeat)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
