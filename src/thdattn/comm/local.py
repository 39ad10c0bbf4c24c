"""Simulated ranks: one thread each, in one process.

It owns the threads' rendezvous and all that keeps a wrong program from hanging. A rank that fails, returns early, makes
another collective than the others or never comes is named, and all ranks end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from thdattn.arguments import Array, as_count, found
from thdattn.comm import Comm
from thdattn.comm.checked import kind_of
from thdattn.comm.checks import as_timeout
from thdattn.comm.slices import Slices

Result = TypeVar("Result")

# The other ranks have this long to notice a failure, so that few threads outlive the call.
_GRACE_SECONDS = 5.0
_PER_THREAD = 2  # cudaStreamPerThread


class PeerFailed(RuntimeError):
    """Error of a rank that gave up because another one failed; the other rank's error says why."""


class _Job:
    """State that all ranks of one run share: who has gone, who failed, and whether anybody still waits in hope.

    Args:
        timeout: seconds that a rank waits for another.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.failures: list[tuple[int, BaseException]] = []
        self.gone: set[int] = set()
        self.stuck: str | None = None

    def leave(self, rank: int, error: BaseException | None) -> None:
        """Record that a rank comes no more: it returned, or it failed."""
        with self.changed:
            self.gone.add(rank)
            if error is not None:
                self.failures.append((rank, error))
            self.changed.notify_all()

    def wait_until_over(self) -> list[int]:
        """Wait for all ranks, after a failure only a little longer; return the ranks that still run."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.gone) == self.size or bool(self.failures))
            self.changed.wait_for(lambda: len(self.gone) == self.size, min(self.timeout, _GRACE_SECONDS))
            return [rank for rank in range(self.size) if rank not in self.gone]

    def interrupt(self) -> None:
        """Make waiting ranks raise, because nobody waits for their results."""
        with self.changed:
            self.stuck = "run_local was interrupted"
            self.changed.notify_all()


class _Rendezvous:
    """Rendezvous of the ranks of a comm: each leaves a value, and none goes on before all values have come.

    threading.Barrier would do the waiting, but cannot say who came, nor tell a late rank from one that returned.

    Args:
        ranks: numbers of this comm's ranks in the job, which messages use.
    """

    def __init__(self, job: _Job, ranks: Sequence[int]) -> None:
        self.job = job
        self.ranks = ranks
        self._waiting: dict[int, tuple[str, Any]] = {}
        self._met: list[tuple[str, Any]] = []
        self._round = 0

    def exchange(self, rank: int, what: str, value: Any) -> list[Any]:
        """Return all values in rank order, once every rank has called this with the same `what`."""
        job = self.job
        with job.changed:
            this_round = self._round
            self._waiting[self.ranks[rank]] = (what, value)
            if not self._hopeless() and len(self._waiting) == len(self.ranks):
                self._met = [self._waiting[r] for r in self.ranks]
                self._waiting = {}
                self._round += 1
                job.changed.notify_all()
            elif not job.changed.wait_for(lambda: self._round != this_round or self._hopeless(), job.timeout):
                job.stuck = self._describe_waiting(f"did not come within {job.timeout:g} s")
                job.changed.notify_all()
            if self._round == this_round:
                raise self._reason(what)
            met = self._met
        if any(other != what for other, _ in met):
            calls = "; ".join(f"rank {r}: {other}" for r, (other, _) in zip(self.ranks, met, strict=True))
            raise RuntimeError(
                f"ranks are in different collectives, every rank must make the same call: {calls}"
            )
        return [value for _, value in met]

    def _hopeless(self) -> bool:
        job = self.job
        return bool(job.failures) or job.stuck is not None or not job.gone.isdisjoint(self.ranks)

    def _reason(self, what: str) -> Exception:
        if self.job.failures:
            rank, error = self.job.failures[0]
            return PeerFailed(f"gave up in {what}: rank {rank} failed with {type(error).__name__}: {error}")
        if self.job.stuck is not None:
            return TimeoutError(self.job.stuck)
        returned = self.job.gone.intersection(self.ranks)
        return RuntimeError(self._describe_waiting(f"cannot all come, as {_names(returned)} returned already"))

    def _describe_waiting(self, missing: str) -> str:
        arrived = "; ".join(f"rank {r} waits in {self._waiting[r][0]}" for r in sorted(self._waiting))
        return f"{arrived}; {_names(set(self.ranks) - set(self._waiting))} {missing}"


class _Point(NamedTuple):
    """Point that a rank's stream has come to, and the event recorded there."""

    stream: Any
    event: Any


class LocalComm(Comm):
    """One simulated rank. Sums are made in rank order, so they are the same bits on every run."""

    name = "local"
    devices = frozenset({"cpu", "cuda"})
    sum_dtypes = Comm.sum_dtypes | {"float16", "bfloat16"}

    def __init__(self, rank: int, rendezvous: _Rendezvous) -> None:
        super().__init__(rank, len(rendezvous.ranks))
        self._rendezvous = rendezvous

    def _all_gather(self, send: Array, recv: Array) -> None:
        rows = send.shape[0]
        for rank, part in enumerate(self._meet("all_gather", send)):
            recv[rank * rows : (rank + 1) * rows] = part
        self._release("all_gather", send)

    def _reduce_scatter(self, send: Array, recv: Array) -> None:
        rows = recv.shape[0]
        mine = slice(self.rank * rows, (self.rank + 1) * rows)
        first, *others = self._meet("reduce_scatter", send)
        recv[...] = first[mine]
        for other in others:
            recv += other[mine]
        self._release("reduce_scatter", send)

    def _all_reduce(self, array: Array, op: str) -> None:
        combine = np.add if op == "sum" else np.maximum  # CuPy arrays bring their own through __array_ufunc__
        first, *others = self._meet(f"all_reduce {op}", array)
        total = first.copy()
        for other in others:
            combine(total, other, out=total)
        self._release("all_reduce", array)
        array[...] = total

    def _send_receive(self, sends: Slices, recvs: Slices) -> None:
        any_array = next((array for array, _ in (*sends, *recvs)), None)
        for rank, theirs in enumerate(self._come("exchange", sends, any_array)):
            parts = [part for part, peer in theirs if peer == self.rank]
            rooms = [room for room, peer in recvs if peer == rank]
            sent, wanted = [part.nbytes for part in parts], [room.nbytes for room in rooms]
            if sent != wanted:
                raise ValueError(
                    f"rank {rank} sends slices of {sent} bytes to rank {self.rank}, which receives slices of {wanted} "
                    f"bytes from it; make both from one plan"
                )
            for part, room in zip(parts, rooms, strict=True):
                room[...] = part
        self._release("exchange", any_array)

    def _barrier(self) -> None:
        self._rendezvous.exchange(self.rank, "barrier", None)

    def _gather_values(self, value: Any) -> Sequence[Any]:
        return self._rendezvous.exchange(self.rank, "agree", value)

    def _split(self, color: int, key: int) -> Comm:
        """Split as Comm.split does; the first rank of each group makes its rendezvous."""
        rendezvous = self._rendezvous
        everyone = rendezvous.exchange(self.rank, "split", (color, key))
        same = [rank for rank in range(self.size) if everyone[rank][0] == color]
        members = sorted(same, key=lambda rank: everyone[rank][1])
        first = members[0] == self.rank
        place = _Rendezvous(rendezvous.job, [rendezvous.ranks[rank] for rank in members]) if first else None
        places = rendezvous.exchange(self.rank, "the end of split", place)
        return type(self)(members.index(self.rank), places[members[0]])

    def _meet(self, operation: str, array: Array) -> list[Any]:
        return self._come(f"{operation} of {array.shape} {array.dtype}", array, array)

    def _release(self, operation: str, array: Array) -> None:
        """Wait until no other rank reads an array any more, so that it may be overwritten."""
        self._come(f"the end of {operation}", None, array)

    def _come(self, what: str, value: Any, array: Array) -> list[Any]:
        """Return all ranks' values; the work of their streams so far comes before later work of this rank's stream.

        Args:
            array: an array that the ranks' streams work on; None: this rank's stream works on none.
        """
        values, points = zip(*self._rendezvous.exchange(self.rank, what, (value, self._point(array))), strict=True)
        mine = points[self.rank]
        for point in points:
            # Each thread has its own default stream under the one number of "per-thread default".
            if mine and point and (point.stream.ptr != mine.stream.ptr or point.stream.ptr == _PER_THREAD):
                mine.stream.wait_event(point.event)
        return list(values)

    def _point(self, array: Array) -> _Point | None:
        """Record how far this rank's current stream has come; None for host arrays."""
        if self.size == 1 or array is None or isinstance(array, np.ndarray):
            return None
        import cupy

        stream, event = cupy.cuda.get_current_stream(), cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return _Point(stream, event)


def run(cp_size: int, fn: Callable[[Comm], Result], timeout: float, check: bool) -> list[Result]:
    """Run fn on cp_size threads; see thdattn.comm.run_local."""
    cp_size = as_count("cp_size", cp_size)
    if not callable(fn):
        raise TypeError(f"fn is {found(fn)}; wanted a function of one comm; pass one as in run_local(2, fn)")
    job = _Job(cp_size, as_timeout(timeout))
    rendezvous = _Rendezvous(job, range(cp_size))
    results: dict[int, Result] = {}

    def work(rank: int) -> None:
        try:
            with kind_of(LocalComm, check)(rank, rendezvous) as comm:
                results[rank] = fn(comm)
        except BaseException as error:  # the caller's thread raises it again
            job.leave(rank, error)
        else:
            job.leave(rank, None)

    for rank in range(cp_size):
        threading.Thread(target=work, args=(rank,), name=f"thdattn rank {rank}", daemon=True).start()
    try:
        running = job.wait_until_over()
    except BaseException:
        job.interrupt()
        raise
    if job.failures:
        raise _first_error(job.failures, running, cp_size)
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
