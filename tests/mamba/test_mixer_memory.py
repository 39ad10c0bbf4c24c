"""Mamba2Mixer.memory counts what a mixer allocates, and its launches have room for any number of rows. No GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from mixer_cases import BFLOAT16, FLOAT32, GPU_SIZES, Case, on_rank, random_inputs, step
from tree_cases import LONG

import thdattn
from thdattn import PackedBatch
from thdattn.costs.model import OnPaper
from thdattn.mamba import trees
from thdattn.mamba.oracle import Norm
from thdattn.mamba.shape import MixerShape
from thdattn.plan.ranges import host_arrays

RANKS = 3
CASE = Case("some-rows", (700, 33, 900, 2800), sizes=GPU_SIZES)


def nbytes(kept):
    return sum(x.nbytes for x in kept if x is not None)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("case", "dtype"), [
    *((Case("some-rows", (70, 33, 200), norm=norm), dtype) for norm in (None, Norm(True, 2))
      for dtype in (BFLOAT16, FLOAT32)),
    (Case(LONG.name, (), trees=LONG, norm=Norm(True, 2)), BFLOAT16),
], ids=str)
def test_what_is_said_is_what_is_kept_and_shared(case, dtype, keep):
    def program(comm):
        mixer = case.mixer(comm, dtype, keep_activations=keep)
        plan, memory = mixer.plan(case.batch), mixer.memory(case.batch)
        (out, gradients, *dweights), saved = step(mixer, plan, on_rank(plan, random_inputs(case, dtype)))
        kept = saved.kept
        assert memory["zxbcdt"] == saved.zxbcdt.nbytes == gradients.nbytes == memory["dzxbcdt"]
        assert memory["out"] == out.nbytes and memory["y"] == kept.y.nbytes and memory["states"] == kept.states.nbytes
        assert memory["dweights"] == nbytes(dweights)
        assert memory.get("rows in front", 0) == kept.halo.nbytes * (comm.size > 1)
        assert keep or kept.act is None
        activations = nbytes(kept.act) if keep else case.mixer(comm, dtype).memory(case.batch)["activations"]
        assert (memory.saved if keep else memory.forward)["activations"] == activations > 0
        plans = [plan, trees._nodes(mixer._layer, plan).plan] if plan.has_trees else [plan]
        arrays = [{id(x): x for x in vars(each.arrays).values() if x is not None} for each in plans]
        assert memory["plan"] == sum(nbytes(each.values()) for each in arrays)
        elsewhere = memory["plan"] + (0 if keep else activations)
        assert memory.work - elsewhere == sum(nbytes(each.workspace.arrays()) for each in plans)

    for ranks in (1, RANKS):
        thdattn.comm.run_local(ranks, program)


# --- the CUDA engine: its functions run, and its kernels do not ------------------------------------------------------


@pytest.fixture(params=["hopper", "portable"])
def launches(request, monkeypatch):
    """Record grids of all launches, and arrays of launch.empty."""
    pytest.importorskip("cupy")
    from thdattn.engines import cuda, select
    from thdattn.engines.cuda import launch
    from thdattn.jit import compiler
    from thdattn.mamba.cuda import forward

    grids, made = [], []

    def empty(shape, dtype):
        made.append(np.empty(shape, dtype))
        return made[-1]

    def kernel(*instance):
        return lambda grid, *args: grids.append(grid)

    for module in (cuda, launch):
        monkeypatch.setattr(module, "empty", empty)
    monkeypatch.setattr(forward, "tensor_map", lambda *args: None)
    gpu = launch.Gpu(sm90=request.param == "hopper", multiprocessors=132, shared_bytes=232448)
    monkeypatch.setattr(launch, "this_gpu", lambda: gpu)
    monkeypatch.setattr(compiler, "device_arch", lambda: "sm_90a" if gpu.sm90 else "sm_80")
    monkeypatch.setattr(select, "_no_gpu", lambda: None)
    monkeypatch.setattr(cuda, "capture", lambda: None)
    monkeypatch.setattr(compiler, "kernel", kernel)
    monkeypatch.setattr(launch.Launch, "__call__", lambda run, *args: grids.append(run.grid))
    return SimpleNamespace(grids=grids, made=made, engine=cuda)


class Paper(OnPaper):
    """A rank whose gathers bring nothing."""

    def gather_heads(self, sends, recvs, at_once):
        return [SimpleNamespace(wait=lambda: None)]


def planned(comm, batch, **options):
    """Return a mixer of the CUDA engine and a plan with arrays of the host."""
    mixer = thdattn.Mamba2Mixer(comm, *GPU_SIZES, engine="cuda", **options)
    plan = mixer._outline(batch, None, None, False)
    return mixer, replace(plan, arrays=host_arrays(plan.sharding, comm.rank, plan.window, plan.tiles))


def step_on_paper(mixer, plan):
    from thdattn.mamba import context_parallel

    shape = mixer._shape
    zxbcdt, dout = (np.zeros((plan.local_rows, width), BFLOAT16) for width in (shape.columns, shape.d_inner))
    weights = thdattn.Mamba2Weights(*(np.zeros(of_one, np.float32) for of_one in shape.weights))
    _, kept = context_parallel.forward(mixer._layer, plan, zxbcdt, weights)
    context_parallel.backward(mixer._layer, plan, dout, zxbcdt, weights, kept)


@pytest.mark.parametrize("norm", [None, "after_gate", "before_gate"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("ranks", [1, RANKS])
def test_gpus_take_what_is_said(launches, ranks, keep, norm):
    mixer, plan = planned(Paper(ranks // 2, ranks, 8), CASE.batch, keep_activations=keep, norm=norm)
    memory = mixer.memory(CASE.batch)
    step_on_paper(mixer, plan)
    elsewhere = "plan", "zxbcdt"
    assert nbytes(launches.made) == sum(size for name, size in memory.items() if name not in elsewhere)


def test_numbers_of_the_readme(launches):
    mixer, rows = thdattn.Mamba2Mixer(OnPaper(0, 1, 8), 64, 64, 128, engine="cuda"), 2**20
    memory = mixer.memory(PackedBatch.from_lengths([rows]))
    per_row = [round(memory[name] / rows / 1000, 1) for name in ("zxbcdt", "y", "states", "activations")]
    assert per_row == [17.0, 8.2, 1.0, 9.5] and "activations" in memory.saved


MOST = (2**31 - 1, 2**16 - 1, 2**16 - 1)  # thread blocks of a grid


@pytest.mark.parametrize("rows", [1, 4_194_240, 4_194_241, 20_000_000, 134_217_728 - 2048])
def test_grids_have_room_for_rows(launches, rows):
    from thdattn.mamba.cuda import backward, forward

    shape = MixerShape(*GPU_SIZES, 4, BFLOAT16)
    plan = SimpleNamespace(local_rows=rows, cp_rank=0, cp_size=1, key_ranges=None, memoize=lambda key, make: make(),
                           batch=SimpleNamespace(trees=None))
    plan.arrays, plan.workspace = plan, SimpleNamespace(array=lambda buffer: None)
    tiles = {forward._conv(plan, shape, column).grid: 256 for column in (0, shape.d_inner)}
    tiles |= {backward._conv_bwd(plan, shape)[0].grid: 64}
    if not launches.engine.launch.this_gpu().sm90:
        tiles |= {backward._gate_then_states(plan, shape)[0].grid: 64}
    for grid, of_tile in tiles.items():
        assert all(0 < n <= most for n, most in zip(grid, MOST, strict=True)), grid
        wanted = math.ceil(rows / of_tile)
        assert wanted <= grid[1] * grid[2] < wanted + grid[2], "as few as there may be"
        assert grid[2] == 1 or wanted > MOST[1], "one layer where that is enough"
    assert forward.segments_of(plan) <= MOST[1], "the others have a y for each"
