"""PackedBatch: its offsets, its checks, and rows in and out of sequence order."""

import copy
import pickle
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wrong_values import DeviceOffsets, calls, is_refused

from thdattn.packing import PackedBatch, rows_of_runs


def int32(*values):
    return np.array(values, np.int32)


def test_two_padded_sequences_worked_by_hand():
    batch = PackedBatch(int32(0, 7, 10), int32(0, 8, 12))
    assert batch.num_seqs == 2
    assert batch.lengths.tolist() == [7, 3]
    assert batch.lengths.dtype == np.int32
    assert batch.total_tokens == 10
    assert batch.total_rows == 12
    assert not batch.on_device

    a = np.array([10, 11, 12, 13, 14, 15, 16])
    b = np.array([20, 21, 22])
    rows = batch.pack([a, b], fill=-1)
    assert rows.tolist() == [10, 11, 12, 13, 14, 15, 16, -1, 20, 21, 22, -1]
    assert [piece.tolist() for piece in batch.unpack(rows)] == [a.tolist(), b.tolist()]


def test_from_lengths_pads_every_length_to_the_multiple():
    batch = PackedBatch.from_lengths([7, 0, 3, 4], multiple=4)
    assert batch.cu_seqlens.tolist() == [0, 7, 7, 10, 14]
    assert batch.cu_seqlens_padded.tolist() == [0, 8, 8, 12, 16]
    assert batch.cu_seqlens.dtype == batch.cu_seqlens_padded.dtype == np.int32


def test_a_sequence_may_be_all_padding():
    batch = PackedBatch(int32(0, 0, 1), int32(0, 4, 8))
    rows = batch.pack([np.zeros(0), np.array([9.0])], fill=5)
    assert rows.tolist() == [5, 5, 5, 5, 9, 5, 5, 5]


def test_offsets_cannot_change_after_their_check():
    cu_seqlens = int32(0, 3)
    batch = PackedBatch(cu_seqlens)
    cu_seqlens[1] = 99
    assert batch.cu_seqlens.tolist() == [0, 3]
    with pytest.raises(ValueError, match="read-only"):
        batch.cu_seqlens[1] = 99


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda batch: pickle.loads(pickle.dumps(batch))])
def test_copies_are_frozen_too(copied):
    """As those that another process has made, which loads data."""
    batch = PackedBatch(int32(0, 3, 5), int32(0, 4, 6), total_rows=9)
    twin = copied(batch)
    assert twin.lengths.tolist() == [3, 2] and twin.total_rows == 9 and twin.cu_seqlens is not batch.cu_seqlens
    for offsets in (twin.cu_seqlens, twin.cu_seqlens_padded):
        with pytest.raises(ValueError, match="read-only"):
            offsets[1] = 7


def test_the_largest_int32_offset_is_legal():
    batch = PackedBatch(int32(0, 2**31 - 1))
    assert batch.total_rows == 2**31 - 1
    assert batch.lengths.tolist() == [2**31 - 1]


def test_pack_copies_and_unpack_views():
    batch = PackedBatch.from_lengths([2])
    source = np.array([1, 2])
    rows = batch.pack([source])
    batch.unpack(rows)[0][0] = 5
    assert rows.tolist() == [5, 2]
    assert source.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.bool_])
@pytest.mark.parametrize("trailing", [(), (4,), (2, 3)])
def test_pack_keeps_dtype_and_trailing_shape(dtype, trailing):
    batch = PackedBatch.from_lengths([3, 1], multiple=4)
    arrays = [np.ones((n, *trailing), dtype) for n in (3, 1)]
    rows = batch.pack(arrays)
    assert rows.shape == (8, *trailing)
    assert rows.dtype == dtype
    assert rows.reshape(8, -1)[:, 0].tolist() == [1, 1, 1, 0, 1, 0, 0, 0]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20) | st.just(0), min_size=1, max_size=8),
    multiple=st.integers(1, 9),
    capacity=st.integers(0, 5),
)
def test_unpack_undoes_pack_and_the_rest_is_fill(lengths, multiple, capacity):
    padded = PackedBatch.from_lengths(lengths, multiple)
    batch = PackedBatch(padded.cu_seqlens, padded.cu_seqlens_padded, total_rows=padded.total_rows + capacity)
    values = np.arange(sum(lengths) * 2).reshape(-1, 2)
    arrays = np.split(values, np.cumsum(lengths)[:-1])
    assert batch.lengths.tolist() == lengths and batch.total_tokens == sum(lengths)
    rows = batch.pack(arrays, fill=-1)
    for piece, array in zip(batch.unpack(rows), arrays, strict=True):
        np.testing.assert_array_equal(piece, array)
    assert (rows[:, 0] == -1).sum() == batch.total_rows - sum(lengths)


def test_rows_of_runs_worked_by_hand():
    rows = rows_of_runs(int32(5, 9, 2), int32(2, 0, 3))
    assert rows.tolist() == [5, 6, 2, 3, 4]
    assert rows.dtype == np.int32


# --- offsets on a GPU -----------------------------------------------------------------------------


def test_offsets_on_a_gpu_are_kept_unread():
    cu_seqlens, cu_seqlens_padded = DeviceOffsets(4), DeviceOffsets(4)
    batch = PackedBatch(cu_seqlens, cu_seqlens_padded, total_rows=64)
    assert batch.on_device
    assert batch.num_seqs == 3
    assert batch.total_rows == 64
    assert batch.cu_seqlens is cu_seqlens
    assert batch.cu_seqlens_padded is cu_seqlens_padded
    assert PackedBatch(cu_seqlens, total_rows=64).cu_seqlens_padded is cu_seqlens


def test_torch_spelling_of_int32_is_understood():
    offsets = DeviceOffsets(2)
    offsets.dtype = "torch.int32"
    assert PackedBatch(offsets, total_rows=8).num_seqs == 1


def test_an_array_whose_dlpack_device_is_the_cpu_is_on_the_host():
    class HostOffsets:
        dtype = np.dtype(np.int32)

        def __dlpack_device__(self):
            return (1, 0)

        def __array__(self, dtype=None, copy=None):
            return int32(0, 3)

    batch = PackedBatch(HostOffsets())
    assert not batch.on_device
    assert batch.total_tokens == 3


# --- errors: name, found, wanted, remedy ----------------------------------------------------------

ON_GPU = PackedBatch(DeviceOffsets(2), total_rows=8)
HOST = PackedBatch.from_lengths([2, 3])
DECREASES = "cu_seqlens decreases from 5 at index 1 to 3 at index 2; … sum"
LONG = "sequence 1 has 5 tokens … leaves it 4 rows … pad it to 5 or more"
SHAPE = "cu_seqlens has shape … , wanted (num_seqs + 1,)"


@calls(
    *((read, ValueError, f"{what} needs the offsets on the host … from NumPy offsets") for what, read in (
        ("lengths", lambda: ON_GPU.lengths), ("total_tokens", lambda: ON_GPU.total_tokens),
        ("pack", lambda: ON_GPU.pack([np.zeros(1)])), ("unpack", lambda: ON_GPU.unpack(np.zeros(8))))),
    (lambda: PackedBatch(DeviceOffsets(3)), ValueError, "total_rows is None, wanted an int … pass total_rows"),
    *((partial(PackedBatch, DeviceOffsets(3, dtype), total_rows=8), TypeError,
       f"cu_seqlens is {dtype}, wanted int32 … astype") for dtype in ("int64", "uint32")),
    (lambda: PackedBatch(DeviceOffsets(0), total_rows=8), ValueError, SHAPE),
    (lambda: PackedBatch(DeviceOffsets(3), DeviceOffsets(4), total_rows=8), ValueError,
     "cu_seqlens_padded has shape (4,), wanted (3,) as cu_seqlens"),
    (lambda: PackedBatch(DeviceOffsets(2), int32(0, 4), total_rows=4), ValueError,
     "cu_seqlens lies on a GPU … copy cu_seqlens_padded to a GPU"),
    (lambda: PackedBatch(int32(0, 4), DeviceOffsets(2)), ValueError,
     "cu_seqlens lies on the host … copy cu_seqlens_padded to the host"),
    (lambda: PackedBatch(int32(0, 5, 3, 9)), ValueError, DECREASES),
    (lambda: PackedBatch(int32(0, 1, 2, 3), int32(0, 4, 8, 7)), ValueError,
     "cu_seqlens_padded decreases from 8 at index 2 to 7 at index 3"),
    *((partial(PackedBatch, *before, np.array([0, 3], dtype)), TypeError, f"{name} is {dtype}, wanted int32 … .astype")
      for dtype in ("int64", "uint32", "float32") for name, before in (("cu_seqlens", ()),
                                                                       ("cu_seqlens_padded", [int32(0, 3)]))),
    *((partial(PackedBatch, offsets), ValueError, SHAPE)
      for offsets in (int32(), np.int32(0), np.zeros((2, 2), np.int32), [])),
    (lambda: PackedBatch(int32(2, 5)), ValueError, "cu_seqlens[0] is 2, wanted 0; put a 0 in front"),
    (lambda: PackedBatch(int32(0, 1, 2), int32(0, 4)), ValueError,
     "cu_seqlens_padded has shape (2,), wanted (3,) as cu_seqlens"),
    (lambda: PackedBatch(int32(0, 3, 8), int32(0, 4, 8)), ValueError, LONG),
    (lambda: PackedBatch([0, 2**31]), ValueError, "cu_seqlens ends at 2147483648, wanted < 2**31 … split the batch"),
    (lambda: PackedBatch.from_lengths([2_000_000_000] * 2), ValueError,
     "lengths padded to multiples of 1 take 4000000000 rows … split"),
    (lambda: PackedBatch(int32(0, 1), total_rows=2**31), ValueError, "total_rows is 2147483648, wanted 0 <="),
    (lambda: PackedBatch(int32(0, 3), int32(0, 8), total_rows=7), ValueError,
     "total_rows is 7 but cu_seqlens_padded ends at 8; … leave … out"),
    (lambda: PackedBatch([0, 3, 5], [0, 4, 8]).padded_to(7), ValueError,
     "total_rows is 7 but cu_seqlens_padded ends at 8"),
    (lambda: PackedBatch(DeviceOffsets(2), total_rows=-1), ValueError, "total_rows is -1, wanted 0 <= total_rows"),
    (lambda: PackedBatch.from_lengths([3, -2]), ValueError, "lengths[1] is -2, wanted 0 <= length"),
    (lambda: PackedBatch.from_lengths([2**31]), ValueError, "lengths[0] is 2147483648, wanted 0 <= length < 2**31"),
    (lambda: HOST.pack([np.zeros(2)]), ValueError, "arrays holds 1 arrays, wanted 2; pass one array per sequence"),
    (lambda: HOST.pack([np.zeros(2), np.zeros(4)]), ValueError,
     "arrays[1] has shape (4,), wanted 3 rows; … batch.lengths"),
    (lambda: HOST.pack([np.float32(1), np.zeros(3)]), ValueError, "arrays[0] has shape (), wanted 2 rows"),
    (lambda: HOST.pack([np.zeros((2, 4)), np.zeros((3, 5))]), ValueError,
     "arrays[1] has trailing shape (5,), wanted (4,) as"),
    (lambda: HOST.pack([np.zeros(2), np.zeros(3, np.float32)]), TypeError,
     "arrays[1] is float32, wanted float64 … astype('float64')"),
    (lambda: PackedBatch(int32(0), total_rows=4).pack([]), ValueError,
     "arrays is empty … make the buffer with np.full"),
    (lambda: HOST.unpack(np.zeros((4, 2))), ValueError, "rows has shape (4, 2), wanted 5 rows; … batch.total_rows"),
)
def test_wrong_calls_are_refused_by_name(call, kind, message):
    is_refused(call, kind, message)


def test_a_batch_in_more_rows_keeps_all_that_it_has():
    batch = PackedBatch([0, 3, 5], [0, 4, 8])
    batch.more = "of a mask to come"
    padded = batch.padded_to(20)
    assert (padded.total_rows, padded.more, batch.total_rows) == (20, "of a mask to come", 8)
    np.testing.assert_array_equal(padded.cu_seqlens_padded, batch.cu_seqlens_padded)
    assert not padded.cu_seqlens.flags.writeable


def test_batches_that_differ_are_described_by_other_fields():
    batches = [PackedBatch([0, 3]), PackedBatch([0, 4]), PackedBatch([0, 3], [0, 4]), PackedBatch([0, 3], total_rows=4)]
    described = [{name: np.asarray(field).tolist() for name, field in b.described().items()} for b in batches]
    assert all(described.count(each) == 1 for each in described)


def test_offsets_are_followed_by_empty_sequences():
    assert PackedBatch([0, 3, 5], [0, 4, 8]).offsets(5).tolist() == [[0, 3, 5, 5, 5], [0, 4, 8, 8, 8]]
