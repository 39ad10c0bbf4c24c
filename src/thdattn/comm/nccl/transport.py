"""Transport through NCCL: it carries one group of heads while kernels compute another one.

A second communicator with few thread blocks works on a stream of its own, which events order with the streams of
kernels. A collective that no kernel overlaps takes the first communicator, which may use all multiprocessors, on the
current stream. It comes after all overlapped collectives, so that one collective of the attention runs at a time.

Keys are gathered in place. A backward kernel writes partial sums in rank order into memory that NCCL sends from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from thdattn import spans
from thdattn.arguments import Array
from thdattn.comm import Arrival, no_wait
from thdattn.comm.failures.outcomes import agreed
from thdattn.comm.nccl import communicator
from thdattn.comm.overlap import layout
from thdattn.comm.overlap.blocks import RECEIVED, SENT, SLICES, SUMS, Block
from thdattn.comm.overlap.transport import Transport, Wait
from thdattn.comm.slices import Slices, address, copy
from thdattn.jit.structs import MAX_RANKS, PARTIALS

CTAS = 4  # thread blocks of an overlapped collective: more of them slow the kernels
WORTH_OVERLAPPING = 2**20  # bytes that a rank receives; fewer arrive before an overlapped collective would have started


class _Partials(NamedTuple):
    """Partial sums of dk and dv that a kernel writes into a block.

    begins: addresses of the two; sizes: bytes of one owner's rows of each. Those of all owners follow each other.
    num_received: bytes of this rank's rows in the blocks of all other ranks, for the group with most heads.
    """

    block: Block
    begins: tuple[int, ...]
    sizes: tuple[int, ...]
    num_received: int


class NcclTransport(Transport):
    """A rank's overlapped collectives, by NCCL.

    Args:
        main: its first communicator of these ranks.
        ctas: thread blocks of an overlapped collective.

    Raises:
        RuntimeError: on every rank, if the second communicator does not start on one.
    """

    def __init__(self, world: Any, nccl: Any, main: Any, ctas: int = CTAS) -> None:
        super().__init__(world)
        self._nccl, self._main = nccl, main
        self._summing: _Partials | None = None  # of the last owner_partials
        agreed(world, "the start of a stream for collectives", self._begin)
        self._few_blocks = communicator.start_with_few_blocks(world, nccl, ctas)

    def gather_heads(
        self, sends: Sequence[Array], recvs: Sequence[Sequence[Array]], at_once: bool = False
    ) -> list[Arrival]:
        """Gather as Comm.gather_heads does. At once, the first group comes on the current stream."""
        stream, places = self.enter(), list(recvs)  # this stream may still use their memory
        first = 0
        for parts in places:
            self._put_own(sends, parts, first)
            first += parts[0].shape[1]
        is_small = len(self._others) * sum(send.nbytes for send in sends) < WORTH_OVERLAPPING
        num_now = len(places) if is_small else int(at_once)
        if num_now:
            self._meet(stream)
        for parts in places[:num_now]:
            self._gather(self._main, parts, stream)
        arrivals = [Arrival([[place] for place in parts]) for parts in places[:num_now]]
        if num_now < len(places):
            self._follow(stream)
        for parts in places[num_now:]:
            self._gather(self._few_blocks, parts, self._stream)
            arrivals.append(self._arriving(parts, stream))
        return arrivals

    def _put_own(self, sends: Sequence[Array], parts: Sequence[Array], first: int) -> None:
        """Copy some heads of this rank's rows to their places, from which NCCL sends them."""
        for send, part in zip(sends, parts, strict=True):
            mine = part[self.rank * len(send) : (self.rank + 1) * len(send)]
            if mine.size:
                copy(mine, send[:, first : first + part.shape[1]])

    def _gather(self, comm: Any, parts: Sequence[Array], stream: Any) -> None:
        """Enqueue one launch that gathers arrays in which this rank's rows are in place."""
        with self._together("gather of keys", stream):
            for part in parts:
                count, begin = part.nbytes // self.size, part.data.ptr
                if count:
                    comm.allGather(begin + self.rank * count, begin, count, self._nccl.NCCL_UINT8, stream.ptr)

    def carries(self, sizes: Any) -> bool:
        return bool(sizes.sum(axis=0).max() >= WORTH_OVERLAPPING)

    def exchange(self, sends: Slices, recvs: Slices, sizes: Any) -> Wait:
        """Exchange as Comm.exchange does, by sends and receives that start together.

        What is sent is copied first, as it is free again when the call returns.
        """
        stream = self.enter()
        sent = self._next(SENT, int(sizes.sum(axis=1).max()), stream)
        parts, at = [], 0
        for array, peer in sends:
            parts.append((self._bytes(sent, at, array), peer))
            copy(parts[-1][0], array)
            at += array.nbytes
        self._follow(stream)
        received, places = self._places(recvs)
        with self._together("exchange", self._stream):
            for place, peer in places:
                self._few_blocks.recv(address(place), place.nbytes, self._nccl.NCCL_UINT8, peer, self._stream.ptr)
            for part, peer in parts:
                self._few_blocks.send(address(part), part.nbytes, self._nccl.NCCL_UINT8, peer, self._stream.ptr)
        if received is not None:
            self._spread(recvs, places, stream)
            received.last = self._recorded(self._stream)
        sent.last = self._recorded(self._stream)
        return self._arrival(stream)

    def _spread(self, recvs: Slices, places: Slices, current: Any) -> None:
        """Copy slices from a block to their rows, beside the current stream."""
        self._stream.use()  # `with` would restore the stream of the outer `with`, not one selected since
        try:
            for (array, _), (place, _) in zip(recvs, places, strict=True):
                if place is not array:
                    copy(array, place)
        finally:
            current.use()

    def _places(self, recvs: Slices) -> tuple[Block | None, list[tuple[Any, int]]]:
        """Return where slices arrive: in their own memory, or in a block if rows have gaps; and that block."""
        num_bytes = sum(array.nbytes for array, _ in recvs if not array.flags.c_contiguous)
        if not num_bytes:
            return None, list(recvs)
        block, at, places = self._next(SLICES, num_bytes, self._stream), 0, []
        for array, peer in recvs:
            if array.flags.c_contiguous:
                places.append((array, peer))
            else:
                places.append((self._bytes(block, at, array), peer))
                at += array.nbytes
        return block, places

    def owner_partials(
        self, shapes: Sequence[tuple[int, ...]], largest: Sequence[tuple[int, ...]], at_once: bool
    ) -> Any:
        """Return the addresses that Comm.owner_partials describes: one for all owners, in rank order."""
        sizes, begins, _ = layout.partials(tuple(shapes), self.size)
        each, _, most = layout.partials(tuple(largest), self.size)
        block = self._next(SUMS, most, self.enter())
        begins = tuple(block.address + begin for begin in begins)
        self._summing = _Partials(block, begins, sizes, len(self._others) * sum(each))
        return _addresses(begins)

    def drop_partials(self) -> None:
        assert self._summing is not None
        self._summing.block.last = self._recorded(self.enter())

    def reduce_partials(
        self, rows: Array, results: Sequence[Array], at_once: bool, in_rank_order: bool = True
    ) -> Wait:
        current, summing = self.enter(), self._summing
        assert summing is not None
        if at_once:
            self._meet(current)
            comm, stream = self._main, current
        else:
            self._follow(current)
            comm, stream = self._few_blocks, self._stream
        if self._adds_in_rank_order(in_rank_order):
            received = self._next(RECEIVED, summing.num_received, stream)
            self._add(self._exchanged(comm, summing, received, stream), self.size, rows, results, stream)
            received.last = self._recorded(stream)  # nothing else orders two streams of a capture
        else:
            self._add(self._reduced(comm, summing, stream), 1, rows, results, stream)
        summing.block.last = self._recorded(stream)
        return no_wait if at_once else self._arrival(current)

    def _adds_in_rank_order(self, wanted: bool) -> bool:
        """Return whether ranks exchange partial sums and each adds its own; else NCCL adds them, in its own order."""
        return wanted and self.size <= MAX_RANKS

    def _exchanged(self, comm: Any, summing: _Partials, received: Block, stream: Any) -> Any:
        """Exchange partial sums; return the addresses of all ranks' partial sums of this rank's rows."""
        uint8, at = self._nccl.NCCL_UINT8, received.address
        partials = np.zeros((), PARTIALS)
        with self._together("exchange of partial sums", stream):
            for of, begin, size in zip(partials["of"], summing.begins, summing.sizes, strict=True):
                of[self.rank] = begin + self.rank * size
                for peer in self._others:
                    of[peer] = at
                    if size:
                        comm.recv(at, size, uint8, peer, stream.ptr)
                        comm.send(begin + peer * size, size, uint8, peer, stream.ptr)
                    at += size
        return partials[()]

    def _reduced(self, comm: Any, summing: _Partials, stream: Any) -> Any:
        """Reduce partial sums in place; return the addresses of the sums of this rank's rows."""
        float32, add = self._nccl.NCCL_FLOAT32, self._nccl.NCCL_SUM
        places = [begin + self.rank * size for begin, size in zip(summing.begins, summing.sizes, strict=True)]
        with self._together("sum of gradients", stream):
            for begin, place, size in zip(summing.begins, places, summing.sizes, strict=True):
                if size:
                    comm.reduceScatter(begin, place, size // 4, float32, add, stream.ptr)
        return _addresses(places)

    def gather_bytes(self, sends: Sequence[int], num_groups: int) -> dict[str, int]:
        return {}  # keys are gathered in place

    def sum_bytes(self, groups: Sequence[Sequence[int]], in_rank_order: bool) -> dict[str, int]:
        in_order, share = self._adds_in_rank_order(in_rank_order), max(map(sum, groups)) // self.size
        received = share * (self.size - 1) if in_order else 0
        return self._blocks.bytes_of({SUMS: max(map(layout.total, groups)), RECEIVED: received})

    def exchange_bytes(self, sizes: Any, strided: int) -> dict[str, int]:
        return self._blocks.bytes_of({SENT: int(sizes.sum(axis=1).max()), SLICES: strided})

    def close(self) -> None:
        self._stream.synchronize()
        self._few_blocks.destroy()
        self._summing = None
        self._blocks.close()

    def _next(self, use: str, num_bytes: int, stream: Any) -> Block:
        """Return the block of a use whose turn it is, when the stream may write it."""
        block = self._blocks.next(use, num_bytes, stream.is_capturing())
        if block.last is not None:
            stream.wait_event(block.last)
        return block

    def _bytes(self, block: Block, at: int, like: Array) -> Any:
        """Return bytes of a block as rows of the bytes of an array, without gaps."""
        place = self._cupy.cuda.MemoryPointer(block.memory, at)
        return self._cupy.ndarray((len(like), like.nbytes // len(like)), np.uint8, place)

    @contextmanager
    def _together(self, what: str, stream: Any) -> Iterator[None]:
        """Have NCCL start the calls of a block together, by one launch on a stream, which is watched.

        The host may have to wait for all streams, as where it loads a kernel, before another one waits for this.
        """
        with spans.collective(what, stream), self._watched(stream):
            self._nccl.groupStart()
            try:
                yield
            finally:  # an open group would swallow every later call
                self._nccl.groupEnd()

    def _meet(self, stream: Any) -> None:
        """Make a stream wait for all overlapped collectives so far; later ones follow it."""
        self._follow(stream)
        stream.wait_event(self._recorded(self._stream))


def _addresses(begins: Sequence[int]) -> Any:
    """Return a PARTIALS with one address for each array."""
    partials = np.zeros((), PARTIALS)
    partials["of"][:, 0] = begins
    return partials[()]
