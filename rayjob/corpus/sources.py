"""Which files make up the corpus, in which order, under which names, with which hashes.

A file's name is its path below the folder that all of `data.paths` have in common, with `/` between parts.
The order of files, and so of documents, is the order of those names. Moving the whole corpus changes no name;
renaming a file changes its document's id and maybe its place, so it counts as a change.
"""

import glob
import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayjob.atomic import write_atomically
from rayjob.config import DataConfig
from rayjob.corpus import demo
from rayjob.corpus.errors import CorpusError

logger = logging.getLogger(__name__)

SUFFIXES = (".txt", ".txt.gz", ".jsonl")
UNFIT = {".parquet": "use data.source=parquet for it", ".jsonl.gz": "unpack it first"}
FORMS = (
    "Accepted with data.source=text: folders (searched for *.txt, *.txt.gz and *.jsonl), files and globs; "
    'a text file is one document, a line of .jsonl is one document, {"text": "..."}.'
)


@dataclass(frozen=True, slots=True)
class Source:
    """One input file: its name in the corpus, where it lies now, its size and the sha256 of its bytes."""

    name: str
    path: str
    bytes: int
    sha256: str

    @property
    def has_rows(self) -> bool:
        """Whether each line is a document, rather than the file."""
        return self.name.lower().endswith(".jsonl")

    def identity(self) -> dict[str, Any]:
        """What the hash of the corpus covers: not where the file lies."""
        return {"name": self.name, "bytes": self.bytes, "sha256": self.sha256}


def is_packed(path: str) -> bool:
    """Whether a file is read through gzip."""
    return path.lower().endswith(".gz")


def find_sources(data: DataConfig, storage: Path) -> tuple[Source, ...]:
    """Every input file, by name. Hashes come from a cache while size and times of a file stay the same.

    Raises:
        CorpusError: a path that leads nowhere, a file that cannot be read, or a source this version does not
        know.
    """
    if data.source == "demo":
        folder = demo.folder(storage)
        return tuple(Source(text.name, str(folder / text.name), text.bytes, text.sha256) for text in demo.TEXTS)
    if data.source != "text":
        raise CorpusError([f"data.source={data.source} is not supported by this version: use demo or text. {FORMS}"])
    return _hash_files(_name_files(data.paths), storage / "sources" / "hashes.json")


def _name_files(paths: tuple[str, ...]) -> dict[str, str]:
    """Absolute path of each file by its name in the corpus, in the order of names."""
    found = [_expand(os.path.abspath(os.path.expanduser(path))) for path in paths]
    problems = [
        f"data.paths: {path} {_why_empty(path)}. {FORMS}"
        for path, (_, files) in zip(paths, found, strict=True)
        if not files
    ]
    if problems or not found:
        raise CorpusError(problems or [f"data.paths is empty. {FORMS}"])
    files = [file for _, files in found for file in files]
    problems = [f"data.paths: {file} is no text file: {way}." for file in files if (way := _way_for_unfit(file))]
    if problems:
        raise CorpusError(problems)
    root = os.path.commonpath([folder for folder, _ in found])
    named = {Path(os.path.relpath(file, root)).as_posix(): file for file in files}
    return dict(sorted(named.items()))


def _expand(path: str) -> tuple[str, list[str]]:
    """The folder that names are relative to, and the files that one entry of `data.paths` stands for."""
    if os.path.isdir(path):
        everything = glob.glob(os.path.join(glob.escape(path), "**", "*"), recursive=True)
        return path, [file for file in everything if file.lower().endswith(SUFFIXES) and os.path.isfile(file)]
    if os.path.exists(path):
        return os.path.dirname(path), [path]
    fixed = path
    while glob.has_magic(fixed):
        fixed = os.path.dirname(fixed)
    return fixed, [file for file in glob.glob(path, recursive=True) if os.path.isfile(file)]


def _way_for_unfit(file: str) -> str | None:
    return next((way for suffix, way in UNFIT.items() if file.lower().endswith(suffix)), None)


def _why_empty(path: str) -> str:
    if os.path.isdir(os.path.expanduser(path)):
        return "holds no text files"
    return "matches no file" if glob.has_magic(path) else f"does not exist (looked for {os.path.abspath(path)})"


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
        stat = os.stat(path)
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        if cached is not None and cached[:3] == stamp:
            return cached
        with open(path, "rb") as file:
            return [*stamp, hashlib.file_digest(file, "sha256").hexdigest()]
    except OSError as error:
        return error


def _read_cache(path: Path) -> dict[str, list[Any]]:
    try:
        entries = json.loads(path.read_bytes())
        return {key: entry for key, entry in entries.items() if isinstance(entry, list) and len(entry) == 4}
    except (OSError, ValueError, AttributeError):
        return {}


def _write_cache(path: Path, entries: dict[str, list[Any]]) -> None:
    try:
        write_atomically(path, json.dumps(entries, indent=0, sort_keys=True).encode())
    except OSError as error:
        logger.warning("%s cannot be written (%s): the sources are hashed again next time.", path, error)
