"""Every bad input raises ValueError or TypeError and names what was passed, what was found and what was wanted."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cases import BFLOAT16

import thdattn
from thdattn.comm import mpi
from thdattn.packing import PackedBatch

SINGLE = thdattn.comm.init("single")
BATCH = PackedBatch([0, 5, 7], [0, 6, 8])


def attention(comm=SINGLE, **changes):
    arguments = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "v_head_dim": 6, "dtype": "float32",
                 "engine": "reference"}
    return thdattn.CPAttention(comm, **{**arguments, **changes})


def arrays(rows=8, dtype=np.float32):
    """q, k, v, dout as `attention` wants them."""
    return {name: np.ones((rows, *shape), dtype)
            for name, shape in {"q": (4, 8), "k": (2, 8), "v": (2, 6), "dout": (4, 6)}.items()}


def matches(text):
    """Pieces of a message, in order."""
    return ".*".join(map(re.escape, text.split(" … ")))


def run_with(changed, plan=None, attn=None):
    """Forward and backward with some arrays changed."""
    attn = attn or attention()
    plan = plan or attn.plan(BATCH)
    inputs = {**arrays(), **changed}
    _, saved = attn.forward(inputs["q"], inputs["k"], inputs["v"], plan)
    attn.backward(inputs["dout"], saved)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"num_heads": 5}, ValueError, "num_heads is 5, not a multiple of num_kv_heads = 2; wanted"),
        ({"num_kv_heads": 8}, ValueError, "num_heads is 4, not a multiple of num_kv_heads = 8"),
        ({"num_heads": 0}, ValueError, "num_heads is 0, wanted >= 1; pass"),
        ({"num_kv_heads": -2}, ValueError, "num_kv_heads is -2, wanted >= 1"),
        ({"num_heads": 4.0}, TypeError, "num_heads is 4.0, a float; wanted an int"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads is 0, wanted >= 1"),
        ({"head_dim": 0}, ValueError, "head_dim is 0, wanted >= 1"),
        ({"head_dim": "8"}, TypeError, "head_dim is '8', a str; wanted an int"),
        ({"v_head_dim": -1}, ValueError, "v_head_dim is -1, wanted >= 1"),
        ({"dtype": "int32"}, TypeError, "dtype is int32, wanted one of float16, bfloat16, float32, float64"),
        ({"dtype": "complex64"}, TypeError, "dtype is complex64, wanted one of … engine 'reference'"),
        ({"dtype": "bf16"}, TypeError, "dtype is 'bf16', wanted one of … bfloat16"),
        ({"window": (-2, 0)}, ValueError, "window is (-2, 0), wanted numbers >= -1; -1 means unlimited"),
        ({"window": (0, -5), "causal": False}, ValueError, "window is (0, -5), wanted numbers >= -1"),
        ({"window": (4, 1)}, ValueError, "window is (4, 1) with causal=True, wanted a right side of -1 or 0 … (4, 0)"),
        ({"window": 5}, TypeError, "window is 5, wanted (left, right); pass (-1, -1) for no window"),
        ({"window": (1, 2, 3)}, TypeError, "window is (1, 2, 3), wanted (left, right)"),
        ({"window": None}, TypeError, "window is None, wanted (left, right)"),
        ({"window": (1.5, 0)}, TypeError, "window[0] is 1.5, a float; wanted an int"),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale is 0.0, wanted a finite number > 0; None is"),
        ({"softmax_scale": -1}, ValueError, "softmax_scale is -1, wanted a finite number > 0"),
        ({"softmax_scale": float("inf")}, ValueError, "softmax_scale is inf, wanted a finite number > 0"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan, wanted a finite number > 0"),
        ({"softmax_scale": "x"}, TypeError, "softmax_scale is 'x', "),
        ({"engine": "triton"}, ValueError, "engine is 'triton', wanted 'auto', 'cuda' or 'reference'"),
        ({"comm": 4}, TypeError, "comm is a int, wanted a Comm, or two in a tuple; make one with thdattn.comm.init()"),
        ({"comm": None}, TypeError, "comm is a NoneType, wanted a Comm"),
    ],
)
def test_bad_attention_names_the_argument(changes, kind, message):
    with pytest.raises(kind, match=matches(message)):
        attention(**changes)


@pytest.mark.parametrize("window", [(5, 0), (5, -1)])
def test_causal_has_no_right_side(window):
    assert attention(window=window).window == (5, 0)


class OneKindOfArray(thdattn.comm.SingleComm):
    """A comm of one rank that moves only some arrays."""

    def __init__(self, name, *devices):
        super().__init__()
        self.name, self.devices = name, frozenset(devices)


def test_engine_whose_arrays_the_comm_does_not_move_is_refused():
    message = "engine is 'cuda', but a comm of backend 'mpi' moves host arrays; use engine='reference'"
    with pytest.raises(ValueError, match=matches(message)):
        attention(OneKindOfArray("mpi", *mpi.MpiComm.devices), engine="cuda")
    message = "engine 'reference' computes on cpu arrays, but a comm of backend 'nccl' moves cuda arrays; use engine="
    with pytest.raises(ValueError, match=matches(message)):
        attention(OneKindOfArray("nccl", "cuda"), engine="reference")


def test_cuda_without_a_gpu_says_so(monkeypatch):
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    with pytest.raises(RuntimeError, match=matches("engine is 'cuda', but CuPy finds no GPU; use engine='reference'")):
        attention(engine="cuda")
    assert attention(engine="auto").engine == "reference"


def test_auto_is_the_reference_engine_for_host_comms():
    assert attention(OneKindOfArray("mpi", "cpu"), engine="auto").engine == "reference"


# --- arrays ----------------------------------------------------------------------------------------------------

SHAPES = {"q": (8, 4, 8), "k": (8, 2, 8), "v": (8, 2, 6), "dout": (8, 4, 6)}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("change", [(1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=str)
def test_wrong_shape_names_the_array(name, change):
    shape = tuple(np.add(SHAPES[name], change).tolist())
    with pytest.raises(ValueError, match=matches(f"{name} has shape {shape}, wanted {SHAPES[name]} = (local_rows,")):
        run_with({name: np.ones(shape, np.float32)})


@pytest.mark.parametrize("name", SHAPES)
def test_missing_dimension_names_the_array(name):
    with pytest.raises(ValueError, match=matches(f"{name} has shape (8, 32), wanted {SHAPES[name]}")):
        run_with({name: np.ones((8, 32), np.float32)})


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [np.dtype("float64"), np.dtype("float16"), BFLOAT16, np.dtype("int32")], ids=str)
def test_wrong_dtype_names_the_array(name, dtype):
    with pytest.raises(TypeError, match=matches(f"{name} is {dtype}, wanted float32; cast it")):
        run_with({name: arrays(dtype=dtype)[name]})


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_no_array_names_the_argument(name):
    with pytest.raises(TypeError, match=matches(f"{name} is a builtins.list, wanted a NumPy array")):
        run_with({name: [[1.0]]})


class OnAGpu:
    def __dlpack__(self, **options):
        raise AssertionError("nobody may read it")

    def __dlpack_device__(self):
        return (2, 0)


@pytest.mark.parametrize("name", SHAPES)
def test_array_on_a_gpu_is_refused_by_the_reference_engine(name):
    with pytest.raises(TypeError, match=matches(f"{name} is a … OnAGpu, wanted a NumPy array … use engine='cuda'")):
        run_with({name: OnAGpu()})


def test_backward_wants_what_forward_saved():
    message = "saved is (1, 2), a tuple; wanted a Saved; pass the one that forward returned"
    with pytest.raises(TypeError, match=matches(message)):
        attention().backward(arrays()["dout"], (1, 2))


# --- batches and shardings -------------------------------------------------------------------------------------


def on_every_rank(cp_size, program):
    """The messages that the ranks of a simulated job raise."""
    messages = []

    def guarded(comm):
        with pytest.raises((ValueError, TypeError)) as caught:
            program(comm)
        messages.append(str(caught.value))

    thdattn.comm.run_local(cp_size, guarded)
    assert len(messages) == cp_size
    return set(messages)


@pytest.mark.parametrize("cp_size", [2, 4])
def test_padded_length_that_dual_chunk_cannot_split_names_the_sequence_and_the_remedy(cp_size):
    batch = PackedBatch([0, 8, 11], [0, 8, 11])
    multiple = 2 * cp_size
    fixed = -(-3 // multiple) * multiple
    (message,) = on_every_rank(cp_size, lambda comm: attention(comm).plan(batch))
    assert f"sequence 1 has padded length 3, wanted a multiple of 2*cp_size = {multiple}" in message
    assert f"pad it to {fixed} (PackedBatch.from_lengths(lengths, multiple={multiple}) does this)" in message


def test_what_is_no_batch_is_named():
    with pytest.raises(TypeError, match=matches("batch is a ndarray, wanted a PackedBatch; make PackedBatch(")):
        attention().plan(np.array([0, 4], np.int32))


def test_unknown_sharding_is_named():
    message = "strategy is 'zigzag', wanted 'dual_chunk', 'contiguous' or 'balanced'; pass one of these"
    with pytest.raises(ValueError, match=matches(message)):
        attention().plan(BATCH, "zigzag")


def test_sharding_of_another_batch_is_refused():
    other = thdattn.Sharding(PackedBatch([0, 5, 7], [0, 6, 8]), 1)
    with pytest.raises(ValueError, match=matches("sharding was made for another PackedBatch, wanted … make it with")):
        attention().plan(BATCH, other)


def test_sharding_of_another_size_is_refused():
    batch = PackedBatch.from_lengths([16, 8], 8)
    messages = on_every_rank(2, lambda comm: attention(comm).plan(batch, thdattn.Sharding(batch, 4)))
    assert messages == {
        "sharding has cp_size 4, wanted 2, the ranks of comm; make it with Sharding(batch, 2)"
    }


def test_lengths_on_a_gpu_are_refused_by_the_reference_engine():
    class Offsets(OnAGpu):
        dtype, shape = np.dtype("int32"), (3,)

    batch = PackedBatch(Offsets(), total_rows=8)
    with pytest.raises(ValueError, match=matches("a plan of the reference engine needs the offsets on the host")):
        attention().plan(batch)


DIFFERENCES = {
    "lengths": lambda comm: attention(comm).plan(PackedBatch.from_lengths([8, 7 + comm.rank // 3], 8)),
    "padding": lambda comm: attention(comm).plan(PackedBatch([0, 8], [0, 8 + comm.rank // 3 * 8])),
    "rows": lambda comm: attention(comm).plan(PackedBatch([0, 8], total_rows=16 + comm.rank // 3)),
    "sharding": lambda comm: attention(comm).plan(
        PackedBatch([0, 16]), ["dual_chunk", "contiguous"][comm.rank // 3]),
    "window": lambda comm: attention(comm, window=(4 + comm.rank // 3, 0)).plan(PackedBatch([0, 16])),
    "causal": lambda comm: attention(comm, causal=comm.rank < 3).plan(PackedBatch([0, 16])),
    "num_heads": lambda comm: attention(comm, num_heads=2 + 2 * (comm.rank // 3)).plan(PackedBatch([0, 16])),
    "num_kv_heads": lambda comm: attention(comm, num_kv_heads=1 + comm.rank // 3).plan(PackedBatch([0, 16])),
    "head_dim": lambda comm: attention(comm, head_dim=8 + comm.rank // 3).plan(PackedBatch([0, 16])),
    "v_head_dim": lambda comm: attention(comm, v_head_dim=8 + comm.rank // 3).plan(PackedBatch([0, 16])),
    "softmax_scale": lambda comm: attention(comm, softmax_scale=1.0 + comm.rank // 3).plan(PackedBatch([0, 16])),
    "dtype": lambda comm: attention(comm, dtype=["float32", "float16"][comm.rank // 3]).plan(PackedBatch([0, 16])),
    "head_groups": lambda comm: attention(comm, num_heads=2, num_kv_heads=2, head_groups=1 + comm.rank // 3).plan(
        PackedBatch([0, 16])),
    "keep_keys": lambda comm: attention(comm, keep_keys=comm.rank < 3).plan(PackedBatch([0, 16])),
}  # fmt: skip

FIELDS = {"lengths": "cu_seqlens[2]", "padding": "total_rows", "rows": "total_rows", "causal": "window"}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_plan_different_things_all_raise_and_name_the_rank(what):
    (message,) = on_every_rank(4, DIFFERENCES[what])
    assert message.startswith("the plan is not the same on all ranks: ")
    assert f" {FIELDS.get(what, what)} is " in message
    assert " (ranks 0, 1, 2)" in message and " (rank 3)" in message


# --- plans -----------------------------------------------------------------------------------------------------


def test_what_is_no_plan_is_refused():
    with pytest.raises(TypeError, match=matches("plan is … a PackedBatch; wanted a Plan; make it with attn.plan")):
        run_with({}, plan=BATCH)


def plans_of(cp_size, **changes):
    batch = PackedBatch.from_lengths([16, 8], 8)
    return thdattn.comm.run_local(cp_size, lambda comm: attention(comm, **changes).plan(batch))


def test_plan_of_another_rank_is_refused():
    plans = plans_of(2)

    def program(comm):
        inputs = arrays(12)
        attention(comm).forward(inputs["q"], inputs["k"], inputs["v"], plans[1 - comm.rank])

    assert on_every_rank(2, program) == {
        f"plan was made for cp_rank {1 - rank}, wanted {rank}; make it with this attention's plan(batch)"
        for rank in (0, 1)
    }


def test_plan_of_another_size_is_refused():
    with pytest.raises(ValueError, match=matches("plan was made for cp_size 2, wanted 1; make it with")):
        run_with({}, plan=plans_of(2)[0])


@pytest.mark.parametrize(
    ("changes", "found"),
    [({"causal": False}, "(-1, -1)"), ({"window": (3, 0)}, "(3, 0)"), ({"causal": False, "window": (0, 2)}, "(0, 2)")],
)
def test_plan_of_another_mask_is_refused(changes, found):
    with pytest.raises(ValueError, match=matches(f"plan was made for window {found}, wanted (-1, 0)")):
        run_with({}, plan=attention(**changes).plan(BATCH))


def test_plan_of_another_engine_is_refused():
    plan = replace(attention().plan(BATCH), engine=SimpleNamespace(name="cuda"))
    with pytest.raises(ValueError, match=matches("plan was made for engine cuda, wanted reference")):
        run_with({}, plan=plan)


def test_plan_of_other_tiles_is_refused():
    plan = replace(attention().plan(BATCH), tiles=(64, 64))
    with pytest.raises(ValueError, match=matches("plan was made for tiles (64, 64), wanted (128, 128)")):
        run_with({}, plan=plan)


def test_backward_checks_whose_plan_was_saved():
    other = attention(window=(3, 0))
    inputs = arrays()
    _, saved = other.forward(inputs["q"], inputs["k"], inputs["v"], other.plan(BATCH))
    with pytest.raises(ValueError, match=matches("plan was made for window (3, 0), wanted (-1, 0)")):
        attention().backward(inputs["dout"], saved)


def test_valid_inputs_raise_nothing():
    run_with({})
