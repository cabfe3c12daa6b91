"""What a save costs the steps around it, with the full 128.3M-parameter model on CPU.

    python tests/bench/bench_save_stall.py [--workers 2] [--saves 3] [--steps-between 8] [--folder DIR]

1. Each worker is a process with the model under DDP over gloo, the fused AdamW and the product's step, saver and writer
   of metrics; without Ray, whose barrier of a report is measured by the integration tests' steps.
2. Steps run without end; every so many steps a save begins, as the timer of a run would have it.
3. A step's time goes from the end of the step before it to its own end, with what a save adds at the boundary.

The last line of stdout is JSON: the copy, the slowest step while a save is under way, what a save cost all in all
beyond median steps and its share of the default interval, and the checkpoint's bytes per parameter.
"""

import argparse
import json
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from model.config import ModelConfig
from model.llama import Llama
from model.normalizer import Normalizer
from model.tokenizer import Tokenizer, train_tokenizer
from rayjob.config import CheckpointConfig, OptimizerConfig
from rayjob.training.attempt import begin_attempt
from rayjob.training.feed import StepFeed, Windows
from rayjob.training.optimizer import build_optimizer
from rayjob.training.saver import Saver, SaverHooks
from rayjob.training.saving import RunIdentity, RunState
from rayjob.training.schedule import WindowOrder
from rayjob.training.step import Wishes, train_step

CONFIG = ModelConfig(vocab_size=50304)  # the reference model
INTERVAL_S = CheckpointConfig().interval_s or 180.0


class TimedSaver(Saver):
    """Also takes the time on a processor of each save's thread, which a busy machine does not change."""

    cpu_s: list[float] = []

    def _run(self, *arguments: Any) -> None:
        super()._run(*arguments)
        self.cpu_s.append(time.thread_time())  # of this thread, which ends here


class Bench:
    """One worker."""

    def __init__(self, rank: int, arguments: argparse.Namespace, port: int) -> None:
        torch.set_num_threads(max(1, torch.get_num_threads() // arguments.workers))
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=arguments.workers)
        self.rank, self.arguments = rank, arguments
        self.model = Llama(CONFIG)
        self.model.init_weights(0)
        self.ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True, forward_sync_buffers=False)
        self.optimizer = build_optimizer(self.model, OptimizerConfig())
        n_windows = arguments.windows * arguments.workers
        stream = np.random.default_rng(1).integers(0, CONFIG.vocab_size, 64 * CONFIG.max_seq_len + 1).astype(np.uint16)
        windows = Windows(stream, CONFIG.max_seq_len)
        order = WindowOrder(len(windows), n_windows, seed=7)
        self.feed = StepFeed(windows, order, arguments.windows, rank, arguments.workers, torch.device("cpu"))
        run_folder = Path(arguments.folder) / "run"
        begun = [begin_attempt(run_folder, 0, None) if rank == 0 else None]
        dist.broadcast_object_list(begun)
        assert begun[0] is not None
        hooks = SaverHooks(
            describe=RunState.to_json, flush=lambda: None, committed=lambda f: None, report=lambda f, s: None
        )
        tokenizer = Path(arguments.folder) / "tokenizer"
        self.saver = TimedSaver(run_folder, tokenizer, 2, self.model, self.optimizer, begun[0], hooks)
        self.state = RunState(RunIdentity("corpus", "tokenizer", 0, 1))
        self.copy_s: list[float] = []
        self.write_s: list[float] = []
        self._saved_at_s = 0.0

    def step(self, is_due: bool) -> None:
        """One step of the run's length, and the boundary after it."""
        batch = self.feed.step_batch(self.state.step)
        result = train_step(
            self.ddp,
            self.optimizer,
            batch,
            lr=1e-4,
            grad_clip=1.0,
            precision=torch.bfloat16,
            wishes=lambda: Wishes(saved=self.rank == 0 and self.saver.has_ended),
        )
        self.state = self.state.after_step(batch.n_tokens)
        if result.wishes.saved:
            self.write_s.append(time.monotonic() - self._saved_at_s)
            self.saver.take_up()
        if is_due:
            self._saved_at_s = time.monotonic()
            assert self.saver.save(self.state)
            self.copy_s.append(time.monotonic() - self._saved_at_s)

    def run(self) -> dict[str, Any]:
        """Returns (seconds, whether a save was under way or began) of every step."""
        n_steps = self.arguments.saves * self.arguments.steps_between + 1
        for _ in range(2):  # memory settles, and the optimizer gets its moments
            self.step(is_due=False)
        steps = []
        began_s = time.monotonic()
        for index in range(n_steps):
            is_due = index % self.arguments.steps_between == self.arguments.steps_between // 2
            is_in_save = self.saver.is_saving or is_due
            self.step(is_due)
            now_s = time.monotonic()
            steps.append((now_s - began_s, is_in_save))
            began_s = now_s
        self.saver.finish()
        return {"steps": steps, "copy_s": self.copy_s, "write_s": self.write_s, "write_cpu_s": TimedSaver.cpu_s}


def run_worker(rank: int, arguments: argparse.Namespace, port: int) -> dict[str, Any]:
    return Bench(rank, arguments, port).run()


def summarise(arguments: argparse.Namespace, measured: dict[str, Any]) -> dict[str, Any]:
    quiet = [seconds for seconds, is_in_save in measured["steps"] if not is_in_save]
    in_save = [seconds for seconds, is_in_save in measured["steps"] if is_in_save]
    median_s = statistics.median(quiet)
    stall_s = sum(seconds - median_s for seconds in in_save) / arguments.saves
    checkpoint = max((Path(arguments.folder) / "run").glob("step_*"))
    n_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    return {
        "workers": arguments.workers,
        "threads_per_worker": max(1, torch.get_num_threads() // arguments.workers),
        "parameters": CONFIG.n_params,
        "median_step_s": round(median_s, 3),
        "quiet_step_s_max": round(max(quiet), 3),
        "copy_s": [round(seconds, 3) for seconds in measured["copy_s"]],
        "write_s": [round(seconds, 2) for seconds in measured["write_s"]],
        "write_cpu_s": [round(seconds, 2) for seconds in measured["write_cpu_s"]],
        "slowest_step_in_save_s": round(max(in_save), 3),
        "slowest_step_in_save_ratio": round(max(in_save) / median_s, 3),
        "stall_per_save_s": round(stall_s, 3),
        "stall_pct_of_interval": round(100 * stall_s / INTERVAL_S, 3),
        "interval_s": INTERVAL_S,
        "checkpoint_bytes": n_bytes,
        "bytes_per_parameter": round(n_bytes / CONFIG.n_params, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--steps-between", type=int, default=8)
    parser.add_argument("--windows", type=int, default=2, help="of 512 tokens, per worker and step")
    parser.add_argument("--folder", help="where to save; default: a temporary folder")
    arguments = parser.parse_args()
    with socket.socket() as free, tempfile.TemporaryDirectory() as temporary:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        arguments.folder = arguments.folder or temporary
        text = ["the old house by the river stood alone\n"] * 20
        tokenizer = Tokenizer(train_tokenizer(text, vocab_size=290), Normalizer(detokenize=False, lowercase=False))
        tokenizer.save(Path(arguments.folder) / "tokenizer")
        with mp.get_context("spawn").Pool(arguments.workers) as pool:
            jobs = [(rank, arguments, port) for rank in range(arguments.workers)]
            measured = pool.starmap(run_worker, jobs, chunksize=1)[0]
        print(json.dumps(summarise(arguments, measured)))


if __name__ == "__main__":
    main()
