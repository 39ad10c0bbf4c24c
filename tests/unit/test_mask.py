"""The rule of the mask held against itself, position by position; visible pairs and FLOPs against a count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import CASES
from pairs import WINDOWS
from pairs import visible as every_pair
from wrong_values import DeviceOffsets

import thdattn
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


# --- pairs and FLOPs ---------------------------------------------------------------------------------------------


def attention(comm=None, **options):
    comm = comm or thdattn.comm.init("single")
    return thdattn.CPAttention(comm, **{"num_heads": 2, "head_dim": 8, "engine": "reference", **options})


def test_flops_worked_by_hand():
    # Causal: 1 + 2 + 3 pairs; per pair and head 2*4 operations for the score, 2*8 for its share of the output.
    attn = attention(num_heads=2, num_kv_heads=1, head_dim=4, v_head_dim=8)
    flops = attn.flops(attn.plan(thdattn.PackedBatch([0, 3]), "contiguous"))
    assert flops.forward == 6 * 2 * (2 * 4 + 2 * 8)
    assert flops.backward == 2.5 * flops.forward
    assert [type(count) for count in flops] == [int, int]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("window", [*WINDOWS, (2, 4), (0, 7)])
def test_every_rank_counts_the_pairs_of_all_ranks(window, cp_size):
    batch = thdattn.PackedBatch.from_lengths((0, 1, 2, 5, 0, 17, 9), multiple=2 * cp_size)

    def program(comm):
        attn = attention(comm, num_heads=3, head_dim=8, causal=window[1] == 0, window=window)
        plan = attn.plan(batch)
        assert attn.flops(batch) == attn.flops(plan)
        return plan, attn.flops(plan)

    rows = np.arange(batch.total_rows)
    pairs = int(every_pair(batch, rows, rows, window).sum())
    ranks = thdattn.comm.run_local(cp_size, program)
    for plan, flops in ranks:
        assert plan.visible_pairs == pairs
        assert flops == thdattn.Flops(pairs * 3 * 2 * (8 + 8), pairs * 3 * 5 * (8 + 8))
    assert sum(int(np.diff(plan.key_ranges).sum()) for plan, _ in ranks) == pairs, "a rank's share is its key ranges"


@pytest.mark.parametrize(("causal", "pairs"), [(True, 65_536 * 65_537 // 2), (False, 65_536**2)])
def test_long_documents_do_not_overflow(causal, pairs):
    attn = attention(num_heads=128, num_kv_heads=8, head_dim=128, causal=causal)
    flops = attn.flops(attn.plan(thdattn.PackedBatch.from_lengths([65_536, 65_536, 7, 65_536], 2)))
    small = 7 * 8 // 2 if causal else 49
    assert flops.forward == 4 * 128 * 128 * (3 * pairs + small)
    assert flops.backward == 10 * 128 * 128 * (3 * pairs + small)


def test_longest_possible_document_does_not_overflow():
    attn = attention(num_heads=1)
    plan = attn.plan(thdattn.PackedBatch([0, 4]))
    longest = thdattn.PackedBatch([0, 2**31 - 1])
    plan = replace(plan, sharding=thdattn.Sharding(longest, 1, "contiguous"), key_batch=longest)
    assert plan.visible_pairs == (2**31 - 1) * 2**31 // 2
    assert replace(plan, window=(-1, -1)).visible_pairs == (2**31 - 1) ** 2


def test_work_that_cannot_be_counted_is_refused():
    attn = attention()
    other = attention(window=(5, 0)).plan(thdattn.PackedBatch([0, 8]))
    lengths = thdattn.PackedBatch(DeviceOffsets(2), total_rows=8)
    on_gpu = replace(other, window=(-1, 0), sharding=thdattn.Sharding(lengths, 1))
    for plan, kind, message in (
        (other, ValueError, r"plan was made for window \(5, 0\), wanted \(-1, 0\)"),
        (other.sharding, TypeError, r"plan is <.*>, a Sharding; wanted a Plan; make it with attn\.plan\(batch\)"),
        (on_gpu, ValueError, r"counting visible pairs needs the offsets on the host.*cu_seqlens\.get\(\)"),
        (on_gpu.batch, ValueError, "counting visible pairs needs the offsets on the host"),
    ):
        with pytest.raises(kind, match=message):
            attn.flops(plan)
