"""Ranks of a chaos round: they run random packs until one of them fails on purpose.

They report on stderr to the parent that started them.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from thdattn.comm import Comm, init
from thdattn.fuzz.cases import ON_GPUS, Configuration, FuzzCase, draw_case, draw_configuration
from thdattn.fuzz.judge import judge
from thdattn.fuzz.lines import Line
from thdattn.fuzz.runs import Ranks, allocators, poisoned, replaced, run

LATE_SECONDS = 1.0
SECONDS_TO_JUDGE = 240.0  # on a busy machine
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
MOST_PACKS, PACKS_AFTERWARDS, PACKS_OF_NOTHING = 400, 4, 120
GROWING_ROWS = (200, 800, 1600, 3200, 800, 5000)  # packs that need larger and larger windows


@dataclass(frozen=True)
class Round(Line):
    """One round of chaos.

    kind: "raise", "kill", "stop", "late", "absent", "memory" (an allocation of the engine fails), "window" (an
        allocation of memory that other GPUs see fails) or "nothing".
    rank: the one that fails.
    at: number of the allocation at which it fails.
    """

    names_all = True

    kind: str = "nothing"
    ranks: int = 2
    rank: int = 1
    at: int = 1
    seed: int = 0


class Fault:
    """Fault of a rank at its allocation of a number."""

    def __init__(self, chaos: Round, rank: int) -> None:
        self._chaos, self._left = chaos, chaos.at if rank == chaos.rank and chaos.kind != "nothing" else 0
        self.happened = False

    def count(self) -> None:
        """Count an allocation, and fail at the one of the round."""
        self._left -= 1
        if self._left == 0:
            self.happened = True
            say("fails")
        if self._left == 0 or (self._left == -1 and self.happened and self._chaos.kind == "window"):  # and its retry
            _fail(self._chaos.kind)

    def planted(self, engine: str) -> AbstractContextManager[None]:
        """Count allocations within a block."""
        if self._chaos.kind == "window":
            return replaced([(importlib.import_module("cupy").cuda, "Memory")], self._counted)
        return replaced(allocators(engine), self._counted)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.count()
            return function(*arguments, **named)

        return counted


def _fail(kind: str) -> None:
    if kind == "raise":
        raise RuntimeError("chaos: this rank raises on purpose")
    if kind == "memory":
        raise MemoryError("chaos: this rank gets no memory, on purpose")
    if kind == "window":
        raise importlib.import_module("cupy").cuda.runtime.CUDARuntimeError(OUT_OF_MEMORY)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind in ("late", "absent"):
        time.sleep(LATE_SECONDS if kind == "late" else 1000)
    else:
        raise ValueError(f"kind is {kind!r}, wanted one that Round names; pass a line that fuzz printed")


def say(what: str) -> None:
    """Write a line to stderr, at once and whole."""
    os.write(2, f"process {os.getpid()} {what}\n".encode())


def packs(chaos: Round, engine: str) -> Iterator[FuzzCase]:
    """Yield cases without end, the same on all ranks; a GPU's have one of two configurations, compiled before."""
    number = 0
    while True:
        rng = np.random.default_rng([chaos.seed, number])
        if chaos.kind == "window":
            rows = GROWING_ROWS[number % len(GROWING_ROWS)] * 2 * chaos.ranks
            yield FuzzCase(ranks=chaos.ranks, lengths=(rows - 8, 5), padded=(rows, 4 * chaos.ranks), heads=(2, 2),
                           dims=(64, 64), window=(100, -1), keep_keys="no", seed=number)
        else:
            configuration: Configuration = ON_GPUS[chaos.seed % 2] if engine == "cuda" else draw_configuration(
                engine, chaos.seed, number // 8)
            yield draw_case(configuration, rng, chaos.ranks, engine == "cuda")
        number += 1


def soak(chaos: Round, ranks: Ranks, fault: Fault, judges: Comm) -> None:
    """Run packs until the fault has happened, and some more; one rank judges each.

    Args:
        judges: the same ranks, on which the others wait for the one that judges.
    """
    left = PACKS_OF_NOTHING if chaos.kind == "nothing" else MOST_PACKS
    for number, case in enumerate(packs(chaos, ranks.engine)):
        failed = False
        try:
            results = ranks.comm._gather_values(run(case, ranks))
        except MemoryError as error:
            if chaos.kind != "window":
                raise
            say(f"caught {error}")  # if not all ranks caught it, the next collective waits for the others
            failed = True
        happened, caught = zip(*ranks.comm._gather_values((fault.happened, failed)), strict=True)
        if any(caught) and not all(caught):
            raise RuntimeError(f"{sum(caught)} of {ranks.comm.size} ranks caught a MemoryError, wanted all or none")
        if not failed and number % ranks.comm.size == ranks.comm.rank:
            found = judge(case, results)
            say(f"FAILED --case {case.words()!r}: {'; '.join(found.wrong)}" if found.wrong else "finds a pack right")
        judges.barrier()
        left = min(left - 1, PACKS_AFTERWARDS if any(happened) and left > PACKS_AFTERWARDS else left)
        if left <= 0:
            return


def main(line: str, engine: str, timeout: str) -> None:
    """Run one rank, from its start to its end.

    Args:
        timeout: seconds that ranks wait for each other.
    """
    faulthandler.register(signal.SIGUSR1)  # prints the stacks of all threads, also where the GIL is held
    say("begins")
    chaos = Round.from_words(line)
    with init("nccl" if engine == "cuda" else "mpi", timeout=float(timeout)) as comm:
        with init("mpi", timeout=SECONDS_TO_JUDGE) as judges:
            comm.barrier()  # a rank that is still in that start would wait for an absent one by its long deadline
            ranks, fault = Ranks(comm, engine), Fault(chaos, comm.rank)
            with poisoned(engine), ranks.stream(), fault.planted(engine):
                soak(chaos, ranks, fault, judges)
        comm.barrier()
    say("ends well")
