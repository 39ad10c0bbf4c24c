"""Time the kernels of several source trees of this package, in turns on one GPU in one run.

    python benchmarks/compare.py --trees base=../base new=.
    python benchmarks/compare.py --trees base=../base new=. --cases 1x16384 4x4096 --directions backward

Each tree has processes of its own, because all packages are named thdattn. While one is timed, the others leave the GPU
idle: calls in replayed CUDA graphs, on the same inputs. A ratio is the speed of a tree over that of the first, in the
same round: median, and lowest to highest round.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import cupy
import tables
import timing
from peers import PEERS, draw_inputs
from record import DIRECTIONS
from workloads import CASES

import thdattn
from thdattn.jit import compiler

WAYS = ("ours", "deterministic", "portable")
Trees = Mapping[str, Executor]  # name -> process
Samples = dict[str, list[float]]  # tree -> milliseconds, one per round
Measured = dict[tuple[str, str, str], tuple[float, Samples]]  # (case, way, direction) -> (TFLOP of a call, samples)


# --- in the process of a tree ------------------------------------------------------------------------------------


class Measure:
    """Case that is measured by one process, and the graph that is replayed."""

    replay: Callable[[], list[float]] | None = None

    def __init__(self, case: str, way: str) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)  # the default stream cannot be captured
        self.stream.use()
        self.flops = CASES[case].flops
        self.peer = PEERS[way](CASES[case], draw_inputs(CASES[case]))
        self.peer.forward()

    def prepare(self, direction: str) -> tuple[float, float]:
        """Compile and call the kernels; return rough milliseconds and TFLOP of a call."""
        call = getattr(self.peer, direction)
        call()
        return median(timing.called(call, 3)), getattr(self.flops, direction) / 1e12

    def capture(self, direction: str, ms: float) -> None:
        """Capture the graph that `time` replays, of as many calls of `ms` milliseconds as make a group."""
        calls = timing.calls_per_graph(timing.calls_per_group(ms))
        self.replay = partial(timing.replayed, self.peer.capture(getattr(self.peer, direction), calls), calls)

    def time(self) -> float:
        """Return milliseconds of a call in the captured graph, on a rested GPU."""
        assert self.replay is not None
        time.sleep(timing.REST)
        return median(self.replay())


@cache
def measure(case: str, way: str) -> Measure:
    """Return the measurement of this process."""
    return Measure(case, way)


def ask(case: str, way: str, do: str, *arguments: Any) -> Any:
    """Call a method of the measurement."""
    return getattr(measure(case, way), do)(*arguments)


def about() -> tuple[str, str]:
    """Return the folder of the package and the hash of its kernels."""
    return str(Path(thdattn.__file__).parent), compiler.source_hash()


# --- in turns ----------------------------------------------------------------------------------------------------


def process(folder: Path) -> Executor:
    """Start a process that imports the package in a folder.

    Raises:
        RuntimeError: the process imports another one.
    """
    made = ProcessPoolExecutor(1, get_context("spawn"))
    sys.path.insert(0, str(folder))  # which the new process inherits
    try:
        package, _ = made.submit(about).result()
    finally:
        sys.path.remove(str(folder))
    if Path(package) != folder / "thdattn":
        raise RuntimeError(f"a process imports {package}, wanted {folder / 'thdattn'}; uninstall the former")
    return made


def race(trees: Trees, rounds: int, case: str, way: str, direction: str) -> tuple[float, Samples]:
    """Return the TFLOP of a call and a time per round of every tree that has one; the first tree changes each round."""

    def ask_all(names: Iterable[str], do: str, *arguments: Any) -> dict[str, Any]:
        asked = {name: submitted(trees[name], case, way, do, *arguments) for name in names}
        return answers(f"{case} {way} {direction}", asked)

    prepared = ask_all(trees, "prepare", direction)
    ms = min((ms for ms, _ in prepared.values()), default=0.0)  # graphs of as many calls for every tree
    samples: Samples = {name: [] for name in prepared if name in ask_all([name], "capture", direction, ms)}
    for number in range(rounds):
        names = [*samples]
        first = number % max(1, len(names))
        for name in names[first:] + names[:first]:
            times = ask_all([name], "time")
            if times:
                samples[name].append(times[name])
            else:
                del samples[name]
    return max((tflop for _, tflop in prepared.values()), default=0.0), samples


def submitted(tree: Executor, *question: Any) -> Future[Any]:
    """Send a question to a tree; the future of a dead one fails."""
    try:
        return tree.submit(ask, *question)
    except BrokenExecutor as error:
        dead: Future[Any] = Future()
        dead.set_exception(error)
        return dead


def answers(what: str, asked: Mapping[str, Future[Any]]) -> dict[str, Any]:
    """Return the answer of each tree; leave out trees that fail, and write the reason to stderr."""
    found = {}
    for name, future in asked.items():
        try:
            found[name] = future.result()
        except Exception as error:
            print(f"{what}, tree {name!r}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
    return found


def row(names: Sequence[str], tflop: float, samples: Samples) -> list[str]:
    """Return the cells of one measurement: TFLOP/s of every tree, then the ratio of every tree but the first."""
    speeds = [f"{tflop / median(samples[name]) * 1e3:.1f}" if name in samples else "-" for name in names]
    return speeds + [
        spread([base / ms for base, ms in zip(samples[names[0]], samples[name], strict=True)])
        if names[0] in samples and name in samples else "-"
        for name in names[1:]
    ]


def spread(values: Sequence[float]) -> str:
    """Format median, lowest and highest."""
    return f"{median(values):.3f} ({min(values):.3f}..{max(values):.3f})"


def table(names: Sequence[str], measured: Measured) -> str:
    """Make the table of all measurements; its last line has the lowest ratio of each tree."""
    lines = [["case", "direction", *(f"{name} TFLOP/s" for name in names), *(f"{x}/{names[0]}" for x in names[1:])]]
    for (case, way, direction), (tflop, samples) in measured.items():
        lines.append([case if way == "ours" else f"{case} {way}", direction, *row(names, tflop, samples)])
    worst = ["lowest ratio", "", *[""] * len(names)]
    for i in range(len(names) + 2, len(lines[0])):
        found = [line[i].split()[0] for line in lines[1:] if line[i] != "-"]
        worst.append(min(found, key=float, default="-"))
    return tables.table(lines[0], [*lines[1:], worst])


def main() -> int:
    args = parse_arguments()
    names = [name for name, _ in args.trees]
    measured: Measured = {}
    for name, folder in args.trees:
        with process(folder) as tree:
            print(f"{name}: {folder}, kernel sources {tree.submit(about).result()[1]}", flush=True)
    try:
        for case, way in product(args.cases, args.ways):
            with ExitStack() as stack:  # new processes, because one may have died
                trees = {name: stack.enter_context(process(folder)) for name, folder in args.trees}
                for direction in args.directions:
                    measured[case, way, direction] = race(trees, args.rounds, case, way, direction)
                    print(case, way, direction, *row(names, *measured[case, way, direction]), flush=True)
    finally:
        if measured:
            print(f"\nTFLOP/s and ratios of speed, {args.rounds} rounds\n{table(names, measured)}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", type=named_folder, required=True, metavar="NAME=PATH",
                        help="clones of this repository, or their src folders; ratios are over the first")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), metavar="CASE",
                        help=f"all by default: {' '.join(CASES)}")
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS, help="both by default")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:1], help="ours by default")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every tree, 5 by default")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}, wanted >= 1")
    if len({name for name, _ in args.trees}) < len(args.trees):
        parser.error("two --trees have the same name; wanted a name of its own for each")
    return args


def named_folder(text: str) -> tuple[str, Path]:
    """Parse NAME=PATH to the name and the folder that holds the package."""
    name, _, path = text.partition("=")
    for folder in (Path(path).resolve(), Path(path).resolve() / "src"):
        if name and path and (folder / "thdattn" / "__init__.py").exists():
            return name, folder
    raise argparse.ArgumentTypeError(f"{text!r} is no NAME=PATH of a folder that holds thdattn or src/thdattn")


if __name__ == "__main__":
    sys.exit(main())
