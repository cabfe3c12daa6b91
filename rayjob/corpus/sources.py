"""Which files make up the corpus, in which order, under which names, with which hashes.

A file's name is its path below the folder that all of `data.paths` have in common, with `/` between parts.
The order of files, and so of documents, is the order of those names. Moving the whole corpus changes no name;
renaming a file changes its document's id and maybe its place, so it counts as a change.
"""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from model.normalizer import is_encodable
from rayjob.atomic import write_atomically
from rayjob.config import DataConfig
from rayjob.corpus import demo, huggingface
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.files import FoundFiles, expand, has_magic, is_folder, sha256_of, stamp_of
from rayjob.store.address import address_of, is_remote
from rayjob.store.fetch import fetch_file

logger = logging.getLogger(__name__)


class Form(NamedTuple):
    """What a kind of source reads: suffixes, what others to do about other suffixes, and both in words."""

    kind: str
    suffixes: tuple[str, ...]
    unfit: dict[str, str]
    words: str


PACKED = (".jsonl.gz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".tar.gz", ".7z")
NO_PLAIN_TEXT = (".epub", ".pdf", ".doc", ".docx", ".odt", ".mobi")
TEXT = Form(
    "text",
    (".txt", ".txt.gz", ".jsonl"),
    {".parquet": "use data.source=parquet for it"}
    | dict.fromkeys(PACKED, "unpack it first")
    | dict.fromkeys(NO_PLAIN_TEXT, "make a .txt file of it first"),
    "Accepted with data.source=text: folders (searched for *.txt, *.txt.gz and *.jsonl), files and globs, also under "
    's3://; a text file is one document, a line of .jsonl is one document, {"text": "..."}.',
)
PARQUET = Form(
    "Parquet",
    (".parquet",),
    {suffix: "use data.source=text for it" for suffix in TEXT.suffixes},
    "Accepted with data.source=parquet: folders (searched for *.parquet), files and globs, also under s3://; "
    "data.text_column names the column, a row is a line of text.",
)
MADE_FOLDERS = ("cache", "mlflow", "runs", "tokenizers", "tokens")
"""Of a storage: what is made from a corpus is none of it, where the storage lies in the corpus's folder."""
ROW_SOURCES = ("parquet", "huggingface")


@dataclass(frozen=True, slots=True)
class Source:
    """One input file: its name in the corpus, where it lies now, its size and the sha256 of its bytes."""

    name: str
    path: str
    bytes: int
    sha256: str

    @property
    def has_rows(self) -> bool:
        """Whether the text is one of several columns or keys."""
        return self.name.lower().endswith((".jsonl", ".parquet"))

    def identity(self) -> dict[str, Any]:
        """What the hash of the corpus covers: not where the file lies."""
        return {"name": self.name, "bytes": self.bytes, "sha256": self.sha256}

    def to_json(self) -> str:
        return json.dumps([self.name, self.path, self.bytes, self.sha256])

    @classmethod
    def from_json(cls, data: str) -> "Source":
        return cls(*json.loads(data))


def is_packed(path: str) -> bool:
    """Whether a file is read through gzip."""
    return path.lower().endswith(".gz")


def find_sources(data: DataConfig, storage: Path) -> tuple[Source, ...]:
    """Every input file, by name. Hashes come from a cache while size and times of a file stay the same.

    Raises:
        CorpusError: a path that leads nowhere, a file that cannot be read, or a data set not downloaded yet.
    """
    if data.source == "demo":
        folder = demo.folder(storage)
        return tuple(Source(text.name, address_of(folder / text.name), text.bytes, text.sha256) for text in demo.TEXTS)
    if data.source == "huggingface":
        files = _name_files([address_of(huggingface.downloaded(data.revision, storage))], PARQUET, storage)
    else:
        files = _name_files(data.paths, {"text": TEXT, "parquet": PARQUET}[data.source], storage)
    return _hash_files(files, storage / "sources" / "hashes.json")


def _name_files(paths: Sequence[str], form: Form, storage: Path) -> dict[str, str]:
    """Where each file lies by its name in the corpus, in the order of names."""
    made = tuple(os.path.join(address_of(Path(os.path.realpath(storage)) / name), "") for name in MADE_FOLDERS)
    found = []
    problems = []
    for path in paths:
        try:
            folder, files = expand(path, form.suffixes)
        except OSError as error:
            problems.append(f"data.paths: {path} cannot be listed ({error}).")
        else:
            found.append(FoundFiles(folder, [file for file in files if not _real(file).startswith(made)]))
            if not found[-1].files:
                why = f"leads only to what is made in {storage}" if files else _why_empty(path, form)
                problems.append(f"data.paths: {path} {why}. {form.words}")
    if problems or not found:
        raise CorpusError(problems or [f"data.paths is empty. {form.words}"])
    files = [file for entry in found for file in entry.files]
    problems = [
        f"data.paths: {file} is no {form.kind} file: {way}." for file in files if (way := _way_for_unfit(file, form))
    ]
    problems += [f"data.paths: the name {file!r} is not UTF-8: rename it." for file in files if not is_encodable(file)]
    if problems:
        raise CorpusError(problems)
    return dict(sorted((_name(file, _root(found)), file) for file in files))


def _real(file: str) -> str:
    return file if is_remote(file) else os.path.realpath(file)


def _root(found: Sequence[FoundFiles]) -> str:
    folders = [entry.folder for entry in found]
    try:
        return os.path.commonpath([folder.replace("s3://", "/s3/") for folder in folders])
    except ValueError:  # nothing in common
        return "/"


def _name(file: str, root: str) -> str:
    return PurePosixPath(os.path.relpath(file.replace("s3://", "/s3/"), root)).as_posix()


def _way_for_unfit(file: str, form: Form) -> str | None:
    return next((way for suffix, way in form.unfit.items() if file.lower().endswith(suffix)), None)


def _why_empty(path: str, form: Form) -> str:
    if is_folder(path):
        return f"holds no {form.kind} files"
    if has_magic(path):
        return "matches no file"
    place = path if is_remote(path) else os.path.abspath(os.path.expanduser(path))
    if os.path.exists(place):
        return "is a pipe or a device, which cannot be read twice: write it to a file first"
    return f"does not exist (looked for {place})"


def _hash_files(files: dict[str, str], cache_path: Path) -> tuple[Source, ...]:
    cache = _read_cache(cache_path)
    known = {path: _stamp_and_hash(path, cache.get(path)) for path in files.values()}
    unreadable = [f"{path} cannot be read: {entry}." for path, entry in known.items() if isinstance(entry, OSError)]
    if unreadable:
        raise CorpusError(unreadable)
    entries = {path: entry for path, entry in known.items() if not isinstance(entry, OSError)}
    if any(cache.get(path) != entry for path, entry in entries.items()):
        _write_cache(cache_path, cache | entries)
    return tuple(Source(name, path, entries[path][0], entries[path][3]) for name, path in files.items())


def _stamp_and_hash(path: str, cached: list[Any] | None) -> list[Any] | OSError:
    """[bytes, mtime_ns, ctime_ns, sha256] of a file; ctime also catches a modification time that was set back."""
    try:
        stamp = stamp_of(path)
        if cached is not None and cached[:3] == stamp:
            return cached
        return [*stamp, sha256_of(path)]
    except OSError as error:
        return error


def _read_cache(path: Path) -> dict[str, list[Any]]:
    try:
        fetch_file(path)
        entries = json.loads(path.read_bytes())
        return {key: entry for key, entry in entries.items() if isinstance(entry, list) and len(entry) == 4}
    except (OSError, ValueError, AttributeError):
        return {}


def _write_cache(path: Path, entries: dict[str, list[Any]]) -> None:
    try:
        write_atomically(path, json.dumps(entries, indent=0, sort_keys=True).encode())
    except OSError as error:
        logger.warning("%s cannot be written (%s): the sources are hashed again next time.", path, error)
