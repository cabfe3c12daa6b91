import hashlib
from pathlib import Path

from model.normalizer import Normalizer
from rayjob.corpus.catalog import NAMED_PER_KIND, Catalog, CatalogSettings, build_catalog, read_texts
from rayjob.corpus.sources import Source

SETTINGS = CatalogSettings(Normalizer(detokenize=False, lowercase=False), "text", dedup=True, val_fraction=0.2)


def catalog_of(folder: Path, files: dict[str, str]) -> Catalog:
    sources = []
    for name, text in sorted(files.items()):
        (folder / name).write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest()
        sources.append(Source(name, str(folder / name), len(text), digest))
    return build_catalog(tuple(sources), SETTINGS, lambda: False)


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
    catalog = build_catalog(tuple(sources), SETTINGS, lambda: False)
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
