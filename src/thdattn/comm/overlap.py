"""Keys and values gathered, and their gradients summed, one group of heads after another.

Here from all_gather and reduce_scatter, which any backend has; one whose transport goes on beside kernels has its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from thdattn.comm.slices import AllToAllSpec, Slices, copy


def no_wait() -> None:
    """What is there needs no waiting."""


class Pending:
    """Arrays that are being written to, beside the current stream: a call waits for that, and so does the end.

    They are held until then, so that no other array gets their memory sooner, whatever raises between start and call.

    Args:
        wait: has the current stream wait.
        arrays: those that are written to.
    """

    __slots__ = ("_arrays", "_wait")

    def __init__(self, wait: Callable[[], None], arrays: Any) -> None:
        self._wait: Callable[[], None] | None = wait
        self._arrays = arrays

    def __call__(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = self._arrays = None

    def __del__(self) -> None:
        if self._wait is not None:
            self()


class PeerExchange(NamedTuple):
    """Of all ranks, by one kernel.

    flags: a MEETING of jit/structs.py.
    to: of each array, where this rank's rows are put for each rank, 0: nowhere, as it reads what another one gets.
    marks: where the watchdog has numbers written, 0: nowhere, and which one.
    """

    flags: Any
    to: Sequence[Sequence[int]]
    marks: int = 0
    number: int = 0


class Arrival(NamedTuple):
    """Rows of all ranks that have been asked for.

    parts: of each array, those that make up its rows, one after another and equally many: one, in which the rows of
        this rank itself may be missing, or one a rank, which may lie in the memory of other GPUs.
    wait: to be called before they are read, and `done` after that; on a GPU it is the current stream that waits.
    meeting: for the kernel that puts the rows to their places, which it is to do next: it has this rank's rows where
        other ranks read them too, and waits for those of others by itself. None: they wait as above.
    """

    parts: Sequence[Sequence[Any]]
    wait: Callable[[], None] = no_wait
    done: Callable[[], None] = no_wait
    peer_exchange: PeerExchange | None = None


class OverlappedCollectives(ABC):
    """What a comm does for attention over the keys of all ranks."""

    name: str
    rank: int
    size: int

    @abstractmethod
    def all_gather(self, send: Any, recv: Any) -> None: ...

    @abstractmethod
    def reduce_scatter(self, send: Any, recv: Any) -> None: ...

    @abstractmethod
    def exchange(self, sends: Slices, recvs: Slices, sizes: Any = None) -> Callable[[], None]: ...

    def all_to_all(
        self, spec: AllToAllSpec, sends: Sequence[Any], recvs: Sequence[Any], at_once: bool = False
    ) -> Callable[[], None]:
        """Start to give each rank its slices of some arrays, and to put those of all ranks into others.

        Args:
            sends: the arrays that `swap` is about, C-contiguous.
            recvs: those that slices are put into. Overwritten; they share no memory with sends.
            at_once: what comes is asked for next, and hides behind nothing; the same on all ranks.

        Returns:
            What waits for it, as that of exchange.
        """
        for out, send, place, recv in zip(spec.outs, sends, spec.ins, recvs, strict=True):
            source = out.of(send, self.rank)
            if source.size:
                copy(place.of(recv, self.rank), source)
        others = [rank for rank in range(self.size) if rank != self.rank]
        going, coming = ([(cut.of(x, rank), rank) for rank in others for cut, x in zip(cuts, arrays, strict=True)
                          if cut.begins[rank] < cut.ends[rank]]
                         for cuts, arrays in ((spec.outs, sends), (spec.ins, recvs)))
        return self.exchange(going, coming, spec.sizes)

    def gather_heads(
        self, sends: Sequence[Any], recvs: Sequence[Sequence[Any]], at_once: bool = False
    ) -> list[Arrival]:
        """Start to put all ranks' rows into arrays of some of the heads each, one group of heads after another.

        So a kernel can work at the heads that have arrived, while others are on their way. `sends` are free again when
        the call returns, as in all_gather.

        Args:
            sends: arrays (rows, heads, width), such as k and v.
            recvs: of each group, as many arrays (size * rows, heads of the group, width). Groups have equally many
                heads, which follow each other. Overwritten, or not asked for if the rows can be read where they are.
            at_once: the groups are asked for next, one after another, with no other call between; else at any time.

        Returns:
            Where the rows of each group are, and how to wait for them.
        """
        first = [0] * len(sends)
        for parts in recvs:
            for i, (send, part) in enumerate(zip(sends, parts, strict=True)):
                heads = send[:, first[i] : first[i] + part.shape[1]]
                self.all_gather(heads if heads.flags.c_contiguous else heads.copy(), part)
                first[i] += part.shape[1]
        return [Arrival([[part] for part in parts]) for parts in recvs]

    def sum_rows(self, shares: Sequence[Any], results: Sequence[Any]) -> None:
        """Add all ranks' arrays and keep this rank's share of the rows, rounded once.

        Args:
            shares: arrays (size * rows, heads, width).
            results: as many arrays (rows, heads, width) of a dtype of their own, which may be some of the heads of
                larger arrays; overwritten.
        """
        for share, result in zip(shares, results, strict=True):
            total = np.empty_like(share[: len(result)])  # of CuPy arrays this is cupy.empty_like
            self.reduce_scatter(share, total)
            result[...] = total

    def owner_partials(
        self, shapes: Sequence[tuple[int, ...]], largest: Sequence[tuple[int, ...]], at_once: bool
    ) -> Any:
        """Where a kernel puts this rank's shares of what every rank owns, to be added up by sum_at_home, the next call.

        So no pass puts them in the order of ranks: instead of sum_rows, where a comm overlaps.

        Args:
            shapes: of two arrays, (rows, heads, width), what each rank owns.
            largest: the same of those of all groups that have most heads, so that there is room once for all.
            at_once: as for sum_at_home. They travel while the kernel is at work then.

        Returns:
            A SHARES of jit/structs.py: of each array and rank, where this rank's share of its rows begins, in float32.
        """
        raise NotImplementedError(f"a comm of backend {self.name!r} does not see what other ranks have")

    def drop_partials(self) -> None:
        """Forgets the last `homes`, which are not added up because of an error that all ranks have."""
        raise NotImplementedError(f"a comm of backend {self.name!r} does not see what other ranks have")

    def reduce_partials(self, rows: Any, results: Sequence[Any], at_once: bool) -> Callable[[], None]:
        """Start to add all ranks' shares of what this one owns, rounded once.

        Args:
            rows: (rows,) int32, the number of each row; -1: nobody has a share, and the result is 0.
            results: two arrays of the shapes that `homes` was told, which may be some of the heads of larger ones.
            at_once: the results are asked for next; else kernels follow, which this goes on beside.

        Returns:
            What waits for the results; on a GPU it is the current stream that does.
        """
        raise NotImplementedError(f"a comm of backend {self.name!r} does not see what other ranks have")

    def gather_bytes(self, sends: Sequence[int], num_groups: int) -> dict[str, int]:
        """Bytes of what gather_heads makes for arrays of so many bytes, beside what it is given; by name."""
        return {"copies to send": max(sends) // num_groups} if num_groups > 1 else {}

    def sum_bytes(self, groups: Sequence[Sequence[int]]) -> dict[str, int]:
        """Bytes of what is made to add up groups' shares of all ranks' rows, of which arrays have so many; by name."""
        most = max(map(sum, groups))
        return {"partial sums": most, "sums": most // self.size}

    def exchange_bytes(self, sizes: Any, strided: int) -> dict[str, int]:
        """Bytes of what exchange makes, given these sizes; by name.

        Args:
            sizes: as for exchange.
            strided: bytes of the slices, sent and received, whose rows do not follow each other.
        """
        return {"copies of slices": strided} if strided else {}

    def held_bytes(self) -> dict[str, int]:
        """Bytes of what the other three name, that is there already, for all that needs no more; by name."""
        return {}
