"""Two ranks that behave as the first two of a larger job: for every rank that misses, each has what the other one has.

Rows, keys and traffic are those of a rank of that job; results are meaningless, and finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np

from thdattn.comm import Comm, peer
from thdattn.structs import MAX_RANKS

STAGGER = 1 << 16  # bytes between what ranks that are one and the same are read from, lest a cache has it already


def as_rank_of(real: Comm, size: int) -> Comm:
    """The comm of this rank among `size` ranks: through peer memory where the real one has it, else by collectives.

    Args:
        real: the comm of the two ranks that there are; it stays open, and is closed last.

    Raises:
        ValueError: other than two real ranks, or fewer to stand for.
    """
    if real.size != 2 or size < 2:
        raise ValueError(
            f"found {real.size} real ranks to behave as ranks of {size}, wanted 2 as ranks of 2 or more; start "
            f"the program with mpiexec -n 2"
        )
    return _by_peer_memory(real, size) if real.overlaps and size <= MAX_RANKS else ByCollectives(real, size)


# --- peer memory -------------------------------------------------------------------------------------------------


def _by_peer_memory(real: Any, size: int) -> Comm:
    """The real comm with other peer memory: its checks, deadline and largest of numbers are those of two ranks."""
    comm: Comm = copy(real)
    comm.size = size
    comm._peer = peer.PeerMemory(World(real._world, size), Window)  # type: ignore[attr-defined]
    real.before_close(comm._peer.close)  # type: ignore[attr-defined]
    return comm


class World:
    """As much of MPI's communicator as peer memory needs."""

    def __init__(self, real: Any, size: int) -> None:
        self._real, self.rank, self.size = real, real.rank, size

    def allgather(self, value: Any) -> list[Any]:
        """What this rank has, in its place, and what the other one has in all others."""
        values = self._real.allgather(value)
        return [values[rank if rank < 2 else 1 - self.rank] for rank in range(self.size)]

    def Barrier(self) -> None:
        """Of the two."""
        self._real.Barrier()


class Window(peer.Window):
    """A window of which each of two ranks has its part, and plays the ranks from 2 on to the other one.

    Such a rank's flags are set by the one that has its memory, so that all are set and awaited that would be.
    """

    def __init__(self, world: World, num_bytes: int) -> None:
        super().__init__(world, num_bytes + world.size * STAGGER)
        self.array(0, (self.num_bytes,), np.uint8).fill(0)  # what is read beyond the arrays is finite
        self.num_bytes = num_bytes
        self.publish, self.take = (
            peer._MemOps(write=[
                (at + peer._FLAG_BYTES * (kind * world.size + (rank if rank > 1 else world.rank)), 1)
                for rank, at in enumerate(self._at)
            ])
            for kind in (0, 1)
        )  # fmt: skip

    def address(self, rank: int, offset: int) -> int:
        """Of a byte of a rank's part; of one that is played, a little behind that."""
        return super().address(rank, offset + (STAGGER * rank if rank > 1 else 0))


# --- collectives -------------------------------------------------------------------------------------------------


class ByCollectives(Comm):
    """A collective over `size` ranks is size - 1 collectives of the two, in one launch of NCCL.

    Each of them brings one foreign share and takes one away.
    """

    def __init__(self, real: Comm, size: int) -> None:
        super().__init__(real.rank, size)
        self.real = real
        self.name, self.devices, self.sum_dtypes = real.name, real.devices, real.sum_dtypes
        self.capturable, self._gpu = real.capturable, real._gpu

    def _all_gather(self, send: Any, recv: Any) -> None:
        rows = len(send)
        with self._together():
            for first in range(self.size - 1):  # the next one overwrites the second half, in any order
                self.real.all_gather(send, recv[first * rows : (first + 2) * rows])

    def _reduce_scatter(self, send: Any, recv: Any) -> None:
        rows = len(recv)
        with self._together():
            for first in range(self.size - 1):
                self.real.reduce_scatter(send[first * rows : (first + 2) * rows], recv)

    def _all_reduce(self, array: Any, op: str) -> None:
        self.real.all_reduce(array, op)

    def _barrier(self) -> None:
        self.real.barrier()

    def _split(self, color: int, key: int) -> Comm:
        raise NotImplementedError("ranks that there only seem to be are not divided into groups")

    def _gather_values(self, value: int) -> Sequence[int]:
        return self.real._gather_values(value)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """NCCL calls as one launch; other comms have none."""
        if self.real.name != "nccl":
            yield
            return
        from cupy.cuda import nccl

        nccl.groupStart()
        try:
            yield
        finally:  # an open group would swallow every later call
            nccl.groupEnd()
