"""The contract of thdattn.comm, checked by every rank of any backend; as a program, scenarios under mpiexec.

mpiexec -n 4 python -m mpi4py comm_contract.py contract mpi 4
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import time
from typing import Any

import ml_dtypes
import numpy as np
from ranks.comm_exchange import check_exchange, check_swap, raises

import thdattn.comm
from thdattn.fuzz.runs import to_host

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
MOVED = [
    BFLOAT16,
    *map(np.dtype, ("float16", "float32", "float64", "int8", "int32", "uint64", "bool", "complex128")),
]
SUMMED = [BFLOAT16, *map(np.dtype, ("float16", "float32", "float64", "int32", "int64", "uint32"))]


def check_contract(comm: thdattn.comm.Comm, xp: Any) -> None:
    """Check every promise of Comm that a correct program relies on, and close the comm; xp is numpy or cupy."""
    check_exchange(comm, xp)
    check_swap(comm, xp)
    check_all_but_exchange(comm, xp)


def check_all_but_exchange(comm: thdattn.comm.Comm, xp: Any) -> None:
    assert 0 <= comm.rank < comm.size
    for dtype in MOVED:
        check_all_gather(comm, xp, dtype)
    for dtype in SUMMED:
        if dtype.name in comm.sum_dtypes:
            check_sums(comm, xp, dtype)
        else:
            assert raises(TypeError, comm.all_reduce, xp.zeros(2, dtype), "sum")
    check_arrays_of_size_0(comm, xp)
    check_many_collectives_in_a_row(comm, xp)
    check_bad_arguments_are_named(comm, xp)
    comm.barrier()
    comm.agree("plan hash", 2**70)
    comm.agree("flag", np.bool_(True))
    assert "rank 0 has 1" in raises(ValueError, comm.agree, "flag", comm.rank == 0) or comm.size == 1
    assert "plan hash" in raises(ValueError, comm.agree, "plan hash", int(comm.rank == 0)) or comm.size == 1
    comm.close()
    comm.close()
    assert "closed" in raises(RuntimeError, comm.barrier)
    assert "closed" in raises(RuntimeError, comm.all_reduce, xp.zeros(2, np.float32), "sum")


def check_all_gather(comm: thdattn.comm.Comm, xp: Any, dtype: np.dtype) -> None:
    parts = [(np.arange(12).reshape(3, 2, 2) + 7 * rank).astype(dtype) for rank in range(comm.size)]
    recv, before = poisoned(xp, (3 * comm.size, 2, 2), dtype), comm.received_bytes
    comm.all_gather(xp.asarray(parts[comm.rank]), recv)
    assert comm.received_bytes - before == recv.nbytes - parts[0].nbytes
    assert to_host(recv).tobytes() == np.concatenate(parts).tobytes()


def check_sums(comm: thdattn.comm.Comm, xp: Any, dtype: np.dtype) -> None:
    rows = 3
    # Small integers: their sums are exact in every dtype and in every order.
    parts = [
        (np.arange(rows * comm.size * 2).reshape(-1, 2) % 5 + rank).astype(dtype) for rank in range(comm.size)
    ]
    total = sum(part.astype(np.float64) for part in parts).astype(dtype)
    mine = slice(comm.rank * rows, (comm.rank + 1) * rows)

    recv, send = poisoned(xp, (rows, 2), dtype), xp.asarray(parts[comm.rank])
    before = comm.received_bytes
    comm.reduce_scatter(send, recv)
    assert comm.received_bytes - before == send.nbytes - recv.nbytes
    assert to_host(recv).tobytes() == total[mine].tobytes()
    assert to_host(send).tobytes() == parts[comm.rank].tobytes()

    comm.all_reduce(send, "sum")
    assert to_host(send).tobytes() == total.tobytes()

    largest = xp.asarray(parts[comm.rank])
    comm.all_reduce(largest, "max")
    assert to_host(largest).tobytes() == np.max(parts, axis=0).tobytes()


def check_arrays_of_size_0(comm: thdattn.comm.Comm, xp: Any) -> None:
    for shape in [(0, 4), (0,), (comm.size, 0)]:
        comm.all_gather(xp.zeros(shape, np.float32), xp.zeros((comm.size * shape[0], *shape[1:]), np.float32))
        comm.reduce_scatter(
            xp.zeros(shape, np.float32), xp.zeros((shape[0] // comm.size, *shape[1:]), np.float32)
        )
        comm.all_reduce(xp.zeros(shape, np.float32), "max")


def check_many_collectives_in_a_row(comm: thdattn.comm.Comm, xp: Any) -> None:
    """Send buffers are written again at once: a rank that still reads one would see the next round's numbers."""
    send, recv = xp.zeros((1, 64), np.float32), xp.zeros((comm.size, 64), np.float32)
    share = xp.zeros((1, 64), np.float32)
    for step in range(20):
        send[...] = 100 * step + comm.rank
        comm.all_gather(send, recv)
        send[...] = -1
        assert to_host(recv)[:, 0].tolist() == [100 * step + rank for rank in range(comm.size)]
        comm.reduce_scatter(recv, share)
        recv[...] = -1
        assert (to_host(share) == comm.size * (100 * step + comm.rank)).all()


def check_bad_arguments_are_named(comm: thdattn.comm.Comm, xp: Any) -> None:
    """Make the same mistake on all ranks, so that all raise before anything is sent."""
    n = comm.size
    two = xp.zeros((2, 4), np.float32)
    gathered = xp.zeros((2 * n, 4), np.float32)
    assert f"must be ({2 * n}, 4)" in raises(
        ValueError, comm.all_gather, two, xp.zeros((2 * n + 1, 4), np.float32)
    )
    assert "recv has shape" in raises(ValueError, comm.reduce_scatter, gathered, xp.zeros((2, 5), np.float32))
    assert "recv is float64" in raises(TypeError, comm.all_gather, two, xp.zeros((2 * n, 4)))
    assert "share memory" in raises(ValueError, comm.all_gather, gathered[:2], gathered)
    assert "send has no dimensions" in raises(ValueError, comm.all_gather, xp.zeros(()), gathered)
    assert "send is not C-contiguous" in raises(
        TypeError, comm.all_gather, xp.zeros((4, 2), np.float32).T, gathered
    )
    assert "recv is a builtins.list" in raises(TypeError, comm.all_gather, two, [])
    assert "array is bool" in raises(TypeError, comm.all_reduce, xp.zeros(2, bool), "sum")
    assert "op is 'mean'" in raises(ValueError, comm.all_reduce, two, "mean")
    assert "op is None" in raises(TypeError, comm.all_reduce, two, None)
    assert "op is a ndarray" in raises(TypeError, comm.all_reduce, two, np.array(["sum", "max"]))
    if xp is np:
        check_bad_host_arrays_are_named(comm)
    if n > 1:
        uneven = xp.zeros((2 * n + 1, 4), np.float32)
        assert f"pad it to {3 * n} rows" in raises(ValueError, comm.reduce_scatter, uneven, two)


def check_bad_host_arrays_are_named(comm: thdattn.comm.Comm) -> None:
    """Check arrays that NumPy has and CuPy has not."""
    n = comm.size
    objects, swapped = np.zeros((2, 4), object), np.zeros((2, 4), ">f4")
    assert "send is of dtype |O" in raises(TypeError, comm.all_gather, objects, np.zeros((2 * n, 4), object))
    assert "array is of dtype >f4" in raises(TypeError, comm.all_reduce, swapped, "sum")
    fixed = np.arange(2 * n, dtype=np.float32).reshape(2 * n, 1)
    fixed.flags.writeable = False
    assert "recv is read-only" in raises(ValueError, comm.all_gather, fixed[:2].copy(), fixed)
    assert "array is read-only" in raises(ValueError, comm.all_reduce, fixed, "sum")
    gathered, share = np.zeros((2 * n * n, 1), np.float32), np.zeros((2, 1), np.float32)
    comm.all_gather(fixed, gathered)  # to read from it is legal
    comm.reduce_scatter(fixed, share)
    assert (gathered == np.concatenate([fixed] * n)).all() and (share == n * fixed[2 * comm.rank :][:2]).all()


def poisoned(xp: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Return bytes all ones: NaN in every floating dtype, so that a row nobody wrote shows."""
    size = int(np.prod(shape)) * dtype.itemsize
    return xp.asarray(np.full(size, 0xFF, np.uint8).view(dtype).reshape(shape))


def arrays_of(comm: thdattn.comm.Comm) -> Any:
    """Return the library of a comm's arrays, NumPy or CuPy."""
    return importlib.import_module("cupy" if "cuda" in comm.devices else "numpy")


def join(backend: str, size: int, transport: str = "auto", **options: Any) -> thdattn.comm.Comm:
    """Return the ranks of a backend of init, or below torchrun those of "torch-gloo" and "torch-nccl"."""
    if not backend.startswith("torch-"):
        comm = thdattn.comm.init(backend, transport=transport, **options)
    else:
        import torch

        if backend == "torch-nccl":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.distributed.init_process_group(backend.removeprefix("torch-"))
        atexit.register(torch.distributed.destroy_process_group)
        comm = thdattn.comm.from_torch(**options)
    assert comm.size == size, f"{backend} sees {comm.size} ranks, the launcher started {size}"
    return comm


def say_who_is_in_a_group_of_the_last_two(process: int) -> None:
    from torch import distributed

    group = distributed.new_group([1, 2])
    if process == 0:
        print(f"process 0: {raises(ValueError, thdattn.comm.from_torch, group)}", flush=True)
        return
    comm = thdattn.comm.from_torch(group)
    gathered = np.full(2, np.nan)
    comm.all_gather(np.array([10.0 + comm.rank]), gathered)
    print(f"process {process}: rank {comm.rank} of {comm.size} has {gathered.tolist()}", flush=True)


def main(scenarios: str, backend: str, size: str) -> None:
    comm = join(backend, int(size))
    for scenario in scenarios.split(","):
        act(scenario, comm)
        print(f"rank {comm.rank} of {comm.size}: {scenario} on {comm.name} done", flush=True)


def act(scenario: str, comm: thdattn.comm.Comm) -> None:
    if scenario == "contract":
        check_contract(comm, arrays_of(comm))
    elif scenario == "failing-rank":
        if comm.rank == 1:
            raise ValueError("rank 1 had bad luck")
        comm.barrier()
    elif scenario == "failing-rank-leaves-by-exit":
        if comm.rank == 1:
            sys.exit(3)
        time.sleep(0.1)
        comm.barrier()
    elif scenario == "agree":
        print(f"rank {comm.rank}: {raises(ValueError, comm.agree, 'plan hash', comm.rank // 2)}")
    elif scenario == "torch-subgroup":
        say_who_is_in_a_group_of_the_last_two(comm.rank)


if __name__ == "__main__":
    main(*sys.argv[1:])
