import gzip
import hashlib
import json
import random
from pathlib import Path

import pytest

from model.normalizer import Normalizer
from rayjob.corpus import document_scan
from rayjob.corpus.catalog import NAMED_PER_KIND, Catalog, CatalogSettings, build_catalog, read_texts
from rayjob.corpus.sources import Source
from rayjob.corpus.units import plan_units

PLAIN = Normalizer(detokenize=False, lowercase=False)
SETTINGS = CatalogSettings(PLAIN, "text", dedup=True, val_fraction=0.2)


def catalog_of(folder: Path, files: dict[str, str]) -> Catalog:
    sources = []
    for name, text in sorted(files.items()):
        (folder / name).write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        sources.append(Source(name, str(folder / name), len(text), digest))
    return build_catalog(tuple(sources), SETTINGS, folder / "cache", lambda: False)


def test_single_book_is_cut_before_a_word_and_loses_nothing(tmp_path: Path) -> None:
    book = "One line after another.\n" * 100
    catalog = catalog_of(tmp_path, {"book.txt": book})
    [head], [tail] = list(read_texts(catalog.train, SETTINGS)), list(read_texts(catalog.val, SETTINGS))
    assert head + tail == book
    assert tail[0].isspace()
    assert not head[-1].isspace()
    # The cut moves back by one word at most.
    assert 0.2 * len(book) <= len(tail) <= 0.2 * len(book) + 10


def test_documents_are_in_the_order_of_names_on_both_sides(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, {f"{number:02d}.txt": f"{number} " * 99 for number in range(30)})
    for stretches in catalog.splits().values():
        ids = [stretch.document.doc_id for stretch in stretches]
        assert ids == sorted(ids)
    assert len(catalog.train) + len(catalog.val) == 30


def test_odd_bytes_and_characters_are_counted_with_the_line_of_the_first(tmp_path: Path) -> None:
    files = {
        "latin.txt": b"one\ntwo\ncaf\xe9 caf\xe9\n",
        "nul.txt": b"one\nt\0w\0o\n",
        "utf16.txt": "one\ntwo\n".encode("utf-16") + b"x",
        "lines.jsonl": b'{"text": "one"}\n{"text": "a \\ud800 b \\u0000"}\n',
    }
    sources = []
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        sources.append(Source(name, str(tmp_path / name), len(content), hashlib.sha256(content).hexdigest()))
    catalog = build_catalog(tuple(sources), SETTINGS, tmp_path / "cache", lambda: False)
    found = [warning for warning in catalog.warnings if "the first" in warning]
    assert found == [
        "latin.txt: 2 bytes are not UTF-8, the first in line 3, and were read as Windows-1252 or U+FFFD.",
        "utf16.txt: 1 bytes are not UTF-8, the first in line 3, and were read as Windows-1252 or U+FFFD.",
        "nul.txt: 2 characters are NUL or lone surrogates, the first in line 2, and became U+FFFD.",
        "lines.jsonl: 2 characters are NUL or lone surrogates, the first in line 2, and became U+FFFD.",
    ]
    assert [facts.replaced_chars for facts in catalog.source_facts] == [0, 2, 0, 2]


def test_warnings_of_a_kind_are_counted_when_they_are_many(tmp_path: Path) -> None:
    files = {f"empty_{number:02d}.txt": "" for number in range(NAMED_PER_KIND + 5)}
    warnings = catalog_of(tmp_path, {**files, "book.txt": "text " * 99}).warnings
    assert len(warnings) == NAMED_PER_KIND + 1
    assert warnings[0] == "empty_00.txt is empty and was left out."
    assert warnings[-1].startswith("… and 5 more like the last one (empty_19.txt is empty")


def test_catalog_of_kept_parts_is_that_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_scan, "LEAST_BYTES", 0)
    shared = "".join(f"line {number} of a song!\n" for number in range(9))
    lines = [json.dumps({"text": f"story {number} " * 40 + "\ud800"}) for number in range(12)] + ['{"text": " "}']
    files = {
        **{f"{number:02d}.txt": f"{number} goes on and on.\n" * 99 + shared * (number < 2) for number in range(20)},
        "empty.txt": "",
        "nul.txt": "one\nt\0o\n" * 20,
        "lines.jsonl": "\n".join(lines),
    }
    read = catalog_of(tmp_path, files)
    assert len(list((tmp_path / "cache").iterdir())) == len(files)
    monkeypatch.setattr(document_scan, "scan_source", None)  # the files are not read again
    build_catalog.cache_clear()
    assert catalog_of(tmp_path, files) == read


def test_damaged_part_and_changed_settings_are_read_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_scan, "LEAST_BYTES", 0)
    files = {"book.txt": "One Line after another.\n" * 100}
    read = catalog_of(tmp_path, files)
    (part,) = (tmp_path / "cache").iterdir()
    part.write_bytes(part.read_bytes()[:-20])
    build_catalog.cache_clear()
    assert catalog_of(tmp_path, files) == read
    (source,) = [
        Source("book.txt", str(tmp_path / "book.txt"), 2400, hashlib.sha256(files["book.txt"].encode()).hexdigest())
    ]
    lower = Normalizer(detokenize=False, lowercase=True)
    scans = [document_scan.scan_documents(source, each, "text", tmp_path / "cache") for each in (PLAIN, lower)]
    assert scans[0].documents[0].sha256 != scans[1].documents[0].sha256


def test_packed_file_of_another_name_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_scan, "LEAST_BYTES", 0)
    content = gzip.compress(b"One line after another.\n" * 100)
    found = []
    for name in ("book.txt", "book.txt.gz"):
        (tmp_path / name).write_bytes(content)
        source = Source(name, str(tmp_path / name), len(content), hashlib.sha256(content).hexdigest())
        found.append(document_scan.scan_documents(source, PLAIN, "text", tmp_path / "cache").facts.text_bytes)
    assert found[1] == 2400 != found[0]


def novel(seed: int, n_lines: int = 300) -> str:
    words = random.Random(seed)
    return "".join(" ".join("".join(words.choices("abcdefgh", k=5)) for _ in range(8)) + ".\n" for _ in range(n_lines))


def shared_runs(catalog: Catalog) -> int:
    """Runs of eight lines of validation that stand in training."""
    sides = [[text.split("\n") for text in read_texts(side, SETTINGS)] for side in (catalog.val, catalog.train)]
    held, trained = ({tuple(t[i : i + 8]) for t in side for i in range(1, len(t) - 8)} for side in sides)
    return len(held & trained)


@pytest.mark.parametrize(
    "texts",
    [
        [novel(1), novel(2, 200) + novel(1)[-6000:]],
        [novel(1) + novel(2, 60), novel(2, 60)],
        [novel(1, 60) + novel(2) + novel(1, 60)],
        [novel(1, 60) + novel(2, 60) + novel(3) + novel(2, 60) + novel(1, 60)],
    ],
)
def test_stretch_of_a_document_that_is_held_out_stands_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    monkeypatch.setattr("rayjob.corpus.decoding.SLAB_BYTES", 1_000)
    catalog = catalog_of(tmp_path, {f"{number}.txt": text for number, text in enumerate(texts)})
    assert shared_runs(catalog) == 0
    assert not any("shares passages" in warning for warning in catalog.warnings)
    total = sum(map(len, texts))
    assert 0.15 * total < sum(stretch.bytes for stretch in catalog.val) < 0.25 * total
    assert sum(stretch.bytes for side in catalog.splits().values() for stretch in side) == total
    units = plan_units("train", catalog.train)
    read = "".join(part for unit in units for text in unit.texts(PLAIN) for part in text.parts)
    assert read == "".join(read_texts(catalog.train, SETTINGS))


def test_corpus_of_nothing_but_repeats_is_told(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, {"song.txt": "la la la, and again.\n" * 500})
    assert sum("shares passages" in warning for warning in catalog.warnings) == 1
