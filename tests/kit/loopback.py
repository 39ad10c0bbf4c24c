"""Peer memory on one GPU: a rank of two whose other rank is itself, with the same rows, and what that must give."""

from __future__ import annotations

from typing import Any

import numpy as np

import thdattn
from thdattn.comm.peer import transport, windows

SIZE = 2


class World:
    """Communicator of MPI, as far as windows use it."""

    rank, size = 0, SIZE

    def allgather(self, value: Any) -> list[Any]:
        return [value] * SIZE


class Window(windows.Window):
    """Window of a rank whose other rank sees the same memory, and does the same at the same time.

    What it has of this one's rows is what this one has; what it gets of its own nobody reads.
    """

    def flags_there(self) -> list[int]:
        """Return flags of this rank that the other one would set at the same time."""
        return [at + windows.flags_of(rank) for rank, at in enumerate(self._at)]

    def owner_partials(self, offsets: tuple[int, ...], sizes: tuple[int, ...], there: bool) -> tuple[Any, Any]:
        return super().owner_partials(offsets, sizes, True)

    def partial_address(self, of: int, number: int, offset: int, size: int) -> int:
        return super().partial_address(of, of, offset, size)


class Mirror(thdattn.comm.Comm):
    """Rank 0 of two that hold the same: collectives by copies on the current stream."""

    name, devices, capturable = "mirror", frozenset({"cuda"}), True

    def __init__(self) -> None:
        super().__init__(0, SIZE)

    def _all_gather(self, send: Any, recv: Any) -> None:
        for part in np.split(recv, SIZE):
            part[...] = send

    def _reduce_scatter(self, send: Any, recv: Any) -> None:
        recv[...] = SIZE * send[: len(recv)]

    def _all_reduce(self, array: Any, op: str) -> None:
        if op == "sum":
            array *= SIZE

    def _send_receive(self, sends: Any, recvs: Any) -> None:
        for (part, _), (room, _) in zip(sends, recvs, strict=True):
            room[...] = part

    def _barrier(self) -> None:
        pass

    def _split(self, color: int, key: int) -> thdattn.comm.Comm:
        raise NotImplementedError

    def _gather_values(self, value: Any) -> list[Any]:
        return [value] * SIZE


class Loopback(Mirror):
    """Mirror by peer memory."""

    name, overlaps, reads_peers = "loopback", True, True

    def __init__(self, monkeypatch: Any) -> None:
        from cupy.cuda import runtime

        super().__init__()
        opened: dict[bytes, int] = {}
        handle_of = runtime.ipcGetMemHandle

        def get(pointer: int) -> bytes:
            handle: bytes = handle_of(pointer)
            opened[handle] = pointer
            return handle

        monkeypatch.setattr(runtime, "ipcGetMemHandle", get)
        monkeypatch.setattr(runtime, "ipcOpenMemHandle", opened.__getitem__)
        monkeypatch.setattr(runtime, "ipcCloseMemHandle", lambda pointer: None)
        self.peer = transport.PeerTransport(World(), Window)
        self.owner_partials = self.peer.owner_partials  # type: ignore[method-assign]
        self.reduce_partials = self.peer.reduce_partials  # type: ignore[method-assign]
        self._exchange = self.peer.exchange  # type: ignore[method-assign]
        self.by_kernel = 0
        self.gather_heads = self.peer.gather_heads  # type: ignore[method-assign]
        self.drop_partials = self.peer.drop_partials  # type: ignore[method-assign]

    def all_to_all(self, swap: Any, sends: Any, recvs: Any, at_once: bool = False) -> Any:
        """Exchange as NcclComm does; count exchanges by the kernel."""
        if not self.peer.exchanges_by_kernel(swap, at_once):
            return super().all_to_all(swap, sends, recvs, at_once)
        self.by_kernel += 1
        return self.peer.all_to_all(swap, sends, recvs)
