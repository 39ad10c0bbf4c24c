"""Time one attention layer over several ranks, forward and backward, beside the attention kernels alone.

    mpiexec -n 2 python -m mpi4py benchmarks/bench_cp.py --peer
    mpiexec -n 2 python -m mpi4py benchmarks/bench_cp.py --methods all --cases documents16k bucket32k-mha16
    mpiexec -n 2 python -m mpi4py benchmarks/bench_cp.py --as-rank-of 8 --cases bucket32k 8x1024 --head-groups 1 4
    mpiexec -n 2 python -m mpi4py benchmarks/bench_cp.py --as-rank-of 8 --cases documents16k --methods all

Times are between events on the GPU, of warm calls back to back, of the slowest rank. TFLOP/s are per GPU and count
visible pairs of tokens, no padding. All ways of a case take turns. A graph holds forward and backward with all
communication. Communication is exposed as far as a layer takes longer than its attention alone. The host's time is from
a call to its return on an idle GPU. Memory is what warm calls take of the GPU, without q, k, v and dout.

--methods: cp_comm_type:sharding of CPAttention, each with the least padding that it takes. "One GPU" has the whole
pack, without padding. --peer: Transformer Engine's schedule, see cp_peer.py, in the same run. --as-rank-of N: two GPUs
have the rows, keys and traffic of two ranks of N, see rank_of.py. Results mean nothing then, so neither errors nor
peers are measured. Where ranks differ in work, the GPUs play those with most. Rows go to benchmarks/results/cp_GPU.csv.

Two GPUs are two machines, connected by sockets, if each rank has names of its own in THDATTN_HOST and NCCL_HOSTID:

    export NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo
    mpiexec -n 2 sh -c 'N=host${OMPI_COMM_WORLD_RANK:-$PMI_RANK}; THDATTN_HOST=$N NCCL_HOSTID=$N python -m mpi4py \\
        benchmarks/bench_cp.py --cases 1x16384-full-h512 --head-groups 8 --exchange'
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import accuracy
import cupy
import peers
import record
import tables
import timing
from cp_methods import ALONE, EXCHANGE, METHODS, ONE, OURS, PARTS, USUAL, Method
from cp_ways import Alone, Layer, Ranks, Timed, both, captured, exchanged, free_memory, started, steps, whole_pack
from record import PASSES, Measured
from workloads import Case, cp_cases

import thdattn
from thdattn.comm import Comm

KEY = ("gpu", "ranks", "as_rank_of", "transport", "case", "peer", "direction", "timing")
ERROR_CASE = Case("4x1024", (1_024,) * 4, 32, 8)
HOST_CALLS = 10  # timed on the host
USUAL_CASES = ("bucket32k", "1x65536", "1x8192", "4x2048", "8x1024", "lognormal128k", "documents8k", "documents16k",
               "bucket32k-mha16")
PEER = "te+fa4"  # Transformer Engine's schedule; PyTorch is imported only for it
T = TypeVar("T")


def main() -> int:
    args = parse_arguments()
    with thdattn.comm.init(transport=args.transport) as real, cupy.cuda.Stream(non_blocking=True):
        ranks = Ranks.of(real, args.as_rank_of or real.size)
        records = record.Recorder("cp", args.out, KEY, real.size, {
            "ranks": str(real.size), "as_rank_of": str(ranks.size),
            "transport": "peer" if real.reads_peers else f"{real.name}{' between machines' * real.spans_machines}",
        })
        versions = {PEER: peers.FlashAttention4.version()} if args.peer else {}
        with import_module("cp_peer").process_group() if args.peer else nullcontext():
            for case, measure in work(ranks, args):
                start = time.perf_counter()
                records.add(record.rows_of(case.columns, measure(case), versions), real.rank == 0)
                if real.rank == 0:
                    print(f"{case.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    if real.rank == 0:
        records.show(tables.context_parallel)
    return 0


def work(ranks: Ranks, args: argparse.Namespace) -> Iterator[tuple[Case, Callable[[Case], Measured]]]:
    """Yield cases with what measures them; errors come first, which also compile and load kernels."""
    if ranks.size == ranks.real.size:
        yield ERROR_CASE, partial(errors, ranks, args)
    for name in args.cases:
        yield cp_cases(ranks.size)[name], partial(speeds, ranks, args)


# --- what is measured --------------------------------------------------------------------------------------------


def errors(ranks: Ranks, args: argparse.Namespace, case: Case) -> Measured:
    """Measure the errors of every method and of the peer against float64."""
    batch = case.batch(2 * ranks.size)  # every sharding takes it
    whole = peers.draw_inputs(case, batch.total_rows)
    wanted = accuracy.exact(case, [peers.to_host(x) for x in whole], batch)
    possible = [method for method in args.methods if not ranks.refusal(method, case)]
    ways = [*(method.way for method in possible), *[PEER] * args.peer]
    measured: Measured = {(name, result, record.ERRORS): {} for name in ways for result in accuracy.RESULTS}

    def work_at(method: Method) -> Layer:
        layer = Layer(ranks.comm(method, case), case, method, batch=batch)
        layer.inputs = peers.Inputs(*(layer.plan.shard(x) for x in whole))
        both(layer)
        return layer

    def note(name: str, layer: Layer, results: Sequence[Any]) -> None:
        found = [peers.to_host(layer.plan.unshard(x, layer.attn.comm)) for x in results]
        for result, error in accuracy.errors(found, wanted).items():
            measured[name, result, record.ERRORS] = error.columns

    for method in possible:
        layer = attempted(ranks.real, f"{case.name} {method.way}", partial(work_at, method))
        if layer is not None:
            note(method.way, layer, layer.results())
            peer = made_peer(ranks.real, case, layer) if args.peer and method == USUAL else None
            if peer is not None:
                note(PEER, layer, peer.on_gpu())
    return measured


def speeds(ranks: Ranks, args: argparse.Namespace, case: Case) -> Measured:
    """Measure all times of one case, in turns, and the memory and received bytes of each way."""
    real, asked = ranks.real, asked_for(ranks, args.methods, args.head_groups, case)
    ours: dict[str, Layer] = {}
    costs: dict[str, record.Row] = {}  # of one forward and one backward
    for name, (method, number) in asked.items():
        make = partial(Layer, ranks.comm(method, case), case, method, number)
        made = attempted(real, f"{case.name} {name}", partial(started, make))
        if made is not None:
            ours[name], free = made
            (received,) = timing.slowest(real, [ours[name].received()])
            costs[name] = {"memory_gib": taken(real, ours[name], free), "received_bytes": str(int(received)),
                           **ours[name].choices()}
    ways: dict[str, Timed] = {**ours}
    if OURS in ours:
        free = free_memory()
        peer = made_peer(real, case, ours[OURS]) if args.peer else None
        if peer is not None:
            ways[PEER], costs[PEER] = peer, {"memory_gib": taken(real, peer, free)}
        ways[ALONE] = alone = Alone(ours[OURS])
        both(alone)  # a backward needs a forward before it
        if args.exchange:
            ways |= exchanged(alone)
    one = attempted(real, f"{case.name} {ONE}", partial(started, partial(whole_pack, case)))
    if one is not None:
        ways[ONE] = one[0]
    names = [*asked, *[PEER] * args.peer]
    measured: Measured = {(name, direction, "called"): {} for name in names for direction in PASSES}
    measured |= {key: timed(case, 1 if key[0] == ONE else ranks.size, key, samples)
                 for key, samples in raced(real, case, ways, ours, args.repeats).items()}
    for name, found in costs.items():
        measured[name, "both", "called"] |= found
    return measured


def asked_for(
    ranks: Ranks, methods: Sequence[Method], head_groups: Sequence[int], case: Case
) -> dict[str, tuple[Method, int | None]]:
    """Return the ways that a case can be spread by, with numbers of head groups; name the others on stderr."""
    asked: dict[str, tuple[Method, int | None]] = {}
    for method in methods:
        if why := ranks.refusal(method, case):
            if ranks.real.rank == 0:
                print(f"{case.name}: without {method}: {why}", file=sys.stderr)
            continue
        asked[method.way] = method, None
        if method == USUAL:
            asked |= {f"{OURS}, {number} group{'s' * (number > 1)}": (method, number) for number in head_groups}
    return asked


def raced(
    real: Comm, case: Case, ways: Mapping[str, Timed], ours: Mapping[str, Layer], rounds: int
) -> dict[record.Key, list[float]]:
    """Time all ways in turns, called, and ours also in a graph and on the host."""
    calls: dict[tuple[str, str], Mapping[str, Callable[[], object]]] = {
        (name, "called"): steps(way) for name, way in ways.items()}
    with ExitStack() as stack:
        for name, layer in ours.items():
            if layer.captured:
                replay = attempted(real, f"{case.name} {name} in a graph", partial(captured, stack, name, layer))
                if replay is not None:
                    calls[name, "graph"] = {"both": replay}
        found = timing.race(real, calls, rounds)
    times = {(name, direction, how): samples for ((name, how), direction), samples in found.items()}
    for name, way in ways.items():
        if name not in PARTS:
            times[name, "forward", "host"] = timing.slowest(real, timing.returned(way.forward, HOST_CALLS))
    for name, layer in ours.items():
        if layer.head_groups is None:
            times[name, "plan", "host"] = timing.slowest(real, timing.returned(layer.new_plan, HOST_CALLS))
    return times


def attempted(real: Comm, what: str, make: Callable[[], T]) -> T | None:
    """Return what a call returns, or None if it fails on any rank; stderr gets the reason.

    A rank that fails alone within a collective leaves the others to the deadline.
    """
    made, failed = None, 0.0
    try:
        made = make()
    except Exception as error:
        failed = 1.0
        print(f"{what}, rank {real.rank}: {type(error).__name__}: {error}", file=sys.stderr)
    return None if max(timing.slowest(real, [failed])) else made


def made_peer(real: Comm, case: Case, layer: Layer) -> Any:
    """Make the peer of a layer; None, with the reason on stderr, if its results are not those of ours on every rank."""

    def alike() -> Any:
        peer = import_module("cp_peer").TransformerEngine(layer.plan, layer.inputs)
        both(peer)
        peers.check(peer.results(), layer.results())
        return peer

    return attempted(real, f"{case.name} {PEER}", alike)


def taken(real: Comm, layer: Timed, free: int) -> str:
    """Return by how many GiB warm calls reduce the free memory from `free`, of the rank that takes most."""
    peers.release_memory()  # of compiling and checking
    for _ in range(2):
        both(layer)
    cupy.cuda.get_current_stream().synchronize()
    left, _ = cupy.cuda.runtime.memGetInfo()
    (most,) = timing.slowest(real, [(free - left) / 2**30])
    return f"{most:.2f}"


def timed(case: Case, cp_size: int, key: record.Key, samples: Sequence[float]) -> record.Row:
    """Return the columns of a measured time, with its speed per GPU; the host and an exchange have none."""
    peer, direction, how = key
    return record.timed(samples, case.work[direction] / cp_size if how != "host" and peer != EXCHANGE else None)


def parse_arguments() -> argparse.Namespace:
    cases = cp_cases(1)
    names, kv_heads = list(cases), sorted({case.kv_heads for case in cases.values()})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*names, "all"], default=list(USUAL_CASES), metavar="CASE",
                        help=f"{' '.join(names)}, or all; by default {' '.join(USUAL_CASES)}")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, "all"], default=[str(USUAL)], metavar="METHOD",
                        help=f"{' '.join(METHODS)}, or all, of which those that cannot work are left out; by default "
                             f"{USUAL}")
    parser.add_argument("--transport", choices=("auto", "peer", "nccl"), default="auto", help="see thdattn.comm.init")
    parser.add_argument("--head-groups", nargs="+", type=int, default=[], metavar="N",
                        help="also time ours with so many groups of heads, in turns with the others")
    parser.add_argument("--exchange", action="store_true", help="also time what all_gather exchanges without the "
                        "attention, and the attention alone beside it")
    parser.add_argument("--peer", action="store_true", help="also time Transformer Engine's schedule")
    parser.add_argument("--as-rank-of", type=int, metavar="N", help="two GPUs behave as two ranks of N")
    record.add_options(parser, "cp", repeats=3)
    args = parser.parse_args()
    if wrong := [number for number in args.head_groups if number < 1 or any(heads % number for heads in kv_heads)]:
        parser.error(f"--head-groups has {wrong[0]}, wanted divisors of {' and '.join(map(str, kv_heads))} kv heads")
    if args.as_rank_of is not None and args.as_rank_of < 2:
        parser.error(f"--as-rank-of is {args.as_rank_of}, wanted >= 2")
    if args.as_rank_of and args.peer:
        parser.error("--peer has no ranks to be played by others; leave it or --as-rank-of out")
    if args.as_rank_of and args.exchange:
        parser.error("--exchange times collectives of real ranks; leave it or --as-rank-of out")
    args.cases = names if "all" in args.cases else args.cases
    args.methods = [METHODS[name] for name in (METHODS if "all" in args.methods else args.methods)]
    if args.peer and USUAL not in args.methods:
        parser.error(f"--peer is compared with {USUAL}, which --methods lacks; add it or leave --peer out")
    return args


if __name__ == "__main__":
    sys.exit(main())
