"""Stand-in for mpi4py's communicator: ranks are threads of run_local."""

from __future__ import annotations

from typing import Any

from thdattn.comm import Comm


class World:
    """Communicator of the ranks of a comm, with the calls of the transports."""

    def __init__(self, comm: Comm) -> None:
        self.rank, self.size, self._comm = comm.rank, comm.size, comm

    def allgather(self, value: Any) -> list[Any]:
        return list(self._comm._gather_values(value))

    def bcast(self, value: Any, root: int) -> Any:
        return self.allgather(value)[root]

    def Barrier(self) -> None:
        self.allgather(None)

    def Split(self, color: int, key: int) -> World:
        return World(self._comm.split(color, key))
