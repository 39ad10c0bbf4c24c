"""Two ranks that behave as two of a larger job: for every rank that misses, each has what the other one has.

Rows, keys and traffic are those of a rank of that job; results are meaningless, and finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from thdattn.comm import Comm
from thdattn.comm.slices import Slices
from thdattn.jit.structs import MAX_RANKS


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
    if not real.overlaps or size > MAX_RANKS:
        return ByCollectives(real, size)
    import rank_of_memory

    return rank_of_memory.stand_in(real, size)


def exchanging(real: Comm, size: int, ranks: tuple[int, int]) -> Comm:
    """The comm of one of two ranks among `size`, for what travels by `exchange` alone: as the real one brings it."""
    comm = ByCollectives(real, size, ranks)
    comm.overlaps = real.overlaps
    return comm


class ByCollectives(Comm):
    """A collective over `size` ranks is size - 1 collectives of the two, in one launch of NCCL.

    Each of them brings one foreign share and takes one away. An exchange is one of the two, in which each gets as many
    bytes, in as many slices, as its rank would from all others.

    Args:
        ranks: which two they are.
    """

    def __init__(self, real: Comm, size: int, ranks: tuple[int, int] = (0, 1)) -> None:
        super().__init__(ranks[real.rank], size)
        self.real, self.ranks = real, ranks
        self._wanted: dict[Any, list[int]] = {}
        self._spare: Any = np.empty((1, 0), np.uint8)
        self.name, self.devices, self.sum_dtypes = real.name, real.devices, real.sum_dtypes
        self.capturable, self._gpu = real.capturable, real._gpu

    def watched(self, what: str, array: Any = None) -> AbstractContextManager[object]:
        return self.real.watched(what, array)

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

    def _exchange(self, sends: Slices, recvs: Slices, sizes: Any) -> Callable[[], None]:
        """What is sent is this rank's own where a slice is as large as the other rank wants it, else of no meaning."""
        if sizes is None:
            raise NotImplementedError("only where all ranks know the sizes can two of them play many")
        other = 1 - self.real.rank
        wanted = self._wanted_by_other([array.nbytes for array, _ in recvs], sizes)
        own = [array for array, _ in sends]
        given = [own[i] if i < len(own) and own[i].nbytes == num_bytes else self._anything(num_bytes)
                 for i, num_bytes in enumerate(wanted)]  # fmt: skip
        received = [int(np.asarray(sizes)[:, rank].sum()) for rank in self.ranks]
        return self.real.exchange([(array, other) for array in given], [(array, other) for array, _ in recvs],
                                  np.array([[0, received[1]], [received[0], 0]]))

    def _wanted_by_other(self, mine: list[int], sizes: Any) -> list[int]:
        """Bytes of what the other rank receives, slice by slice; it is asked once, as a graph cannot ask."""
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
