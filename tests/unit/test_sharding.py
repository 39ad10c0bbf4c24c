"""Sharding: which rows a rank owns, and arrays taken apart and put together by it."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wrong_values import DeviceOffsets, calls, is_refused

from thdattn.packing import PackedBatch
from thdattn.sharding import Sharding

CP_SIZES = st.sampled_from([1, 2, 3, 4, 8])
STRATEGIES = st.sampled_from(["dual_chunk", "contiguous", "balanced"])
LENGTHS = st.lists(st.integers(0, 40), max_size=6)


def all_rows(sharding):
    return [sharding.rows(cp_rank).tolist() for cp_rank in range(sharding.cp_size)]


def batch_with_capacity(lengths, multiple, capacity):
    batch = PackedBatch.from_lengths(lengths, multiple)
    return PackedBatch(batch.cu_seqlens, batch.cu_seqlens_padded, total_rows=batch.total_rows + capacity)


# --- dual_chunk -----------------------------------------------------------------------------------


def test_two_ranks_two_padded_sequences_worked_by_hand():
    # Sequence 0 has 4 chunks of 2 rows, sequence 1 (at row 8) 4 chunks of 1: rank 0 keeps chunks 0 and 3.
    sharding = Sharding(PackedBatch([0, 7, 10], [0, 8, 12]), cp_size=2)
    assert sharding.strategy == "dual_chunk"
    assert sharding.local_rows == 6
    assert all_rows(sharding) == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


def test_four_ranks_four_sequences_as_transformer_engine():
    cu_seqlens = np.array([0, 8, 16, 24, 40], np.int32)
    sharding = Sharding(PackedBatch(cu_seqlens), cp_size=4)
    position = np.arange(40) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    assert [position[sharding.rows(cp_rank)].tolist() for cp_rank in range(4)] == [
        [0, 7, 0, 7, 0, 7, 0, 1, 14, 15],
        [1, 6, 1, 6, 1, 6, 2, 3, 12, 13],
        [2, 5, 2, 5, 2, 5, 4, 5, 10, 11],
        [3, 4, 3, 4, 3, 4, 6, 7, 8, 9],
    ]


# --- all ------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(lengths=LENGTHS, cp_size=CP_SIZES, strategy=STRATEGIES, capacity=st.integers(0, 20))
def test_every_row_is_owned_once_in_order_and_unshard_undoes_shard(lengths, cp_size, strategy, capacity):
    """Fillers come last."""
    batch = batch_with_capacity(lengths, 2 * cp_size, capacity)
    sharding = Sharding(batch, cp_size, strategy)
    rows = np.concatenate([sharding.rows(cp_rank) for cp_rank in range(cp_size)])
    assert np.sort(rows[rows >= 0]).tolist() == list(range(batch.total_rows))
    x = np.arange(1, 2 * batch.total_rows + 1, dtype=np.float32).reshape(-1, 2)
    local_arrays = [sharding.shard(x, cp_rank) for cp_rank in range(cp_size)]
    np.testing.assert_array_equal(sharding.unshard(local_arrays), x)
    assert sharding.local_rows == -(-batch.total_rows // cp_size)
    for cp_rank in range(cp_size):
        rows = sharding.rows(cp_rank)
        assert rows.shape == (sharding.local_rows,)
        assert rows.dtype == np.int32
        num_owned = int((rows >= 0).sum())
        assert (np.diff(rows[:num_owned]) > 0).all()
        assert (rows[num_owned:] == -1).all()


def test_filler_rows_are_zero_after_shard_and_dropped_by_unshard():
    sharding = Sharding(PackedBatch([0, 3]), 2, "contiguous")
    local = sharding.shard(np.array([5, 6, 7]), 1)
    assert local.tolist() == [7, 0]
    local[1] = 99
    assert sharding.unshard([np.array([5, 6]), local]).tolist() == [5, 6, 7]


def test_shard_and_unshard_keep_bfloat16_and_trailing_shape():
    sharding = Sharding(PackedBatch([0, 8]), 2)
    x = np.arange(48).reshape(8, 2, 3).astype(ml_dtypes.bfloat16)
    local_arrays = [sharding.shard(x, cp_rank) for cp_rank in range(2)]
    assert local_arrays[0].shape == (4, 2, 3)
    whole = sharding.unshard(local_arrays)
    assert local_arrays[0].dtype == whole.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(whole, x)


def test_a_shard_is_a_copy():
    sharding = Sharding(PackedBatch([0, 2]), 1)
    x = np.array([1, 2])
    sharding.shard(x, 0)[0] = 9
    assert x.tolist() == [1, 2]


def test_rows_are_made_once_and_cannot_be_changed():
    sharding = Sharding(PackedBatch([0, 8]), 2)
    assert sharding.rows(1) is sharding.rows(1)
    with pytest.raises(ValueError, match="read-only"):
        sharding.rows(1)[0] = 3


def test_a_hundred_thousand_sequences_are_all_owned():
    lengths = np.arange(100_000) % 40
    batch = PackedBatch.from_lengths(lengths, multiple=16)
    sharding = Sharding(batch, cp_size=8)
    rows = np.sort(np.concatenate([sharding.rows(cp_rank) for cp_rank in range(8)]))
    np.testing.assert_array_equal(rows, np.arange(batch.total_rows))


# --- offsets on a GPU -----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["dual_chunk", "contiguous"])
def test_offsets_on_a_gpu_leave_only_the_number_of_rows(strategy):
    sharding = Sharding(PackedBatch(DeviceOffsets(3), total_rows=30), 4, strategy)
    assert sharding.local_rows == 8
    for read in (
        lambda: sharding.rows(0),
        lambda: sharding.shard(np.zeros(30), 0),
        lambda: sharding.unshard([np.zeros(8)] * 4),
    ):
        with pytest.raises(ValueError, match=r"Sharding\.rows needs the offsets on the host"):
            read()


@pytest.mark.parametrize("strategy", ["dual_chunk", "contiguous", "balanced"])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_rows_that_a_rank_has_find_their_sharding(strategy, cp_size):
    batch = PackedBatch.from_lengths([700, 30, 251, 90], multiple=2 * cp_size)
    for rank in range(cp_size):
        rows = Sharding(batch, cp_size, strategy).rows(rank)
        found = Sharding.with_rows(batch, cp_size, rank, rows)
        assert found.rows(rank).tolist() == rows.tolist()
        assert Sharding.with_rows(batch, cp_size, rank, rows[rows >= 0]).strategy == found.strategy == strategy


# --- errors: name, found, wanted, remedy ----------------------------------------------------------

UNEVEN = PackedBatch([0, 8, 18, 27])
EIGHT = Sharding(PackedBatch([0, 8]), 2)
TREATED = PackedBatch.from_lengths([40, 24], multiple=4)
OF_RANK_0 = Sharding(TREATED, 2, "dual_chunk").rows(0)


@calls(
    (lambda: Sharding(UNEVEN, 2), ValueError, "sequence 1 has padded length 10, … cp_size = 4 … pad it to 12 "
     "(PackedBatch.from_lengths(lengths, multiple=4)"),
    *((partial(Sharding, EIGHT.batch, size), ValueError, f"cp_size is {size}, wanted >= 1; pass the number of ranks")
      for size in (0, -2)),
    *((partial(call, rank), ValueError, f"cp_rank is {rank}, wanted 0 <= cp_rank < cp_size = 2")
      for rank in (-1, 2) for call in (EIGHT.rows, partial(EIGHT.shard, np.zeros(8)))),
    (lambda: Sharding.with_rows(TREATED, 2, 1, OF_RANK_0), ValueError,
     "rows of rank 1 are those of no sharding of this batch over 2 ranks"),
    (lambda: Sharding.with_rows(TREATED, 2, 0, OF_RANK_0[::-1]), ValueError, "rows of rank 0 are those of no sharding"),
    (lambda: Sharding.with_rows(TREATED, 2, 0, [0.5, 1]), TypeError,
     "rows is an array of float64 with shape (2,), wanted integers"),
    (lambda: Sharding(EIGHT.batch, 2, "zigzag"), ValueError,
     "strategy is 'zigzag', wanted 'dual_chunk', 'contiguous' or 'balanced'; pass one"),
    (lambda: EIGHT.shard(np.zeros((4, 3)), 0), ValueError,
     "x has shape (4, 3), wanted 8 rows; pass the whole packed array"),
    (lambda: EIGHT.unshard([np.zeros(4)]), ValueError, "local_arrays holds 1 arrays, wanted 2; … of every rank"),
    (lambda: EIGHT.unshard([np.zeros(4), np.zeros(3)]), ValueError, "local_arrays[1] has shape (3,), wanted 4 rows"),
    (lambda: EIGHT.unshard([np.zeros(4), np.zeros((4, 2))]), ValueError,
     "local_arrays[1] has trailing shape (2,), wanted ()"),
    (lambda: EIGHT.unshard([np.zeros(4), np.zeros(4, np.float32)]), TypeError,
     "local_arrays[1] is float32, wanted float64"),
)
def test_wrong_calls_are_refused_by_name(call, kind, message):
    is_refused(call, kind, message)
