"""A run in the object store: its checkpoints and small files, and which side is right at a start.

publish_run, after every save: checkpoints, COMPLETE last; metrics.csv, config.yaml, samples and the other small files;
    the MLflow store of this storage. Then what is gone here goes there.
adopt_run, at a start: whichever side has the newer complete checkpoint is right, and the other one follows it.
"""

from collections.abc import Mapping
from pathlib import Path

from model.checkpoint import checkpoint_folders, is_complete, latest_checkpoint, step_of
from model.complete import COMPLETE
from rayjob.store.address import uri_of
from rayjob.store.checkpoints import fetch_checkpoint, publish_checkpoint, remove_checkpoint, step_folders
from rayjob.store.fetch import replace_file
from rayjob.store.mlflow_store import fetch_mlflow, publish_mlflow
from rayjob.store.publish import publish_files
from rayjob.store.s3 import StoredObject, delete_file, stored_below
from rayjob.training.metrics import METRICS_FILE

_OF_THIS_MACHINE = (".lock", ".tmp", ".validate_storage_marker", "checkpoint_manager_snapshot.json")


def publish_run(run_folder: Path) -> None:
    """Makes the store's copy of a mirrored run what is here; nothing for a local storage.

    Safe to call again after an error, and from any thread, but not from two at a time. What the store has of a
    checkpoint already is not sent again.

    Raises:
        OSError: the store does not take it.
    """
    if uri_of(run_folder) is None:
        return
    for folder in reversed(checkpoint_folders(run_folder)):
        if is_complete(folder):
            publish_checkpoint(folder)
    stored = stored_below(run_folder)
    samples = [path for path in run_folder.glob("samples/*.txt") if path not in stored]
    publish_files([*_small_files(run_folder), *samples])
    publish_mlflow(_mlflow_folder(run_folder))
    _remove_gone(run_folder, stored)


def adopt_run(run_folder: Path) -> None:
    """Brings a mirrored run and the store to the same state before training goes on; nothing for a local storage.

    Raises:
        OSError: the store does not answer, or there is no room here.
    """
    if uri_of(run_folder) is not None:
        fetch_newer_run(run_folder)
        fetch_mlflow(_mlflow_folder(run_folder))
        publish_run(run_folder)  # what was saved here and not sent before the machine was gone


def fetch_newer_run(run_folder: Path) -> None:
    """Fetches complete checkpoints newer than those here, and small files where the store's run has come further."""
    stored, here = stored_below(run_folder), latest_checkpoint(run_folder)
    _fetch_newer_files(run_folder, stored)
    for folder in reversed(_complete_folders(run_folder, stored)):
        if here is None or step_of(folder) > step_of(here):  # an older one that is not here was removed on purpose
            fetch_checkpoint(folder)


def fetch_run_files(run_folder: Path) -> None:
    """Fetches what tells how a mirrored run stands, no checkpoint, where the store's run has come further."""
    _fetch_newer_files(run_folder, stored_below(run_folder))


def _fetch_newer_files(run_folder: Path, stored: Mapping[Path, StoredObject]) -> None:
    """Replaces small files by the store's; never those of a run that goes on here: the store is not ahead of it."""
    folders, here = _complete_folders(run_folder, stored), latest_checkpoint(run_folder)
    is_behind = bool(folders) and (here is None or step_of(folders[-1]) > step_of(here))
    if is_behind or not (run_folder / METRICS_FILE).exists():
        in_checkpoints = set(step_folders(run_folder, stored))
        for path, found in stored.items():
            if in_checkpoints.isdisjoint(path.parents):
                replace_file(path, found.uri)


def _complete_folders(run_folder: Path, stored: Mapping[Path, StoredObject]) -> list[Path]:
    return [folder for folder in step_folders(run_folder, stored) if folder / COMPLETE in stored]


def _small_files(run_folder: Path) -> list[Path]:
    """Returns the files directly in a run's folder that mean something on another machine."""
    files = [path for path in run_folder.glob("*") if path.is_file()]
    return [path for path in files if not path.name.endswith(_OF_THIS_MACHINE)]


def _remove_gone(run_folder: Path, stored: Mapping[Path, StoredObject]) -> None:
    for path, found in stored.items():
        if path.parent == run_folder and not path.exists():
            delete_file(found.uri)
    newest = latest_checkpoint(run_folder)
    for folder in step_folders(run_folder, stored):
        if newest and step_of(folder) < step_of(newest) and not folder.exists():
            remove_checkpoint(folder)


def _mlflow_folder(run_folder: Path) -> Path:
    return run_folder.parent.parent / "mlflow"
