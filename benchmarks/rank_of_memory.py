"""Peer memory of two ranks that behave as the first two of a larger job; see rank_of.py.

Every rank that misses is played to each of the two by the other one: its rows are read from that one's memory, what is
for it is written there, and its flags are set by that one, so that a rank copies, adds, sets and awaits as much as it
would among all. What is written for one may be overwritten by what is for another.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np

from thdattn.comm import Comm
from thdattn.comm.peer import transport, windows

STAGGER = 1 << 16  # bytes by which what two ranks are read from differs at least, lest a cache has it already


def stand_in(real: Any, size: int) -> Comm:
    """The real comm with other peer memory: its checks, deadline and maxima are those of the two ranks."""
    memory = transport.PeerMemory(World(real._world, size), Window)
    real.before_close(memory.close)
    comm: Any = copy(real)
    comm.size, comm._peer = size, memory
    made: Comm = comm
    return made


class World:
    """As much of MPI's communicator as peer memory needs."""

    def __init__(self, real: Any, size: int) -> None:
        self._real, self.rank, self.size = real, real.rank, size

    def allgather(self, value: Any) -> list[Any]:
        """What this rank has, in its place, and what the other one has in all others."""
        values = self._real.allgather(value)
        return [values[rank if rank < 2 else 1 - self.rank] for rank in range(self.size)]


class Window(windows.Window):
    """A window of which each of two ranks has its part, and plays the ranks from 2 on to the other one.

    Such a rank's flags are set by the one that has its memory, so that all are set and awaited that would be.
    """

    def __init__(self, rank: int, size: int, num_bytes: int) -> None:
        import cupy

        super().__init__(rank, size, num_bytes + size * STAGGER)
        self.array(0, (self.num_bytes,), np.uint8).fill(0)  # what is read beyond the arrays is finite
        self.num_bytes = num_bytes
        cupy.cuda.get_current_stream().synchronize()

    def flags_there(self) -> list[int]:
        """Of a rank that is played, the flags that it has for the one that plays it."""
        return [there if rank < 2 else there + windows.flags_of(rank) - windows.flags_of(self._rank)
                for rank, there in enumerate(super().flags_there())]

    def address(self, rank: int, offset: int) -> int:
        """Of a byte of a rank's part; of one that is played, a little behind that."""
        return super().address(rank, offset + (STAGGER * rank if rank > 1 else 0))
