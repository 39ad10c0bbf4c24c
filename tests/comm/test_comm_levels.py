"""Levels: rows and columns of a grid of simulated ranks are one comm."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from ranks.comm_contract import check_all_but_exchange

import thdattn.comm
from thdattn.comm.levels import Levels

GRIDS = [(2, 2), (2, 3), (3, 2), (3, 1), (1, 3), (1, 1)]  # ranks of a group of neighbours, and groups
grids = pytest.mark.parametrize("grid", GRIDS, ids=str)


def levels_of(comm, num_inner):
    return Levels(comm.split(comm.rank // num_inner), comm.split(comm.rank % num_inner))


def on_grid(grid, program):
    """program(levels) on every rank, neighbours first."""
    return thdattn.comm.run_local(grid[0] * grid[1], lambda comm: program(levels_of(comm, grid[0])), timeout=30)


@grids
def test_levels_keep_the_contract(grid):
    on_grid(grid, lambda levels: check_all_but_exchange(levels, np))


@grids
def test_ranks_are_numbered_as_those_of_the_comm_that_was_split(grid):
    def program(comm):
        levels = levels_of(comm, grid[0])
        return (levels.rank, levels.size, levels._gather_values(comm.rank))

    everyone = list(range(grid[0] * grid[1]))
    assert thdattn.comm.run_local(len(everyone), program) == [(r, len(everyone), everyone) for r in everyone]


@grids
def test_foreign_rows_are_received_once(grid):
    def program(levels):
        levels.all_gather(np.zeros((5, 2), np.float32), np.zeros((5 * levels.size, 2), np.float32))
        return levels.received_bytes, levels.inner.received_bytes + levels.outer.received_bytes

    rows = grid[0] * grid[1] - 1
    assert on_grid(grid, program) == [(rows * 40, rows * 40)] * (rows + 1)


def test_what_both_hold_is_added_up():
    def program(comm):
        levels = levels_of(comm, 2)
        levels.inner.held_bytes = lambda: {"windows of slices": 5, "windows of keys": 1}
        levels.outer.held_bytes = lambda: {"windows of keys": 7}
        return levels.held_bytes()

    assert thdattn.comm.run_local(2, program) == [{"windows of slices": 5, "windows of keys": 8}] * 2


def test_levels_can_what_both_of_their_parts_can():
    def program(comm):
        inner, outer = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        outer.devices, inner.capturable = frozenset({"cpu"}), True
        inner.sum_dtypes = frozenset({"float32", "int32"})
        levels = Levels(inner, outer)
        outer.devices, inner.devices = frozenset({"cpu"}), frozenset({"cuda"})
        with pytest.raises(ValueError, match="inner, of backend 'local', takes other arrays than outer, of backend"):
            Levels(inner, outer)
        return levels.devices, levels.capturable, levels.sum_dtypes

    assert thdattn.comm.run_local(4, program) == [({"cpu"}, False, {"float32", "int32"})] * 4


@pytest.mark.parametrize("colors", [
    lambda rank: (rank // 2, rank // 2),  # the same groups twice
    lambda rank: (int(rank > 0), int(rank % 2)),  # of different sizes
    lambda rank: (rank // 2, [0, 1, 0, 2][rank]),  # one column has fallen apart
])
def test_groups_that_form_no_grid_are_refused_on_every_rank(colors):
    def program(comm):
        inner, outer = (comm.split(color) for color in colors(comm.rank))
        with pytest.raises(ValueError, match=f"this is rank {inner.rank} of {inner.size} in inner and {outer.rank} of"):
            Levels(inner, outer)

    thdattn.comm.run_local(4, program, timeout=30)


def test_grid_with_a_twist_is_refused_on_every_rank():
    """Each rank has the numbers of its neighbours in order, but the rows of two grids have changed their columns."""
    columns = {0: 0, 2: 0, 1: 1, 7: 1, 4: 2, 6: 2, 5: 3, 3: 3}

    def program(comm):
        inner = comm.split(comm.rank // 2)
        outer = comm.split(columns[comm.rank], key=comm.rank // 2 % 2)
        assert (inner.rank, outer.rank) == (comm.rank % 2, comm.rank // 2 % 2)
        with pytest.raises(ValueError, match="inner and outer form no grid"):
            Levels(inner, outer)

    thdattn.comm.run_local(8, program, timeout=30)


def test_what_takes_one_level_is_refused_with_the_remedy():
    def program(levels):
        for call in (lambda: levels.exchange([], []), lambda: levels.split(0)):
            with pytest.raises(ValueError, match=r"was called on <Levels rank . of 2>, wanted a comm of one level"):
                call()
        with pytest.raises(TypeError, match=r"outer is 3, a int; wanted a comm; pass one of comm\.split"):
            Levels(levels.inner, 3)

    on_grid((2, 1), program)


def test_closing_leaves_the_parts_open():
    def program(comm):
        levels = levels_of(comm, 2)
        done = []
        levels.before_close(lambda: done.append("graph"))
        levels.close()
        assert done == ["graph"]
        levels.inner.barrier()
        levels.outer.barrier()
        comm.barrier()

    thdattn.comm.run_local(4, program)


@pytest.mark.parametrize("closed", ["inner", "outer", "comm"])
def test_levels_refuse_every_call_when_a_part_is_closed(closed):
    def program(comm):
        levels = levels_of(comm, 2)
        {"inner": levels.inner, "outer": levels.outer, "comm": comm}[closed].close()
        for call in (levels.barrier, lambda: levels.agree("a number", 1), lambda: levels.before_close(print),
                     lambda: levels.all_gather(np.zeros(1), np.zeros(4))):
            with pytest.raises(RuntimeError, match="local comm is closed"):
                call()
        levels.close()

    thdattn.comm.run_local(4, program, timeout=30)


@pytest.mark.parametrize("first", ["inner", "outer", "comm"])
def test_graphs_of_levels_go_before_a_part_is_closed(first, monkeypatch):
    done = []
    monkeypatch.setattr(thdattn.comm.SingleComm, "_close", lambda self: done.append("closed"))
    comm = thdattn.comm.init("single")
    levels = levels_of(comm, 1)
    levels.before_close(lambda: done.append("graph"))
    {"inner": levels.inner, "outer": levels.outer, "comm": comm}[first].close()
    assert done[:2] == ["graph", "closed"] and done.count("graph") == 1


def test_a_block_is_watched_by_both_parts(monkeypatch):
    levels, seen = levels_of(thdattn.comm.init("single"), 1), []

    class Watched:
        def __init__(self, name, what):
            self.said = f"{name}: {what}"

        def __enter__(self):
            seen.append(self.said)

        def __exit__(self, *error):
            seen.append(f"end of {self.said}")

    for name in ("inner", "outer"):
        part = SimpleNamespace(_watched=lambda what, array, name=name: Watched(name, what))
        monkeypatch.setattr(levels, name, part)
    with levels.watched("replay"):
        seen.append("block")
    assert seen == ["inner: replay", "outer: replay", "block", "end of outer: replay", "end of inner: replay"]
