"""Collectives that overlap computation: keys are gathered, and gradients summed, one group of heads after another.

Every comm has them, one collective after another. A transport (overlap/transport.py) has them overlap kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from thdattn.arguments import Array
from thdattn.comm.slices import AllToAllSpec, Slices, slices_to_exchange


def no_wait() -> None:
    """Return at once: the arrays are complete already."""


class Pending:
    """Arrays that are still written to beside the current stream; calling or dropping it waits until they are complete.

    It holds the arrays until then. So no other array gets their memory, even if an error comes before the call.
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
    """Arguments of the kernel that exchanges rows with all peers.

    flags: a PEER_EXCHANGE of jit/structs.py.
    to: for each array and rank, the address that this rank's rows are written to. 0: none, the rank reads another copy.
    marks: address at which the kernel writes a number for the watchdog; 0: nowhere.
    """

    flags: Any
    to: Sequence[Sequence[int]]
    marks: int = 0
    number: int = 0


class Arrival(NamedTuple):
    """Rows of all ranks that a gather brings.

    parts: for each array, the equally long parts that make up its rows. A single part may lack this rank's own rows. Or
        each rank has a part, which may be in the memory of another GPU.
    wait: called before the rows are read; on a GPU the current stream waits.
    done: called after the rows were read.
    peer_exchange: arguments of the next kernel, which moves the rows to their places. That kernel also sends this
        rank's rows and waits for those of the other ranks. None: `wait` alone waits for them.
    """

    parts: Sequence[Sequence[Array]]
    wait: Callable[[], None] = no_wait
    done: Callable[[], None] = no_wait
    peer_exchange: PeerExchange | None = None


class OverlappedCollectives(ABC):
    """Collectives of attention over the keys of all ranks, which may overlap its kernels."""

    rank: int
    size: int

    @abstractmethod
    def gather_heads(
        self, sends: Sequence[Array], recvs: Sequence[Sequence[Array]], at_once: bool = False
    ) -> list[Arrival]:
        """Start to gather all ranks' rows, one group of heads after another.

        A kernel can then compute on the heads that have arrived, while the exchange of others goes on. `sends` are free
        again when the call returns, as in all_gather.

        Args:
            sends: arrays (rows, heads, width), such as k and v.
            recvs: for each group, as many arrays (size * rows, heads of the group, width). Groups follow each other and
                have equally many heads. Overwritten, or unused where the rows can be read in place.
            at_once: the groups are needed next, one after another, with no other call between; else at any time.

        Returns:
            For each group, the rows and how to wait for them.
        """

    def owner_partials(
        self, shapes: Sequence[tuple[int, ...]], largest: Sequence[tuple[int, ...]], at_once: bool
    ) -> Any:
        """Return where a kernel writes this rank's partial sums of the rows that each rank owns.

        reduce_partials is the next call and adds them up. So no pass has to sort partial sums by rank, as sum_rows
        needs it. Only comms with `overlaps` have both.

        Args:
            shapes: for two arrays, (rows, heads, width) of the rows that each rank owns.
            largest: the same for the group with most heads, so that the memory is allocated once for all groups.
            at_once: as for reduce_partials. Partial sums then go to their owner ranks while the kernel runs.

        Returns:
            A PARTIALS of jit/structs.py: for each array and rank, the address of this rank's float32 partial sums.
            Without reads_peers, the first address is that of the rows of all ranks, in rank order.
        """
        raise NotImplementedError(f"{self!r} does not see what other ranks have")

    def drop_partials(self) -> None:
        """Forget the last owner_partials: all ranks have the same error and add nothing up."""
        raise NotImplementedError(f"{self!r} does not see what other ranks have")

    def reduce_partials(
        self, rows: Array, results: Sequence[Array], at_once: bool, in_rank_order: bool = True
    ) -> Callable[[], None]:
        """Start to add all ranks' partial sums of the rows that this rank owns, rounded once.

        Args:
            rows: (rows,) int32, the number of each row among the partial sums; -1: no rank has one, and the result is
                0.
            results: two arrays of the shapes that owner_partials got; they may be some of the heads of larger arrays.
            at_once: the results are needed next; else the kernels that follow overlap the sum.
            in_rank_order: add in the order of ranks, so that sums have the same bits on every transport.

        Returns:
            A function that waits for the results; on a GPU the current stream waits.
        """
        raise NotImplementedError(f"{self!r} does not see what other ranks have")

    @abstractmethod
    def gather_bytes(self, sends: Sequence[int], num_groups: int) -> dict[str, int]:
        """Return the bytes that gather_heads allocates beside its arguments, by name.

        Args:
            sends: bytes of each array; num_groups: groups of heads.
        """

    @abstractmethod
    def sum_bytes(self, groups: Sequence[Sequence[int]], in_rank_order: bool) -> dict[str, int]:
        """Return the bytes that adding up partial sums allocates, by name.

        Args:
            groups: for each group of heads, the bytes of all ranks' rows of each array.
        """

    @abstractmethod
    def exchange_bytes(self, sizes: Any, strided: int) -> dict[str, int]:
        """Return the bytes that exchange allocates, by name.

        Args:
            strided: bytes of the slices, sent and received, whose rows do not follow each other.
        """

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes that are allocated already, under the names of the three functions above."""
        return {}


class CollectivesInTurn(OverlappedCollectives):
    """Collectives of attention that overlap nothing, by collectives that every backend has."""

    @abstractmethod
    def all_gather(self, send: Any, recv: Any) -> None: ...

    @abstractmethod
    def reduce_scatter(self, send: Any, recv: Any) -> None: ...

    @abstractmethod
    def exchange(self, sends: Slices, recvs: Slices, sizes: Any = None) -> Callable[[], None]: ...

    def all_to_all(
        self, spec: AllToAllSpec, sends: Sequence[Array], recvs: Sequence[Array], at_once: bool = False
    ) -> Callable[[], None]:
        """Start to send every rank its slices of some arrays, and to write the slices of all ranks into other arrays.

        Args:
            spec: which slices, of which arrays, belong to which rank.
            sends: the arrays that `spec.outs` slices, C-contiguous.
            recvs: the arrays that `spec.ins` slices. Overwritten; they share no memory with sends.
            at_once: the results are needed next, so no kernel overlaps the exchange; the same on all ranks.

        Returns:
            A function that waits for the results, as for exchange.
        """
        return self.exchange(*slices_to_exchange(self.rank, self.size, spec, sends, recvs), spec.sizes)

    def gather_heads(
        self, sends: Sequence[Array], recvs: Sequence[Sequence[Array]], at_once: bool = False
    ) -> list[Arrival]:
        first = [0] * len(sends)
        for parts in recvs:
            for i, (send, part) in enumerate(zip(sends, parts, strict=True)):
                heads = send[:, first[i] : first[i] + part.shape[1]]
                self.all_gather(heads if heads.flags.c_contiguous else heads.copy(), part)
                first[i] += part.shape[1]
        return [Arrival([[part] for part in parts]) for parts in recvs]

    def sum_rows(self, partials: Sequence[Array], results: Sequence[Array]) -> None:
        """Add all ranks' arrays and keep this rank's rows of the sum, rounded once.

        Args:
            partials: arrays (size * rows, heads, width), this rank's partial sums.
            results: as many arrays (rows, heads, width), of any dtype; they may be some of the heads of larger arrays.
                Overwritten.
        """
        for partial, result in zip(partials, results, strict=True):
            total = np.empty_like(partial[: len(result)])  # for CuPy arrays NumPy calls cupy.empty_like
            self.reduce_scatter(partial, total)
            result[...] = total

    def gather_bytes(self, sends: Sequence[int], num_groups: int) -> dict[str, int]:
        return {"copies to send": max(sends) // num_groups} if num_groups > 1 else {}

    def sum_bytes(self, groups: Sequence[Sequence[int]], in_rank_order: bool) -> dict[str, int]:
        most = max(map(sum, groups))
        return {"partial sums": most, "sums": most // self.size}

    def exchange_bytes(self, sizes: Any, strided: int) -> dict[str, int]:
        return {"copies of slices": strided} if strided else {}
