import errno
import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from rayjob.config import DataConfig
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.sources import find_sources


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_txt", ".txt").replace("_md", ".md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(storage: Path, *paths: Path | str) -> list[str]:
    sources = find_sources(DataConfig(source="text", paths=tuple(map(str, paths))), storage)
    return [source.name for source in sources]


def test_folder_is_searched_to_the_bottom_and_ordered_by_name(tmp_path: Path) -> None:
    books = write(tmp_path / "books", b_txt="b", a_txt="a", deep__er__c_txt="c", readme_md="no book")
    (books / "z.txt.gz").write_bytes(gzip.compress(b"z"))
    (books / "rows.jsonl").write_text('{"text": "row"}')
    assert names(tmp_path, books) == ["a.txt", "b.txt", "deep/er/c.txt", "rows.jsonl", "z.txt.gz"]


def test_order_and_names_do_not_depend_on_the_order_of_paths(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", x_txt="1"), write(tmp_path / "two", x_txt="2")
    assert names(tmp_path, two, one) == names(tmp_path, one, two) == ["one/x.txt", "two/x.txt"]


def test_moved_corpus_keeps_its_names(tmp_path: Path) -> None:
    books = write(tmp_path / "books", a_txt="a", sub__b_txt="b")
    before = names(tmp_path, books)
    books.rename(tmp_path / "elsewhere")
    assert names(tmp_path, tmp_path / "elsewhere") == before


def test_glob_takes_what_it_matches_and_any_suffix(tmp_path: Path) -> None:
    books = write(tmp_path / "books", a_txt="a", ab_txt="ab", b_txt="b", readme_md="taken")
    assert names(tmp_path, f"{books}/a*.txt") == ["a.txt", "ab.txt"]
    assert names(tmp_path, f"{books}/*") == ["a.txt", "ab.txt", "b.txt", "readme.md"]


def test_file_reached_twice_is_one_source(tmp_path: Path) -> None:
    books = write(tmp_path / "books", a_txt="a", b_txt="b")
    assert names(tmp_path, books, books / "a.txt", f"{books}/*.txt") == ["a.txt", "b.txt"]


def test_folder_name_with_glob_characters_is_a_folder(tmp_path: Path) -> None:
    assert names(tmp_path, write(tmp_path / "books [1]", a_txt="a")) == ["a.txt"]


def test_every_path_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "hollow").mkdir()
    with pytest.raises(CorpusError) as raised:
        names(tmp_path, tmp_path / "absent", tmp_path / "hollow", f"{tmp_path}/*.none")
    absent, hollow, glob = raised.value.problems
    assert "absent does not exist" in absent
    assert "hollow holds no text files" in hollow
    assert "*.none matches no file" in glob
    assert all(".jsonl" in problem for problem in raised.value.problems), "the accepted forms must be told"


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("a.parquet", "data.source=parquet"),
        ("a.jsonl.gz", "unpack"),
        ("a.txt.zst", "unpack"),
        ("A.EPUB", "make a .txt file"),
    ],
)
def test_file_that_would_be_misread_as_text_is_refused(tmp_path: Path, name: str, way: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CorpusError, match=f"{name} is no text file: .*{way}"):
        names(tmp_path, tmp_path / name)


def test_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "caf\udce9.txt").write_text("text")
    with pytest.raises(CorpusError, match="is not UTF-8: rename it"):
        names(tmp_path, tmp_path)


def test_folder_that_cannot_be_listed_is_named_and_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is faked: root may list every folder."""
    (tmp_path / "books" / "closed").mkdir(parents=True)
    (tmp_path / "books" / "a.txt").write_text("text")
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if path.endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(CorpusError, match="cannot be listed .*closed"):
        names(tmp_path, tmp_path / "books")


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.txt").write_text("two")
    (tmp_path / "books" / "deep").mkdir(parents=True)
    (tmp_path / "books" / "a.txt").write_text("one")
    (tmp_path / "books" / "deep" / "up").symlink_to(tmp_path / "books")
    (tmp_path / "books" / "link").symlink_to(tmp_path / "elsewhere")
    assert names(tmp_path, tmp_path / "books") == ["a.txt", "link/b.txt"]
    (tmp_path / "books" / "lost.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CorpusError, match=r"lost\.txt cannot be read"):
        names(tmp_path, tmp_path / "books")


def test_folders_that_link_to_each_other_are_entered_once_on_each_way(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / "books" / name).mkdir(parents=True)
        (tmp_path / "books" / name / f"{name}.txt").write_text(name)
        (tmp_path / "books" / name / "other").symlink_to(tmp_path / "books" / other)
    assert names(tmp_path, tmp_path / "books") == ["a/a.txt", "a/other/b.txt", "b/b.txt", "b/other/a.txt"]


def test_link_to_nowhere_that_a_glob_matches_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "books", a_txt="text")
    (folder / "lost.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CorpusError, match=r"lost\.txt cannot be read"):
        names(tmp_path, folder / "*.txt")


def test_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(CorpusError, match="is a pipe or a device"):
        names(tmp_path, tmp_path / "pipe.txt")


def test_parquet_folder_is_searched_for_parquet_only(tmp_path: Path) -> None:
    folder = write(tmp_path / "rows", a_txt="no rows")
    (folder / "deep").mkdir()
    for name in ("b.parquet", "deep/a.parquet"):
        (folder / name).write_bytes(b"x")
    sources = find_sources(DataConfig(source="parquet", paths=(str(folder),)), tmp_path)
    assert [source.name for source in sources] == ["b.parquet", "deep/a.parquet"]
    with pytest.raises(CorpusError, match="a.txt is no Parquet file: use data.source=text"):
        find_sources(DataConfig(source="parquet", paths=(str(folder / "a.txt"),)), tmp_path)


def test_what_was_made_in_a_storage_within_the_corpus_is_none_of_it(tmp_path: Path) -> None:
    write(tmp_path, a_txt="text", storage__runs__r__samples_txt="made", storage__sources__b_txt="downloaded")
    (tmp_path / "link").symlink_to(tmp_path / "storage")
    for storage in (tmp_path / "storage", tmp_path / "link"):
        found = find_sources(DataConfig(source="text", paths=(str(tmp_path),)), storage)
        assert [source.name for source in found] == ["a.txt", "link/sources/b.txt", "storage/sources/b.txt"]
    with pytest.raises(CorpusError, match="runs leads only to what is made in .*storage"):
        names(tmp_path / "storage", tmp_path / "storage" / "runs")


def test_data_set_that_was_not_downloaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="not downloaded yet"):
        find_sources(DataConfig(source="huggingface"), tmp_path)


def test_changed_content_of_equal_size_and_date_is_noticed(tmp_path: Path) -> None:
    books = write(tmp_path / "books", a_txt="one")
    data = DataConfig(source="text", paths=(str(books),))
    before = find_sources(data, tmp_path)
    stat = (books / "a.txt").stat()
    (books / "a.txt").write_text("two")
    os.utime(books / "a.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert find_sources(data, tmp_path)[0].sha256 != before[0].sha256


def test_unchanged_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    books = write(tmp_path / "books", a_txt="a", b_txt="b")
    data = DataConfig(source="text", paths=(str(books),))
    before = find_sources(data, tmp_path)
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("a file was hashed again"))
    assert find_sources(data, tmp_path) == before


def test_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    books = write(tmp_path / "books", a_txt="a", b_txt="b")

    def refuse(path: str) -> str:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("rayjob.corpus.sources.sha256_of", refuse)
    with pytest.raises(CorpusError) as raised:
        names(tmp_path, books)
    assert len(raised.value.problems) == 2
    assert "b.txt cannot be read: [Errno 13] Permission denied" in raised.value.problems[1]


@pytest.mark.parametrize("cache", [b"", b"[1, 2]", b'{"x": 3}', b"\xff"])
def test_damaged_cache_of_hashes_is_replaced(tmp_path: Path, cache: bytes) -> None:
    books = write(tmp_path / "books", a_txt="a")
    data = DataConfig(source="text", paths=(str(books),))
    before = find_sources(data, tmp_path)
    (tmp_path / "sources" / "hashes.json").write_bytes(cache)
    assert find_sources(data, tmp_path) == before
