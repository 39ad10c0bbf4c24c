"""Times packed attention, forward and backward, against every other implementation that can be imported.

    python benchmarks/bench_attention.py --plot
    python benchmarks/bench_attention.py --cases 1x16384 lognormal64k --peers deterministic,fa4

Two timings of each direction. "called": events around each call, as a user makes it, so that a slow host shows.
"graph": the calls captured in a CUDA graph and replayed, which leaves the GPU's work. All take turns in one run.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import cupy
import record
import timing
from peers import PEERS, Ours, Peer, TorchPeer, draw_inputs, release_memory
from workloads import CASES, Case

Measured = dict[tuple[str, str, str], float]  # (peer, direction, timing) -> milliseconds


def main() -> int:
    args = parse_arguments()
    directions = record.DIRECTIONS[:1] if args.forward_only else record.DIRECTIONS
    versions = {}
    for name in args.peers:
        with reported(f"{name} left out"):
            versions[name] = PEERS[name].version()
    about = record.provenance()
    path = args.out or record.results_file("attention", about["gpu"])
    rows: list[record.Row] = []
    everything: list[record.Row] = []
    with cupy.cuda.Stream(non_blocking=True):  # the default stream cannot be captured
        for number, name in enumerate(args.cases, 1):
            start = time.perf_counter()
            measured = bench(CASES[name], list(versions), directions, args.repeats)
            release_memory()
            made = [about | row for row in rows_of(CASES[name], versions, directions, measured)]
            everything = record.save(path, made, ("gpu", "case", "peer", "direction", "timing"))
            rows += made
            print(f"[{number}/{len(args.cases)}] {name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print("TFLOP/s and ratios are forward/backward; a ratio above 1 says that ours is the faster one")
    print(record.table(rows))
    print(f"wrote {path}")
    if args.plot:
        record.plot([row for row in everything if row["gpu"] == about["gpu"]], path.with_suffix(".png"))
        print(f"wrote {path.with_suffix('.png')}")
    return 0


def bench(case: Case, names: Sequence[str], directions: Sequence[str], rounds: int) -> Measured:
    """All times of one case; what could not be measured is missing."""
    inputs = draw_inputs(case)
    peers: dict[str, Peer] = {}
    for name in names:
        with reported(f"{case.name} {name}"):
            peers[name] = PEERS[name](case, inputs)
    measured: Measured = {}
    for direction in directions:
        measured |= race(case, peers, direction, rounds)
    ours = peers.get("ours")
    if isinstance(ours, Ours):
        with reported(f"{case.name} ours, host side"):
            measured |= host_side(ours)
    return measured


def race(case: Case, peers: Mapping[str, Peer], direction: str, rounds: int) -> Measured:
    """Both timings of one direction, the peers taking turns."""
    calls = {name: getattr(peer, direction) for name, peer in peers.items()}
    sizes: dict[str, int] = {}
    for name, peer in peers.items():
        with reported(f"{case.name} {name} {direction}"):
            prepare(peer, direction, peers.get("ours"))
            sizes[name] = timing.calls_per_group(median(timing.called(calls[name], 3)))
    groups = {name: partial(timing.called, calls[name], size) for name, size in sizes.items()}
    called = timing.interleaved(groups, rounds, lambda name: reported(f"{case.name} {name} {direction} called"))
    replays = {}
    for name, size in sizes.items():
        with reported(f"{case.name} {name} {direction} graph"):
            in_graph = timing.calls_per_graph(size)
            replays[name] = partial(timing.replayed, peers[name].capture(calls[name], in_graph), in_graph)
    graph = timing.interleaved(replays, rounds, lambda name: reported(f"{case.name} {name} {direction} graph"))
    return {(name, direction, "called"): ms for name, ms in called.items()} | {
        (name, direction, "graph"): ms for name, ms in graph.items()
    }


def prepare(peer: Peer, direction: str, ours: Peer | None) -> None:
    """One call, so that everything is compiled and loaded, and a look at its results: garbage is not timed."""
    peer.forward()
    if direction == "backward":
        peer.backward()
    if ours is not None and isinstance(peer, TorchPeer):
        peer.check(ours.results())
    release_memory()
    getattr(peer, direction)()  # allocates again what the pools gave back


def host_side(ours: Ours) -> Measured:
    """The time to make a plan, to the end of its GPU work, and the host's time of a forward call."""
    measured: Measured = {}
    for side, batch in (("host_lengths", ours.batch), ("device_lengths", ours.batch_on_device)):
        make = partial(ours.attn.plan, batch, "contiguous")
        make()
        measured["ours", "plan", side] = timing.finished(make, 5)
    ours.forward()
    measured["ours", "forward", "host"] = timing.host(ours.forward, 5)
    return measured


def rows_of(
    case: Case, versions: Mapping[str, str], directions: Sequence[str], measured: Measured
) -> Iterator[record.Row]:
    """A row per measurement asked for, blank where it failed, so that it also replaces an older one."""
    keys = [(name, way, how) for name in versions for way in directions for how in record.TIMINGS]
    keys += [key for key in measured if key not in keys]
    for peer, direction, how in keys:
        ms = measured.get((peer, direction, how))
        counted = ms is not None and how in record.TIMINGS
        yield {
            "case": case.name,
            "heads": str(case.heads),
            "kv_heads": str(case.kv_heads),
            "head_dim": str(case.head_dim),
            "v_head_dim": str(case.v_head_dim),
            "dtype": "bfloat16",
            "causal": str(case.causal),
            "window": "{}:{}".format(*case.window),
            "total_tokens": str(case.total_tokens),
            "num_seqs": str(len(case.lengths)),
            "peer": peer,
            "peer_version": versions[peer],
            "direction": direction,
            "timing": how,
            "ms": "" if ms is None else f"{ms:.5f}",
            "tflops": f"{getattr(case.flops, direction) / ms / 1e9:.2f}" if ms is not None and counted else "",
        }


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Writes an error to stderr and goes on: no peer may end the run."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        print(f"{what}: {type(error).__name__}: {reason[:300]}", file=sys.stderr)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE",
                        help=f"all by default: {' '.join(CASES)}")  # fmt: skip
    usual = [name for name in PEERS if name != "deterministic"]
    parser.add_argument("--peers", type=lambda names: names.split(","), default=usual,
                        help=f"comma-separated, {','.join(usual)} by default; deterministic too; ours is always timed")
    parser.add_argument("--repeats", type=int, default=5, help="turns of every peer, 5 by default")
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--out", type=Path, help="CSV file to add to; benchmarks/results/attention_GPU.csv by default")
    parser.add_argument("--plot", action="store_true", help="also draw the CSV file's rows of this GPU, as PNG")
    args = parser.parse_args()
    unknown = set(args.peers) - set(PEERS)
    if unknown:
        parser.error(f"unknown peers {', '.join(sorted(unknown))}; wanted some of {', '.join(PEERS)}")
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}, wanted >= 1")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'thdattn[bench]'")
    args.peers = ["ours", *(name for name in PEERS if name in args.peers and name != "ours")]
    return args


if __name__ == "__main__":
    sys.exit(main())
