"""`eval`: loss, perplexity, accuracy and bits per byte of a checkpoint, on the validation split or on given texts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from model.checkpoint import load_config, load_model
from model.tokenizer import Tokenizer
from rayjob.config import ConfigError
from rayjob.corpus.blocks import Manifest
from rayjob.store.checkpoints import fetch_checkpoint
from rayjob.training.evaluation import Evaluation, evaluate
from rayjob.training.feed import Windows, open_windows

_BATCH_TOKENS = 8_192  # per forward: enough to keep a device busy, small enough for any


def evaluate_split(checkpoint: Path, tokens_folder: Path) -> Evaluation:
    """Returns the evaluation of a checkpoint on the validation split of a corpus.

    Raises:
        ConfigError: the corpus was made with another tokenizer, so its tokens mean nothing to the checkpoint.
    """
    fetch_checkpoint(checkpoint)  # a task on another node
    theirs, ours = Manifest.load(tokens_folder).tokenizer_hash, Tokenizer.load(checkpoint).hash
    if theirs != ours:
        raise ConfigError(
            [
                f"{checkpoint} has tokenizer {ours}, but the corpus of this configuration is of tokenizer {theirs}: "
                "give the configuration of the checkpoint's run, or --text."
            ]
        )
    return _evaluate(checkpoint, open_windows(tokens_folder, "val", load_config(checkpoint).max_seq_len))


def evaluate_texts(checkpoint: Path, paths: Sequence[Path]) -> Evaluation:
    """Returns the evaluation of a checkpoint on text files, a document each.

    Raises:
        ConfigError: naming every file that cannot be read, or if there is no token to predict.
    """
    tokenizer = Tokenizer.load(checkpoint)
    problems: list[str] = []
    tokens: list[int] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"{path} cannot be read as UTF-8 text: {error}")
        else:
            tokens += [*tokenizer.encode_prompt(text), tokenizer.eos_id]
    if not problems and not tokenizer.byte_lengths()[tokens[1:]].any():
        problems.append("the given texts are empty or too short: there is no text to predict.")
    if problems:
        raise ConfigError(problems)
    return _evaluate(checkpoint, Windows(np.array(tokens, dtype=np.uint16), load_config(checkpoint).max_seq_len))


def _evaluate(checkpoint: Path, windows: Windows) -> Evaluation:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return evaluate(
        load_model(checkpoint, device=device),
        windows,
        Tokenizer.load(checkpoint).byte_lengths(),
        batch_size=max(1, _BATCH_TOKENS // windows.max_seq_len),
        precision=torch.float32,
    )
