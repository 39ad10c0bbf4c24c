"""Wrong values for every public argument: a TypeError or ValueError with name, found, wanted and remedy.

One table per function: argument, value, error, text of its message (" … " stands for anything).
"""

from __future__ import annotations

import re
from dataclasses import replace
from decimal import Decimal
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from cases import BFLOAT16

import thdattn
from thdattn import PackedBatch, Sharding
from thdattn.arguments import as_bool, as_choice, as_count, as_int, as_softmax_scale, as_window, shown

FLOAT8 = ml_dtypes.float8_e4m3fn
NAN, INF = float("nan"), float("inf")
BATCH = PackedBatch([0, 5, 7], [0, 6, 8])
SINGLE = thdattn.comm.init("single")
MASKED = np.ma.masked_array(np.ones((8, 4, 8), np.float32), mask=True)


class OnAGpu:
    """An array on a GPU: whatever reads it, or prints it, fails the test."""

    shape, dtype = (8, 4, 8), np.dtype("float32")

    def __dlpack_device__(self):
        return (2, 0)

    def _read(self, *args, **kwargs):
        raise AssertionError("read values that lie on the GPU")

    __dlpack__ = __getitem__ = __iter__ = __len__ = __bool__ = __eq__ = __index__ = __float__ = __repr__ = _read
    __hash__ = None

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")


class Gradient:
    """A tensor that requires grad, as PyTorch refuses to hand it out."""

    requires_grad, shape = True, (8, 4, 8)

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")

    def __array__(self, *args, **kwargs):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


class NoDevice(Gradient):
    """A tensor without memory, such as those on PyTorch's device "meta"."""

    requires_grad = False

    def __dlpack_device__(self):
        raise ValueError("Unknown device type meta")


def refuses(call, argument, value, kind, message):
    """Asserts that call(argument=value) raises this error, and that all four parts are in its message."""
    with pytest.raises(kind) as caught:
        call(**{argument: value})
    text = str(caught.value)
    assert re.search(".*".join(map(re.escape, message.split(" … "))), text), text
    assert type(caught.value) is kind
    assert re.match(r"[a-z_]+(\[\d+\])? ", text), "begins with the name"
    assert re.search("wanted|needs", text) and ";" in text and len(text) < 500, "says what was wanted, and the remedy"


def table(*rows):
    """The rows, named after what they pass."""
    return pytest.mark.parametrize(
        ("argument", "value", "kind", "message"), [pytest.param(*row, id=f"{row[0]}-{i}") for i, row in enumerate(rows)]
    )


@table(
    ("cu_seqlens", None, TypeError, "cu_seqlens is None, a NoneType; wanted an array; pass a NumPy array"),
    ("cu_seqlens", "0 3", TypeError, "cu_seqlens is '0 3', a str; wanted an array"),
    ("cu_seqlens", {0, 3}, TypeError, "cu_seqlens is {0, 3}, a set; wanted an array"),
    ("cu_seqlens", np.ndarray, TypeError, "cu_seqlens is <class 'numpy.ndarray'>, a type; wanted an array"),
    ("cu_seqlens", 7, ValueError, "cu_seqlens has shape (), wanted (num_seqs + 1,)"),
    ("cu_seqlens", [[0], [3, 4]], ValueError, "cu_seqlens is no array ( … inhomogeneous … ); wanted one dtype"),
    ("cu_seqlens", [0, None], TypeError, "cu_seqlens[1] is None, a NoneType; wanted an int"),
    ("cu_seqlens", [0, "3"], TypeError, "cu_seqlens holds <U21 values, wanted ints; pass an int32 array"),
    ("cu_seqlens", [0, NAN], TypeError, "cu_seqlens holds float64 values, wanted ints"),
    ("cu_seqlens", [False, True], TypeError, "cu_seqlens holds bool values, wanted ints"),
    ("cu_seqlens", [0, True], TypeError, "cu_seqlens holds bool values, wanted ints"),
    ("cu_seqlens", [0, 2**70], ValueError, "cu_seqlens ends at 1180591620717411303424, wanted < 2**31"),
    ("cu_seqlens", np.array([0, 3], FLOAT8), TypeError, "cu_seqlens is float8_e4m3fn, wanted int32"),
    ("cu_seqlens", np.ma.masked_array([0, 3], [0, 1]), TypeError, "cu_seqlens is a masked array … x.filled(value)"),
    ("cu_seqlens", Gradient(), TypeError, "cu_seqlens is a test_arguments.Gradient that … cu_seqlens.detach(), or"),
    ("cu_seqlens", NoDevice(), TypeError, "cu_seqlens is a … NoDevice that cannot be read through DLPack (Unknown"),
    ("cu_seqlens_padded", "x", TypeError, "cu_seqlens_padded is 'x', a str; wanted an array"),
    ("cu_seqlens_padded", [[0], [3, 4]], ValueError, "cu_seqlens_padded is no array"),
    ("cu_seqlens_padded", [0, 2**70], ValueError, "cu_seqlens_padded ends at 1180591620717411303424, wanted < 2**31"),
    ("cu_seqlens_padded", NoDevice(), TypeError, "cu_seqlens_padded is a … NoDevice that cannot be read"),
    ("total_rows", "8", TypeError, "total_rows is '8', a str; wanted an int; convert it with int()"),
    ("total_rows", True, TypeError, "total_rows is True, a bool; wanted an int"),
    ("total_rows", np.True_, TypeError, "total_rows is np.True_, a bool; wanted an int"),
    ("total_rows", NAN, TypeError, "total_rows is nan, a float; wanted an int"),
    ("total_rows", np.array(8), TypeError, "total_rows is a ndarray of shape (); wanted an int"),
    ("total_rows", OnAGpu(), TypeError, "total_rows is a OnAGpu of shape (8, 4, 8); wanted an int"),
    ("total_rows", 2**70, ValueError, "total_rows is 1180591620717411303424, wanted 0 <= total_rows < 2**31"),
)  # fmt: skip
def test_packed_batch(argument, value, kind, message):
    refuses(lambda **changed: PackedBatch(**{"cu_seqlens": [0, 3], **changed}), argument, value, kind, message)


@table(
    ("lengths", None, TypeError, "lengths is None, a NoneType; wanted an array"),
    ("lengths", 3, ValueError, "lengths has shape (), wanted (num_seqs,)"),
    ("lengths", "7", TypeError, "lengths is '7', a str; wanted an array"),
    ("lengths", (n for n in (7, 3)), TypeError, "lengths is <generator … , a generator; wanted an array"),
    ("lengths", ["7", "3"], TypeError, "lengths holds <U1 values, wanted ints"),
    ("lengths", [7.5], TypeError, "lengths holds float64 values, wanted ints"),
    ("lengths", [NAN], TypeError, "lengths holds float64 values, wanted ints"),
    ("lengths", [True, 3], TypeError, "lengths holds bool values, wanted ints"),
    ("lengths", (3, np.True_), TypeError, "lengths holds bool values, wanted ints"),
    ("lengths", np.array([True]), TypeError, "lengths holds bool values, wanted ints"),
    ("lengths", [[7], [3, 1]], ValueError, "lengths is no array"),
    ("lengths", [[7, 3]], ValueError, "lengths has shape (1, 2), wanted (num_seqs,)"),
    ("lengths", [7, None], TypeError, "lengths[1] is None, a NoneType; wanted an int"),
    ("lengths", [7, 2**70], ValueError, "lengths[1] is 1180591620717411303424, wanted 0 <= length < 2**31"),
    ("lengths", [-(2**70)], ValueError, "lengths[0] is -1180591620717411303424, wanted 0 <= length"),
    ("lengths", np.array([7, 3], FLOAT8), TypeError, "lengths holds float8_e4m3fn values, wanted ints"),
    ("lengths", OnAGpu(), TypeError, "lengths is a … OnAGpu that cannot be read as a NumPy array ( … copy it to the"),
    ("lengths", Gradient(), TypeError, "lengths is a … Gradient that … lengths.detach(), or use thdattn.torch"),
    ("multiple", None, TypeError, "multiple is None, a NoneType; wanted an int"),
    ("multiple", "4", TypeError, "multiple is '4', a str; wanted an int"),
    ("multiple", True, TypeError, "multiple is True, a bool; wanted an int"),
    ("multiple", 0, ValueError, "multiple is 0, wanted >= 1; pass 1 for no padding"),
    ("multiple", -8, ValueError, "multiple is -8, wanted >= 1; pass 1 for no padding"),
    ("multiple", 2**31, ValueError, "multiple is 2147483648, wanted <= 2147483647; pass 1 for no padding"),
    ("multiple", 2**70, ValueError, "multiple is 1180591620717411303424, wanted <= 2147483647"),
    ("multiple", [4], TypeError, "multiple is [4], a list; wanted an int"),
    ("multiple", OnAGpu(), TypeError, "multiple is a OnAGpu of shape (8, 4, 8); wanted an int"),
)  # fmt: skip
def test_from_lengths(argument, value, kind, message):
    arguments = {"lengths": [7, 3]}
    refuses(lambda **changed: PackedBatch.from_lengths(**{**arguments, **changed}), argument, value, kind, message)


def ones_of(dtype):
    """One array per sequence of BATCH."""
    return [np.ones(n, np.int8).astype(dtype) for n in BATCH.lengths]


@table(
    ("arrays", None, TypeError, "arrays is None, a NoneType; wanted a list of arrays; pass one array per sequence"),
    ("arrays", 3, TypeError, "arrays is 3, a int; wanted a list of arrays"),
    ("arrays", "ab", TypeError, "arrays is 'ab', a str; wanted a list of arrays"),
    ("arrays", {0: [1.0], 1: [2.0]}, TypeError, "arrays is {0: [1.0], 1: [2.0]}, a dict; wanted a list of arrays"),
    ("arrays", np.array(3), TypeError, "arrays is a ndarray of shape (); wanted a list of arrays"),
    ("arrays", [None, np.ones(2)], TypeError, "arrays[0] is None, a NoneType; wanted an array"),
    ("arrays", [[[1], [1, 2]], np.ones(2)], ValueError, "arrays[0] is no array"),
    ("arrays", [OnAGpu(), np.ones(2)], TypeError, "arrays[0] is a … OnAGpu that cannot be read … copy it to the host"),
    ("arrays", [Gradient()] * 2, TypeError, "arrays[0] is a … Gradient that … pass arrays[0].detach(), or use"),
    ("arrays", [MASKED, MASKED], TypeError, "arrays[0] is a masked array, whose mask would be lost; wanted plain"),
)  # fmt: skip
def test_pack(argument, value, kind, message):
    refuses(BATCH.pack, argument, value, kind, message)


@pytest.mark.parametrize(("dtype", "fill"), [
    ("int32", NAN), ("int32", INF), ("int32", 1.5), ("int32", 2**31), ("int32", 2**70), ("int32", 1j), ("int32", None),
    ("int32", "4"), ("int32", b"4"), ("uint8", -1), ("uint8", 256), ("bool", 2), ("bool", NAN), ("float16", 1e6),
    ("float16", 2**70), ("float16", "0.5"), ("float16", 1j), ("float16", None), ("float32", [1, 2]), ("float32", {}),
    ("float32", np.ones(2)), ("float32", np.array(1.0)), ("float32", OnAGpu()), ("bfloat16", 1e300), (FLOAT8, 1e6),
    (FLOAT8, INF), (ml_dtypes.int4, 8), (ml_dtypes.int4, 0.5), (ml_dtypes.float4_e2m1fn, NAN),
    ("M8[s]", "x"),
], ids=lambda value: shown(value)[:20])  # fmt: skip
def test_pack_refuses_a_fill_that_the_dtype_cannot_hold(dtype, fill):
    dtype = np.dtype(dtype)
    message = f"fill is {shown(fill)}, wanted one value that {dtype} can hold; pass such a value, or convert the arrays"
    refuses(partial(BATCH.pack, ones_of(dtype)), "fill", fill, ValueError, message)


@pytest.mark.parametrize(("dtype", "fill", "written"), [
    ("int32", -1, -1), ("int32", 2.0, 2), ("int64", 2**62 + 1, 2**62 + 1), ("bool", 1, True), ("float16", 0.1, 0.1),
    ("float16", NAN, NAN), ("float64", -INF, -INF), (BFLOAT16, NAN, NAN), (BFLOAT16, 1e-3, 1e-3), (FLOAT8, 3.1, 3),
    (FLOAT8, NAN, NAN), ("complex64", 1j, 1j), ("float32", Decimal("0.5"), 0.5), ("float32", np.float64(7), 7),
    ("float32", 1e-60, 0), ("<U3", 0, "0"), ("<U3", "abc", "abc"), (object, None, None),
])  # fmt: skip
def test_pack_rounds_a_fill_to_the_dtype(dtype, fill, written):
    packed = BATCH.pack(ones_of(dtype), fill)
    assert packed.dtype == dtype
    wanted = np.asarray(written).astype(dtype)[()]
    assert packed[5] == wanted or (packed[5] != packed[5] and wanted != wanted)  # NaN


@table(
    ("rows", None, TypeError, "rows is None, a NoneType; wanted an array"),
    ("rows", 3.0, ValueError, "rows has shape (), wanted 8 rows"),
    ("rows", "x", TypeError, "rows is 'x', a str; wanted an array"),
    ("rows", [[1], [2, 3]], ValueError, "rows is no array"),
    ("rows", OnAGpu(), TypeError, "rows is a … OnAGpu that cannot be read as a NumPy array"),
    ("rows", Gradient(), TypeError, "rows is a … Gradient that … pass rows.detach(), or use thdattn.torch"),
    ("rows", MASKED, TypeError, "rows is a masked array"),
)  # fmt: skip
def test_unpack(argument, value, kind, message):
    refuses(BATCH.unpack, argument, value, kind, message)


@table(
    ("batch", None, TypeError, "batch is a NoneType, wanted a PackedBatch; make PackedBatch(cu_seqlens)"),
    ("batch", OnAGpu(), TypeError, "batch is a OnAGpu, wanted a PackedBatch"),
    ("cp_size", None, TypeError, "cp_size is None, a NoneType; wanted an int"),
    ("cp_size", "2", TypeError, "cp_size is '2', a str; wanted an int"),
    ("cp_size", True, TypeError, "cp_size is True, a bool; wanted an int"),
    ("cp_size", NAN, TypeError, "cp_size is nan, a float; wanted an int"),
    ("cp_size", 2**30, ValueError, "cp_size is 1073741824, wanted <= 1073741823; pass the number of ranks"),
    ("cp_size", 2**70, ValueError, "cp_size is 1180591620717411303424, wanted <= 1073741823"),
    ("strategy", None, TypeError, "strategy is None, a NoneType; wanted 'dual_chunk' or 'contiguous'; pass one"),
    ("strategy", 3, TypeError, "strategy is 3, a int; wanted 'dual_chunk' or 'contiguous'"),
    ("strategy", np.array(["dual_chunk"]), TypeError, "strategy is a ndarray of shape (1,); wanted 'dual_chunk'"),
    ("strategy", ["dual_chunk"], TypeError, "strategy is ['dual_chunk'], a list; wanted 'dual_chunk'"),
    ("strategy", "", ValueError, "strategy is '', wanted 'dual_chunk' or 'contiguous'"),
)  # fmt: skip
def test_sharding(argument, value, kind, message):
    batch = PackedBatch([0, 0])  # splits into any number of chunks
    refuses(lambda **changed: Sharding(**{"batch": batch, "cp_size": 1, **changed}), argument, value, kind, message)


SHARDING = Sharding(BATCH, 1)


@table(
    ("cp_rank", None, TypeError, "cp_rank is None, a NoneType; wanted an int"),
    ("cp_rank", False, TypeError, "cp_rank is False, a bool; wanted an int"),
    ("cp_rank", 0.0, TypeError, "cp_rank is 0.0, a float; wanted an int"),
    ("cp_rank", np.array(0), TypeError, "cp_rank is a ndarray of shape (); wanted an int"),
    ("cp_rank", 2**70, ValueError, "cp_rank is 1180591620717411303424, wanted 0 <= cp_rank < cp_size = 1"),
)  # fmt: skip
def test_rows_and_shard(argument, value, kind, message):
    refuses(SHARDING.rows, argument, value, kind, message)
    refuses(partial(SHARDING.shard, np.ones(8)), argument, value, kind, message)


@table(
    ("x", None, TypeError, "x is None, a NoneType; wanted an array"),
    ("x", [[1], [2, 3]], ValueError, "x is no array"),
    ("x", OnAGpu(), TypeError, "x is a … OnAGpu that cannot be read as a NumPy array"),
    ("x", Gradient(), TypeError, "x is a … Gradient that … pass x.detach(), or use thdattn.torch"),
    ("x", MASKED, TypeError, "x is a masked array"),
)  # fmt: skip
def test_shard(argument, value, kind, message):
    refuses(partial(SHARDING.shard, cp_rank=0), argument, value, kind, message)


@table(
    ("local_arrays", None, TypeError, "local_arrays is None, a NoneType; wanted a list of arrays; pass the local"),
    ("local_arrays", 3, TypeError, "local_arrays is 3, a int; wanted a list of arrays"),
    ("local_arrays", [None], TypeError, "local_arrays[0] is None, a NoneType; wanted an array"),
    ("local_arrays", [OnAGpu()], TypeError, "local_arrays[0] is a … OnAGpu that cannot be read as a NumPy array"),
    ("local_arrays", [Gradient()], TypeError, "local_arrays[0] is a … Gradient that … pass local_arrays[0].detach()"),
)  # fmt: skip
def test_unshard(argument, value, kind, message):
    refuses(SHARDING.unshard, argument, value, kind, message)


def attention(**changed):
    arguments = {"comm": SINGLE, "num_heads": 4, "head_dim": 8, "dtype": "float32", "engine": "reference"}
    return thdattn.CPAttention(**{**arguments, **changed})


COUNTS = ("num_heads", "head_dim", "num_kv_heads", "v_head_dim")
FLAGS = ("causal", "deterministic")


@table(
    ("comm", thdattn.comm.SingleComm, TypeError, "comm is a ABCMeta, wanted a Comm; make one"),
    *((name, True, TypeError, f"{name} is True, a bool; wanted an int") for name in COUNTS),
    *((name, np.True_, TypeError, f"{name} is np.True_, a bool; wanted an int") for name in COUNTS),
    *((name, 8.0, TypeError, f"{name} is 8.0, a float; wanted an int") for name in COUNTS),
    *((name, NAN, TypeError, f"{name} is nan, a float; wanted an int") for name in COUNTS),
    *((name, np.array(4), TypeError, f"{name} is a ndarray of shape (); wanted an int") for name in COUNTS),
    *((name, OnAGpu(), TypeError, f"{name} is a OnAGpu of shape (8, 4, 8); wanted an int") for name in COUNTS),
    *((name, 2**70, ValueError, f"{name} is 1180591620717411303424, wanted <= 2147483647") for name in COUNTS),
    *((name, "no", TypeError, f"{name} is 'no', a str; wanted True or False; pass one of these") for name in FLAGS),
    *((name, "false", TypeError, f"{name} is 'false', a str; wanted True or False") for name in FLAGS),
    *((name, 1, TypeError, f"{name} is 1, a int; wanted True or False") for name in FLAGS),
    *((name, None, TypeError, f"{name} is None, a NoneType; wanted True or False") for name in FLAGS),
    *((name, NAN, TypeError, f"{name} is nan, a float; wanted True or False") for name in FLAGS),
    *((name, [], TypeError, f"{name} is [], a list; wanted True or False") for name in FLAGS),
    *((name, np.array([True, False]), TypeError, f"{name} is a ndarray of shape (2,); wanted True") for name in FLAGS),
    *((name, OnAGpu(), TypeError, f"{name} is a OnAGpu of shape (8, 4, 8); wanted True") for name in FLAGS),
    ("window", (NAN, 0), TypeError, "window[0] is nan, a float; wanted an int; -1 means unlimited"),
    ("window", (INF, 0), TypeError, "window[0] is inf, a float; wanted an int; -1 means unlimited"),
    ("window", (True, 0), TypeError, "window[0] is True, a bool; wanted an int"),
    ("window", (OnAGpu(), 0), TypeError, "window[0] is a OnAGpu of shape (8, 4, 8); wanted an int"),
    ("window", [[1], [2, 3]], TypeError, "window[0] is [1], a list; wanted an int"),
    ("window", np.array([3.0, 0.0]), TypeError, "window[0] is 3.0, a float; wanted an int"),
    ("window", np.array(3), TypeError, "window is a ndarray of shape (), wanted (left, right); pass (-1, -1)"),
    ("window", np.ones((2, 2), int), TypeError, "window[0] is [1, 1], a list; wanted an int"),
    ("window", "10", TypeError, "window is '10', wanted (left, right)"),
    ("window", {3, 0}, TypeError, "window is {0, 3}, wanted (left, right)"),
    ("window", {3: 0, 0: 3}, TypeError, "window is {0: 3, 3: 0}, wanted (left, right)"),
    ("window", OnAGpu(), TypeError, "window is a OnAGpu of shape (8, 4, 8), wanted (left, right)"),
    ("window", (-(2**70), 0), ValueError, "window is (-1180591620717411303424, 0), wanted numbers >= -1"),
    ("softmax_scale", "0.5", TypeError, "softmax_scale is '0.5', wanted a number; None is head_dim**-0.5"),
    ("softmax_scale", True, TypeError, "softmax_scale is True, wanted a number"),
    ("softmax_scale", 1j, TypeError, "softmax_scale is 1j, wanted a number"),
    ("softmax_scale", np.array([0.5]), TypeError, "softmax_scale is a ndarray of shape (1,), wanted a number"),
    ("softmax_scale", OnAGpu(), TypeError, "softmax_scale is a OnAGpu of shape (8, 4, 8), wanted a number"),
    ("softmax_scale", -INF, ValueError, "softmax_scale is -inf, wanted a finite number > 0"),
    ("softmax_scale", 1e300, ValueError, "softmax_scale is 1e+300, wanted a finite number > 0; None … float32 must"),
    ("softmax_scale", 1e-60, ValueError, "softmax_scale is 1e-60, wanted a finite number > 0"),
    ("softmax_scale", 10**400, ValueError, "softmax_scale is 1000 … 000, wanted a finite number > 0"),
    ("dtype", None, TypeError, "dtype is None, wanted one of float16, bfloat16, float32, float64"),
    ("dtype", np.ones(3, np.float32), TypeError, "dtype is a ndarray of shape (3,), wanted one of"),
    ("dtype", np.array("float32"), TypeError, "dtype is a ndarray of shape (), wanted one of"),
    ("dtype", OnAGpu(), TypeError, "dtype is a OnAGpu of shape (8, 4, 8), wanted one of"),
    ("dtype", FLOAT8, TypeError, "dtype is float8_e4m3fn, wanted one of"),
    ("dtype", "float8_e5m2", TypeError, "dtype is float8_e5m2, wanted one of"),
    ("dtype", np.dtype(ml_dtypes.float8_e4m3b11fnuz), TypeError, "dtype is float8_e4m3b11fnuz, wanted one of"),
    ("dtype", ">f4", TypeError, "dtype is >f4, wanted one of"),
    ("dtype", "f4,(", TypeError, "dtype is 'f4,(', wanted one of"),
    ("dtype", "3f4", TypeError, "dtype is ('<f4', (3,)), wanted one of"),
    ("dtype", ["float32"], TypeError, "dtype is ['float32'], wanted one of"),
    ("dtype", object, TypeError, "dtype is object, wanted one of"),
    ("engine", None, TypeError, "engine is None, a NoneType; wanted 'auto', 'cuda' or 'reference'; pass one of these"),
    ("engine", 1, TypeError, "engine is 1, a int; wanted 'auto', 'cuda' or 'reference'"),
    ("engine", ["auto"], TypeError, "engine is ['auto'], a list; wanted 'auto'"),
    ("engine", np.array(["auto", "cuda"]), TypeError, "engine is a ndarray of shape (2,); wanted 'auto'"),
)  # fmt: skip
def test_attention(argument, value, kind, message):
    refuses(attention, argument, value, kind, message)


ATTENTION = attention()
PLAN = ATTENTION.plan(BATCH)


def ones():
    return np.ones((8, 4, 8), np.float32)


@table(
    ("batch", None, TypeError, "batch is a NoneType, wanted a PackedBatch; make PackedBatch(cu_seqlens)"),
    ("batch", [7, 3], TypeError, "batch is a list, wanted a PackedBatch"),
    ("batch", PLAN, TypeError, "batch is a Plan, wanted a PackedBatch"),
    ("sharding", None, TypeError, "sharding is None, a NoneType; wanted 'dual_chunk', 'contiguous' or a Sharding;"),
    ("sharding", 3, TypeError, "sharding is 3, a int; wanted 'dual_chunk', 'contiguous' or a Sharding"),
    ("sharding", True, TypeError, "sharding is True, a bool; wanted 'dual_chunk'"),
    ("sharding", Sharding, TypeError, "sharding is <class 'thdattn.sharding.Sharding'>, a type; wanted 'dual_chunk'"),
    ("sharding", BATCH, TypeError, "sharding is <PackedBatch of 2 sequences, 7 tokens, 8 rows>, a PackedBatch; wanted"),
    ("sharding", np.array(["dual_chunk"]), TypeError, "sharding is a ndarray of shape (1,); wanted 'dual_chunk'"),
    ("sharding", OnAGpu(), TypeError, "sharding is a OnAGpu of shape (8, 4, 8); wanted 'dual_chunk'"),
)  # fmt: skip
def test_plan(argument, value, kind, message):
    refuses(lambda **changed: ATTENTION.plan(**{"batch": BATCH, **changed}), argument, value, kind, message)


def test_plan_names_a_wrong_batch_beside_a_sharding_too():
    refuses(partial(ATTENTION.plan, sharding=SHARDING), "batch", None, TypeError, "batch is a NoneType, wanted a")


ARRAYS = (
    (None, TypeError, "is a builtins.NoneType, wanted a NumPy array"),
    ("x", TypeError, "is a builtins.str, wanted a NumPy array"),
    (1.0, TypeError, "is a builtins.float, wanted a NumPy array"),
    (np.ndarray, TypeError, "is a builtins.type, wanted a NumPy array"),
    (OnAGpu(), TypeError, "is a test_arguments.OnAGpu, wanted a NumPy array"),
    (Gradient(), TypeError, "is a test_arguments.Gradient that cannot be read … .detach(), or use thdattn.torch"),
    (NoDevice(), TypeError, "is a test_arguments.NoDevice that cannot be read through DLPack (Unknown device type"),
    (MASKED, TypeError, "is a masked array, whose mask would be lost; wanted plain values; pass x.filled(value)"),
    (ones().astype(FLOAT8), TypeError, "is float8_e4m3fn, wanted float32; cast it"),
    (ones().astype(">f4"), TypeError, "is >f4, wanted float32; cast it"),
    (ones().astype(object), TypeError, "is object, wanted float32; cast it"),
    (np.float32(1), TypeError, "is a numpy.float32, wanted a NumPy array"),
)


@table(
    *((name, value, kind, f"{name} {message}") for name in ("q", "k", "v") for value, kind, message in ARRAYS),
    ("plan", None, TypeError, "plan is a NoneType, wanted a Plan; make it with attn.plan(batch)"),
    ("plan", BATCH, TypeError, "plan is a PackedBatch, wanted a Plan"),
    ("return_max_logit", "no", TypeError, "return_max_logit is 'no', a str; wanted True or False"),
    ("return_max_logit", 0, TypeError, "return_max_logit is 0, a int; wanted True or False"),
    ("return_max_logit", OnAGpu(), TypeError, "return_max_logit is a OnAGpu of shape (8, 4, 8); wanted True or False"),
)  # fmt: skip
def test_forward(argument, value, kind, message):
    arguments = {"q": ones(), "k": ones(), "v": ones(), "plan": PLAN}
    refuses(lambda **changed: ATTENTION.forward(**{**arguments, **changed}), argument, value, kind, message)


SAVED = ATTENTION.forward(ones(), ones(), ones(), PLAN)[1]


@table(
    *(("dout", value, kind, f"dout {message}") for value, kind, message in ARRAYS),
    ("saved", None, TypeError, "saved is None, a NoneType; wanted a Saved; pass the one that forward returned"),
    ("saved", PLAN, TypeError, "saved is <Plan of rank 0 of 1 … , a Plan; wanted a Saved"),
    ("saved", OnAGpu(), TypeError, "saved is a OnAGpu of shape (8, 4, 8); wanted a Saved"),
    ("saved", replace(SAVED, plan=None), TypeError, "plan is a NoneType, wanted a Plan"),
)  # fmt: skip
def test_backward(argument, value, kind, message):
    arguments = {"dout": ones(), "saved": SAVED}
    refuses(lambda **changed: ATTENTION.backward(**{**arguments, **changed}), argument, value, kind, message)


def test_torch_tensors_that_require_grad_are_sent_to_autograd():
    torch = pytest.importorskip("torch")
    x = torch.ones(8, 4, 8, requires_grad=True)
    for name in ("q", "k", "v"):
        arguments = {"q": ones(), "k": ones(), "v": ones(), "plan": PLAN, name: x}
        with pytest.raises(TypeError, match=rf"{name} is a torch\.Tensor .*pass {name}\.detach\(\), or use"):
            ATTENTION.forward(**arguments)
    for call in (lambda: BATCH.unpack(x), lambda: SHARDING.shard(x, 0), lambda: SHARDING.unshard([x])):
        with pytest.raises(TypeError, match=r"torch\.Tensor that cannot be read .*\.detach\(\), or use"):
            call()
    assert ATTENTION.forward(x.detach(), ones(), ones(), PLAN)[0].shape == (8, 4, 8)


@pytest.mark.parametrize(("x", "message"), [
    (Gradient(), "q is a … Gradient that cannot be read through DLPack (Can't export … pass q.detach(), or use"),
    (NoDevice(), "q is a … NoDevice that cannot be read through DLPack (Unknown device type meta); … CuPy array"),
])  # fmt: skip
def test_the_cuda_engine_names_what_it_cannot_read(monkeypatch, x, message):
    cupy = pytest.importorskip("cupy")
    from thdattn.ops import launch

    monkeypatch.setattr(Gradient, "__dlpack_device__", lambda self: (2, 0))
    monkeypatch.setattr(cupy, "from_dlpack", lambda x: x.__dlpack__())
    refuses(partial(launch.from_user, "q"), "x", x, TypeError, message)


@table(
    ("plan", None, TypeError, "plan is a NoneType, wanted a Plan; make it with attn.plan(batch)"),
    ("plan", SAVED, TypeError, "plan is a Saved, wanted a Plan"),
)
def test_flops(argument, value, kind, message):
    refuses(ATTENTION.flops, argument, value, kind, message)


# --- what is right stays right -----------------------------------------------------------------------------------


def test_numpy_numbers_and_flags_are_numbers_and_flags():
    layer = attention(num_heads=np.int64(4), head_dim=np.uint8(8), causal=np.False_, deterministic=np.True_,
                      window=np.array([3, -1]), softmax_scale=np.float32(0.5))
    assert (layer.num_heads, layer.head_dim, layer.causal, layer.deterministic) == (4, 8, False, True)
    assert all(type(x) is int for x in (layer.num_heads, layer.head_dim, *layer.window))
    assert type(layer.causal) is bool and type(layer.softmax_scale) is float
    assert layer.window == (3, -1) and layer.softmax_scale == 0.5
    assert layer.forward(ones(), ones(), ones(), layer.plan(BATCH), np.True_)[1].max_logit.shape == (4,)


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32"), "f4", "<f4", BFLOAT16,
                                   ml_dtypes.bfloat16, "bfloat16", float])
def test_every_spelling_of_a_dtype_is_understood(dtype):
    assert attention(dtype=dtype).dtype == np.dtype(dtype)


def test_a_window_wider_than_any_sequence_is_none():
    assert attention(window=(2**70, -1)).window == (-1, 0)
    assert attention(window=[2**31, 2**70], causal=False).window == (-1, -1)


@pytest.mark.parametrize("value", [1 / 3, Decimal("0.5"), 7, ml_dtypes.bfloat16(0.5), 1e-30])
def test_a_softmax_scale_is_any_number(value):
    assert attention(softmax_scale=value).softmax_scale == float(value)


@pytest.mark.parametrize("call", [
    partial(as_int, "x"), partial(as_count, "x"), partial(as_bool, "x"), partial(as_choice, "x", choices=("a", "b")),
    as_softmax_scale, lambda value: as_window(value, causal=True),
])  # fmt: skip
@pytest.mark.parametrize("nest", [lambda x: x, lambda x: [x], lambda x: (x, x), lambda x: {"a": [x]}])
def test_no_message_reads_what_lies_on_a_gpu(call, nest):
    with pytest.raises(TypeError, match="a OnAGpu of shape") as caught:
        call(value=nest(OnAGpu()))
    assert len(str(caught.value)) < 300
