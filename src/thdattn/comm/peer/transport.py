"""Peer memory: the GPUs of one machine read each other's memory, beside kernels and without taking a multiprocessor.

Copy engines pull slices of heads as they lie, and flags that streams write and wait for say when: a collective of NCCL
needs multiprocessors, and would start when a kernel that fills the GPU ends. What nothing hides, keys and slices, is
brought by one kernel, which writes into the memory of the GPUs that read it, see kernels/peer/exchange.cu. All of it
can be captured in a CUDA graph, and nothing makes the host wait, but for the first use of a size, which all ranks meet
to exchange handles for.

Source: CUDA driver API, stream memory operations and interprocess communication.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from thdattn.comm import Arrival, PeerExchange, no_wait
from thdattn.comm.failures.outcomes import Waiting, agreed
from thdattn.comm.peer import layout
from thdattn.comm.peer.layout import bytes_of, offsets, offsets_of, slots_of
from thdattn.comm.peer.shared_memory import KEYS, PULLED, SLICES, SUMS, SharedMemory
from thdattn.comm.peer.windows import Window, header_bytes
from thdattn.comm.slices import AllToAllSpec, Slices, address, copy, rows_of
from thdattn.jit.structs import MAX_CUTS, MAX_RANKS, SHARES

_HIGHEST = -5  # of the priorities of streams

# Slices that hide behind nothing are brought by one kernel, which takes one call of the driver and places what has come
# while the rest is on its way; others by copy engines, which leave all multiprocessors to the kernel that hides them.
# Unless no rank gets as many bytes as this: they are there sooner than the driver has been told of each.
WORTH_COPYING = 4 * 2**20
_MOST_OF_A_KERNEL = 2**31  # bytes of a message, whose words it counts in 32 bits

_FLOAT32 = np.dtype(np.float32)

Wait = Callable[[], None]


class PeerMemory:
    """A rank's collectives beside kernels: their memory, and a stream that pulls.

    Args:
        world: the MPI communicator of all ranks, all on this machine.
        made_of: the class of windows; measurements pass another one.

    Raises:
        RuntimeError: on every rank, if a step of the start fails on one: the ranks do not see each other's memory.
        MemoryError: on every rank, if one lacks memory for it.
    """

    def __init__(self, world: Any, made_of: type[Window] = Window) -> None:
        self._world, self.rank, self.size = world, world.rank, world.size
        self._others = [(self.rank + i) % self.size for i in range(1, self.size)]  # each rank begins with another one
        self._summing: Any = None  # the window of the last `homes`
        agreed(world, "the start of peer memory", lambda: self._begin(made_of))
        try:
            self._probe()
        except Exception:
            self.close()
            raise

    def _begin(self, made_of: type[Window]) -> None:
        import cupy

        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        # Of a priority of its own, so that it shares no hardware queue with a stream that waits for it.
        self._pulls = cupy.cuda.Stream(non_blocking=True, priority=_HIGHEST)
        self._last = cupy.cuda.get_current_stream()
        self._memory = SharedMemory(self._world, made_of)

    def _probe(self) -> None:
        """Take every step once, as there are machines that refuse one. No stream waits before all ranks have come."""
        stream, pulls = self._last, self._pulls
        window = self._memory.window(KEYS, header_bytes(self.size), False)

        def write() -> None:
            window.free(stream)
            window.publish(stream)
            stream.synchronize()

        def take() -> None:
            window.arrive(pulls)
            window.take(pulls)
            pulls.synchronize()

        agreed(self._world, "writing into the memory of other GPUs", write)
        agreed(self._world, "reading the memory of other GPUs", lambda: window.check_published(pulls))
        agreed(self._world, "waiting for flags", take)

    def wait_within(self, waiting: Waiting) -> None:
        """Have the host wait for other ranks, from now on, in contexts that `waiting` makes; see agreed."""
        self._memory.waiting = waiting

    def enter(self) -> Any:
        """The current stream, which now comes after that of the call before.

        A flag tells whose part is written, but not by which call: all ranks make these in one order, on any stream.
        """
        stream = self._cupy.cuda.get_current_stream()
        if stream.ptr != self._last.ptr and not stream.is_capturing():
            stream.wait_event(self._last.record())
            self._last = stream
        return stream

    def gather_heads(
        self, sends: Sequence[Any], recvs: Sequence[Sequence[Any]], at_once: bool, marks: tuple[int, int] = (0, 0)
    ) -> list[Arrival]:
        """See Comm.gather_heads. At once, the first group, which hides behind nothing, is brought by a kernel.

        Args:
            marks: of that kernel, see Meeting.
        """
        stream, route = self.enter(), self._route(sends, recvs)
        if at_once and len(recvs) == 1:
            return [self._all_by_kernel(stream, route, sends, marks)]
        window = self._memory.window(KEYS, route.num_bytes, stream.is_capturing())
        if at_once:
            return self._first_by_kernel(stream, route, window, sends, recvs, marks)
        window.free(stream)
        for send, part in zip(sends, route.parts, strict=True):
            self._copy(window.address(self.rank, part), send.data.ptr, send.nbytes, stream)
        window.publish(stream)
        places = list(recvs)  # whose memory this stream may have just left
        self._follow(stream)
        window.arrive(self._pulls)
        arrivals = []
        for group, parts in enumerate(places):
            self._pull(route, group, window, parts)
            if group == len(places) - 1:
                window.take(self._pulls)
            arrivals.append(Arrival([[place] for place in parts], self._arrival(stream)))
        return arrivals

    def _all_by_kernel(self, stream: Any, route: _Route, sends: Sequence[Any], marks: tuple[int, int]) -> Arrival:
        """All heads for a kernel that writes them into the windows of the ranks that read them."""
        num_bytes = route.num_bytes
        window = self._memory.window(KEYS, (self.size - 1) * num_bytes, stream.is_capturing())

        def slot(of: int, by: int) -> int:
            """Where in a rank's part begins what another one writes; what is its own nobody reads there."""
            number: int = (by - of) % self.size - 1
            return max(0, number) * num_bytes

        def made() -> tuple[Any, Any]:
            to = [[window.address(rank, slot(rank, self.rank) + part) if rank != self.rank else 0
                   for rank in range(self.size)] for part in route.parts]
            return route.in_place(window, sends, [(self.rank, slot(self.rank, rank)) for rank in range(self.size)]), to

        parts, to = window.memoize((route, "all"), made)
        return Arrival(parts, peer_exchange=PeerExchange(window.exchange_flags[1], to, *marks))

    def _first_by_kernel(self, stream: Any, route: _Route, window: Window, sends: Sequence[Any],
                         recvs: Sequence[Sequence[Any]], marks: tuple[int, int]) -> list[Arrival]:
        """The first group for a kernel that offers all heads, and the others pulled when all ranks have done so."""
        def made() -> tuple[Any, Any]:
            to = [[window.address(rank, part) if rank == self.rank else 0 for rank in range(self.size)]
                  for part in route.parts]
            return route.in_place(window, sends, [(rank, 0) for rank in range(self.size)]), to

        parts, to = window.memoize((route, "first"), made)
        peer_exchange = PeerExchange(window.exchange_flags[0], to, *marks)
        places = [recvs[group] for group in range(1, len(recvs))]
        waits: list[Wait] = []  # made when the first one was read

        def wait(number: int) -> None:
            waits[number]()

        def pull() -> None:
            self._follow(stream)
            for group, parts in enumerate(places, 1):
                self._pull(route, group, window, parts)
                waits.append(self._arrival(stream))

        arrivals = [Arrival([[place] for place in parts], functools.partial(wait, number))
                    for number, parts in enumerate(places)]
        arrivals[-1] = arrivals[-1]._replace(done=lambda: window.take(stream))
        return [Arrival(parts, done=pull, peer_exchange=peer_exchange), *arrivals]

    def _pull(self, route: _Route, group: int, window: Window, parts: Sequence[Any]) -> None:
        """Copies a group of the other ranks' heads to its places."""
        for place, piece in zip(parts, route.groups[group], strict=True):
            for rank in self._others:
                piece.pull(self._runtime, place.data.ptr, rank, window.address(rank, 0), self._pulls.ptr)

    def exchange(self, sends: Slices, recvs: Slices, sizes: Any) -> Wait:
        """See Comm.exchange. What a rank sends to another one lies together in its window, where `sizes` tells."""
        stream, slots = self.enter(), slots_of(sizes)
        if not any(slot[-1] for slot in slots):  # on all ranks
            return no_wait
        window = self._memory.window(SLICES, max(slot[-1] for slot in slots), stream.is_capturing())
        window.free(stream)
        at = list(slots[self.rank])
        for array, peer in sends:
            if array.flags.c_contiguous:
                self._copy(window.address(self.rank, at[peer]), address(array), array.nbytes, stream)
            else:  # a kernel, as copy engines are slow at rows that do not follow each other in one GPU's memory
                copy(window.array(at[peer], (len(array), array.nbytes // len(array)), np.uint8), array)
            at[peer] += array.nbytes
        window.publish(stream)
        self._follow(stream)  # which may have just left the memory of recvs
        window.arrive(self._pulls)
        at = [window.address(peer, slot[self.rank]) for peer, slot in enumerate(slots)]
        for array, peer in sorted(recvs, key=lambda pair: (pair[1] - self.rank) % self.size):  # each begins elsewhere
            place, rows, width, pitch = rows_of(array)
            _copy_rows(self._runtime, place, pitch, at[peer], width, width, rows, self._pulls.ptr)
            at[peer] += array.nbytes
        window.take(self._pulls)
        return self._arrival(stream)

    def exchanges_by_kernel(self, spec: AllToAllSpec, at_once: bool) -> bool:
        """Whether to call `swap`; all ranks find the same."""
        fits = len(spec.outs) <= MAX_CUTS and 0 < spec.most < _MOST_OF_A_KERNEL
        return fits and (at_once or spec.most < WORTH_COPYING)

    def all_to_all(
        self, spec: AllToAllSpec, sends: Sequence[Any], recvs: Sequence[Any], marks: tuple[int, int] = (0, 0)
    ) -> Wait:
        """See Comm.swap. By one kernel, on the current stream; messages lie in the windows of those who get them.

        Args:
            marks: of the kernel, see Meeting.
        """
        stream, slots = self.enter(), slots_of(spec.sizes.T)
        window = self._memory.window(SLICES, max([slot[-1] for slot in slots]), stream.is_capturing())

        def made() -> Any:
            from thdattn.comm.peer import exchange  # which wants CuPy

            to = [window.address(rank, slot[self.rank]) for rank, slot in enumerate(slots)]
            came = [window.address(self.rank, at) for at in slots[self.rank][:-1]]
            return exchange.Exchange(spec, sends, recvs, to, came, window.exchange_flags[1])

        key = spec, *[x.data.ptr for x in sends], *[x.data.ptr for x in recvs]
        window.memoize(key, made).launch(*marks)
        return self._behind(stream)

    def _route(self, sends: Sequence[Any], recvs: Sequence[Sequence[Any]]) -> _Route:
        behind = [recvs[group][0].shape[1] for group in range(1, len(recvs))]  # the first one may be read where it is
        return _route((sends[0].shape[1] - sum(behind), *behind), tuple([(x.shape, x.dtype) for x in sends]))

    def drop_partials(self) -> None:
        """See Comm.give_back."""
        self._summing.unfree(self.enter())

    def gather_bytes(self, sends: Sequence[int], num_groups: int) -> dict[str, int]:
        """See Comm.gather_bytes. One group comes where it is read, others wait where they are from."""
        num_parts = self.size - 1 if num_groups == 1 else 1
        return {KEYS: self._both(layout.rounded_up(num_parts * offsets(sends)[-1]))}

    def sum_bytes(self, groups: Sequence[Sequence[int]]) -> dict[str, int]:
        """See Comm.sum_bytes. All groups but the last one, whose shares go to their owners, are pulled from others."""
        most = max(map(sum, groups))
        pulled = {PULLED: layout.rounded_up(most // self.size * (self.size - 1))} if len(groups) > 1 else {}
        return {SUMS: self._both(layout.rounded_up(max(offsets(group)[-1] for group in groups))), **pulled}

    def exchange_bytes(self, sizes: Any) -> dict[str, int]:
        """See Comm.exchange_bytes. What a kernel brings lies in the windows of those who get it."""
        by_kernel = sizes.sum(0).max() < WORTH_COPYING
        most = max(slot[-1] for slot in slots_of(sizes.T if by_kernel else sizes))
        return {SLICES: self._both(layout.rounded_up(most))} if most else {}

    def held_bytes(self) -> dict[str, int]:
        """See Comm.held_bytes."""
        return self._memory.held_bytes()

    def _both(self, num_bytes: int) -> int:
        """Of the two windows of a use."""
        return 2 * (header_bytes(self.size) + num_bytes)

    def owner_partials(
        self, shapes: Sequence[tuple[int, ...]], largest: Sequence[tuple[int, ...]], at_once: bool
    ) -> Any:
        """See Comm.homes. In a rank's window lie behind each other its shares for all ranks, or theirs for it.

        At once, shares go to their owners, who add them up where they are then. Else they stay, and owners pull them:
        stores into other GPUs' memory hold up a kernel, copy engines do not.
        """
        (*begins, _), (*_, most) = (offsets_of(tuple((self.size * rows, *rest) for rows, *rest in each), _FLOAT32)
                                    for each in (shapes, largest))
        stream = self.enter()
        capturing = stream.is_capturing()
        if not at_once:
            room = sum(bytes_of(tuple(largest), _FLOAT32)) * len(self._others)
            self._place = self._memory.pulled(room, capturing)
        window = self._summing = self._memory.window(SUMS, most, capturing)
        window.free(stream)
        self._sizes = bytes_of(tuple(shapes), _FLOAT32)
        given, self._gotten = window.owner_partials(tuple(begins), self._sizes, at_once)
        return given

    def reduce_partials(self, rows: Any, results: Sequence[Any], at_once: bool) -> Wait:
        """See Comm.sum_at_home."""
        stream, window = self._cupy.cuda.get_current_stream(), self._summing
        if at_once:
            window.meet(stream)
            self._add(self._gotten, results, rows, stream)
            window.take(stream)
            return no_wait
        window.publish(stream)
        self._follow(stream)
        window.arrive(self._pulls)
        self._add(self._pulled(), results, rows, self._pulls)
        window.take(self._pulls)
        return self._arrival(stream)

    def _pulled(self) -> Any:
        """A SHARES of what this rank owns, of which it copies the other ranks' to memory of its own."""
        shares, at = np.zeros((), SHARES), self._place
        shares["of"] = self._gotten["of"]
        for rank in self._others:
            for place, size in zip(shares["of"], self._sizes, strict=True):
                self._copy(at, int(place[rank]), size, self._pulls)
                place[rank] = at
                at += size
        return shares[()]

    def _add(self, shares: Any, results: Sequence[Any], rows: Any, stream: Any) -> None:
        from thdattn.comm.peer.reduce import add_up  # which wants CuPy

        add_up(shares, self.size, rows, results, stream)

    def close(self) -> None:
        """Free all memory that ranks share; called by all ranks, when no graph holds a window any more."""
        self._summing = None
        self._memory.close()

    def _arrival(self, stream: Any) -> Wait:
        """What has the current stream wait for all pulls so far, and the one that asked for them.

        CuPy gives the memory that they write to later work of that one, if nobody holds it any more.
        """
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._pulls)

        def wait() -> None:
            current = self._cupy.cuda.get_current_stream()
            current.wait_event(event)
            if current.ptr != stream.ptr:
                stream.wait_event(event)

        return wait

    def _behind(self, stream: Any) -> Wait:
        """What has the current stream come after another one."""

        def wait() -> None:
            current = self._cupy.cuda.get_current_stream()
            if current.ptr != stream.ptr:
                current.wait_event(stream.record())

        return wait

    def _follow(self, stream: Any) -> None:
        """Has the stream that pulls wait for another one."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        self._pulls.wait_event(event)

    def _copy(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        if num_bytes:
            self._runtime.memcpyAsync(target, source, num_bytes, self._runtime.memcpyDefault, stream.ptr)


class _Slice(NamedTuple):
    """Some of the heads of an array in a window: from `first` on, `width` of every `pitch` bytes, `rows` times."""

    first: int
    width: int
    pitch: int
    rows: int

    def pull(self, runtime: Any, target: int, rank: int, source: int, stream: int) -> None:
        """Copies it to a rank's place in an array of these heads at `target`, out of its part at `source`."""
        target, source = target + rank * self.width * self.rows, source + self.first
        _copy_rows(runtime, target, self.width, source, self.pitch, self.width, self.rows, stream)


class _Route:
    """What gather_heads copies, of arrays of some shapes in groups of so many heads.

    parts: where each array begins in a window; num_bytes: of all.
    groups: of each group, a slice of every array.
    """

    def __init__(self, heads: Sequence[int], arrays: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        *self.parts, self.num_bytes = offsets([math.prod(shape) * dtype.itemsize for shape, dtype in arrays])
        widths = [shape[2] * dtype.itemsize for shape, dtype in arrays]
        self.groups = [
            [_Slice(part + (end - number) * width, number * width, shape[1] * width, shape[0])
             for part, width, (shape, _) in zip(self.parts, widths, arrays, strict=True)]
            for number, end in zip(heads, itertools.accumulate(heads), strict=True)
        ]  # fmt: skip

    def in_place(
        self, window: Window, sends: Sequence[Any], places: Sequence[tuple[int, int]]
    ) -> Sequence[Sequence[Any]]:
        """The first group of each rank as it lies in a window.

        Args:
            places: in whose part what each rank has begins, and at which byte.
        """
        return [[window.heads(of, at + piece.first, piece.pitch, piece.width, send) for of, at in places]
                for piece, send in zip(self.groups[0], sends, strict=True)]


_route = functools.lru_cache(maxsize=256)(_Route)  # one for the same arrays, as windows know what is in which place


def obstacle(hostnames: Sequence[str]) -> str | None:
    """Why ranks on these machines do not see each other's memory; None if they may."""
    if len(set(hostnames)) > 1:
        return f"the ranks are on {len(set(hostnames))} machines"
    if len(hostnames) > MAX_RANKS:
        return f"there are {len(hostnames)} ranks, and sums are made for {MAX_RANKS}"
    return None


def _copy_rows(
    runtime: Any, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: int
) -> None:
    """Copies `rows` times `width` bytes, one every so many bytes on either side."""
    if width == target_pitch == source_pitch:
        if width * rows:
            runtime.memcpyAsync(target, source, width * rows, runtime.memcpyDefault, stream)
    elif width * rows:
        runtime.memcpy2DAsync(
            target, target_pitch, source, source_pitch, width, rows, runtime.memcpyDefault, stream)

