"""BookCorpus from the Hugging Face hub: one resumable download into storage, pinned to a commit.

    <storage>/sources/huggingface/<name>.json    the pin: repository, revision, commit, files; `<name>` is the
                                                 revision asked for, "default" if none
    <storage>/sources/huggingface/<commit>/      the files; complete when the pin says so

1. The choices are tried in order; one that the hub does not have is passed over with a message.
2. The pin is written as soon as the commit is known, so an interrupted download goes on with the same commit.
3. Files are checked by size and, where the hub tells it, by sha256. Then the pin is marked complete, and from then
   on nothing asks the hub, unless a file is gone or is found to be another (`set_altered_aside`).

The client honours HF_TOKEN and HF_ENDPOINT; with HF_HUB_OFFLINE set nothing is downloaded.
"""

import fnmatch
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from rayjob.atomic import temporary_path, write_atomically
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.files import sha256_of
from rayjob.store.address import address_of, uri_of
from rayjob.store.fetch import fetch_file
from rayjob.store.publish import publish_files
from rayjob.store.s3 import stored_below

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
TRIES = 4
BUSY = (429, 500, 502, 503, 504)
MAX_WAIT_S = 300.0  # of one Retry-After
LINES_PER_GROUP = 10_000

T = TypeVar("T")


class Choice(NamedTuple):
    """A place where BookCorpus lies."""

    repo: str
    revision: str
    pattern: str


CHOICES = (
    Choice("bookcorpus/bookcorpus", "refs/convert/parquet", "plain_text/train/*.parquet"),
    Choice("bookcorpus/bookcorpus", "refs/pr/6", "plain_text/train-*.parquet"),
    Choice("rojagtap/bookcorpus", "main", "*.txt"),  # a sentence a line; turned into Parquet here
)


_WAYS = (
    "Allow this machine to reach the hub (HF_ENDPOINT names a mirror, HF_TOKEN opens a gated copy), or bring the files "
    "yourself and use data.source=parquet (a row is a sentence) or data.source=text with data.paths=[FOLDER]."
)


@dataclass(frozen=True, slots=True)
class Pin:
    """A download: what was asked for and what it was at that moment.

    Attributes:
        files: name -> [bytes, sha256 or None], as the hub told.
    """

    repo: str
    revision: str
    commit: str
    files: dict[str, tuple[int | None, str | None]]
    is_complete: bool


def downloaded(revision: str | None, storage: Path) -> Path:
    """The folder of the complete download for `data.revision`.

    Raises:
        CorpusError: there is none yet, or files of it are gone.
    """
    pin = read_pin(revision, storage)
    if pin is None or not pin.is_complete:
        raise CorpusError(["BookCorpus is not downloaded yet: `prepare` does it."])
    folder = _root(storage) / pin.commit
    if missing := _missing(pin, folder):
        raise CorpusError([f"{address_of(folder)} lacks {', '.join(missing)}: `prepare` fetches them again."])
    return folder


def read_pin(revision: str | None, storage: Path) -> Pin | None:
    """The pin of a download that was begun, or None."""
    path = _pin_path(revision, storage)
    fetch_file(path)
    try:
        return Pin(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def fetch(revision: str | None, storage: Path) -> None:
    """Downloads BookCorpus unless it is there; goes on with a download that was interrupted.

    Raises:
        CorpusError: the hub cannot be reached, has none of the choices, or sent something else than it announced.
    """
    pin = read_pin(revision, storage)
    if pin is not None and pin.is_complete:
        folder = _root(storage) / pin.commit
        missing = _missing(pin, folder)
        if not missing:
            return
        logger.warning("%s lacks %s: fetching again", folder, ", ".join(missing))
        for name in missing:  # the client would take what it once wrote for whole
            (folder / name).unlink(missing_ok=True)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise CorpusError([f"HF_HUB_OFFLINE is set and BookCorpus is not whole in {_root(storage)} yet. {_WAYS}"])
    pin = pin or _choose(revision)
    _write_pin(pin, revision, storage)
    folder = _root(storage) / pin.commit
    _download(pin, folder)
    _check_files(pin, folder)
    for path in sorted(folder.glob("*.txt")):
        _lines_to_parquet(path)
    publish_files(sorted(folder.rglob("*.parquet")))
    _write_pin(Pin(**{**asdict(pin), "is_complete": True}), revision, storage)
    logger.info("BookCorpus is complete in %s: %d files", folder, len(pin.files))


def set_altered_aside(revision: str | None, storage: Path, sha256s: Mapping[str, str]) -> bool:
    """Renames files that are not those the hub announced, so that `fetch` brings them again; whether there were any.

    Args:
        revision, storage: as for `fetch`, which has been called.
        sha256s: of the files as they are, by their address.

    Raises:
        CorpusError: they lie in an object store; they are named.
    """
    pin = read_pin(revision, storage)
    assert pin is not None
    folder = _root(storage) / pin.commit
    altered = [
        folder / name
        for name, (_, announced) in pin.files.items()
        if announced and sha256s.get(address_of(folder / name), announced) != announced
    ]
    if altered and uri_of(folder):
        raise CorpusError([f"{address_of(path)} is not the file that the hub sent: remove it." for path in altered])
    for path in altered:
        aside = path.with_name(f"{path.name}.altered")
        logger.warning("%s is not the file that the hub sent: it is now %s", path, aside.name)
        path.replace(aside)
    return bool(altered)


def _missing(pin: Pin, folder: Path) -> list[str]:
    """Files of a complete download that are gone or of another size: a storage may have been copied in part."""
    if uri_of(folder):
        sizes = {path: stored.bytes for path, stored in stored_below(folder).items()}
    else:
        sizes = {path: path.stat().st_size for path in folder.rglob("*.parquet")}
    wanted = {}
    for name, (n_bytes, _) in pin.files.items():
        is_text = name.endswith(".txt")  # then the rows made of it count, whose size nobody announced
        wanted[str(Path(name).with_suffix(".parquet"))] = None if is_text else n_bytes
    found = {name: sizes.get(folder / name) for name in wanted}
    return [name for name, size in found.items() if size is None or wanted[name] not in (None, size)]


def _choose(revision: str | None) -> Pin:
    """Asks the hub for each choice; with `data.revision` for the first repository at that revision alone."""
    choices: tuple[Choice, ...] = CHOICES
    if revision is not None:
        choices = tuple(choice._replace(revision=revision) for choice in CHOICES[:2])
    reasons = []
    for choice in choices:
        found = _ask(choice)
        if isinstance(found, Pin):
            logger.info("BookCorpus: using %s at %s, commit %s", found.repo, found.revision, found.commit)
            return found
        reasons.append(f"{choice.repo} at {choice.revision}: {found}")
        logger.warning("BookCorpus: %s; trying the next choice", reasons[-1])
    raise CorpusError([f"No copy of BookCorpus is on the hub ({'; '.join(reasons)}). {_WAYS}"])


def _ask(choice: Choice) -> Pin | str:
    """What the hub has of a choice, or why it is not to be had."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(endpoint=_endpoint())
    try:
        info = _patiently(
            lambda: api.dataset_info(choice.repo, revision=choice.revision, files_metadata=True, timeout=TIMEOUT_S)
        )
    except HfHubHTTPError as error:  # missing, gated or refused; mirrors do not say which as the hub does
        return _first_line(error)
    except CorpusError:
        raise
    except (ValueError, KeyError, TypeError) as error:  # a proxy's log-in page, for one
        return f"the answer is not that of a hub ({error!r})"
    files = {
        file.rfilename: (file.size, file.lfs.sha256 if file.lfs else None)
        for file in info.siblings or ()
        if fnmatch.fnmatchcase(file.rfilename, choice.pattern)
    }
    if not files or info.sha is None:
        return f"it has no file {choice.pattern}"
    return Pin(choice.repo, choice.revision, info.sha, files, is_complete=False)


def _download(pin: Pin, folder: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    logger.info("downloading %d files of %s into %s", len(pin.files), pin.repo, folder)
    try:
        _patiently(
            lambda: snapshot_download(
                pin.repo,
                repo_type="dataset",
                revision=pin.commit,
                local_dir=folder,
                allow_patterns=list(pin.files),
                etag_timeout=TIMEOUT_S,
                endpoint=_endpoint(),
                max_workers=4,  # more of them meet the hub's rate limit
            )
        )
    except HfHubHTTPError as error:
        problem = (
            f"The hub does not send {pin.repo} at {pin.commit} ({_first_line(error)}). {_WAYS} What was fetched stays."
        )
        raise CorpusError([problem]) from None


def _patiently(call: Callable[[], T]) -> T:
    """Calls the hub's client; waits and calls again when the hub is busy, as long as it asks for.

    Raises:
        CorpusError: the hub cannot be reached, or is still busy after TRIES.
    """
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    transport_error = HfHubHTTPError.__bases__[0]  # of the HTTP library that this version of the client uses
    for left in reversed(range(TRIES)):
        try:
            return call()
        except LocalEntryNotFoundError as error:  # snapshot_download's word for a hub that it got no answer from
            busy = error.__cause__
            if not isinstance(busy, HfHubHTTPError):
                raise _unreachable(busy or error) from None
        except HfHubHTTPError as error:
            busy = error
        except transport_error as error:
            raise _unreachable(error) from None
        if busy.response.status_code not in BUSY:
            raise busy
        if left:
            wait_s = _retry_after_s(busy.response.headers.get("Retry-After"))
            logger.warning("the hub is busy (%s): trying again in %.0f s", _first_line(busy), wait_s)
            time.sleep(wait_s)
    raise CorpusError([f"The hub is busy ({_first_line(busy)}): run the same command later, it goes on where it was."])


def _unreachable(error: BaseException) -> CorpusError:
    address = _endpoint() or "its default address"
    return CorpusError(
        [f"The Hugging Face hub cannot be reached at {address} ({_first_line(error)}). {_WAYS} What was fetched stays."]
    )


def _retry_after_s(header: str | None) -> float:
    return min(float(header), MAX_WAIT_S) if header and header.isdigit() else 2.0


def _check_files(pin: Pin, folder: Path) -> None:
    """Removes and names files that are not what the hub announced, so that the next call fetches them again."""
    problems = []
    for name, announced in pin.files.items():
        if problem := _file_problem(folder / name, *announced):
            (folder / name).unlink(missing_ok=True)
            problems.append(f"{name} of {pin.repo} {problem}: run the same command to fetch it again.")
    if problems:
        raise CorpusError(problems)


def _file_problem(path: Path, n_bytes: int | None, sha256: str | None) -> str | None:
    if not path.exists():
        return "was not sent"
    if n_bytes is not None and path.stat().st_size != n_bytes:
        return f"has {path.stat().st_size:,} bytes, the hub announced {n_bytes:,}"
    if sha256 is not None and sha256_of(str(path)) != sha256:
        return "has another sha256 than the hub announced"
    return None


def _lines_to_parquet(path: Path) -> None:
    """Writes the lines of a text file as rows beside it, so that one reader serves every choice."""
    target = path.with_suffix(".parquet")
    if target.exists():
        return
    temporary = temporary_path(target)
    try:
        with pq.ParquetWriter(temporary, pa.schema([("text", pa.binary())])) as writer:
            for lines in _groups_of_lines(path):
                writer.write_table(pa.table({"text": pa.array(lines, pa.binary())}))
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)


def _groups_of_lines(path: Path) -> Iterator[list[bytes]]:
    with path.open("rb") as file:
        while lines := [line.rstrip(b"\r\n") for line in itertools.islice(file, LINES_PER_GROUP)]:
            yield lines


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _root(storage: Path) -> Path:
    return storage / "sources" / "huggingface"


def _pin_path(revision: str | None, storage: Path) -> Path:
    return _root(storage) / f"{quote(revision or 'default', safe='')}.json"


def _write_pin(pin: Pin, revision: str | None, storage: Path) -> None:
    content: dict[str, Any] = asdict(pin)
    write_atomically(_pin_path(revision, storage), json.dumps(content, indent=1, sort_keys=True).encode())


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
