"""Rank 1 stops or sleeps while the others wait for it in a collective of torch.distributed.

torchrun --standalone --nproc-per-node 2 torch_faults.py stop gloo 6
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import numpy as np
import torch

import thdattn.comm


def main(kind: str, backend: str, timeout: str) -> None:
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.distributed.init_process_group(backend, timeout=timedelta(seconds=float(timeout)))
    comm = thdattn.comm.from_torch()
    if backend == "nccl":
        import cupy as xp
    else:
        xp = np
    array = xp.ones(3, np.float32)
    for _ in range(3):
        comm.all_reduce(array, "sum")
    array.sum().item()
    if comm.rank == 1:
        os.write(2, f"rank 1 is process {os.getpid()} and fails\n".encode())
        if kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    comm.all_reduce(array, "sum")
    array.sum().item()


if __name__ == "__main__":
    main(*sys.argv[1:])
