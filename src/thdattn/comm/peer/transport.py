"""Transport through peer memory: GPUs of one machine read each other's memory while kernels use all multiprocessors.

Copy engines pull slices of heads in place, and streams write and await flags that order the copies. A collective of
NCCL needs multiprocessors, and would start only when a kernel that fills the GPU ends. Keys and slices that no kernel
overlaps are exchanged by one kernel, which writes into the memory of the GPUs that read them, see
kernels/peer/exchange.cu. All of it can be captured in a CUDA graph. Nothing makes the host wait but the first use of a
size, for which all ranks exchange handles.

Source: CUDA driver API, stream memory operations and interprocess communication.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from thdattn import spans
from thdattn.arguments import Array
from thdattn.comm import Arrival, PeerExchange, no_wait
from thdattn.comm.failures.outcomes import Waiting, Watched, agreed
from thdattn.comm.overlap import layout
from thdattn.comm.overlap.blocks import PULLED
from thdattn.comm.overlap.layout import offsets, slots_of
from thdattn.comm.overlap.transport import Transport, Wait
from thdattn.comm.peer.shared_memory import KEYS, SLICES, SUMS, SharedMemory
from thdattn.comm.peer.windows import Window, header_bytes
from thdattn.comm.slices import AllToAllSpec, Slices, address, copy, rows_of
from thdattn.jit.structs import MAX_RANKS, MAX_SLICES, PARTIALS

# One kernel exchanges slices that no kernel overlaps: it takes one call of the driver, and writes what has arrived to
# its place while the rest is in flight. Copy engines exchange the others, which leaves all multiprocessors to the
# kernel that overlaps them. Below this many bytes for each rank, the exchange is done before copies would be enqueued.
WORTH_COPYING = 4 * 2**20
_MOST_OF_A_KERNEL = 2**31  # bytes of a message: the kernel counts its words in 32 bits


class PeerTransport(Transport):
    """A rank's overlapped collectives: its stream pulls from windows that all ranks see.

    A flag tells that a part is written, but not by which call: so all ranks make these calls in one order.

    Args:
        world: the MPI communicator of all ranks, all on this machine.
        made_of: the class of windows; measurements pass another one.

    Raises:
        RuntimeError: on every rank, if a step of the start fails on one: the ranks do not see each other's memory.
        MemoryError: on every rank, if one lacks memory for it.
    """

    def __init__(self, world: Any, made_of: type[Window] = Window) -> None:
        super().__init__(world)
        self._summing: Any = None  # the window of the last owner_partials
        agreed(world, "the start of peer memory", lambda: self._begin(made_of))
        try:
            self._probe()
        except Exception:
            self.close()
            raise

    def _begin(self, made_of: type[Window] = Window) -> None:
        super()._begin()
        self._runtime, self._memory = self._cupy.cuda.runtime, SharedMemory(self._world, made_of)

    def _probe(self) -> None:
        """Try every step once, as some machines refuse one. No stream waits before all ranks have come."""
        stream, pulls = self._last, self._stream
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

    def wait_within(self, waiting: Waiting, watched: Watched) -> None:
        super().wait_within(waiting, watched)
        self._memory.waiting = waiting

    def gather_heads(
        self, sends: Sequence[Array], recvs: Sequence[Sequence[Array]], at_once: bool = False
    ) -> list[Arrival]:
        """Gather as Comm.gather_heads does. At once, a kernel exchanges the first group, which no kernel overlaps."""
        stream = self.enter()
        if at_once and len(recvs) == 1:
            return [self._all_by_kernel(stream, self._route(sends, recvs), sends)]
        num_bytes = layout.total([send.nbytes for send in sends])
        window = self._memory.window(KEYS, num_bytes, stream.is_capturing())
        route = self._route(sends, recvs)  # asks for arrays, which may be made of the pool's last large block
        if at_once:
            return self._first_by_kernel(stream, route, window, sends, recvs)
        window.free(stream)
        for send, part in zip(sends, route.parts, strict=True):
            self._copy(window.address(self.rank, part), send.data.ptr, send.nbytes, stream)
        window.publish(stream)
        places = list(recvs)  # this stream may still use their memory
        self._arrive(window, stream)
        arrivals = []
        for group, parts in enumerate(places):
            self._pull(route, group, window, parts)
            if group == len(places) - 1:
                window.take(self._stream)
            arrivals.append(self._arriving(parts, stream))
        return arrivals

    def _all_by_kernel(self, stream: Any, route: _Route, sends: Sequence[Array]) -> Arrival:
        """Let one kernel gather all heads: it writes them into the windows of the ranks that read them."""
        num_bytes = route.num_bytes
        window = self._memory.window(KEYS, (self.size - 1) * num_bytes, stream.is_capturing())

        def slot(of: int, by: int) -> int:
            """Return where a rank's window holds the rows that another one writes; its own has no slot."""
            number: int = (by - of) % self.size - 1
            return max(0, number) * num_bytes

        def made() -> tuple[Any, Any]:
            to = [[window.address(rank, slot(rank, self.rank) + part) if rank != self.rank else 0
                   for rank in range(self.size)] for part in route.parts]
            return route.in_place(window, sends, [(self.rank, slot(self.rank, rank)) for rank in range(self.size)]), to

        parts, to = window.memoize((route, "all"), made)
        return Arrival(parts, peer_exchange=PeerExchange(window.exchange_flags[1], to))

    def _first_by_kernel(self, stream: Any, route: _Route, window: Window, sends: Sequence[Array],
                         recvs: Sequence[Sequence[Array]]) -> list[Arrival]:
        """Let a kernel send all heads and gather the first group.

        The other groups are pulled when all ranks have sent theirs.
        """
        def made() -> tuple[Any, Any]:
            to = [[window.address(rank, part) if rank == self.rank else 0 for rank in range(self.size)]
                  for part in route.parts]
            return route.in_place(window, sends, [(rank, 0) for rank in range(self.size)]), to

        parts, to = window.memoize((route, "first"), made)
        peer_exchange = PeerExchange(window.exchange_flags[0], to)
        places = [recvs[group] for group in range(1, len(recvs))]
        waits: list[Wait] = []  # made when the first group was read

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

    def _pull(self, route: _Route, group: int, window: Window, parts: Sequence[Array]) -> None:
        """Copy a group of the other ranks' heads to its places."""
        with spans.collective("gather of keys", self._stream):
            for place, piece in zip(parts, route.groups[group], strict=True):
                for rank in self._others:
                    piece.pull(self._runtime, place.data.ptr, rank, window.address(rank, 0), self._stream.ptr)

    def carries(self, sizes: Any) -> bool:
        return True

    def exchange(self, sends: Slices, recvs: Slices, sizes: Any) -> Wait:
        """Exchange as Comm.exchange does.

        A rank's slices for another one are together in its window, at an offset that follows from `sizes`.
        """
        stream, slots = self.enter(), slots_of(sizes)
        if not any(slot[-1] for slot in slots):  # on all ranks
            return no_wait
        window = self._memory.window(SLICES, max(slot[-1] for slot in slots), stream.is_capturing())
        window.free(stream)
        at = list(slots[self.rank])
        for array, peer in sends:
            if array.flags.c_contiguous:
                self._copy(window.address(self.rank, at[peer]), address(array), array.nbytes, stream)
            else:  # by a kernel: copy engines are slow at rows with gaps within one GPU
                copy(window.array(at[peer], (len(array), array.nbytes // len(array)), np.uint8), array)
            at[peer] += array.nbytes
        window.publish(stream)
        self._arrive(window, stream)  # it may still use the memory of recvs
        at = [window.address(peer, slot[self.rank]) for peer, slot in enumerate(slots)]
        with spans.collective("exchange", self._stream):
            for array, peer in sorted(recvs, key=lambda pair: (pair[1] - self.rank) % self.size):  # ranks begin apart
                place, rows, width, pitch = rows_of(array)
                _copy_rows(self._runtime, (place, pitch), (at[peer], width), width, rows, self._stream.ptr)
                at[peer] += array.nbytes
        window.take(self._stream)
        return self._arrival(stream)

    def exchanges_by_kernel(self, spec: AllToAllSpec, at_once: bool) -> bool:
        fits = len(spec.outs) <= MAX_SLICES and 0 < spec.most < _MOST_OF_A_KERNEL
        return fits and (at_once or spec.most < WORTH_COPYING)

    def all_to_all(
        self, spec: AllToAllSpec, sends: Sequence[Array], recvs: Sequence[Array], marks: tuple[int, int] = (0, 0)
    ) -> Wait:
        """Exchange slices by one kernel, which writes messages to the windows of the ranks that get them."""
        stream, slots = self.enter(), slots_of(spec.sizes.T)
        window = self._memory.window(SLICES, max([slot[-1] for slot in slots]), stream.is_capturing())

        def made() -> Any:
            from thdattn.comm.peer import exchange  # imports CuPy

            to = [window.address(rank, slot[self.rank]) for rank, slot in enumerate(slots)]
            came = [window.address(self.rank, at) for at in slots[self.rank][:-1]]
            return exchange.Exchange(spec, sends, recvs, to, came, window.exchange_flags[1])

        key = spec, *[x.data.ptr for x in sends], *[x.data.ptr for x in recvs]
        window.memoize(key, made).launch(*marks)
        return self._behind(stream)

    def _route(self, sends: Sequence[Array], recvs: Sequence[Sequence[Array]]) -> _Route:
        behind = [recvs[group][0].shape[1] for group in range(1, len(recvs))]  # the first group may be read in place
        return _route((sends[0].shape[1] - sum(behind), *behind), tuple([(x.shape, x.dtype) for x in sends]))

    def drop_partials(self) -> None:
        self._summing.unfree(self.enter())

    def gather_bytes(self, sends: Sequence[int], num_groups: int) -> dict[str, int]:
        """See Comm.gather_bytes. A single group is written to its readers' windows; several stay in the sender's."""
        num_parts = self.size - 1 if num_groups == 1 else 1
        return self._memory.bytes_of(KEYS, num_parts * layout.total(sends))

    def sum_bytes(self, groups: Sequence[Sequence[int]], in_rank_order: bool) -> dict[str, int]:
        """See Comm.sum_bytes. The last group goes to its owners; partial sums of the other groups are pulled."""
        pulled = max(map(sum, groups)) // self.size * (self.size - 1) if len(groups) > 1 else 0
        return self._memory.bytes_of(SUMS, max(map(layout.total, groups))) | self._blocks.bytes_of({PULLED: pulled})

    def exchange_bytes(self, sizes: Any, strided: int) -> dict[str, int]:
        """See Comm.exchange_bytes. A kernel writes messages to the windows of the ranks that get them."""
        by_kernel = sizes.sum(0).max() < WORTH_COPYING
        most = max(slot[-1] for slot in slots_of(sizes.T if by_kernel else sizes))
        return self._memory.bytes_of(SLICES, most) if most else {}

    def held_bytes(self) -> dict[str, int]:
        return self._memory.held_bytes() | super().held_bytes()

    def owner_partials(
        self, shapes: Sequence[tuple[int, ...]], largest: Sequence[tuple[int, ...]], at_once: bool
    ) -> Any:
        """Return the addresses that Comm.owner_partials describes.

        A rank's window holds, one behind another, its partial sums for all ranks, or theirs for it. At once, partial
        sums go to their owners, who add them up in place. Else they stay, and owners pull them: stores into other GPUs'
        memory slow a kernel down, copy engines do not.
        """
        sizes, begins, _ = layout.partials(tuple(shapes), self.size)
        each, _, most = layout.partials(tuple(largest), self.size)
        stream = self.enter()
        capturing = stream.is_capturing()
        if not at_once:
            self._place = self._blocks.next(PULLED, len(self._others) * sum(each), capturing).address
        window = self._summing = self._memory.window(SUMS, most, capturing)
        window.free(stream)
        self._sizes = sizes
        given, self._gotten = window.owner_partials(begins, sizes, at_once)
        return given

    def reduce_partials(
        self, rows: Array, results: Sequence[Array], at_once: bool, in_rank_order: bool = True
    ) -> Wait:
        """Add partial sums, always in rank order."""
        stream, window = self._cupy.cuda.get_current_stream(), self._summing
        if at_once:
            window.meet(stream)
            self._add(self._gotten, self.size, rows, results, stream)
            window.take(stream)
            return no_wait
        window.publish(stream)
        self._arrive(window, stream)
        self._add(self._pulled(), self.size, rows, results, self._stream)
        window.take(self._stream)
        return self._arrival(stream)

    def _pulled(self) -> Any:
        """Copy the other ranks' partial sums of this rank's rows to its own memory; return a PARTIALS of them."""
        partials, at = np.zeros((), PARTIALS), self._place
        partials["of"] = self._gotten["of"]
        with spans.collective("exchange of partial sums", self._stream):
            for rank in self._others:
                for place, size in zip(partials["of"], self._sizes, strict=True):
                    self._copy(at, int(place[rank]), size, self._stream)
                    place[rank] = at
                    at += size
        return partials[()]

    def close(self) -> None:
        self._summing = None
        self._memory.close()
        self._blocks.close()

    def _arrive(self, window: Window, stream: Any) -> None:
        """Make the stream that pulls wait for another one, and then for the other ranks.

        The second wait is watched. The host may have to wait for all streams, as where it loads a kernel, before it
        makes a watched stream wait for the pulls.
        """
        self._follow(stream)
        with self._watched(self._stream):
            window.arrive(self._stream)

    def _behind(self, stream: Any) -> Wait:
        """Return a function that makes the current stream wait for another one."""

        def wait() -> None:
            current = self._cupy.cuda.get_current_stream()
            if current.ptr != stream.ptr:
                current.wait_event(self._recorded(stream))

        return wait

    def _copy(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        if num_bytes:
            self._runtime.memcpyAsync(target, source, num_bytes, self._runtime.memcpyDefault, stream.ptr)


class _Slice(NamedTuple):
    """Some of the heads of an array in a window: `rows` times `width` bytes, `pitch` bytes apart, from `first` on."""

    first: int
    width: int
    pitch: int
    rows: int

    def pull(self, runtime: Any, target: int, rank: int, source: int, stream: int) -> None:
        """Copy the heads from a rank's window at `source` to its place in an array of these heads at `target`."""
        target, source = target + rank * self.width * self.rows, source + self.first
        _copy_rows(runtime, (target, self.width), (source, self.pitch), self.width, self.rows, stream)


class _Route:
    """Copies of gather_heads, for arrays of some shapes in groups of so many heads.

    parts: where each array begins in a window.
    num_bytes: bytes of all arrays.
    groups: for each group, a slice of every array.
    """

    def __init__(self, heads: Sequence[int], arrays: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
        *self.parts, self.num_bytes = offsets([math.prod(shape) * dtype.itemsize for shape, dtype in arrays])
        widths = [shape[2] * dtype.itemsize for shape, dtype in arrays]
        self.groups = [
            [_Slice(part + (end - number) * width, number * width, shape[1] * width, shape[0])
             for part, width, (shape, _) in zip(self.parts, widths, arrays, strict=True)]
            for number, end in zip(heads, itertools.accumulate(heads), strict=True)
        ]

    def in_place(
        self, window: Window, sends: Sequence[Array], places: Sequence[tuple[int, int]]
    ) -> Sequence[Sequence[Any]]:
        """Return the first group of each rank as arrays in the windows.

        Args:
            places: for each rank, whose window holds its rows, and from which byte on.
        """
        return [[window.heads(of, at + piece.first, piece.pitch, piece.width, send) for of, at in places]
                for piece, send in zip(self.groups[0], sends, strict=True)]


_route = functools.lru_cache(maxsize=256)(_Route)  # equal arrays share one, by which windows memoize


def obstacle(hostnames: Sequence[str]) -> str | None:
    """Say why ranks on these machines do not see each other's memory; None if they may."""
    if len(set(hostnames)) > 1:
        return f"the ranks are on {len(set(hostnames))} machines"
    if len(hostnames) > MAX_RANKS:
        return f"there are {len(hostnames)} ranks, and sums are made for {MAX_RANKS}"
    return None


def _copy_rows(
    runtime: Any, target: tuple[int, int], source: tuple[int, int], width: int, rows: int, stream: int
) -> None:
    """Copy `rows` times `width` bytes; target, source: an address, and the bytes from row to row."""
    if width == target[1] == source[1]:
        if width * rows:
            runtime.memcpyAsync(target[0], source[0], width * rows, runtime.memcpyDefault, stream)
    elif width * rows:
        runtime.memcpy2DAsync(*target, *source, width, rows, runtime.memcpyDefault, stream)

