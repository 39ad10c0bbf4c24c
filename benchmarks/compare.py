"""Times the kernels of several source trees of this package, taking turns on one GPU in one run.

    python benchmarks/compare.py --trees base=../base new=.
    python benchmarks/compare.py --trees base=../base new=. --cases 1x16384 4x4096 --directions backward
    python benchmarks/compare.py --trees base=../base new=. --cases --errors 1x16384    nothing but the errors

Every tree is a process of its own (compare_tree.py), as all are named thdattn. It is asked for one measurement at a
time, while the others leave the GPU idle: calls in replayed CUDA graphs, on the same inputs. A ratio is the speed of a
tree over that of the first, in the same round: median, and lowest to highest round.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tables
from workloads import CASES

DIRECTIONS = ("forward", "backward")
WAYS = ("ours", "deterministic", "portable")
Samples = dict[str, list[float]]  # tree -> milliseconds, one per round
Measured = dict[tuple[str, str, str], tuple[float, Samples]]  # (case, way, direction) -> (TFLOP of a call, samples)


class Tree:
    """The process of one source tree; it starts with the first question, and again after it failed."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], patience: float = 300) -> None:
        self.name = name
        self.command = command
        self.env = env
        self.patience = patience  # seconds for an answer, in which kernels are compiled
        self.process: subprocess.Popen[str] | None = None

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Question and answer.

        Raises:
            RuntimeError: the tree could not do it, died, or did not answer in time.
        """
        self.send(do, **arguments)
        return self.receive()

    def send(self, do: str, **arguments: Any) -> None:
        """Asks without waiting for the answer."""
        if self.process is None:
            self.process = subprocess.Popen(
                self.command, env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # `receive` says that the process is gone
            print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)

    def receive(self) -> dict[str, Any]:
        """The answer to what was sent last."""
        assert self.process is not None and self.process.stdout is not None
        heard, _, _ = select.select([self.process.stdout], [], [], self.patience)
        line = self.process.stdout.readline() if heard else ""
        if not line:
            self.close()
            how = "ended without an answer" if heard else f"gave no answer in {self.patience:g} s"
            raise RuntimeError(f"the process of tree {self.name!r} {how}; see what it wrote above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"tree {self.name!r}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Ends the process, whatever it is at."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def race(trees: Sequence[Tree], rounds: int, case: str, way: str, direction: str) -> tuple[float, Samples]:
    """(TFLOP of a call, a time per round of every tree that has one); who begins changes from round to round."""
    what = f"{case} {way} {direction}"
    for tree in trees:
        tree.send("prepare", case=case, way=way, direction=direction)  # all compile at once
    prepared = answers(trees, what, lambda tree: tree.receive())
    ms = min((answer["ms"] for answer in prepared.values()), default=0.0)  # graphs of as many calls for every tree
    trees = [tree for tree in trees if tree.name in prepared]
    captured = answers(trees, what, lambda tree: tree.ask("capture", direction=direction, ms=ms))
    samples: Samples = {name: [] for name in captured}
    for number in range(rounds):
        racing = [tree for tree in trees if tree.name in samples]
        first = number % max(1, len(racing))
        times = answers(racing[first:] + racing[:first], what, lambda tree: tree.ask("time"))
        samples = {name: [*samples[name], median(times[name]["ms"])] for name in samples if name in times}
    return max((answer["tflop"] for answer in prepared.values()), default=0.0), samples


def answers(trees: Sequence[Tree], what: str, ask: Callable[[Tree], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each tree answers, by name; one that could not is left out, and stderr says why."""
    found = {}
    for tree in trees:
        try:
            found[tree.name] = ask(tree)
        except RuntimeError as error:
            print(f"{what}: {error}", file=sys.stderr)
    return found


def row(names: Sequence[str], tflop: float, samples: Samples) -> list[str]:
    """Cells of one measurement: TFLOP/s of every tree, then the ratio of every tree but the first."""
    speeds = [f"{tflop / median(samples[name]) * 1e3:.1f}" if name in samples else "-" for name in names]
    return speeds + [
        spread([base / ms for base, ms in zip(samples[names[0]], samples[name], strict=True)])
        if names[0] in samples and name in samples else "-"
        for name in names[1:]
    ]  # fmt: skip


def spread(values: Sequence[float]) -> str:
    """Median, lowest and highest."""
    return f"{median(values):.3f} ({min(values):.3f}..{max(values):.3f})"


def table(names: Sequence[str], measured: Measured) -> str:
    """All measurements, and last the lowest ratio of each tree."""
    lines = [["case", "direction", *(f"{name} TFLOP/s" for name in names), *(f"{x}/{names[0]}" for x in names[1:])]]
    for (case, way, direction), (tflop, samples) in measured.items():
        lines.append([case if way == "ours" else f"{case} {way}", direction, *row(names, tflop, samples)])
    worst = ["lowest ratio", "", *[""] * len(names)]
    for i in range(len(names) + 2, len(lines[0])):
        found = [line[i].split()[0] for line in lines[1:] if line[i] != "-"]
        worst.append(min(found, key=float, default="-"))
    return tables.table(lines[0], [*lines[1:], worst])


def error_table(trees: Sequence[Tree], cases: Sequence[str], ways: Sequence[str]) -> str:
    """Relative RMS and largest error of every result, of every tree, on small versions of cases."""
    lines = [["small case", "tree", "out", "dq", "dk", "dv"]]
    for case in cases:
        for way in ways:
            ask = partial(Tree.ask, do="errors", case=case, way=way)
            for name, errors in answers(trees, f"errors of {case} {way}", ask).items():
                cells = [f"{rms:.3e} max {largest:.2e}" for rms, largest in errors.values()]
                lines.append([case if way == "ours" else f"{case} {way}", name, *cells])
    return tables.table(lines[0], lines[1:])


def main() -> int:
    args = parse_arguments()
    script = Path(__file__).with_name("compare_tree.py")
    trees = [
        Tree(name, [sys.executable, str(script)], os.environ | {"PYTHONPATH": os.pathsep.join(
            filter(None, [str(folder), os.environ.get("PYTHONPATH")]))})
        for name, folder in args.trees
    ]  # fmt: skip
    names = [tree.name for tree in trees]
    measured: Measured = {}
    try:
        for tree, (_, folder) in zip(trees, args.trees, strict=True):
            about = tree.ask("about")
            if Path(about["package"]) != folder / "thdattn":
                raise RuntimeError(f"tree {tree.name!r} imports {about['package']}, wanted {folder / 'thdattn'}")
            print(f"{tree.name}: {folder}, kernel sources {about['kernel_sources']}", flush=True)
        if args.errors:
            print(error_table(trees, args.errors, args.ways), flush=True)
        for case in args.cases:
            for way in args.ways:
                for direction in args.directions:
                    measured[case, way, direction] = race(trees, args.rounds, case, way, direction)
                    print(case, way, direction, *row(names, *measured[case, way, direction]), flush=True)
    finally:
        for tree in trees:
            tree.close()
        if measured:
            print(f"\nTFLOP/s and ratios of speed, {args.rounds} rounds\n{table(names, measured)}")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", type=named_folder, required=True, metavar="NAME=PATH",
                        help="clones of this repository, or their src folders; ratios are over the first")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), metavar="CASE",
                        help=f"all by default: {' '.join(CASES)}")  # fmt: skip
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS, help="both by default")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS[:1], help="ours by default")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every tree, 5 by default")
    parser.add_argument("--errors", nargs="+", choices=CASES, default=[], metavar="CASE",
                        help="also the errors against float64, on small versions of these cases")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}, wanted >= 1")
    if len({name for name, _ in args.trees}) < len(args.trees):
        parser.error("two --trees have the same name; wanted a name of its own for each")
    return args


def named_folder(text: str) -> tuple[str, Path]:
    """NAME=PATH to the name and the folder that holds the package."""
    name, _, path = text.partition("=")
    for folder in (Path(path).resolve(), Path(path).resolve() / "src"):
        if name and path and (folder / "thdattn" / "__init__.py").exists():
            return name, folder
    raise argparse.ArgumentTypeError(f"{text!r} is no NAME=PATH of a folder that holds thdattn or src/thdattn")


if __name__ == "__main__":
    sys.exit(main())
