"""A plan made on the GPU, from lengths on either side, is the plan made by NumPy, element by element."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16, BIG, CROSS, LONG, SMALL, local_rows, outline_of, random_inputs, to_host
from pairs import WINDOWS

import thdattn
from thdattn.kernels.configs import TILES
from thdattn.plan.ranges import host_arrays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

SINGLE = thdattn.comm.init("single")
# Rows per query tile and per key tile: the kernels', and tiles that divide nothing.
TILE_SIZES = [(128, 64), (64, 128), (7, 100)]


def on_gpu(cupy, batch):
    arrays = (cupy.asarray(x) for x in (batch.cu_seqlens, batch.cu_seqlens_padded))
    return thdattn.PackedBatch(*arrays, total_rows=batch.total_rows)


def results(attention, plan, inputs):
    """out, lse, max_logit, dq, dk, dv on the host."""
    q, k, v, dout = inputs
    out, saved = attention.forward(q, k, v, plan, return_max_logit=True)
    return [to_host(x) for x in (out, saved.lse, saved.max_logit, *attention.backward(dout, saved))]


def arrays_of(made):
    return {field: x for field, x in vars(made).items() if field not in ("lengths", "offsets", "stream")}


def assert_arrays(made, wanted, what):
    for field, x in arrays_of(wanted).items():
        y = getattr(made, field)
        if x is None:
            assert y is None, (field, what)
            continue
        assert y.dtype == x.dtype, (field, what)
        np.testing.assert_array_equal(to_host(y), x, err_msg=f"{field}, {what}")


def assert_same_plans(cupy, batch, cp_size, strategy, windows, tile_sizes, key_batch=None, keys_of=(None,)):
    """Of every rank, from lengths on the host and, where the strategy can have them there, on the GPU."""
    from thdattn.engines import cuda

    sides = [(thdattn.Sharding(batch, cp_size, strategy), key_batch)]
    if strategy != "balanced" or cp_size == 1:
        there = thdattn.Sharding(on_gpu(cupy, batch), cp_size, strategy)
        sides.append((there, key_batch and on_gpu(cupy, key_batch)))
    for how in itertools.product(range(cp_size), windows, tile_sizes):
        for rank in keys_of:
            wanted = host_arrays(sides[0][0], *how, key_batch, rank)
            for sharding, keys in sides:
                made = cuda.plan_arrays(outline_of(cuda, sharding, *how, keys, rank))
                if sharding.batch.on_device:
                    made.lengths.check(wait=True)
                else:
                    assert made.lengths is None and isinstance(made.rows, cupy.ndarray)
                assert_arrays(made, wanted, f"rank, window, tiles {how}, keys of {rank}, {sharding.batch}")


def assert_same_plans_of(cupy, case, cp_size, windows, tile_sizes):
    assert_same_plans(
        cupy, case.batch(cp_size), cp_size, case.sharding, windows, tile_sizes, case.key_batch())


@pytest.mark.parametrize("sharding", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_device_plan_is_the_host_plan(cupy, case, sharding):
    for cp_size in case.cp_sizes:
        # dual_chunk cannot split the padded lengths of a contiguous case.
        padded = None if case.sharding == "contiguous" else case.padded
        this = replace(case, sharding=sharding, padded=padded)
        assert_same_plans_of(cupy, this, cp_size, WINDOWS if cp_size == 2 else [case.window], TILE_SIZES[:1])
        assert_same_plans_of(cupy, this, cp_size, [(-1, 0)], TILE_SIZES[1:])


@pytest.mark.parametrize("case", CROSS, ids=str)
def test_device_plan_for_keys_of_other_lengths_is_the_host_plan(cupy, case):
    assert_same_plans_of(cupy, case, 1, WINDOWS, TILE_SIZES)


@pytest.mark.parametrize("case", CROSS, ids=str)
def test_lengths_on_the_gpu_are_attended_as_on_the_host(cupy, case):
    attention = case.attention(SINGLE, BFLOAT16, engine="cuda", deterministic=True)
    here = case.batch(1), case.key_batch()
    there = [on_gpu(cupy, batch) for batch in here]
    inputs = [cupy.asarray(local_rows(batch, np.arange(batch.total_rows), x, np.nan))
              for batch, x in zip((*here, here[1], here[0]), random_inputs(case, BFLOAT16), strict=True)]
    plans = [attention.plan(batch, case.sharding, key_batch) for batch, key_batch in (here, there)]
    one, other = (results(attention, plan, inputs) for plan in plans)
    for x, y in zip(one, other, strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("sharding", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("cp_size", [1, 8])
@pytest.mark.parametrize("case", [*BIG, LONG], ids=str)
def test_device_plan_of_a_big_pack_is_the_host_plan(cupy, case, cp_size, sharding):
    assert_same_plans_of(cupy, replace(case, sharding=sharding), cp_size, [case.window], TILE_SIZES[:1])


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
@pytest.mark.parametrize("case", [*SMALL, *CROSS], ids=str)
def test_how_many_tiles_of_keys_have_a_tile_of_queries_in_sight(cupy, case, dims):
    from thdattn.engines.cuda.backward import partials_per_tile

    sizes = TILES[dims].backward_sm90
    for cp_size in case.cp_sizes:
        batch = case.batch(cp_size)

        def shares(comm, case=case, batch=batch):
            how = {"v_head_dim": dims[1], "window": case.window, "causal": case.causal}
            plan = thdattn.CPAttention(comm, 1, dims[0], **how).plan(batch, case.sharding, case.key_batch())
            return partials_per_tile(plan).get(), plan.key_ranges.get()

        for found, ranges in thdattn.comm.run_local(cp_size, shares):
            wanted = np.zeros(len(found), int)
            for first_key in range(0, (case.key_batch() or batch).total_rows, sizes.tile_n):
                in_sight = set()
                for group in range(first_key, first_key + sizes.tile_n, 64):  # from the first to the last that sees one
                    begin, end = np.maximum(ranges[:, 0], group), np.minimum(ranges[:, 1], group + 64)
                    rows = np.flatnonzero(begin < end)
                    if len(rows):
                        in_sight |= set(range(rows[0] // sizes.tile_m, rows[-1] // sizes.tile_m + 1))
                wanted[list(in_sight)] += 1
            np.testing.assert_array_equal(found, wanted)


# --- wrong lengths -----------------------------------------------------------------------------------------------

# cu_seqlens, cu_seqlens_padded of 12 rows; the same of the keys; number of ranks; what is said.
WRONG = {
    "no-multiple": (([0, 7, 10], [0, 7, 10]), None, 2, r"sequence 0 has padded length 7, wanted a multiple of .* = 4"),
    "longer-than-padded": (([0, 8, 11], [0, 4, 12]), None, 2, r"sequence 0 has 8 tokens but .* leaves it 4 rows"),
    "decreasing": (([0, 8, 4], [0, 8, 12]), None, 2, r"cu_seqlens decreases from 8 at index 1 to 4 at index 2"),
    "decreasing-padded": (([0, 4, 4], [0, 12, 8]), None, 2, r"cu_seqlens_padded decreases from 12 at index 1 to 8"),
    "first-is-not-0": (([4, 8, 12], [4, 8, 12]), None, 2, r"cu_seqlens\[0\] is 4, wanted 0"),
    "negative": (([-4, 8, 12], [0, 8, 12]), None, 2, r"cu_seqlens\[0\] is -4, wanted 0"),
    "beyond-the-buffer": (([0, 8, 16], [0, 8, 16]), None, 2, r"total_rows is 12 but cu_seqlens_padded ends at 16"),
    "far-beyond": (([0, 8, 2**31 - 1], [0, 8, 2**31 - 1]), None, 2, r"total_rows is 12 but .* ends at 2147483647"),
    "keys": (([0, 8, 12], [0, 8, 12]), ([0, 9, 5], [0, 9, 9]), 1, r"cu_seqlens decreases from 9 at index 1 to 5"),
    "keys-beyond-the-buffer": (([0, 8, 12], [0, 8, 12]), ([0, 9, 13], [0, 9, 13]), 1, r"total_rows is 12 but .* at 13"),
}


def wrong_batches(cupy, offsets, keys):
    def batch(cu_seqlens, padded):
        arrays = (cupy.asarray(np.array(x, np.int32)) for x in (cu_seqlens, padded))
        return thdattn.PackedBatch(*arrays, total_rows=12)

    return batch(*offsets), keys and batch(*keys)


@pytest.mark.parametrize("sharding", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("what", WRONG)
def test_wrong_lengths_make_every_result_nan(cupy, unnoticed, what, sharding):
    offsets, keys, cp_size, _ = WRONG[what]
    if what == "no-multiple" and sharding == "contiguous":
        pytest.skip("any length will do")
    batch, key_batch = wrong_batches(cupy, offsets, keys)

    def program(comm):
        attention = thdattn.CPAttention(comm, 2, 64, 1, engine="cuda")
        plan = attention.plan(batch, sharding, key_batch)
        assert plan.valid.all() and (plan.key_ranges == -1).all() and not plan.query_ranges.any()
        q, k = cupy.ones((12 // cp_size, 2, 64), BFLOAT16), cupy.ones((12 // cp_size, 1, 64), BFLOAT16)
        return results(attention, plan, (q, k, k, q))

    for made in thdattn.comm.run_local(cp_size, program):
        for x in made:
            assert x.size and np.isnan(x.astype(np.float32)).all()


@pytest.mark.parametrize("divides", [False, True], ids=["whole-tiles", "divided-keys"])
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_wrong_lengths_make_every_result_nan_at_every_head_dim(cupy, kernels, unnoticed, monkeypatch, dims, divides):
    """In memory that holds zeros, so that NaN is what was written."""
    from thdattn.engines import cuda
    from thdattn.engines.cuda import launch, scheduler
    for module in (cuda, launch):
        monkeypatch.setattr(module, "empty", cupy.zeros)
    if not divides:
        monkeypatch.setattr(scheduler, "splits_keys", lambda *of: False)
    batch = thdattn.PackedBatch(cupy.asarray([0, 300, 200, 400], np.int32), total_rows=400)
    attention = thdattn.CPAttention(SINGLE, 2, dims[0], 1, dims[1], engine="cuda")
    plan = attention.plan(batch)
    q, k, v, dout = (cupy.ones((400, heads, dim), BFLOAT16)
                     for heads, dim in ((2, dims[0]), (1, dims[0]), (1, dims[1]), (2, dims[1])))
    for x in results(attention, plan, (q, k, v, dout)):
        assert x.size and np.isnan(x.astype(np.float32)).all()


def test_results_follow_lengths_that_become_wrong_and_right_again(cupy, unnoticed):
    """Though the host has learned that the lengths before were right."""
    offsets = cupy.asarray(np.array([0, 8, 12], np.int32))
    attention = thdattn.CPAttention(SINGLE, 2, 64, 1, engine="cuda")
    plan = attention.plan(thdattn.PackedBatch(offsets, total_rows=12))
    q, k = cupy.ones((12, 2, 64), BFLOAT16), cupy.ones((12, 1, 64), BFLOAT16)
    for middle in (8, 13, 5, 13, 13, 12):
        offsets[1] = middle
        plan.refresh()
        for x in results(attention, plan, (q, k, k, q)):  # which waits for the GPU
            x = x.astype(np.float32)
            assert np.isnan(x).all() if middle > 12 else np.isfinite(x).all()
        assert plan.arrays.lengths.are_right() is (middle <= 12)


def test_the_host_does_not_know_the_lengths_of_a_graph(cupy):
    offsets = cupy.asarray(np.array([0, 8, 12], np.int32))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        plan = thdattn.CPAttention(SINGLE, 2, 64, 1, engine="cuda").plan(thdattn.PackedBatch(offsets, total_rows=12))
        stream.synchronize()
        lengths = plan.arrays.lengths
        assert lengths.are_right()
        stream.begin_capture()
        assert not lengths.are_right()
        plan.refresh()
        graph = stream.end_capture()
        for _ in range(2):
            assert not lengths.are_right()
            graph.launch(stream)
            stream.synchronize()


@pytest.mark.parametrize("what", WRONG)
def test_wrong_lengths_raise_at_the_check_and_at_the_next_call(cupy, what):
    offsets, keys, cp_size, message = WRONG[what]
    batch, key_batch = wrong_batches(cupy, offsets, keys)
    right = thdattn.PackedBatch([0, 8, 12])

    def program(comm):
        attention = thdattn.CPAttention(comm, 2, 64, 1, engine="cuda")
        plan = attention.plan(batch, "dual_chunk", key_batch)
        q, k = cupy.ones((12 // cp_size, 2, 64), BFLOAT16), cupy.ones((12 // cp_size, 1, 64), BFLOAT16)
        with pytest.raises(ValueError, match=message):
            plan.check()
        if cp_size == 1:
            with pytest.raises(ValueError, match=message):
                attention.forward(q, k, k, plan)
        else:
            assert np.isnan(to_host(attention.forward(q, k, k, plan)[0]).astype(np.float32)).all()
        with pytest.raises(ValueError, match=message):
            attention.plan(right)
        again = attention.plan(right)
        again.check()
        assert not any(np.isnan(x.astype(np.float32)).any() for x in results(attention, again, (q, k, k, q)))

    thdattn.comm.run_local(cp_size, program)


def test_lengths_without_a_row_may_be_wrong_too(cupy, request):
    attention = thdattn.CPAttention(SINGLE, 1, 64, engine="cuda")
    offsets = cupy.asarray(np.array([0, 4], np.int32))
    queries, keys = (thdattn.PackedBatch(offsets, total_rows=rows) for rows in (4, 0))
    plan = attention.plan(queries, key_batch=keys)
    with pytest.raises(ValueError, match=r"total_rows is 0 but cu_seqlens_padded ends at 4"):
        plan.check()
    request.getfixturevalue("unnoticed")
    q, k = cupy.ones((4, 1, 64), BFLOAT16), cupy.ones((0, 1, 64), BFLOAT16)
    assert all(np.isnan(x.astype(np.float32)).all() for x in results(attention, plan, (q, k, k, q)))


def test_offsets_that_changed_since_are_said_to_have(cupy):
    offsets = cupy.asarray(np.array([0, 8, 4], np.int32))
    plan = thdattn.CPAttention(SINGLE, 1, 64, engine="cuda").plan(thdattn.PackedBatch(offsets, total_rows=8))
    offsets[2] = 8
    with pytest.raises(ValueError, match=r"were wrong when they were planned, and have changed since"):
        plan.check()
