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

_UNENCODABLE = re.compile("[\0\ud800-\udfff]")

_TYPOGRAPHIC = {"“": '"', "”": '"', "‘": "'", "’": "'", "…": "..."}

# Treebank tokens that stand for another string; every other token stands for itself.
_SPELLINGS = {
    "``": '"',
    "''": '"',
    "`": "'",
    "-lrb-": "(",
    "-rrb-": ")",
    "-lsb-": "[",
    "-rsb-": "]",
    "-lcb-": "{",
    "-rcb-": "}",
}
# Each pattern begins with the characters that it can begin with and looks behind afterwards: the regex engine
# skips all others, which makes them five times as fast as with the look-behind first.
_JOINS_NEXT = re.compile(
    r"[`'(\[{$-](?<!\S.)"  # the first character of a token, and then the rest of it:
    r"(?:(?<=`)`?|(?<=[(\[{])|(?<=-)[lL][rRsScC][bB]-|(?<=\$)(?= \d)|(?<=\A')|(?<=\n')|(?<=`` '))"
    r" (?=\S)"
)
_JOINS_PREVIOUS = re.compile(
    r" (?<=\S )(?:"
    r"(?:''?|[,;:!?%)\]}]|-[rR][rRsScC][bB]-|[nN]'[tT])(?!\S)"
    r"|\.+(?<!\s\. \.)(?!\S| \.)"  # but not the dots of a spaced . . .
    r"|'(?:[sSmMdD]|[rR][eE]|[vV][eE]|[lL][lL])(?![\w'])"
    r")"
)
# What no neighbour can be joined to, at the edge of a line, or is joined already.
_STANDS_ALONE = re.compile(r"``|''(?<!\S'')(?!\S)|-[lLrR][rRsScC][bB]-(?<!\S.{5})(?!\S)")
_SPLIT_WORDS = re.compile(
    r" (?:na|ta|me)\b(?<=\b(?:[gG]on na|[wW]an na|[gG]ot ta|[gG]im me|[lL]em me))"
    r"| (?<=(?<!\S)'[tT] )(?:is|was|were|will)\b"
)


@dataclass(frozen=True, slots=True)
class Normalizer:
    """A function from text to text; normalizing twice equals normalizing once."""

    detokenize: bool
    lowercase: bool

    def __call__(self, text: str) -> str:
        """Returns the text in the form that the module's docstring describes."""
        text = text.replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n").replace("\u2581", "_")
        text = _UNENCODABLE.sub("\ufffd", text)
        if self.lowercase:
            text = text.lower()
        return _detokenize(text) if self.detokenize else text

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


def _detokenize(text: str) -> str:
    for typographic, plain in _TYPOGRAPHIC.items():
        text = text.replace(typographic, plain)
    # Joining may put together what is a Treebank token itself (` s -> 's), so go on until nothing changes: a
    # second call then changes nothing either. Every change shortens the text, so it does end.
    before = ""
    while text != before:
        before = text
        text = _JOINS_NEXT.sub(_spelling, text)
        text = _JOINS_PREVIOUS.sub(_spelling, text)
        text = _STANDS_ALONE.sub(_spelling, text)
        text = _SPLIT_WORDS.sub(_spelling, text)
    return text


def _spelling(match: re.Match[str]) -> str:
    token = match[0].strip(" ")
    return _SPELLINGS.get(token.lower(), token)
