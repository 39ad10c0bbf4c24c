"""Comms for measurements: a rank of a larger job than there are GPUs, and one whose communication costs nothing.

Results are meaningless with either, and finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from thdattn.comm import Comm


class StandIn(Comm):
    """Takes the arrays of another comm and has its barrier and checks; collectives of rows are the subclass's.

    Args:
        real: the comm of the ranks that there are; it stays open.
        size: ranks that there seem to be; this one has its real number.
    """

    def __init__(self, real: Comm, size: int) -> None:
        super().__init__(real.rank, size)
        self.real = real
        self.name, self.devices, self.sum_dtypes = real.name, real.devices, real.sum_dtypes
        self.capturable, self._gpu = real.capturable, real._gpu

    def _all_reduce(self, array: Any, op: str) -> None:
        self.real.all_reduce(array, op)

    def _barrier(self) -> None:
        self.real.barrier()

    def _split(self, color: int, key: int) -> Comm:
        raise NotImplementedError("ranks that there only seem to be are not divided into groups")

    def _gather_values(self, value: int) -> Sequence[int]:
        return self.real._gather_values(value)


class AsRankOf(StandIn):
    """Two ranks that send and receive what the first two of `size` would: the other one stands for all that miss.

    A collective over `size` ranks is size - 1 collectives of the two, each of which brings one foreign share and takes
    one away, in one launch of NCCL.

    Raises:
        ValueError: other than two real ranks, or fewer to stand for.
    """

    def __init__(self, real: Comm, size: int) -> None:
        if real.size != 2 or size < 2:
            raise ValueError(
                f"found {real.size} real ranks to behave as ranks of {size}, wanted 2 as ranks of 2 or more; start "
                f"the program with mpiexec -n 2"
            )
        super().__init__(real, size)

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


class Silent(StandIn):
    """The rank that it was, with nobody to talk to: buffers stay as they are."""

    def __init__(self, real: Comm) -> None:
        super().__init__(real, real.size)

    def _all_gather(self, send: Any, recv: Any) -> None:
        pass

    def _reduce_scatter(self, send: Any, recv: Any) -> None:
        pass

    def _all_reduce(self, array: Any, op: str) -> None:
        pass
