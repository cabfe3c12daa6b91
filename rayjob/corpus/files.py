"""Finds and opens the files of a corpus, on a mounted file system or under s3:// (store/s3.py)."""

import fnmatch
import glob
import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple, cast

import pyarrow as pa
import pyarrow.fs

from rayjob.store.address import S3, is_remote
from rayjob.store.s3 import file_system

HASH_BYTES = 2**20  # read at a time


class FoundFiles(NamedTuple):
    """The folder that names are relative to, and the files that one path stands for."""

    folder: str
    files: list[str]


def has_magic(path: str) -> bool:
    """Whether a path is a glob."""
    return glob.has_magic(path)


def is_folder(path: str) -> bool:
    """Whether a path is a folder; False if nothing is there."""
    if is_remote(path):
        return bool(_s3_info(path).type == pa.fs.FileType.Directory)
    return os.path.isdir(os.path.expanduser(path))


def expand(path: str, suffixes: tuple[str, ...]) -> FoundFiles:
    """The files of a folder, to the bottom, with one of the suffixes; or the file; or all that match the glob.

    Hidden files and folders are passed over, and of links that lead back into their own folder.

    Raises:
        OSError: the object store does not answer, or a folder cannot be listed.
    """
    if is_remote(path):
        return _expand_s3(path, suffixes)
    path = os.path.abspath(os.path.expanduser(path))
    if os.path.isdir(path):
        return FoundFiles(path, [file for file in _files_below(path) if file.lower().endswith(suffixes)])
    if os.path.isfile(path):
        return FoundFiles(os.path.dirname(path), [path])
    matches = [file for file in glob.glob(path, recursive=True) if _is_file(file)]
    return FoundFiles(_fixed_folder(path), matches)


def _files_below(folder: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """The files of a folder, not entering one that holds any of `above`, the real paths of the folders around it.

    A folder that cannot be listed is an error: the corpus would lack its files.
    """
    around = (*above, os.path.realpath(folder))
    with os.scandir(folder) as entries:
        paths = [entry.path for entry in entries if not entry.name.startswith(".")]
    for path in paths:
        if not os.path.isdir(path):
            yield from [path] if _is_file(path) else []
        elif not any(_holds(os.path.realpath(path), outer) for outer in around):
            yield from _files_below(path, around)


def _is_file(path: str) -> bool:
    """Whether a path is a file, or a link to nowhere: a file that is missing, and reading it says so."""
    return os.path.isfile(path) or (os.path.islink(path) and not os.path.exists(path))


def _holds(folder: str, other: str) -> bool:
    return os.path.join(other, "").startswith(os.path.join(folder, ""))


def open_input(path: str) -> pa.NativeFile:
    """A file open for reading at random places.

    Raises:
        OSError: it is not there or cannot be read.
    """
    return file_system().open_input_file(path.removeprefix(S3)) if is_remote(path) else pa.OSFile(path, "rb")


def open_binary(path: str) -> IO[bytes]:
    """A file open for reading, as Python's own functions take it."""
    return io.BufferedReader(cast(io.RawIOBase, open_input(path))) if is_remote(path) else open(path, "rb")


def sha256_of(path: str) -> str:
    """sha256 of a file's bytes, in hex."""
    if not is_remote(path):
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    # The file as it lies: by default a .gz is unpacked on the way.
    with file_system().open_input_stream(path.removeprefix(S3), compression=None) as stream:
        while data := stream.read(HASH_BYTES):
            digest.update(data)
    return digest.hexdigest()


def stamp_of(path: str) -> list[int]:
    """[bytes, mtime_ns, ctime_ns] of a file; an object store has no ctime, so 0.

    Raises:
        OSError: it is not there.
    """
    if not is_remote(path):
        stat = os.stat(path)
        return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    info = _s3_info(path)
    if info.type != pa.fs.FileType.File:
        raise FileNotFoundError(f"there is no such object: {path}")
    return [info.size, info.mtime_ns or 0, 0]


def _s3_info(path: str) -> pa.fs.FileInfo:
    return file_system().get_file_info(path.removeprefix(S3).rstrip("/"))


def _expand_s3(path: str, suffixes: tuple[str, ...]) -> FoundFiles:
    path = path.rstrip("/")
    kind = _s3_info(path).type  # before the glob: a name may hold its characters, as on a disk
    if kind == pa.fs.FileType.Directory:
        return FoundFiles(path, [file for file in _list_s3(path) if file.lower().endswith(suffixes)])
    if kind == pa.fs.FileType.File or not has_magic(path):
        return FoundFiles(os.path.dirname(path), [path] if kind == pa.fs.FileType.File else [])
    folder = _fixed_folder(path)
    return FoundFiles(folder, [file for file in _list_s3(folder) if _matches(file.split("/"), path.split("/"))])


def _list_s3(folder: str) -> Sequence[str]:
    selector = pa.fs.FileSelector(folder.removeprefix(S3), recursive=True, allow_not_found=True)
    return [S3 + info.path for info in file_system().get_file_info(selector) if info.type == pa.fs.FileType.File]


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path matches a glob, part by part as on a disk: only ** reaches across folders."""
    if not parts or not pattern:
        return not parts and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or _matches(parts[1:], pattern)
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _fixed_folder(pattern: str) -> str:
    while glob.has_magic(pattern):
        pattern = os.path.dirname(pattern)
    return pattern
