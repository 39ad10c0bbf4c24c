"""The deadline of what ranks wait for: one thread a process that ends the job when they wait in vain.

What blocks the host is noted before and taken out after. What waits on a GPU is only enqueued, so the stream itself
writes a number to the host's memory when it comes to an operation and another one when it has left it: the clock runs
between the two, however long the stream computes before, and the thread reads memory and calls nothing of CUDA, where
a query would break a capture that goes on in another thread.

An operation that waits for more than a few seconds has the thread ask the other ranks' side processes (heartbeat.py)
what they do: a rank that has ended, is stopped or does not answer ends the job before the deadline.
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

# How much longer than a collective the steps of a start may take, which load libraries and connect machines.
PATIENCE_AT_START = 5
# The job's end must not hang in its turn: a process that has not ended after this many seconds ends itself.
_SECONDS_TO_END = 5.0
_SHORTEST_TICK, _LONGEST_TICK = 0.05, 1.0
_REMEMBERED = 1024  # operations of a lane that a message can name; streams hold about as many launches


class Operation(NamedTuple):
    """What ranks wait for; times are the watchdog's."""

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
        """Note it for the other ranks."""
        heartbeat.note(self.watch.comm, self.number, self.what, phase)

    def failure(self, waited: float) -> str:
        """Say why the job is to end, after so many seconds: a rank is missing, or the deadline has come; else ""."""
        ranks = self.watch.ranks
        if ranks and waited > ranks.patience and (missing := ranks.missing()):
            return (f"thdattn: {self.watch.who}: {self} waits in vain (waited {waited:.1f} s), ending all ranks: "
                    f"{missing}\n")
        if waited <= self.limit:
            return ""
        late = ranks.late(self.number, self.what) if ranks else ""
        return message(self.watch.who, str(self), self.limit, waited, late)


class Watch:
    """Has what one comm waits for completed in time, from start() on.

    Args:
        who: this rank, for messages.
        timeout: seconds that an operation may take.
        abort: ends all ranks of the job.
        limit: seconds after which late ranks end it; None: the timeout, and infinity where that is another's matter.

    Attributes:
        ranks: the others, once they are found; None: nobody can be asked.
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
        """Start the thread, unless it runs; ranks that are alone wait for nobody and need none."""
        _watchdog.start(self.timeout)

    def find_ranks(self, rank: int, gather: Callable[[Any], Sequence[Any]]) -> None:
        """Learn how to ask the other ranks; all of them call it, see rank_status.find."""
        with self.waiting("the search for heartbeats", patience=PATIENCE_AT_START):
            self.ranks = rank_status.find(rank, self.timeout, gather)
        self.comm = self.ranks.comm if self.ranks else 0

    @contextmanager
    def waiting(self, what: str, array: Any = None, patience: int = 1) -> Iterator[None]:
        """A block that waits for other ranks on the host; with patience it may take that many times as long."""
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
        """The lane, for a `with` block that enqueues on its stream what waits for other ranks."""
        lane.next(self._operation(what, array, 1))
        return lane

    def by_kernel(self, lane: Lane, what: str, array: Any = None) -> tuple[int, int]:
        """The same of one kernel, which marks by itself where the stream is; see Lane.given."""
        return lane.given(self._operation(what, array, 1))

    def say_who_is_late(self, what: str, waited: float) -> None:
        """Say on stderr where the other ranks are, if the last operation of this comm waited long for them."""
        if self.ranks and waited > self.ranks.patience:
            operation, late = f"{what}, number {self.number} of this comm,", self.ranks.late(self.number, what)
            os.write(2, f"thdattn: {self.who}: {operation} waited for {waited:.1f} s: {late}\n".encode())

    def _operation(self, what: str, array: Any, patience: int) -> Operation:
        self.number += 1
        shape, dtype = (None, None) if array is None else (array.shape, array.dtype)
        return Operation(self, self.number, what, shape, dtype, self.limit * patience, _watchdog.clock)


class Lane:
    """What one thread enqueues on one stream. A block within a block is part of it.

    Args:
        numbers: (2,) uint32 in host memory that the GPU can write: the operation that the stream has come to, and the
            one that it has left.
        write: called as write(address, number, 0), has the stream write the number there when it comes by.
    """

    def __init__(self, numbers: NDArray[Any], write: Callable[[int, int, int], object]) -> None:
        self._numbers = numbers
        self._write = write
        self._begin = int(numbers.ctypes.data)
        self._end = self._begin + numbers.itemsize
        self._count = 0
        self._depth = 0
        self._operations: list[Operation | None] = [None] * _REMEMBERED
        self._place = (0, 0)  # where the watchdog found the stream, and since when
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
        """(address, number): a kernel is to write the number there when it begins and behind that when it ends.

        Instead of a `with` block; (0, 0): within a block that is watched as a whole.
        """
        self.next(operation)
        return (0, 0) if self._depth else (self._begin, self._count)

    def look(self, clock: float) -> tuple[Operation, float] | None:
        """The operation in which the stream is, and for how long; None: in none, or in another than the last time."""
        left, at = int(self._numbers[1]), int(self._numbers[0])
        operation = self._operations[at % _REMEMBERED]
        if (at, left) != self._place:
            self._place, self._since = (at, left), clock
            if operation is not None:
                operation.note(heartbeat.GPU_LEFT if at == left else heartbeat.GPU_WAITS)
        return None if at == left or operation is None else (operation, clock - self._since)


class _Watchdog:
    """The thread, and what it looks at."""

    def __init__(self) -> None:
        self.waiting: dict[object, Operation] = {}
        self.lanes: list[Lane] = []
        self.clock = 0.0  # seconds that this process has run; those for which it was stopped as a whole do not count
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
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are to wake the main thread
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
        """What this process waits for, on the host and on GPUs, and for how long."""
        on_host = [(operation, self.clock - operation.begun) for operation in list(self.waiting.values())]
        on_gpus = [lane.look(self.clock) for lane in list(self.lanes)]
        return on_host + [found for found in on_gpus if found]


    def note_waits(self) -> None:
        """Note one of the operations that threads of this process wait for, if there is any."""
        for operation in list(self.waiting.values())[:1]:
            operation.note(heartbeat.WAITS)


_watchdog = _Watchdog()


def _forget() -> None:
    """Have a process that the user forked wait for nobody: it has no rank, and no such thread."""
    _watchdog.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget)


def _end(operation: Operation, failure: str) -> None:
    """End all ranks, with a message, whatever the main thread holds or hangs in."""
    exit_soon()
    os.write(2, failure.encode())
    operation.watch.abort()
    threading.Event().wait()


def exit_soon() -> None:
    """Have this process say where its threads are and exit, unless it ends before; this needs no lock of Python's."""
    faulthandler.dump_traceback_later(_SECONDS_TO_END, exit=True, file=2)


def flush() -> None:
    """Pass on what the program has printed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a stream that is closed has no reader
            stream.flush()


def message(who: str, operation: str, limit: float, waited: float, late: str = "") -> str:
    """Word the end of the job at a deadline.

    Args:
        late: where the other ranks are; "": nobody knows.
    """
    why = late or "one has died, has stopped, never came or made another call"
    return (
        f"thdattn: {who}: {operation} has not completed within {limit:g} s (waited {waited:.1f} s), ending all ranks: "
        f"{why}; if one is only late, pass a longer timeout to thdattn.comm.init\n"
    )


@contextmanager
def start_of_mpi(who: str, timeout: float) -> Iterator[None]:
    """A block in which MPI starts, which holds Python's lock all the while: so another process has the deadline.

    That process kills this one, as there is nothing yet to abort, and the launcher then ends the others.
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
