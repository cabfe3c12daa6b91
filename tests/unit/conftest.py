"""Settings of all unit tests, and what several of them need."""

import signal
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


@pytest.fixture(autouse=True)
def _own_signal_handlers() -> Iterator[None]:
    """Gives each test Python's handlers: a command that runs in a test's process sets its own."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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
