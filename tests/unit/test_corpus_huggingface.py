"""The real huggingface_hub client against a hub on a loopback port."""

import io
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayjob.config import DataConfig
from rayjob.corpus import huggingface
from rayjob.corpus.errors import CorpusError
from rayjob.corpus.huggingface import CHOICES, downloaded, fetch, read_pin
from rayjob.corpus.plans import obtain_sources
from rayjob.corpus.sources import find_sources
from tests.hub_stub import COMMIT, Hub, running

FIRST, SECOND, THIRD = ((choice.repo, choice.revision) for choice in CHOICES)


def parquet(seed: int, n_rows: int = 2_000) -> bytes:
    words = random.Random(seed)
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": [f"{words.random()} said ." for _ in range(n_rows)]}), buffer)
    return buffer.getvalue()


FILES = {f"plain_text/train/000{number}.parquet": parquet(number) for number in range(3)}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running(Hub({FIRST: {**FILES, "README.md": b"about"}})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def contents(storage: Path) -> dict[str, bytes]:
    sources = find_sources(DataConfig(source="huggingface"), storage)
    return {source.name: Path(source.path).read_bytes() for source in sources}


def test_download_is_complete_pinned_and_asked_for_once(tmp_path: Path, hub: Hub) -> None:
    fetch(None, tmp_path)
    assert contents(tmp_path) == FILES
    pin = read_pin(None, tmp_path)
    assert pin is not None
    assert (pin.repo, pin.revision, pin.commit) == (*FIRST, COMMIT)
    assert not any("README" in request for request in hub.requests)
    before = hub.requests.total()
    fetch(None, tmp_path)
    assert hub.requests.total() == before


def test_download_that_is_cut_goes_on_where_it_was(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 5_000)  # the files are small here
    hub.cut_after = 20_000
    fetch(None, tmp_path)
    assert contents(tmp_path) == FILES
    (resumed,) = hub.ranges
    # A connection that is cut may take with it what the client had not read yet.
    assert 0 < int(resumed.removeprefix("bytes=").removesuffix("-")) <= 20_000


def test_download_that_was_killed_goes_on_with_the_same_commit(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(huggingface, "_download", lambda pin, folder: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            fetch(None, tmp_path)
    with pytest.raises(CorpusError, match="not downloaded yet"):
        downloaded(None, tmp_path)
    hub.files[FIRST] = {**FILES, "plain_text/train/0009.parquet": parquet(9)}  # the branch has moved on
    fetch(None, tmp_path)
    assert contents(tmp_path) == FILES


def test_second_choice_is_used_and_named_when_the_first_is_missing(
    tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    second = {f"plain_text/train-0000{n}-of-00002.parquet": parquet(n) for n in range(2)}
    hub.files = {SECOND: second}
    with caplog.at_level("INFO"):
        fetch(None, tmp_path)
    assert contents(tmp_path) == second
    assert f"{FIRST[0]} at {FIRST[1]}" in caplog.text
    assert f"using {SECOND[0]} at {SECOND[1]}, commit {COMMIT}" in caplog.text


def test_third_choice_is_lines_of_text_that_become_rows(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "LINES_PER_GROUP", 2)
    hub.files = {THIRD: {"books_large_p1.txt": b"one .\ntwo .\r\n\nfour .\nfive .", "books_large_p2.txt": b"six .\n"}}
    fetch(None, tmp_path)
    rows = {name: pq.read_table(io.BytesIO(c))["text"].to_pylist() for name, c in contents(tmp_path).items()}
    assert rows == {
        "books_large_p1.parquet": [b"one .", b"two .", b"", b"four .", b"five ."],
        "books_large_p2.parquet": [b"six ."],
    }


def test_nothing_on_the_hub_is_one_error_with_the_ways_out(tmp_path: Path, hub: Hub) -> None:
    hub.files = {}
    with pytest.raises(CorpusError) as raised:
        fetch(None, tmp_path)
    [problem] = raised.value.problems
    assert all(f"{choice.repo} at {choice.revision}" in problem for choice in CHOICES)
    assert "data.source=parquet" in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    "answer", [(401, b"{}"), (403, b"{}"), (404, b"not found"), (200, b"<html>log in</html>"), (200, b'{"hello": 1}')]
)
def test_choice_that_is_refused_or_answered_by_no_hub_is_passed_over(
    tmp_path: Path, hub: Hub, answer: tuple[int, bytes]
) -> None:
    """As mirrors and proxies answer, without the hub's own error codes."""
    hub.odd = {FIRST: answer}
    hub.files = {SECOND: {"plain_text/train-00000-of-00001.parquet": parquet(7)}}
    fetch(None, tmp_path)
    pin = read_pin(None, tmp_path)
    assert pin is not None
    assert (pin.repo, pin.revision) == SECOND
    hub.odd = {(choice.repo, choice.revision): answer for choice in CHOICES}
    with pytest.raises(CorpusError, match="No copy of BookCorpus is on the hub .*data.source=parquet"):
        fetch(None, tmp_path / "other")


def test_files_that_the_hub_refuses_are_told(tmp_path: Path, hub: Hub) -> None:
    hub.odd = {(FIRST[0], COMMIT): (403, b"{}")}
    with pytest.raises(CorpusError, match=f"The hub does not send {FIRST[0]} at {COMMIT} .*403 Forbidden"):
        fetch(None, tmp_path)


def test_hub_that_cannot_be_reached_is_told_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        started_at_s = time.monotonic()
        with pytest.raises(CorpusError, match="cannot be reached at http://127.0.0.1:.*data.source=text"):
            fetch(None, tmp_path)
    assert time.monotonic() - started_at_s < 30


def test_hub_that_does_not_answer_is_told_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(CorpusError, match="cannot be reached"):
            fetch(None, tmp_path)


def test_busy_hub_is_waited_for_as_long_as_it_asks(tmp_path: Path, hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    hub.busy = 2
    fetch(None, tmp_path)
    assert contents(tmp_path) == FILES
    assert "trying again in 1 s" in caplog.text


def test_file_that_was_altered_after_the_download_is_set_aside_and_fetched_again(tmp_path: Path, hub: Hub) -> None:
    data = DataConfig(source="huggingface")
    sources = obtain_sources(data, tmp_path)
    path = Path(sources[1].path)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)  # of the same size
    assert obtain_sources(data, tmp_path) == sources
    assert contents(tmp_path) == FILES
    assert path.with_name(f"{path.name}.altered").read_bytes() == content


def test_file_of_another_size_or_content_is_named_and_fetched_again(tmp_path: Path, hub: Hub) -> None:
    name = "plain_text/train/0001.parquet"
    hub.sent = {name: FILES[name][:-1] + b"?"}
    with pytest.raises(CorpusError, match=f"{name} of {FIRST[0]} has another sha256"):
        fetch(None, tmp_path)
    with pytest.raises(CorpusError, match="not downloaded yet"):
        downloaded(None, tmp_path)
    hub.sent = {}
    fetch(None, tmp_path)
    assert contents(tmp_path) == FILES


@pytest.mark.parametrize("left", [None, FILES["plain_text/train/0001.parquet"][:-1]])
def test_complete_download_that_lost_a_file_is_no_corpus_and_gets_it_back(
    tmp_path: Path, hub: Hub, left: bytes | None
) -> None:
    fetch(None, tmp_path)
    lost = downloaded(None, tmp_path) / "plain_text/train/0001.parquet"
    lost.unlink()
    if left is not None:
        lost.write_bytes(left)
    with pytest.raises(CorpusError, match=r"lacks plain_text/train/0001\.parquet: `prepare` fetches"):
        contents(tmp_path)
    fetch(None, tmp_path)
    assert contents(tmp_path) == FILES


def test_token_is_sent_and_offline_asks_nobody(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CorpusError, match="HF_HUB_OFFLINE is set"):
        fetch(None, tmp_path)
    assert not hub.requests
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(None, tmp_path)
    assert hub.tokens == {"Bearer hf_secret"}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fetch(None, tmp_path)  # it is there


def test_revision_of_the_config_is_the_one_that_is_asked_for(tmp_path: Path, hub: Hub) -> None:
    hub.files = {(FIRST[0], "my-branch"): FILES}
    with pytest.raises(CorpusError, match="No copy of BookCorpus"):
        fetch("another", tmp_path)
    fetch("my-branch", tmp_path)
    pin = read_pin("my-branch", tmp_path)
    assert pin is not None
    assert pin.revision == "my-branch"
    assert downloaded("my-branch", tmp_path).is_dir()
