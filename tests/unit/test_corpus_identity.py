import os
from pathlib import Path
from typing import Any

from rayjob.corpus.blocks import Manifest, SplitTotals
from rayjob.corpus.identity import digest, explain_rebuild

NOTHING = SplitTotals(0, 0, 0, 0, 0, "", [])


def inputs(sources: dict[str, str], **settings: Any) -> dict[str, Any]:
    return {"sources": [{"name": name, "sha256": sha256} for name, sha256 in sources.items()], **settings}


def save(storage: Path, name: str, old: dict[str, Any], time_ns: int) -> Path:
    folder = storage / "tokens" / name
    Manifest(name, old, "", "uint16", [], {}, NOTHING, NOTHING, {}, {}, []).save(folder)
    os.utime(folder / "manifest.json", ns=(time_ns, time_ns))
    return folder


def test_digest_does_not_depend_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})
    assert len(digest({})) == 16


def test_every_difference_is_told(tmp_path: Path) -> None:
    folder = save(tmp_path, "old", inputs({"a": "1", "b": "1", "c": "1"}, vocab_size=512, dedup=True), 1)
    told = explain_rebuild(tmp_path, inputs({"a": "1", "b": "2", "d": "1"}, vocab_size=400, dedup=True))
    assert told == [
        f"{folder} does not fit: new: d",
        f"{folder} does not fit: gone: c",
        f"{folder} does not fit: changed: b",
        f"{folder} does not fit: vocab_size 512 -> 400",
    ]


def test_many_changed_sources_are_counted(tmp_path: Path) -> None:
    save(tmp_path, "old", inputs({"a": "1"}), 1)
    [told] = explain_rebuild(tmp_path, inputs({"a": "1", **{f"b{number}": "1" for number in range(8)}}))
    assert told.endswith("new: b0, b1, b2, b3, b4 and 3 more")


def test_comparison_is_with_the_nearest_corpus_and_of_those_the_newest(tmp_path: Path) -> None:
    save(tmp_path, "older", inputs({"a": "1", "b": "1"}, vocab_size=300), 1)
    newer = save(tmp_path, "newer", inputs({"a": "1", "b": "1"}, vocab_size=310), 2)
    save(tmp_path, "other", inputs({"a": "1", "x": "1"}, vocab_size=320), 3)
    (tmp_path / "tokens" / "damaged").mkdir()
    (tmp_path / "tokens" / "damaged" / "manifest.json").write_text("{")
    told = explain_rebuild(tmp_path, inputs({"a": "1", "b": "1"}, vocab_size=400))
    assert told == [f"{newer} does not fit: vocab_size 310 -> 400"]


def test_unrelated_corpus_explains_nothing(tmp_path: Path) -> None:
    assert explain_rebuild(tmp_path, inputs({"a": "1"})) == []
    save(tmp_path, "other", inputs({"x": "1"}), 1)
    assert explain_rebuild(tmp_path, inputs({"a": "1"})) == []
