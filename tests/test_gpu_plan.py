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


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_how_many_tiles_of_keys_have_a_tile_of_queries_in_sight(cupy, case, dims):
    from thdattn import tiles
    from thdattn.ops.backward import shares_of

    sizes = tiles.TILES[dims].backward_sm90
    for cp_size in case.cp_sizes:
        batch = case.batch(cp_size)

        def shares(comm, case=case, batch=batch):
            how = {"v_head_dim": dims[1], "window": case.window, "causal": case.causal}
            plan = thdattn.CPAttention(comm, 1, dims[0], **how).plan(batch, case.sharding)
            return shares_of(sizes, plan).get(), plan.key_ranges.get()

        for found, ranges in thdattn.comm.run_local(cp_size, shares):
            wanted = np.zeros(len(found), int)
            for first_key in range(0, batch.total_rows, sizes.tile_n):
                in_sight = set()
                for group in range(first_key, first_key + sizes.tile_n, 64):  # from the first to the last that sees one
                    begin, end = np.maximum(ranges[:, 0], group), np.minimum(ranges[:, 1], group + 64)
                    rows = np.flatnonzero(begin < end)
                    if len(rows):
                        in_sight |= set(range(rows[0] // sizes.tile_m, rows[-1] // sizes.tile_m + 1))
                wanted[list(in_sight)] += 1
            np.testing.assert_array_equal(found, wanted)
