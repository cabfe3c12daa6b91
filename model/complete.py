"""The file COMPLETE: written last into a checkpoint, it names every other file with its size and sha256.

A folder without it, or with a file that differs from it, is not a checkpoint. Files are hashed while they are
written, so that a save reads nothing back.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from model.direct_file import DirectFile

COMPLETE = "COMPLETE"

Files = dict[str, dict[str, Any]]  # {name relative to the checkpoint: {"size": bytes, "sha256": hex}}


class CheckpointError(ValueError):
    """A folder is not a sound checkpoint; the message names the folder, the file and the reason."""


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Writes `parts` one after another, syncs the file to disk and returns its entry for COMPLETE.

    Writing and hashing leave the GIL alone; a training thread is held up for the copy of one buffer at most.
    """
    with DirectFile(path) as file:
        for part in parts:
            file.write(part)
    return {"size": file.size, "sha256": file.digest.hexdigest()}


def write_complete(folder: Path, files: Files) -> None:
    """Writes COMPLETE, which vouches for `files`; they are on disk already.

    Raises:
        CheckpointError: the folder does not hold what `files` says.
    """
    for name in files:
        verify_size(folder, name, files)
    write_file(folder / COMPLETE, [_render(files)])
    for subfolder in {(folder / name).parent for name in files}:
        sync(subfolder)


def read_complete(folder: Path) -> Files:
    """Returns {file: {"size": bytes, "sha256": hex}} for every file of the folder, by its relative name.

    Raises:
        CheckpointError: COMPLETE is missing, or not exactly as a save writes it.
    """
    path = folder / COMPLETE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder} has no {COMPLETE} file, so it is no checkpoint or its save was interrupted."
        ) from error
    try:
        files: Files = json.loads(content)["files"]
        is_as_written = content == _render(files) and all(map(_is_entry, files.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        is_as_written = False
    if not is_as_written:
        raise CheckpointError(f"{path} is damaged: it is not what a save writes.")
    return files


def verify_files(folder: Path, names: Iterable[str]) -> None:
    """Compares the size and sha256 of the named files with COMPLETE.

    Raises:
        CheckpointError: COMPLETE or a file is missing or damaged, or cannot be read.
    """
    files = read_complete(folder)

    def verify(name: str) -> None:
        verify_size(folder, name, files)
        if _sha256(folder / name) != files[name]["sha256"]:
            raise CheckpointError(f"{folder / name} is damaged: its sha256 is not the one in {COMPLETE}.")

    with ThreadPoolExecutor() as pool:  # hashing leaves the GIL alone
        list(pool.map(verify, names))


def verify_size(folder: Path, name: str, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Compares one file's size with its entry in `files`; raises CheckpointError as `verify_files` does."""
    path = folder / name
    if name not in files:
        raise CheckpointError(f"{folder / COMPLETE} does not name {name}, which every checkpoint has.")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, though {COMPLETE} names it: the checkpoint is damaged.")
    if path.stat().st_size != files[name]["size"]:
        raise CheckpointError(
            f"{path} is damaged: it has {path.stat().st_size} bytes, {COMPLETE} says {files[name]['size']}."
        )


def sync(path: Path) -> None:
    """Makes the content of a file, or the entries of a folder, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.keys() == {"size", "sha256"}


def _render(files: Mapping[str, Mapping[str, Any]]) -> bytes:
    return json.dumps({"files": files}, indent=2, sort_keys=True).encode() + b"\n"


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
