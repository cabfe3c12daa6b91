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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
    wait_s: float  # until the batch was there

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


class _HostBatch(NamedTuple):
    """The same in the host's memory."""

    micro_batches: list[tuple[Tensor, Tensor]]
    window_ids: list[npt.NDArray[np.int64]]
    all_window_ids: npt.NDArray[np.int64]


class StepFeed:
    """Makes a worker's micro-batches of any step: a pure function of (seed, step), whatever ran before.

    Those of the next step are made by a thread while this one is computed, on a GPU in pinned memory.
    """

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
        # Pinned memory belongs to a GPU's context, and a new thread would open one on the first GPU.
        choose = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
        self._thread = ThreadPoolExecutor(1, "feed", *choose)
        self._ahead: tuple[int, Future[_HostBatch]] | None = None

    def step_batch(self, index: int) -> StepBatch:
        """Returns this worker's micro-batches of update `index`."""
        started = time.monotonic()
        ahead, self._ahead = self._ahead, None
        host = ahead[1].result() if ahead and ahead[0] == index else self._make(index)
        micro_batches = [self._to_device(micro) for micro in host.micro_batches]
        self._ahead = index + 1, self._thread.submit(self._make, index + 1)
        n_tokens = len(host.all_window_ids) * self._windows.max_seq_len
        wait_s = time.monotonic() - started
        return StepBatch(micro_batches, host.window_ids, host.all_window_ids, n_tokens, started, wait_s)

    def _make(self, index: int) -> "_HostBatch":
        ids = self._order.window_ids(index)
        dealt = deal(ids, self._rank, self._n_workers, self._micro_batch_size)
        micro_batches = [self._windows.batch(micro, self._micro_batch_size) for micro in dealt]
        if self._device.type == "cuda":
            micro_batches = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in micro_batches]
        return _HostBatch(micro_batches, dealt, ids)

    def padding(self) -> tuple[Tensor, Tensor]:
        """Returns a micro-batch in which nothing counts."""
        return self._to_device(self._windows.batch(np.empty(0, dtype=np.int64), self._micro_batch_size))

    def _to_device(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch  # from pinned memory the copy is a part of the device's work, and nobody waits for it
        return inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)


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
