"""SentencePiece tokenizer that loses nothing, together with the normalizer of the text it was trained on.

`decode(encode(text)) == text` for every text that the normalizer returns. So a round trip changes only what
the normalizer changes, and with its two settings off this is:

- U+FEFF (byte-order mark) is removed;
- CRLF and CR become LF;
- NUL and lone surrogates become U+FFFD;
- U+2581 becomes "_".

Everything else comes back exactly: line breaks, tabs, runs of spaces, spaces at the ends, combining marks,
ligatures, emoji. A character without a piece of its own is spelled in byte tokens, so <unk> never comes from
text; each digit is a token; `</s>` in text is four ordinary characters, never the control token.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from model.normalizer import Normalizer

UNK_ID = 0
BOS_ID = 1
EOS_ID = 2

MODEL_FILE = "tokenizer.model"
CONFIG_FILE = "tokenizer_config.json"
NORMALIZER_FILE = "normalizer.json"

_SPACE = "\u2581"  # how SentencePiece writes a space

_PIECE_CHARS = 16_384
"""Characters that go to SentencePiece at a time: its speed falls with the length, five times at 10 MB."""

_MAX_WORD_CHARS = 10_000
"""Longer words are cut for training, as SentencePiece would leave them out in silence."""

_WORD = re.compile(r" ?[^ \t\n]+")

_HF_CONFIG = {
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "add_bos_token": False,
    "add_eos_token": False,
    "add_prefix_space": False,
    "legacy": False,
    "clean_up_tokenization_spaces": False,
    # Text that spells a control token is text: transformers would otherwise turn it into the token.
    "split_special_tokens": True,
}


class VocabularyTooLarge(ValueError):
    """The text has too few distinct pieces for the vocabulary asked for.

    Attributes:
        largest: the largest vocabulary that the text allows.
    """

    def __init__(self, asked: int, largest: int) -> None:
        super().__init__(asked, largest)  # the arguments, so that it can cross processes
        self.asked = asked
        self.largest = largest

    def __str__(self) -> str:
        return (
            f"tokenizer.vocab_size={self.asked} is too large for this text: use at most {self.largest}, "
            "the largest that it allows, or more text."
        )


def count_words(text: str) -> Counter[str]:
    """Returns how often each word of a text occurs, as `train_tokenizer_from_counts` takes it.

    A word is a run without space, tab or line break, together with the space before it: no piece of the
    vocabulary reaches across the border of two words.
    """
    return Counter(_WORD.findall(text))


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, model_type: str = "bpe") -> bytes:
    """Returns a SentencePiece model trained on all of `texts`, which are normalized already.

    See `train_tokenizer_from_counts`, which it is made of: the length of a line or a text does not matter.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(count_words(text))
    return train_tokenizer_from_counts(counts, vocab_size=vocab_size, model_type=model_type)


def train_tokenizer_from_counts(counts: Mapping[str, int], *, vocab_size: int, model_type: str = "bpe") -> bytes:
    """Returns the content of tokenizer.model, trained on words and how often each occurs.

    The same counts give the same bytes. Every word is used, whatever its length; nothing is sampled.

    Args:
        counts: see `count_words`; counts of several texts can be added.
        vocab_size: pieces of the vocabulary, the 3 control, 1 line break and 256 byte pieces included.
        model_type: "bpe" or "unigram".

    Raises:
        VocabularyTooLarge: the words have fewer pieces.
        ValueError: no words, a vocabulary too small for the characters, or an unknown model_type.
    """
    if model_type not in ("bpe", "unigram"):
        raise ValueError(f"tokenizer.model_type={model_type!r} must be 'bpe' or 'unigram'.")
    lines = _training_lines(counts)
    if not lines:
        raise ValueError("there is no text to train a tokenizer on: every document is empty or white space.")
    content = _train(lines, vocab_size, model_type)
    n_pieces = sentencepiece.SentencePieceProcessor(model_proto=content).vocab_size()
    if n_pieces < vocab_size:
        raise VocabularyTooLarge(vocab_size, n_pieces)
    return content


def _training_lines(counts: Mapping[str, int]) -> list[str]:
    """Returns lines of "word, tab, count", sorted, of words that SentencePiece takes as they are."""
    words: Counter[str] = Counter()
    for text, count in counts.items():
        for word in _WORD.findall(text):
            for start in range(0, len(word), _MAX_WORD_CHARS):
                words[word[start : start + _MAX_WORD_CHARS]] += count
    return [f"{word}\t{count}" for word, count in sorted(words.items())]


def _train(lines: Sequence[str], vocab_size: int, model_type: str) -> bytes:
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            input_format="tsv",
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # too little text: a smaller model, not a bare assertion
            unk_id=UNK_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            pad_id=-1,
            user_defined_symbols=["\n"],
            # Lossless only with these four together.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            byte_fallback=True,
            split_digits=True,
            character_coverage=0.9999,
            max_sentence_length=max(map(len, lines)) * 4,  # in bytes; longer ones would be left out in silence
            num_threads=1,  # it is written into the model: the same bytes on every machine
            minloglevel=2,
        )
    except RuntimeError as error:
        required = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
        if required is None:
            raise
        raise ValueError(
            f"tokenizer.vocab_size={vocab_size} is too small for the characters of this text: use at least "
            f"{required[1]}."
        ) from error
    return model.getvalue()


class Tokenizer:
    """Text to token ids and back, with the vocabulary of a SentencePiece model."""

    def __init__(self, model: bytes, normalizer: Normalizer) -> None:
        """Takes the content of a tokenizer.model that `train_tokenizer` returned.

        Raises:
            ValueError: the content is not such a model.
        """
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError("the tokenizer model is not a SentencePiece model, or is damaged.") from error
        if (processor.unk_id(), processor.bos_id(), processor.eos_id()) != (UNK_ID, BOS_ID, EOS_ID):
            raise ValueError(f"the tokenizer model must have the control ids unk {UNK_ID}, bos {BOS_ID}, eos {EOS_ID}.")
        self.normalizer = normalizer
        self._model = model
        self._processor = processor

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Returns the tokenizer that `save` wrote into a folder, or a checkpoint's.

        Raises:
            ValueError: a file is missing or damaged; the message names it.
        """
        try:
            normalizer = Normalizer.from_json((folder / NORMALIZER_FILE).read_text(encoding="utf-8"))
            return Tokenizer((folder / MODEL_FILE).read_bytes(), normalizer)
        except OSError as error:
            raise ValueError(
                f"{error.filename} cannot be read, expected a tokenizer folder: {error.strerror}."
            ) from error
        except ValueError as error:
            raise ValueError(f"{folder} holds no sound tokenizer: {error}") from error

    def save(self, folder: Path) -> None:
        """Writes tokenizer.model, tokenizer_config.json and normalizer.json.

        AutoTokenizer then loads the folder and gives the ids of `encode`. Two differences remain: it does not
        normalize, and with a unigram model it takes `</s>` or `<0x41>` in text for the token of that name.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MODEL_FILE).write_bytes(self._model)
        config = {"tokenizer_class": self._hf_class, **_HF_CONFIG}
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (folder / NORMALIZER_FILE).write_text(self.normalizer.to_json(), encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Number of pieces; a model's vocab_size may be padded above it."""
        return len(self._bytes)

    @property
    def unk_id(self) -> int:
        """Id of <unk>, which no text produces."""
        return UNK_ID

    @property
    def bos_id(self) -> int:
        """Id of <s>, which is not used in training."""
        return BOS_ID

    @property
    def eos_id(self) -> int:
        """Id of </s>, which ends a document."""
        return EOS_ID

    @cached_property
    def hash(self) -> str:
        """sha256, in hex, of all that decides the ids of a text: the pieces and the normalizer."""
        processor = self._processor
        pieces = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(self.vocab_size)]
        return hashlib.sha256(json.dumps([pieces, self.normalizer.to_json()]).encode()).hexdigest()

    def normalize(self, text: str) -> str:
        """Returns the text in the form that `encode` expects."""
        return self.normalizer(text)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a normalized text, without BOS or EOS."""
        return list(chain.from_iterable(self.encode_pieces(text)))

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns `encode` of each text, in a third of the time where they are words."""
        if any(len(text) > _PIECE_CHARS for text in texts):
            return [self.encode(text) for text in texts]
        ids: list[list[int]] = self._processor.encode(list(texts), out_type=int, num_threads=1)
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a text as a person types it: normalizes first."""
        return self.encode(self.normalize(text))

    def encode_pieces(self, text: str, max_chars: int = _PIECE_CHARS) -> Iterator[list[int]]:
        """Yields the ids of a normalized text piece by piece, in memory that does not grow with the text.

        The ids do not depend on `max_chars`: the text is only cut between two characters that stand together
        in no piece of the vocabulary, such as before a space, since no token can reach across such a place.
        A stretch without one, such as a long run of one letter, is encoded whole.
        """
        start = 0
        while start < len(text):
            end = self._safe_end(text, start, max_chars)
            yield self._processor.encode(text[start:end], out_type=int, num_threads=1)
            start = end

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of the tokens, control tokens skipped; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Returns the UTF-8 bytes of a token; none for a control token or an id that pads the vocabulary."""
        return self._bytes[token] if token < len(self._bytes) else b""

    def label(self, token: int) -> str:
        """Returns a name that no two tokens share.

        It is the text of a piece, `<0x0A>` for a byte, `</s>` for a control token, and `<pad_50300>` for an id that
        pads the vocabulary.
        """
        if token >= self.vocab_size:
            return f"<pad_{token}>"
        piece: str = self._processor.id_to_piece(token)  # SentencePiece writes every space of a piece as U+2581
        return piece.replace(_SPACE, " ")

    def byte_lengths(self) -> NDArray[np.int64]:
        """Returns the number of UTF-8 bytes of each token (vocab_size,), 0 for control tokens."""
        return np.array([len(content) for content in self._bytes], dtype=np.int64)

    def _safe_end(self, text: str, start: int, max_chars: int) -> int:
        """Returns where to cut next: at most max_chars after start, or else at the first safe place."""
        if start + max_chars >= len(text):
            return len(text)
        candidates = chain(range(start + max_chars, start, -1), range(start + max_chars + 1, len(text)))
        return next((i for i in candidates if text[i - 1 : i + 1] not in self._inner_pairs), len(text))

    @property
    def _hf_class(self) -> str:
        """The transformers class that reads this kind of model; LlamaTokenizer takes every model for BPE."""
        # A BPE piece's score is its rank, negated; a unigram piece's is the logarithm of its probability.
        is_bpe = all(self._processor.get_score(token).is_integer() for token in range(self.vocab_size))
        return "LlamaTokenizer" if is_bpe else "PreTrainedTokenizerFast"

    @cached_property
    def _bytes(self) -> list[bytes]:
        return [self._piece_bytes(token) for token in range(self._processor.vocab_size())]

    def _piece_bytes(self, token: int) -> bytes:
        if self._processor.is_control(token) or self._processor.is_unknown(token):
            return b""
        piece: str = self._processor.id_to_piece(token)
        if self._processor.is_byte(token):
            return bytes([int(piece[1:-1], 16)])  # <0x0A>
        return piece.replace(_SPACE, " ").encode()

    @cached_property
    def _inner_pairs(self) -> frozenset[str]:
        """All pairs of neighbouring characters inside pieces: only between others is a cut without effect."""
        texts = (self._bytes[i].decode() for i in range(self.vocab_size) if not self._processor.is_byte(i))
        return frozenset(text[i : i + 2] for text in texts for i in range(len(text) - 1))
