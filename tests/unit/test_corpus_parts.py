from pathlib import Path

import pytest

from rayjob.corpus.parts import read_part, write_part


def test_part_with_any_byte_changed_is_as_good_as_none(tmp_path: Path) -> None:
    path = tmp_path / "part.parquet"
    write_part(path, {"hash": list(range(50))}, {"rows": 50, "names": ["a", "b"]})
    content = path.read_bytes()
    before = read_part(path)
    assert before is not None
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        found = read_part(path)
        assert found is None or (found[0].equals(before[0]) and found[1] == before[1]), place


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no table at all"])
def test_what_is_no_part_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "part.parquet").write_bytes(content)
    assert read_part(tmp_path / "part.parquet") is None
