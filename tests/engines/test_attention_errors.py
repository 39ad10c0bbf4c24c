"""Bad shapes, batches, shardings and plans raise and name what was passed, found and wanted; on every rank alike."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from wrong_values import OnAGpu

import thdattn
from thdattn.comm import mpi
from thdattn.packing import PackedBatch

SINGLE = thdattn.comm.init("single")
BATCH = PackedBatch([0, 5, 7], [0, 6, 8])


def attention(comm=SINGLE, **changes):
    arguments = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "v_head_dim": 6, "dtype": "float32",
                 "engine": "reference"}
    return thdattn.CPAttention(comm, **{**arguments, **changes})


def arrays(rows=8):
    """q, k, v, dout as `attention` wants them."""
    return {name: np.ones((rows, *shape), np.float32)
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


def test_unknown_sharding_is_named():
    message = "sharding is 'zigzag', wanted 'dual_chunk', 'contiguous' or 'balanced'; pass one of these"
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
        shape, dtype = (3,), np.dtype("int32")

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


def test_valid_inputs_raise_nothing():
    run_with({})
