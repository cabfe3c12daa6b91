"""Where a remote storage is mirrored on this machine, and the way back.

    s3://bucket/prefix/tokens/…   <->   <cache>/s3-mirrors/bucket~prefix~~endpoint/tokens/…

A path in a mirror says by itself what it mirrors, so whoever is handed one, a task on another node too, can publish
and fetch it. <cache> is RAYJOB_CACHE, or else ~/.cache/rayjob. The endpoint is named where AWS_ENDPOINT_URL gives one,
for another server may have a bucket of the same name. No character of a mirror's name means anything in a URI: MLflow
and sqlite take paths as such.
"""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

S3 = "s3://"
_MIRRORS = "s3-mirrors"
_RUNS = "runs"  # the folder of all runs in a storage
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)*")
_LONGEST_NAME = 200  # bytes of a mirror's folder name; a file system takes 255


def is_remote(path: str) -> bool:
    """Returns whether a path names something in an object store rather than a local file."""
    return path.startswith(S3)


def endpoint() -> str:
    """Returns the address of the S3 server that the environment names, empty for AWS itself."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def normalized(uri: str) -> str:
    """Returns the one spelling of an s3:// address: no slash at the end, none doubled."""
    return S3 + "/".join(part for part in uri.removeprefix(S3).split("/") if part)


def address_problems(storage: str) -> list[str]:
    """Returns what is wrong with a `storage` that is an address, in full sentences."""
    if not is_remote(storage):
        return [f"storage={storage} must be a folder on a mounted file system or s3://BUCKET/PREFIX."]
    bucket, slash, prefix = storage.removeprefix(S3).partition("/")
    if not _BUCKET.fullmatch(bucket) or not _PREFIX.fullmatch(slash + prefix):
        return [
            f"storage={storage} must be s3://BUCKET/PREFIX: a bucket of 3 to 63 of a-z, 0-9, '.' and '-', and a prefix "
            "of letters, digits, '.', '_', '-' and '/'."
        ]
    if len(mirror_of(storage).name) > _LONGEST_NAME:
        return [f"storage={storage} is too long: its mirror is a folder named after it. Choose a shorter prefix."]
    return []


def mirror_of(uri: str) -> Path:
    """Returns the folder that mirrors an s3:// address on this machine."""
    cache = os.environ.get("RAYJOB_CACHE") or os.path.join("~", ".cache", "rayjob")
    name = normalized(uri).removeprefix(S3).replace("/", "~")
    if server := urlsplit(endpoint()).netloc:
        name += "~~" + re.sub(r"[^A-Za-z0-9.-]", "~", server)
    return Path(os.path.abspath(os.path.expanduser(cache))) / _MIRRORS / name


def uri_of(path: Path) -> str | None:
    """Returns the s3:// address that a path in a mirror stands for, or None for any other path."""
    parts = path.parts
    if _MIRRORS not in parts:
        return None
    place = parts.index(_MIRRORS) + 1
    if place == len(parts):
        return None
    return S3 + "/".join([parts[place].partition("~~")[0].replace("~", "/"), *parts[place + 1 :]])


def address_of(path: Path) -> str:
    """Returns what every node can read: the s3:// address of a path in a mirror, else the path."""
    return uri_of(path) or str(path)


def is_of_a_run(path: Path) -> bool:
    """Returns whether a path in a mirror lies in the folder of a run."""
    return path.parts[path.parts.index(_MIRRORS) + 2 :][:1] == (_RUNS,)
