"""Checkpoints in the object store: they go up with COMPLETE last, and one without it is as good as absent."""

import json
import logging
import math
import shutil
from collections.abc import Iterable
from pathlib import Path

from model.checkpoint import TRAINER_STATE, checkpoint_name, is_complete, step_of, verify_checkpoint
from model.complete import COMPLETE, CheckpointError
from rayjob.store.address import address_of, is_remote, mirror_of, normalized, uri_of
from rayjob.store.fetch import fetch_tree_as
from rayjob.store.publish import publish_file, publish_files
from rayjob.store.s3 import delete_file, delete_folder, read_bytes, stored_below

logger = logging.getLogger(__name__)


def publish_checkpoint(folder: Path) -> None:
    """Copies a complete checkpoint to the store, where it counts once COMPLETE is there; nothing for a local storage.

    Safe to call again after an error, and from any thread. What the store has already is not sent again.

    Raises:
        OSError: the store does not take it.
    """
    uri = uri_of(folder)
    if uri is None:
        return
    stored = read_bytes(f"{uri}/{COMPLETE}")
    if stored == (folder / COMPLETE).read_bytes():
        return
    if stored is not None:  # of a damaged checkpoint of the same step, whose files are about to change
        delete_file(f"{uri}/{COMPLETE}")
    files = [path for path in folder.rglob("*") if path.is_file() and path != folder / COMPLETE]
    publish_files(sorted(files, key=lambda path: -path.stat().st_size))
    publish_file(folder / COMPLETE)


def remove_checkpoint(folder: Path) -> None:
    """Removes a mirrored checkpoint from the store, COMPLETE first."""
    uri = uri_of(folder)
    delete_file(f"{uri}/{COMPLETE}")
    delete_folder(f"{uri}")


def fetch_checkpoint(folder: Path) -> bool:
    """Makes a mirrored checkpoint be here and sound; False, with a warning, if the store's is not."""
    uri = uri_of(folder)
    if uri is None or is_complete(folder):
        return is_complete(folder)
    temporary = folder.with_name(f"{folder.name}.tmp")  # left behind by a kill, it is removed by the next save
    shutil.rmtree(temporary, ignore_errors=True)
    fetch_tree_as(folder, temporary)
    try:
        verify_checkpoint(temporary)
    except CheckpointError as error:
        logger.warning("%s is not sound in the store: %s It is left out.", uri, error)
        shutil.rmtree(temporary, ignore_errors=True)
        return False
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    logger.info("fetched %s", uri)
    return True


def step_folders(run_folder: Path, paths: Iterable[Path]) -> list[Path]:
    """Returns the checkpoint folders of a run that some paths lie in, complete or not, by step."""
    names = {path.relative_to(run_folder).parts[0] for path in paths}
    return sorted((run_folder / name for name in names if _is_checkpoint_name(name)), key=step_of)


def find_checkpoints(run_folder: Path) -> tuple[str | None, str | None]:
    """Returns where the best and the latest complete checkpoint of a mirrored run are: a path here, else an address."""
    stored = stored_below(run_folder)
    folders = step_folders(run_folder, [*stored, *run_folder.glob("step_*")])
    folders = [folder for folder in folders if is_complete(folder) or folder / COMPLETE in stored]
    scored = [(loss, step_of(folder), folder) for folder in folders if (loss := _val_loss(folder)) is not None]
    best, latest = min(scored)[2] if scored else None, folders[-1] if folders else None
    return _where(best), _where(latest)


def local_checkpoint(address: str, storage: str) -> Path:
    """Returns the folder here of a checkpoint, or of the best of a run, that may be in the store; it is fetched.

    Args:
        address: a path or s3:// address, of a checkpoint or a run.
        storage: of the configuration; what lies below it shares its mirror.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    if not is_remote(address):
        return Path(address)
    address = normalized(address)
    if "~" in address:
        raise CheckpointError(f"{address} has a '~', which no address of a run has.")
    parent, _, name = address.rpartition("/")
    is_ours = is_remote(storage) and address.startswith(f"{storage}/")
    folder = mirror_of(storage) / address.removeprefix(f"{storage}/") if is_ours else mirror_of(parent) / name
    if read_bytes(f"{address}/{COMPLETE}") is None:
        best, latest = find_checkpoints(folder)
        if latest is None:
            raise CheckpointError(f"{address} should be a complete checkpoint or hold one, but neither is so.")
        folder /= Path(best or latest).name
    if not fetch_checkpoint(folder):
        raise CheckpointError(f"{address_of(folder)} is damaged: choose another checkpoint of the run.")
    return folder


def _where(folder: Path | None) -> str | None:
    if folder is None:
        return None
    return str(folder) if is_complete(folder) else address_of(folder)


def _val_loss(folder: Path) -> float | None:
    path = folder / TRAINER_STATE
    content = path.read_bytes() if path.exists() else read_bytes(address_of(path))
    try:
        val_loss = json.loads(content or b"")["val_loss"]
    except (ValueError, KeyError, TypeError):
        return None
    return val_loss if isinstance(val_loss, float) and math.isfinite(val_loss) else None


def _is_checkpoint_name(name: str) -> bool:
    number = name.removeprefix("step_")
    return number.isdigit() and checkpoint_name(int(number)) == name
