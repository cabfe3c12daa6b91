"""The object store through pyarrow: one client per process, its errors in sentences.

Credentials, region and address come from the environment of every process that reads or writes, so on all nodes:
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs

from rayjob.store.address import S3, endpoint, uri_of
from rayjob.store.errors import StoreError

_CONNECT_TIMEOUT_S = 5  # of each of the client's three tries
_CHUNK_BYTES = 8 * 2**20
_PROBE = ".write-test"


class StoredObject(NamedTuple):
    """An object's s3:// address and size."""

    uri: str
    bytes: int


def file_system() -> pa.fs.S3FileSystem:
    """Returns the client that the environment describes."""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return _connect(endpoint(), region, os.environ.get("AWS_ACCESS_KEY_ID"))


@functools.cache
def _connect(address: str, region: str | None, _key_id: str | None) -> pa.fs.S3FileSystem:
    server = urlsplit(address)
    return pa.fs.S3FileSystem(
        region=region,
        scheme=server.scheme or None,
        endpoint_override=server.netloc or None,
        connect_timeout=_CONNECT_TIMEOUT_S,
        allow_delayed_open=True,  # a small object is one request instead of three
    )


def storage_problems(uri: str, *, to_write: bool) -> list[str]:
    """Returns why a storage cannot be used, in full sentences; a few requests, and none of them changes anything."""
    bucket = uri.removeprefix(S3).partition("/")[0]
    way = "Set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, and AWS_ENDPOINT_URL for a server other than AWS"
    try:
        if file_system().get_file_info(bucket).type != pa.fs.FileType.Directory:
            return [f"storage={uri}: there is no bucket {bucket} at {endpoint() or 'AWS'}: create it first."]
        if to_write:
            probe = f"{uri}/{_PROBE}".removeprefix(S3)
            with file_system().open_output_stream(probe) as stream:
                stream.write(b"")
            file_system().delete_file(probe)
    except OSError as error:
        what = "written" if to_write else "read"
        return [f"storage={uri} cannot be {what} at {endpoint() or 'AWS'} ({error}). {way}, on every node."]
    return []


def stored_below(folder: Path) -> dict[Path, StoredObject]:
    """Returns what the store has below a mirrored folder, by the path that mirrors it; a request per 1,000 objects."""
    uri = uri_of(folder)
    if uri is None:
        return {}
    selector = pa.fs.FileSelector(uri.removeprefix(S3), recursive=True, allow_not_found=True)
    with _store_errors(uri, "listed"):
        found = file_system().get_file_info(selector)
    files = [StoredObject(S3 + info.path, info.size) for info in found if info.type == pa.fs.FileType.File]
    return {folder / stored.uri.removeprefix(f"{uri}/"): stored for stored in files}


def read_bytes(uri: str) -> bytes | None:
    """Returns a small object's content, or None if it is not there."""
    with _store_errors(uri, "read"):
        try:
            with file_system().open_input_stream(uri.removeprefix(S3)) as stream:
                content: bytes = stream.read()
                return content
        except FileNotFoundError:
            return None


def upload(path: Path, uri: str) -> None:
    """Copies a file to an object, which appears whole or not at all.

    Raises:
        StoreError: the store does not take it.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size  # of a file that grows meanwhile, what it was at first
        with _store_errors(uri, "written"), file_system().open_output_stream(uri.removeprefix(S3)) as stream:
            while left and (data := file.read(min(left, _CHUNK_BYTES))):
                stream.write(data)
                left -= len(data)
    if left:
        raise OSError(f"{path} was cut short while it was copied to {uri}.")


def download(uri: str, path: Path) -> bool:
    """Copies an object to a file; False if there is no such object.

    Raises:
        StoreError: the store does not answer or sends less than it announced.
        OSError: the file cannot be written.
    """
    with _store_errors(uri, "read"):
        try:
            source = file_system().open_input_file(uri.removeprefix(S3))
        except FileNotFoundError:
            return False
        n_bytes = source.size()
    with source, path.open("wb") as file:
        while data := _read(source, uri):
            file.write(data)
        os.fsync(file.fileno())
        if file.tell() != n_bytes:
            raise StoreError(f"{uri} came with {file.tell():,} of its {n_bytes:,} bytes.")
    return True


def delete_file(uri: str) -> None:
    """Removes an object; nothing if it is not there."""
    with _store_errors(uri, "removed"), suppress(FileNotFoundError):
        file_system().delete_file(uri.removeprefix(S3))


def delete_folder(uri: str) -> None:
    """Removes every object below an address; nothing if there is none."""
    with _store_errors(uri, "removed"), suppress(FileNotFoundError):
        file_system().delete_dir(uri.removeprefix(S3))


def _read(source: pa.NativeFile, uri: str) -> bytes:
    with _store_errors(uri, "read"):
        content: bytes = source.read(_CHUNK_BYTES)
        return content


@contextmanager
def _store_errors(uri: str, verb: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{uri} cannot be {verb} at {endpoint() or 'AWS'}: {error}") from error
