import hashlib
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayjob.corpus.split import Split, choose_validation

DEMO_BYTES = [1_991_000, 683_766, 210_568, 93_890, 369_401, 1_084_404, 240_279, 764_337]


def sha(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def choose(sizes: Sequence[int], val_fraction: float, groups: list[list[int]] | None = None) -> Split:
    alone = [[index] for index in range(len(sizes))]
    return choose_validation([sha(i) for i in range(len(sizes))], sizes, groups or alone, val_fraction)


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=40), st.floats(0.001, 0.5))
def test_both_sides_get_text_and_validation_never_most_of_it(sizes: list[int], val_fraction: float) -> None:
    split = choose(sizes, val_fraction)
    held = sum(sizes[index] for index in split.held_out)
    assert len(split.held_out) < len(sizes)
    assert split.held_out or split.cut_document is not None
    # Rules 1 and 2 stop at 1.5 of at most half; rule 3 adds at most half to less than a quarter.
    assert held + split.tail_bytes <= 0.75 * sum(sizes) + 1
    assert split.cut_document not in split.held_out


def test_share_of_many_books_is_near_the_fraction() -> None:
    sizes = [random.Random(seed).randint(100_000, 900_000) for seed in range(2_000)]
    split = choose(sizes, 0.05)
    share = sum(sizes[index] for index in split.held_out) / sum(sizes)
    assert split.cut_document is None
    # Each book is held out with a chance of 5 %: 100 books, give or take 10, of sizes that vary by half: 0.6 % of all.
    assert share == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize("size", [2, 30])
def test_share_of_groups_is_that_of_single_books_and_added_groups_move_none(size: int) -> None:
    def held(n_groups: int) -> frozenset[int]:
        groups = [list(range(first, first + size)) for first in range(0, n_groups * size, size)]
        return choose([100] * (n_groups * size), 0.05, groups).held_out

    held_out = held(2_000)
    # Each group is held out with a chance of 5 %: 100 groups, give or take 10; 35 is 3.5 of those.
    assert len(held_out) / size == pytest.approx(100, abs=35)
    assert {index for index in held(2_500) if index < 2_000 * size} == held_out


def test_longest_book_of_a_small_corpus_is_not_held_out() -> None:
    for shift in range(8):
        sizes = DEMO_BYTES[shift:] + DEMO_BYTES[:shift]
        split = choose(sizes, 0.1)
        assert sizes.index(max(sizes)) not in split.held_out
        assert split.cut_document is None


def test_fraction_below_one_book_holds_out_the_smallest() -> None:
    assert choose([500, 400, 600, 700], 0.01) == Split(frozenset({1}), None, 0)


def test_single_book_gives_its_tail() -> None:
    assert choose([1000], 0.1) == Split(frozenset(), 0, 100)


def test_note_beside_a_book_does_not_stand_for_validation() -> None:
    assert choose([1_000_000, 10], 0.1) == Split(frozenset({1}), 0, 99_991)


def test_related_documents_stay_together() -> None:
    groups = [[0, 5], [1], [2], [3, 4], [6], [7]]
    for val_fraction in (0.1, 0.2, 0.3, 0.4, 0.5):
        held_out = choose([100] * 8, val_fraction, groups).held_out
        assert (0 in held_out) == (5 in held_out)
        assert (3 in held_out) == (4 in held_out)


def test_choice_follows_content_and_not_place() -> None:
    sha256s, sizes = [sha(i) for i in range(30)], [100 + i for i in range(30)]
    alone = [[index] for index in range(30)]
    chosen = {sha256s[i] for i in choose_validation(sha256s, sizes, alone, 0.2).held_out}
    back = choose_validation(sha256s[::-1], sizes[::-1], alone, 0.2).held_out
    assert {sha256s[::-1][i] for i in back} == chosen


@pytest.mark.parametrize("n_books", [60, 200, 1_000])
def test_added_books_move_no_book(n_books: int) -> None:
    before = choose([100] * n_books, 0.05).held_out
    assert before
    for n_added in (1, 10, 3 * n_books, 20 * n_books):
        after = choose([100] * n_books + [3_000] * n_added, 0.05).held_out
        assert {index for index in after if index < n_books} == before


def test_added_book_that_ranks_later_takes_nothing_out_of_a_corpus_split_by_order() -> None:
    hashes = ["f" + sha(number)[1:] for number in range(90)]  # none is below the fraction
    before = choose_validation(hashes[:50], [100] * 50, [[index] for index in range(50)], 0.1).held_out
    last_chosen = max(hashes[index] for index in before)
    newcomers = [number for number in range(50, 90) if hashes[number] > last_chosen]
    assert newcomers
    for number in newcomers:
        grown = [*hashes[:50], hashes[number]]
        after = choose_validation(grown, [100] * 51, [[index] for index in range(51)], 0.1).held_out
        assert before <= after


def test_order_decides_only_where_content_gives_nothing_or_most_of_the_corpus() -> None:
    below, above = "1" + "0" * 15, "f" + "0" * 15
    each_alone = [[0], [1]]
    assert choose_validation([below, above], [50, 50], each_alone, 0.1).held_out == {0}
    assert choose_validation([below, above], [60, 40], each_alone, 0.1).held_out == {1}
    assert choose_validation([above, above], [60, 40], each_alone, 0.1).held_out == {1}
    assert choose_validation([below, above], [4, 996], each_alone, 0.1).cut_document == 1
