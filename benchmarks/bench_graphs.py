"""Time CUDA graphs of an attention layer and of a mixer, forward and backward, beside the same calls without graphs.

    python benchmarks/bench_graphs.py
    mpiexec -n 2 python -m mpi4py benchmarks/bench_graphs.py

Times are between events on the GPU, of calls as a program makes them, so that a slow host shows; of several ranks the
slowest counts. Padding holds finite numbers, as in a model, so that no way copies inputs without it. A run replaces the
rows of its GPU and number of ranks in results/graphs_GPU.csv. The ways:

eager           kernel by kernel, with a plan of exactly this pack made on the host
eager_static    kernel by kernel, with the plan of a static pack, whose lengths only the GPU knows
local           a forward and a backward graph, on arrays that graphs own
full_iteration  one graph of both

Of several ranks it also times how a captured pack of balanced rows takes a new layout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import cupy
import numpy as np
import record
import tables
import timing
from mamba_cases import MixerCase, draw
from peers import RELATIVE_ERROR, draw_inputs
from workloads import PACK_TOKENS, Case, document_pack

import thdattn
from thdattn import PackedBatch
from thdattn.graphs import CudaGraphConfig, Graphs, StaticPack

SHORT = {"8x1024": (1_024,) * 8, "64x128": (128,) * 64}
LONG = {"1x16384": (16_384,), "doc64k": document_pack()}
ROWS = {"doc64k": PACK_TOKENS}  # with padding at the end, as in training; other packs are full
HEADS = ((8, 8), (16, 4))  # query and kv heads
SLOTS = (16, 64, 512)  # for 16 documents
BALANCED = ("8x1024", "doc64k")  # packs that take new layouts, with BALANCED_SLOTS
BALANCED_SLOTS = 256
HOST_CALLS = 10  # timed on the host in a round
KEY = ("gpu", "ranks", "case", "heads", "kv_heads", "way")
Call = Callable[[], object]


def main() -> int:
    args = parse_arguments()
    with thdattn.comm.init("auto") as comm, cupy.cuda.Stream(non_blocking=True):
        rows = [row for case in cases(args.cases) for row in layer_rows(comm, Layer(comm, case), args.repeats)]
        for name in args.cases:
            rows += layer_rows(comm, MixerLayer(comm, MixerCase(name, (SHORT | LONG)[name])), args.repeats)
        rows += slot_rows(comm, args.repeats)
        for name in BALANCED if comm.size > 1 else ():
            rows += layout_rows(comm, name, args.repeats)
        if comm.rank:
            return 0
    records = record.Recorder("graphs", args.out, KEY, comm.size, {"ranks": str(comm.size)})
    records.add(rows)
    records.show(tables.graphs)
    return 0


def cases(names: Sequence[str]) -> Iterator[Case]:
    """Yield every pack in every head layout."""
    for name in names:
        for heads, kv_heads in HEADS:
            yield Case(name, (SHORT | LONG)[name], heads, kv_heads)


class Layer:
    """Attention layer on this rank's rows of a case.

    Attributes:
        computes: the attention, or another object with forward and backward.
        batch: the pack with the rows of ROWS, and with the padding that several ranks need.
        columns, flops: columns of a record, and operations; None: a speed makes no sense.
        given, dout: arguments of forward and backward, on this rank's rows.
        gradients: names of the gradients that are checked.
    """

    gradients: tuple[str, ...] = ("dq", "dk", "dv")
    flops: float | None = None

    def __init__(self, comm: thdattn.comm.Comm, case: Case) -> None:
        self._set(case, comm, case.attention("cuda", comm=comm))
        self.columns, self.flops = case.columns, sum(case.flops)
        *self.given, self.dout = draw_inputs(case, self.exact.local_rows)

    def _set(self, case: Case | MixerCase, comm: thdattn.comm.Comm, computes: Any) -> None:
        self.case, self.computes = case, computes
        batch = PackedBatch.from_lengths(case.lengths, 1 if comm.size == 1 else 2 * comm.size)
        rows = max(batch.total_rows, ROWS.get(case.name, 0))
        self.batch = PackedBatch(batch.cu_seqlens, batch.cu_seqlens_padded, total_rows=rows)
        self.exact = computes.plan(self.batch, finite_padding=True)

    def pack(self, graphs: Graphs, sharding: str | None = None) -> StaticPack:
        """Make a static pack of just so many rows, with the batch loaded."""
        pack = StaticPack(graphs, [self.computes], self.batch.total_rows, sharding, like=self.batch,
                          finite_padding=True)
        pack.load([self.batch])
        return pack

    def both(self, given: Sequence[Any], dout: Any, plan: thdattn.Plan) -> Any:
        """Return the gradients."""
        _, saved = self.computes.forward(*given, plan)
        return self.computes.backward(dout, saved)

    def ways(self, graphs: Graphs) -> dict[str, Callable[[], Any]]:
        """Return the ways that are compared; each returns the gradients."""
        (static,) = self.pack(graphs).plans()
        owned = graphs.captured(lambda: (self.given, self.dout), "inputs")
        for _ in range(2):
            owned()  # results of graphs are inputs that are not copied
        whole = graphs.captured(self.both, "forward and backward")
        pair = graphs.pair(self.computes.forward, self.computes.backward, "pair")

        def local() -> Any:
            _, saved = pair.forward(*self.given, static)
            return pair.backward(self.dout, saved)

        return {
            "eager": lambda: self.both(self.given, self.dout, self.exact),
            "eager_static": lambda: self.both(self.given, self.dout, static),
            "local": local,
            "full_iteration": lambda: whole(self.given, self.dout, static),
        }


class MixerLayer(Layer):
    """Mamba-2 mixer on this rank's rows of a case; its weights are arguments too."""

    gradients = ("dzxbcdt",)

    def __init__(self, comm: thdattn.comm.Comm, case: MixerCase) -> None:
        self._set(case, comm, case.mixer(comm, "cuda"))
        kept = ("case", "heads", "head_dim", "total_tokens", "num_seqs")
        self.columns = {name: case.columns[name] for name in kept} | {"kv_heads": "mixer"}
        inputs = draw(case, cupy, self.exact.local_rows)
        self.given, self.dout = [inputs.zxbcdt, inputs.weights], inputs.dout


def new_graphs(comm: thdattn.comm.Comm, slots: int | None = None) -> Graphs:
    return Graphs(comm, CudaGraphConfig(impl="local", max_packed_seqs=slots, warmup_steps=1))


def layer_rows(comm: thdattn.comm.Comm, layer: Layer, rounds: int) -> Iterator[record.Row]:
    """Yield a row for each way of one layer."""
    with new_graphs(comm) as graphs:
        ways = layer.ways(graphs)
        wanted = ways["eager"]()
        for name, way in ways.items():
            for _ in range(3):  # an eager run, a capture, a replay
                found = way()
            check(layer, name, found, wanted)
        yield from rows_of(comm, layer.columns, ways, layer.flops, rounds)


def check(layer: Layer, way: str, found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Compare gradients with eager's, bfloat16 as the upper half of float32: wrong results are not timed."""
    for name, x, y in zip(layer.gradients, found, wanted, strict=False):
        x, y = ((z.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32) for z in (x, y))
        error = float(cupy.sqrt(((x - y) ** 2).sum() / (y**2).sum()))
        if not error < RELATIVE_ERROR:
            raise RuntimeError(f"{layer.case.name} {way}: {name} is off by {error:.1e} of eager's, wanted "
                               f"{RELATIVE_ERROR}")


def slot_rows(comm: thdattn.comm.Comm, rounds: int) -> Iterator[record.Row]:
    """Time 16 documents in graphs with few and with many slots: plan, forward and backward in one graph."""
    case = Case("16x1024", (1_024,) * 16, 8, 8)
    layer = Layer(comm, case)
    with ExitStack() as stack:
        ways: dict[str, Call] = {}
        for slots in SLOTS:
            graphs = stack.enter_context(new_graphs(comm, slots))
            step = graphs.captured(partial(planned_step, layer, layer.pack(graphs)), "step")
            ways[f"{slots}_slots"] = partial(step, layer.given, layer.dout)
        exact = graphs.captured(layer.both, "exact")
        ways["exact"] = lambda: exact(layer.given, layer.dout, layer.exact)
        yield from rows_of(comm, case.columns, ways, sum(case.flops), rounds)


def planned_step(layer: Layer, pack: StaticPack, given: Sequence[Any], dout: Any) -> Any:
    return layer.both(given, dout, *pack.plans())


def layout_rows(comm: thdattn.comm.Comm, name: str, rounds: int) -> Iterator[record.Row]:
    """Time how a pack of balanced rows takes a new layout: loads on the host, and plans, called and in a graph.

    The host finds the layout as it loads, or has prepared it.
    """
    case = Case(name, (SHORT | LONG)[name], 8, 8)
    layer = Layer(comm, case)
    with new_graphs(comm, BALANCED_SLOTS) as graphs:
        pack, batch = layer.pack(graphs, "balanced"), layer.batch
        for way in ("load_host_balanced", "load_host_balanced_prepared"):
            fresh = [PackedBatch(batch.cu_seqlens, batch.cu_seqlens_padded, total_rows=batch.total_rows)
                     for _ in range(rounds * HOST_CALLS)]
            for each in fresh if way.endswith("prepared") else ():
                layer.computes.prepare(each, "balanced")
            samples = timing.returned(partial(load_next, pack, iter(fresh)), len(fresh))
            yield case.columns | {"way": way} | record.timed(timing.slowest(comm, samples))
        ways: dict[str, Call] = {"plans_balanced": pack.plans}
        ways["plans_graph_balanced"] = graphs.captured(pack.plans, "plans")
        yield from rows_of(comm, case.columns, ways, None, rounds)


def load_next(pack: StaticPack, batches: Iterator[PackedBatch]) -> None:
    batch = next(batches)
    assert pack.fits([batch])
    pack.load([batch])


def rows_of(
    comm: thdattn.comm.Comm, columns: record.Row, ways: Mapping[str, Call], flops: float | None, rounds: int
) -> Iterator[record.Row]:
    """Time ways in turns, and yield a row for each."""
    times = timing.race(comm, {name: {"both": way} for name, way in ways.items()}, rounds)
    for (way, _), samples in times.items():
        yield columns | {"way": way} | record.timed(samples, flops)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*SHORT, *LONG], default=[*SHORT, *LONG], metavar="CASE",
                        help=f"all by default: {' '.join([*SHORT, *LONG])}")
    record.add_options(parser, "graphs", repeats=5)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
