"""How fast a run's storage takes a checkpoint and gives it back, unchanged, and what space it has for more."""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from model.checkpoint import list_checkpoints
from rayjob.store.address import uri_of
from rayjob.store.s3 import delete_file, download, upload

PROBE_FILE = "preflight.tmp"  # nothing publishes, adopts or keeps a .tmp
_PIECE_BYTES = 32 << 20  # synced one by one, for a system takes any amount into memory at once
_MOST_S = 3.0  # of writing: a slow storage is known by then, and waiting for the whole would only cost
_MOST_BYTES_TO_STORE = 32 << 20  # an object store's rate is known by then


class StorageFault(OSError):
    """What was read back is not what was written."""


@dataclass(frozen=True, slots=True)
class StorageSpeed:
    """Rates in bytes per second, synced to disk, or to the object store where that is the storage."""

    write_bytes_per_s: float
    read_bytes_per_s: float


def measure_storage(run_folder: Path, n_bytes: int) -> StorageSpeed:
    """Writes up to `n_bytes` into the run's folder, as long as that takes no more than seconds, and reads them back.

    Raises:
        OSError: the storage does not take them, or returns others.
    """
    run_folder.mkdir(parents=True, exist_ok=True)
    path = run_folder / PROBE_FILE
    try:
        uri = uri_of(path)
        speed = _measure_file(path, n_bytes if uri is None else min(n_bytes, _MOST_BYTES_TO_STORE))
        return speed if uri is None else _measure_store(path, uri)
    finally:
        path.unlink(missing_ok=True)


def missing_bytes(run_folder: Path, checkpoint_bytes: int, keep: int) -> int:
    """Returns what the checkpoints will take that are not there yet: those kept, the best, and one being written."""
    return max(1, keep + 2 - len(list_checkpoints(run_folder))) * checkpoint_bytes


def free_bytes(run_folder: Path) -> int | None:
    """Returns the free space of the file system, None where it does not tell."""
    usage = shutil.disk_usage(run_folder)
    return usage.free if usage.total else None


def _measure_file(path: Path, n_bytes: int) -> StorageSpeed:
    piece = os.urandom(min(n_bytes, _PIECE_BYTES))  # a file system that compresses gains nothing
    started_at_s = time.perf_counter()
    written = 0
    with path.open("wb") as file:
        while written < n_bytes and (written == 0 or time.perf_counter() - started_at_s < _MOST_S):
            written += file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    write_s = time.perf_counter() - started_at_s
    started_at_s = time.perf_counter()
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # from the storage, not from memory
        read = 0
        while back := file.read(len(piece)):
            if back != piece:
                raise StorageFault(f"{path} does not read as it was written, {read:,} bytes in")
            read += len(back)
    if read != written:
        raise StorageFault(f"{path} reads as {read:,} of the {written:,} bytes that were written")
    return StorageSpeed(written / write_s, read / (time.perf_counter() - started_at_s))


def _measure_store(path: Path, uri: str) -> StorageSpeed:
    content = path.read_bytes()
    started_at_s = time.perf_counter()
    upload(path, uri)
    uploaded_at_s = time.perf_counter()
    try:
        download(uri, path)
    finally:
        delete_file(uri)
    read_s = time.perf_counter() - uploaded_at_s
    if path.read_bytes() != content:
        raise StorageFault(f"{uri} does not read as it was written")
    return StorageSpeed(len(content) / (uploaded_at_s - started_at_s), len(content) / read_s)
