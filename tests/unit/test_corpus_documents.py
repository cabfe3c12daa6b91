import gzip
import hashlib
import json
import tracemalloc
from pathlib import Path

import pytest

from model.normalizer import Normalizer
from rayjob.corpus.documents import Document, Oddities, find_cut, read_pieces, scan_source
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.sources import Source

PLAIN = Normalizer(detokenize=False, lowercase=False)


def source(folder: Path, name: str, content: bytes) -> Source:
    path = folder / name
    path.write_bytes(content)
    return Source(name, str(path), len(content), hashlib.sha256(content).hexdigest())


def document_of(text: Source) -> Document:
    [scanned] = scan_source(text, PLAIN, "text")
    return scanned.document


def read(document: Document) -> str:
    return "".join(read_pieces(document, document.pieces, PLAIN))


def test_blank_lines_indentation_and_end_of_a_text_survive(tmp_path: Path) -> None:
    text = "\n\n  Chapter 1\n\n\n\tIt was.\n   \n\n"
    assert read(document_of(source(tmp_path, "blank.txt", text.encode()))) == text


def test_the_forms_of_a_text_give_the_same_document(tmp_path: Path) -> None:
    text = "\ufeffOne.\r\n\r\nTwo – “three”.\r\n"
    files = {
        "plain.txt": text.encode(),
        "packed.txt.gz": gzip.compress(text.encode()),
        "rows.jsonl": json.dumps({"text": text}).encode() + b"\n",
    }
    scanned = [next(scan_source(source(tmp_path, *file), PLAIN, "text")) for file in files.items()]
    assert len({one.document.sha256 for one in scanned}) == 1
    assert [one.document.doc_id for one in scanned] == ["plain.txt", "packed.txt.gz", "rows.jsonl:1"]


def test_lines_of_jsonl_are_documents_with_their_line_number(tmp_path: Path) -> None:
    rows = b'\xef\xbb\xbf{"text": "first\\nline"}\n\n{"n": 1, "text": "caf\xe9"}\r\n{"text": "no end of line"}'
    scanned = list(scan_source(source(tmp_path, "rows.jsonl", rows), PLAIN, "text"))
    assert [(one.document.doc_id, read(one.document), one.odd.invalid_bytes) for one in scanned] == [
        ("rows.jsonl:1", "first\nline", 0),
        ("rows.jsonl:3", "café", 1),
        ("rows.jsonl:4", "no end of line", 0),
    ]


@pytest.mark.parametrize("line", ["{broken", '["text"]', '{"other": "x"}', '{"text": 3}', "[" * 100_000])
def test_bad_line_of_jsonl_is_named(tmp_path: Path, line: str) -> None:
    rows = source(tmp_path, "rows.jsonl", b'{"text": "good"}\n' + line.encode())
    with pytest.raises(CorpusError, match="rows.jsonl:2"):
        list(scan_source(rows, PLAIN, "text"))


def test_file_that_is_no_gzip_is_named(tmp_path: Path) -> None:
    for content in (b"plain text", gzip.compress(b"x" * 1000)[:-12]):
        with pytest.raises(CorpusError, match="bad.txt.gz cannot be read"):
            list(scan_source(source(tmp_path, "bad.txt.gz", content), PLAIN, "text"))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
def test_scanned_document_reads_back_as_the_same_text(tmp_path: Path, name: str) -> None:
    content = {
        "a.txt": b"caf\xe9\r\n\x00 end",
        "a.txt.gz": gzip.compress("naïve".encode()),
        "a.jsonl": b'{"text": "one"}\n{"text": "tw\xf6 \\ud800"}\n',
    }[name]
    texts = {"a.txt": ["café\n\ufffd end"], "a.txt.gz": ["naïve"], "a.jsonl": ["one", "twö \ufffd"]}[name]
    scanned = scan_source(source(tmp_path, name, content), PLAIN, "text")
    assert [read(each.document) for each in scanned] == texts


def test_document_that_changed_after_the_scan_is_refused(tmp_path: Path) -> None:
    document = document_of(source(tmp_path, "a.txt", b"before"))
    for changed in (b"after!", b"bef"):
        (tmp_path / "a.txt").write_bytes(changed)
        with pytest.raises(CorpusError, match="a.txt changed while"):
            read(document)


def test_file_that_changed_after_it_was_hashed_is_refused(tmp_path: Path) -> None:
    hashed = source(tmp_path, "a.txt", b"before")
    (tmp_path / "a.txt").write_bytes(b"after!")
    with pytest.raises(CorpusError, match="a.txt changed while"):
        list(scan_source(hashed, PLAIN, "text"))


def test_long_text_is_read_in_pieces_that_join_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {number} of a naïve 漢字 story\r\n" for number in range(400)) + "the end"
    files = {
        "a.txt": text.encode() + b" caf\xe9",
        "a.txt.gz": gzip.compress(text.encode()),
        "utf16.txt": text.encode("utf-16") + b"x",
        "a.jsonl": json.dumps({"text": text + "\ud800"}).encode(),
    }
    sources = [source(tmp_path, *file) for file in files.items()]
    whole = [document_of(each) for each in sources]
    monkeypatch.setattr("rayjob.corpus.decoding.SLAB_BYTES", 1000)
    for each, before in zip(sources, whole, strict=True):
        [scanned] = scan_source(each, PLAIN, "text")
        document, pieces = scanned.document, scanned.document.pieces
        assert (document.sha256, document.bytes) == (before.sha256, before.bytes)
        assert len(pieces) > 10
        assert [piece.is_end for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert "".join(read_pieces(document, pieces[3:7], PLAIN)) == "".join(
            "".join(read_pieces(document, [piece], PLAIN)) for piece in pieces[3:7]
        )
        assert read(document) == read(before)


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_first_odd_line_is_counted_over_all_slabs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line_end: str
) -> None:
    monkeypatch.setattr("rayjob.corpus.decoding.SLAB_BYTES", 50)
    text = "".join(f"line {number}{line_end}" for number in range(1, 100))
    contents = [
        text.encode() + b"caf\xe9" + line_end.encode() + b"t\0o \xe9\0",
        text.encode("utf-16") + f"\0\0{line_end}".encode("utf-16-le") + b"x",
    ]
    odd = [next(scan_source(source(tmp_path, "odd.txt", content), PLAIN, "text")).odd for content in contents]
    assert odd == [Oddities(2, 2, 100, 101), Oddities(1, 2, 101, 100)]


def test_memory_does_not_grow_with_the_length_of_a_file(tmp_path: Path) -> None:
    def peak_bytes(n_bytes: int) -> int:
        line = b"it is n't so long . " * 200 + b"\n"  # few lines and no long sentence, of which hashes are kept
        long = source(tmp_path, "long.txt", line * (n_bytes // len(line)))
        tracemalloc.start()
        list(scan_source(long, Normalizer(detokenize=True, lowercase=True), "text"))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_bytes(2**19)  # what the first call of anything takes
    assert peak_bytes(2**24) < 1.1 * peak_bytes(2**22)  # a piece takes some 300 bytes


def test_line_that_cannot_be_a_document_is_told_before_the_next_is_read(tmp_path: Path) -> None:
    rows = source(tmp_path, "rows.jsonl", b'{"text": "good"}\r{"text": "better"}\rbad')
    scanned = scan_source(rows, PLAIN, "text")
    assert [next(scanned).document.doc_id for _ in range(2)] == ["rows.jsonl:1", "rows.jsonl:2"]
    with pytest.raises(CorpusError, match="rows.jsonl:3"):
        next(scanned)


def test_cut_falls_at_the_end_of_a_word_or_at_the_limit() -> None:
    assert find_cut("one two   three", 0, 11) == 7
    assert find_cut("one two   three", 0, 9) == 7
    assert find_cut("unbroken", 0, 5) == 5
    assert find_cut("     ", 0, 3) == 3
