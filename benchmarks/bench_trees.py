"""Time attention over prefix trees, forward and backward, beside packs without trees and FlexAttention.

    python benchmarks/bench_trees.py
    python benchmarks/bench_trees.py --cases prompt1k-8x1k --peers causal,unrolled
    mpiexec -n 2 python -m mpi4py benchmarks/bench_trees.py

On one GPU, the trees take turns with others, on the same stream. "causal": as many rows and as many tiles with a
visible pair, in sequences of one length. "unrolled": all paths from a root to a leaf, each a sequence. "flex":
FlexAttention of PyTorch with the mask of the trees. Its block mask is made and it is compiled before, and its results
are compared with ours. On several GPUs, balanced trees take turns with all trees on one GPU.

Times are between events on the GPU, of warm calls back to back, of the slowest rank. TFLOP/s are per GPU and count
visible pairs. The errors are against float64, on a small tree of the same shape. Rows go to
benchmarks/results/trees_GPU.csv.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import accuracy
import cupy
import numpy as np
import record
import tables
import timing
from bench_cp import attempted
from cp_methods import ONE, OURS, USUAL, Method
from cp_ways import Layer, Timed, both, steps
from peers import Flex, Inputs, draw_inputs, release_memory, to_host
from record import Measured
from workloads import TREES, Case, TreeCase

import thdattn
from thdattn.comm import Comm, SingleComm

KEY = ("gpu", "ranks", "transport", "case", "peer", "direction", "timing")
PEERS = ("causal", "unrolled", "flex")


def main() -> int:
    args = parse_arguments()
    with thdattn.comm.init(transport=args.transport) as comm, cupy.cuda.Stream(non_blocking=True):
        records = record.Recorder("trees", args.out, KEY, comm.size, {
            "ranks": str(comm.size), "transport": "peer" if comm.reads_peers else comm.name})
        others = present(args.peers) if comm.size == 1 else [ONE]
        for name in args.cases:
            start, case = time.perf_counter(), TREES[name]
            records.add([*errors(comm, case), *speeds(comm, case, others, args.repeats)], comm.rank == 0)
            release_memory()
            if comm.rank == 0:
                print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    if comm.rank == 0:
        records.show(tables.trees)
    return 0


def present(names: Sequence[str]) -> list[str]:
    """Leave out FlexAttention, by name, where PyTorch is missing."""
    missing = {"flex"} if find_spec("torch") is None else set()
    for name in missing.intersection(names):
        print(f"{name} left out: PyTorch is missing", file=sys.stderr)
    return [name for name in names if name not in missing]


def errors(comm: Comm, case: TreeCase) -> Iterator[record.Row]:
    """Return rows with the errors against float64 of a small tree; they also compile and load kernels."""
    small = accuracy.small_tree(case)
    layer = Layer(comm, small, method(comm))
    whole = draw_inputs(small, layer.batch.total_rows)
    layer.inputs = Inputs(*(layer.plan.shard(x) for x in whole))
    both(layer)
    wanted = accuracy.exact(small, [to_host(x) for x in whole])
    found = [to_host(layer.plan.unshard(x, comm)) for x in layer.results()]
    return rows_of(case, case, {(OURS, result, record.ERRORS): error.columns
                                for result, error in accuracy.errors(found, wanted).items()})


def speeds(comm: Comm, case: TreeCase, others: Sequence[str], rounds: int) -> Iterator[record.Row]:
    """Yield rows with the times of the trees and of all others, in turns; those of what failed are blank."""
    ours = Layer(comm, case, method(comm))
    both(ours)
    ways: dict[str, Timed] = {OURS: ours}
    packs = {OURS: case, **{name: pack_of(case, name) for name in others}}
    for name in others:
        made = attempted(comm, f"{case.name} {name}", partial(started, name, packs[name], ours))
        if made is not None:
            ways[name] = made
    release_memory()
    times = timing.race(comm, {name: steps(way) for name, way in ways.items()}, rounds)
    busiest = f"{busiest_rank(comm, ours):.3f}"
    for name, pack in packs.items():
        share = comm.size if name == OURS else 1
        measured = {(name, direction, "called"): record.timed(times[name, direction], work / share)
                    if name in ways else {} for direction, work in pack.work.items()}
        if name == OURS:
            measured[OURS, "both", "called"]["work"] = busiest
        yield from rows_of(case, pack, measured)


def pack_of(case: TreeCase, name: str) -> Case:
    """Return what a peer computes."""
    return case.alike if name == "causal" else case.unrolled if name == "unrolled" else case


def method(comm: Comm) -> Method:
    return Method("all_gather", "balanced") if comm.size > 1 else USUAL


def started(name: str, pack: Any, ours: Layer) -> Timed:
    """Make a peer and run it once; results of FlexAttention that are not those of ours raise ValueError."""
    if name != "flex":
        layer = Layer(SingleComm(), pack)
        both(layer)
        return layer
    flex = Flex(pack, ours.inputs)
    both(flex)
    flex.check(ours.results())
    return flex


def busiest_rank(comm: Comm, layer: Layer) -> float:
    """Return the visible pairs of the busiest rank over their mean."""
    positions = to_host(layer.plan.positions[layer.plan.valid]).astype(np.int64)
    (most,) = timing.slowest(comm, [float((positions + 1).sum())])
    return most * comm.size / layer.plan.visible_pairs


def rows_of(case: TreeCase, pack: Case, measured: Measured) -> Iterator[record.Row]:
    """Yield rows of a pack, under the name of the trees that it is compared with."""
    columns = {**pack.columns, "case": case.name, "pairs": str(pack.plan.visible_pairs), "tiles": str(pack.tiles)}
    return record.rows_of(columns, measured, {peer: Flex.version() for peer, _, _ in measured if peer == "flex"})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=TREES, default=list(TREES), metavar="CASE",
                        help=f"all by default: {' '.join(TREES)}")
    parser.add_argument("--peers", type=lambda names: names.split(","), default=list(PEERS), metavar="PEER,PEER",
                        help=f"on one GPU; all by default: {','.join(PEERS)}")
    parser.add_argument("--transport", choices=("auto", "peer", "nccl"), default="auto", help="see thdattn.comm.init")
    record.add_options(parser, "trees", repeats=3)
    args = parser.parse_args()
    if unknown := set(args.peers) - set(PEERS):
        parser.error(f"unknown peers {', '.join(sorted(unknown))}; wanted some of {', '.join(PEERS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
