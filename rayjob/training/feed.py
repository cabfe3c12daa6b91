"""Windows by id from the Parquet blocks: flattened once per node to a uint16 file, then memory-mapped.

1. The blocks of a split, in order, are one token stream.
2. It is written once per node to a file named by the manifest's hash (temporary name, rename, lock).
3. Window i is tokens [i T, i T + T + 1): inputs and targets overlap by one, so only the last tail is left out.
"""

import fcntl
import logging
import os
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.loss import IGNORED
from rayjob.corpus.blocks import Manifest, n_windows, token_stream
from rayjob.training.schedule import WindowOrder, deal

logger = logging.getLogger(__name__)

_STREAM_DAYS = 7  # an unused stream stays on a node


def open_windows(tokens_folder: Path, split: str, max_seq_len: int) -> "Windows":
    """Returns the windows of a split ("train" or "val") without reading the corpus into memory."""
    return Windows(np.memmap(_flatten(tokens_folder, split), dtype=np.uint16, mode="r"), max_seq_len)


class Windows:
    """The windows of a token stream by id.

    Args:
        stream: (N,) uint16 tokens.
        max_seq_len: T; a window holds T + 1 tokens.
    """

    def __init__(self, stream: npt.NDArray[np.uint16], max_seq_len: int) -> None:
        self._stream = stream
        self.max_seq_len = max_seq_len

    def __len__(self) -> int:
        return n_windows(len(self._stream), self.max_seq_len)

    @property
    def n_tokens(self) -> int:
        return len(self._stream)

    def batch(self, ids: npt.NDArray[np.int64], size: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, both (size, T) int64; rows beyond `ids` are ignored padding.

        A fixed size keeps shapes static, and padding adds nothing to the loss or its gradient.
        """
        T = self.max_seq_len
        inputs = np.zeros((size, T), dtype=np.int64)
        targets = np.full((size, T), IGNORED, dtype=np.int64)
        for row, window in enumerate(ids):
            tokens = self._stream[window * T : window * T + T + 1].astype(np.int64)
            inputs[row], targets[row] = tokens[:-1], tokens[1:]
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def tail(self) -> tuple[Tensor, Tensor] | None:
        """Returns the tokens after the last whole window as inputs and targets (1, T), padded; None if none."""
        T, begin = self.max_seq_len, len(self) * self.max_seq_len
        tokens = self._stream[begin:].astype(np.int64)
        if len(tokens) < 2:
            return None
        inputs = np.zeros((1, T), dtype=np.int64)
        targets = np.full((1, T), IGNORED, dtype=np.int64)
        inputs[0, : len(tokens) - 1], targets[0, : len(tokens) - 1] = tokens[:-1], tokens[1:]
        return torch.from_numpy(inputs), torch.from_numpy(targets)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One worker's part of a step."""

    micro_batches: list[tuple[Tensor, Tensor]]  # inputs and targets, each (micro_batch_size, T) int64, on the device
    window_ids: list[npt.NDArray[np.int64]]  # of each micro-batch
    all_window_ids: npt.NDArray[np.int64]  # of the step, over all workers
    n_tokens: int  # counted in the step over all workers
    started_at_s: float  # monotonic clock
    wait_s: float  # spent making the batch

    @property
    def micro_batch_size(self) -> int:
        """Windows of each forward, padding included."""
        return self.micro_batches[0][0].shape[0]

    @property
    def fingerprint(self) -> int:
        """A number of this worker's windows; the workers' numbers add up to that of the step, however it is dealt.

        A sum of 32-bit checksums, so up to 2^21 windows it is exact as a float64 too.
        """
        return sum(zlib.crc32(window.tobytes()) for ids in self.window_ids for window in ids.astype("<i8"))

    def seconds_since_start(self) -> float:
        return time.monotonic() - self.started_at_s


class StepFeed:
    """Makes a worker's micro-batches of any step: a pure function of (seed, step), whatever ran before."""

    def __init__(
        self,
        windows: Windows,
        order: WindowOrder,
        micro_batch_size: int,
        rank: int,
        n_workers: int,
        device: torch.device,
    ) -> None:
        self._windows = windows
        self._order = order
        self._micro_batch_size = micro_batch_size
        self._rank, self._n_workers = rank, n_workers
        self._device = device

    def step_batch(self, index: int) -> StepBatch:
        """Returns this worker's micro-batches of update `index`."""
        started = time.monotonic()
        ids = self._order.window_ids(index)
        dealt = deal(ids, self._rank, self._n_workers, self._micro_batch_size)
        micro_batches = [self._to_device(self._windows.batch(micro, self._micro_batch_size)) for micro in dealt]
        n_tokens = len(ids) * self._windows.max_seq_len
        return StepBatch(micro_batches, dealt, ids, n_tokens, started, time.monotonic() - started)

    def padding(self) -> tuple[Tensor, Tensor]:
        """Returns a micro-batch in which nothing counts."""
        return self._to_device(self._windows.batch(np.empty(0, dtype=np.int64), self._micro_batch_size))

    def _to_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        return inputs.to(self._device), targets.to(self._device)


def _flatten(tokens_folder: Path, split: str) -> Path:
    """Returns this node's flat copy of a split, making it if no process of the node has yet."""
    manifest = Manifest.load(tokens_folder)
    n_tokens = getattr(manifest, split).tokens
    folder = Path(tempfile.gettempdir()) / f"rayjob-{os.getuid()}" / "streams"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    flat = folder / f"{manifest.hash}-{split}.uint16"
    with (folder / f"{flat.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the folder is this node's own, so flock holds
        if not flat.exists() or flat.stat().st_size != 2 * n_tokens:
            _remove_old_streams(folder)
            _write_flat(flat, token_stream(tokens_folder, split))
        os.utime(flat)
    return flat


def _remove_old_streams(folder: Path) -> None:
    """Makes room; who still has one mapped keeps it, and who opens it again makes it again."""
    oldest_s = time.time() - _STREAM_DAYS * 86_400
    for path in folder.glob("*.uint16"):
        if path.stat().st_mtime < oldest_s:
            path.unlink(missing_ok=True)


def _write_flat(flat: Path, blocks: Iterator[npt.NDArray[np.uint16]]) -> None:
    temporary = flat.with_suffix(".tmp")  # always the same, so that a killed writer's is overwritten
    try:
        with temporary.open("wb") as file:
            for tokens in blocks:
                file.write(tokens.tobytes())
        temporary.rename(flat)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"cannot write the token stream {flat}: {error}. Free space there or set TMPDIR.") from error
