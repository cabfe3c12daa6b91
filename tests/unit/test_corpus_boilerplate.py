import pyarrow as pa
import pytest

from rayjob.corpus.boilerplate import find_boilerplate


def is_boilerplate(row: str) -> bool:
    [found] = find_boilerplate(pa.array([row.encode()], pa.large_binary())).to_pylist()
    return bool(found)


@pytest.mark.parametrize(
    "row",
    [
        "this ebook is licensed for your personal enjoyment only .",
        "this e-book may not be re-sold or given away to other people .",
        "if you would like to share this book with another person , please purchase an additional copy .",
        "thank you for respecting the hard work of this author .",
        "copyright 2012 jane doe",
        "Copyright © 2012 by Jane Doe",
        "copyright ( c ) 2011",
        "copyright -lrb- c -rrb- 2011",
        "all rights reserved .",
        "isbn : 978-1-4661-0000-0",
        "smashwords edition",
        "no part of this book may be reproduced in any form .",
        "any resemblance to actual persons , living or dead , is entirely coincidental .",
        "this book is a work of fiction .",
    ],
)
def test_what_shops_and_publishers_add_is_boilerplate(row: str) -> None:
    assert is_boilerplate(row)


@pytest.mark.parametrize(
    "row",
    [
        "he held the copyright of his first novel .",
        "`` you may not sell my book ! ''",
        "the story was a work of genius .",
        "she reserved all rights to her own opinion .",
        "is b n a letter ?",
        "",
    ],
)
def test_what_stories_tell_is_not(row: str) -> None:
    assert not is_boilerplate(row)


def test_null_stays_null() -> None:
    assert find_boilerplate(pa.array([None, b"isbn 3"], pa.large_binary())).to_pylist() == [None, True]
