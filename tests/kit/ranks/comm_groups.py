"""Groups that are split off a comm, checked by every one of 2 or 4 ranks; as a program under a launcher.

mpiexec -n 4 python -m mpi4py comm_groups.py mpi 4
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from ranks.comm_contract import arrays_of, check_contract, join, raises, to_host

import thdattn.comm
from thdattn.comm import mpi


def check_groups(comm: thdattn.comm.Comm, xp: Any) -> None:
    """Check every promise of Comm.split, most of them on 4 ranks, and close the comm; xp is numpy or cupy."""
    check_bad_colors_are_named(comm)
    if comm.size == 4:
        check_grid(comm, xp)
    else:
        check_members(comm, xp, [0, 1], [0, 0])
        check_members(comm, xp, [0, 0], [0, -1])
    group = comm.split(0)
    inner = group.split(0)
    comm.close()
    assert all("closed" in raises(RuntimeError, other.barrier) for other in (group, inner))
    assert "closed" in raises(RuntimeError, comm.split, 0)


def check_grid(comm: thdattn.comm.Comm, xp: Any) -> None:
    check_members(comm, xp, [0, 0, 1, 1], [0, 0, 0, 0])
    check_members(comm, xp, [7, 3, 3, 3], [0, 0, 0, 0])
    check_members(comm, xp, [5, 5, 5, 5], [2, 0, 3, 1])
    check_members(comm, xp, [0, 1, 0, 1], [-1, -1, -2, -2])
    check_members(comm, xp, [0, 0, 0, 0], [1, 0, 1, 0])
    check_different_orders(comm, xp)
    check_group_of_a_group(comm, xp)
    for color in (comm.rank // 2, comm.rank % 2):
        check_contract(comm.split(color), xp)  # closes it


def check_bad_colors_are_named(comm: thdattn.comm.Comm) -> None:
    assert "color is 0.0, a float; wanted an int" in raises(TypeError, comm.split, 0.0)
    assert "color is None, a NoneType; wanted an int" in raises(TypeError, comm.split, None)
    assert "color is -1, wanted >= 0; number the groups from 0" in raises(ValueError, comm.split, -1)
    assert "color is 2147483648, wanted <= 2147483647" in raises(ValueError, comm.split, 2**31)
    assert "key is '0', a str; wanted an int" in raises(TypeError, comm.split, 0, "0")
    assert "key is 2147483648, wanted <= 2147483647" in raises(ValueError, comm.split, 0, 2**31)


def check_members(comm: thdattn.comm.Comm, xp: Any, colors: list[int], keys: list[int]) -> None:
    """Check the members of a group and their order: by key, then by rank."""
    group = comm.split(colors[comm.rank], keys[comm.rank])
    by_key = [rank for _, rank in sorted(zip(keys, range(comm.size), strict=True))]
    members = [rank for rank in by_key if colors[rank] == colors[comm.rank]]
    assert group.name == comm.name and group.devices == comm.devices
    assert (group.rank, group.size) == (members.index(comm.rank), len(members))
    assert gathered(group, xp, comm.rank) == members
    assert total(group, xp, 10**comm.rank) == sum(10**rank for rank in members)
    group.agree("color", colors[comm.rank])
    comm.barrier()
    group.close()


def check_different_orders(comm: thdattn.comm.Comm, xp: Any) -> None:
    """Call rows and columns in other orders: ranks 0 and 1 their row first, 2 and 3 their column."""
    row, column = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    in_row, in_column = [comm.rank // 2 * 2, comm.rank // 2 * 2 + 1], [comm.rank % 2, comm.rank % 2 + 2]
    for step in range(10):
        for group, members in ((row, in_row), (column, in_column))[:: 1 if comm.rank < 2 else -1]:
            assert gathered(group, xp, 100 * step + comm.rank) == [100 * step + rank for rank in members]
        if step % 3 == 0:
            assert total(comm, xp, 1) == 4
    for _ in range(1 + 4 * (comm.rank // 2)):  # rows need not keep step with each other
        assert gathered(row, xp, comm.rank) == in_row
    assert total(comm, xp, 1) == 4


def check_group_of_a_group(comm: thdattn.comm.Comm, xp: Any) -> None:
    three = comm.split(0 if comm.rank < 3 else 1)
    outer = three.split(three.rank % 2)
    members = {0: [0, 2], 1: [1], 2: [0, 2], 3: [3]}[comm.rank]
    assert gathered(outer, xp, comm.rank) == members
    assert total(three, xp, 1) == (3 if comm.rank < 3 else 1)
    three.close()
    assert "closed" in raises(RuntimeError, outer.barrier)
    assert total(comm, xp, 1) == 4


def gathered(group: thdattn.comm.Comm, xp: Any, value: int) -> list[int]:
    """Return every member's value, by all_gather."""
    recv = xp.full(group.size, -1, np.int64)
    group.all_gather(xp.full(1, value, np.int64), recv)
    found: list[int] = to_host(recv).tolist()
    return found


def total(group: thdattn.comm.Comm, xp: Any, value: int) -> int:
    array = xp.full(2, value, np.int64)
    group.all_reduce(array, "sum")
    assert to_host(array)[0] == to_host(array)[1]
    return int(array[0])


def check_worlds(rank: int) -> None:
    """Call init on communicators of the program's own, and on what are none."""
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD
    half = everyone.Split(rank % 2, key=-rank)
    assert mpi.local_rank(everyone) == rank
    assert sorted(everyone.allgather(mpi.local_rank(half))) == [0, 1, 2, 3], "a GPU of its own for each rank"
    with thdattn.comm.init("mpi", half) as comm:
        assert (comm.rank, comm.size) == (half.rank, 2)
        assert gathered(comm, np, rank) == [rank % 2 + 2, rank % 2]
        half.Barrier()
    half.Barrier()  # it is still the program's
    alone = thdattn.comm.init("auto", MPI.COMM_SELF)
    assert (alone.name, alone.size) == ("single", 1)
    between = half.Create_intercomm(0, everyone, 1 - rank % 2 + 2)
    assert "wanted a communicator of one group" in raises(TypeError, thdattn.comm.init, "mpi", between)
    assert "world is MPI.COMM_NULL" in raises(ValueError, thdattn.comm.init, "mpi", MPI.COMM_NULL)
    assert "world has 4 ranks, but backend 'single'" in raises(ValueError, thdattn.comm.init, "single", everyone)
    for communicator in (half, between):
        communicator.Free()


def main(backend: str, size: str) -> None:
    comm = join(backend, int(size))
    check_groups(comm, arrays_of(comm))
    if backend == "mpi":
        check_worlds(comm.rank)
    print(f"rank {comm.rank} of {comm.size}: groups on {comm.name} done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
