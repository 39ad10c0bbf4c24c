"""A single rank: collectives are copies, as there are no other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thdattn.arguments import Array
from thdattn.comm.base import Comm
from thdattn.comm.slices import Slices


class SingleComm(Comm):
    """One rank alone: collectives are copies."""

    name = "single"
    devices = frozenset({"cpu", "cuda"})
    sum_dtypes = Comm.sum_dtypes | {"float16", "bfloat16"}
    capturable = True

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _all_gather(self, send: Array, recv: Array) -> None:
        recv[...] = send

    def _reduce_scatter(self, send: Array, recv: Array) -> None:
        recv[...] = send

    def _all_reduce(self, array: Array, op: str) -> None:
        pass

    def _send_receive(self, sends: Slices, recvs: Slices) -> None:
        pass

    def _barrier(self) -> None:
        pass

    def _gather_values(self, value: Any) -> Sequence[Any]:
        return [value]

    def _split(self, color: int, key: int) -> Comm:
        return SingleComm()
