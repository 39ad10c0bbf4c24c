"""Peer memory whose steps fail on one rank, whose windows grow and go, as a program under mpiexec.

mpiexec -n 2 python -m mpi4py peer_ranks.py short 2
"""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from cases import to_host
from mpi4py import MPI
from ranks.attention_ranks import run_cases

import thdattn
from thdattn.comm.peer import windows

WORLD = MPI.COMM_WORLD
LAST = WORLD.size - 1  # the rank that fails
MUCH = 2**30  # bytes of a large window
ALONE = "PYTEST_XDIST_WORKER" not in os.environ  # no other worker of pytest uses the GPU
MEMORY = cupy.cuda.Memory
Comm = thdattn.comm.Comm


class Layer:
    """One attention, and the arrays of a pack of so many rows for each rank."""

    def __init__(self, comm: Comm, num_rows: int, **options: Any) -> None:
        self.attention = thdattn.CPAttention(comm, 8, 128, 8, keep_keys=False, **options)
        self.plan = self.attention.plan(thdattn.PackedBatch.from_lengths([1024 * comm.size] * (num_rows // 1024)))
        self.x = cupy.asarray(np.ones((num_rows, 8, 128), self.attention.dtype))

    def step(self) -> None:
        _, saved = self.attention.forward(self.x, self.x, self.x, self.plan)
        dq, dk, dv = self.attention.backward(self.x, saved)
        assert all(np.isfinite(to_host(x[-1024:]).astype(np.float32)).all() for x in (dq, dk, dv))


def counted(is_full: Callable[[int], bool] = lambda size: False) -> dict[int, int]:
    """Return the sizes of all memory of windows and blocks from now on, by address.

    What a GPU has free says little where other processes use it too.

    Args:
        is_full: given a size, returns whether the driver is asked for more than the GPU has, which it refuses.
    """
    sizes: dict[int, int] = {}

    class Counted(MEMORY):  # type: ignore[misc]
        def __init__(self, size: int) -> None:
            super().__init__(2 * cupy.cuda.runtime.memGetInfo()[1] if is_full(size) else size)
            sizes[self.ptr] = size
            weakref.finalize(self, sizes.pop, self.ptr).atexit = False

    cupy.cuda.Memory = Counted
    return sizes


def free_bytes() -> int:
    """Bytes that the GPU has free when CuPy's pool holds none."""
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.cuda.runtime.deviceSynchronize()
    return int(cupy.cuda.runtime.memGetInfo()[0])


def same(value: Any) -> Any:
    """Assert that the value is the same on all ranks, and return it."""
    assert len(set(WORLD.allgather(value))) == 1
    return value


def short(comm: Comm) -> None:
    """Refuse the last rank memory for larger windows: all raise, and smaller packs go on."""
    layer = Layer(comm, 1 << 18)
    before = comm.held_bytes()
    if comm.rank == LAST:
        counted(lambda size: size >= MUCH)
    for _ in range(2):
        began = time.perf_counter()
        try:
            layer.attention.forward(layer.x, layer.x, layer.x, layer.plan)
        except MemoryError as error:
            message = same(str(error))
        assert f"failed on rank {LAST}: found " in message and "making 2 windows of keys of " in message, message
        assert time.perf_counter() - began < 30 and comm.held_bytes() == before
    run_cases(comm, cupy)
    del layer
    cupy.cuda.Memory = MEMORY
    Layer(comm, 1 << 18).step()


def pool(comm: Comm) -> None:
    """Let CuPy's pool hold unused memory that windows need."""
    layer, free = Layer(comm, 1 << 18), list[int]()

    def is_full(size: int) -> bool:
        free.append(cupy.get_default_memory_pool().free_bytes())
        return len(free) == 1

    free_bytes()
    held = cupy.empty(MUCH, np.uint8)
    del held
    if comm.rank == LAST:
        counted(is_full)
    layer.step()
    assert comm.rank != LAST or free[0] >= MUCH > free[1], free
    run_cases(comm, cupy)


def sizes(comm: Comm) -> None:
    """Raise sizes by little, which leaves two windows of each use; they are all that is counted."""
    made = counted()
    Layer(comm, 1 << 14, head_groups=2).step()  # with larger windows than those of the start
    assert sum(comm.held_bytes().values()) == sum(made.values())
    start = free_bytes() + sum(made.values())
    for number in range(22):
        num_rows = int(2**15 * 1.02**number) // 1024 * 1024
        Layer(comm, num_rows, head_groups=2).step()
    memory = Layer(comm, num_rows, head_groups=2).attention.memory(
        thdattn.PackedBatch.from_lengths([1024 * comm.size] * (num_rows // 1024)))
    held = comm.held_bytes()
    assert held == {name: size for name, size in memory.items() if name.startswith(("windows", "pulled"))}
    assert sum(held.values()) == sum(made.values())
    assert not ALONE or abs(start - free_bytes() - sum(held.values())) < 32 * 2**20


def close(comm: Comm) -> None:
    """Check that memory of windows is free as soon as the comm is closed."""
    made = counted()
    Layer(comm, 1 << 16, head_groups=2).step()
    gc.collect()
    gc.disable()
    held, before = sum(comm.held_bytes().values()), free_bytes()
    assert held == sum(made.values()) > 256 * 2**20
    comm.close()
    assert not made
    assert not ALONE or cupy.cuda.runtime.memGetInfo()[0] - before > 0.95 * held


def absent(comm: Comm) -> None:
    """Leave out the call that needs larger windows on the last rank."""
    layer = Layer(comm, 1 << 16)
    if comm.rank == LAST:
        time.sleep(1000)
    layer.step()


def start(transport: str) -> Comm:
    """Start where the last rank cannot open the memory of the others."""
    opened = windows.Window.open

    def refuse(window: windows.Window, handles: Any) -> None:
        opened(window, handles)
        raise OSError("a container forbids it")

    if WORLD.rank == LAST:
        windows.Window.open = refuse  # type: ignore[method-assign]
    try:
        comm = thdattn.comm.init("nccl", transport=transport)
    except RuntimeError as error:
        assert transport == "peer"
        why = same(str(error))
        windows.Window.open = opened  # type: ignore[method-assign]
        comm = thdattn.comm.init("nccl", transport="peer")  # nothing of before is in the way
    else:
        why = same(comm.no_peer_memory)  # type: ignore[attr-defined]
        assert transport == "auto" and why in repr(comm)
    assert f"failed on rank {LAST}: OSError: a container forbids it" in why, why
    return comm


SCENARIOS: dict[str, Callable[[Comm], None]] = {
    "short": short, "pool": pool, "sizes": sizes, "close": close, "absent": absent,
}


def main(scenario: str, size: str) -> None:
    if scenario.startswith("start-"):
        comm = start(scenario.removeprefix("start-"))
        run_cases(comm, cupy)
    else:
        comm = thdattn.comm.init("nccl", transport="peer", timeout=10 if scenario == "absent" else 60)
        SCENARIOS[scenario](comm)
    assert comm.size == int(size)
    print(f"rank {comm.rank} of {size}: {scenario} done", flush=True)
    comm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
