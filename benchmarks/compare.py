"""Time the kernels of several source trees of this package, in turns on one GPU in one run.

    python benchmarks/compare.py --trees base=../base new=.
    python benchmarks/compare.py --trees base=../base new=. --cases 1x16384 4x4096 --directions backward

Each tree has a process of its own, because all packages are named thdattn. The process answers one question at a time,
while the others leave the GPU idle: calls in replayed CUDA graphs, on the same inputs. A ratio is the speed of a tree
over that of the first, in the same round: median, and lowest to highest round.

A question is a line of JSON on stdin, {"do": METHOD, ...arguments}. The answer is a line on stdout: what the method of
`Measure` returns, or {"error": TEXT}.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import cupy
import tables
import timing
from peers import PEERS, Peer, draw_inputs, release_memory
from workloads import CASES

import thdattn
from thdattn.jit import compiler

DIRECTIONS = ("forward", "backward")
WAYS = ("ours", "deterministic", "portable")
SERVE = "--answer-questions"  # the process of a tree
Samples = dict[str, list[float]]  # tree -> milliseconds, one per round
Measured = dict[tuple[str, str, str], tuple[float, Samples]]  # (case, way, direction) -> (TFLOP of a call, samples)


class Tree:
    """Process of one source tree; it starts with the first question, and again after it failed."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], patience: float = 300) -> None:
        self.name = name
        self.command = command
        self.env = env
        self.patience = patience  # seconds for an answer, in which kernels are compiled
        self.process: subprocess.Popen[str] | None = None

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a question and return the answer.

        Raises:
            RuntimeError: the tree could not do it, died, or did not answer in time.
        """
        self.send(do, **arguments)
        return self.receive()

    def send(self, do: str, **arguments: Any) -> None:
        """Send a question without waiting for the answer."""
        if self.process is None:
            self.process = subprocess.Popen(
                self.command, env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # `receive` says that the process is gone
            print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)

    def receive(self) -> dict[str, Any]:
        """Return the answer to the last question."""
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
        """Kill the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


class Measure:
    """Case that is measured in the process of a tree, and the graph that is replayed."""

    peer: Peer | None = None
    measured = ("", "")  # case and way of `peer`
    replay: Callable[[], list[float]] | None = None

    def about(self) -> dict[str, str]:
        """Return the folder of the package and the hash of its kernels."""
        return {"package": str(Path(thdattn.__file__).parent), "kernel_sources": compiler.source_hash()}

    def prepare(self, case: str, way: str, direction: str) -> dict[str, float]:
        """Compile and call the kernels; return rough milliseconds and TFLOP of a call."""
        self.replay = None  # no graph may be alive when memory is released
        if self.measured != (case, way):
            self.peer, self.measured = None, ("", "")
            release_memory()
            self.peer = PEERS[way](CASES[case], draw_inputs(CASES[case]))
            self.measured = case, way
            self.peer.forward()
        call = getattr(self.peer, direction)
        call()
        return {"ms": median(timing.called(call, 3)), "tflop": getattr(CASES[case].flops, direction) / 1e12}

    def capture(self, direction: str, ms: float) -> dict[str, int]:
        """Capture the graph that `time` replays, of as many calls of `ms` milliseconds as make a group."""
        assert self.peer is not None
        calls = timing.calls_per_graph(timing.calls_per_group(ms))
        self.replay = partial(timing.replayed, self.peer.capture(getattr(self.peer, direction), calls), calls)
        return {"calls": calls}

    def time(self) -> dict[str, list[float]]:
        """Return milliseconds of a call in the captured graph, on a rested GPU."""
        assert self.replay is not None
        time.sleep(timing.REST)
        return {"ms": self.replay()}


def serve(measure: Any, questions: TextIO, answers: TextIO) -> None:
    """Answer until there are no more questions; an error is an answer too."""
    for line in questions:
        question = json.loads(line)
        try:
            answer = getattr(measure, question.pop("do"))(**question)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


def answer_questions() -> None:
    """Serve the questions of stdin on stdout; what a library prints goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with cupy.cuda.Stream(non_blocking=True):  # the default stream cannot be captured
        serve(Measure(), sys.stdin, answers)


def race(trees: Sequence[Tree], rounds: int, case: str, way: str, direction: str) -> tuple[float, Samples]:
    """Return the TFLOP of a call and a time per round of every tree that has one; the first tree changes each round."""
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
    """Return the answer of each tree by name; leave out trees that fail, and write the reason to stderr."""
    found = {}
    for tree in trees:
        try:
            found[tree.name] = ask(tree)
        except RuntimeError as error:
            print(f"{what}: {error}", file=sys.stderr)
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
    if sys.argv[1:] == [SERVE]:
        answer_questions()
        return 0
    args = parse_arguments()
    trees = [
        Tree(name, [sys.executable, __file__, SERVE], os.environ | {"PYTHONPATH": os.pathsep.join(
            filter(None, [str(folder), os.environ.get("PYTHONPATH")]))})
        for name, folder in args.trees
    ]
    names = [tree.name for tree in trees]
    measured: Measured = {}
    try:
        for tree, (_, folder) in zip(trees, args.trees, strict=True):
            about = tree.ask("about")
            if Path(about["package"]) != folder / "thdattn":
                raise RuntimeError(f"tree {tree.name!r} imports {about['package']}, wanted {folder / 'thdattn'}")
            print(f"{tree.name}: {folder}, kernel sources {about['kernel_sources']}", flush=True)
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
