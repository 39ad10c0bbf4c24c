"""Base of transports, which run overlapped collectives: a stream beside that of kernels, and the order of all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from thdattn.arguments import Array
from thdattn.comm.failures.outcomes import Waiting, Watched
from thdattn.comm.overlap.blocks import Blocks
from thdattn.comm.overlap.collectives import Arrival, OverlappedCollectives
from thdattn.comm.slices import AllToAllSpec, Slices

_HIGHEST = -5  # the highest priority of streams

Wait = Callable[[], None]


class Transport(OverlappedCollectives):
    """A rank's overlapped collectives, on a stream of their own.

    All ranks make the same calls in one order, on any streams. Events order these streams, in captured graphs as well.
    """

    def __init__(self, world: Any) -> None:
        self._world, self.rank, self.size = world, world.rank, world.size
        self._others = [(self.rank + i) % self.size for i in range(1, self.size)]  # each rank begins with another one
        self._watched: Watched = nullcontext

    def _begin(self) -> None:
        """Make the stream; a rank may fail here alone."""
        import cupy

        self._cupy = cupy
        # A collective starts before blocks of kernels that wait for their turn. With a priority of its own, the stream
        # shares no hardware queue with a stream that waits for it.
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=_HIGHEST)
        self._last = cupy.cuda.get_current_stream()
        self._blocks = Blocks(self._world)

    def wait_within(self, waiting: Waiting, watched: Watched) -> None:
        """Wait for other ranks, from now on, in contexts: `waiting` makes those of the host, see agreed.

        Args:
            watched: makes one in which a stream is given waits, from the stream.
        """
        self._blocks.waiting, self._watched = waiting, watched

    @abstractmethod
    def carries(self, sizes: Any) -> bool:
        """Return whether an exchange of these sizes overlaps kernels; the same on all ranks."""

    @abstractmethod
    def exchange(self, sends: Slices, recvs: Slices, sizes: Any) -> Wait:
        """Exchange as Comm.exchange does, with sizes that it carries."""

    def exchanges_by_kernel(self, spec: AllToAllSpec, at_once: bool) -> bool:
        """Return whether all_to_all may be called for this; the same on all ranks."""
        return False

    def all_to_all(
        self, spec: AllToAllSpec, sends: Sequence[Array], recvs: Sequence[Array], marks: tuple[int, int] = (0, 0)
    ) -> Wait:
        """Exchange slices as Comm.all_to_all does, by one kernel, on the current stream.

        Args:
            marks: address and number for the kernel, see PeerExchange.
        """
        raise NotImplementedError("no kernel exchanges slices")

    @abstractmethod
    def close(self) -> None:
        """Free all memory; all ranks call it, when no graph holds a collective any more."""

    def held_bytes(self) -> dict[str, int]:
        return self._blocks.held_bytes()

    def enter(self) -> Any:
        """Return the current stream, ordered after the stream of the previous call."""
        stream = self._cupy.cuda.get_current_stream()
        if stream.is_capturing():
            if not self._stream.is_capturing():  # a new capture
                self._blocks.forget_events()
        elif stream.ptr != self._last.ptr:
            stream.wait_event(self._recorded(self._last))
            self._last = stream
        return stream

    def _recorded(self, stream: Any) -> Any:
        """Return an event of a stream as far as it is enqueued."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def _follow(self, stream: Any) -> None:
        """Make the stream of collectives wait for another one, which brings it into a capture of that."""
        self._stream.wait_event(self._recorded(stream))

    def _arrival(self, stream: Any) -> Wait:
        """Return a function that makes the current stream, and the one that asked, wait for all collectives so far.

        CuPy gives the memory that collectives write to later work of the asking stream, once nobody holds it.
        """
        event = self._recorded(self._stream)

        def wait() -> None:
            current = self._cupy.cuda.get_current_stream()
            current.wait_event(event)
            if current.ptr != stream.ptr:
                stream.wait_event(event)

        return wait

    def _arriving(self, parts: Sequence[Array], stream: Any) -> Arrival:
        """Return the arrival of arrays that collectives so far write to."""
        return Arrival([[part] for part in parts], self._arrival(stream))

    def _add(self, partials: Any, num_partials: int, rows: Array, results: Sequence[Array], stream: Any) -> None:
        from thdattn.comm.overlap.reduce import add_up  # imports CuPy

        add_up(partials, num_partials, rows, results, stream)
