"""Errors of the examples' command lines: one line on stderr, from one rank, and exit status 2.

Programs join their ranks before they parse options, so that every rank knows if it is the one to print.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import thdattn
from thdattn.cli import options
from thdattn.comm import Comm

PATIENCE = 600.0  # seconds that ranks wait for one that works alone, such as on a checkpoint


class Failure(Exception):
    """Error that the user can fix, raised on all ranks.

    alone: True if other ranks have no error, so that this rank has to print it. The text is empty on those.
    """

    def __init__(self, text: str, alone: bool = False) -> None:
        super().__init__(" ".join(text.split()))
        self.alone = alone


class Parser(argparse.ArgumentParser):
    """Parser that raises ValueError where argparse would print its usage, on every rank."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists the options")


def whole(at_least: int, at_most: float = math.inf) -> Callable[[str], int]:
    """Return the type of an option that is a whole number within bounds."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < at_least:
            raise argparse.ArgumentTypeError(f"{text} is no whole number of at least {at_least}")
        if int(text) > at_most:
            raise argparse.ArgumentTypeError(f"{text} is no whole number of at most {at_most}")
        return int(text)

    return number


positive = whole(1)


def run(program: Callable[[Comm], int]) -> int:
    """Run a program on this process's ranks; return its exit status, which after a Failure is 2.

    Args:
        program: called as program(comm) on every rank.
    """
    comm = thdattn.comm.init(timeout=PATIENCE)
    try:
        status = program(comm)
    except Failure as failure:
        status = 2
        if str(failure) and (failure.alone or comm.rank == 0):
            print(f"{Path(sys.argv[0]).name}: error: {failure}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        if comm.size > 1:
            raise  # ends the other ranks, too
        status = 130
    comm.close()
    if status and comm.size > 1:
        from mpi4py import MPI

        MPI.Finalize()  # NOTE: or `python -m mpi4py` calls MPI_Abort for this status, which may swallow the line
    return status


@contextmanager
def together(comm: Comm) -> Iterator[None]:
    """Turn an error inside, on one rank or on all, into a Failure of all ranks, so that none waits for the others.

    The code inside must not communicate, unless it fails on all ranks alike, as comm.agree does. Options, files and
    machines cause ValueError, OSError, RuntimeError and MemoryError; other errors are bugs and keep their traceback.

    Raises:
        Failure: on every rank, if any had an error.
    """
    problem: Exception | None = None
    try:
        yield
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        problem = error
    try:
        comm.agree("failure", problem is not None)
    except ValueError:
        where = f"rank {comm.rank}: " if comm.rank else ""
        raise Failure(f"{where}{_said(problem)}" if problem else "", alone=problem is not None) from problem
    if problem:
        raise Failure(_said(problem)) from problem


def _said(problem: Exception) -> str:
    """Return the message of an error; Python's MemoryError has none."""
    return str(problem) or f"{type(problem).__name__}: options ask for more than this machine has; pass smaller ones"


def check_picture(option: str, path: Path) -> None:
    """Raise ValueError unless Matplotlib can draw into this file; make its folder."""
    check_writable(option, path)
    options.check_picture(path, option)


def check_writable(option: str, path: Path) -> None:
    """Raise ValueError unless the file can be written; make its folder, and leave the file unchanged."""
    new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise ValueError(
            f"{option} needs to write {path}, which fails ({error.strerror}: {error.filename}); name another place"
        ) from error
    if new:
        path.unlink()
