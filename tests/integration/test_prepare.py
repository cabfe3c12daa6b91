"""Real Ray Data on two CPUs and real files; nothing is faked."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from model.normalizer import Normalizer
from model.tokenizer import Tokenizer
from rayjob.config import DataConfig, TokenizerConfig
from rayjob.corpus.blocks import SPLITS, Manifest, token_stream
from rayjob.corpus.errors import CorpusError, PrepareCancelled
from rayjob.corpus.prepare import PreparedCorpus, check, find_prepared, prepare
from rayjob.corpus.tokenize import write_blocks
from rayjob.corpus.units import Unit
from tests.ray_tasks import await_true, kill_tasks

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]

VOCAB = TokenizerConfig(vocab_size=400)
MAX_SEQ_LEN = 64
SLAB_BYTES, BLOCK_BYTES = 5_000, 16_000
REPOSITORY = Path(__file__).resolve().parents[2]
NASTY = "</s> <s> <unk> <0x41> <0x0A> \u2581under \u2581\u2581 naïve 漢字 🙂 \0 tail  \n\n\t end </s>"


def book(seed: int, n_words: int = 4000) -> str:
    words = random.Random(seed)
    return "\n".join(
        " ".join("".join(words.choices("etaoinshrdlu", k=words.randint(2, 8))) for _ in range(12)) + "."
        for _ in range(n_words // 12)
    )


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    folder.mkdir()
    for seed in range(8):
        (folder / f"book_{seed}.txt").write_text(book(seed))
    return folder


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 kB, so that a small corpus has many; the plan is the driver's, tasks only follow it."""
    monkeypatch.setattr("rayjob.corpus.decoding.SLAB_BYTES", SLAB_BYTES)
    monkeypatch.setattr("rayjob.corpus.units.BLOCK_BYTES", BLOCK_BYTES)


def config(path: Path, **changes: Any) -> DataConfig:
    return DataConfig(source="text", paths=(str(path),), val_fraction=0.2, **changes)


def run(path: Path, storage: Path, **changes: Any) -> PreparedCorpus:
    return prepare(config(path, **changes), VOCAB, storage, MAX_SEQ_LEN)


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def documents(prepared: PreparedCorpus) -> list[list[int]]:
    """The token stream of both sides cut at EOS."""
    eos_id = Tokenizer.load(prepared.tokenizer_folder).eos_id
    found: list[list[int]] = []
    for split in SPLITS:
        tokens = np.concatenate(list(token_stream(prepared.tokens_folder, split)))
        ends = np.flatnonzero(tokens == eos_id)
        assert ends[-1] == len(tokens) - 1, "the last document has no end"
        found += [part.tolist() for part in np.split(tokens, ends + 1)[:-1]]
    return found


def texts(prepared: PreparedCorpus) -> list[str]:
    tokenizer = Tokenizer.load(prepared.tokenizer_folder)
    return sorted(tokenizer.decode(tokens[:-1]) for tokens in documents(prepared))


def test_prepared_corpus_decodes_to_its_documents(tmp_path: Path, books: Path) -> None:
    (books / "nasty.txt").write_bytes(b"\xef\xbb\xbf" + (NASTY + "\r\n" + book(9, 500)).encode())
    prepared = run(books, tmp_path / "s")
    normalize = Normalizer(detokenize=False, lowercase=False)
    originals = [path.read_bytes().decode() for path in books.iterdir()]
    assert texts(prepared) == sorted(normalize(text) for text in originals)


def test_each_document_ends_in_one_eos_and_control_ids_stand_nowhere_else(tmp_path: Path, books: Path) -> None:
    (books / "nasty.txt").write_text(NASTY + book(9, 500))
    prepared = run(books, tmp_path / "s")
    tokenizer = Tokenizer.load(prepared.tokenizer_folder)
    streams = np.concatenate([tokens for split in SPLITS for tokens in token_stream(prepared.tokens_folder, split)])
    assert (streams == tokenizer.eos_id).sum() == 9
    assert not np.isin(streams, [tokenizer.unk_id, tokenizer.bos_id]).any()


def test_manifest_adds_up(tmp_path: Path, books: Path) -> None:
    prepared = run(books, tmp_path / "s")
    manifest = prepared.manifest
    assert manifest == Manifest.load(prepared.tokens_folder)
    assert manifest.hash == prepared.tokens_folder.name
    assert manifest.tokenizer_hash == Tokenizer.load(prepared.tokenizer_folder).hash
    for split in SPLITS:
        totals = manifest.split(split)
        streamed = sum(len(tokens) for tokens in token_stream(prepared.tokens_folder, split))
        assert totals.tokens == sum(block.tokens for block in totals.blocks) == streamed
        assert totals.documents > 0
    assert len(manifest.train.blocks) > 4
    bytes_in = sum(path.stat().st_size for path in books.iterdir())
    assert manifest.totals["bytes_in"] == manifest.totals["bytes_kept"] == bytes_in
    assert manifest.totals["rows_in"] == manifest.totals["rows_kept"] == 8
    assert manifest.totals["tokens"] == manifest.train.tokens + manifest.val.tokens
    assert [source["name"] for source in manifest.sources] == sorted(path.name for path in books.iterdir())


def test_equal_input_gives_equal_bytes_wherever_it_lies(tmp_path: Path, books: Path) -> None:
    first = run(books, tmp_path / "one")
    second = run(books.rename(tmp_path / "moved"), tmp_path / "two")
    assert digests(first.tokens_folder) == digests(second.tokens_folder)
    assert digests(first.tokenizer_folder) == digests(second.tokenizer_folder)


def test_number_of_tasks_changes_no_byte(tmp_path: Path, books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for max_tasks in (1, 2, 4):
        monkeypatch.setattr(
            "rayjob.corpus.prepare.write_blocks",
            lambda *args, max_tasks=max_tasks, **kwargs: write_blocks(*args, max_tasks=max_tasks, **kwargs),
        )
        found.append(digests(run(books, tmp_path / f"tasks_{max_tasks}").tokens_folder))
    assert found[0] == found[1] == found[2]


def test_second_run_touches_nothing_and_needs_no_tasks(
    tmp_path: Path, books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(books, tmp_path / "s")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "s").rglob("*")}
    monkeypatch.setattr("rayjob.corpus.prepare.write_blocks", lambda *_, **__: pytest.fail("work was done twice"))
    for path in books.iterdir():
        os.utime(path)
    assert run(books, tmp_path / "s") == first
    assert check(config(books), VOCAB, tmp_path / "s", MAX_SEQ_LEN) == []
    cache = tmp_path / "s" / "sources"  # the new dates are remembered there
    kept = {path: time for path, time in times.items() if not path.is_relative_to(cache)}
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.parametrize("change", ["append", "add", "remove", "rename", "vocabulary", "lowercase"])
def test_real_change_gives_another_manifest(
    tmp_path: Path, books: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = run(books, tmp_path / "s").manifest.hash
    data, tokenizer, reason = config(books), VOCAB, ""
    if change == "append":
        with (books / "book_3.txt").open("a") as file:
            file.write("One more sentence.")
        reason = "changed: book_3.txt"
    elif change == "add":
        (books / "extra.txt").write_text(book(99))
        reason = "new: extra.txt"
    elif change == "remove":
        (books / "book_3.txt").unlink()
        reason = "gone: book_3.txt"
    elif change == "rename":
        (books / "book_3.txt").rename(books / "renamed.txt")
        reason = "new: renamed.txt"
    elif change == "vocabulary":
        tokenizer, reason = TokenizerConfig(vocab_size=350), "vocab_size 400 -> 350"
    else:
        data, reason = config(books, lowercase=True), "normalizer"
    with caplog.at_level("INFO"):
        assert prepare(data, tokenizer, tmp_path / "s", MAX_SEQ_LEN).manifest.hash != before
    assert reason in caplog.text


def test_exchanged_tokenizer_makes_new_blocks_and_names_both_hashes(
    tmp_path: Path, books: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = run(books, tmp_path / "s")
    other = prepare(config(books), TokenizerConfig(vocab_size=350), tmp_path / "other", MAX_SEQ_LEN)
    for path in other.tokenizer_folder.iterdir():
        (before.tokenizer_folder / path.name).write_bytes(path.read_bytes())
    assert find_prepared(config(books), VOCAB, tmp_path / "s") is None
    with caplog.at_level("INFO"):
        after = run(books, tmp_path / "s")
    assert after.manifest.tokenizer_hash == other.manifest.tokenizer_hash != before.manifest.tokenizer_hash
    assert f"tokenizer_hash {before.manifest.tokenizer_hash} -> {after.manifest.tokenizer_hash}" in caplog.text


def test_copies_are_dropped_before_the_split_and_named(tmp_path: Path, books: Path) -> None:
    alone = run(books, tmp_path / "alone").manifest
    for seed in range(8):
        (books / f"copy_{seed}.txt").write_bytes(book(seed).replace("\n", "\r\n").encode())
    chapter = book(1)[:5_000]
    (books / "edition.txt").write_text(book(2)[:9_000] + chapter + book(2)[9_000:])
    manifest = run(books, tmp_path / "s").manifest
    assert manifest.totals["rows_duplicate"] == 9
    assert manifest.totals["rows_kept"] == 8
    assert "copy_3.txt is a copy of book_3.txt and was left out." in manifest.warnings
    assert any(warning.startswith("edition.txt was left out: ") for warning in manifest.warnings)
    assert manifest.val.documents_sha256 == alone.val.documents_sha256


def test_copies_that_are_kept_stand_on_one_side(tmp_path: Path, books: Path) -> None:
    for seed in range(8):
        (books / f"copy_{seed}.txt").write_text(book(seed))
    prepared = run(books, tmp_path / "s", dedup=False)
    assert prepared.manifest.totals["rows_kept"] == 16
    sides = [set(bytes(tokens.tobytes()) for tokens in _documents_of(prepared, split)) for split in SPLITS]
    assert not sides[0] & sides[1]


def _documents_of(prepared: PreparedCorpus, split: str) -> list[np.ndarray]:
    tokens = np.concatenate(list(token_stream(prepared.tokens_folder, split)))
    ends = np.flatnonzero(tokens == Tokenizer.load(prepared.tokenizer_folder).eos_id)
    return np.split(tokens, ends + 1)[:-1]


def test_odd_files_are_counted_named_and_the_rest_is_used(tmp_path: Path, books: Path) -> None:
    (books / "empty.txt").write_bytes(b"")
    (books / "tiny.txt").write_bytes(b"ten bytes\n")
    (books / "latin.txt").write_bytes("Café – naïve.\n".encode("cp1252") * 20)
    manifest = run(books, tmp_path / "s").manifest
    assert manifest.totals["rows_in"] == 11
    assert manifest.totals["rows_empty"] == 1
    assert "empty.txt is empty and was left out." in manifest.warnings
    assert "tiny.txt is only 10 bytes long." in manifest.warnings
    assert (
        "latin.txt: 60 bytes are not UTF-8, the first in line 1, and were read as Windows-1252 or U+FFFD."
        in manifest.warnings
    )
    [latin] = [source for source in manifest.sources if source["name"] == "latin.txt"]
    assert latin["invalid_bytes"] == 60


def test_book_of_five_megabytes_on_one_line_is_lossless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # blocks of their real size
    text = (book(1, 100_000).replace("\n", " ") + " zyzzyva " * 200) * 10
    text = text[:5_000_000]
    (tmp_path / "line.txt").write_text(text)
    prepared = prepare(config(tmp_path / "line.txt"), VOCAB, tmp_path / "s", MAX_SEQ_LEN)
    assert prepared.manifest.train.documents == prepared.manifest.val.documents == 1
    tokenizer = Tokenizer.load(prepared.tokenizer_folder)
    stream = [tokens for split in SPLITS for tokens in token_stream(prepared.tokens_folder, split)]
    tokens = np.concatenate(stream).tolist()
    assert tokens.count(tokenizer.eos_id) == 1
    assert tokenizer.decode(tokens[:-1]) == text


def test_cancelled_run_goes_on_from_its_blocks(tmp_path: Path, books: Path) -> None:
    expected = digests(run(books, tmp_path / "undisturbed").tokens_folder)
    asked = iter(range(10**6))
    with pytest.raises(PrepareCancelled):
        # Asked twice before tokenizing and once a block after it.
        prepare(config(books), VOCAB, tmp_path / "s", MAX_SEQ_LEN, is_cancelled=lambda: next(asked) > 3)
    assert find_prepared(config(books), VOCAB, tmp_path / "s") is None
    assert digests(run(books, tmp_path / "s").tokens_folder) == expected


def test_only_missing_blocks_are_written(tmp_path: Path, books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = run(books, tmp_path / "s")
    expected = digests(prepared.tokens_folder)
    (prepared.tokens_folder / "train" / "part-00002.parquet").unlink()
    torn = prepared.tokens_folder / "val" / "part-00000.parquet"
    torn.write_bytes(torn.read_bytes()[:-100])
    written = []

    def spy(units: Sequence[Unit], *args: Any, **kwargs: Any) -> Any:
        written.extend(unit.block_name for unit in units)
        return write_blocks(units, *args, **kwargs)

    monkeypatch.setattr("rayjob.corpus.prepare.write_blocks", spy)
    run(books, tmp_path / "s")
    assert sorted(written) == ["part-00000.parquet", "part-00002.parquet"]
    assert digests(prepared.tokens_folder) == expected


def test_foreign_and_orphan_files_are_never_read(tmp_path: Path, books: Path) -> None:
    prepared = run(books, tmp_path / "s")
    before = documents(prepared)
    train = prepared.tokens_folder / "train"
    (train / "part-99999.parquet").write_bytes((train / "part-00000.parquet").read_bytes())
    (train / ".part-00000.parquet.abc.tmp").write_bytes(b"half a block")
    assert documents(run(books, tmp_path / "s")) == before
    (prepared.tokens_folder / "manifest.json").unlink()
    again = run(books, tmp_path / "s")
    assert documents(again) == before
    assert again.manifest == prepared.manifest


def test_two_prepares_at_once_do_the_work_once(tmp_path: Path, books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return write_blocks(*args, **kwargs)

    monkeypatch.setattr("rayjob.corpus.prepare.write_blocks", spy)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: run(books, tmp_path / "s"), range(2))
    assert one == other
    assert len(calls) == 1


def test_source_that_changes_during_the_work_is_named(
    tmp_path: Path, books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meddle(*args: Any, **kwargs: Any) -> Any:
        (books / "book_0.txt").write_text(book(100))
        return write_blocks(*args, **kwargs)

    monkeypatch.setattr("rayjob.corpus.prepare.write_blocks", meddle)
    with pytest.raises(CorpusError, match="book_0.txt changed while it was being prepared"):
        run(books, tmp_path / "s")


DRIVER = """
import sys
from pathlib import Path
import ray
import rayjob.corpus.decoding, rayjob.corpus.units
from rayjob.config import DataConfig, TokenizerConfig
from rayjob.corpus.prepare import prepare
address, books, storage, slab_bytes, block_bytes = sys.argv[1:]
rayjob.corpus.decoding.SLAB_BYTES, rayjob.corpus.units.BLOCK_BYTES = int(slab_bytes), int(block_bytes)
ray.init(address=address, log_to_driver=False)
data = DataConfig(source="text", paths=(books,), val_fraction=0.2)
prepare(data, TokenizerConfig(vocab_size=400), Path(storage), 64)
"""


def test_killed_driver_leaves_nothing_half_done(tmp_path: Path, books: Path) -> None:
    """kill -9 when the first block stands; the cluster and the killed driver's tasks live on for a moment."""
    expected = digests(run(books, tmp_path / "undisturbed").tokens_folder)
    storage = tmp_path / "s"
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-c", DRIVER, address, str(books), str(storage), str(SLAB_BYTES), str(BLOCK_BYTES)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}) as driver:
        await_true(lambda: bool(list(storage.glob("tokens/*/*/part-*.parquet"))) or driver.poll() is not None)
        driver.send_signal(signal.SIGKILL)
    assert driver.returncode == -signal.SIGKILL, "the driver must not have ended by itself"
    assert list(storage.glob("tokens/*/*/part-*.parquet"))
    assert not list(storage.glob("tokens/*/manifest.json"))
    assert find_prepared(config(books), VOCAB, storage) is None
    assert digests(run(books, storage).tokens_folder) == expected


def test_killed_task_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 of a worker process while it tokenizes; Ray starts the task again."""
    monkeypatch.undo()  # blocks of their real size, so that a task lasts long enough to be met
    (tmp_path / "line.txt").write_text(book(1, 200_000) * 4)
    expected = digests(run(tmp_path / "line.txt", tmp_path / "undisturbed").tokens_folder)
    killed: list[int] = []

    def kill() -> bool:
        killed.extend(kill_tasks("_write_unit"))
        return bool(killed)

    killer = threading.Thread(target=await_true, args=(kill,))
    killer.start()
    prepared = run(tmp_path / "line.txt", tmp_path / "s")
    killer.join()
    assert killed
    assert digests(prepared.tokens_folder) == expected
