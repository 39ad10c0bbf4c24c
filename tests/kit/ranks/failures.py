"""Rank 1 fails in one of the ways in which ranks fail, while the others wait for it: a program under mpiexec.

mpiexec -n 2 python -m mpi4py failures.py exception-before-init
"""

from __future__ import annotations

import os
import sys
import threading
import time

import thdattn.comm


def main(scenario: str) -> None:
    rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])  # before MPI knows it
    if scenario == "exception-before-init" and rank == 1:
        raise ValueError("rank 1 had bad luck")
    comm = thdattn.comm.init("mpi")
    print(f"rank {rank} begins", flush=True)
    if rank == 1:
        fail(scenario)
    comm.barrier()
    print(f"rank {rank} done", flush=True)


def fail(scenario: str) -> None:
    if scenario == "exception":
        raise ValueError("rank 1 had bad luck")
    if scenario == "exit":
        sys.exit(3)
    if scenario == "exception-in-a-thread":
        thread = threading.Thread(target=fail, args=("exception",))
        thread.start()
        thread.join()
    if scenario == "computes":
        while True:
            time.sleep(0.05)
    if scenario == "waits-in-vain":  # each of two ranks waits for the other inside MPI, where Python handles no signal
        from mpi4py import MPI

        MPI.COMM_WORLD.recv(source=0)


if __name__ == "__main__":
    main(sys.argv[1])
