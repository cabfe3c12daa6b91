import io
import logging
import zipfile
from pathlib import Path

import pytest
from ray._private.ray_constants import get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import create_package

from cluster import upload
from cluster.settings import REPOSITORY


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    for name in (
        "rayjob/__init__.py",
        ".git/big",
        ".venv/lib/x.py",
        "storage/tokens/a",
        "tests/a.py",
        "data/a",
        "b.txt",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x" * 1000)
    (root / ".rayignore").write_text("storage\ntests\n")
    (root / ".gitignore").write_text("*.txt\n")
    return root


def test_files_are_those_that_ray_packs(repository: Path, tmp_path: Path) -> None:
    archive = tmp_path / "package.zip"
    create_package(
        str(repository),
        archive,
        excludes=get_runtime_env_default_excludes(),
        include_gitignore=True,
        include_parent_dir=False,
        logger=logging.getLogger(),
    )
    packed = {name for name in zipfile.ZipFile(io.BytesIO(archive.read_bytes())).namelist() if not name.endswith("/")}
    assert set(upload.list_files(repository)) == packed
    assert packed == {"rayjob/__init__.py", "data/a", ".rayignore", ".gitignore"}


def test_small_repository_is_accepted(repository: Path) -> None:
    upload.check_upload(repository)


def test_big_repository_is_refused_with_its_biggest_entries(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (repository / "data" / "b").open("wb") as file:
        file.truncate(51 * 2**20)  # sparse: takes no room
    with pytest.raises(upload.UploadError, match=r"51 MiB of .* The biggest: data/ \(51 MiB\), rayjob/ \(0 MiB\)"):
        upload.check_upload(repository)


def test_ignored_giants_do_not_count(repository: Path) -> None:
    with (repository / "storage" / "checkpoint").open("wb") as file:
        file.truncate(5 * 2**30)
    upload.check_upload(repository)


def test_this_repository_takes_less_than_a_mebibyte_along() -> None:
    sizes = {name: size for name, size in upload.list_files(REPOSITORY).items()}
    # Only what a clean clone has: a developer may have more lying about.
    ours = ("model/", "rayjob/", "serving/", "cluster/", "pyproject.toml", "README.md")
    assert 0 < sum(size for name, size in sizes.items() if name.startswith(ours)) < 2**20
    assert not any(name.startswith(("tests/", ".venv/", ".cluster/")) for name in sizes)
