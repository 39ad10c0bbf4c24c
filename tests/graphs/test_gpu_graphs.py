"""CUDA graphs on a GPU: replays are the eager results bit for bit, and memory, streams, errors and ends of programs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from cases import BFLOAT16, to_host
from launch import run_gpu_ranks
from loopback import Mirror
from ranks import graph_ranks
from ranks.graph_ranks import MASKS, MAX_SEQS, ROWS
from ways import Way, ways

import thdattn
from thdattn import PackedBatch, Sharding
from thdattn.graphs import CudaGraphConfig, Graphs, StaticPack
from thdattn.plan.ranges import host_arrays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

PROGRAM = Path(graph_ranks.__file__)
alone = pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other workers use the same GPU's memory")


@pytest.fixture
def graphs(cupy, comm):
    """Make graphs with one eager run before the capture, on a stream that is current."""
    with cupy.cuda.Stream(non_blocking=True), Graphs(comm, config()) as graphs:
        yield graphs


def config(**options):
    return CudaGraphConfig(**{"impl": "local", "max_packed_seqs": MAX_SEQS, "warmup_steps": 1} | options)


# --- bit for bit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("mask", [*MASKS, graph_ranks.TREES])
def test_fifty_packs_through_one_graph_are_the_eager_results(cupy, comm, mask, dims):
    graph_ranks.replay_packs(comm, cupy, mask, dims, "dual_chunk")


def test_a_padded_pack_gives_its_tokens_the_bits_of_the_exact_one(cupy, comm, graphs):
    attention = thdattn.CPAttention(comm, 4, 64, 2, engine="cuda", deterministic=True)
    pack = StaticPack(graphs, [attention], ROWS)
    shapes = [(4, 64), (2, 64), (2, 64), (4, 64)]
    for number, batch in enumerate(graph_ranks.packs(1, 12)):
        if not pack.fits([batch]) or not batch.total_rows:
            continue
        pack.load([batch])
        results = []
        for plan in (attention.plan(batch), pack.plans()[0]):
            rows = to_host(plan.rows)
            here = batch if plan.batch is batch else pack.padded(batch)
            q, k, v, dout = graph_ranks.inputs_of(cupy, here, rows, shapes, number)
            out, saved = attention.forward(q, k, v, plan)
            results.append([to_host(x)[: batch.total_rows] for x in (out, *attention.backward(dout, saved))])
        for x, y in zip(*results, strict=True):
            assert x.tobytes() == y.tobytes()


# --- plans -------------------------------------------------------------------------------------------------------


def rewrite(cupy, comm, together, batch):
    """Write a pack's lengths on rank 0 to where the plans of all ranks read them, while none does."""
    comm.barrier()
    if comm.rank == 0:
        missing = (0, MAX_SEQS - batch.num_seqs)
        offsets = [np.pad(x, missing, "edge") for x in (batch.cu_seqlens, batch.cu_seqlens_padded)]
        together[...] = cupy.asarray(np.stack(offsets))
    comm.barrier()


def test_plans_of_a_static_pack_are_the_hosts_element_by_element(cupy, comm):
    graph_ranks.check_plans(comm, cupy, "dual_chunk")
    graph_ranks.check_plans(comm, cupy, "dual_chunk", masks=(graph_ranks.TREES,))


@pytest.mark.parametrize("sharding", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_a_refreshed_plan_of_simulated_ranks_is_the_hosts(cupy, cp_size, sharding):
    from thdattn.engines.cuda.backward import partials_per_tile

    batches = graph_ranks.packs(cp_size, 12)
    made = [batch for batch in batches if batch.num_seqs <= MAX_SEQS and batch.total_rows <= ROWS]
    # Rows of one array, of which the second is not aligned to 16 bytes, and columns, which are strided.
    for order in ("rows", "columns"):
        together = cupy.zeros((2, MAX_SEQS + 1), np.int32)
        if order == "columns":
            together = cupy.zeros((MAX_SEQS + 1, 2), np.int32).T

        def program(comm, together=together):
            attention = thdattn.CPAttention(comm, 2, 64, window=(70, 0), engine="cuda")
            plan = attention.plan(PackedBatch(*together, total_rows=ROWS), sharding)
            shares = partials_per_tile(plan)
            for batch in made:
                rewrite(cupy, comm, together, batch)
                plan.refresh()
                padded = PackedBatch(batch.cu_seqlens, batch.cu_seqlens_padded, total_rows=ROWS)
                shared = Sharding(padded, cp_size, sharding)
                wanted = host_arrays(shared, comm.rank, plan.window, plan.tiles)
                for field, x in vars(wanted).items():
                    if x is not None:
                        np.testing.assert_array_equal(to_host(getattr(plan.arrays, field)), x, field)
                np.testing.assert_array_equal(
                    to_host(shares), to_host(partials_per_tile(attention.plan(padded, shared)))
                )

        thdattn.comm.run_local(cp_size, program)


@pytest.mark.parametrize("way", [
    Way("all_gather", "contiguous", 2), Way("a2a", "contiguous", 2), Way("a2a+all_gather", "contiguous", 6, 2),
    *(way for way in ways((2, 2), sizes=(4,), heads=(4,)) if way.sharding != "balanced"),
], ids=str)
def test_what_ranks_exchange_follows_lengths_on_the_gpu(cupy, way):
    """After every refresh, results are those of a plan of the host, bit for bit; with the first pack's calls before."""
    heads, packs = way.heads, [batch for batch in graph_ranks.packs(way.cp_size, 8)
                               if batch.num_seqs <= MAX_SEQS and batch.total_rows <= ROWS]
    together = cupy.zeros((2, MAX_SEQS + 1), np.int32)
    shapes = [(heads[0], 64), (heads[1], 64), (heads[1], 64), (heads[0], 64)]

    def program(comm):
        attention = thdattn.CPAttention(way.comm(comm), heads[0], 64, heads[1], window=(70, 0), engine="cuda",
                                        deterministic=True, cp_comm_type=way.cp_comm_type)
        plan = attention.plan(PackedBatch(*together, total_rows=ROWS), way.sharding)
        for seed, batch in enumerate(packs):
            rewrite(cupy, comm, together, batch)
            plan.refresh()
            padded = PackedBatch(batch.cu_seqlens, batch.cu_seqlens_padded, total_rows=ROWS)
            wanted = attention.plan(padded, way.sharding)
            q, k, v, dout = graph_ranks.inputs_of(cupy, padded, wanted.sharding.rows(comm.rank), shapes, seed)
            for name in ("rows", "positions", "valid", "key_ranges"):
                assert to_host(getattr(plan, name)).tobytes() == to_host(getattr(wanted, name)).tobytes(), name
            found = []
            for each in (plan, wanted):
                out, saved = attention.forward(q, k, v, each, return_max_logit=True)
                found.append([to_host(x).tobytes()
                              for x in (out, saved.lse, saved.max_logit, *attention.backward(dout, saved))])
            assert found[0] == found[1], f"pack {seed}, {batch}"
            plan.check()

    thdattn.comm.run_local(way.cp_size, program)


@pytest.mark.parametrize("way", [
    Way("all_gather", "balanced", 2), Way("p2p", "balanced", 3), Way("a2a+all_gather", "balanced", 4, 2),
    Way("a2a+p2p", "balanced", 4, 2), Way("a2a+all_gather", "balanced", 6, 2),
], ids=str)
@pytest.mark.parametrize("mask", [*MASKS, graph_ranks.TREES])
def test_balanced_rows_follow_the_tables_of_their_capacity(cupy, way, mask):
    """Of simulated ranks, which capture nothing: results are those of a plan of the host, bit for bit."""
    heads, (drawn, room) = way.heads, graph_ranks.packs_of(mask)
    shapes = [(heads[0], 64), (heads[1], 64), (heads[1], 64), (heads[0], 64)]

    def program(comm):
        attention = thdattn.CPAttention(way.comm(comm), heads[0], 64, heads[1], engine="cuda", deterministic=True,
                                        cp_comm_type=way.cp_comm_type, **MASKS.get(mask, {}))
        graphs, served = Graphs(comm, config(**room)), 0
        graphs.active = True
        pack = StaticPack(graphs, [attention], ROWS, way.sharding)
        (capacity,) = pack.balanced.values()
        for seed, batch in enumerate(drawn(way.cp_size, 10)):
            if not pack.fits([batch]):
                continue
            pack.load([batch])
            (plan,), shared, served = pack.plans(), pack.sharding(batch), served + 1
            fixed = Sharding(shared.batch, way.cp_size, "balanced", way.inner or 1, capacity)
            between, other = plan.core or plan, fixed.outer or fixed
            for field, x in vars(host_arrays(other, between.cp_rank, plan.window, plan.tiles)).items():
                if x is not None:
                    np.testing.assert_array_equal(to_host(getattr(between.arrays, field)), x, field)
            q, k, v, dout = graph_ranks.inputs_of(cupy, shared.batch, shared.rows(comm.rank), shapes, seed)
            found = []
            for each in (plan, attention.plan(shared.batch, shared)):
                out, saved = attention.forward(q, k, v, each, return_max_logit=True)
                found.append([to_host(x).tobytes()
                              for x in (out, saved.lse, saved.max_logit, *attention.backward(dout, saved))])
            assert found[0] == found[1], f"pack {seed}, {batch}"
        assert served == 8

    thdattn.comm.run_local(way.cp_size, program)


@pytest.mark.parametrize(("mask", "sharding"), graph_ranks.RINGS)
def test_a_ring_is_captured(cupy, mask, sharding):
    """Of two ranks with the same rows, so that a copy is as good as an exchange."""
    graph_ranks.replay_packs(Mirror(), cupy, mask, (128, 128), sharding, 30, {"cp_comm_type": "p2p"})


def test_a_plan_of_the_host_cannot_be_refreshed(cupy, comm):
    plan = thdattn.CPAttention(comm, 2, 64, engine="cuda").plan(PackedBatch([0, 5]))
    with pytest.raises(ValueError, match="plan was made from lengths on the host, wanted lengths on a GPU"):
        plan.refresh()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_backward_behind_another_micro_batch_is_refused(cupy, comm, graphs, captured, steps):
    """After so many right steps, of which the first is eager and the second one captured."""
    attention = thdattn.CPAttention(comm, 4, 64, 2, engine="cuda", deterministic=True)
    pack = StaticPack(graphs, [attention], 128, num_batches=2)
    pair = graphs.pair(lambda q, k, v: attention.forward(q, k, v, pack.plans()[0]), attention.backward, "layer")
    forward = pair.forward if captured else pair.forward.eager
    batches = [PackedBatch.from_lengths([100, 28]), PackedBatch.from_lengths([8, 120])]
    q, k, v, dout = (cupy.full((128, heads, 64), 0.5, BFLOAT16) for heads in (4, 2, 2, 4))
    for _ in range(steps):
        pack.load(batches)
        _, saved = forward(q, k, v)
        pair.backward(dout, saved)
    pack.load(batches)
    _, saved = forward(q, k, v)
    (second,) = pack.plans(1)
    with pytest.raises(ValueError, match="was made for lengths that the plan no longer has, wanted those of its last"):
        pair.backward(dout, saved)
    _, saved = attention.forward(q, k, v, second)
    found = attention.backward(dout, saved)
    _, saved = attention.forward(q, k, v, attention.plan(pack.padded(batches[1])))
    for x, wanted in zip(found, attention.backward(dout, saved), strict=True):
        assert to_host(x).tobytes() == to_host(wanted).tobytes()


# --- memory ------------------------------------------------------------------------------------------------------


def fill_free_memory(cupy, graphs):
    """Write NaN to all memory of the graphs' pools that nobody holds: replays use it."""
    stream = cupy.cuda.get_current_stream()
    stream.synchronize()
    for pool in graphs._pools:
        held = []
        with cupy.cuda.using_allocator(pool.malloc), graphs._stream:
            for size in (2**power for power in range(30, 8, -1)):
                while pool.free_bytes() >= size:
                    before = pool.total_bytes()
                    held.append(cupy.full(size, 0xFF, np.uint8))
                    if pool.total_bytes() > before:  # none so large was free
                        break
        graphs._stream.synchronize()
        del held


def chain(cupy, number):
    """Compute a function with temporaries of many sizes."""

    def function(x):
        for i in range(1, 6):
            wide = x[:, None] + cupy.full((1, i, 1), number, np.float32)
            x = x + wide.sum(axis=1) * 1e-3
        return x * 2

    return function


def test_graphs_of_one_pool_keep_each_others_results(cupy, graphs):
    functions = [chain(cupy, number) for number in range(4)]
    captured = [graphs.captured(function, str(number)) for number, function in enumerate(functions)]
    rng = np.random.default_rng(0)
    for step in range(6):
        x = y = cupy.asarray(rng.standard_normal((4096, 64), np.float32))
        results, wanted = [], []
        for graph, function in zip(captured, functions, strict=True):
            x, y = graph(x), function(y)
            results.append(x)
            wanted.append(y)
        for found, right in zip(results, wanted, strict=True):  # not before the last one has run
            assert to_host(found).tobytes() == to_host(right).tobytes(), f"step {step}"
        fill_free_memory(cupy, graphs)
    assert len(graphs._pools) == 1
    total = graphs._pools[0].total_bytes()
    assert graphs._pools[0].used_bytes() < total, "temporaries are shared"


@pytest.mark.parametrize("default_stream", [False, True])
def test_replays_write_to_no_memory_outside(cupy, comm, graphs, default_stream):
    """Arrays made after the capture are not where a graph has its inputs, temporaries, results or work buffers."""
    attention = thdattn.CPAttention(comm, 4, 64, 2, engine="cuda", deterministic=True)
    rows = 40_000  # no work buffer is so small that a result happens to take its place
    pack = StaticPack(graphs, [attention], rows)
    pair = graphs.pair(lambda q, k, v: attention.forward(q, k, v, pack.plans()[0]), attention.backward, "layer")
    shapes = [(4, 64), (2, 64), (2, 64), (4, 64)]

    def step(lengths, seed):
        batch = PackedBatch.from_lengths(lengths)
        pack.load([batch])
        shared = pack.sharding(batch)
        q, k, v, dout = graph_ranks.inputs_of(cupy, shared.batch, shared.rows(0), shapes, seed)
        out, saved = pair.forward(q, k, v)
        found = [to_host(x) for x in (out, *pair.backward(dout, saved))]
        out, saved = attention.forward(q, k, v, attention.plan(shared.batch, shared))
        wanted = [to_host(x) for x in (out, *attention.backward(dout, saved))]
        assert all(x.tobytes() == y.tobytes() for x, y in zip(found, wanted, strict=True))

    for seed in range(2):
        step([300, 5, 39_000], seed)
    with cupy.cuda.Stream.null if default_stream else cupy.cuda.get_current_stream():
        others = [cupy.full(size, 0xAB, np.uint8)
                  for size in (16, 512, 1024, 2048, 4096, 8192, 2**14, 2**16, 2**18, 2**20, 2**23) for _ in range(8)]
    cupy.cuda.Device().synchronize()
    for seed in range(2, 4):
        step([7, 39_990], seed)
    overwritten = [x.size for x in others if (to_host(x) != 0xAB).any()]
    assert not overwritten, f"a graph wrote into arrays of {overwritten} bytes that were made after it"


@alone
def test_memory_that_eager_runs_left_behind_serves_captures(cupy, graphs):
    captured = graphs.captured(lambda x: cupy.full(2**30, 3, np.uint8)[:8] + x, "large")
    given = cupy.ones(8, np.uint8)
    captured(given)
    cupy.get_default_memory_pool().free_all_blocks()
    hoard = cupy.empty(cupy.cuda.runtime.memGetInfo()[0] - 2**29, np.uint8)
    del hoard  # CuPy's pool has it all
    for _ in range(2):
        assert to_host(captured(given)).tolist() == [4] * 8
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("single_pool", [True, False])
def test_results_outlive_their_graphs(cupy, comm, single_pool):
    with cupy.cuda.Stream(non_blocking=True):
        graphs = Graphs(comm, config(single_pool=single_pool))
        captured = [graphs.captured(lambda x, n=n: x + n, str(n)) for n in range(3)]
        for _ in range(3):
            results = [function(cupy.zeros(2**20, np.float32)) for function in captured]
        graphs.close()
        del graphs, captured
        others = [cupy.full(2**20, 7, np.float32) for _ in range(8)]
        for n, x in enumerate(results):
            assert (to_host(x) == n).all()
        assert len(others) == 8


# --- streams, arguments, errors ----------------------------------------------------------------------------------


def test_a_replay_on_another_stream_waits_for_the_one_before_and_for_who_reads_it(cupy, graphs):
    def slow(x):
        for _ in range(300):
            x = x * 1.0 + 1.0
        return x

    captured = graphs.captured(slow, "slow")
    inputs = [cupy.full(2**22, value, np.float32) for value in (0, 1000, 5000)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in inputs]
    cupy.cuda.Device().synchronize()
    for _ in range(10):
        read = []
        for stream, x in zip(streams, inputs, strict=True):
            with stream:
                read.append(captured(x).copy())
        cupy.cuda.Device().synchronize()
        for x, y in zip(read, inputs, strict=True):
            assert (to_host(x) == to_host(y)[0] + 300).all()


def test_replays_on_the_default_stream_copy_strided_arguments(cupy, comm):
    with Graphs(comm, config()) as graphs:
        captured = graphs.captured(lambda x: x + 1, "f")
        for i in range(5):
            x = cupy.full((4, 2), i, np.float32)
            assert to_host(captured(x)).tolist() == [[i + 1] * 2] * 4
        given = cupy.arange(8, dtype=np.float32).reshape(2, 4).T
        assert to_host(captured(given)).tolist() == (to_host(given) + 1).tolist()


@pytest.mark.parametrize("how", ["raises", "waits", "reads"])
def test_a_capture_that_fails_leaves_everything_usable(cupy, comm, graphs, how):
    attention = thdattn.CPAttention(comm, 2, 64, engine="cuda", deterministic=True)
    plan = attention.plan(PackedBatch([0, 5, 64]))
    wrong = []

    def function(q):
        out, saved = attention.forward(q, q, q, plan)
        dq, _, _ = attention.backward(out, saved)
        if wrong and how == "raises":
            raise KeyError("mine")
        if wrong and how == "waits":
            cupy.cuda.get_current_stream().synchronize()
        if wrong and how == "reads":
            out.get()
        return out, dq

    captured, other = graphs.captured(function, "f"), graphs.captured(lambda x: x + 1, "g")
    q = cupy.asarray(np.random.default_rng(0).standard_normal((64, 2, 64), np.float32).astype(BFLOAT16))
    wanted = [x.tobytes() for x in map(to_host, captured(q))]
    other(q)
    wrong.append(True)
    stream = cupy.cuda.get_current_stream()
    # CUDARuntimeError is a RuntimeError; CuPy itself refuses to copy to the host.
    with pytest.raises(KeyError if how == "raises" else RuntimeError, match=r"(?i)mine|captur"):
        captured(q)
    assert cupy.cuda.get_current_stream() == stream and not stream.is_capturing() and not graphs.is_capturing()
    wrong.clear()
    for _ in range(3):
        assert [x.tobytes() for x in map(to_host, captured.eager(q))] == wanted
        assert [x.tobytes() for x in map(to_host, captured(q))] == wanted
        assert to_host(other(q)).tobytes() == to_host(q + 1).tobytes()


def test_a_captured_function_in_a_capture_becomes_part_of_it(cupy, graphs):
    """In that of another captured function, and in one that is made by hand."""
    inner = graphs.captured(lambda x: x + 1, "inner")
    outer = graphs.captured(lambda x: inner(inner(x)) * 2, "outer")
    for i in range(4):
        x = cupy.full(3, i, np.float32)
        assert to_host(outer(x)).tolist() == [2 * (i + 2)] * 3
    stream = cupy.cuda.get_current_stream()
    stream.begin_capture()
    out = outer(x)
    graph = stream.end_capture()
    x.fill(5)
    graph.launch(stream)
    assert to_host(out).tolist() == [14] * 3


# --- the end -----------------------------------------------------------------------------------------------------

# Ranks and scenario of a program, and what is said where it fails; it ends by itself.
ENDS = [
    *((n, scenario, "") for n in (1, 2) for scenario in ("exit", "graphs-first", "comm-first", "capture-raises")),
    (1, "cold", ""), (2, "cold", "use warmup_steps of 1 or more"),
    *((n, "raise", "RuntimeError: of every rank") for n in (1, 2)),
    *((n, "raise-on-one", "RuntimeError: of the last rank") for n in (1, 2)),
    *(pytest.param(n, "cycles", "", marks=alone) for n in (1, 2)),  # memory stays flat
    *((n, scenario, "") for n in (2, 4) for scenario in graph_ranks.SCENARIOS),
]


@pytest.mark.parametrize(("n", "scenario", "error"), ENDS)
def test_a_program_with_collectives_in_graphs_exits_by_itself(cupy, n, scenario, error):
    finished = run_gpu_ranks(cupy, n, PROGRAM, scenario, str(n), timeout=300)
    assert (finished.returncode != 0) == bool(error), finished.stderr
    assert finished.stdout.count(f"{scenario} done") == (0 if error else n) and error in finished.stderr
