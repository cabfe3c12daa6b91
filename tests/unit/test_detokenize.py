"""Detokenizing: a long text, most of which is joined without the rules, comes out as the rules alone would make it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.detokenize import by_rules, detokenize

# Every kind of token that a rule is about or nearly about, and words and characters to stand between them.
TOKENS = (
    "`` '' ` ' \" n't N'T n'tx 's 'S 'm 'd 'll 'Ll 're 'Ve 's, 's- 's_ 'sé 's' 'sx ''x x'' x`` ``x ``` , , . . .. ... "
    ".... .5 ? ! ; : % $ $5 5 ٣ ( ) [ ] { } (x -lrb- -RRB- -lsb- -rrb-x x-rrb- -- - -l s t ll gon na got ta Gim me "
    "lem him 't 'T is was Will 'tis i Word é 中"
).split()
SEPARATORS = [" "] * 12 + ["  ", "", "\n", "\n", " \n", "\n ", "\t", "\x1f", "\x85", "\u2028", "\u3000"]
LINES = st.lists(st.tuples(st.sampled_from(TOKENS), st.sampled_from(SEPARATORS)), max_size=16)
LONG = "\n" + "and so the long day went on\n" * 100  # long enough to be taken line by line


@settings(max_examples=1000)
@given(before=st.sampled_from(["", " ", "\n"]), tokens=LINES)
def test_long_text_equals_the_rules(before: str, tokens: list[tuple[str, str]]) -> None:
    text = before + "".join(token + separator for token, separator in tokens) + LONG
    assert detokenize(text) == by_rules(text)


# Typographic quotes are replaced before the rules apply, so the rules' oracle is not asked about them.
@given(text=st.text(st.characters(exclude_characters="“”‘’…", exclude_categories=["Cs"])))
def test_any_long_text_equals_the_rules(text: str) -> None:
    assert detokenize(LONG + text) == by_rules(LONG + text)


def test_text_of_many_lines_equals_the_rules() -> None:
    chance = random.Random(1)
    text = "".join(chance.choice(TOKENS) + chance.choice(SEPARATORS) for _ in range(100_000))
    assert detokenize(text) == by_rules(text)


@pytest.mark.parametrize("end", [" ", "", "\n", " ''", " ,", "``", " ."])
def test_both_ends_of_a_text_equal_the_rules(end: str) -> None:
    for start in ("'' , he said", ". . what", ". , what", "' x", "`` ' x", "\n. ."):
        text = start + LONG.rstrip() + end
        assert detokenize(text) == by_rules(text)
