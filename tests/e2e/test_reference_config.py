"""The reference configuration on a corpus in BookCorpus's shape: only source, vocabulary and size of the model differ.

It asks for 4 GPUs, compiled kernels and 3 epochs; on CPUs it runs with the same 4 workers, batch, precision and
schedule for 2 steps, not compiled.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "rayjob" / "configs" / "bookcorpus_4x5090.yaml"
SMALLER = """
    tokenizer.vocab_size=400 model.d_model=32 model.n_layers=2 model.n_heads=4 model.n_kv_heads=2 model.d_ff=64
    model.max_seq_len=32
""".split()
ON_CPUS = "train.use_gpu=false train.compile=false train.max_steps=2".split()

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """8,000 rows in four files, lower case and in Penn Treebank tokens."""
    folder = tmp_path / "plain_text" / "train"
    folder.mkdir(parents=True)
    words = random.Random(1)
    nouns = ["".join(words.choices("etaoinshrdlu", k=words.randint(2, 8))) for _ in range(300)]
    for number in range(4):
        rows = [f"`` {' '.join(words.choices(nouns, k=12))} , '' he did n't say ." for _ in range(2_000)]
        pq.write_table(pa.table({"text": rows}), folder / f"000{number}.parquet", row_group_size=1_000)
    return folder


def rayjob(command: str, *arguments: str) -> str:
    line = [sys.executable, "-m", "rayjob", command, "--config", str(CONFIG), *arguments]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    finished = subprocess.run(line, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def test_reference_run_works_on_another_corpus(tmp_path: Path, corpus: Path) -> None:
    settings = ["data.source=parquet", f"data.paths=[{corpus}]", f"storage={tmp_path / 's'}", *SMALLER]

    def plan() -> dict[str, Any]:
        return dict(json.loads(rayjob("plan", "--json", *settings)))

    assert plan()["corpus_tokens_basis"].startswith("estimated")
    rayjob("run", *settings, *ON_CPUS)
    status = json.loads(rayjob("status", "--json", *settings))
    assert (status["stage"], status["step"]) == ("done", 2)
    assert status["tokens"] == 2 * 384 * 32

    manifest = json.loads(next((tmp_path / "s" / "tokens").glob("*/manifest.json")).read_text())
    planned = plan()
    assert planned["corpus_tokens"] == manifest["train"]["tokens"]
    assert planned["corpus_tokens_basis"].startswith("counted")
    # 3 epochs over every window, the last step of an epoch with what is left.
    assert planned["steps"] == 3 * -(-manifest["train"]["windows"] // 384)
    assert planned["gpus"] == 4
