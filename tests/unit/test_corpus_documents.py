import gzip
import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.normalizer import Normalizer
from rayjob.corpus.documents import (
    PIECE_CHARS,
    cut_pieces,
    decode_bytes,
    find_cut,
    read_document,
    scan_source,
)
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.sources import Source

PLAIN = Normalizer(detokenize=False, lowercase=False)


def source(folder: Path, name: str, content: bytes) -> Source:
    path = folder / name
    path.write_bytes(content)
    return Source(name, str(path), len(content), hashlib.sha256(content).hexdigest())


def test_valid_utf8_is_read_as_it_is() -> None:
    assert decode_bytes("naïve “quotes” 漢字 🙂\n".encode()) == ("naïve “quotes” 漢字 🙂\n", 0)


def test_bytes_that_are_not_utf8_are_read_as_windows_1252_and_counted() -> None:
    assert decode_bytes("“café” – it’s".encode("cp1252")) == ("“café” – it’s", 5)


def test_one_bad_byte_does_not_spoil_the_good_ones() -> None:
    assert decode_bytes("naïve ".encode() + b"caf\xe9 " + "漢字".encode()) == ("naïve café 漢字", 1)


def test_byte_without_a_windows_1252_character_becomes_the_replacement_character() -> None:
    assert decode_bytes(b"a\x81b") == ("a\N{REPLACEMENT CHARACTER}b", 1)


def test_lone_surrogate_is_one_replacement_character() -> None:
    assert decode_bytes(b"a \xed\xa0\x80 \xed\xbf\xbfb") == ("a \ufffd \ufffdb", 6)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf16_with_a_byte_order_mark_is_read(encoding: str) -> None:
    mark = b"" if encoding == "utf-16" else b"\xfe\xff"
    assert decode_bytes(mark + "Ein Café\n".encode(encoding)) == ("Ein Café\n", 0)


@given(st.binary(max_size=200))
def test_any_bytes_give_text_that_can_be_encoded(data: bytes) -> None:
    text, invalid = decode_bytes(data)
    assert invalid <= len(data)
    PLAIN(text).encode()


def test_blank_lines_indentation_and_end_of_a_text_survive(tmp_path: Path) -> None:
    text = "\n\n  Chapter 1\n\n\n\tIt was.\n   \n\n"
    [scanned] = scan_source(source(tmp_path, "blank.txt", text.encode()), PLAIN, "text")
    assert scanned.text == text


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
    assert [(one.document.doc_id, one.text, one.odd.invalid_bytes) for one in scanned] == [
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
    for scanned in scan_source(source(tmp_path, name, content), PLAIN, "text"):
        assert read_document(scanned.document, PLAIN) == scanned.text


def test_document_that_changed_after_the_scan_is_refused(tmp_path: Path) -> None:
    [scanned] = scan_source(source(tmp_path, "a.txt", b"before"), PLAIN, "text")
    (tmp_path / "a.txt").write_bytes(b"after!")
    with pytest.raises(CorpusError, match="a.txt changed while"):
        read_document(scanned.document, PLAIN)


def test_file_that_changed_after_it_was_hashed_is_refused(tmp_path: Path) -> None:
    hashed = source(tmp_path, "a.txt", b"before")
    (tmp_path / "a.txt").write_bytes(b"after!")
    with pytest.raises(CorpusError, match="a.txt changed while"):
        list(scan_source(hashed, PLAIN, "text"))


@given(st.text(alphabet="ab \n漢", max_size=60), st.integers(1, 20))
def test_pieces_join_to_the_text_and_are_bounded(text: str, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayjob.corpus.documents.PIECE_CHARS", limit)
        pieces = cut_pieces(text)
    assert "".join(text[piece.start : piece.stop] for piece in pieces) == text
    assert all(0 < piece.stop - piece.start <= limit for piece in pieces)
    assert sum(piece.bytes for piece in pieces) == len(text.encode())


def test_long_line_is_cut_before_white_space() -> None:
    text = "word " * (3 * PIECE_CHARS // 5)
    pieces = cut_pieces(text)
    assert len(pieces) > 2
    assert all(text[piece.start] == " " and text[piece.start - 1] != " " for piece in pieces[1:])


def test_cut_falls_at_the_end_of_a_word_or_at_the_limit() -> None:
    assert find_cut("one two   three", 0, 11) == 7
    assert find_cut("one two   three", 0, 9) == 7
    assert find_cut("unbroken", 0, 5) == 5
    assert find_cut("     ", 0, 3) == 3
