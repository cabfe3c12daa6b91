"""Writes a safetensors file straight from memory, in one pass that also hashes it.

    8 bytes      length of the header, little endian
    header       JSON: {"__metadata__": …, name: {"dtype", "shape", "data_offsets"}, …}, padded with spaces
    data         the tensors one after another, without holes

The safetensors library writes the same format but would have the file read again for its hash.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.complete import write_file

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.uint8: "U8"}
_ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes CPU tensors, syncs the file to disk and returns its entry for COMPLETE."""
    # Wide types first keep every tensor aligned in the mapped file.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    return write_file(path, _parts(_header({name: tensors[name] for name in names}), tensors, names))


def _parts(header: bytes, tensors: Mapping[str, Tensor], names: list[str]) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "little")
    yield header
    for name in names:
        yield tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for the format
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header.ljust(-len(header) % _ALIGNMENT + len(header))
