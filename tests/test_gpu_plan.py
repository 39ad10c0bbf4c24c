"""A plan made on the GPU from lengths on the GPU is the plan made by NumPy, element by element."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import BIG, LONG, SMALL

import thdattn
from thdattn.plan import host_arrays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

WINDOWS = [(-1, -1), (-1, 0), (0, 0), (5, 0), (3, 40), (40, 3), (-1, 7), (7, -1), (100_000, 100_000)]
# Rows per query tile and per key tile: the kernels', and tiles that divide nothing.
TILES = [(128, 64), (64, 128), (7, 100)]


def on_gpu(cupy, batch):
    arrays = (cupy.asarray(x) for x in (batch.cu_seqlens, batch.cu_seqlens_padded))
    return thdattn.PackedBatch(*arrays, total_rows=batch.total_rows)


def assert_same_plans(cupy, case, cp_size, windows, tile_sizes):
    from thdattn import ops

    batch = case.batch(cp_size)
    there = thdattn.Sharding(on_gpu(cupy, batch), cp_size, case.sharding)
    here = thdattn.Sharding(batch, cp_size, case.sharding)
    for cp_rank in range(cp_size):
        for window in windows:
            for tiles in tile_sizes:
                wanted = host_arrays(here, cp_rank, window, tiles)
                made = ops.plan_arrays(there, cp_rank, window, tiles)
                for field, x in vars(wanted).items():
                    y = getattr(made, field)
                    what = f"{field}, rank {cp_rank}, window {window}, tiles {tiles}"
                    assert y.dtype == np.int32, what
                    np.testing.assert_array_equal(y.get(), x, err_msg=what)


@pytest.mark.parametrize("sharding", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_device_plan_is_the_host_plan(cupy, case, sharding):
    for cp_size in case.cp_sizes:
        # dual_chunk cannot split the padded lengths of a contiguous case.
        padded = None if case.sharding == "contiguous" else case.padded
        this = replace(case, sharding=sharding, padded=padded)
        assert_same_plans(cupy, this, cp_size, WINDOWS if cp_size == 2 else [case.window], TILES[:1])
        assert_same_plans(cupy, this, cp_size, [(-1, 0)], TILES[1:])


@pytest.mark.parametrize("sharding", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("cp_size", [1, 8])
@pytest.mark.parametrize("case", [*BIG, LONG], ids=str)
def test_device_plan_of_a_big_pack_is_the_host_plan(cupy, case, cp_size, sharding):
    assert_same_plans(cupy, replace(case, sharding=sharding), cp_size, [case.window], TILES[:1])


def test_uploaded_host_plan_is_the_host_plan(cupy):
    from thdattn import ops

    case = next(case for case in SMALL if case.name == "edge-lengths")
    sharding = thdattn.Sharding(case.batch(2), 2)
    made, wanted = ops.plan_arrays(sharding, 1, (-1, 0), (128, 64)), host_arrays(sharding, 1, (-1, 0), (128, 64))
    for field, x in vars(wanted).items():
        assert isinstance(getattr(made, field), cupy.ndarray)
        np.testing.assert_array_equal(getattr(made, field).get(), x, err_msg=field)


@pytest.mark.parametrize("name", ["edge-lengths", "capacity", "all-empty", "no-sequences"])
def test_valid_rows_are_known_on_the_gpu(cupy, name):
    case = next(case for case in SMALL if case.name == name)
    attention = thdattn.CPAttention(thdattn.comm.init("single"), 2, 64, engine="cuda")
    reference = thdattn.CPAttention(thdattn.comm.init("single"), 2, 64, engine="reference")
    batch = case.batch(1)
    for lengths in (batch, on_gpu(cupy, batch)):
        valid = attention.plan(lengths).valid
        assert isinstance(valid, cupy.ndarray) and valid.dtype == bool
        np.testing.assert_array_equal(valid.get(), reference.plan(batch).valid)


@pytest.mark.parametrize("tile_m", [64, 128])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_query_tiles_alone_with_a_tile_of_keys(cupy, case, tile_m):
    from thdattn import ops

    for cp_size in case.cp_sizes:
        batch = case.batch(cp_size)

        def alone(comm, case=case, batch=batch):
            plan = thdattn.CPAttention(comm, 1, 64, window=case.window, causal=case.causal).plan(batch, case.sharding)
            return ops._alone(plan, tile_m).get(), plan.key_ranges.get(), plan.tiles[1]

        for found, ranges, tile_n in thdattn.comm.run_local(cp_size, alone):
            for tile, number in enumerate(found):
                rows = ranges[tile * tile_m :][:tile_m]
                in_sight = {key // tile_n for begin, end in rows for key in range(begin, end)}
                assert number == (1 + in_sight.pop() if len(in_sight) == 1 else 0 if in_sight else -1)
