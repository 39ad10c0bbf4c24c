"""Whole packed arrays and a rank's rows of them: Plan.shard and Plan.unshard on each engine."""

from __future__ import annotations

import numpy as np
import pytest
from cases import BFLOAT16, CASES, to_host

import thdattn


def plans_over(cp_size, batch, sharding, program, engine="reference"):
    """What program(plan, comm) returns on every simulated rank."""
    def on_rank(comm):
        return program(thdattn.CPAttention(comm, 1, 64, engine=engine).plan(batch, sharding), comm)

    return thdattn.comm.run_local(cp_size, on_rank)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.int64, bool, np.complex128], ids=str)
@pytest.mark.parametrize("shape", [(), (2, 5), (0,)], ids=str)
@pytest.mark.parametrize("name", ["edge-lengths", "capacity-contiguous", "all-empty"])
def test_unshard_is_the_inverse_of_shard(engine, name, shape, dtype, cp_size):
    case = CASES[name]
    batch = case.batch(cp_size)
    size = int(np.prod((batch.total_rows, *shape)))
    whole = (np.arange(1, size + 1) % 251).astype(dtype).reshape(batch.total_rows, *shape)
    sharding = thdattn.Sharding(batch, cp_size, case.sharding)

    def program(plan, comm):
        local = plan.shard(engine.xp.asarray(whole))
        assert isinstance(local, engine.xp.ndarray)
        mine, fillers = to_host(local), sharding.rows(comm.rank) < 0
        assert mine.dtype == whole.dtype and not mine[fillers].any()
        np.testing.assert_array_equal(mine, sharding.shard(whole, comm.rank))
        mine[fillers] = 1
        return plan.unshard(engine.xp.asarray(mine), comm)

    for again in plans_over(cp_size, batch, sharding, program, engine.name):
        assert isinstance(again, engine.xp.ndarray) and again.dtype == whole.dtype
        assert engine.name == "cuda" or not np.shares_memory(again, whole)
        np.testing.assert_array_equal(to_host(again), whole)


def test_shard_and_unshard_name_what_is_wrong():
    batch = thdattn.PackedBatch.from_lengths([7, 3], 4)

    def program(plan, comm):
        with pytest.raises(ValueError, match=r"x has shape \(6, 3\), wanted 12 rows; pass the whole packed array"):
            plan.shard(np.zeros((6, 3)))
        with pytest.raises(ValueError, match=r"x has shape \(12,\), wanted 6 rows; pass this rank's rows"):
            plan.unshard(np.zeros(12), comm)
        with pytest.raises(ValueError, match=r"comm is rank 0 of 1, wanted rank \d of 2 as the plan; pass the comm"):
            plan.unshard(np.zeros(6), thdattn.comm.init("single"))
        with pytest.raises(TypeError, match=r"comm is a NoneType, wanted a Comm; pass that of the attention"):
            plan.unshard(np.zeros(6), None)
        with pytest.raises(TypeError, match=r"x is a builtins\.list, wanted a NumPy array"):
            plan.shard([0.0] * 12)
        for x in (np.zeros((6, 1 + comm.rank)), np.zeros(6, [np.float32, np.float64][comm.rank])):
            with pytest.raises(ValueError, match=r"x of unshard is not the same on all ranks"):
                plan.unshard(x, comm)

    plans_over(2, batch, "dual_chunk", program)
