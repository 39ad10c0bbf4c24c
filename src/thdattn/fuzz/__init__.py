"""Command `fuzz`: check random packs through every method, mask, layout and option against float64, for some time.

Under mpiexec it uses the real ranks, which draw the same cases from the seed; alone it simulates ranks. A case that
fails is printed as one line, which --case takes. --chaos runs jobs in which a rank fails; see chaos.py.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from thdattn.cli.options import add_engine
from thdattn.cli.record import save
from thdattn.comm import init
from thdattn.engines.select import choose_engine
from thdattn.fuzz import chaos
from thdattn.fuzz.cases import FuzzCase, draw_case, draw_configuration
from thdattn.fuzz.judge import judge
from thdattn.fuzz.runs import SECONDS_FOR_RANKS, Ranks, Results, poisoned, portable_kernels, run_on_all

PACKS_OF_A_ROUND = 16
ROUNDS_OF_A_CONFIGURATION = {"reference": 1, "cuda": 8}  # more on a GPU, whose kernels are compiled first
SECONDS_BETWEEN_LINES = 10.0
MOST_NEAR = 0.02  # share of cases that may be near: beyond the rule, but by no more than chance explains


@dataclass
class Totals:
    """Judgements of the cases so far, summed up."""

    packs: int = 0
    near: int = 0
    worst: float = 0.0
    failures: list[str] = field(default_factory=list)

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.packs + other.packs, self.near + other.near, max(self.worst, other.worst),
                      self.failures + other.failures)

    def __str__(self) -> str:
        return f"largest error {self.worst:.2f} of its budget, {self.near} near"

    @classmethod
    def of(cls, case: FuzzCase, results: list[Results] | Exception) -> Totals:
        """Judge a case by the results of all ranks or the error of one; print a failure as the line that repeats it."""
        found = judge(case, results)
        if found.wrong:
            print(f'FAILED --case "{case.words()}": {"; ".join(found.wrong)}', flush=True)
        return cls(1, int(bool(found.near)), found.worst, [case.words()] * bool(found.wrong))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="how long to draw cases (default: 60)")
    add("--packs", type=int, help="number of cases at most")
    add("--seed", type=int, default=0, help="seed of the random cases (default: 0)")
    add_engine(parser)
    add("--portable", action="store_true", help="run the portable kernels on a Hopper GPU too")
    add("--case", metavar="LINE", help="run the one case that a printed line describes")
    add("--chaos", action="store_true", help="run jobs in which one rank fails at a random point")
    add("--rounds", type=int, help="chaos: number of rounds, instead of --seconds")
    add("--ranks", type=int, default=2, help="chaos: ranks of a job (default: 2)")
    add("--jobs", type=int, default=1, help="chaos: jobs at a time (default: 1)")
    add("--timeout", type=float, default=10.0, help="chaos: seconds that ranks wait for each other (default: 10)")
    add("--settle", type=float, default=20.0,
        help="chaos: seconds in which GPU memory must be free again, unless other programs use GPUs (default: 20)")
    add("--record", type=Path, metavar="FILE", help="add packs, seeds and failures to a JSON file")


def fuzz(arguments: argparse.Namespace) -> int:
    """Run cases until the time is over.

    Args:
        arguments: parsed options of `add_arguments`.

    Returns:
        The exit status: 0; 1 if a case failed, or too many were near; 2 for a line that is no case.
    """
    if arguments.chaos:
        return chaos.chaos(arguments)
    with init("auto", timeout=SECONDS_FOR_RANKS) as comm:
        engine = choose_engine(arguments.engine, comm)[0].name
        ranks = Ranks(comm, engine)
        kernels = portable_kernels() if arguments.portable and engine == "cuda" else nullcontext()
        with poisoned(engine), kernels, ranks.stream():
            if arguments.case is not None:
                return _one_case(arguments.case, ranks)
            return _soak(arguments, ranks)


def _one_case(line: str, ranks: Ranks) -> int:
    try:
        case = FuzzCase.from_words(line)
        if ranks.comm.size > 1 and case.ranks != ranks.comm.size:
            raise ValueError(f"--case is for {case.ranks} ranks, and mpiexec started {ranks.comm.size}; start as many "
                             f"as --case has, or omit mpiexec for simulated ranks")
    except ValueError as error:
        print(f"python -m thdattn fuzz: error: {error}", file=sys.stderr)
        return 2
    totals = Totals.of(case, run_on_all(case, ranks))
    if ranks.comm.rank == 0:
        print(f"largest error {totals.worst:.2f} of its budget: {'FAILED' if totals.failures else 'passed'}")
    return int(bool(totals.failures))


def _soak(arguments: argparse.Namespace, ranks: Ranks) -> int:
    comm, begin, said, mine, totals = ranks.comm, time.monotonic(), 0.0, Totals(), Totals()
    for cases in rounds(arguments.seed, ranks.engine, comm.size if comm.size > 1 else None):
        left = PACKS_OF_A_ROUND if arguments.packs is None else arguments.packs - totals.packs
        kept = [(case, run_on_all(case, ranks)) for case in cases[:left]]
        for case, results in kept[comm.rank :: comm.size]:  # ranks judge side by side
            mine += Totals.of(case, results)
        everyone, times = zip(*comm._gather_values((mine, time.monotonic() - begin)), strict=True)
        totals, seconds = sum(everyone, Totals()), times[0]
        if seconds >= arguments.seconds or totals.packs == arguments.packs:
            break
        if comm.rank == 0 and seconds - said >= SECONDS_BETWEEN_LINES:
            said = seconds
            print(f"{totals.packs} packs in {seconds:.0f} s, {totals.packs / seconds:.1f} per second, {totals}, "
                  f"{len(totals.failures)} failed", flush=True)
    return _ended(arguments, ranks, totals, seconds)


def _ended(arguments: argparse.Namespace, ranks: Ranks, totals: Totals, seconds: float) -> int:
    """Print and record the totals of all ranks; return the exit status."""
    comm, failed, lucky = ranks.comm, len(totals.failures), totals.near <= 2 + MOST_NEAR * totals.packs
    who = f"{comm.size} of {comm.name}" if comm.size > 1 else "1 to 4 simulated"
    who += " with portable kernels" * arguments.portable
    if comm.rank == 0:
        print(f"fuzz: {totals.packs} packs in {seconds:.0f} s, seed {arguments.seed}, engine {ranks.engine}, ranks "
              f"{who}, {totals}{'' if lucky else ', more than chance explains'}, {failed} failed", flush=True)
    if comm.rank == 0 and arguments.record is not None:
        made = {"kind": "packs", "ranks": f"ranks: {who}", "seconds": seconds, "seeds": [arguments.seed]}
        save(arguments.record, ranks.engine, made | vars(totals))
    return int(failed > 0 or not lucky)


def rounds(seed: int, engine: str, ranks: int | None) -> Iterator[list[FuzzCase]]:
    """Yield rounds of cases without end, the same on all ranks; the cases of a round have one configuration.

    Args:
        ranks: number of real ranks; None: cases are for 1 to 4 simulated ones.
    """
    for number in itertools.count():
        configuration = draw_configuration(engine, seed, number // ROUNDS_OF_A_CONFIGURATION[engine])
        rngs = (np.random.default_rng([seed, number, 0, pack]) for pack in range(PACKS_OF_A_ROUND))
        yield [draw_case(configuration, rng, ranks, engine == "cuda") for rng in rngs]
