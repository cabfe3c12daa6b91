"""Which prepared corpus `show-window` shows when the sources cannot tell any more."""

import logging
from pathlib import Path

import pytest

from rayjob import commands
from rayjob.config import ConfigError, JobConfig
from rayjob.corpus.blocks import Manifest, SplitTotals
from rayjob.corpus.prepare import PreparedCorpus
from tests.saved_run import IDENTITY, SavedRun

SIDE = SplitTotals(0, 0, 0, 0, 0, "", [])


def corpus(name: str, *sources: str) -> PreparedCorpus:
    described = [{"name": source} for source in sources]
    manifest = Manifest(name, {}, "t", "uint16", described, {}, SIDE, SIDE, {}, {}, [])
    return PreparedCorpus(Path("tokenizers"), Path("tokens") / name, manifest)


@pytest.fixture
def config(tmp_path: Path) -> JobConfig:
    return JobConfig(storage=str(tmp_path), run_name="tiny")


def show(config: JobConfig, monkeypatch: pytest.MonkeyPatch, *found: PreparedCorpus) -> PreparedCorpus:
    def refuse(*_: object) -> None:
        raise ConfigError(["not prepared"])

    monkeypatch.setattr(commands, "_prepared_corpus", refuse)
    monkeypatch.setattr(commands, "find_without_sources", lambda *_: list(found))
    return commands._corpus_to_show(config)


def test_the_newest_state_of_the_same_sources_is_shown_and_named(
    config: JobConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    newest, older = corpus("new", "a.txt", "b.txt"), corpus("old", "a.txt", "b.txt")
    with caplog.at_level(logging.WARNING):
        assert show(config, monkeypatch, newest, older) is newest
    assert "showing tokens/new (of a.txt and 1 more) as it was prepared" in caplog.text


def test_nothing_is_shown_where_nothing_fits(config: JobConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="not prepared"):
        show(config, monkeypatch)


@pytest.mark.usefixtures("one_worker")
def test_of_other_sources_only_the_corpus_of_the_run_is_shown(
    config: JobConfig, monkeypatch: pytest.MonkeyPatch, small_tokenizer: Path
) -> None:
    other, of_run = corpus("other", "b.txt"), corpus(IDENTITY.corpus, "a.txt")
    with pytest.raises(ConfigError, match=r"tokens/other \(of b\.txt\); tokens/corpus \(of a\.txt\)\. Restore"):
        show(config, monkeypatch, other, of_run)
    SavedRun(config.run_folder, small_tokenizer).train([3.0])
    assert show(config, monkeypatch, other, of_run) is of_run
