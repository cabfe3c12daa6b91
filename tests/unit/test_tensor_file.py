"""The safetensors library is the judge of the files that are written without it."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, safe_open, save

from model.tensor_file import write_tensors

TENSORS = {
    "odd": torch.arange(7, dtype=torch.uint8),
    "matrix": torch.randn(3, 5),
    "transposed": torch.randn(4, 2).T,
    "half": torch.randn(3).bfloat16(),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "count": torch.tensor([2**40]),
}


@pytest.mark.parametrize("names", [[], ["odd"], list(TENSORS)])
def test_library_reads_what_was_written(tmp_path: Path, names: list[str]) -> None:
    tensors = {name: TENSORS[name] for name in names}
    path = tmp_path / "a.safetensors"
    entry = write_tensors(path, tensors)
    content = path.read_bytes()
    assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].equal(tensor), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_file_is_no_larger_than_the_librarys(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    contiguous = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    assert write_tensors(path, TENSORS)["size"] <= len(save(contiguous, {"format": "pt"})) + 8


def test_a_file_of_many_buffers_is_hashed_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.direct_file._BUFFER_BYTES", 4096)
    path = tmp_path / "a.safetensors"
    tensors = {"a": torch.arange(10_000.0)}
    assert write_tensors(path, tensors)["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert load_file(path)["a"].equal(tensors["a"])
