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
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import accuracy
import cp_methods
import cupy
import peers
import record
import tables
import timing
from cp_methods import ALONE, BESIDE, EXCHANGE, METHODS, ONE, OURS, USUAL, Method
from cp_ways import Alone, Beside, Exchange, Layer, Ranks, Timed, both, captured, free_memory, started, whole_pack
from record import WAYS
from workloads import Case, cp_cases

import thdattn
from thdattn.comm import Comm
from thdattn.costs import Both
from thdattn.packing import rows_of_runs

KEY = ("gpu", "ranks", "as_rank_of", "transport", "case", "peer", "direction", "timing")
ERROR_CASE = Case("4x1024", (1_024,) * 4, 32, 8)
LONG_ERROR_CASE = Case("bucket32k-h8", cp_cases(1)["bucket32k"].lengths, 8, 2)  # few heads, as float64 is slow
HOST_CALLS, HOST_MS = 20, 200.0  # timed on the host at most: calls, and ms of them on the GPU
USUAL_CASES = ("bucket32k", "1x65536", "1x8192", "4x2048", "8x1024", "lognormal128k", "documents8k", "documents16k",
               "bucket32k-mha16")
T = TypeVar("T")
Key = tuple[str, str, str]  # peer, direction, timing
Measured = dict[Key, record.Row]  # the columns of what was measured
Peers = dict[str, tuple[str, Callable[[Layer], Any]]]  # name: version, constructor


def main() -> int:
    args = parse_arguments()
    with thdattn.comm.init(transport=args.transport) as real, cupy.cuda.Stream(non_blocking=True):
        ranks = Ranks.of(real, args.as_rank_of or real.size)
        records = record.Recorder("cp", args.out, KEY, real.size, {
            "ranks": str(real.size), "as_rank_of": str(ranks.size),
            "transport": "peer" if real.reads_peers else f"{real.name}{' between machines' * real.spans_machines}",
        })
        with process_group() if args.peer else nullcontext():
            others = find_peers() if args.peer else {}
            for case, measure in work(ranks, args.cases, args.methods, args.head_groups, args.exchange):
                start = time.perf_counter()
                records.add(rows_of(case, others, measure(case, others, args.repeats)), real.rank == 0)
                if real.rank == 0:
                    print(f"{case.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    if real.rank == 0:
        records.show(tables.context_parallel)
    return 0


def process_group() -> Any:
    """Start torch.distributed for the peer; PyTorch is imported only here."""
    import cp_peer

    return cp_peer.process_group()


def find_peers() -> Peers:
    """Return Transformer Engine's schedule with the version of its kernels; ImportError where they are missing."""
    import cp_peer

    def make(layer: Layer) -> cp_peer.TransformerEngine:
        return cp_peer.TransformerEngine(layer.plan, layer.inputs)

    return {"te+fa4": (peers.FlashAttention4.version(), make)}


def work(
    ranks: Ranks, names: Sequence[str], methods: Sequence[Method], head_groups: Sequence[int], exchange: bool = False
) -> Iterator[tuple[Case, Callable[[Case, Peers, int], Measured]]]:
    """Yield cases with what measures them; errors come first, which also compile and load kernels."""
    all_there = ranks.size == ranks.real.size
    if all_there:
        yield ERROR_CASE, partial(errors, ranks, methods)
    for name in names:
        yield cp_cases(ranks.size)[name], partial(speeds, ranks, methods, head_groups, exchange)
        if all_there and name == "bucket32k":
            yield LONG_ERROR_CASE, partial(errors, ranks, methods)


# --- what is measured --------------------------------------------------------------------------------------------


def errors(ranks: Ranks, methods: Sequence[Method], case: Case, others: Peers, _: int) -> Measured:
    """Measure the errors of every method and of the peer against float64."""
    batch = thdattn.PackedBatch.from_lengths(case.lengths, 2 * ranks.size)  # every sharding takes it
    tokens = rows_of_runs(batch.cu_seqlens_padded[:-1], batch.lengths)
    whole = peers.draw_inputs(case, batch.total_rows)
    possible = [method for method in methods if not ranks.refusal(method, case)]
    ways = [*(method.way for method in possible), *others]
    measured: Measured = {(name, result, record.ERRORS): {} for name in ways for result in accuracy.RESULTS}

    wanted = attempted(ranks.real, f"{case.name} in float64",
                       partial(accuracy.exact, case, [x.get()[tokens] for x in whole], cupy))
    if wanted is None:
        return measured

    def work_at(method: Method) -> Layer:
        layer = Layer(ranks.comm(method, case), case, method, batch=batch)
        layer.inputs = peers.Inputs(*(layer.plan.shard(x) for x in whole))
        both(layer)
        return layer

    def note(name: str, layer: Layer, results: Sequence[Any]) -> None:
        comm, chosen = layer.attention.comm, layer.choices() if name == layer.method.way else {}
        packed = [layer.plan.unshard(x, comm).get()[tokens] for x in results]
        for result, error in accuracy.errors(packed, wanted).items():
            measured[name, result, record.ERRORS] = error.columns | chosen

    for method in possible:
        layer = attempted(ranks.real, f"{case.name} {method.way}", partial(work_at, method))
        if layer is not None:
            note(method.way, layer, layer.results())
            if method == USUAL:
                for name, peer in made_peers(ranks.real, case, others, layer).items():
                    note(name, layer, peer.on_gpu())
    return measured


def speeds(
    ranks: Ranks, methods: Sequence[Method], head_groups: Sequence[int], exchange: bool, case: Case, others: Peers,
    rounds: int,
) -> Measured:
    """Measure all times of one case, in turns, and the memory and received bytes of each way."""
    real = ranks.real
    asked = asked_for(ranks, methods, head_groups, case)
    ours: dict[str, Layer] = {}
    costs: dict[str, Costs] = {}
    for name, (method, number) in asked.items():
        comm = ranks.comm(method, case)
        made = attempted(real, f"{case.name} {name}", partial(started, partial(Layer, comm, case, method, number)))
        if made is not None:
            ours[name], free = made
            foreseen = attempted(real, f"{case.name} {name}, predicted",
                                 partial(cp_methods.predicted_ms, method, case, ranks.size))
            costs[name] = Costs(taken(real, ours[name], free), most(real, ours[name].received()), foreseen or {})
    ways: dict[str, Timed] = {**ours}
    if OURS in ours:
        free = free_memory()
        made_ones = made_peers(real, case, others, ours[OURS])
        costs |= {name: Costs(taken(real, peer, free)) for name, peer in made_ones.items()}
        ways |= {**made_ones, ALONE: Alone(ours[OURS])}
        both(ways[ALONE])  # a backward needs a forward before it
        if exchange:
            ways |= exchanged(real, ours[OURS])
    one = attempted(real, f"{case.name} {ONE}", partial(started, partial(whole_pack, case)))
    if one is not None:
        ways[ONE] = one[0]
    times = raced(real, case, ways, list(costs), rounds)
    measured: Measured = {(name, way, "called"): {} for name in (*asked, *others) for way in WAYS}
    measured |= {key: columns(case, 1 if key[0] == ONE else ranks.size, key, samples, costs)
                 for key, samples in times.items()}
    chosen = {name: layer.choices() | ranks_played(ranks, layer) for name, layer in ours.items()}
    return {key: found | chosen.get(key[0], {}) for key, found in measured.items()}


def exchanged(real: Comm, layer: Layer) -> dict[str, Timed]:
    """Return the ways of --exchange; between machines an exchange may outlast the attention, which is then not timed.
    """
    exchange, alone = Exchange(layer), Alone(layer)
    both(alone)
    return {EXCHANGE: exchange} | ({} if real.spans_machines else {BESIDE: Beside(alone, exchange)})


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
    real: Comm, case: Case, ways: Mapping[str, Timed], hosted: Sequence[str], rounds: int
) -> dict[Key, list[float]]:
    """Time all ways in turns: called, in a graph where they are captured, and on the host for those in `hosted`."""
    calls: dict[tuple[str, str], Sequence[Callable[[], object]]] = {
        (name, "called"): (way.forward, way.backward) for name, way in ways.items()}
    with ExitStack() as stack:
        for name, way in ways.items():
            replay = attempted(real, f"{case.name} {name} in a graph", partial(captured, stack, name, way))
            if replay is not None:
                calls[name, "graph"] = [replay]
        found = timing.race_in_steps(real, calls, rounds)
    times: dict[Key, list[float]] = {}
    for (name, how), steps in found.items():
        directions = WAYS if how == "called" else ("both",) * 2
        times |= {(name, direction, how): samples for direction, samples in zip(directions, steps, strict=True)}
    host = {(name, way, "host"): call for name in hosted
            for way, call in (("forward", ways[name].forward), ("both", partial(both, ways[name])))}
    for key, call in host.items():
        calls_in_all = host_calls(median(times[key[0], key[1], "called"]))
        times[key] = timing.slowest(real, timing.returned(call, calls_in_all))
    for name, way in ways.items():
        if isinstance(way, Layer) and name != ONE and way.head_groups is None:
            times[name, "plan", "host"] = timing.slowest(real, timing.returned(way.new_plan, HOST_CALLS))
    return times


def host_calls(ms: float) -> int:
    """Return how many calls of so many milliseconds are timed on the host."""
    return max(3, min(HOST_CALLS, round(HOST_MS / max(ms, 1e-3))))


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


def made_peers(real: Comm, case: Case, others: Peers, layer: Layer) -> dict[str, Any]:
    """Make the peers, and keep those whose results are those of ours on every rank; name the others on stderr.

    Rows of the others stay blank, and so replace those of an older run.
    """

    def alike(make: Callable[[Layer], Any]) -> Any:
        peer = make(layer)
        both(peer)
        peers.check(peer.results(), layer.results())
        return peer

    made = {name: attempted(real, f"{case.name} {name}", partial(alike, make)) for name, (_, make) in others.items()}
    return {name: peer for name, peer in made.items() if peer is not None}


def taken(real: Comm, layer: Timed, free: int) -> float:
    """Return by how many GiB warm calls reduce the free memory from `free`, of the rank that takes most."""
    peers.release_memory()  # of compiling and checking
    for _ in range(2):
        both(layer)
    cupy.cuda.get_current_stream().synchronize()
    left, _ = cupy.cuda.runtime.memGetInfo()
    (most,) = timing.slowest(real, [(free - left) / 2**30])
    return most


def most(real: Comm, traffic: Both) -> Both:
    """Return the largest number of received bytes of any rank."""
    return Both(*map(int, timing.slowest(real, traffic)))


# --- what is written ---------------------------------------------------------------------------------------------


class Costs(NamedTuple):
    """Costs of one way: GiB of memory, bytes from other ranks (None: not counted), predicted ms of directions."""

    memory: float
    received: Both | None = None
    predicted: Mapping[str, float] = MappingProxyType({})


def ranks_played(ranks: Ranks, layer: Layer) -> record.Row:
    """Return the column with the ranks that the two GPUs play, if they do."""
    if ranks.size == ranks.real.size:
        return {}
    return {"ranks_played": "/".join(map(str, ranks.real._gather_values(layer.plan.cp_rank)))}


def columns(case: Case, cp_size: int, key: Key, samples: Sequence[float], costs: Mapping[str, Costs]) -> record.Row:
    """Return the columns of one measured time, per GPU; rows of calls also have memory and received bytes."""
    peer, direction, how = key
    flops = {**case.flops._asdict(), "both": sum(case.flops)}.get(direction)
    row = record.timed(samples, flops / cp_size if flops and how != "host" and peer != EXCHANGE else None)
    cost = costs.get(peer)
    if how != "called" or cost is None:
        return row
    if direction == "both":
        row["memory_gib"] = f"{cost.memory:.2f}"
    if cost.received is not None:
        row["received_bytes"] = str(cost.received.total if direction == "both" else getattr(cost.received, direction))
    if direction in cost.predicted:
        row["predicted_ms"] = f"{cost.predicted[direction]:.4f}"
    return row


def rows_of(case: Case, others: Peers, measured: Measured) -> Iterator[record.Row]:
    blank = dict.fromkeys((
        "method", "sharding", "ranks_played", "head_groups", "keep_keys", "ms", "ms_p10", "ms_p90", "samples", "tflops",
        "memory_gib", "received_bytes", "predicted_ms", "rms", "largest",
    ), "")
    for (peer, direction, how), found in measured.items():
        yield {
            **case.columns,
            "peer": peer,
            "peer_version": others[peer][0] if peer in others else thdattn.__version__,
            "direction": direction,
            "timing": how,
            **(blank | found),
        }


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
