"""The sqlite store of MLflow beside mirrored runs: MLflow works on the mirror, copies of it go to the object store.

A copy is taken through sqlite, so it is whole while MLflow writes. Metrics that a lost pod had not copied are sent to
MLflow again from metrics.csv.
"""

import logging
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from rayjob.store.address import address_of, uri_of
from rayjob.store.fetch import fetch_file, fetch_tree
from rayjob.store.publish import publish_missing
from rayjob.store.s3 import upload

logger = logging.getLogger(__name__)

_DATABASE, _ARTIFACTS = "mlflow.db", "artifacts"
_LOCK_TIMEOUT_S = 10.0


def publish_mlflow(folder: Path) -> None:
    """Copies the database and new artifacts of a mirrored store, if this storage has one.

    Raises:
        OSError: the object store does not take it.
    """
    database = folder / _DATABASE
    if uri_of(folder) is None or not database.exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / _DATABASE
        try:
            _copy_database(database, copy)
        except sqlite3.Error as error:
            logger.warning("%s cannot be copied now (%s): the next save does it.", database, error)
        else:
            upload(copy, address_of(database))
    publish_missing(folder / _ARTIFACTS)


def fetch_mlflow(folder: Path) -> None:
    """Fetches a mirrored store where this machine has none."""
    if uri_of(folder) is not None and not (folder / _DATABASE).exists():
        fetch_tree(folder / _ARTIFACTS)
        fetch_file(folder / _DATABASE)


def _copy_database(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source, timeout=_LOCK_TIMEOUT_S)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)
