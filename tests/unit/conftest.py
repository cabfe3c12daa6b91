"""Settings of all unit tests, and what several of them need."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from model.normalizer import Normalizer
from model.tokenizer import Tokenizer, train_tokenizer

# The models here are tiny: a second thread costs more in waiting than it
# computes, most of all on a busy machine.
torch.set_num_threads(1)

# How long an example takes says something of the machine, and nothing of the code.
settings.register_profile("rayjob", deadline=None)
settings.load_profile("rayjob")


@pytest.fixture(scope="session")
def small_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer of 290 pieces."""
    folder = tmp_path_factory.mktemp("tokenizer")
    model = train_tokenizer(["the old house by the river stood alone\n"] * 20, vocab_size=290)
    Tokenizer(model, Normalizer(detokenize=False, lowercase=False)).save(folder)
    return folder


@pytest.fixture(scope="module")
def one_worker() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
