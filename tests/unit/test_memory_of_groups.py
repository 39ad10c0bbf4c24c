"""What the CUDA engine takes for groups of heads of different sizes, without a GPU: launches are made, not run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cases import BFLOAT16

import thdattn
from thdattn import PackedBatch
from thdattn.costs.model import OnPaper
from thdattn.plan.ranges import host_arrays
from thdattn.plan.workspace import FLOAT32, INT32, Buffer, Workspace, bytes_by_name

pytest.importorskip("cupy")
from thdattn.engines import cuda, select
from thdattn.engines.cuda import backward, launch
from thdattn.engines.cuda.launch import Gpu
from thdattn.jit import compiler
from thdattn.plan.memory import Layer

H100 = Gpu(sm90=True, multiprocessors=132, shared_bytes=232448)
HEADS, KV_HEADS, DIM = 32, 8, 128
GROWING = (1, 3, 4)


@pytest.fixture
def h100(monkeypatch):
    monkeypatch.setattr(launch, "this_gpu", lambda: H100)
    monkeypatch.setattr(cuda, "capture", lambda: None)
    monkeypatch.setattr(select, "_no_gpu", lambda: None)


def outline(batch, num_ranks=2, heads=(HEADS, KV_HEADS), **options):
    """An attention of a rank, its plan without arrays, and the layer."""
    attention = thdattn.CPAttention(OnPaper(0, num_ranks, 8), heads[0], DIM, heads[1], engine="cuda", **options)
    plan = attention._outline(batch, None, None, None, False)
    layer = Layer(*heads, attention.dtype, attention.deterministic, GROWING, keeps_keys=True)
    return attention, plan, layer


def said(plan, layer, groups, where="own"):
    return bytes_by_name(cuda.backward_buffers(plan, layer._replace(groups=groups), FLOAT32, where))


def by_hand(rows, keys, heads, kv_heads, splits):
    """Floats of the accumulators: dk and dv where query heads are split, dq, and their semaphores."""
    sums = keys * kv_heads * 2 * DIM if splits else 0
    semaphores = rows // 64 * heads + 2 * (keys // 16) * kv_heads
    return 4 * (sums + rows * heads * DIM + semaphores)


@pytest.mark.usefixtures("h100")
def test_groups_share_accumulators_of_the_largest():
    _, plan, layer = outline(PackedBatch.from_lengths([65_536]))
    together = said(plan, layer, GROWING)
    assert together == said(plan, layer, (4, 4)), "two groups of which one is as large as the largest"
    assert together["gradients in float32"] == by_hand(32_768, 65_536, 16, 4, splits=True)
    assert together["delta"] == 2 * 4 * 16 * 32_768
    alone = [said(plan, layer._replace(num_heads=4 * size, num_kv_heads=size), (size,)) for size in GROWING]
    assert together["gradients in float32"] == max(each["gradients in float32"] for each in alone)


@pytest.mark.usefixtures("h100")
def test_the_largest_accumulators_may_be_those_of_fewer_heads():
    # 256 tiles of keys are too few for 132 multiprocessors, so that the two query heads of one kv head are split.
    _, plan, layer = outline(PackedBatch.from_lengths([256] * 128), heads=(4, 2), causal=False)
    one, two = (by_hand(16_384, 32_768, 2 * size, size, splits=size == 1) for size in (1, 2))
    assert one > two
    assert said(plan, layer, (2,))["gradients in float32"] == two
    assert said(plan, layer, (1, 2))["gradients in float32"] == one


@pytest.mark.usefixtures("h100")
def test_groups_share_copies_without_padding():
    padded = PackedBatch.from_lengths([1000, 1000], multiple=1024)
    _, plan, layer = outline(padded)
    assert plan.has_masked_out_queries and plan.leading_tokens is None
    assert said(plan, layer, GROWING)["q and dout without padding"] == 1024 * 16 * 2 * DIM * 2 + 4 * 1024


@pytest.mark.usefixtures("h100")
def test_groups_share_what_the_forward_takes():
    _, plan, layer = outline(PackedBatch.from_lengths([512]))
    grown, equal = (bytes_by_name(cuda.forward_buffers(plan, layer._replace(groups=groups)))
                    for groups in (GROWING, (4, 4)))
    assert grown["logits of tiles"] == equal["logits of tiles"]
    assert grown["partial results of tiles"] == equal["partial results of tiles"] > 0


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize("gpu", ["hopper", "portable"])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_launches_of_all_groups_take_what_is_said(monkeypatch, dims, deterministic, gpu):
    batch = PackedBatch.from_lengths([700, 33, 900], multiple=4)
    made_on = replace(H100, sm90=gpu == "hopper")
    monkeypatch.setattr(launch, "this_gpu", lambda: made_on)
    monkeypatch.setattr(compiler, "kernel", lambda *instance: lambda *args: None)
    monkeypatch.setattr(backward, "cupy", SimpleNamespace(arange=np.arange, zeros=np.zeros))
    attention = thdattn.CPAttention(OnPaper(0, 2, 8), HEADS, dims[0], KV_HEADS, dims[1], engine="cuda",
                                    deterministic=deterministic)
    plan = attention._outline(batch, None, None, None, False)
    made = []

    def empty(shape, dtype):
        made.append(np.zeros(shape, dtype))
        return made[-1]

    monkeypatch.setattr(cuda, "empty", empty)
    monkeypatch.setattr(launch, "empty", empty)
    plan = replace(plan, arrays=host_arrays(plan.sharding, 0, plan.window, plan.tiles))
    for size in GROWING:
        q = np.zeros((plan.local_rows, HEADS, dims[0]), BFLOAT16)[:, : 4 * size]
        k, v = (np.zeros((plan.key_rows, size, dim), BFLOAT16) for dim in dims)
        spec = backward._Spec(launch.heads_of(q, k, v, GROWING), q.dtype, FLOAT32, deterministic, "own", False, False)
        (backward._Hopper if made_on.sm90 else backward._Portable)(plan, spec)
    layer = Layer(HEADS, KV_HEADS, attention.dtype, deterministic, GROWING, keeps_keys=True)
    wanted = {name: size for name, size in said(plan, layer, GROWING).items()
              if name in ("delta", "gradients in float32", "dq in float32", "partial sums per tile")}
    assert sum(x.nbytes for x in made) == sum(wanted.values())


# --- buffers ---------------------------------------------------------------------------------------------------------


def test_smaller_arrays_begin_where_their_buffer_does():
    made = []

    def empty(shape, dtype):
        made.append(np.empty(shape, dtype))
        return made[-1]

    workspace, declared = Workspace(SimpleNamespace(empty=empty)), Buffer("x", (5, 4), FLOAT32)
    small, large = (workspace.array(declared, shape) for shape in ((3, 2), (5, 4)))
    assert [x.shape for x in made] == [(5, 4)] and large is made[0] and small.shape == (3, 2)
    large[...] = np.arange(20).reshape(5, 4)
    assert small.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert workspace.array(declared, (3, 2)) is small and workspace.array(declared) is large
    for other in (Buffer("x", (3, 2), FLOAT32), Buffer("y", (5, 4), FLOAT32), Buffer("x", (5, 4), INT32)):
        assert not np.shares_memory(workspace.array(other, (3, 2)), large)
    assert sum(x.nbytes for x in workspace.arrays()) == sum(x.nbytes for x in made)
