"""Ranks with check=True that differ in one thing after another, and go on; run as checked_ranks.py mpi|torch."""

from __future__ import annotations

import atexit
import sys

import numpy as np

import thdattn


def joined(backend: str) -> thdattn.comm.Comm:
    """On MPI the last rank alone asks for checks, which decides for all."""
    if backend == "mpi":
        rank = int(__import__("mpi4py.MPI").MPI.COMM_WORLD.rank)
        return thdattn.comm.init("mpi", check=rank == 1, timeout=20)
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    atexit.register(torch.distributed.destroy_process_group)  # gloo's threads must not outlive the interpreter
    return thdattn.comm.from_torch(check=True)


def main(backend: str) -> None:
    comm = joined(backend)
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
