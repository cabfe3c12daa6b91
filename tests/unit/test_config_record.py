"""config.yaml of a run: changes are told, and damage never keeps a run from starting."""

from pathlib import Path

import pytest

from rayjob.config import JobConfig
from rayjob.config_file import load_config
from rayjob.training.config_record import write_config


def config_of(storage: Path, *settings: str) -> JobConfig:
    return load_config(None, [f"storage={storage}", *settings])


def test_what_changed_since_the_last_start_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = config_of(tmp_path)
    first.run_folder.mkdir(parents=True)
    write_config(first)
    write_config(first)
    assert not caplog.records
    write_config(config_of(tmp_path, "optimizer.lr=0.002"))
    assert [record.getMessage() for record in caplog.records] == [
        f"optimizer.lr changed since this run was started: {first.optimizer.lr} -> 0.002"
    ]


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 900, b"- a\n- b\n", b"\xff\xfe", b"a: [", b"data: 3\n"],
    ids=["empty", "zeros", "list", "bytes", "cut", "shape"],
)
def test_damaged_record_is_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    config = config_of(tmp_path)
    config.run_folder.mkdir(parents=True)
    record = config.run_folder / "config.yaml"
    record.write_bytes(content)
    write_config(config)
    assert len(caplog.records) == (content != b"data: 3\n")  # that one is sound YAML which names no setting
    caplog.clear()
    write_config(config)
    assert not caplog.records
