"""Speed and memory of `prepare` on rows against one process that loops over SentencePiece, as one JSON line.

    python tests/bench/bench_prepare.py [--rows FOLDER] [--mb 300] [--cpus 2] [--storage FOLDER]

1. The rows of FOLDER's Parquet files, or made-up ones, are repeated up to the size asked for; every copy gets a number
   in each row, so that nothing is a duplicate and the whole text goes through all stages.
2. Baseline: SentencePiece's own encoder over the same normalised rows in one process, in CPU seconds; `cpus` of those
   processes are what the machine could do. Nothing is read, cleaned, counted or written there.
3. The pipeline: scan, duplicates, split, word counts, tokenizer, tokens, blocks. Ratios are its speed by that of the
   baseline, by wall time and by CPU time of all processes of the cluster, which a busy machine does not distort.
4. Memory: unique bytes of all processes together (USS) above the idle cluster; once more with twice the text.

Run it on an idle machine.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from model.tokenizer import MODEL_FILE, Tokenizer
from rayjob.config import DataConfig, TokenizerConfig
from rayjob.corpus import plans, prepare, vocabulary

BOOKCORPUS_MB = 4_560
BASELINE_ROWS = 100_000
SAMPLE_S = 0.25


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory(dir=args.storage) as folder, tempfile.TemporaryDirectory(prefix="ray-") as temp:
        rows = read_rows(args.rows)
        ray.init(
            num_cpus=args.cpus,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=temp,
            runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}},
        )
        idle_bytes = Usage.of_now().bytes  # of both runs, for the second begins with what the first has left
        once = measure(Path(folder) / "once", rows, args.mb, args.vocab_size, idle_bytes)
        twice = measure(Path(folder) / "twice", rows, 2 * args.mb, args.vocab_size, idle_bytes) if args.double else None
        baseline = baseline_mb_per_s(rows, once.pop("tokenizer_folder"))
        ray.shutdown()
    print(json.dumps(report(args, once, twice, baseline)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=Path, help="folder of Parquet files with a column `text`; made-up rows if absent"
    )
    parser.add_argument("--mb", type=int, default=300, help="millions of bytes of text")
    parser.add_argument("--cpus", type=int, default=os.cpu_count())
    parser.add_argument("--vocab_size", type=int, default=16_000)
    parser.add_argument("--double", action="store_true", help="measure memory with twice the text as well")
    parser.add_argument("--storage", type=Path, help="where the text and the blocks go for a while")
    return parser.parse_args()


def read_rows(folder: Path | None) -> list[str]:
    if folder is None:
        words = random.Random(1)
        nouns = ["".join(words.choices("etaoinshrdlu", k=words.randint(2, 9))) for _ in range(50_000)]
        weights = [1 / rank for rank in range(1, len(nouns) + 1)]
        return [f"`` {' '.join(words.choices(nouns, weights, k=18))} , '' he did n't say ." for _ in range(200_000)]
    return [row for path in sorted(folder.rglob("*.parquet")) for row in pq.read_table(path)["text"].to_pylist()]


def write_corpus(folder: Path, rows: list[str], mb: int) -> int:
    """Writes copies of the rows until there are `mb` million bytes, and returns the bytes."""
    folder.mkdir(parents=True)
    written = copy = 0
    while written < mb * 1e6:
        numbered = [f"{row} {copy}" for row in rows]
        pq.write_table(pa.table({"text": numbered}), folder / f"{copy:04d}.parquet", row_group_size=1000)
        written += sum(map(len, numbered)) + len(numbered)
        copy += 1
    return written


def measure(storage: Path, rows: list[str], mb: int, vocab_size: int, idle_bytes: int) -> dict[str, Any]:
    n_bytes = write_corpus(storage / "corpus", rows, mb)
    data = DataConfig(source="parquet", paths=(str(storage / "corpus"),), detokenize=True, lowercase=True)
    cpu_s = Usage.of_now().cpu_s
    seconds: dict[str, float] = {}
    with watching() as peak, timed(seconds):
        started_at_s = time.perf_counter()
        prepared = prepare.prepare(data, TokenizerConfig(vocab_size=vocab_size), storage / "s", 512)
        wall_s = time.perf_counter() - started_at_s
    return {
        "mb": n_bytes / 1e6,
        "wall_s": wall_s,
        "cpu_s": peak.cpu_s - cpu_s,
        "peak_gib": (peak.bytes - idle_bytes) / 2**30,
        "stages_s": {name: round(value, 2) for name, value in seconds.items()},
        "totals": prepared.manifest.totals,
        "tokenizer_folder": prepared.tokenizer_folder,
    }


def baseline_mb_per_s(rows: list[str], tokenizer_folder: Path) -> float:
    """SentencePiece's raw speed in one process, by its CPU time."""
    import sentencepiece

    normalize = Tokenizer.load(tokenizer_folder).normalizer
    texts = [normalize(row) for row in rows[:BASELINE_ROWS]]
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_folder / MODEL_FILE))
    started_at_s = time.process_time()
    for text in texts:
        processor.encode(text, out_type=int, num_threads=1)
    return sum(len(text.encode()) + 1 for text in texts) / 1e6 / (time.process_time() - started_at_s)


def report(
    args: argparse.Namespace, once: dict[str, Any], twice: dict[str, Any] | None, baseline: float
) -> dict[str, Any]:
    stages = once["stages_s"]
    raw_s = once["mb"] / baseline
    return {
        **{name: round(value, 2) if isinstance(value, float) else value for name, value in once.items()},
        "cpus": args.cpus,
        "baseline_mb_per_s_per_core": round(baseline, 2),
        "wall_ratio": round(raw_s / args.cpus / once["wall_s"], 3),
        "cpu_ratio": round(raw_s / once["cpu_s"], 3),
        "tokenize_wall_ratio": round(raw_s / args.cpus / (stages["words"] + stages["blocks"]), 3),
        "peak_gib_twice": round(twice["peak_gib"], 2) if twice else None,
        "bookcorpus_s": {n: extrapolate(once, args.cpus, n) for n in (2, 16, 64)},
    }


def extrapolate(once: dict[str, Any], cpus: int, n: int) -> dict[str, int]:
    """Seconds for the full BookCorpus on `n` cores like these.

    Scan, words and blocks are split over the cores. The rest is the driver's alone: finding duplicates and planning
    units grow with the text, and so do hashing the files and adding up; training the tokenizer depends on the number
    of distinct words, which hardly grows.
    """
    stages = once["stages_s"]
    split_s = (stages["scan"] + stages["words"] + stages["blocks"]) * cpus
    tokenizer_s = stages["tokenizer"] - stages["words"]
    serial_s = once["wall_s"] - split_s / cpus - tokenizer_s
    scale = BOOKCORPUS_MB / once["mb"]
    parts = {"split": scale * split_s / n, "driver": scale * serial_s, "tokenizer": tokenizer_s}
    return {name: round(value) for name, value in {**parts, "all": sum(parts.values())}.items()}


class Usage:
    """Unique memory and CPU seconds of this process and its descendants."""

    def __init__(self) -> None:
        self.bytes = 0
        self._cpu_s: dict[int, float] = {}

    @classmethod
    def of_now(cls) -> "Usage":
        usage = cls()
        usage.look()
        return usage

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu_s.values())

    def look(self) -> None:
        """Takes the highest memory so far, and the CPU time of every process that was ever seen."""
        total = 0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().uss
                times = process.cpu_times()
                self._cpu_s[process.pid] = times.user + times.system
        self.bytes = max(self.bytes, total)


@contextmanager
def watching() -> Iterator[Usage]:
    usage, is_over = Usage.of_now(), threading.Event()

    def watch() -> None:
        while not is_over.wait(SAMPLE_S):
            usage.look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield usage
    finally:
        is_over.set()
        thread.join()


@contextmanager
def timed(seconds: dict[str, float]) -> Iterator[None]:
    """Adds up the wall time of the stages; `tokenizer` includes `words`."""
    stages: list[tuple[Any, str, str]] = [
        (plans, "ensure_scanned", "scan"),
        (plans, "build_row_catalog", "catalog"),
        (plans, "plan_row_units", "plan"),
        (vocabulary, "count_words", "words"),
        (prepare, "ensure_tokenizer", "tokenizer"),
        (prepare, "write_blocks", "blocks"),
    ]
    originals = [(module, name, getattr(module, name)) for module, name, _ in stages]
    for module, name, stage in stages:
        setattr(module, name, _timed(getattr(module, name), stage, seconds))
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


def _timed(function: Callable[..., Any], stage: str, seconds: dict[str, float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        started_at_s = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started_at_s

    return call


if __name__ == "__main__":
    main()
