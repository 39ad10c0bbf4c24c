"""Attention whose streams are late at random, on each rank in its own way, as a program under mpiexec.

mpiexec -n 2 python -m mpi4py delay_ranks.py peer 2
"""

from __future__ import annotations

import math
import sys

import cupy
import delays
import machines

import thdattn
from thdattn.comm.nccl import transport as nccl_transport
from thdattn.methods import select


def main(transport: str, size: str) -> None:
    machines.play_by_launcher()
    nccl_transport.WORTH_OVERLAPPING = 0
    comm = thdattn.comm.init("nccl", transport=transport)
    assert comm.size == int(size) and comm.overlaps and comm.reads_peers == (transport == "peer")
    with cupy.cuda.Stream(non_blocking=True):
        select.WORTH_GROUPS = select.LEAST_BYTES = 0  # by default, groups of 1, 1 and 2 kv heads, or of 1 each
        select.MOST_OPERATIONS = math.inf
        for head_groups in (1, 2, 4, None):
            for keep_keys in (False, True):
                delays.check(cupy, comm, head_groups, keep_keys)
        for cp_comm_type, sharding, head_groups in delays.METHODS:
            for keep_keys in (False, True):
                delays.check(cupy, comm, head_groups, keep_keys, (cp_comm_type, sharding))
    cupy.cuda.runtime.deviceSynchronize()
    comm.close()
    print(f"rank {comm.rank} of {comm.size}: delays on {transport} done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
