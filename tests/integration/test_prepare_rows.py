"""Rows of Parquet through real Ray Data tasks and real files; nothing is faked."""

import hashlib
import json
import os
import random
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.normalizer import Normalizer
from model.tokenizer import Tokenizer
from rayjob.config import DataConfig, TokenizerConfig
from rayjob.config_file import load_config
from rayjob.corpus import rows, tokenize
from rayjob.corpus.blocks import SPLITS, token_stream
from rayjob.corpus.card import CARD_FILES
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.huggingface import CHOICES
from rayjob.corpus.lookup import find_window
from rayjob.corpus.prepare import PreparedCorpus, check, find_prepared, prepare
from rayjob.plan import make_plan
from tests.hub_stub import COMMIT, Hub, running

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

VOCAB = TokenizerConfig(vocab_size=400)
MAX_SEQ_LEN = 64
RANGE_BYTES = 60_000
NORMALIZE = Normalizer(detokenize=True, lowercase=True)


def sentences(seed: int, count: int) -> list[str]:
    """Rows in the style of BookCorpus: lower case, Penn Treebank tokens."""
    words = random.Random(seed)
    nouns = ["".join(words.choices("etaoinshrdlu", k=words.randint(2, 8))) for _ in range(300)]
    return [f"`` {' '.join(words.choices(nouns, k=12))} , '' he did n't say ." for _ in range(count)]


BOOKS = [sentences(seed, 500) for seed in range(12)]
TEXT = [row for book in [*BOOKS, BOOKS[3], BOOKS[7]] for row in book]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Twelve books and copies of two in three files, cut in the middle of books."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, part in enumerate(np.array_split(np.array(TEXT, dtype=object), 3)):
        pq.write_table(pa.table({"text": part.tolist()}), folder / f"000{number}.parquet", row_group_size=100)
    return folder


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "RANGE_BYTES", RANGE_BYTES)
    monkeypatch.setattr("rayjob.corpus.row_units.RANGE_BYTES", RANGE_BYTES)


def config(path: Path, **changes: Any) -> DataConfig:
    settings = {"detokenize": True, "lowercase": True, "val_fraction": 0.1} | changes
    return DataConfig(source="parquet", paths=(str(path),), **settings)


def run(path: Path, storage: Path, tokenizer: TokenizerConfig = VOCAB, **changes: Any) -> PreparedCorpus:
    return prepare(config(path, **changes), tokenizer, storage, MAX_SEQ_LEN)


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def lines(prepared: PreparedCorpus, split: str) -> list[str]:
    tokenizer = Tokenizer.load(prepared.tokenizer_folder)
    stream = np.concatenate(list(token_stream(prepared.tokens_folder, split)))
    return tokenizer.decode(stream.tolist()).split("\n")[:-1]


def test_corpus_decodes_to_its_kept_rows_and_totals_add_up(tmp_path: Path, corpus: Path) -> None:
    prepared = run(corpus, tmp_path / "s")
    totals = prepared.manifest.totals
    assert totals["rows_in"] == 7_000
    assert totals["rows_duplicate"] == 1_000
    assert totals["rows_in"] == sum(totals[f"rows_{kind}"] for kind in ("empty", "boilerplate", "duplicate", "kept"))
    assert totals["bytes_in"] == sum(len(row) + 1 for row in TEXT) == totals["bytes_kept"] + totals["bytes_removed"]
    assert totals["tokens"] == totals["windows"] * MAX_SEQ_LEN + totals["tail_tokens"]
    sides = {split: lines(prepared, split) for split in SPLITS}
    assert sorted(sides["train"] + sides["val"]) == sorted(NORMALIZE(row) for book in BOOKS for row in book)
    for split in SPLITS:
        side = prepared.manifest.split(split)
        assert side.tokens == sum(len(part) for part in token_stream(prepared.tokens_folder, split))
        assert side.bytes == sum(len(line.encode()) + 1 for line in sides[split])
    assert totals["tokens"] == prepared.manifest.train.tokens + prepared.manifest.val.tokens
    assert (prepared.tokens_folder / "repeats.csv").read_text().splitlines()[1:] == [
        "0002.parquet,1333,2332,1000,0000.parquet,1500"
    ]


def test_number_of_tasks_and_place_of_files_change_no_byte(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for max_tasks in (1, 2, 4):
        for module in ("scan", "words", "tokenize"):
            run_tasks = tokenize.run_tasks

            def limited(*args: Any, run: Any = run_tasks, n: int = max_tasks, **kwargs: Any) -> Any:
                return run(*args, **{**kwargs, "max_tasks": n})

            monkeypatch.setattr(f"rayjob.corpus.{module}.run_tasks", limited)
        folder = corpus.rename(tmp_path / f"moved_{max_tasks}")
        corpus = folder
        prepared = run(folder, tmp_path / f"tasks_{max_tasks}")
        found.append(digests(prepared.tokens_folder) | digests(prepared.tokenizer_folder))
        monkeypatch.undo()
        monkeypatch.setattr(rows, "RANGE_BYTES", RANGE_BYTES)
        monkeypatch.setattr("rayjob.corpus.row_units.RANGE_BYTES", RANGE_BYTES)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) > 12


def test_change_costs_only_what_depends_on_it_and_is_told(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []

    def spy(function: Any, items: Sequence[str], **kwargs: Any) -> Any:
        done.append(f"{function.func.__name__} {len(items)}")
        return run_tasks(function, items, **kwargs)

    run_tasks = tokenize.run_tasks
    for module in ("scan", "words", "tokenize"):
        monkeypatch.setattr(f"rayjob.corpus.{module}.run_tasks", spy)
    first = run(corpus, tmp_path / "s")
    n_blocks = sum(len(first.manifest.split(split).blocks) for split in SPLITS)
    assert [task.split()[0] for task in done] == ["_scan_ranges", "_keep_words", "_write_unit"]
    done.clear()
    assert run(corpus, tmp_path / "s") == first
    assert done == []
    with caplog.at_level("INFO"):
        run(corpus, tmp_path / "s", TokenizerConfig(vocab_size=350))
    assert done == [f"_write_unit {n_blocks}"], "another vocabulary reads no source"
    assert "vocab_size 400 -> 350" in caplog.text
    done.clear()
    (corpus / "0001.parquet").unlink()
    with caplog.at_level("INFO"):
        run(corpus, tmp_path / "s")
    assert "_scan_ranges" not in " ".join(done), "the other files are as they were"
    assert "gone: 0001.parquet" in caplog.text


def test_other_window_length_keeps_the_tokens_and_counts_again(tmp_path: Path, corpus: Path) -> None:
    first = run(corpus, tmp_path / "s")
    other = prepare(config(corpus), VOCAB, tmp_path / "s", 128)
    assert other.tokens_folder == first.tokens_folder
    assert other.manifest.train.blocks == first.manifest.train.blocks
    totals = other.manifest.totals
    assert totals["max_seq_len"] == 128
    assert totals["tokens"] == totals["windows"] * 128 + totals["tail_tokens"]


def test_any_window_leads_back_to_its_rows(tmp_path: Path, corpus: Path) -> None:
    prepared = run(corpus, tmp_path / "s")
    tokenizer = Tokenizer.load(prepared.tokenizer_folder)
    stream = np.concatenate(list(token_stream(prepared.tokens_folder, "train")))
    last = prepared.manifest.train.windows - 1
    normal = [NORMALIZE(row) for row in TEXT]
    for window in (0, 17, last // 2, last):
        parts = find_window(prepared.tokens_folder, prepared.manifest, tokenizer, "train", window, MAX_SEQ_LEN)
        tokens = stream[window * MAX_SEQ_LEN : (window + 1) * MAX_SEQ_LEN + 1]
        assert "".join(part.text for part in parts) == tokenizer.decode(tokens.tolist())
        file, first_row = parts[0].doc_id.rsplit(":", 1)
        offset = len(TEXT) // 3 * int(file[3]) + min(int(file[3]), len(TEXT) % 3) + int(first_row)
        assert parts[0].text in "\n".join(normal[offset : offset + 2_000]) + "\n"
    with pytest.raises(IndexError):
        find_window(prepared.tokens_folder, prepared.manifest, tokenizer, "train", last + 1, MAX_SEQ_LEN)


def test_card_tells_counts_and_shows_windows(tmp_path: Path, corpus: Path) -> None:
    prepared = run(corpus, tmp_path / "s")
    for name in CARD_FILES:
        card = (prepared.tokens_folder / name).read_text()
        assert f"{prepared.manifest.totals['tokens']:,}" in card
        assert "0002.parquet" in card
        assert card.count("window ") >= 10
        assert str(tmp_path) not in card


def test_plan_after_prepare_counts_instead_of_estimating(tmp_path: Path, corpus: Path) -> None:
    """The reference configuration with another source, vocabulary and size of the model."""
    reference = Path(__file__).resolve().parents[2] / "rayjob" / "configs" / "bookcorpus_4x5090.yaml"
    job = load_config(
        reference,
        [
            "data.source=parquet",
            f"data.paths=[{corpus}]",
            f"storage={tmp_path / 's'}",
            "tokenizer.vocab_size=400",
            "model.d_model=64",
            "model.n_layers=2",
            "model.n_heads=4",
            "model.n_kv_heads=2",
            "model.d_ff=128",
        ],
    )
    assert make_plan(job)["corpus_tokens_basis"].startswith("estimated")
    prepared = prepare(job.data, job.tokenizer, job.storage_folder, job.model.max_seq_len)
    plan = make_plan(job)
    assert plan["corpus_tokens"] == prepared.manifest.train.tokens
    assert plan["corpus_tokens_basis"].startswith("counted")


def test_bookcorpus_of_the_hub_is_fetched_prepared_and_its_commit_recorded(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is a stub on a loopback port; its client and all else are real."""
    files = {f"plain_text/train/{path.name}": path.read_bytes() for path in corpus.iterdir()}
    first = CHOICES[0]
    with running(Hub({(first.repo, first.revision): files})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        data = DataConfig(source="huggingface", detokenize=True, lowercase=True, val_fraction=0.1)
        assert check(data, VOCAB, tmp_path / "s", MAX_SEQ_LEN) == []
    prepared = prepare(data, VOCAB, tmp_path / "s", MAX_SEQ_LEN)
    assert prepared.manifest.origin == {"repo": first.repo, "revision": first.revision, "commit": COMMIT}
    local = run(corpus, tmp_path / "local").manifest
    assert [block.tokens for block in prepared.manifest.train.blocks] == [block.tokens for block in local.train.blocks]
    assert prepared.manifest.totals == local.totals


def test_documents_of_a_column_end_in_one_eos(tmp_path: Path) -> None:
    titles = [f"book {number}" for number, book in enumerate(BOOKS) for _ in book]
    text = [row for book in BOOKS for row in book]
    (tmp_path / "c").mkdir()
    pq.write_table(pa.table({"text": text, "title": titles}), tmp_path / "c" / "a.parquet", row_group_size=100)
    prepared = run(tmp_path / "c", tmp_path / "s", doc_column="title")
    eos_id = Tokenizer.load(prepared.tokenizer_folder).eos_id
    streams = [np.concatenate(list(token_stream(prepared.tokens_folder, split))) for split in SPLITS]
    assert sum((stream == eos_id).sum() for stream in streams) == len(BOOKS)
    assert all(stream[-1] == eos_id for stream in streams)
    assert prepared.manifest.train.documents + prepared.manifest.val.documents == len(BOOKS)


def test_damaged_page_stops_the_work_with_file_and_rows(tmp_path: Path, corpus: Path) -> None:
    damaged = ["0000.parquet", "0001.parquet"]
    for name in damaged:
        content = bytearray((corpus / name).read_bytes())
        content[len(content) // 2 : len(content) // 2 + 3_000] = bytes(3_000)
        (corpus / name).write_bytes(content)
    with pytest.raises(CorpusError) as raised:
        run(corpus, tmp_path / "s")
    for name in damaged:
        found = [line for line in raised.value.problems if name in line]
        assert found
        assert all(re.search(rf"{name}: {name} rows [\d,]+ to [\d,]+ cannot be read", line) for line in found)
    assert find_prepared(config(corpus), VOCAB, tmp_path / "s") is None


def test_full_disk_is_named_and_costs_nothing_that_was_finished(tmp_path: Path, corpus: Path) -> None:
    """A real file system of 400 kB, where the machine lets a test mount one."""
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)], capture_output=True)
    if mount.returncode:
        pytest.skip("mounting a file system needs root")
    try:
        with pytest.raises(
            CorpusError, match=r"^/\S*/small/s/\S+ cannot be written \(No space left on device\): free space there"
        ):
            run(corpus, small / "s")
        assert not list(small.glob("s/tokens/*/manifest.json"))
        subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
        again = run(corpus, small / "s")
        assert digests(again.tokens_folder) == digests(run(corpus, tmp_path / "s").tokens_folder)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_manifest_is_the_same_json_whoever_writes_it(tmp_path: Path, corpus: Path) -> None:
    prepared = run(corpus, tmp_path / "s")
    written = json.loads((prepared.tokens_folder / "manifest.json").read_text())
    assert written["totals"] == prepared.manifest.totals
    assert str(tmp_path) not in json.dumps(written)
    assert os.fspath(prepared.tokens_folder).endswith(written["hash"])
