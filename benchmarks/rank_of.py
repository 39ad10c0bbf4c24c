"""Comms by which two ranks behave as two of a larger job: each plays the missing ranks to the other one.

Rows, keys and traffic are those of two ranks of that job; results mean nothing, and are finite. With peer memory, a
rank reads the rows of a missing rank from the other rank's memory, and writes there what is for the missing rank. The
other rank sets the missing rank's flags. So a rank copies, adds, sets and awaits as much as among all ranks. Data for
one rank may overwrite data for another. Methods that communicate by `exchange` alone get as many bytes in one exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any, NoReturn

import numpy as np

from thdattn.comm import Comm
from thdattn.comm.peer import transport, windows
from thdattn.comm.slices import Slices
from thdattn.jit.structs import MAX_RANKS

STAGGER = 1 << 16  # bytes between what played ranks are read from, so that no cache has it yet


def as_rank_of(real: Any, size: int) -> Comm:
    """Make the comm of this rank among `size` ranks, which has the checks, deadline and maxima of the two real ranks.

    Args:
        real: comm of two ranks with peer memory, which stays open and is closed last.

    Raises:
        ValueError: `real` is another comm, or `size` is below 2 or too large for peer memory.
    """
    if real.size != 2 or not real.reads_peers or not 2 <= size <= MAX_RANKS:
        raise ValueError(
            f"found {real.size} real ranks {'with' if real.reads_peers else 'without'} peer memory to behave as ranks "
            f"of {size}, wanted 2 with it as ranks of 2 to {MAX_RANKS}; start the program with mpiexec -n 2"
        )
    memory = transport.PeerTransport(World(real._world, size), Window)
    real.before_close(memory.close)
    comm: Any = copy(real)
    comm.size, comm._transport = size, memory
    made: Comm = comm
    return made


class Exchanging(Comm):
    """Comm of one of two ranks among `size`, for methods that communicate by `exchange` alone.

    An exchange is one exchange of the two, in which each rank gets as many bytes, in as many slices, as it would get
    from all others.

    Args:
        ranks: the two ranks of `size` that the real ones play.
    """

    overlaps = True  # so that methods say what every rank sends

    def __init__(self, real: Comm, size: int, ranks: tuple[int, int]) -> None:
        super().__init__(ranks[real.rank], size)
        self.real, self.ranks = real, ranks
        self._wanted: dict[Any, list[int]] = {}
        self._spare: Any = np.empty((1, 0), np.uint8)
        self.name, self.devices, self.sum_dtypes = real.name, real.devices, real.sum_dtypes
        self.capturable, self._gpu = real.capturable, real._gpu

    def _watched(self, what: str, array: Any = None) -> AbstractContextManager[object]:
        return self.real._watched(what, array)

    def _exchange(self, sends: Slices, recvs: Slices, sizes: Any) -> Callable[[], None]:
        """Send own slices where they have the size that the other rank wants, and other bytes elsewhere."""
        if sizes is None:
            raise NotImplementedError("only where all ranks know the sizes can two of them play many")
        other = 1 - self.real.rank
        wanted = self._wanted_by_other([array.nbytes for array, _ in recvs], sizes)
        own = [array for array, _ in sends]
        given = [own[i] if i < len(own) and own[i].nbytes == num_bytes else self._anything(num_bytes)
                 for i, num_bytes in enumerate(wanted)]
        received = [int(np.asarray(sizes)[:, rank].sum()) for rank in self.ranks]
        return self.real.exchange([(array, other) for array in given], [(array, other) for array, _ in recvs],
                                  np.array([[0, received[1]], [received[0], 0]]))

    def _wanted_by_other(self, mine: list[int], sizes: Any) -> list[int]:
        """Return the bytes of each slice that the other rank receives; it is asked once, because a graph cannot ask."""
        key = np.asarray(sizes).tobytes(), tuple(mine)
        if key not in self._wanted:
            self._wanted[key] = self.real._gather_values(mine)[1 - self.real.rank]
        return self._wanted[key]

    def _anything(self, num_bytes: int) -> Any:
        if self._spare.nbytes < num_bytes:
            if self.real.name == "nccl":
                import cupy

                self._spare = cupy.zeros((1, num_bytes), np.uint8)
            else:
                self._spare = np.zeros((1, num_bytes), np.uint8)
        return self._spare[:, :num_bytes]

    def _barrier(self) -> None:
        self.real.barrier()

    def _gather_values(self, value: int) -> Sequence[int]:
        return self.real._gather_values(value)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("two ranks can play many in exchanges alone")

    _all_gather = _reduce_scatter = _all_reduce = _split = _refuse


class World:
    """Communicator of MPI as far as peer memory needs it."""

    def __init__(self, real: Any, size: int) -> None:
        self._real, self.rank, self.size = real, real.rank, size

    def allgather(self, value: Any) -> list[Any]:
        """Return this rank's value in its place, and the other rank's value in all others."""
        values = self._real.allgather(value)
        return [values[rank if rank < 2 else 1 - self.rank] for rank in range(self.size)]


class Window(windows.Window):
    """Window of two ranks that play the ranks from 2 on to each other.

    The rank that has the memory of a played rank sets its flags.
    """

    def __init__(self, rank: int, size: int, num_bytes: int) -> None:
        import cupy

        super().__init__(rank, size, num_bytes + size * STAGGER)
        self.array(0, (self.num_bytes,), np.uint8).fill(0)  # reads beyond the arrays are finite
        self.num_bytes = num_bytes
        cupy.cuda.get_current_stream().synchronize()

    def flags_there(self) -> list[int]:
        """Return addresses of flags; those of a played rank are the flags that the real rank has for its player."""
        return [there if rank < 2 else there + windows.flags_of(rank) - windows.flags_of(self._rank)
                for rank, there in enumerate(super().flags_there())]

    def address(self, rank: int, offset: int) -> int:
        """Return the address of a byte of a rank's part; of a played rank, it is a little further."""
        return super().address(rank, offset + (STAGGER * rank if rank > 1 else 0))
