"""Wrong values for packing and sharding: a TypeError or ValueError with name, found, wanted and remedy.

One table per function: argument, value, error, text of its message (" … " stands for anything).
"""

from __future__ import annotations

from decimal import Decimal
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from cases import BFLOAT16
from wrong_values import BATCH, FLOAT8, INF, MASKED, NAN, Gradient, NoDevice, OnAGpu, no_ints, refuses, table

from thdattn import PackedBatch, Sharding
from thdattn.arguments import as_bool, as_choice, as_count, as_int, as_softmax_scale, as_window, shown


@table(
    ("cu_seqlens", None, TypeError, "cu_seqlens is None, a NoneType; wanted an array; pass a NumPy array"),
    ("cu_seqlens", "0 3", TypeError, "cu_seqlens is '0 3', a str; wanted an array"),
    ("cu_seqlens", {0, 3}, TypeError, "cu_seqlens is {0, 3}, a set; wanted an array"),
    ("cu_seqlens", [[0], [3, 4]], ValueError, "cu_seqlens is no array ( … inhomogeneous … ); wanted one dtype"),
    ("cu_seqlens", [0, None], TypeError, "cu_seqlens[1] is None, a NoneType; wanted an int"),
    ("cu_seqlens", [0, "3"], TypeError, "cu_seqlens holds <U21 values, wanted ints; pass an int32 array"),
    ("cu_seqlens", [0, NAN], TypeError, "cu_seqlens holds float64 values, wanted ints"),
    ("cu_seqlens", [0, True], TypeError, "cu_seqlens holds bool values, wanted ints"),
    ("cu_seqlens", [0, 2**70], ValueError, "cu_seqlens ends at 1180591620717411303424, wanted < 2**31"),
    ("cu_seqlens", np.array([0, 3], FLOAT8), TypeError, "cu_seqlens is float8_e4m3fn, wanted int32"),
    ("cu_seqlens", np.ma.masked_array([0, 3], [0, 1]), TypeError, "cu_seqlens is a masked array … x.filled(value)"),
    ("cu_seqlens", Gradient(), TypeError, "cu_seqlens is a wrong_values.Gradient that … cu_seqlens.detach(), or"),
    ("cu_seqlens", NoDevice(), TypeError, "cu_seqlens is a … NoDevice that cannot be read through DLPack (Unknown"),
    ("cu_seqlens_padded", [0, 2**70], ValueError, "cu_seqlens_padded ends at 1180591620717411303424, wanted < 2**31"),
    ("cu_seqlens_padded", NoDevice(), TypeError, "cu_seqlens_padded is a … NoDevice that cannot be read"),
    ("total_rows", "8", TypeError, "total_rows is '8', a str; wanted an int; convert it with int()"),
    *(row for row in no_ints("total_rows") if row[1] is not None),
    ("total_rows", 2**70, ValueError, "total_rows is 1180591620717411303424, wanted 0 <= total_rows < 2**31"),
)
def test_packed_batch(argument, value, kind, message):
    refuses(lambda **changed: PackedBatch(**{"cu_seqlens": [0, 3], **changed}), argument, value, kind, message)


@table(
    ("lengths", None, TypeError, "lengths is None, a NoneType; wanted an array"),
    ("lengths", "7", TypeError, "lengths is '7', a str; wanted an array"),
    ("lengths", (n for n in (7, 3)), TypeError, "lengths is <generator … , a generator; wanted an array"),
    ("lengths", ["7", "3"], TypeError, "lengths holds <U1 values, wanted ints"),
    ("lengths", [7.5], TypeError, "lengths holds float64 values, wanted ints"),
    ("lengths", [True, 3], TypeError, "lengths holds bool values, wanted ints"),
    ("lengths", [[7], [3, 1]], ValueError, "lengths is no array"),
    ("lengths", [[7, 3]], ValueError, "lengths has shape (1, 2), wanted (num_seqs,)"),
    ("lengths", [7, None], TypeError, "lengths[1] is None, a NoneType; wanted an int"),
    ("lengths", [7, 2**70], ValueError, "lengths[1] is 1180591620717411303424, wanted 0 <= length < 2**31"),
    ("lengths", np.array([7, 3], FLOAT8), TypeError, "lengths holds float8_e4m3fn values, wanted ints"),
    ("lengths", OnAGpu(), TypeError, "lengths is a … OnAGpu that cannot be read as a NumPy array ( … copy it to the"),
    ("lengths", Gradient(), TypeError, "lengths is a … Gradient that … lengths.detach(), or use thdattn.torch"),
    ("multiple", 0, ValueError, "multiple is 0, wanted >= 1; pass 1 for no padding"),
    ("multiple", 2**70, ValueError, "multiple is 1180591620717411303424, wanted <= 2147483647"),
    *no_ints("multiple"),
)
def test_from_lengths(argument, value, kind, message):
    arguments = {"lengths": [7, 3]}
    refuses(lambda **changed: PackedBatch.from_lengths(**{**arguments, **changed}), argument, value, kind, message)


def ones_of(dtype):
    """One array per sequence of BATCH."""
    return [np.ones(n, np.int8).astype(dtype) for n in BATCH.lengths]


@table(
    ("arrays", None, TypeError, "arrays is None, a NoneType; wanted a list of arrays; pass one array per sequence"),
    ("arrays", {0: [1.0], 1: [2.0]}, TypeError, "arrays is {0: [1.0], 1: [2.0]}, a dict; wanted a list of arrays"),
    ("arrays", [None, np.ones(2)], TypeError, "arrays[0] is None, a NoneType; wanted an array"),
    ("arrays", [[[1], [1, 2]], np.ones(2)], ValueError, "arrays[0] is no array"),
    ("arrays", [OnAGpu(), np.ones(2)], TypeError, "arrays[0] is a … OnAGpu that cannot be read … copy it to the host"),
    ("arrays", [Gradient()] * 2, TypeError, "arrays[0] is a … Gradient that … pass arrays[0].detach(), or use"),
    ("arrays", [MASKED, MASKED], TypeError, "arrays[0] is a masked array, whose mask would be lost; wanted plain"),
)
def test_pack(argument, value, kind, message):
    refuses(BATCH.pack, argument, value, kind, message)


@pytest.mark.parametrize(("dtype", "fill"), [
    ("int32", NAN), ("int32", INF), ("int32", 1.5), ("int32", 2**31), ("int32", 2**70), ("int32", 1j), ("int32", None),
    ("int32", "4"), ("int32", b"4"), ("uint8", -1), ("uint8", 256), ("bool", 2), ("bool", NAN), ("float16", 1e6),
    ("float16", 2**70), ("float16", "0.5"), ("float16", 1j), ("float16", None), ("float32", [1, 2]), ("float32", {}),
    ("float32", np.ones(2)), ("float32", np.array(1.0)), ("float32", OnAGpu()), ("bfloat16", 1e300), (FLOAT8, 1e6),
    (FLOAT8, INF), (ml_dtypes.int4, 8), (ml_dtypes.int4, 0.5), (ml_dtypes.float4_e2m1fn, NAN),
    ("M8[s]", "x"),
], ids=lambda value: shown(value)[:20])
def test_pack_refuses_a_fill_that_the_dtype_cannot_hold(dtype, fill):
    dtype = np.dtype(dtype)
    message = f"fill is {shown(fill)}, wanted one value that {dtype} can hold; pass such a value, or convert the arrays"
    refuses(partial(BATCH.pack, ones_of(dtype)), "fill", fill, ValueError, message)


@pytest.mark.parametrize(("dtype", "fill", "written"), [
    ("int32", -1, -1), ("int32", 2.0, 2), ("int64", 2**62 + 1, 2**62 + 1), ("bool", 1, True), ("float16", 0.1, 0.1),
    ("float16", NAN, NAN), ("float64", -INF, -INF), (BFLOAT16, NAN, NAN), (BFLOAT16, 1e-3, 1e-3), (FLOAT8, 3.1, 3),
    (FLOAT8, NAN, NAN), ("complex64", 1j, 1j), ("float32", Decimal("0.5"), 0.5), ("float32", np.float64(7), 7),
    ("float32", 1e-60, 0), ("<U3", 0, "0"), ("<U3", "abc", "abc"), (object, None, None),
])
def test_pack_rounds_a_fill_to_the_dtype(dtype, fill, written):
    packed = BATCH.pack(ones_of(dtype), fill)
    assert packed.dtype == dtype
    wanted = np.asarray(written).astype(dtype)[()]
    assert packed[5] == wanted or (packed[5] != packed[5] and wanted != wanted)  # NaN


@table(
    ("rows", None, TypeError, "rows is None, a NoneType; wanted an array"),
    ("rows", 3.0, ValueError, "rows has shape (), wanted 8 rows"),
    ("rows", OnAGpu(), TypeError, "rows is a … OnAGpu that cannot be read as a NumPy array"),
    ("rows", Gradient(), TypeError, "rows is a … Gradient that … pass rows.detach(), or use thdattn.torch"),
    ("rows", MASKED, TypeError, "rows is a masked array"),
)
def test_unpack(argument, value, kind, message):
    refuses(BATCH.unpack, argument, value, kind, message)


@table(
    ("batch", None, TypeError, "batch is a NoneType, wanted a PackedBatch; make PackedBatch(cu_seqlens)"),
    ("batch", OnAGpu(), TypeError, "batch is a OnAGpu, wanted a PackedBatch"),
    *no_ints("cp_size"),
    ("cp_size", 2**30, ValueError, "cp_size is 1073741824, wanted <= 1073741823; pass the number of ranks"),
    ("cp_size", 2**70, ValueError, "cp_size is 1180591620717411303424, wanted <= 1073741823"),
    ("strategy", None, TypeError,
     "strategy is None, a NoneType; wanted 'dual_chunk', 'contiguous' or 'balanced'; pass one"),
    ("strategy", np.array(["dual_chunk"]), TypeError, "strategy is a ndarray of shape (1,); wanted 'dual_chunk'"),
)
def test_sharding(argument, value, kind, message):
    batch = PackedBatch([0, 0])  # splits into any number of chunks
    refuses(lambda **changed: Sharding(**{"batch": batch, "cp_size": 1, **changed}), argument, value, kind, message)


SHARDING = Sharding(BATCH, 1)


@table(
    *no_ints("cp_rank"),
    ("cp_rank", 2**70, ValueError, "cp_rank is 1180591620717411303424, wanted 0 <= cp_rank < cp_size = 1"),
)
def test_rows_and_shard(argument, value, kind, message):
    refuses(SHARDING.rows, argument, value, kind, message)
    refuses(partial(SHARDING.shard, np.ones(8)), argument, value, kind, message)


@table(
    ("x", None, TypeError, "x is None, a NoneType; wanted an array"),
    ("x", [[1], [2, 3]], ValueError, "x is no array"),
    ("x", OnAGpu(), TypeError, "x is a … OnAGpu that cannot be read as a NumPy array"),
    ("x", Gradient(), TypeError, "x is a … Gradient that … pass x.detach(), or use thdattn.torch"),
    ("x", MASKED, TypeError, "x is a masked array"),
)
def test_shard(argument, value, kind, message):
    refuses(partial(SHARDING.shard, cp_rank=0), argument, value, kind, message)


@table(
    ("local_arrays", None, TypeError, "local_arrays is None, a NoneType; wanted a list of arrays; pass the local"),
    ("local_arrays", [None], TypeError, "local_arrays[0] is None, a NoneType; wanted an array"),
    ("local_arrays", [OnAGpu()], TypeError, "local_arrays[0] is a … OnAGpu that cannot be read as a NumPy array"),
    ("local_arrays", [Gradient()], TypeError, "local_arrays[0] is a … Gradient that … pass local_arrays[0].detach()"),
)
def test_unshard(argument, value, kind, message):
    refuses(SHARDING.unshard, argument, value, kind, message)


@pytest.mark.parametrize("call", [
    partial(as_int, "x"), partial(as_count, "x"), partial(as_bool, "x"), partial(as_choice, "x", choices=("a", "b")),
    as_softmax_scale, lambda value: as_window(value, causal=True),
])
@pytest.mark.parametrize("nest", [lambda x: x, lambda x: [x], lambda x: (x, x), lambda x: {"a": [x]}])
def test_no_message_reads_what_lies_on_a_gpu(call, nest):
    with pytest.raises(TypeError, match="a OnAGpu of shape") as caught:
        call(value=nest(OnAGpu()))
    assert len(str(caught.value)) < 300
