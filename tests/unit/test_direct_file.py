"""Files written past the page cache are those that a plain write makes, wherever they are written."""

import errno
import fcntl
import hashlib
import os
from pathlib import Path

import pytest

from model import direct_file
from model.direct_file import DirectFile

BLOCK = 4096


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "_BUFFER_BYTES", 2 * BLOCK)


@pytest.fixture
def shared_memory() -> Path:
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("no file system in memory here")
    return folder


def write(path: Path, parts: list[bytes]) -> None:
    with DirectFile(path) as file:
        for part in parts:
            file.write(part)
    content = b"".join(parts)
    assert path.read_bytes() == content
    assert file.size == len(content)
    assert file.digest.hexdigest() == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("size", [0, 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 7 * BLOCK + 13])
def test_content_is_whole_at_every_size_and_cut(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    for cut in (1, 1000, BLOCK, 3 * BLOCK, size or 1):
        write(tmp_path / "a", [content[begin : begin + cut] for begin in range(0, size, cut)])


def test_whole_buffers_go_past_the_page_cache_and_only_the_rest_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of the tests takes no direct writes")
    writes = []
    plain_write = os.write

    def watched_write(descriptor: int, content: memoryview) -> int:
        writes.append((bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT), len(content)))
        return plain_write(descriptor, content)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", watched_write)
        write(tmp_path / "a", [os.urandom(4 * BLOCK + 7)])
    assert writes == [(True, 2 * BLOCK), (True, 2 * BLOCK), (False, 7)]


def test_shorter_file_replaces_a_longer_one(tmp_path: Path) -> None:
    write(tmp_path / "a", [b"x" * 5 * BLOCK])
    write(tmp_path / "a", [b"y" * 10])


def test_file_system_in_memory_takes_it_too(shared_memory: Path) -> None:
    path = shared_memory / f"direct-file-{os.getpid()}"
    try:
        write(path, [os.urandom(5 * BLOCK + 7)])
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("refusal", ["open", "write"])
def test_file_system_that_refuses_gets_a_plain_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    """Kernels and network file systems differ in when they say so."""
    refused = []
    plain_open, plain_write = os.open, os.write

    def refusing_open(path: Path, flags: int, mode: int) -> int:
        if refusal == "open" and flags & os.O_DIRECT:
            refused.append(refusal)
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain_open(path, flags, mode)

    def refusing_write(descriptor: int, content: memoryview) -> int:
        if refusal == "write" and not refused:
            refused.append(refusal)
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain_write(descriptor, content)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing_open)
        patch.setattr(os, "write", refusing_write)
        content = os.urandom(5 * BLOCK + 7)
        with DirectFile(tmp_path / "a") as file:
            file.write(content)
    assert refused == [refusal]
    assert (tmp_path / "a").read_bytes() == content


def test_write_cut_short_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, content: plain_write(descriptor, content[: max(1, BLOCK // 3)]))
        content = os.urandom(3 * BLOCK + 7)
        with DirectFile(tmp_path / "a") as file:
            file.write(content)
    assert (tmp_path / "a").read_bytes() == content


def test_error_leaves_no_open_file_and_is_not_hidden(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(TypeError), DirectFile(tmp_path / "a") as file:
        file.write(None)  # type: ignore[arg-type]
    assert len(os.listdir("/proc/self/fd")) == len(before)
