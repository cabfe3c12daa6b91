import hashlib

import numpy as np
import pytest

from rayjob.corpus.errors import CorpusError
from rayjob.corpus.repeats import Hashes, find_repeats, run_hashes
from rayjob.corpus.stretches import MIN_ROWS, hold_out, stretch_starts


def rows(seed: int, count: int) -> Hashes:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


def held(hashes: Hashes, val_fraction: float = 0.05) -> set[int]:
    is_held = hold_out(hashes, {}, val_fraction)
    return set(hashes[is_held].tolist())


def test_share_is_near_the_fraction_in_stretches_from_all_over() -> None:
    is_held = hold_out(rows(1, 200_000), {}, 0.05)
    # About 700 stretches, each held out with a chance of 5 %: 35 of them, give or take 6.
    assert is_held.mean() == pytest.approx(0.05, abs=0.02)
    assert all(part.any() for part in np.array_split(is_held, 4))
    starts = np.flatnonzero(is_held[1:] & ~is_held[:-1])
    ends = np.flatnonzero(~is_held[1:] & is_held[:-1])
    assert (ends - starts[: len(ends)]).min() >= MIN_ROWS


def test_files_added_before_and_after_move_nothing_but_the_seam() -> None:
    corpus = rows(1, 100_000)
    before = held(corpus)
    after = held(np.concatenate([rows(2, 30_000), corpus, rows(3, 30_000)]))
    # A stretch at either seam may be cut elsewhere.
    assert len(before - after) <= 2 * 1_000
    assert len(before & after) >= 0.8 * len(before)
    assert not after & set(corpus.tolist()) - before


def test_stretches_begin_at_the_same_rows_wherever_they_stand() -> None:
    corpus = rows(1, 20_000)
    alone = {int(corpus[start]) for start in stretch_starts(corpus)[3:]}
    together = np.concatenate([rows(2, 777), corpus])
    assert alone <= {int(together[start]) for start in stretch_starts(together)}


def test_no_run_of_validation_stands_in_training() -> None:
    corpus = rows(1, 50_000)
    corpus = np.concatenate([corpus, corpus[10_000:30_000]])  # copies, which dedup=false keeps
    is_held = hold_out(corpus, {}, 0.1)
    assert is_held.any()
    assert not np.isin(run_hashes(corpus[is_held]), run_hashes(corpus[~is_held])).any()


def test_seam_in_training_that_spells_a_run_of_validation_is_noticed() -> None:
    """Where a held-out stretch leaves, its neighbours meet; here they meet to 8 rows that stand in validation."""
    documents = [rows(seed, 100) for seed in range(40)]
    starts = {start: f"document {start}" for start in range(0, 4_000, 100)}
    is_held = hold_out(np.concatenate(documents), starts, 0.2)
    chosen = [number for number in range(40) if is_held[100 * number]]
    first, last = next((a, b) for a in chosen for b in chosen if 0 < a < b)
    seam = np.concatenate([documents[first - 1][-4:], documents[first + 1][:4]])
    documents[last] = np.concatenate([documents[last][:-8], seam])
    corpus = np.concatenate(documents)
    is_held = hold_out(corpus, starts, 0.2)
    assert not np.isin(run_hashes(corpus[is_held]), run_hashes(corpus[~is_held])).any()


def test_copies_that_are_kept_stand_on_one_side() -> None:
    is_held = hold_out(np.tile(rows(1, 20_000), 2), {}, 0.1)
    assert is_held.any()
    # But for the stretch at the seam, which only one of the copies has.
    assert np.count_nonzero(is_held[:20_000] != is_held[20_000:]) < 2_000


def test_corpus_of_one_row_over_and_over_cannot_be_split() -> None:
    with pytest.raises(CorpusError, match="more than once. Set data.dedup=true"):
        hold_out(np.tile(rows(1, 1), 5_000), {}, 0.1)


def test_documents_are_held_out_whole() -> None:
    is_held = hold_out(rows(1, 5_000), {start: str(start) for start in range(0, 5_000, 50)}, 0.1)
    assert all(part.all() or not part.any() for part in np.split(is_held, 100))
    assert is_held.any()


@pytest.mark.parametrize("n_copied", [0, 8])
def test_parts_of_a_document_that_stand_apart_are_on_one_side(n_copied: int) -> None:
    """Also where a run of one of them stands elsewhere, so that it goes back to training."""
    names = {start: str(start // 50 % 40) for start in range(0, 5_000, 50)}
    corpus = rows(1, 5_000)
    first = int(np.flatnonzero(hold_out(corpus, names, 0.1))[0])
    corpus = np.concatenate([corpus, corpus[first : first + n_copied]])
    names |= {5_000: "copied"} if n_copied else {}
    is_held = hold_out(corpus, names, 0.1)
    sides = {(name, bool(flag)) for start, name in names.items() for flag in is_held[start : start + 50]}
    assert is_held.any()
    assert len(sides) == len(set(names.values()))


@pytest.mark.parametrize("count", [2, 9, 60, 700])
def test_small_corpus_gives_some_rows_and_keeps_most(count: int) -> None:
    share = hold_out(rows(1, count), {}, 0.1).mean()
    assert 0 < share <= 0.5


def test_same_rows_give_the_same_split_everywhere() -> None:
    digest = hashlib.sha256(hold_out(rows(1, 50_000), {}, 0.05).tobytes()).hexdigest()
    again = hashlib.sha256(hold_out(rows(1, 50_000), {}, 0.05).tobytes()).hexdigest()
    assert digest == again
    assert not find_repeats(rows(1, 50_000))[0].any()
