"""The processes of one gloo group, for tests of what ranks do together; without Ray."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def run_ranks(function: Callable[..., Any], n_ranks: int, *arguments: Any) -> list[Any]:
    """Returns what `function(rank, meeting, *arguments)` returns in a process for each rank.

    `meeting` is for `init_process_group`: a file, for a free port may be taken by another process before it is used.
    """
    with tempfile.TemporaryDirectory() as folder, mp.get_context("spawn").Pool(n_ranks) as pool:
        meeting = f"file://{folder}/meeting"
        return pool.starmap(function, [(rank, meeting, *arguments) for rank in range(n_ranks)], chunksize=1)
