import itertools
import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rayjob.corpus.dedup import (
    LEAST_CHARS,
    MAX_OWNERS,
    MOST_CHARS,
    Fingerprint,
    Fingerprinter,
    find_copies,
    group_related,
)


def novel(seed: int, n_sentences: int = 60) -> str:
    words = random.Random(seed)
    return " ".join(
        " ".join("".join(words.choices("abcdefghij", k=6)) for _ in range(14)) + "." for _ in range(n_sentences)
    )


def fingerprint(*slabs: str) -> Fingerprint:
    fingerprinter = Fingerprinter()
    for slab in slabs:
        fingerprinter.add(slab)
    return fingerprinter.fingerprint()


def copies(*texts: str) -> list[tuple[int, int]]:
    return [(c.copy, c.original) for c in find_copies(list(texts), [fingerprint(text) for text in texts])]


def groups(*texts: str) -> list[list[int]]:
    return group_related(list(texts), [fingerprint(text) for text in texts])


def test_equal_documents_leave_the_first() -> None:
    assert copies(novel(1), novel(2), novel(1), novel(1)) == [(2, 0), (3, 0)]


def test_equal_documents_too_short_for_a_sentence_are_copies() -> None:
    assert copies("aaa", "bbb", "aaa") == [(2, 0)]


def test_novel_with_a_chapter_of_another_inserted_is_a_copy() -> None:
    one, other = novel(1), novel(2)
    chapter = other[: len(other) // 4]
    assert copies(one, other, one[:2000] + " " + chapter + " " + one[2000:]) == [(2, 0)]


def test_edition_with_other_line_breaks_and_capitals_is_a_copy() -> None:
    assert copies(novel(1), novel(1).replace(" ", "\n").upper()) == [(1, 0)]


def test_different_novels_are_no_copies_and_not_related() -> None:
    texts = [novel(seed) for seed in range(5)]
    assert copies(*texts) == []
    assert groups(*texts) == [[0], [1], [2], [3], [4]]


def test_documents_that_share_a_passage_are_related_and_none_is_dropped() -> None:
    anthology = novel(3) + novel(1, 10) + novel(4)
    assert copies(novel(1), novel(2), anthology) == []
    assert groups(novel(1), novel(2), anthology) == [[0, 2], [1]]


def test_equal_documents_are_related_when_copies_are_kept() -> None:
    assert groups("aaa", "bbb", "aaa") == [[0, 2], [1]]


def test_licence_in_every_document_relates_nobody() -> None:
    licence = novel(99, 10)
    assert len(groups(*(novel(seed) + licence for seed in range(8)))) == 8


def test_one_common_quotation_relates_nobody() -> None:
    assert len(groups(novel(1) + novel(9, 1), novel(2) + novel(9, 1))) == 2


def dialogue(seed: int, n_lines: int) -> str:
    """Lines too short for a long sentence."""
    words = random.Random(seed)
    return "".join(
        " ".join("".join(words.choices("abcdefghij", k=5)) for _ in range(6)) + "!\n" for _ in range(n_lines)
    )


def test_documents_that_share_eight_short_lines_are_related() -> None:
    shared = dialogue(9, 8)
    texts = [dialogue(1, 100) + shared + dialogue(2, 50), dialogue(3, 90), shared.replace("\n", "\n\n").upper()]
    assert groups(*texts) == [[0, 2], [1]]


def test_documents_without_full_stops_that_share_lines_are_related() -> None:
    one, other, shared = (dialogue(seed, 30).replace("!", "。") for seed in (1, 2, 9))
    assert groups(one + shared, other, "。\n" + shared + other[:200]) == [[0, 2], [1]]


def test_seven_shared_lines_relate_nobody() -> None:
    assert len(groups(dialogue(1, 40) + dialogue(9, 7), dialogue(2, 40) + dialogue(9, 7))) == 2


def test_short_lines_in_every_document_relate_nobody() -> None:
    assert len(groups(*(dialogue(seed, 40) + dialogue(99, 20) for seed in range(8)))) == 8


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=8, max_size=20), min_size=1, max_size=7))
def test_related_by_lines_are_those_that_a_comparison_of_all_pairs_finds(documents: list[list[str]]) -> None:
    runs = [{tuple(lines[i : i + 8]) for i in range(len(lines) - 7)} for lines in documents]
    owners = Counter(run for each in runs for run in each)
    pairs = {
        (a, b)
        for a, b in itertools.combinations(range(len(runs)), 2)
        if documents[a] == documents[b] or any(owners[run] <= MAX_OWNERS for run in runs[a] & runs[b])
    }
    found = groups(*("\n".join(lines) for lines in documents))
    assert sorted(map(sorted, found)) == sorted(map(sorted, _connected(len(runs), pairs)))


def _connected(count: int, pairs: set[tuple[int, int]]) -> list[set[int]]:
    parts = [{index} for index in range(count)]
    for one, other in pairs:
        joined = [part for part in parts if part & {one, other}]
        parts = [part for part in parts if part not in joined] + [set().union(*joined)]
    return parts


@given(
    st.lists(st.sampled_from(["a" * 20, " b" * LEAST_CHARS, "c" * MOST_CHARS, "d. ", "\ne", "\nf", "\n"]), max_size=40)
)
def test_fingerprint_of_slabs_is_that_of_the_text(parts: list[str]) -> None:
    found, whole = fingerprint(*parts), fingerprint("".join(parts))
    assert found.sentences.tolist() == whole.sentences.tolist()
    lines = "".join(parts).split("\n")
    by_line = fingerprint(*(line + "\n" for line in lines[:-1]), lines[-1])
    assert by_line.runs.tolist() == whole.runs.tolist()
