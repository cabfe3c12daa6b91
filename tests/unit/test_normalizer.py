"""The normalizer: what it always cleans, and Penn Treebank text back to plain text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.normalizer import Normalizer

CLEAN = Normalizer(detokenize=False, lowercase=False)
BOOKCORPUS = Normalizer(detokenize=True, lowercase=True)
DETOKENIZE = Normalizer(detokenize=True, lowercase=False)
ALL = [Normalizer(detokenize, lowercase) for detokenize in (False, True) for lowercase in (False, True)]

# Words of the alphabet that the rules are about, so that they meet in every order.
TREEBANK = st.lists(
    st.sampled_from(
        [
            "``",
            "''",
            "`",
            "'",
            '"',
            "n't",
            "'s",
            "'ll",
            "'S",
            ",",
            ".",
            "..",
            "...",
            "?",
            "!",
            ";",
            ":",
            "%",
            "$",
            "5",
            "(",
            ")",
        ]
        + [
            "[",
            "]",
            "{",
            "}",
            "-lrb-",
            "-RRB-",
            "-lsb-",
            "--",
            "-",
            "s",
            "t",
            "ll",
            "lrb-",
            "gon",
            "na",
            "got",
            "ta",
            "'t",
            "is",
        ]
        + ["…", "“", "”", "‘", "’", "i", "Word", "\n", " ", "\r", "\ufeff", "\u2581", "\0", "İ"]
    ),
    max_size=12,
)


@pytest.mark.parametrize(
    ("tokenized", "plain"),
    [
        ("`` i 'm sorry , '' he said .", '"i\'m sorry," he said.'),
        ("`` do n't go , '' said tom .", '"don\'t go," said tom.'),
        ("i ca n't , wo n't and should n't .", "i can't, won't and shouldn't."),
        (
            "she 's here , they 'll come , we 've won , you 're it , he 'd go",
            "she's here, they'll come, we've won, you're it, he'd go",
        ),
        ("i 'm gon na go , you wan na stay , we got ta run", "i'm gonna go, you wanna stay, we gotta run"),
        ("gim me that and lem me go", "gimme that and lemme go"),
        ("'t is late , and 't was cold", "'tis late, and 'twas cold"),
        ("about like the germans ' , was n't it ? ''", "about like the germans', wasn't it?\""),
        ("the men -lrb- both of them -rrb- left .", "the men (both of them) left."),
        ("a ( b ) c [ d ] e { f } g", "a (b) c [d] e {f} g"),
        ("-lsb- x -rsb- -lcb- y -rcb-", "[x] {y}"),
        ("well ... no ; yes : maybe !", "well... no; yes: maybe!"),
        ("`` ... and then ? ''", '"... and then?"'),
        ("it cost $ 5 , or 10 % of it", "it cost $5, or 10% of it"),
        ("`` they say ` yes ' , '' she said", "\"they say 'yes'," + '" she said'),
        ("`` 'i am , ' he said", "\"'i am,' he said"),
        ("a bird 's-nest", "a bird's-nest"),
        ("wait -- no", "wait -- no"),
        ("'' he said .", '" he said.'),  # a sentence row may begin with the end of a quotation
        ("`` why ? ''\n`` yes . ''", '"why?"\n"yes."'),
        ("he paused . . . then spoke .", "he paused . . . then spoke."),
        ("I CA N'T , IT 'S LATE .", "I CAN'T, IT'S LATE."),
    ],
)
def test_treebank_text_becomes_plain_text(tokenized: str, plain: str) -> None:
    assert DETOKENIZE(tokenized) == plain


@pytest.mark.parametrize(
    "prose",
    [
        '"Don\'t go," said Tom.',
        "It's 5% off; the dogs' bowls (all of them) cost $5.00... Really?",
        "'I say,' he said, 'tell 'em it's rock 'n' roll.'",
        "'Tis the season -- or so she'd have us think--no matter.",
        "    indented  twice,\n\n\n\tand tabbed ;-)\n",
        "Chapter I\n\nIt was . . . over.",
        "f''(x) and 6'2\"",
        "a - b, 3.14, .44 calibre, 10:30, e.g. this; and/or that & more",
    ],
)
def test_ordinary_prose_is_left_alone(prose: str) -> None:
    assert DETOKENIZE(prose) == prose


def test_typed_prompt_equals_the_corpus_form() -> None:
    corpus_form = "`` do n't go , '' said tom ."
    for typed in ('"Don\'t go," said Tom.', "“Don’t go,” said Tom."):
        assert BOOKCORPUS(typed) == BOOKCORPUS(corpus_form) == '"don\'t go," said tom.'


def test_quotes_keep_their_form_without_detokenize() -> None:
    assert CLEAN("`` “Yes” ''") == "`` “Yes” ''"


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("a\r\nb\rc\n", "a\nb\nc\n"),
        ("\ufeffa\ufeff", "a"),
        ("\r\ufeff\n", "\n"),
        ("a\0b", "a\ufffdb"),
        ("a\ud800b\udfff", "a\ufffdb\ufffd"),
        ("a\u2581b", "a_b"),
    ],
)
@pytest.mark.parametrize("normalizer", ALL)
def test_what_cannot_be_kept_is_cleaned_as_documented(normalizer: Normalizer, text: str, cleaned: str) -> None:
    assert normalizer(text) == cleaned


@pytest.mark.parametrize(
    "text", ["a\n\nb", "  x", "x  ", "\t", "e\u0301", "\ufb01", "\u2460", "😀", "</s>", "İ", "\u2028"]
)
def test_everything_else_is_kept(text: str) -> None:
    assert CLEAN(text) == text


@given(text=st.text(alphabet=st.characters(exclude_categories=())))
def test_any_text_becomes_utf8_without_the_excluded_characters(text: str) -> None:
    for normalizer in ALL:
        normalized = normalizer(text)
        normalized.encode()
        assert not set(normalized) & set("\r\0\ufeff\u2581")


@given(text=st.text(alphabet=st.characters(exclude_categories=())))
def test_normalizing_any_text_twice_equals_once(text: str) -> None:
    for normalizer in ALL:
        once = normalizer(text)
        assert normalizer(once) == once


@given(words=TREEBANK, separator=st.sampled_from([" ", ""]))
def test_normalizing_treebank_tokens_twice_equals_once(words: list[str], separator: str) -> None:
    for normalizer in ALL:
        once = normalizer(separator.join(words))
        assert normalizer(once) == once


@given(words=TREEBANK)
def test_only_single_spaces_are_taken_away(words: list[str]) -> None:
    text = CLEAN(" ".join(words))
    normalized = DETOKENIZE(text)
    assert normalized.count("\n") == text.count("\n")
    letters = [character for character in text if character.isalpha() and character not in "lrcsbLRCSB"]
    assert [character for character in normalized if character.isalpha() and character not in "lrcsbLRCSB"] == letters


def test_a_hostile_prompt_takes_no_long_time() -> None:
    """65,536 characters of the worst nesting: rounds must not grow with the length."""
    for unit in ("` ", "' ", "`` ", "'' ", ". ", "( ", "$ ", "-lrb- ", "' s ", "got ta "):
        text = unit * (65_536 // len(unit))
        once = BOOKCORPUS(text)
        assert BOOKCORPUS(once) == once


@pytest.mark.parametrize("normalizer", ALL)
def test_json_round_trips(normalizer: Normalizer) -> None:
    assert Normalizer.from_json(normalizer.to_json()) == normalizer


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"detokenize": true}',
        '{"detokenize": 1, "lowercase": false}',
        '{"detokenize": true, "lowercase": true, "x": 1}',
    ],
)
def test_other_json_is_refused(content: str) -> None:
    with pytest.raises(ValueError, match="normalizer|Expecting"):
        Normalizer.from_json(content)
