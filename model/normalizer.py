"""Brings text into the one form that a tokenizer was trained on, before training and before every prompt.

Always, whatever the settings; with the two settings off these are the only changes:

- U+FEFF (byte-order mark) is removed, wherever it stands;
- CRLF and CR become LF;
- NUL and lone surrogates become U+FFFD (neither survives SentencePiece or UTF-8);
- U+2581 becomes "_" (SentencePiece writes a space that way).

`lowercase`: str.lower().

`detokenize`: text of the Penn Treebank kind, as BookCorpus is, becomes plain text. Ordinary prose has none of
its marks and so passes unchanged, but for typographic quotes and ellipses:

    `` i 'm sorry , '' he said .     "i'm sorry," he said.
    do n't , gon na , 't is          don't, gonna, 'tis
    the germans ' -lrb- all -rrb-    the germans' (all)
    well ... $ 5 or 5 %              well... $5 or 5%
    “curly” ‘quotes’ …               "curly" 'quotes' ...

Only single spaces are ever taken away, no line break and no run of spaces. A dash (--) and the dots of a
spaced . . . keep their spaces, since nothing tells whether the author wrote them. A lone ' inside a line goes
to the word before it: it closes a quotation or marks the possessive of a plural.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

from model.detokenize import detokenize

UNENCODABLE = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Normalizer:
    """A function from text to text; normalizing twice equals normalizing once."""

    detokenize: bool
    lowercase: bool

    def __call__(self, text: str) -> str:
        """Returns the text in the form that the module's docstring describes."""
        text = text.replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n").replace("\u2581", "_")
        if not is_encodable(text):
            text = UNENCODABLE.sub("\ufffd", text)
        if self.lowercase:
            text = text.lower()
        return detokenize(text) if self.detokenize else text

    def to_json(self) -> str:
        """Returns the content of normalizer.json."""
        return json.dumps(asdict(self), sort_keys=True) + "\n"

    @staticmethod
    def from_json(content: str) -> Normalizer:
        """Returns the normalizer that `to_json` wrote.

        Raises:
            ValueError: the content is something else.
        """
        settings = json.loads(content)
        is_known = isinstance(settings, dict) and settings.keys() == {"detokenize", "lowercase"}
        if not is_known or not all(isinstance(value, bool) for value in settings.values()):
            raise ValueError(f"expected the booleans detokenize and lowercase of a normalizer, got {content!r}.")
        return Normalizer(**settings)


def is_encodable(text: str) -> bool:
    """Whether the text is without NUL and lone surrogates; a tenth of the time of a search for them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
