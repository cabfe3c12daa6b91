"""`check`, `find_prepared` and `prepare` as far as they need no Ray."""

import hashlib
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.tokenizer import Tokenizer
from rayjob.config import DataConfig, TokenizerConfig
from rayjob.corpus import demo, rows, tokenize
from rayjob.corpus.blocks import Manifest, SplitTotals
from rayjob.corpus.errors import CorpusError, PrepareCancelled
from rayjob.corpus.identity import digest, tokenizer_inputs, tokens_inputs
from rayjob.corpus.prepare import check, find_prepared, find_without_sources, prepare
from rayjob.corpus.sources import find_sources

VOCAB = TokenizerConfig(vocab_size=400)


def book(seed: int, n_words: int = 1500) -> str:
    words = random.Random(seed)
    return " ".join("".join(words.choices("etaoinshrdlu", k=words.randint(2, 8))) for _ in range(n_words)) + ".\n"


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    folder.mkdir()
    for seed in range(6):
        (folder / f"book_{seed}.txt").write_text(book(seed))
    return folder


def config(path: Path, **changes: Any) -> DataConfig:
    return DataConfig(source="text", paths=(str(path),), val_fraction=0.2, **changes)


def test_good_corpus_has_no_problems_and_gets_its_tokenizer(tmp_path: Path, books: Path) -> None:
    assert check(config(books), VOCAB, tmp_path / "s", 64) == []
    [folder] = (tmp_path / "s" / "tokenizers").iterdir()
    assert Tokenizer.load(folder).vocab_size == 400
    assert find_prepared(config(books), VOCAB, tmp_path / "s") is None


def test_tokenizer_learns_from_training_documents_only(
    tmp_path: Path, books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def train(texts: Iterable[str], **settings: object) -> bytes:
        seen.extend(texts)
        raise PrepareCancelled

    monkeypatch.setattr("rayjob.corpus.vocabulary.train_tokenizer", train)
    with pytest.raises(PrepareCancelled):
        check(config(books), VOCAB, tmp_path / "s", 64)
    assert 0 < len(seen) < 6
    assert set(seen) < {book(seed) for seed in range(6)}


def test_prepared_corpus_is_found_by_its_settings_when_its_sources_are_gone(tmp_path: Path, books: Path) -> None:
    storage = tmp_path / "s"
    assert check(config(books), VOCAB, storage, 64) == []
    [tokenizer_folder] = (storage / "tokenizers").iterdir()
    inputs = tokenizer_inputs(config(books), VOCAB, find_sources(config(books), storage))
    inputs = tokens_inputs(inputs, Tokenizer.load(tokenizer_folder))
    side = SplitTotals(0, 0, 0, 0, 0, "", [])
    manifest = Manifest(digest(inputs), inputs, "t", "uint16", [], {}, side, side, {}, {}, [])
    manifest.save(storage / "tokens" / manifest.hash)
    shutil.rmtree(books)
    assert find_prepared(config(books), VOCAB, storage) is None
    [found] = find_without_sources(config(books), VOCAB, storage)
    assert (found.tokenizer_folder, found.manifest) == (tokenizer_folder, manifest)
    assert find_without_sources(config(books), TokenizerConfig(vocab_size=401), storage) == []
    assert find_without_sources(config(books, lowercase=True), VOCAB, storage) == []


def test_missing_path_is_a_problem(tmp_path: Path) -> None:
    [problem] = check(config(tmp_path / "absent"), VOCAB, tmp_path / "s", 64)
    assert "absent does not exist" in problem


def test_nothing_but_empty_files_is_a_problem(tmp_path: Path) -> None:
    books = tmp_path / "books"
    books.mkdir()
    for name in ("a.txt", "b.txt"):
        (books / name).write_text("\r\n \n")
    [problem] = check(config(books), VOCAB, tmp_path / "s", 64)
    assert problem.startswith("The corpus is empty: none of its 2 files holds any text.")


def test_bad_files_are_all_named(tmp_path: Path, books: Path) -> None:
    (books / "bad.jsonl").write_text("no json")
    (books / "bad.txt.gz").write_text("no gzip")
    jsonl, gz = check(config(books), VOCAB, tmp_path / "s", 64)
    assert "bad.jsonl:1" in jsonl
    assert "bad.txt.gz" in gz


def test_corpus_below_one_window_is_a_problem_for_either_side(tmp_path: Path, books: Path) -> None:
    train, val = check(config(books), VOCAB, tmp_path / "s", 10**6)
    assert "training part has at most" in train
    assert "validation part has at most" in val
    assert "model.max_seq_len=1000000 needs 1000001" in train


def test_window_is_compared_with_tokens_and_not_with_bytes(tmp_path: Path, books: Path) -> None:
    """A validation part of a few kB has fewer tokens than bytes, and only its tokens count."""
    [_, by_bytes] = check(config(books), VOCAB, tmp_path / "s", 10**6)
    n_bytes = int(by_bytes.split("at most ")[1].split()[0])
    [problem] = check(config(books), VOCAB, tmp_path / "s", n_bytes - 1000)
    assert "validation part has" in problem
    assert "at most" not in problem


def test_vocabulary_too_large_tells_the_largest_that_works(tmp_path: Path, books: Path) -> None:
    [problem] = check(config(books), TokenizerConfig(vocab_size=50_304), tmp_path / "s", 64)
    assert problem.startswith("tokenizer.vocab_size=50304 is too large for this corpus")
    largest = int(problem.rsplit(" ", 1)[1].rstrip("."))
    assert check(config(books), TokenizerConfig(vocab_size=largest), tmp_path / "s", 64) == []
    assert len(list((tmp_path / "s" / "tokenizers").iterdir())) == 1, "a failed training leaves no folder"


def test_demo_that_cannot_be_fetched_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(storage: Path) -> None:
        raise CorpusError(["offline"])

    monkeypatch.setattr(demo, "fetch", fetch)
    assert check(DataConfig(source="demo"), VOCAB, tmp_path / "s", 64) == ["offline"]


def test_looking_for_a_prepared_demo_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "fetch", lambda _: pytest.fail("fetched"))
    assert find_prepared(DataConfig(source="demo"), VOCAB, tmp_path / "s") is None


def test_cancelled_before_the_tokenizer_leaves_no_lock_held(tmp_path: Path, books: Path) -> None:
    for _ in range(2):
        with pytest.raises(PrepareCancelled, match="Stopped while reading the sources, before"):
            prepare(config(books), VOCAB, tmp_path / "s", 64, is_cancelled=lambda: True)


def test_check_can_be_cancelled(tmp_path: Path, books: Path) -> None:
    asked = iter([False, True])  # it goes on after the first question
    with pytest.raises(PrepareCancelled):
        check(config(books), VOCAB, tmp_path / "s", 64, is_cancelled=lambda: next(asked))
    assert not (tmp_path / "s" / "tokenizers").exists()


def test_prepare_raises_what_check_tells(tmp_path: Path, books: Path) -> None:
    problems = check(config(books), VOCAB, tmp_path / "s", 10**6)
    with pytest.raises(CorpusError) as raised:
        prepare(config(books), VOCAB, tmp_path / "s", 10**6)
    assert raised.value.problems == problems


def test_prepare_without_ray_says_so(tmp_path: Path, books: Path) -> None:
    with pytest.raises(RuntimeError, match="call ray.init"):
        prepare(config(books), VOCAB, tmp_path / "s", 64)


def _run_here(function: Callable[[dict[str, Any]], dict[str, Any]], items: Sequence[str], **_: Any) -> Iterator[Any]:
    """In the place of `run_tasks`, without Ray."""
    return (function({"item": item}) for item in items)


def _digests(storage: Path) -> dict[str, str]:
    files = (path for kind in ("tokenizers", "tokens") for path in (storage / kind).rglob("*") if path.is_file())
    return {str(path.relative_to(storage)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("stage", ["scan", "words", "tokenize"])
def test_rows_of_a_file_that_was_exchanged_meanwhile_are_not_taken_for_its_own_when_it_is_back(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(seed: int) -> None:
        text = [book(1_000 * seed + row, n_words=6) for row in range(2_000)]
        pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")

    def meddle(*args: Any, **kwargs: Any) -> Iterator[Any]:
        write(2)
        return _run_here(*args, **kwargs)

    for name in ("scan", "words", "tokenize"):
        monkeypatch.setattr(f"rayjob.corpus.{name}.run_tasks", _run_here)
    data = DataConfig(source="parquet", paths=(str(tmp_path / "a.parquet"),), val_fraction=0.1)
    settings = data, VOCAB
    write(1)
    prepare(*settings, tmp_path / "undisturbed", 64)
    with monkeypatch.context() as patch:
        patch.setattr(f"rayjob.corpus.{stage}.run_tasks", meddle)
        with pytest.raises(CorpusError, match=r"a\.parquet changed while it was being prepared"):
            prepare(*settings, tmp_path / "s", 64)
    write(1)
    for cached in (rows._open, tokenize._load_tokenizer):
        cached.cache_clear()  # as in the processes of the next command
    prepare(*settings, tmp_path / "s", 64)
    assert _digests(tmp_path / "s") == _digests(tmp_path / "undisturbed")
