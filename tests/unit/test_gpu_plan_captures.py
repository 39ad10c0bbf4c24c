"""Plans that a captured graph makes, used outside of it: results are those of the lengths of the last replay.

Bit for bit, as pieces of keys that were made for other lengths would only change the order of sums.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16, FIELDS, Case, assemble, check, local_rows, on_host, random_inputs, step, to_host
from test_gpu_graph import Layer, check_arrays, host_batch
from ways import Way, attention

import thdattn

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

# So long that a forward divides keys, each in another way.
PACKS = (
    Case("capture-0", (300, 40, 200), padded=(304, 48, 200)),
    Case("capture-1", (1499, 0, 1), padded=(1500, 0, 4)),
    Case("capture-2", (1, 900, 400), padded=(4, 1000, 400)),
)
ROWS = 1504
# What comes after the capture and the first replay of a graph that makes the plan. "plan": a replay for the next pack.
SEQUENCES = [
    "eager, plan, eager, plan, eager",
    "eager, capture, plan, replay, eager, plan, replay",
    "capture, plan, eager, plan, replay",
    "capture, capture, plan, replay, eager, plan, replay",
    "capture, refresh, eager, replay, plan, eager, replay",
    "eager, capture refresh, eager, plan, eager, refresh again, eager, plan, eager",
    "capture refresh, eager, plan, eager, refresh again, eager",
    "capture, capture refresh, capture, plan, replay, refresh again, replay, plan, replay",
]


class Program(Layer):
    """Does steps of SEQUENCES, where "capture" is of a forward and a backward, of which the last is replayed first.

    Args:
        others: whether the graph that makes the plan also has calls with it, of a layer of fewer heads.
    """

    def __init__(self, cupy, others):
        super().__init__(cupy, rows=ROWS)
        self.seed, self.graphs, self.refreshes = 0, [], []
        self.eager()  # compiles and loads the kernels
        with self.stream:
            fewer = [x[:, : x.shape[1] // 2].copy() for x in self.inputs]
        self.planner, results = self.captured(lambda: self.make_plan(fewer if others else None))
        self.kept += [fewer, results]  # which the graph reads and writes
        self.come(self.planner)

    def make_plan(self, inputs):
        self.plan = self.attention.plan(self.batch())
        if inputs is None:
            return ()
        layer = thdattn.CPAttention(self.attention.comm, 2, 64, 1, engine="cuda", deterministic=True)
        *qkv, dout = inputs
        _, saved = layer.forward(*qkv, self.plan)
        return saved, layer.backward(dout, saved)

    def captured(self, function):
        with self.stream:
            self.stream.begin_capture()
            results = function()
            return self.stream.end_capture(), results

    def come(self, graph=None):
        """The next pack, planned by a graph or by a refresh."""
        self.seed += 1
        self.pack = PACKS[self.seed % len(PACKS)]
        self.set(self.pack, self.seed)
        with self.stream:
            if graph is None:
                self.plan.refresh()
            else:
                graph.launch(self.stream)

    def check(self, results):
        check_arrays(self.pack, results, self.seed)
        with self.stream:
            own, self.plan = self.plan, self.attention.plan(host_batch(self.pack, ROWS))
        wanted, self.plan = self.eager(), own
        for name, x, y in zip(FIELDS, results, wanted, strict=True):
            assert x.tobytes() == y.tobytes(), f"{name} of {self.pack}"

    def do(self, what):
        if what == "plan":
            self.come(self.planner)
        elif what == "eager":
            self.check(self.eager())
        elif what == "refresh":
            self.come()
        elif what == "capture":
            self.graphs.insert(0, self.captured(self.run))
            self.do("replay")
        elif what == "replay":
            for graph, results in self.graphs:
                for x in results:
                    x.data.memset_async(0xFF, x.nbytes, self.stream)
                self.check(self.replay(graph, results))
        elif what == "capture refresh":
            self.refreshes.append(self.captured(self.plan.refresh)[0])
            self.do("refresh again")
        elif what == "refresh again":
            for graph in self.refreshes:
                self.come(graph)


@pytest.mark.parametrize(("sequence", "others"), [*((x, False) for x in SEQUENCES), (SEQUENCES[0], True)])
def test_calls_outside_of_the_graph_that_makes_their_plan_find_its_last_lengths(cupy, sequence, others):
    program = Program(cupy, others)
    for what in sequence.split(", "):
        program.do(what)


WAYS = Way("all_gather", "dual_chunk", 2), Way("a2a", "dual_chunk", 2), Way("p2p", "dual_chunk", 2)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_ranks_exchange_follows_a_plan_that_a_graph_makes(cupy, way):
    cases = [replace(case, heads=way.heads) for case in PACKS]
    packs = [thdattn.PackedBatch(batch.cu_seqlens, batch.cu_seqlens_padded, total_rows=ROWS)
             for batch in map(way.batch, cases)]
    shardings = [thdattn.Sharding(pack, way.cp_size, way.sharding) for pack in packs]
    lengths = cupy.zeros((2, 4), np.int32)

    def program(comm):
        layer = attention(cases[0], way, comm, BFLOAT16, engine="cuda")
        batch = thdattn.PackedBatch(*lengths, total_rows=ROWS)

        def come(seed):
            comm.barrier()
            if comm.rank == 0:
                lengths[...] = cupy.asarray(np.stack([packs[seed].cu_seqlens, packs[seed].cu_seqlens_padded]))
            comm.barrier()

        def results(plan, seed):
            inputs, rows = random_inputs(cases[seed], BFLOAT16, seed), shardings[seed].rows(comm.rank)
            return on_host(step(layer, plan, [cupy.asarray(local_rows(packs[seed], rows, x, np.nan)) for x in inputs]))

        come(0)
        results(layer.plan(batch, way.sharding), 0)  # compiles and loads the kernels
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            plan = layer.plan(batch, way.sharding)
            graph = stream.end_capture()
            others = [cupy.full(size, 0xAB, np.uint8) for size in (512, 1024, 2048, 4096, 8192) for _ in range(16)]
            stream.synchronize()
        found = []
        for seed in range(len(packs)):
            come(seed)
            graph.launch(cupy.cuda.get_current_stream())
            found.append(results(plan, seed))
        return found, sum((to_host(x) != 0xAB).any() for x in others)

    ranks = thdattn.comm.run_local(way.cp_size, program)
    for seed, case in enumerate(cases):
        check(case, BFLOAT16, assemble(shardings[seed], [found[seed] for found, _ in ranks]), seed)
    assert [overwritten for _, overwritten in ranks] == [0, 0], "a graph wrote into arrays that were made after it"
