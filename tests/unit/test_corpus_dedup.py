import random

from rayjob.corpus.dedup import find_copies, fingerprint, group_related


def novel(seed: int, n_sentences: int = 60) -> str:
    words = random.Random(seed)
    return " ".join(
        " ".join("".join(words.choices("abcdefghij", k=6)) for _ in range(14)) + "." for _ in range(n_sentences)
    )


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
