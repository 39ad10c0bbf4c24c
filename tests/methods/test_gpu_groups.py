"""Methods through peer memory on one GPU: groups of heads of different sizes in one memory, slices, and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("cupy")  # which peer memory loads
import cases
import numpy as np
from cases import BFLOAT16, Case, check, run, to_host
from delays import inputs_of
from loopback import SIZE, Loopback, Mirror

import thdattn
from thdattn import PackedBatch
from thdattn.kernels.configs import TILES
from thdattn.methods import select

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, GROUPS = 16, 8, (1, 3, 4)
PACKS = (700, 900), (33, 1, 64, 0, 100) * 9


@pytest.fixture
def comm(cupy, monkeypatch):
    monkeypatch.setattr(select, "WORTH_GROUPS", 0)
    with cupy.cuda.Stream(non_blocking=True):
        comm = Loopback(monkeypatch)
        yield comm
        comm.peer.close()


def attention(comm, dims=(128, 128), heads=(HEADS, KV_HEADS), **options):
    return thdattn.CPAttention(comm, heads[0], dims[0], heads[1], dims[1], engine="cuda",
                               **{"deterministic": True, **options})


def poison(plan):
    """What calls have left in work buffers becomes NaN, or -1."""
    for x in plan.workspace.arrays():
        if x.size:
            x.data.memset_async(0xFF, x.nbytes)


def step(layer, plan, inputs):
    poison(plan)
    out, saved = layer.forward(*inputs[:3], plan, return_max_logit=True)
    poison(plan)
    return out, saved.lse, saved.max_logit, *layer.backward(inputs[3], saved)


def bits(results):
    return [to_host(x).tobytes() for x in results]


def of_one_group(cupy, batch, inputs, dims=(128, 128)):
    layer = attention(Mirror(), dims, head_groups=1)
    return bits(step(layer, layer.plan(batch), inputs))


@pytest.mark.usefixtures("poisoned_gpu")
@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_plans_in_turns_give_the_bits_of_one_group(cupy, comm, dims, keep_keys):
    layer = attention(comm, dims, keep_keys=keep_keys)
    batches = [PackedBatch.from_lengths(lengths, 4) for lengths in PACKS]
    plans = [layer.plan(batch) for batch in batches]
    assert [layer._groups(plan) for plan in plans] == [GROUPS] * 2
    for seed in range(2):
        inputs = [inputs_of(cupy, layer, plan, 2 * seed + number) for number, plan in enumerate(plans)]
        saved, grads = [], []
        for plan, one in zip(plans, inputs, strict=True):
            poison(plan)
            saved.append(layer.forward(*one[:3], plan, return_max_logit=True)[1])
        for plan, one, kept in zip(plans, inputs, saved, strict=True):
            poison(plan)
            grads.append(layer.start_backward(one[3], kept))
        for batch, one, kept, (dq, dk_dv) in zip(batches, inputs, saved, grads, strict=True):
            found = bits((kept.out, kept.lse, kept.max_logit, dq, *dk_dv()))
            assert found == of_one_group(cupy, batch, one, dims)


@pytest.mark.usefixtures("poisoned_gpu")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_groups_that_grow_are_the_oracle(cupy, monkeypatch, kernels, dims, deterministic):
    """By collectives, whose shares of dk and dv lie in the accumulators."""
    monkeypatch.setattr(select.MethodSelection, "head_groups",
                        lambda self, plan, num_heads, num_kv_heads, *_: select._growing(num_kv_heads))
    case = replace(cases.DIMS[0], heads=(HEADS, KV_HEADS), dims=dims)
    check(case, BFLOAT16, run(case, 2, BFLOAT16, xp=cupy, engine="cuda", deterministic=deterministic))


def test_a_graph_finds_its_buffers_after_calls_of_other_heads(cupy, comm):
    layer, stream = attention(comm, keep_keys=False), cupy.cuda.get_current_stream()
    batch = PackedBatch.from_lengths(PACKS[0], 4)
    plan = layer.plan(batch)
    inputs = [inputs_of(cupy, layer, plan, seed) for seed in range(3)]
    static = [x.copy() for x in inputs[0]]
    step(layer, plan, static)
    stream.begin_capture()
    found = [step(layer, plan, static) for _ in range(2)]  # a window has its second turn
    graph = stream.end_capture()
    before = [(x.data.ptr, x.nbytes) for x in plan.workspace.arrays()]
    for heads, deterministic in (((8, 8), False), ((32, 16), True), ((16, 8), False)):
        other = attention(comm, heads=heads, deterministic=deterministic, keep_keys=False)
        step(other, plan, inputs_of(cupy, other, plan, 5))
    assert [(x.data.ptr, x.nbytes) for x in plan.workspace.arrays()][: len(before)] == before
    for one in (*inputs, inputs[1]):
        for x, y in zip(static, one, strict=True):
            x[...] = y
        graph.launch(stream)
        for results in found:
            assert bits(results) == of_one_group(cupy, batch, one)
    stream.synchronize()
    del graph


# --- peer memory on one GPU --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poisoned_gpu")
@pytest.mark.parametrize("head_groups", [1, 2])
@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize(("kind", "sharding"), [("a2a", "contiguous"), ("a2a", "dual_chunk"), ("p2p", "dual_chunk")])
def test_slices_through_peer_memory_are_those_of_copies(cupy, monkeypatch, kind, sharding, keep_keys, head_groups):
    """A rank of two whose other rank is itself: what it computes makes no sense, but the same one."""
    case = Case("longer-full", (257, 3, 64, 0, 100, 17, 190), causal=False, slack=70, heads=(8, 4))

    def results(comm):
        layer = case.attention(comm, BFLOAT16, engine="cuda", deterministic=True, cp_comm_type=kind,
                               keep_keys=keep_keys, head_groups=head_groups)
        plan = layer.plan(case.batch(SIZE), sharding)
        inputs = cases.inputs_of(case, plan, BFLOAT16, cupy, fill=0)
        return [[to_host(x).tobytes() for x in cases.step(layer, plan, inputs).values()] for _ in range(3)]

    with cupy.cuda.Stream(non_blocking=True):
        comm = Loopback(monkeypatch)
        copied, pulled = results(Mirror()), results(comm)
        comm.peer.close()
    assert copied == pulled and copied[1:] == copied[:1] * 2


@pytest.mark.usefixtures("poisoned_gpu")
@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("kv_heads", [8, 1])
@pytest.mark.parametrize(("kind", "sharding"), [("a2a", "contiguous"), ("a2a", "dual_chunk"), ("p2p", "dual_chunk")])
def test_no_more_memory_is_taken_than_is_said(cupy, kind, sharding, kv_heads, keep_keys):
    """The most at a time of all that CuPy's pool gave since the plan was asked for."""

    class Taken(cupy.cuda.MemoryHook):
        name, now, most = "Taken", 0, 0

        def malloc_postprocess(self, **of):
            self.now += of["mem_size"]
            self.most = max(self.most, self.now)

        def free_postprocess(self, **of):
            self.now -= of["mem_size"]

    layer = thdattn.CPAttention(Mirror(), 8, 128, kv_heads, engine="cuda", cp_comm_type=kind, keep_keys=keep_keys)
    batch = PackedBatch.from_lengths([5000, 300, 2000, 892], 4)
    q, k, v, dout = (cupy.asarray(np.ones((batch.total_rows // SIZE, heads, 128), BFLOAT16))
                     for heads in (8, kv_heads, kv_heads, 8))
    memory = layer.memory(batch, sharding)
    with Taken() as taken:
        plan = layer.plan(batch, sharding)
        _, saved = layer.forward(q, k, v, plan)
        layer.backward(dout, saved)
    assert taken.most <= 1.03 * memory.wanted() + (1 << 20)
