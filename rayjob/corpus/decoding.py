"""From bytes to text, in slabs, so that memory does not grow with the length of a text.

Bytes: a file that begins with a UTF-16 byte-order mark is UTF-16, everything else is UTF-8. A byte that is
not valid UTF-8 is read on its own as Windows-1252, the usual origin of such bytes, or becomes U+FFFD where
that code page has no character; the three bytes of a lone surrogate become one U+FFFD. Such bytes are counted.

Slabs: at most SLAB_BYTES of UTF-8 are decoded and normalised at a time. A slab ends before

1. its last line end, or else
2. its last space between two plain words, or else
3. its last space, or else
4. its last character.

No rule of the normaliser looks across a place of the first two kinds, so the normalised slabs, joined, are the
normalised text. Only a line longer than a slab, without two plain English words in a row, is cut otherwise: a token of
the treebank style at such a place keeps its space.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import IO

SLAB_BYTES = 2**18  # a block of text has room for several, so that it fills up well

UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
ESCAPED = re.compile("[\udc80-\udcff]")  # how Python marks a byte that is not UTF-8
SURROGATE = re.compile("\udced[\udca0-\udcbf][\udc80-\udcbf]")  # its three bytes, escaped so
WINDOWS_1252 = {0xDC00 + byte: bytes([byte]).decode("cp1252", "replace") for byte in range(0x80, 0x100)}
BETWEEN_WORDS = re.compile(rb"(?<=[A-Za-z]{4}) (?=[A-Za-z]{4})")  # as long as no short form of the treebank style is
LF = ord("\n")

Decode = Callable[[bytes], tuple[str, int]]
"""The text of a slab, and how many of its bytes were not valid."""


def decode_bytes(data: bytes) -> tuple[str, int]:
    """The text of a whole file or line by the rule above, and how many of its bytes were not valid."""
    if data.startswith(UTF_16_MARKS):
        text = data.decode("utf-16", "replace")
        return text, text.count(REPLACEMENT)
    return decode_utf8(data)


def decode_utf8(data: bytes) -> tuple[str, int]:
    """The text of UTF-8 bytes, odd ones read by the rule above, and how many were odd."""
    text = data.decode("utf-8", "surrogateescape")
    invalid = sum(1 for _ in ESCAPED.finditer(text))
    return (SURROGATE.sub(REPLACEMENT, text).translate(WINDOWS_1252) if invalid else text), invalid


def find_invalid(data: bytes, text: str) -> int:
    """Where the first odd character stands in the text that a `Decode` made of a slab that has one."""
    escaped = ESCAPED.search(data.decode("utf-8", "surrogateescape"))
    return escaped.start() if escaped else text.index(REPLACEMENT)


def open_utf8(file: IO[bytes]) -> tuple[Iterator[bytes], Decode]:
    """The UTF-8 of a file from its beginning, bit by bit, and how slabs of it are decoded."""
    file.seek(0)
    bits = read_bits(file)
    first = next(bits, b"")
    bits = chain([first], bits)
    return (_recode(bits), _decode_recoded) if first.startswith(UTF_16_MARKS) else (bits, decode_utf8)


def read_utf8(file: IO[bytes], first: int, end: int) -> tuple[bytes, Decode]:
    """Bytes [first, end) of what `open_utf8` gives; a file of UTF-16 is read from its beginning."""
    bits, decode = open_utf8(file)
    if decode is decode_utf8:
        file.seek(first)
        return file.read(end - first), decode
    found = b""
    place = 0
    for data in bits:
        found += data[max(first - place, 0) : max(end - place, 0)]
        place += len(data)
        if place >= end:
            break
    return found, decode


def read_bits(file: IO[bytes]) -> Iterator[bytes]:
    """What is left of a file, at most SLAB_BYTES at a time."""
    return iter(partial(file.read, SLAB_BYTES), b"")


def cut_slabs(bits: Iterable[bytes]) -> Iterator[bytes]:
    """Cuts the UTF-8 of a text into slabs; how it comes in bits does not matter."""
    waiting = b""
    for data in chain.from_iterable(map(_in_bits, bits)):
        waiting += data
        while len(waiting) > SLAB_BYTES:
            end = _find_end(waiting[:SLAB_BYTES])
            yield waiting[:end]
            waiting = waiting[end:]
    if waiting:
        yield waiting


def _in_bits(data: bytes) -> Iterator[bytes]:
    """Cuts a long value, of which the rest would be copied for each slab."""
    return (data[start : start + SLAB_BYTES] for start in range(0, len(data), SLAB_BYTES))


def encode_value(text: str) -> bytes:
    """UTF-8 of a text that was decoded before, which may hold lone surrogates that JSON spelled out."""
    return text.encode("utf-8", "surrogatepass")


def decode_value(data: bytes) -> tuple[str, int]:
    """A slab of what `encode_value` gave."""
    return data.decode("utf-8", "surrogatepass"), 0


def count_line_ends(text: str) -> int:
    """How many lines end in a text: by LF, by CR LF or by CR."""
    return text.count("\n") + text.count("\r") - text.count("\r\n")


def _recode(bits: Iterable[bytes]) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    for data in bits:
        yield decoder.decode(data).encode()
    yield decoder.decode(b"", final=True).encode()


def _decode_recoded(data: bytes) -> tuple[str, int]:
    text = data.decode()
    return text, text.count(REPLACEMENT)


def _find_end(window: bytes) -> int:
    """Where a slab ends that is not the last: a place in (0, len(window)]."""
    place = len(window)
    while (place := max(window.rfind(b"\n", 1, place), window.rfind(b"\r", 1, place))) > 0:
        # With a U+FEFF in between too: the normaliser takes it out.
        if window[place] != LF or not window[:place].rstrip(codecs.BOM_UTF8).endswith(b"\r"):
            return place
    words = [match.start() for match in BETWEEN_WORDS.finditer(window)]
    space = words[-1] if words else window.rfind(b" ", 1)
    return space if space > 0 else _last_character(window)


def _last_character(window: bytes) -> int:
    """Where the last character of UTF-8 begins; the end where none begins in the last four bytes."""
    places = range(len(window) - 1, len(window) - 5, -1)
    return next((place for place in places if window[place] & 0xC0 != 0x80), len(window))
