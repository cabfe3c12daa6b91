"""Bits per byte of a run's best checkpoint beside `xz -9e` on the same validation documents.

    python tests/bench/bench_xz.py --config rayjob/configs/small.yaml [KEY=VALUE …]

Run the job first. Every document is compressed by itself; the model's size does not count on its side, as the
dictionary of xz does not on the other. The last line is JSON; `ratio` is xz / model, above 1 where the model is better.
"""

import argparse
import json
import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from model.tokenizer import Tokenizer
from rayjob.commands import EVALUATION_FILE
from rayjob.config_file import load_config
from rayjob.corpus.blocks import token_stream
from rayjob.corpus.prepare import find_prepared


def documents(tokens_folder: Path, tokenizer: Tokenizer) -> Iterator[bytes]:
    """Yields the validation documents as they were tokenized, without their EOS."""
    tokens = np.concatenate(list(token_stream(tokens_folder, "val")))
    for document in np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_id) + 1):
        if len(document):
            yield tokenizer.decode(document[document != tokenizer.eos_id].tolist()).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    config = load_config(args.config, args.overrides)
    corpus = find_prepared(config.data, config.tokenizer, config.storage_folder)
    if corpus is None:
        parser.error("the corpus is not prepared: run the job first.")
    texts = list(documents(corpus.tokens_folder, Tokenizer.load(corpus.tokenizer_folder)))
    n_bytes = sum(map(len, texts))
    xz_bits = 8 * sum(len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) for text in texts)
    evaluation = json.loads((config.run_folder / EVALUATION_FILE).read_text())
    result = {
        "documents": len(texts),
        "bytes": n_bytes,
        "xz_bits_per_byte": xz_bits / n_bytes,
        "model_bits_per_byte": evaluation["bits_per_byte"],
        "checkpoint": evaluation["checkpoint"],
    }
    print(json.dumps(result | {"ratio": result["xz_bits_per_byte"] / result["model_bits_per_byte"]}))


if __name__ == "__main__":
    main()
