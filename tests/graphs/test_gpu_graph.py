"""Forward and backward, and the plan before them, captured in a CUDA graph and replayed with other numbers."""

from __future__ import annotations

import numpy as np
import pytest
from cases import BFLOAT16, FIELDS, Case, assemble, check, random_inputs, to_host, token_rows

import thdattn
from thdattn.packing import PackedBatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

ROWS = 700
# Packs of one number of sequences, as a graph has; unused ones have length 0.
PACKS = [
    Case("graph-0", (300, 40, 200), padded=(304, 48, 200)),
    Case("graph-1", (1, 500, 0), padded=(2, 600, 0)),
    Case("graph-2", (0, 0, 0), padded=(0, 0, 0)),
    Case("graph-3", (700, 0, 0), padded=(700, 0, 0)),
]


class Layer:
    """A layer on a stream of its own, with inputs that stay where they are."""

    def __init__(self, cupy, deterministic=True, plan_each_time=False, rows=ROWS):
        self.rows = rows
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.attention = PACKS[0].attention(
            thdattn.comm.init("single"), BFLOAT16, engine="cuda", deterministic=deterministic
        )
        self.plan_each_time = plan_each_time
        self.kept = []
        with self.stream:
            self.lengths = [cupy.zeros(4, np.int32) for _ in range(2)]
            self.inputs = [cupy.zeros((rows, *shape), BFLOAT16) for shape in PACKS[0].shapes().values()]
            self.set(PACKS[0], 0)
            self.plan = self.attention.plan(self.batch())

    def batch(self):
        return PackedBatch(*self.lengths, total_rows=self.rows)

    def set(self, case, seed):
        """Write a pack's lengths and its inputs, NaN in every row that holds no token."""
        batch = host_batch(case, self.rows)
        for there, here in zip(self.lengths, (batch.cu_seqlens, batch.cu_seqlens_padded), strict=True):
            there.set(np.array(here), self.stream)
        for there, tokens in zip(self.inputs, random_inputs(case, BFLOAT16, seed), strict=True):
            packed = np.full(there.shape, np.nan, BFLOAT16)
            packed[token_rows(batch)] = tokens
            there.set(packed, self.stream)
        self.stream.synchronize()

    def run(self):
        """Return out, lse, max_logit, dq, dk, dv."""
        if self.plan_each_time:
            self.plan = self.attention.plan(self.batch())
        q, k, v, dout = self.inputs
        out, saved = self.attention.forward(q, k, v, self.plan, return_max_logit=True)
        return out, saved.lse, saved.max_logit, *self.attention.backward(dout, saved)

    def eager(self):
        with self.stream:
            results = self.run()
            self.stream.synchronize()
        return [to_host(x) for x in results]

    def capture(self):
        """Return the graph, and the arrays it writes. The eager run before it compiles and loads the kernels."""
        with self.stream:
            self.run()
            self.stream.synchronize()
            self.stream.begin_capture()
            results = self.run()
            graph = self.stream.end_capture()
        self.kept.append(self.plan)  # the graph writes into its buffers
        return graph, results

    def replay(self, graph, results):
        graph.launch(self.stream)
        self.stream.synchronize()
        return [to_host(x) for x in results]


def host_batch(case, rows):
    batch = case.batch(1)
    return PackedBatch(batch.cu_seqlens, batch.cu_seqlens_padded, total_rows=rows)


def check_arrays(case, arrays, seed):
    """Compare packed results with the oracle."""
    sharding = thdattn.Sharding(host_batch(case, len(arrays[0])), 1, "contiguous")
    check(case, BFLOAT16, assemble(sharding, [dict(zip(FIELDS, arrays, strict=True))]), seed)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("plan_each_time", [True, False])
def test_replays_with_other_inputs_and_lengths_are_the_eager_results(cupy, deterministic, plan_each_time):
    """Sums of any order start anew at every replay."""
    layer = Layer(cupy, deterministic, plan_each_time)
    graph, results = layer.capture()
    for seed, case in enumerate([*PACKS[1:], *PACKS] if plan_each_time else PACKS[:1] * 3, 1):
        layer.set(case, seed)
        replayed = layer.replay(graph, results)
        check_arrays(case, replayed, seed)
        if deterministic:
            for x, y in zip(replayed, layer.eager(), strict=True):
                assert x.tobytes() == y.tobytes()


def test_replays_with_wrong_lengths_are_nan_and_those_after_them_right(cupy):
    layer = Layer(cupy, plan_each_time=True)
    graph, results = layer.capture()
    for seed, case in enumerate(PACKS, 1):
        layer.set(case, seed)
        layer.lengths[0].set(np.array([0, 300, 200, 400], np.int32), layer.stream)
        for x in layer.replay(graph, results):
            assert np.isnan(x.astype(np.float32)).all()
        with layer.stream, pytest.raises(ValueError, match=r"cu_seqlens decreases from 300 at index 1 to 200"):
            layer.plan.check()
        layer.set(case, seed)
        check_arrays(case, layer.replay(graph, results), seed)
        with layer.stream:
            layer.plan.check()


def test_plan_made_before_the_capture_serves_it(cupy):
    """A plan of lengths on the GPU that were there when it was made, used by a graph of two layers."""
    layer = Layer(cupy)
    with layer.stream:
        layer.run()
        layer.stream.synchronize()
        layer.stream.begin_capture()
        first, second = layer.run(), layer.run()
        graph = layer.stream.end_capture()
    layer.set(PACKS[0], 5)
    check_arrays(PACKS[0], layer.replay(graph, first), 5)
    for x, y in zip(first, second, strict=True):
        assert to_host(x).tobytes() == to_host(y).tobytes()


@pytest.mark.parametrize("plan_each_time", [False, True])
def test_replay_writes_to_no_memory_that_went_back_to_the_pool(cupy, plan_each_time):
    """An array made after the capture, on the same stream, must not be where the graph has its work buffers.

    With as many rows, no work buffer of the plan is so small that a result happens to take its place.
    """
    layer = Layer(cupy, plan_each_time=plan_each_time, rows=40_000)
    graph, results = layer.capture()
    with layer.stream:
        others = [cupy.full(size, 0xAB, np.uint8)
                  for size in (16, 512, 1024, 2048, 4096, 8192, 2**14, 2**16, 2**18, 2**20) for _ in range(8)]
        layer.stream.synchronize()
    layer.set(PACKS[0], 3)
    check_arrays(PACKS[0], layer.replay(graph, results), 3)
    overwritten = [x.size for x in others if (to_host(x) != 0xAB).any()]
    assert not overwritten, f"the graph wrote into arrays of {overwritten} bytes that were made after it"


@pytest.mark.parametrize("on_device", [False, True])
def test_what_a_capture_first_makes_of_a_plan_is_not_there_before_its_replay(cupy, on_device):
    """Calls outside of graphs come first, and then the graph that was captured last: none waits for another."""
    layer, graphs = Layer(cupy), []

    def make_plan():
        layer.kept.append(layer.plan)
        with layer.stream:
            layer.plan = layer.attention.plan(layer.batch() if on_device else host_batch(PACKS[0], ROWS))

    make_plan()
    layer.eager()  # compiles and loads the kernels
    make_plan()
    with layer.stream:
        for size in [2**i for i in range(9, 21)]:  # what the next arrays begin with
            [cupy.full(size, 0xAB, np.uint8) for _ in range(16)]
        for _ in range(2):
            layer.stream.begin_capture()
            results = layer.run()
            graphs.insert(0, (layer.stream.end_capture(), results))
    layer.set(PACKS[0], 1)
    for _ in range(2):
        check_arrays(PACKS[0], layer.eager(), 1)
        for graph, results in graphs:
            check_arrays(PACKS[0], layer.replay(graph, results), 1)
