"""Watchdog: one thread per process ends the job when an operation misses its deadline.

An operation that blocks the host is noted before it and removed after it. Work on a GPU is only enqueued. So the stream
itself writes a number to the host's memory when it comes to an operation, and another one when it has left it. The
clock runs between the two, however long the stream computes before. The thread reads memory and calls nothing of CUDA,
where a query would break a capture in another thread.

While an operation waits for more than a few seconds, the thread asks the other ranks' side processes (heartbeat.py)
what they do. A rank that has ended, is stopped or does not answer ends the job before the deadline.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple

from numpy.typing import NDArray

from thdattn.comm.failures import heartbeat, rank_status
from thdattn.comm.failures.rank_status import Ranks

# Steps of a start load libraries and connect machines: they may take so many times a collective's limit.
PATIENCE_AT_START = 5
# A process that has not ended this many seconds after the abort ends itself, so that the end does not hang.
_SECONDS_TO_END = 5.0
_SHORTEST_TICK, _LONGEST_TICK = 0.05, 1.0
_REMEMBERED = 1024  # operations of a lane; a stream holds about as many launches


class Operation(NamedTuple):
    """Operation that waits for other ranks.

    watch: the comm's watch; number: among its operations; what, shape, dtype: for messages.
    limit: seconds that it may take; begun: the watchdog's clock when it began.
    """

    watch: Watch
    number: int
    what: str
    shape: tuple[int, ...] | None
    dtype: Any
    limit: float
    begun: float

    def __str__(self) -> str:
        arrays = "" if self.shape is None else f" of {self.shape} {self.dtype}"
        return f"{self.what}{arrays}, number {self.number} of this comm,"

    def note(self, phase: bytes) -> None:
        """Note the operation where other ranks can ask for it."""
        heartbeat.note(self.watch.comm, self.number, self.what, phase)

    def failure(self, waited: float) -> str:
        """Say why the job must end after so many seconds: a rank is missing, or the deadline has come; else ""."""
        ranks = self.watch.ranks
        if ranks and waited > ranks.patience and (missing := ranks.missing()):
            return (f"thdattn: {self.watch.who}: {self} waits in vain (waited {waited:.1f} s), ending all ranks: "
                    f"{missing}\n")
        if waited <= self.limit:
            return ""
        late = ranks.late(self.number, self.what) if ranks else ""
        return message(self.watch.who, str(self), self.limit, waited, late)


class Watch:
    """Deadline of the operations of one comm, from start() on.

    Args:
        who: this rank, for messages.
        timeout: seconds that an operation may take.
        abort: ends all ranks of the job.
        limit: seconds after which late ranks end the job; None: the timeout; infinity: others watch over late ranks.

    Attributes:
        ranks: the other ranks, once they are found; None: they cannot be asked.
    """

    def __init__(
        self, who: str, timeout: float, abort: Callable[[], None], limit: float | None = None
    ) -> None:
        self.who = who
        self.timeout = timeout
        self.limit = timeout if limit is None else limit
        self.abort = abort
        self.number = 0
        self.comm = 0
        self.ranks: Ranks | None = None

    def start(self) -> None:
        """Start the thread, unless it runs; a rank that is alone waits for nobody and needs none."""
        _watchdog.start(self.timeout)

    def find_ranks(self, rank: int, gather: Callable[[Any], Sequence[Any]]) -> None:
        """Learn how to ask the other ranks; all of them call it, see rank_status.find."""
        with self.waiting("the search for heartbeats", patience=PATIENCE_AT_START):
            self.ranks = rank_status.find(rank, self.timeout, gather)
        self.comm = self.ranks.comm if self.ranks else 0

    @contextmanager
    def waiting(self, what: str, array: Any = None, patience: int = 1) -> Iterator[None]:
        """Watch a block that waits for other ranks on the host; it may take `patience` times the limit."""
        key, operation = object(), self._operation(what, array, patience)
        _watchdog.waiting[key] = operation
        heartbeat.note(self.comm, operation.number, what)
        try:
            yield
        finally:
            del _watchdog.waiting[key]
            if _watchdog.waiting:  # in other threads
                _watchdog.note_waits()
            else:
                heartbeat.note_phase(heartbeat.LEFT)

    def enqueued(self, lane: Lane, what: str, array: Any = None) -> Lane:
        """Return the lane, for a `with` block that enqueues waits for other ranks on its stream."""
        lane.next(self._operation(what, array, 1))
        return lane

    def by_kernel(self, lane: Lane, what: str, array: Any = None) -> tuple[int, int]:
        """Register an operation of one kernel, which marks its begin and end by itself; see Lane.given."""
        return lane.given(self._operation(what, array, 1))

    def say_who_is_late(self, what: str, waited: float) -> None:
        """Say on stderr where the other ranks are, if this comm's last operation waited long for them."""
        if self.ranks and waited > self.ranks.patience:
            operation, late = f"{what}, number {self.number} of this comm,", self.ranks.late(self.number, what)
            os.write(2, f"thdattn: {self.who}: {operation} waited for {waited:.1f} s: {late}\n".encode())

    def _operation(self, what: str, array: Any, patience: int) -> Operation:
        self.number += 1
        shape, dtype = (None, None) if array is None else (array.shape, array.dtype)
        return Operation(self, self.number, what, shape, dtype, self.limit * patience, _watchdog.clock)


class Lane:
    """Operations that one thread enqueues on one stream. A block within a block is part of it.

    Args:
        numbers: (2,) uint32 in host memory that the GPU can write. They are the number of the operation that the stream
            has come to, and that of the one that it has left.
        write: called as write(address, number, 0), makes the stream write the number there when it comes by.
    """

    def __init__(self, numbers: NDArray[Any], write: Callable[[int, int, int], object]) -> None:
        self._numbers = numbers
        self._write = write
        self._begin = int(numbers.ctypes.data)
        self._end = self._begin + numbers.itemsize
        self._count = 0
        self._depth = 0
        self._operations: list[Operation | None] = [None] * _REMEMBERED
        self._place = (0, 0)  # where the watchdog found the stream last
        self._since = 0.0
        numbers[:] = 0
        _watchdog.lanes.append(self)

    def next(self, operation: Operation) -> None:
        if not self._depth:
            self._count = (self._count + 1) & 0xFFFFFFFF
            self._operations[self._count % _REMEMBERED] = operation

    def __enter__(self) -> None:
        if not self._depth:
            self._write(self._begin, self._count, 0)
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._write(self._end, self._count, 0)

    def given(self, operation: Operation) -> tuple[int, int]:
        """Return (address, number): a kernel writes the number there when it begins, and behind it when it ends.

        It replaces a `with` block; (0, 0): the kernel is in a block that is watched as a whole.
        """
        self.next(operation)
        return (0, 0) if self._depth else (self._begin, self._count)

    def look(self, clock: float) -> tuple[Operation, float] | None:
        """Return the stream's operation and its seconds there; None: it is in none, or in another than last time."""
        left, at = int(self._numbers[1]), int(self._numbers[0])
        operation = self._operations[at % _REMEMBERED]
        if (at, left) != self._place:
            self._place, self._since = (at, left), clock
            if operation is not None:
                operation.note(heartbeat.GPU_LEFT if at == left else heartbeat.GPU_WAITS)
        return None if at == left or operation is None else (operation, clock - self._since)


class _Watchdog:
    """The thread, and the operations and lanes that it watches."""

    def __init__(self) -> None:
        self.waiting: dict[object, Operation] = {}
        self.lanes: list[Lane] = []
        self.clock = 0.0  # seconds that this process has run, without those for which it was stopped
        self._tick = _LONGEST_TICK
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, timeout: float) -> None:
        with self._lock:
            self._tick = min(self._tick, max(timeout / 20, _SHORTEST_TICK))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="thdattn watchdog", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals must wake the main thread
        before = time.monotonic()
        while True:
            time.sleep(self._tick)
            now = time.monotonic()
            self.clock += min(now - before, 2 * self._tick)
            before = now
            for operation, waited in self.waits():
                if failure := operation.failure(waited):
                    _end(operation, failure)

    def waits(self) -> list[tuple[Operation, float]]:
        """Return this process's waiting operations, on the host and on GPUs, and for how long they have waited."""
        on_host = [(operation, self.clock - operation.begun) for operation in list(self.waiting.values())]
        on_gpus = [lane.look(self.clock) for lane in list(self.lanes)]
        return on_host + [found for found in on_gpus if found]

    def note_waits(self) -> None:
        """Note one of the operations that threads of this process wait for, if there is any."""
        for operation in list(self.waiting.values())[:1]:
            operation.note(heartbeat.WAITS)


_watchdog = _Watchdog()


def _forget() -> None:
    """Clear the state in a process that the user forked: it is no rank, and has no such thread."""
    _watchdog.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget)


def _end(operation: Operation, failure: str) -> None:
    """End all ranks with a message, also while the main thread hangs or holds the GIL."""
    exit_soon()
    os.write(2, failure.encode())
    operation.watch.abort()
    threading.Event().wait()


def exit_soon() -> None:
    """Make this process print its threads' stacks and exit, unless it ends before; this needs no GIL."""
    faulthandler.dump_traceback_later(_SECONDS_TO_END, exit=True, file=2)


def flush() -> None:
    """Flush the program's output."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the stream may be closed
            stream.flush()


def message(who: str, operation: str, limit: float, waited: float, late: str = "") -> str:
    """Word the end of the job at a deadline.

    Args:
        late: where the other ranks are; "": unknown.
    """
    why = late or "one has died, has stopped, never came or made another call"
    return (
        f"thdattn: {who}: {operation} has not completed within {limit:g} s (waited {waited:.1f} s), ending all ranks: "
        f"{why}; if one is only late, pass a longer timeout to thdattn.comm.init\n"
    )


@contextmanager
def start_of_mpi(who: str, timeout: float) -> Iterator[None]:
    """Watch a block in which MPI starts, which holds the GIL all the while: another process keeps the deadline.

    That process kills this one, as MPI cannot abort yet, and the launcher then ends the others.
    """
    limit = timeout * PATIENCE_AT_START
    text = message(who, "the start of MPI", limit, limit)
    command = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), str(limit), text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as guard:
        try:
            yield
        finally:
            assert guard.stdin is not None
            guard.stdin.close()


_GUARD = """
import os, select, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is sent to this process too
if not select.select([0], [], [], float(sys.argv[2]))[0]:  # readable when its other end is closed
    os.write(2, sys.argv[3].encode())
    os.kill(int(sys.argv[1]), signal.SIGKILL)
"""
