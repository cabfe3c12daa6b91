import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayjob.corpus import repeats
from rayjob.corpus.repeats import REPEAT_ROWS, RepeatedRun, find_repeats, hash_rows


def find(rows: list[str]) -> tuple[list[int], list[RepeatedRun]]:
    flags, runs = find_repeats(hash_rows([row.encode() for row in rows]).copy())
    return np.flatnonzero(flags).tolist(), runs


def naive(rows: list[str]) -> list[int]:
    """Every row of every run of 8 rows that was there before, by comparing lists."""
    seen: set[tuple[str, ...]] = set()
    repeated: set[int] = set()
    for start in range(len(rows) - REPEAT_ROWS + 1):
        run = tuple(rows[start : start + REPEAT_ROWS])
        if run in seen:
            repeated.update(range(start, start + REPEAT_ROWS))
        seen.add(run)
    return sorted(repeated)


def sentences(seed: int, count: int) -> list[str]:
    words = random.Random(seed)
    return [f"{words.random()} said ." for _ in range(count)]


def test_copied_book_goes_whole_and_its_original_is_named() -> None:
    one, other = sentences(1, 40), sentences(2, 30)
    assert find([*one, *other, *one, "the end"]) == (list(range(70, 110)), [RepeatedRun(70, 110, 0)])


def test_seven_equal_rows_stay_and_eight_go() -> None:
    passage = sentences(1, 8)
    assert find([*passage[:7], "a", *passage[:7], "b"]) == ([], [])
    assert find([*passage, "a", *passage, "b"]) == (list(range(9, 17)), [RepeatedRun(9, 17, 0)])


def test_sentence_that_occurs_often_stays() -> None:
    rows = [row for pair in zip(sentences(1, 50), ["`` yes . ''"] * 50, strict=True) for row in pair]
    assert find(rows) == ([], [])


def test_row_said_over_and_over_is_kept_once() -> None:
    assert find(["ha"] * 20)[0] == list(range(1, 20))


@given(st.lists(st.sampled_from("ab"), max_size=80))
def test_result_equals_the_comparison_of_lists(rows: list[str]) -> None:
    assert find(rows)[0] == naive(rows)


@pytest.mark.parametrize("slab_rows", [1, 7, 16, 100])
def test_size_of_slabs_and_parts_changes_nothing(slab_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [random.Random(3).choice("abc") for _ in range(200)] + sentences(4, 100)
    rows += rows[50:250]
    expected = find(rows)
    monkeypatch.setattr(repeats, "SLAB_ROWS", slab_rows)
    assert find(rows) == expected
    assert expected[0] == naive(rows)


def test_row_hash_is_fixed() -> None:
    """Parts on storage outlive the program that wrote them."""
    assert hash_rows([b"", b"row"]).tolist() == [13020603013274838756, 6598860889207258455]
