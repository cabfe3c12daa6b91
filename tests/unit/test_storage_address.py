"""Addresses under s3:// and the folders that mirror them, without any server."""

from pathlib import Path

import pytest

from rayjob.config import ConfigError
from rayjob.config_file import load_config, to_tree
from rayjob.store.address import address_of, mirror_of, uri_of


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYJOB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)


@pytest.mark.parametrize("uri", ["s3://books", "s3://books/a/b", "s3://books/p@x%2F y/Größe"])
@pytest.mark.parametrize("endpoint", ["", "http://127.0.0.1:9000"])
def test_path_in_a_mirror_says_what_it_mirrors(uri: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert uri_of(mirror_of(uri)) == uri
    assert address_of(mirror_of(uri) / "runs" / "small") == f"{uri}/runs/small"


def test_name_of_a_mirror_is_the_same_in_a_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    folder = mirror_of("s3://books/a")
    assert folder.as_uri() == f"file://{folder}"


def test_other_paths_are_no_mirrors() -> None:
    assert uri_of(Path("/data/storage/runs/small")) is None
    assert uri_of(mirror_of("s3://books").parent) is None
    assert address_of(Path("/data/x")) == "/data/x"


def test_servers_do_not_share_a_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {mirror_of("s3://books/a")}
    for endpoint in ("http://127.0.0.1:9000", "http://127.0.0.1:9001"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        folders.add(mirror_of("s3://books/a"))
    assert len(folders) == 3


def test_spellings_of_a_storage_are_one_run_folder(tmp_path: Path) -> None:
    configs = [load_config(None, [f"storage=s3://{spelling}"]) for spelling in ("books/a", "books/a/", "books//a")]
    assert len({config.run_folder for config in configs}) == 1
    assert configs[0].run_folder.is_relative_to(tmp_path / "cache")
    assert uri_of(configs[0].run_folder) == "s3://books/a/runs/run"


def test_mirror_is_not_a_key_and_is_not_written_down() -> None:
    config = load_config(None, ["storage=s3://books/a"])
    tree = to_tree(config)
    assert tree["storage"] == "s3://books/a"
    assert "mirror" not in tree
    with pytest.raises(ConfigError, match="mirror is derived: set storage"):
        load_config(None, ["mirror=/x"])


@pytest.mark.parametrize(
    "storage",
    [
        "gs://books/a",
        "s3://",
        "s3://B/x",
        "s3://books/a?region=x",
        "s3://books/a~b",
        "s3://books/a b",
        f"s3://books/{'x' * 250}",
    ],
)
def test_storage_that_is_no_address_is_refused(storage: str) -> None:
    with pytest.raises(ConfigError, match="storage=.*must be|storage=.*too long"):
        load_config(None, [f"storage={storage}"])
