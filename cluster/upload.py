"""What a job takes along: the repository but for .gitignore and .rayignore, and not too much of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

# Ray's own limit is 100 MiB, and its refusal does not say what was so big.
MAX_UPLOAD_MIB = 50


class UploadError(ValueError):
    """The repository holds too much to be sent along with a job."""


def list_files(repository: Path) -> dict[str, int]:
    """Returns the files that Ray would upload, by path inside the repository, with their sizes in bytes."""
    # Ray's own walk, so that its reading of the ignore files is the one that counts. Private in Ray 2.60,
    # hence held in this one function, which a test compares with a real archive.
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env import packaging

    sizes: dict[str, int] = {}

    def note(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(repository).as_posix()] = path.stat().st_size

    excludes = [packaging._get_excludes(repository, get_runtime_env_default_excludes())]
    packaging._dir_travel(repository, excludes, note, include_gitignore=True)
    return sizes


def check_upload(repository: Path) -> None:
    """Raises UploadError, naming the biggest entries, if the repository is too big to be sent with a job."""
    sizes = list_files(repository)
    total_mib = sum(sizes.values()) / 2**20
    if total_mib <= MAX_UPLOAD_MIB:
        return
    biggest = ", ".join(f"{name} ({size / 2**20:.0f} MiB)" for name, size in biggest_entries(sizes))
    raise UploadError(
        f"a job would take {total_mib:.0f} MiB of {repository} along, and at most {MAX_UPLOAD_MIB} MiB are "
        f"allowed. The biggest: {biggest}. Move them out of the repository or name them in .rayignore."
    )


def biggest_entries(sizes: dict[str, int], count: int = 5) -> list[tuple[str, int]]:
    """Returns the biggest files and folders of the top level, with what they hold in all."""
    entries: Counter[str] = Counter()
    for path, size in sizes.items():
        top, slash, _ = path.partition("/")
        entries[top + slash] += size
    return entries.most_common(count)
