"""What CPAttention.memory says of the CUDA engine is what it allocates, by the pool and by peer memory."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("cupy")  # which peer memory loads
import numpy as np
from loopback import Loopback, Mirror

import thdattn
from thdattn import PackedBatch
from thdattn.comm.overlap import layout
from thdattn.comm.peer import windows
from thdattn.methods import select

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, SIZE = 8, 4, 2
PACKS = {
    "padding": PackedBatch.from_lengths([700, 31, 900], multiple=4),
    "full": PackedBatch.from_lengths([512, 1024]),
    "trees": PackedBatch.from_trees([300, 150, 0, 400, 31], [-1, 0, 1, 0, -1], multiple=4),
}
SEEN_ELSEWHERE = {  # made by CuPy's own functions, in windows, or of the caller
    "order of tiles", "copies to send", "sums", "windows of keys", "windows of sums", "pulled sums",
    "q", "k", "v",
}


class Bytes:
    """Bytes of every array that launch.empty has made, and of those that made way for others, counted once."""

    def __init__(self, monkeypatch):
        from thdattn.engines import cuda
        from thdattn.engines.cuda import launch

        self.made, original = [], launch.empty

        def empty(shape, dtype):
            array = original(shape, dtype)
            self.made.append(array)  # held, so that all are there at a time
            return array

        for module in (cuda, launch):
            monkeypatch.setattr(module, "empty", empty)

    def total(self):
        return sum(array.nbytes for array in self.made)


def step(cupy, layer, plan):
    shapes = ((HEADS, layer.head_dim), (KV_HEADS, layer.head_dim), (KV_HEADS, layer.v_head_dim),
              (HEADS, layer.v_head_dim))
    q, k, v, dout = (cupy.zeros((plan.local_rows, *shape), layer.dtype) for shape in shapes)
    _, saved = layer.forward(q, k, v, plan)
    layer.backward(dout, saved)


def said(memory):
    return sum(size for name, size in memory.items() if name not in SEEN_ELSEWHERE)


def by_cupy(plan, memory, layer):
    """What is counted with other buffers, but is not made by launch.empty: offsets, nodes, and an order of rows."""
    order = 4 * plan.local_rows if "q and dout without padding" in memory else 0
    nodes = plan.arrays.nodes.nbytes if plan.has_trees else 0
    return plan.arrays.offsets.nbytes + nodes + order


def exchange(comm, layer):
    """Numbers of a loopback are those of its peer memory."""
    comm.gather_bytes = comm.peer.gather_bytes
    comm.sum_bytes, comm.held_bytes = comm.peer.sum_bytes, comm.peer.held_bytes
    return layer


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("pack", PACKS)
def test_one_rank_allocates_what_is_said(cupy, monkeypatch, pack, dims, deterministic):
    layer = thdattn.CPAttention(thdattn.comm.init("single"), HEADS, dims[0], KV_HEADS, dims[1], engine="cuda",
                                deterministic=deterministic)
    batch = copy.copy(PACKS[pack])  # shares nothing with other tests
    memory, made = layer.memory(batch), Bytes(monkeypatch)
    plan = layer.plan(batch)
    step(cupy, layer, plan)
    assert made.total() + by_cupy(plan, memory, layer) == said(memory)


@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("pack", PACKS)
def test_ranks_with_collectives_allocate_what_is_said(cupy, monkeypatch, pack, deterministic, keep_keys):
    layer = thdattn.CPAttention(Mirror(), HEADS, 128, KV_HEADS, engine="cuda", deterministic=deterministic,
                                keep_keys=keep_keys)
    batch = copy.copy(PACKS[pack])
    memory, made = layer.memory(batch), Bytes(monkeypatch)
    plan = layer.plan(batch)
    step(cupy, layer, plan)
    again = len(made.made)
    step(cupy, layer, plan)
    results = sum(memory[name] for name in ("out", "lse", "dq", "dk", "dv", "partial sums"))
    results += memory.get("kept keys", 0) + memory.get("partial sums of dk and dv", 0)
    assert sum(x.nbytes for x in made.made[again:]) == results
    assert made.total() - results + by_cupy(plan, memory, layer) == said(memory)


@pytest.mark.parametrize("head_groups", [1, 2, 4, None])
@pytest.mark.parametrize("pack", PACKS)
def test_peer_memory_takes_what_is_said(cupy, monkeypatch, pack, head_groups):
    monkeypatch.setattr(select, "WORTH_GROUPS", 0)  # by default, groups of 1, 1 and 2 kv heads
    with cupy.cuda.Stream(non_blocking=True):
        comm = Loopback(monkeypatch)
        layer = exchange(comm, thdattn.CPAttention(comm, HEADS, 128, KV_HEADS, engine="cuda", keep_keys=False,
                                                   head_groups=head_groups))
        batch = copy.copy(PACKS[pack])
        memory, made = layer.memory(batch), Bytes(monkeypatch)
        plan = layer.plan(batch)
        for _ in range(2):
            step(cupy, layer, plan)
        results = sum(memory[name] for name in ("out", "lse", "dq", "dk", "dv"))
        assert made.total() - results + by_cupy(plan, memory, layer) == said(memory)
        assert comm.held_bytes() == {name: memory[name] for name in memory if name.startswith(("windows", "pulled"))}
        for name, pair in comm.peer._memory._pairs.items():
            assert all(window._memory.size == window._header + window.num_bytes for window in pair.windows)
            assert memory[name] == sum(window._memory.size for window in pair.windows)
        assert ("pulled sums" in memory) == (head_groups != 1)
        comm.peer.close()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("ranks", [1, SIZE])
def test_a_mixer_allocates_what_is_said(cupy, monkeypatch, kernels, ranks, keep):
    comm = Mirror() if ranks > 1 else thdattn.comm.init("single")
    mixer = thdattn.Mamba2Mixer(comm, 8, 64, 128, engine="cuda", keep_activations=keep)
    shape, batch = mixer._shape, PackedBatch.from_lengths([700, 31, 2900, 5000], multiple=2)
    memory, made = mixer.memory(batch), Bytes(monkeypatch)
    plan = mixer.plan(batch)
    zxbcdt, dout = (cupy.zeros((plan.local_rows, width), shape.dtype) for width in (shape.columns, shape.d_inner))
    weights = thdattn.Mamba2Weights(*(cupy.zeros(of_one, np.float32) for of_one in shape.weights))
    _, saved = mixer.forward(zxbcdt, weights, plan)
    mixer.backward(dout, saved)
    assert made.total() + plan.arrays.offsets.nbytes == said(memory) - memory["zxbcdt"]


def test_a_batch_larger_than_the_gpu_is_refused(cupy):
    _, total = cupy.cuda.runtime.memGetInfo()
    layer = thdattn.CPAttention(Mirror(), 64, 128, 64, engine="cuda")
    rows = 4 * (total // (64 * 128 * 2 * 4 * 4))
    with pytest.raises(ValueError, match=r"rank 0: the batch needs .* GiB of GPU memory .*; rank 1: the batch needs"):
        layer.plan(PackedBatch.from_lengths([rows]))
    assert layer.plan(PackedBatch.from_lengths([1024])).local_rows == 512


def test_no_room_is_asked_for_while_a_graph_is_captured(cupy, monkeypatch):
    from thdattn.engines.cuda import launch

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        assert launch.free_bytes(1 << 60) is not None
        assert launch.free_bytes(1) is None
        stream.begin_capture()
        try:
            assert launch.free_bytes(1 << 60) is None
        finally:
            stream.end_capture()
    cupy.cuda.runtime.deviceSynchronize()


def test_peer_windows_are_rounded_up_as_said():
    assert layout.rounded_up(3 << 20) == 3 << 20 and windows.header_bytes(SIZE) == 33280
