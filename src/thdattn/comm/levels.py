"""Two levels of groups as one comm, such as the GPUs of a machine and the machines."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from thdattn.arguments import Array, found
from thdattn.comm.base import Comm
from thdattn.comm.slices import Slices


class Levels(Comm):
    """All ranks of a grid, by collectives of its rows and columns.

    Its rank is outer.rank * inner.size + inner.rank. Sums are made, and rounded, level by level. Closing it leaves
    inner and outer to the caller. Actions of before_close run before any of the three is closed. received_bytes counts
    what each of them receives.

    Args:
        inner: this rank's group of neighbours, as of comm.split(comm.rank // size_of_a_group).
        outer: the ranks with the same number in all those groups, as of comm.split(comm.rank % size_of_a_group).

    Attributes:
        inner, outer: the two.

    Raises:
        TypeError: one of them is no comm.
        ValueError: on every rank: they form no grid; or they take different kinds of arrays.
    """

    name = "levels"

    def __init__(self, inner: Comm, outer: Comm) -> None:
        for name, part in (("inner", inner), ("outer", outer)):
            if not isinstance(part, Comm):
                raise TypeError(f"{name} is {found(part)}; wanted a comm; pass one of comm.split")
        _check_grid(inner, outer)
        super().__init__(outer.rank * inner.size + inner.rank, inner.size * outer.size)
        self.inner, self.outer = inner, outer
        self.devices = inner.devices & outer.devices
        if not self.devices:
            raise ValueError(
                f"inner, of backend {inner.name!r}, takes other arrays than outer, of backend {outer.name!r}; split "
                f"both from one comm"
            )
        self.sum_dtypes = inner.sum_dtypes & outer.sum_dtypes
        self.capturable = inner.capturable and outer.capturable
        self.checks = inner.checks or outer.checks
        for part in (inner, outer):
            part.before_close(self._act_before_close)

    @contextmanager
    def _watched(self, what: str, array: Array = None) -> Iterator[None]:
        with self.inner._watched(what, array), self.outer._watched(what, array):
            yield

    def exchange(self, sends: Slices, recvs: Slices, sizes: Any = None) -> Callable[[], None]:
        raise ValueError(
            f"exchange was called on {self!r}, wanted a comm of one level, as slices for a rank of another row and "
            f"column have no way of their own; call it on inner and on outer, or on the comm that they are groups of"
        )

    def held_bytes(self) -> dict[str, int]:
        held = [part.held_bytes() for part in (self.inner, self.outer)]
        return {name: sum(each.get(name, 0) for each in held) for name in chain(*held)}

    def _check_open(self) -> None:
        super()._check_open()
        for part in (self.inner, self.outer):
            part._check_open()

    def _all_gather(self, send: Array, recv: Array) -> None:
        rows = np.empty_like(send, shape=(self.inner.size * len(send), *send.shape[1:]))
        self.inner.all_gather(send, rows)
        self.outer.all_gather(rows, recv)

    def _reduce_scatter(self, send: Array, recv: Array) -> None:
        rows = np.empty_like(send, shape=(self.inner.size * len(recv), *recv.shape[1:]))
        self.outer.reduce_scatter(send, rows)
        self.inner.reduce_scatter(rows, recv)

    def _all_reduce(self, array: Array, op: str) -> None:
        self.inner.all_reduce(array, op)
        self.outer.all_reduce(array, op)

    def _barrier(self) -> None:
        self.inner.barrier()
        self.outer.barrier()

    def _gather_values(self, value: Any) -> Sequence[Any]:
        return [one for row in self.outer._gather_values(self.inner._gather_values(value)) for one in row]

    def _split(self, color: int, key: int) -> Comm:
        raise ValueError(
            f"split was called on {self!r}, wanted a comm of one level; split inner, outer, or the comm that they are "
            f"groups of"
        )

    def _close(self) -> None:
        for part in (self.inner, self.outer):
            part.forget(self._act_before_close)


def _check_grid(inner: Comm, outer: Comm) -> None:
    """Raise on every rank that is connected by groups to one where row by row and column by column differ.

    Where they do not differ, the members of a rank's row and column have the same grid, so none of them raises.
    """
    me = uuid.uuid4().hex
    rows = outer._gather_values(list(inner._gather_values(me)))
    columns = inner._gather_values(list(outer._gather_values(me)))
    if list(rows) != [list(row) for row in zip_longest(*columns)]:
        raise ValueError(
            f"inner and outer form no grid: this is rank {inner.rank} of {inner.size} in inner and {outer.rank} of "
            f"{outer.size} in outer; wanted all ranks of an inner group to have one rank in their outer groups, and "
            f"those of an outer group one in their inner groups; split as comm.split(comm.rank // n) and "
            f"comm.split(comm.rank % n) do, for an n that divides comm.size"
        )
