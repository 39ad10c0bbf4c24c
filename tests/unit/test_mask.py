"""What the package assumes of every mask, held against the rule itself, position by position."""

from __future__ import annotations

import numpy as np
import pytest
from cases import CASES

from thdattn.packing import PackedBatch
from thdattn.plan.mask import hides_tokens, in_sight, most_in_sight, transposed, visible_pairs

NARROW = {(-1, -1), (-1, 0), (0, 0), (2, 0), (0, 3), (3, 1), (-1, 2), (2, -1)}
MASKS = sorted(NARROW | {case.window for case in CASES.values()})
LENGTHS = [(length, length) for length in (0, 1, 2, 7, 12)] + [(0, 4), (4, 0), (1, 6), (6, 1), (5, 9), (9, 5)]
NUMBERS = pytest.mark.parametrize(("queries", "keys"), LENGTHS)
EVERY_MASK = pytest.mark.parametrize("mask", MASKS, ids=str)


def ends(length, other_length, mask):
    """(first, last) of every token, unlike both where it sees none."""
    return in_sight(np.arange(length), np.full(length, length), np.full(length, other_length), mask)


def visible(length, other_length, mask):
    first, last = ends(length, other_length, mask)
    others = np.arange(other_length)
    return (others >= first[:, None]) & (others < last[:, None])


@NUMBERS
@EVERY_MASK
def test_ranges_lie_in_the_sequence_and_both_ends_ascend(mask, queries, keys):
    for of in ((queries, keys, mask), (keys, queries, transposed(mask))):
        first, last = ends(*of)
        some = first < last
        assert (first[some] >= 0).all() and (last[some] <= of[1]).all()
        assert (np.diff(first) >= 0).all() and (np.diff(last) >= 0).all()
        assert (np.diff(some.astype(int)) >= 0).all(), "those that see nothing come first"


@EVERY_MASK
def test_a_token_sees_itself_and_the_next_one_goes_on_from_there(mask):
    first, last = ends(12, 12, mask)
    assert (first <= np.arange(12)).all() and (np.arange(12) < last).all()
    assert (first[1:] <= last[:-1]).all(), "the tokens of a run see one range together"


@NUMBERS
@EVERY_MASK
def test_the_transposed_mask_is_what_keys_see(mask, queries, keys):
    np.testing.assert_array_equal(visible(keys, queries, transposed(mask)), visible(queries, keys, mask).T)


@NUMBERS
@EVERY_MASK
def test_what_is_said_of_a_whole_mask_is_counted(mask, queries, keys):
    batch, key_batch = PackedBatch.from_lengths([queries]), PackedBatch.from_lengths([keys])
    seen = visible(queries, keys, mask)
    assert visible_pairs(batch, key_batch, mask) == seen.sum()
    assert hides_tokens(batch, key_batch, mask) == (not seen.any(axis=1).all())
    assert (seen.sum(axis=1) <= most_in_sight(mask, keys)).all()
