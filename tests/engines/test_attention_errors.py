"""Bad shapes, batches, shardings and plans raise and name what was passed, found and wanted; on every rank alike."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from wrong_values import DeviceOffsets

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


def run_with(changed, plan=None):
    """Forward and backward with some arrays changed."""
    attn = attention()
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


@pytest.mark.parametrize("change", [(1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, 0, 1), None], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_wrong_shape_names_the_array(name, change):
    shape = (8, 32) if change is None else tuple(np.add(SHAPES[name], change).tolist())
    with pytest.raises(ValueError, match=matches(f"{name} has shape {shape}, wanted {SHAPES[name]} = (local_rows,")):
        run_with({name: np.ones(shape, np.float32)})


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


@pytest.mark.parametrize(("batch", "sharding", "message"), [
    (BATCH, thdattn.Sharding(PackedBatch([0, 5, 7], [0, 6, 8]), 1),
     "sharding was made for another PackedBatch, wanted … make it with"),
    (PackedBatch(DeviceOffsets(3), total_rows=8), None, "a plan of the reference engine needs the offsets on the host"),
], ids=["of another batch", "lengths on a GPU"])
def test_batches_and_shardings_without_a_plan_are_refused(batch, sharding, message):
    with pytest.raises(ValueError, match=matches(message)):
        attention().plan(batch, sharding)


def test_sharding_of_another_size_is_refused():
    batch = PackedBatch.from_lengths([16, 8], 8)
    messages = on_every_rank(2, lambda comm: attention(comm).plan(batch, thdattn.Sharding(batch, 4)))
    assert messages == {
        "sharding has cp_size 4, wanted 2, the ranks of comm; make it with Sharding(batch, 2)"
    }


# --- plans -----------------------------------------------------------------------------------------------------


def plans_of(cp_size):
    return thdattn.comm.run_local(cp_size, lambda comm: attention(comm).plan(PackedBatch.from_lengths([16, 8], 8)))


def test_plan_of_another_rank_is_refused():
    plans = plans_of(2)

    def program(comm):
        inputs = arrays(12)
        attention(comm).forward(inputs["q"], inputs["k"], inputs["v"], plans[1 - comm.rank])

    assert on_every_rank(2, program) == {
        f"plan was made for cp_rank {1 - rank}, wanted {rank}; make it with this attention's plan(batch)"
        for rank in (0, 1)
    }


@pytest.mark.parametrize(("plan", "found"), [
    (lambda: plans_of(2)[0], "cp_size 2, wanted 1; make it with"),
    (lambda: attention(causal=False).plan(BATCH), "window (-1, -1), wanted (-1, 0)"),
    (lambda: attention(window=(3, 0)).plan(BATCH), "window (3, 0), wanted (-1, 0)"),
    (lambda: attention(causal=False, window=(0, 2)).plan(BATCH), "window (0, 2), wanted (-1, 0)"),
    (lambda: replace(attention().plan(BATCH), engine=SimpleNamespace(name="cuda")), "engine cuda, wanted reference"),
    (lambda: replace(attention().plan(BATCH), tiles=(64, 64)), "tiles (64, 64), wanted (128, 128)"),
])
def test_plan_for_something_else_is_refused(plan, found):
    run_with({})
    with pytest.raises(ValueError, match=matches(f"plan was made for {found}")):
        run_with({}, plan=plan())
