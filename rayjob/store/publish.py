"""From a mirror to the object store; a path outside of mirrors is left alone.

What is finished is published by the process that finished it, on whichever node that is.
"""

import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rayjob.store.address import is_of_a_run, uri_of
from rayjob.store.s3 import delete_folder, stored_below, upload

_THREADS = 8


def publish_file(path: Path) -> None:
    """Copies a file to the address that it mirrors.

    Raises:
        OSError: the store does not take it; the file here stays.
    """
    if uri := uri_of(path):
        upload(path, uri)


def publish_written(path: Path) -> None:
    """Copies a file that was just written; that of a run goes with the next save, so no store delays training."""
    if uri_of(path) and not is_of_a_run(path):
        publish_file(path)


def publish_files(paths: Iterable[Path]) -> None:
    """Copies files, several at a time, in no order; raises as `publish_file` does."""
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(publish_file, paths))


def publish_folder(folder: Path) -> None:
    """Copies the files directly in a folder, one by one in the order of their names: the last makes it complete."""
    if uri_of(folder):
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            publish_file(path)


def publish_missing(folder: Path, last: str = "") -> None:
    """Copies the files below a mirrored folder that the store does not have, `last` after all the others.

    Args:
        last: name of the file directly in the folder that makes it complete, if one does.
    """
    if uri_of(folder) is None:
        return
    stored = stored_below(folder)
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    missing = {path for path in files if path not in stored or stored[path].bytes != path.stat().st_size}
    publish_files(missing - {folder / last})
    publish_files(missing & {folder / last})


def withdraw_folder(folder: Path) -> None:
    """Removes a folder, here and at the address that it mirrors; nothing if it is not there."""
    shutil.rmtree(folder, ignore_errors=True)
    if uri := uri_of(folder):
        delete_folder(uri)
