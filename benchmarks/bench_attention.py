"""Time packed attention, forward and backward, beside every other implementation that is installed.

    python benchmarks/bench_attention.py
    python benchmarks/bench_attention.py --cases 1x16384 lognormal64k --peers deterministic,fa4
    python benchmarks/bench_attention.py --sustained --repeats 1 --cases 1x16384 doc64k
    python benchmarks/bench_attention.py --dense     packs beside dense batches of the same tokens
    python benchmarks/bench_attention.py --logits    sinks and soft-capped logits

All peers take turns in one run. Each direction has two timings. "called": events around each call, as a user makes it,
so that a slow host shows. "graph": calls captured in a CUDA graph and replayed, which leaves the GPU's work. The errors
of every peer are against float64, on a small version of the case. --sustained is a run of its own: forward and backward
for two seconds without rest, as training loads a GPU. Rows go to benchmarks/results/KIND_GPU.csv; the kind is
attention, dense or logits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import accuracy
import cupy
import peers
import record
import tables
import timing
from peers import Ours, Peer, TorchPeer, draw_inputs, release_memory, to_host
from record import Measured
from workloads import CASES, EQUAL, Case

from thdattn import PackedBatch

HOST_CALLS = 50  # timed on the host
KEY = ("gpu", "case", "peer", "direction", "timing")


class Kind(NamedTuple):
    """Peers that are compared, cases by default, and what makes tables of their rows."""

    peers: Mapping[str, type[Peer]]
    cases: Sequence[str]
    tables: Callable[[Sequence[record.Row]], list[str]]


KINDS = {
    "attention": Kind(peers.PEERS, [name for name in CASES if name not in EQUAL], tables.attention),
    "dense": Kind(peers.DENSE, list(EQUAL), tables.dense),
    "logits": Kind(peers.LOGITS, ["1x16384", "1x16384-gqa"], tables.logits),
}


def main() -> int:
    args = parse_arguments()
    versions = {}
    for name in args.peers:
        with reported(f"{name} left out"):
            versions[name] = KINDS[args.kind].peers[name].version()
    kinds = {name: KINDS[args.kind].peers[name] for name in versions}
    records = record.Recorder(args.kind, args.out, KEY)
    with cupy.cuda.Stream(non_blocking=True):  # the default stream cannot be captured
        for number, name in enumerate(args.cases, 1):
            start = time.perf_counter()
            if args.sustained:
                measured = sustained(CASES[name], kinds, args.repeats)
            else:
                measured = bench(CASES[name], kinds, args.repeats)
            release_memory()
            records.add(record.rows_of(CASES[name].columns, measured, versions))
            print(f"[{number}/{len(args.cases)}] {name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    records.show(KINDS[args.kind].tables)
    return 0


def make_peers(what: str, kinds: Mapping[str, type[Peer]], case: Any, inputs: Any) -> dict[str, Peer]:
    """Make the peers that take the case, on the same inputs; `what` is for messages."""
    peers: dict[str, Peer] = {}
    for name, kind in kinds.items():
        with reported(f"{what} {name}"):
            peers[name] = kind(case, inputs)
    return peers


def bench(case: Case, kinds: Mapping[str, type[Peer]], rounds: int) -> Measured:
    """Measure errors, times and the host's side of one case; what fails has no columns."""
    measured: Measured = {(name, way, how): {} for name in kinds for way in record.DIRECTIONS
                          for how in record.TIMINGS}
    measured |= {(name, result, record.ERRORS): {} for name in kinds for result in accuracy.RESULTS}
    with reported(f"{case.name}, errors"):
        measured |= errors(case, kinds)
    peers = make_peers(case.name, kinds, case, draw_inputs(case))
    for direction in record.DIRECTIONS:
        measured |= race(case.name, peers, direction, rounds, getattr(case.flops, direction))
    ours = peers.get("ours")
    if isinstance(ours, Ours):
        with reported(f"{case.name} ours, host side"):
            measured |= host_side(ours)
    return measured


def errors(case: Case, kinds: Mapping[str, type[Peer]]) -> Measured:
    """Measure the errors of every peer on a small version of the case."""
    small = accuracy.small(case)
    drawn = draw_inputs(small)
    inputs = [to_host(x) for x in drawn]
    plain = accuracy.exact(small, inputs)
    measured: Measured = {}
    for name, peer in make_peers(case.name, kinds, small, drawn).items():
        with reported(f"{case.name} {name}, errors"):
            wanted = accuracy.exact(small, inputs, **peer.logits) if peer.logits else plain
            forward_and_backward(peer)
            for result, error in accuracy.errors(peer.on_host(), wanted).items():
                measured[name, result, record.ERRORS] = error.columns
    return measured


def race(
    case: str, peers: Mapping[str, Peer], direction: str, rounds: int, flops: float | None
) -> Measured:
    """Time one direction of all peers in turns, called and in graphs.

    Args:
        case: name of the case, for messages.
        flops: operations of a call; None: rows have no speed.
    """
    calls = {name: getattr(peer, direction) for name, peer in peers.items()}
    sizes: dict[str, int] = {}
    for name, peer in peers.items():
        with reported(f"{case} {name} {direction}"):
            prepare(peer, direction, peers.get("ours"))
            sizes[name] = timing.calls_per_group(median(timing.called(calls[name], 3)))
    groups = {name: partial(timing.called, calls[name], size) for name, size in sizes.items()}
    called = timing.interleaved(groups, rounds, lambda name: reported(f"{case} {name} {direction} called"))
    replays = {}
    for name, size in sizes.items():
        with reported(f"{case} {name} {direction} graph"):
            in_graph = timing.calls_per_graph(size)
            replays[name] = partial(timing.replayed, peers[name].capture(calls[name], in_graph), in_graph)
    graph = timing.interleaved(replays, rounds, lambda name: reported(f"{case} {name} {direction} graph"))
    return {
        (name, direction, how): record.timed(samples, flops)
        for how, times in (("called", called), ("graph", graph))
        for name, samples in times.items()
    }


def sustained(case: Case, kinds: Mapping[str, type[Peer]], rounds: int) -> Measured:
    """Time forward and backward in captured graphs, each peer for two seconds without rest."""
    peers = make_peers(case.name, kinds, case, draw_inputs(case))
    pairs: dict[str, Callable[[], None]] = {}
    for name, peer in peers.items():
        with reported(f"{case.name} {name} sustained"):
            prepare(peer, "backward", peers.get("ours"))
            pairs[name] = partial(forward_and_backward, peer)
    replays = {}
    for name, pair in pairs.items():  # after all preparations, which release memory that a graph may use
        with reported(f"{case.name} {name} sustained"):
            calls = timing.calls_per_graph(timing.calls_per_group(median(timing.called(pair, 3))))
            replays[name] = partial(timing.sustained, peers[name].capture(pair, calls), calls)
    times = timing.interleaved(replays, rounds, lambda name: reported(f"{case.name} {name} sustained"))
    return {(name, *record.SUSTAINED): record.timed(times[name], sum(case.flops)) if name in times else {}
            for name in kinds}


def forward_and_backward(peer: Peer) -> None:
    peer.forward()
    peer.backward()


def prepare(peer: Peer, direction: str, ours: Peer | None) -> None:
    """Compile and load by one call, and compare its results with ours: wrong results are not timed."""
    peer.forward()
    if direction == "backward":
        peer.backward()
    if ours is not None and isinstance(peer, TorchPeer):
        peer.check(ours.results())
    release_memory()
    getattr(peer, direction)()  # allocate again from the pools


def host_side(ours: Ours) -> Measured:
    """Time the host in plans and in both forms of a forward call."""
    measured: Measured = {}
    alike = PackedBatch(ours.batch.cu_seqlens)  # plans of ours.batch would share arrays
    plan = partial(ours.attn.plan, alike, "contiguous", ours.key_batch)
    for name, call in (("plan", plan), ("forward", ours.forward), ("varlen_attention", ours.varlen_attention)):
        call()
        measured["ours", name, "host"] = record.timed(timing.returned(call, HOST_CALLS))
    return measured


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Write an error to stderr and go on: no peer may end the run."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        print(f"{what}: {type(error).__name__}: {reason[:300]}", file=sys.stderr)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", dest="kind", action="store_const", const="dense", default="attention",
                        help="compare packs of equal lengths with dense batches, by the fastest dense kernels")
    parser.add_argument("--logits", dest="kind", action="store_const", const="logits",
                        help="compare sinks and softcaps with attention without them")
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help=f"some of {' '.join(CASES)}")
    parser.add_argument("--peers", type=lambda names: names.split(","), metavar="PEER,PEER",
                        help=f"all by default: {','.join(peers.PEERS)}; ours is always timed")
    parser.add_argument("--sustained", action="store_true",
                        help="time forward and backward together, two seconds a turn without rest, and nothing else")
    record.add_options(parser, "KIND", repeats=5)
    args = parser.parse_args()
    known = KINDS[args.kind].peers
    args.cases = args.cases or KINDS[args.kind].cases
    if unknown := set(args.peers or ()) - set(known):
        parser.error(f"unknown peers {', '.join(sorted(unknown))}; wanted some of {', '.join(known)}")
    args.peers = ["ours", *(name for name in known if name in (args.peers or known) and name != "ours")]
    return args


if __name__ == "__main__":
    sys.exit(main())
