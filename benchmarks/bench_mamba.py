"""Time Mamba-2 mixers over packed sequences, forward and backward, beside mamba_ssm's Triton kernels.

    python benchmarks/bench_mamba.py
    python benchmarks/bench_mamba.py --cases 1x16384 64x256 --parts scan --peers mamba_ssm
    mpiexec -n 2 python -m mpi4py benchmarks/bench_mamba.py --peer

"mixer" is convolution, scan and gate; "scan" is without the convolution. mamba_peers.py describes the others. Timings
are those of bench_attention.py: "called" and "graph". Errors are against float64, on the first rows of the short packs,
of weights over several draws. Cases with a norm (-norm) are timed only. The floor of a time is what the GPU's memory
needs to read all inputs and write all outputs once.

On several ranks it times calls of the long packs, with their rows over the ranks, beside one GPU with the whole pack.
With --peer it also times an all-to-all of heads around mamba_ssm's kernels. Rows go to
benchmarks/results/mamba_GPU.csv.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cupy
import record
import tables
from accuracy import Error
from bench_attention import forward_and_backward, make_peers, race, reported
from cp_methods import ONE
from mamba_cases import BYTES_PER_S, CASES, DRAWS, MixerCase, draw
from mamba_exact import OF_WEIGHTS, PARTS, errors, exact_mixer, exact_scan, of_draws
from mamba_peers import PEERS, tune_for
from peers import Peer, release_memory
from record import Key, Measured

import thdattn

EXACT = {"mixer": exact_mixer, "scan": exact_scan}
LONG = 65_536  # rows, from which on a pack is long
KEY = ("gpu", "ranks", "case", "part", "peer", "direction", "timing")


def main() -> int:
    args = parse_arguments()
    if args.tune_ms:
        tune_for(args.tune_ms)
    with thdattn.comm.init() as comm, cupy.cuda.Stream(non_blocking=True):  # the default stream cannot be captured
        records = record.Recorder("mamba", args.out, KEY, comm.size)
        names = args.cases or [name for name, case in CASES.items() if comm.size == 1 or case.total_tokens > LONG]
        if comm.size > 1:
            import mamba_cp

            measurements = mamba_cp.measure(comm, [CASES[name] for name in names], args.peer, args.repeats)
        else:
            measurements = measure(names, args.parts, args.peers, args.repeats)
        for case, part, versions, measured in measurements:
            columns = {"ranks": str(comm.size), **case.columns, "part": part}
            add_floor(case, records.about["gpu"], comm.size, measured)
            records.add(record.rows_of(columns, measured, versions), comm.rank == 0)
    if comm.rank == 0:
        records.show(tables.mixers)
    return 0


def measure(
    names: Sequence[str], parts: Sequence[str], peers: Sequence[str], rounds: int
) -> Iterator[tuple[MixerCase, str, Mapping[str, str], Measured]]:
    """Yield case, part, versions and measurements."""
    for name in names:
        for part in parts:
            start = time.perf_counter()
            versions = {}
            for peer in peers:
                with reported(f"{peer} left out"):
                    versions[peer] = PEERS[part][peer].version()
            yield CASES[name], part, versions, bench(CASES[name], part, list(versions), rounds)
            release_memory()
            print(f"{name} {part}: {time.perf_counter() - start:.0f} s", file=sys.stderr)


def bench(case: MixerCase, part: str, names: Sequence[str], rounds: int) -> Measured:
    """Measure one part of a case; what fails has no columns, and replaces an older row."""
    measured: Measured = {(name, way, how): {} for name in names for way in record.DIRECTIONS for how in record.TIMINGS}
    if case.total_tokens <= LONG and not case.norm:
        measured |= {(name, result, record.ERRORS): {} for name in names for result in PARTS[part]}
        measured |= small_errors(case.small(), part, names, cupy)
    peers = make_peers(f"{case.name} {part}", kinds(part, names), case, draw(case, cupy))
    for direction in record.DIRECTIONS:
        measured |= race(f"{case.name} {part}", peers, direction, rounds, None)
    return measured


def kinds(part: str, names: Sequence[str]) -> dict[str, type[Peer]]:
    return {name: PEERS[part][name] for name in names}


def small_errors(case: MixerCase, part: str, names: Sequence[str], xp: Any) -> Measured:
    """Measure the errors of every peer; of gradients of weights, which are few numbers, over all draws of inputs."""
    found: dict[Key, list[Error]] = {}
    for seed in range(DRAWS):
        inputs = draw(case, xp, seed=seed)
        wanted = EXACT[part](case, inputs, xp)
        wanted = {name: right for name, right in wanted.items() if seed == 0 or name in OF_WEIGHTS}
        for name, peer in make_peers(f"{case.name} {part}", kinds(part, names), case, inputs).items():
            with reported(f"{case.name} {part} {name}, errors"):
                forward_and_backward(peer)
                made = dict(zip(PARTS[part], peer.on_host(), strict=True))
                for result, error in errors(made, wanted).items():
                    found.setdefault((name, result, record.ERRORS), []).append(error)
    return {key: of_draws(each).columns for key, each in found.items()}


def add_floor(case: MixerCase, gpu: str, ranks: int, measured: Measured) -> None:
    """Add the time that the memory of a known GPU needs at least."""
    for (peer, direction, _), found in measured.items():
        if gpu in BYTES_PER_S and direction in record.DIRECTIONS:
            share = 1 if peer == ONE else ranks
            found["floor_ms"] = f"{1e3 * case.least_bytes(direction) / share / BYTES_PER_S[gpu]:.4f}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE",
                        help=f"all by default, on several ranks the long ones: {' '.join(CASES)}")
    parser.add_argument("--parts", nargs="+", choices=list(PEERS), default=list(PEERS), help="both by default")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS["scan"]), default=list(PEERS["scan"]),
                        help="on one rank; all by default")
    parser.add_argument("--peer", action="store_true", help="on several ranks: also time the all-to-all of heads")
    parser.add_argument("--tune-ms", type=record.positive, metavar="MS",
                        help="for which Triton's tuner measures each candidate; 100 by default")
    record.add_options(parser, "mamba", repeats=3)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
