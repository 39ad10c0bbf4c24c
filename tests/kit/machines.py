"""Several machines on one, for programs of ranks: RANKS_PER_MACHINE in the environment says how many each has.

NCCL takes them for machines, too, and connects them by sockets.
"""

from __future__ import annotations

import os


def play(rank: int) -> None:
    """Give this rank's process the name of its machine, before any rank asks for it."""
    if each := os.environ.get("RANKS_PER_MACHINE"):
        host = f"host{rank // int(each)}"
        os.environ |= {"THDATTN_HOST": host, "NCCL_HOSTID": host, "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}


def play_by_launcher() -> None:
    """Do so for the rank that mpiexec has given to this process."""
    rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
    if rank is not None:
        play(int(rank))
