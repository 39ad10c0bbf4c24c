"""Two ranks that behave as the first two of a larger job: for every rank that misses, each has what the other one has.

Rows, keys and traffic are those of a rank of that job; results are meaningless, and finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from thdattn.comm import Comm
from thdattn.structs import MAX_RANKS


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
