"""Files and folders that appear whole or not at all: temporary name, fsync, rename.

In the mirror of an object store they are published as soon as they stand here; those of a run go with its saves.
"""

import contextlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model.complete import sync
from rayjob.store.publish import publish_folder, publish_written

logger = logging.getLogger(__name__)

TEMPORARY_SUFFIX = ".tmp"


def temporary_path(final: Path) -> Path:
    """A hidden name beside `final` that no other process picks."""
    return final.with_name(f".{final.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")


def write_atomically(path: Path, data: bytes) -> None:
    """Writes `data` to `path`, replacing what stood there; a kill leaves the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    try:
        temporary.write_bytes(data)
        sync(temporary)
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = str(path)  # a write to a full disk names no file, and the temporary one says nothing
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)
    publish_written(path)


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a small file; nothing where there is none, or what a machine's end has left of it."""
    if not path.exists():
        return {}
    with contextlib.suppress(ValueError):
        if isinstance(found := json.loads(path.read_bytes()), dict):
            return found
    logger.warning("%s is damaged: it is passed over, and written anew when its time comes.", path)
    return {}


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """An empty folder to fill, renamed to `final` when the block ends without an error.

    When another process has made `final` meanwhile, that one stays: equal names mean equal content here.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(final)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        if not final.exists():
            os.rename(temporary, final)
    except OSError:
        if not final.exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync(final.parent)
    publish_folder(final)


def remove_temporary(folder: Path) -> None:
    """Deletes what killed writers left under temporary names directly in `folder`."""
    for path in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
