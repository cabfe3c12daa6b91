"""From the object store to a mirror; a path outside of mirrors is what it is.

What is here already stays: equal names mean equal content, but for the files of a run (runs.py).
"""

import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rayjob.atomic import temporary_path
from rayjob.store.address import uri_of
from rayjob.store.s3 import download, stored_below

_THREADS = 16


def fetch_file(path: Path) -> bool:
    """Makes a mirrored file be here; False if it is neither here nor there.

    Raises:
        OSError: the store does not answer, or there is no room here.
    """
    if path.exists():
        return True
    uri = uri_of(path)
    return uri is not None and replace_file(path, uri)


def replace_file(path: Path, uri: str) -> bool:
    """Puts an object in a file's place, whole or not at all; False if there is no such object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        if not download(uri, temporary):
            return False
        os.replace(temporary, path)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def fetch_folder(folder: Path, last: str) -> bool:
    """Makes a mirrored folder be here, whole or not at all; False if it is neither here nor there.

    Args:
        last: the name of the file that was published last, without which the folder is not complete.
    """
    uri = uri_of(folder)
    if folder.is_dir() or uri is None:
        return folder.is_dir()
    stored = stored_below(folder)
    if folder / last not in stored:
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(folder)
    temporary.mkdir()
    try:
        if not all(download(found.uri, temporary / path.name) for path, found in stored.items()):
            return False  # removed there meanwhile
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():  # else another process was as fast
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def fetch_tree(folder: Path) -> None:
    """Fetches every file below a mirrored folder that is not here, several at a time."""
    _fetch(stored_below(folder))


def fetch_some(folder: Path, paths: Iterable[Path]) -> None:
    """Fetches those of some files in a mirrored folder that the store has and that are not here."""
    missing = [path for path in paths if not path.exists()]
    if missing:
        _fetch(stored_below(folder).keys() & missing)


def _fetch(paths: Iterable[Path]) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(fetch_file, paths))


def fetch_tree_as(folder: Path, target: Path) -> None:
    """Copies what the store has below a mirrored folder into another folder here, several files at a time."""
    stored = stored_below(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda path: replace_file(target / path.relative_to(folder), stored[path].uri), stored))
