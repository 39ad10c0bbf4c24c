"""Wrong values for CPAttention and its methods, as test_arguments.py has them for packing and sharding."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from cases import BFLOAT16
from wrong_values import BATCH, FLOAT8, INF, MASKED, NAN, Gradient, NoDevice, OnAGpu, no_ints, refuses, table

import thdattn
from thdattn import Sharding

SINGLE = thdattn.comm.init("single")
SHARDING = Sharding(BATCH, 1)


def attention(**changed):
    arguments = {"comm": SINGLE, "num_heads": 4, "head_dim": 8, "num_kv_heads": 4, "dtype": "float32",
                 "engine": "reference"}
    return thdattn.CPAttention(**{**arguments, **changed})


COUNTS = ("num_heads", "head_dim", "num_kv_heads", "v_head_dim")
FLAGS = ("causal", "deterministic")


@table(
    ("num_heads", 5, ValueError, "num_heads is 5, not a multiple of num_kv_heads = 4; wanted"),
    ("num_kv_heads", 8, ValueError, "num_heads is 4, not a multiple of num_kv_heads = 8"),
    *((name, 0, ValueError, f"{name} is 0, wanted >= 1; pass") for name in COUNTS),
    *no_ints("num_heads", "head_dim"), *(row for row in no_ints("num_kv_heads", "v_head_dim") if row[1] is not None),
    ("comm", None, TypeError, "comm is a NoneType, wanted a Comm, or two in a tuple; make one with"),
    ("comm", thdattn.comm.SingleComm, TypeError, "comm is a ABCMeta, wanted a Comm, or two in a tuple; make one"),
    *((name, 2**70, ValueError, f"{name} is 1180591620717411303424, wanted <= 2147483647") for name in COUNTS),
    *((name, value, TypeError, f"{name} is {found}; wanted True or False") for name in FLAGS for value, found in (
        ("no", "'no', a str"), ("false", "'false', a str"), (1, "1, a int"), (None, "None, a NoneType"),
        (NAN, "nan, a float"), ([], "[], a list"), (np.array([True, False]), "a ndarray of shape (2,)"),
        (OnAGpu(), "a OnAGpu of shape (8, 4, 8)"))),
    ("cp_comm_type", None, TypeError, "cp_comm_type is None, a NoneType; wanted"),
    ("cp_comm_type", ["a2a", "p2p"], TypeError, "cp_comm_type is ['a2a', 'p2p'], a list; wanted"),
    ("cp_comm_type", "all_to_all", ValueError, "cp_comm_type is 'all_to_all', wanted"),
    ("comm", (SINGLE, 1), TypeError, "comm is a tuple, wanted a Comm, or two in a tuple"),
    ("comm", (SINGLE, SINGLE, SINGLE), TypeError, "comm is a tuple, wanted a Comm, or two in a tuple"),
    ("window", (-2, 0), ValueError, "window is (-2, 0), wanted numbers >= -1; -1 means unlimited"),
    ("window", (4, 1), ValueError, "window is (4, 1) with causal=True, wanted a right side of -1 or 0 … (4, 0)"),
    ("window", 5, TypeError, "window is 5, wanted (left, right); pass (-1, -1) for no window"),
    ("window", (1.5, 0), TypeError, "window[0] is 1.5, a float; wanted an int"),
    ("window", (NAN, 0), TypeError, "window[0] is nan, a float; wanted an int; -1 means unlimited"),
    ("window", (True, 0), TypeError, "window[0] is True, a bool; wanted an int"),
    ("window", (OnAGpu(), 0), TypeError, "window[0] is a OnAGpu of shape (8, 4, 8); wanted an int"),
    ("window", np.array(3), TypeError, "window is a ndarray of shape (), wanted (left, right); pass (-1, -1)"),
    ("window", {3, 0}, TypeError, "window is {0, 3}, wanted (left, right)"),
    ("window", OnAGpu(), TypeError, "window is a OnAGpu of shape (8, 4, 8), wanted (left, right)"),
    ("window", (-(2**70), 0), ValueError, "window is (-1180591620717411303424, 0), wanted numbers >= -1"),
    ("softmax_scale", 0.0, ValueError, "softmax_scale is 0.0, wanted a finite number > 0; None is"),
    ("softmax_scale", INF, ValueError, "softmax_scale is inf, wanted a finite number > 0"),
    ("softmax_scale", "0.5", TypeError, "softmax_scale is '0.5', wanted a number; None is head_dim**-0.5"),
    ("softmax_scale", True, TypeError, "softmax_scale is True, wanted a number"),
    ("softmax_scale", np.array([0.5]), TypeError, "softmax_scale is a ndarray of shape (1,), wanted a number"),
    ("softmax_scale", OnAGpu(), TypeError, "softmax_scale is a OnAGpu of shape (8, 4, 8), wanted a number"),
    ("softmax_scale", 1e300, ValueError, "softmax_scale is 1e+300, wanted a finite number > 0; None … float32 must"),
    ("softmax_scale", 1e-60, ValueError, "softmax_scale is 1e-60, wanted a finite number > 0"),
    ("dtype", "int32", TypeError, "dtype is int32, wanted one of float16, bfloat16, float32, float64 … 'reference'"),
    ("dtype", "bf16", TypeError, "dtype is 'bf16', wanted one of … bfloat16"),
    ("dtype", None, TypeError, "dtype is None, wanted one of float16, bfloat16, float32, float64"),
    ("dtype", np.ones(3, np.float32), TypeError, "dtype is a ndarray of shape (3,), wanted one of"),
    ("dtype", OnAGpu(), TypeError, "dtype is a OnAGpu of shape (8, 4, 8), wanted one of"),
    ("dtype", FLOAT8, TypeError, "dtype is float8_e4m3fn, wanted one of"),
    ("dtype", ">f4", TypeError, "dtype is >f4, wanted one of"),
    ("dtype", "f4,(", TypeError, "dtype is 'f4,(', wanted one of"),
    ("dtype", "3f4", TypeError, "dtype is ('<f4', (3,)), wanted one of"),
    ("engine", "triton", ValueError, "engine is 'triton', wanted 'auto', 'cuda' or 'reference'"),
    ("engine", None, TypeError, "engine is None, a NoneType; wanted 'auto', 'cuda' or 'reference'; pass one of these"),
    ("engine", np.array(["auto", "cuda"]), TypeError, "engine is a ndarray of shape (2,); wanted 'auto'"),
)
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
    ("sharding", 3, TypeError, "sharding is 3, a int; wanted 'dual_chunk', 'contiguous', 'balanced' or a Sharding"),
    ("sharding", Sharding, TypeError, "sharding is <class 'thdattn.sharding.Sharding'>, a type; wanted 'dual_chunk'"),
    ("sharding", BATCH, TypeError, "sharding is <PackedBatch num_seqs=2 … >, a PackedBatch; wanted"),
    ("sharding", OnAGpu(), TypeError, "sharding is a OnAGpu of shape (8, 4, 8); wanted 'dual_chunk'"),
)
def test_plan(argument, value, kind, message):
    refuses(lambda **changed: ATTENTION.plan(**{"batch": BATCH, **changed}), argument, value, kind, message)


def test_plan_names_a_wrong_batch_beside_a_sharding_too():
    refuses(partial(ATTENTION.plan, sharding=SHARDING), "batch", None, TypeError, "batch is a NoneType, wanted a")


ARRAYS = (
    (None, TypeError, "is a builtins.NoneType, wanted a NumPy array"),
    ("x", TypeError, "is a builtins.str, wanted a NumPy array"),
    (OnAGpu(), TypeError, "is a wrong_values.OnAGpu, wanted a NumPy array … use engine='cuda'"),
    (Gradient(), TypeError, "is a wrong_values.Gradient that cannot be read … .detach(), or use thdattn.torch"),
    (NoDevice(), TypeError, "is a wrong_values.NoDevice that cannot be read through DLPack (Unknown device type"),
    (MASKED, TypeError, "is a masked array, whose mask would be lost; wanted plain values; pass x.filled(value)"),
    *((ones().astype(dtype), TypeError, f"is {dtype}, wanted float32; cast it")
      for dtype in map(np.dtype, ("float64", "float16", BFLOAT16, "int32", FLOAT8))),
    (ones().astype(">f4"), TypeError, "is >f4, wanted float32; cast it"),
    (ones().astype(object), TypeError, "is object, wanted float32; cast it"),
    (np.float32(1), TypeError, "is a numpy.float32, wanted a NumPy array"),
)


@table(
    *((name, value, kind, f"{name} {message}") for name in ("q", "k", "v") for value, kind, message in ARRAYS),
    ("plan", None, TypeError, "plan is None, a NoneType; wanted a Plan; make it with attn.plan(batch)"),
    ("plan", BATCH, TypeError, "plan is … a PackedBatch; wanted a Plan"),
    ("return_max_logit", "no", TypeError, "return_max_logit is 'no', a str; wanted True or False"),
    ("return_max_logit", 0, TypeError, "return_max_logit is 0, a int; wanted True or False"),
    ("return_max_logit", OnAGpu(), TypeError, "return_max_logit is a OnAGpu of shape (8, 4, 8); wanted True or False"),
)
def test_forward(argument, value, kind, message):
    arguments = {"q": ones(), "k": ones(), "v": ones(), "plan": PLAN}
    refuses(lambda **changed: ATTENTION.forward(**{**arguments, **changed}), argument, value, kind, message)


SAVED = ATTENTION.forward(ones(), ones(), ones(), PLAN)[1]


@table(
    *(("dout", value, kind, f"dout {message}") for value, kind, message in ARRAYS),
    ("saved", None, TypeError, "saved is None, a NoneType; wanted a Saved; pass the one that forward returned"),
    ("saved", PLAN, TypeError, "saved is <Plan cp_rank=0 … , a Plan; wanted a Saved"),
    ("saved", OnAGpu(), TypeError, "saved is a OnAGpu of shape (8, 4, 8); wanted a Saved"),
    ("saved", replace(SAVED, plan=None), TypeError, "plan is None, a NoneType; wanted a Plan"),
)
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
])
def test_the_cuda_engine_names_what_it_cannot_read(monkeypatch, x, message):
    cupy = pytest.importorskip("cupy")
    from thdattn.engines.cuda import launch

    monkeypatch.setattr(Gradient, "__dlpack_device__", lambda self: (2, 0))
    monkeypatch.setattr(cupy, "from_dlpack", lambda x: x.__dlpack__())
    refuses(partial(launch.from_user, "q"), "x", x, TypeError, message)


@table(
    ("plan", None, TypeError, "plan is None, a NoneType; wanted a Plan; make it with attn.plan(batch)"),
    ("plan", SAVED, TypeError, "plan is … a Saved; wanted a Plan"),
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


@table(
    ("like", [5, 2], TypeError, "like is a list, wanted a PackedBatch; make PackedBatch(cu_seqlens)"),
    ("like", np.array([0, 5, 7]), TypeError, "like is a ndarray, wanted a PackedBatch"),
    ("like", 0, TypeError, "like is a int, wanted a PackedBatch"),
)
def test_plans_of_attention_and_mixer(argument, value, kind, message):
    mixer = thdattn.Mamba2Mixer(SINGLE, 4, 8, 8, dtype="float32", engine="reference")
    for planner in (attention(), mixer):
        refuses(partial(planner.plan, BATCH), argument, value, kind, message)
