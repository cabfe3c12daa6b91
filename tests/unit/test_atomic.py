import errno
from pathlib import Path

import pytest

from rayjob.atomic import new_folder, read_object, remove_temporary, temporary_path, write_atomically


def test_failed_write_leaves_the_old_content_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_error_names_the_file_that_was_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # as a write does: without a name

    monkeypatch.setattr("rayjob.atomic.sync", fail)
    with pytest.raises(OSError, match="No space left on device: .*/file") as raised:
        write_atomically(tmp_path / "file", b"new")
    assert raised.value.filename == str(tmp_path / "file")


@pytest.mark.parametrize(
    ("content", "is_told"),
    [(b'{"a": 1}', False), (None, False), (b"", True), (b'{"a"', True), (b"\0\xff", True), (b"[1]", True)],
)
def test_object_that_is_damaged_is_passed_over_and_told(
    tmp_path: Path, content: bytes | None, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    assert read_object(path) == ({"a": 1} if content == b'{"a": 1}' else {})
    assert (f"{path} is damaged" in caplog.text) == is_told


def test_folder_appears_only_when_it_is_filled(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "folder"
    with new_folder(final) as fresh:
        (fresh / "file").write_text("x")
        assert not final.exists()
    assert (final / "file").read_text() == "x"
    assert list(final.parent.iterdir()) == [final]


def test_failed_folder_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with new_folder(tmp_path / "folder") as fresh:
            (fresh / "file").write_text("x")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_folder_that_another_process_made_first_stays(tmp_path: Path) -> None:
    final = tmp_path / "folder"
    with new_folder(final) as fresh:
        (fresh / "file").write_text("second")
        with new_folder(final) as faster:
            (faster / "file").write_text("first")
    assert (final / "file").read_text() == "first"
    assert list(tmp_path.iterdir()) == [final]


def test_only_temporary_files_are_removed(tmp_path: Path) -> None:
    kept, hidden = tmp_path / "part-00000.parquet", tmp_path / ".hidden"
    for path in (kept, hidden, temporary_path(kept)):
        path.write_text("x")
    remove_temporary(tmp_path)
    assert sorted(tmp_path.iterdir()) == [hidden, kept]


def test_temporary_folder_is_removed_with_what_it_holds(tmp_path: Path) -> None:
    leftover = temporary_path(tmp_path / "tokenizer")
    leftover.mkdir()
    (leftover / "file").write_text("x")
    remove_temporary(tmp_path)
    assert list(tmp_path.iterdir()) == []
