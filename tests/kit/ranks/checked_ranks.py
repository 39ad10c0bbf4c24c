"""Ranks with check=True that differ in one thing after another, and go on; run as checked_ranks.py mpi|torch."""

from __future__ import annotations

import sys

import numpy as np
from ranks.comm_contract import join

import thdattn


def main(backend: str) -> None:
    """Ask for checks on all ranks, on MPI on the last one alone, which decides for all."""
    if backend == "mpi":
        from mpi4py import MPI

        comm = join("mpi", 2, check=MPI.COMM_WORLD.rank == 1, timeout=20)
    else:
        comm = join("torch-gloo", 2, check=True)
    assert comm.checks
    attention = thdattn.CPAttention(comm, 2, 16, dtype="float32", engine="reference")
    plans = [attention.plan(thdattn.PackedBatch.from_lengths(lengths, 4)) for lengths in ([48, 16], [16, 48])]
    x = np.ones((plans[0].local_rows, 2, 16), np.float32)
    calls = [
        lambda: attention.forward(x, x, x, plans[comm.rank]),
        lambda: comm.all_reduce(np.zeros(2 + comm.rank), "sum"),
        lambda: comm.barrier() if comm.rank else comm.all_reduce(np.zeros(2), "sum"),
    ]
    for call in calls:
        try:
            call()
        except ValueError as error:
            print(f"rank {comm.rank}: {error}", flush=True)
        else:
            raise AssertionError("not noticed")
    attention.forward(x, x, x, plans[0])
    comm.close()
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
