"""Times CUDA graphs of an attention layer, forward and backward, beside the same calls without graphs.

    python benchmarks/bench_graphs.py
    mpiexec -n 2 python -m mpi4py benchmarks/bench_graphs.py

A time is that of a call as a program makes it, between events on the GPU, so that a slow host shows; of several ranks
it is the slowest one's. Padding holds finite numbers, as in a model, so that no way copies inputs without it. Every run
replaces the rows of its GPU and number of ranks in results/graphs_GPU.csv. The ways:

eager           kernel by kernel, with a plan of exactly this pack made on the host
eager_static    kernel by kernel, with the plan of a static pack, whose lengths only the GPU knows
local           a forward and a backward graph, on arrays that graphs own
local_copied    the same on arrays that are copied to their places first
full_iteration  one graph of both
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import record
import timing
from peers import RELATIVE_ERROR, Inputs, draw_inputs
from workloads import PACK_TOKENS, Case, document_pack

import thdattn
from thdattn import PackedBatch
from thdattn.graphs import CudaGraphConfig, Graphs, StaticPack

SHORT = {"8x1024": (1_024,) * 8, "64x128": (128,) * 64}
LONG = {"1x16384": (16_384,), "doc64k": document_pack()}
ROWS = {"doc64k": PACK_TOKENS}  # of a pack whose end is padding, as in training; the others are full
HEADS = ((8, 8), (16, 4))  # query and kv heads
WANTED_SHORT, WANTED_LONG, WANTED_SLOTS = 2.0, 1 / 1.02, 1.03  # speed over eager, and cost of unused slots
SLOTS = (16, 512)  # of which 16 documents use 16
KEY = ("gpu", "ranks", "case", "heads", "kv_heads", "way")
Call = Callable[[], object]


def main() -> int:
    args = parse_arguments()
    with thdattn.comm.init("auto") as comm, cupy.cuda.Stream(non_blocking=True):
        rows = [row for case in cases(args.cases) for row in layer_rows(comm, case, args.repeats)]
        rows += slot_rows(comm, args.repeats)
        rows += [row for name in ("8x1024", "doc64k") for row in refresh_rows(comm, name, args.repeats)]
        if comm.rank:
            return 0
    about = record.provenance(comm.size)
    path = args.out or record.results_file("graphs", about["gpu"])
    record.save(path, [about | {"ranks": str(comm.size)} | row for row in rows], KEY)
    print(f"{table(rows)}\n{remarks(rows)}\nwrote {path}")
    return 0


def cases(names: Sequence[str]) -> Iterator[Case]:
    """Every pack in every head layout."""
    for name in names:
        for heads, kv_heads in HEADS:
            yield Case(name, (SHORT | LONG)[name], heads, kv_heads)


# --- what is timed -----------------------------------------------------------------------------------------------


class Layer:
    """One attention layer on this rank's rows of a case.

    Attributes:
        batch: the pack, with the rows of ROWS; padded to what the sharding needs, for several ranks.
        inputs: this rank's rows.
    """

    def __init__(self, comm: thdattn.comm.Comm, case: Case) -> None:
        self.attention = case.attention("cuda", comm=comm)
        batch = PackedBatch.from_lengths(case.lengths, 1 if comm.size == 1 else 2 * comm.size)
        rows = max(batch.total_rows, ROWS.get(case.name, 0))
        self.batch = PackedBatch(batch.cu_seqlens, batch.cu_seqlens_padded, total_rows=rows)
        self.exact = self.attention.plan(self.batch, finite_padding=True)
        self.inputs = draw_inputs(case, self.exact.local_rows)

    def pack(self, graphs: Graphs) -> StaticPack:
        """A static pack of just so many rows, with the batch loaded."""
        pack = StaticPack(graphs, [self.attention], self.batch.total_rows, like=self.batch, finite_padding=True)
        pack.load([self.batch])
        return pack

    def both(self, q: Any, k: Any, v: Any, dout: Any, plan: thdattn.Plan) -> tuple[Any, Any, Any]:
        """dq, dk, dv."""
        _, saved = self.attention.forward(q, k, v, plan)
        return self.attention.backward(dout, saved)

    def ways(self, graphs: Graphs) -> dict[str, Callable[[], tuple[Any, Any, Any]]]:
        """What is compared; each way returns dq, dk, dv."""
        (static,) = self.pack(graphs).plans()
        owned = graphs.captured(lambda: self.inputs, "inputs")
        for _ in range(2):
            owned()  # what a graph returns is read where it is
        whole = graphs.captured(self.both, "forward and backward")
        in_place, copied = (graphs.pair(self.attention.forward, self.attention.backward, name)
                            for name in ("in place", "copied"))  # fmt: skip
        others = Inputs(*(x.copy() for x in self.inputs))

        def local(pair: Any, inputs: Inputs) -> tuple[Any, Any, Any]:
            _, saved = pair.forward(inputs.q, inputs.k, inputs.v, static)
            gradients: tuple[Any, Any, Any] = pair.backward(inputs.dout, saved)
            return gradients

        return {
            "eager": lambda: self.both(*self.inputs, self.exact),
            "eager_static": lambda: self.both(*self.inputs, static),
            "local": partial(local, in_place, self.inputs),
            "local_copied": partial(local, copied, others),
            "full_iteration": lambda: whole(*self.inputs, static),
        }


def new_graphs(comm: thdattn.comm.Comm, slots: int | None = None) -> Graphs:
    return Graphs(comm, CudaGraphConfig(impl="local", max_packed_seqs=slots, warmup_steps=1))


def layer_rows(comm: thdattn.comm.Comm, case: Case, rounds: int) -> Iterator[record.Row]:
    """A row per way of one case."""
    with new_graphs(comm) as graphs:
        layer = Layer(comm, case)
        ways = layer.ways(graphs)
        wanted = ways["eager"]()
        for name, way in ways.items():
            for _ in range(3):  # an eager run, a capture, a replay
                found = way()
            check(case, name, found, wanted)
        times = timing.race(comm, ways, rounds)
        yield from (row_of(case, way, samples, sum(case.flops)) for way, samples in times.items())


def check(case: Case, way: str, found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """A look at the results, of which bfloat16 is the upper half of float32: garbage is not timed."""
    for name, x, y in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        x, y = ((z.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32) for z in (x, y))
        error = float(cupy.sqrt(((x - y) ** 2).sum() / (y**2).sum()))
        if not error < RELATIVE_ERROR:
            raise RuntimeError(f"{case.name} {way}: {name} is off by {error:.1e} of eager's, wanted {RELATIVE_ERROR}")


def slot_rows(comm: thdattn.comm.Comm, rounds: int) -> Iterator[record.Row]:
    """16 documents in packs with room for few and for many, planned, forward and backward in one graph."""
    case = Case("16x1024", (1_024,) * 16, 8, 8)
    layer = Layer(comm, case)
    with new_graphs(comm, SLOTS[0]) as few, new_graphs(comm, SLOTS[1]) as many:
        ways: dict[str, Call] = {}
        for slots, graphs in zip(SLOTS, (few, many), strict=True):
            pack = layer.pack(graphs)
            step = graphs.captured(partial(planned_step, layer, pack), "step")
            ways[f"{slots}_slots"] = partial(step, layer.inputs)
        exact = few.captured(layer.both, "exact")
        ways["exact"] = lambda: exact(*layer.inputs, layer.exact)
        times = timing.race(comm, ways, rounds)
        yield from (row_of(case, way, samples, sum(case.flops)) for way, samples in times.items())


def planned_step(layer: Layer, pack: StaticPack, inputs: Inputs) -> tuple[Any, Any, Any]:
    return layer.both(*inputs, *pack.plans())


def refresh_rows(comm: thdattn.comm.Comm, name: str, rounds: int) -> Iterator[record.Row]:
    """A static pack's lengths: the host's time to load them, and the plan that follows, eagerly and as a graph."""
    case = Case(name, (SHORT | LONG)[name], 8, 8)
    layer = Layer(comm, case)
    with new_graphs(comm) as graphs:
        pack = layer.pack(graphs)
        times = {"load_host": timing.slowest(comm, timing.host(partial(pack.load, [layer.batch]), rounds))}
        times |= timing.race(comm, {"plans": pack.plans, "plans_graph": graphs.captured(pack.plans, "plans")}, rounds)
        yield from (row_of(case, way, samples) for way, samples in times.items())


# --- what is written ---------------------------------------------------------------------------------------------


def row_of(case: Case, way: str, samples: Sequence[float], flops: float | None = None) -> record.Row:
    return {
        **case.columns,
        "way": way,
        **record.timed(samples, flops),
    }


def table(rows: Sequence[record.Row]) -> str:
    """Milliseconds of every way with its spread, and its speed over eager; a line per case and way."""
    eager = {(row["case"], row["heads"]): float(row["ms"]) for row in rows if row["way"] == "eager"}
    lines = [["case", "heads", "way", "ms", "p10", "p90", "eager/this", "wanted"]]
    for row in rows:
        base = eager.get((row["case"], row["heads"]))
        graph = row["way"] in ("local", "full_iteration")
        compared = base is not None and row["tflops"]
        lines.append([
            row["case"], f"{row['heads']}/{row['kv_heads']}", row["way"], *(row[x] for x in ("ms", "ms_p10", "ms_p90")),
            f"{base / float(row['ms']):.2f}" if base and compared else "",
            f">= {WANTED_SHORT if row['case'] in SHORT else WANTED_LONG:.2f}" if compared and graph else "",
        ])  # fmt: skip
    return record.aligned(lines)


def remarks(rows: Sequence[record.Row]) -> str:
    """What unused slots cost."""
    ms = {row["way"]: float(row["ms"]) for row in rows if row["case"] == "16x1024"}
    few, many = (ms[f"{slots}_slots"] for slots in SLOTS)
    return (f"16 documents in {SLOTS[1]} slots take {many / few:.3f} of the time in {SLOTS[0]} slots (wanted <= "
            f"{WANTED_SLOTS}), and {many / ms['exact']:.3f} of that of a graph with a plan of the host")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*SHORT, *LONG], default=[*SHORT, *LONG], metavar="CASE",
                        help=f"all by default: {' '.join([*SHORT, *LONG])}")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, help="turns of every way, 5 by default")
    parser.add_argument("--out", type=Path, help="CSV file to add to; benchmarks/results/graphs_GPU.csv by default")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}, wanted >= 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
