"""File systems that are full, read-only or frozen, made for a test; needs the right to mount."""

import errno
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted_memory(folder: Path, size: str) -> Iterator[Path]:
    """Mounts a small file system in memory; skips the test where that is not permitted."""
    with _mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "tmpfs"):
        yield folder


@contextmanager
def mounted_image(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mounts an ext4 file system that can be frozen; skips the test where that is not permitted."""
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(size_bytes)
    _require("mkfs.ext4", "-q", "-F", str(image))
    with _mounted(folder, "-o", "loop", str(image)):
        yield folder
    image.unlink()


@contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Lets every write to a mounted file system hang for the length of the block."""
    _require("fsfreeze", "--freeze", str(folder))
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(folder)], check=True)


def set_read_only(folder: Path, is_read_only: bool) -> None:
    """Makes a mounted file system refuse writes, or take them again."""
    subprocess.run(["mount", "-o", f"remount,{'ro' if is_read_only else 'rw'}", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Writes a file until there is no space left for a single block, and returns it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1 << 9):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return filler


@contextmanager
def _mounted(folder: Path, *arguments: str) -> Iterator[None]:
    folder.mkdir()
    _require("mount", *arguments, str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _require(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else error
        pytest.skip(f"`{' '.join(command)}` is not possible here: {reason}")
