"""Simulated ranks: one thread each, in one process.

Owns the meeting point of the threads and everything that keeps a wrong program from hanging: a rank that fails,
returns early, calls another collective than the others or never comes is named, and all ranks end.
"""

from __future__ import annotations

import numbers
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from thdattn.arguments import as_count, found
from thdattn.comm import Comm

Result = TypeVar("Result")

# After a failure the other ranks get this long to notice, so that no thread outlives the call without need.
_GRACE_SECONDS = 5.0


class PeerFailed(RuntimeError):
    """Another rank failed, so this one gave up; the other rank's error is the one to read."""


class _Meeting:
    """Where ranks meet: everybody leaves a value, and nobody goes on before all values are there.

    threading.Barrier would do the waiting, but cannot say who came, nor tell a late rank from one that returned.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.failures: list[tuple[int, BaseException]] = []
        self._timeout = timeout
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[str, Any]] = {}
        self._met: list[tuple[str, Any]] = []
        self._round = 0
        self._gone: set[int] = set()
        self._stuck: str | None = None

    def exchange(self, rank: int, what: str, value: Any) -> list[Any]:
        """All ranks' values in rank order, once every rank called this with the same `what`."""
        with self._changed:
            this_round = self._round
            self._waiting[rank] = (what, value)
            if not self._hopeless() and len(self._waiting) == self.size:
                self._met = [self._waiting[r] for r in range(self.size)]
                self._waiting = {}
                self._round += 1
                self._changed.notify_all()
            elif not self._changed.wait_for(
                lambda: self._round != this_round or self._hopeless(), self._timeout
            ):
                self._stuck = self._describe_waiting(f"did not come within {self._timeout:g} s")
                self._changed.notify_all()
            if self._round == this_round:
                raise self._reason(what)
            met = self._met
        if any(other != what for other, _ in met):
            calls = "; ".join(f"rank {r}: {other}" for r, (other, _) in enumerate(met))
            raise RuntimeError(
                f"ranks are in different collectives, every rank must make the same call: {calls}"
            )
        return [value for _, value in met]

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Say that a rank comes no more: it returned, or it failed."""
        with self._changed:
            self._gone.add(rank)
            if error is not None:
                self.failures.append((rank, error))
            self._changed.notify_all()

    def wait_until_over(self) -> list[int]:
        """Wait for all ranks; after a failure only a little longer. Returns the ranks that still run."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._gone) == self.size or bool(self.failures))
            self._changed.wait_for(lambda: len(self._gone) == self.size, min(self._timeout, _GRACE_SECONDS))
            return [rank for rank in range(self.size) if rank not in self._gone]

    def interrupt(self) -> None:
        """Send waiting ranks home, because nobody waits for their results."""
        with self._changed:
            self._stuck = "run_local was interrupted"
            self._changed.notify_all()

    def _hopeless(self) -> bool:
        return bool(self._gone) or self._stuck is not None

    def _reason(self, what: str) -> Exception:
        if self.failures:
            rank, error = self.failures[0]
            return PeerFailed(f"gave up in {what}: rank {rank} failed with {type(error).__name__}: {error}")
        if self._stuck is not None:
            return TimeoutError(self._stuck)
        return RuntimeError(
            self._describe_waiting(f"cannot all come, as {_names(self._gone)} returned already")
        )

    def _describe_waiting(self, missing: str) -> str:
        arrived = "; ".join(f"rank {r} waits in {self._waiting[r][0]}" for r in sorted(self._waiting))
        return f"{arrived}; {_names(set(range(self.size)) - set(self._waiting))} {missing}"


class LocalComm(Comm):
    """One simulated rank. Sums are made in rank order, so they are the same bits on every run."""

    name = "local"
    devices = frozenset({"cpu", "cuda"})
    sum_dtypes = Comm.sum_dtypes | {"float16", "bfloat16"}

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, meeting.size)
        self._meeting = meeting

    def _all_gather(self, send: Any, recv: Any) -> None:
        rows = send.shape[0]
        for rank, part in enumerate(self._exchange("all_gather", send)):
            recv[rank * rows : (rank + 1) * rows] = part
        self._release("all_gather")

    def _reduce_scatter(self, send: Any, recv: Any) -> None:
        rows = recv.shape[0]
        mine = slice(self.rank * rows, (self.rank + 1) * rows)
        first, *others = self._exchange("reduce_scatter", send)
        recv[...] = first[mine]
        for other in others:
            recv += other[mine]
        self._release("reduce_scatter")

    def _all_reduce(self, array: Any, op: str) -> None:
        combine = np.add if op == "sum" else np.maximum  # CuPy arrays bring their own through __array_ufunc__
        first, *others = self._exchange(f"all_reduce {op}", array)
        total = first.copy()
        for other in others:
            combine(total, other, out=total)
        self._release("all_reduce")
        array[...] = total

    def _barrier(self) -> None:
        self._meeting.exchange(self.rank, "barrier", None)

    def _gather_values(self, value: int) -> Sequence[int]:
        return self._meeting.exchange(self.rank, "agree", value)

    def _exchange(self, operation: str, array: Any) -> list[Any]:
        return self._meeting.exchange(self.rank, f"{operation} of {array.shape} {array.dtype}", array)

    def _release(self, operation: str) -> None:
        """Nobody writes to an array that another rank still reads."""
        self._meeting.exchange(self.rank, f"the end of {operation}", None)


def run(cp_size: int, fn: Callable[[Comm], Result], timeout: float) -> list[Result]:
    """Run fn on cp_size threads; see thdattn.comm.run_local."""
    cp_size = as_count("cp_size", cp_size)
    if not callable(fn):
        raise TypeError(f"fn is {found(fn)}; wanted a function of one comm; pass one as in run_local(2, fn)")
    if not isinstance(timeout, numbers.Real) or isinstance(timeout, bool):
        raise TypeError(f"timeout is {found(timeout)}; wanted a number of seconds; convert it with float()")
    if not 0 < timeout <= threading.TIMEOUT_MAX:
        most = f"{threading.TIMEOUT_MAX:g}"
        raise ValueError(f"timeout is {timeout}, wanted seconds > 0 and <= {most}; pass {most} to wait for ever")
    meeting = _Meeting(cp_size, float(timeout))
    results: dict[int, Result] = {}

    def work(rank: int) -> None:
        try:
            with LocalComm(rank, meeting) as comm:
                results[rank] = fn(comm)
        except BaseException as error:  # the caller's thread raises it again
            meeting.leave(rank, error)
        else:
            meeting.leave(rank, None)

    for rank in range(cp_size):
        threading.Thread(target=work, args=(rank,), name=f"thdattn rank {rank}", daemon=True).start()
    try:
        running = meeting.wait_until_over()
    except BaseException:
        meeting.interrupt()
        raise
    if meeting.failures:
        raise _first_error(meeting.failures, running, cp_size)
    return [results[rank] for rank in range(cp_size)]


def _first_error(
    failures: list[tuple[int, BaseException]], running: list[int], cp_size: int
) -> BaseException:
    own = [failure for failure in failures if not isinstance(failure[1], PeerFailed)]
    rank, error = (own or failures)[0]
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"raised on simulated rank {rank} of {cp_size}")
        if running:
            error.add_note(f"{_names(set(running))} still running, left behind in a daemon thread")
    return error


def _names(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
