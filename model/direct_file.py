"""Writes a file past the system's page cache, where the file system can.

A checkpoint is written beside the training that goes on, and filling the page cache takes a processor up to two seconds
for a gigabyte, which on a machine without a GPU are missing from the steps. Nobody reads the file soon.
"""

import errno
import fcntl
import hashlib
import mmap
import os
from pathlib import Path
from typing import Self

# A multiple of every block size, and small enough to be still in the processor's cache when it is hashed and written.
_BUFFER_BYTES = 1 << 20


class DirectFile:
    """A new file that is written once from its begin to its end, hashed on the way, and on disk when it is closed.

    Copies into a buffer of its own, for the system takes only whole blocks at whole addresses. What is left for the
    end goes through the page cache.

    Attributes:
        size: bytes written.
        digest: sha256 of them.
    """

    def __init__(self, path: Path) -> None:
        self.size, self.digest = 0, hashlib.sha256()
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES))  # begins at a page
        self._descriptor = _open(path)
        self._filled = 0

    def write(self, content: bytes | memoryview) -> None:
        begin = 0
        while begin < len(content):
            part = content[begin : begin + _BUFFER_BYTES - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            begin += len(part)
            if self._filled == _BUFFER_BYTES:
                self._empty_buffer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                _leave_direct(self._descriptor)
                self._empty_buffer()
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def _empty_buffer(self) -> None:
        rest = self._buffer[: self._filled]
        self.digest.update(rest)
        self.size += len(rest)
        while rest:
            rest = rest[_write(self._descriptor, rest) :]
        self._filled = 0


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)


def _write(descriptor: int, content: memoryview) -> int:
    try:
        return os.write(descriptor, content)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _leave_direct(descriptor)  # a network file system may refuse only now, and any after a write cut short
        return os.write(descriptor, content)


def _leave_direct(descriptor: int) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
