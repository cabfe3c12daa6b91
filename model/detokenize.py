"""Penn Treebank text becomes plain text; `normalizer.py` says what that means.

The rules are the regular expressions here, and `by_rules` applies them. It takes 60 ms per MB, so of a long text it
gets only the lines that need it, one in ten: in all others numpy finds the few kinds of tokens that make up most of
such text, and takes their spaces away. This is the same because

- no rule looks beyond its line, but for one that tells a line that begins with `. .` from a text that does;
- a line with any other token that a rule could be about, or with two tokens that meet in an unusual way, is left to
  the rules; the tokens that remain are joined all at once and make no new ones.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

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


def by_rules(text: str) -> str:
    """Applies the rules as they stand above, to any text without typographic quotes."""
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


Flags = NDArray[np.bool_]
Places = NDArray[np.int64]

_SHORT_CHARS = 2_000  # the rules alone are faster up to here
_PAD_BEFORE, _PAD_AFTER = "\n\n", "\n" * 4  # so that every token has neighbours to look at

# By code point; the last one stands for all above.
_IS_SPACE = np.array([chr(code).isspace() for code in range(0x3002)])
_IS_WORD_OR_QUOTE = np.array([re.match(r"[\w']", chr(code)) is not None for code in range(128)])


def _codes(characters: str) -> NDArray[np.uint32]:
    return np.frombuffer(characters.encode("utf-32-le"), dtype=np.uint32)


def _table(characters: str) -> Flags:
    table = np.zeros(129, dtype=bool)
    table[_codes(characters)] = True
    return table


_MAY_MATTER = _table(",;:!?%)]}.'`nN([{$-")
_CLOSES = _table(",;:!?%)]}")
_OPENS = _table("([{$")
_QUOTE, _BACKTICK, _DOT, _DASH, _DOUBLE_QUOTE, _SPACE, _NEWLINE = map(int, _codes("'`.-\" \n"))


def detokenize(text: str) -> str:
    """Returns plain text; a second call changes nothing."""
    for typographic, plain in _TYPOGRAPHIC.items():
        text = text.replace(typographic, plain)
    if len(text) < _SHORT_CHARS or text.startswith(". ."):
        return by_rules(text)
    return _by_lines(text)


def _by_lines(text: str) -> str:
    """Returns what `by_rules` returns, of a text that does not begin with `. .`."""
    codes = _codes(_PAD_BEFORE + text + _PAD_AFTER).copy()
    is_kept, unusual = _join(codes)
    numbers = np.unique(np.searchsorted(np.flatnonzero(codes == _NEWLINE), unusual)) - len(_PAD_BEFORE)
    joined = codes[is_kept].tobytes().decode("utf-32-le")[len(_PAD_BEFORE) : -len(_PAD_AFTER)]
    if not len(numbers):
        return joined
    lines, sources = joined.split("\n"), text.split("\n")
    ruled = by_rules("\n".join(["", *(sources[number] for number in numbers)])).split("\n")[1:]
    for number, line in zip(numbers, ruled, strict=True):
        lines[number] = line
    return "\n".join(lines)


class _Tokens:
    """Where tokens begin, and what stands around there."""

    def __init__(self, codes: NDArray[np.uint32], is_space: Flags, starts: Places) -> None:
        self._codes, self._is_space, self.starts = codes, is_space, starts

    def of(self, flags: Flags) -> _Tokens:
        return _Tokens(self._codes, self._is_space, self.starts[flags])

    def at(self, offset: int) -> NDArray[np.uint32]:
        return self._codes[self.starts + offset]

    def is_letter(self, offset: int, letters: str) -> Flags:
        """Whether one of the lower-case ASCII letters stands there, in either case."""
        return np.isin(self.at(offset) | 0x20, _codes(letters))

    def ends(self, offset: int) -> Flags:
        return self._is_space[self.starts + offset]

    def has_neighbour(self) -> Flags:
        """Whether one space stands between the token and the one before."""
        is_spaced: Flags = self.at(-1) == _SPACE
        return is_spaced & ~self._is_space[self.starts - 2]


def _join(codes: NDArray[np.uint32]) -> tuple[Flags, Places]:
    """Spells quotes in place; returns which characters stay, and a place in every line that is left to the rules."""
    is_space = _IS_SPACE.take(codes, mode="clip")
    tokens = _Tokens(codes, is_space, np.flatnonzero(is_space[:-1] & ~is_space[1:]) + 1)
    unusual = [_split_words(tokens)]
    tokens = tokens.of(_MAY_MATTER.take(tokens.at(0), mode="clip"))
    backticks = tokens.of(tokens.at(0) == _BACKTICK)
    quotes = tokens.of(tokens.at(0) == _QUOTE)
    openings = backticks.of((backticks.at(1) == _BACKTICK) & backticks.ends(2))
    closings = quotes.of((quotes.at(1) == _QUOTE) & quotes.ends(2))

    is_kept = np.ones(len(codes), dtype=bool)
    for joined in (_closing_marks(tokens), _dots(tokens), _negations(tokens), _clitics(quotes), closings):
        is_kept[joined.of(joined.has_neighbour()).starts - 1] = False
    is_kept[openings.of((openings.at(2) == _SPACE) & ~openings.ends(3)).starts + 2] = False
    alone = closings.of(~closings.has_neighbour())
    unusual += [alone.starts[~is_kept[alone.starts + 2]], *_unusual(tokens, quotes, openings)]

    is_opening = np.zeros(len(codes), dtype=bool)
    is_opening[openings.starts] = is_opening[openings.starts + 1] = True
    unusual.append(np.flatnonzero((codes == _BACKTICK) & ~is_opening))
    for marks in (openings, closings):
        codes[marks.starts] = _DOUBLE_QUOTE
        is_kept[marks.starts + 1] = False
    return is_kept, np.concatenate(unusual)


def _closing_marks(tokens: _Tokens) -> _Tokens:
    return tokens.of(_CLOSES.take(tokens.at(0), mode="clip") & tokens.ends(1))


def _dots(tokens: _Tokens) -> _Tokens:
    """One to three dots."""
    dots = tokens.of(tokens.at(0) == _DOT)
    are_two = dots.at(1) == _DOT
    are_three = are_two & (dots.at(2) == _DOT)
    return dots.of(dots.ends(1) | are_two & dots.ends(2) | are_three & dots.ends(3))


def _negations(tokens: _Tokens) -> _Tokens:
    return tokens.of(tokens.is_letter(0, "n") & (tokens.at(1) == _QUOTE) & tokens.is_letter(2, "t") & tokens.ends(3))


def _clitics(quotes: _Tokens) -> _Tokens:
    is_short = quotes.is_letter(1, "smd") & ~_IS_WORD_OR_QUOTE.take(quotes.at(2), mode="clip")
    is_long = _is_long_clitic(quotes) & ~_IS_WORD_OR_QUOTE.take(quotes.at(3), mode="clip")
    return quotes.of(is_short | is_long)


def _is_long_clitic(quotes: _Tokens) -> Flags:
    is_re_or_ve = quotes.is_letter(1, "rv") & quotes.is_letter(2, "e")
    return is_re_or_ve | quotes.is_letter(1, "l") & quotes.is_letter(2, "l")


def _split_words(tokens: _Tokens) -> Places:
    """`gon na`, `got ta`, `gim me` and the like: the letter after the space is that before it."""
    found = tokens.of(tokens.at(-2) == tokens.at(0))
    return found.of(np.isin(found.at(0), _codes("ntm")) & np.isin(found.at(1), _codes("ae"))).starts


def _unusual(tokens: _Tokens, quotes: _Tokens, openings: _Tokens) -> list[Places]:
    """Places of what is left to the rules."""
    first = tokens.at(0)
    dots = tokens.of(first == _DOT)
    is_spaced = (dots.at(-1) == _SPACE) & (dots.at(-2) == _DOT)
    are_many = (dots.at(1) == _DOT) & (dots.at(2) == _DOT) & (dots.at(3) == _DOT)
    dashes = tokens.of(first == _DASH)
    is_foreign = (quotes.at(2) > 127) | (quotes.at(3) > 127)  # which may be a letter
    return [
        tokens.starts[_OPENS.take(first, mode="clip") & tokens.ends(1)],
        dots.starts[is_spaced | are_many],
        dashes.starts[dashes.is_letter(1, "lr")],  # -lrb-
        quotes.starts[quotes.ends(1) | is_foreign | quotes.is_letter(1, "t") & quotes.ends(2)],  # 't is
        openings.starts[(openings.at(2) == _SPACE) & (openings.at(3) == _QUOTE)],
    ]
