"""Prefix trees on a GPU: arrays of plans, and both sets of kernels against the oracle, on one rank and on several."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16, Case, assert_same_bits, check, outline_of, random_inputs, run, to_host
from tree_cases import MIXED, TREES, random_case, unrolled
from ways import TELLING, WAYS, run_way

import thdattn
from thdattn.graphs import CudaGraphConfig, Graphs, StaticPack
from thdattn.kernels.configs import TILES
from thdattn.plan.ranges import host_arrays

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

# Nodes that begin and end inside tiles, and tiles in the middle of key ranges that no query of a tile sees.
FAN = Case("trees-fan", (300, *(150,) * 8, 20), parents=(-1, *(0,) * 8, -1), slack=50)
TURNS = Case("trees-turns", (130, 90, 70, 140, 0, 200, 64, 64, 1, 129), parents=(-1, 0, 1, 1, 0, 4, 4, 0, 7, 7))
NONE = np.iinfo(np.int32).max
OPTIONS = ({}, {"deterministic": True}, {"softcap": 5.0}, {"sinks": True}, {"deterministic": True, "softcap": 5.0})


@pytest.mark.parametrize("case", [*TREES, FAN, TURNS], ids=str)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_arrays_of_a_plan_are_those_of_the_host(cupy, case, cp_size):
    from thdattn.engines import cuda

    for strategy in ("dual_chunk", "contiguous", "balanced"):
        sharding = thdattn.Sharding(replace(case, sharding=strategy).batch(cp_size), cp_size, strategy)
        for keys_of in (None, *range(cp_size)) if strategy != "balanced" else (None,):
            args = sharding, cp_size - 1, (-1, 0), (128, 64)
            wanted = host_arrays(*args, keys_of=keys_of)
            made = cuda.plan_arrays(outline_of(cuda, *args, keys_of=keys_of))
            for field, x in vars(wanted).items():
                if x is not None:
                    assert getattr(made, field).dtype == x.dtype, field
                    np.testing.assert_array_equal(to_host(getattr(made, field)), x, err_msg=field)
            ends = to_host(made.query_ends)
            seen_until = np.pad(wanted.query_ranges[:, 1], (0, len(ends) - len(wanted.query_ranges)))
            assert_ends(ends, wanted.key_ranges, seen_until, cp_size == 1)
            np.testing.assert_array_equal(to_host(made.group_ends), np.stack(
                [ends.reshape(-1, 64).min(1), seen_until.reshape(-1, 64).max(1)], axis=1))
            begins = np.full(len(ends), NONE)
            seen = wanted.query_ranges[:, 0] < wanted.query_ranges[:, 1]
            begins[: len(seen)][seen] = wanted.query_ranges[seen, 0]
            np.testing.assert_array_equal(to_host(made.group_begins), begins.reshape(-1, 64).min(1))


def assert_ends(found, key_ranges, seen_until, of_all_rows):
    """Assert that query_ends say where keys stop being seen, or NONE where no later row has them in its range.

    A row that sees no key of a rank has an empty range, and may count as a later one.
    """
    in_range_until = np.zeros(len(seen_until), np.int64)
    for row, (begin, end) in enumerate(key_ranges):
        in_range_until[begin:end] = row + 1
    is_hidden = (seen_until == 0) | (in_range_until > seen_until)
    assert np.where(is_hidden, found == seen_until, (found == NONE) | (not of_all_rows) & (found == seen_until)).all()


@pytest.mark.parametrize("n", [0, -1, -3, -400])
@pytest.mark.parametrize("case", [MIXED, TURNS], ids=str)
def test_shift_follows_the_path_to_the_root(cupy, case, n):
    """As on the host, whose test compares it with the paths."""
    def program(comm, engine, xp):
        plan = case.attention(comm, BFLOAT16, engine=engine).plan(case.batch(comm.size))
        return to_host(plan.shift(xp.asarray(plan.rows), n, fill=-7, comm=comm))

    for found, wanted in zip(*(thdattn.comm.run_local(2, lambda comm, of=of: program(comm, *of))
                               for of in (("cuda", cupy), ("reference", np))), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("case", [*TREES, FAN, TURNS, *map(random_case, range(6))], ids=str)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_trees_agree_with_the_oracle(cupy, kernels, case, cp_size):
    for sharding in ("dual_chunk", "contiguous"):
        this = replace(case, sharding=sharding)
        check(this, BFLOAT16, run(this, cp_size, BFLOAT16, xp=cupy, engine="cuda"))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_every_head_dim_takes_trees_with_every_option(cupy, kernels, dims, options):
    for base, heads in ((FAN, (4, 2)), (TURNS, (3, 3))):
        case = replace(base, name=f"{base.name}-{dims}-{options}", dims=dims, heads=heads, **options)
        for dtype in (BFLOAT16, np.dtype(np.float16)):
            check(case, dtype, run(case, 1, dtype, xp=cupy, engine="cuda"))


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_deterministic_gradients_of_trees_have_the_same_bits_on_every_run(cupy, kernels, dims):
    for base in (FAN, TURNS, random_case(3)):
        case = replace(base, name=f"{base.name}-{dims}-bits", dims=dims, heads=(6, 2), deterministic=True)
        assert_same_bits(*(run(case, 2, BFLOAT16, xp=cupy, engine="cuda") for _ in range(5)))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_method_and_sharding_takes_trees(cupy, kernels, way):
    for case in (MIXED, FAN, TURNS):
        case = replace(case, heads=way.heads)
        check(case, BFLOAT16, run_way(case, way, BFLOAT16, xp=cupy, engine="cuda"))


@pytest.mark.parametrize("way", TELLING, ids=str)
def test_deterministic_methods_take_trees(cupy, kernels, way):
    case = replace(TURNS, name="trees-deterministic", heads=way.heads, deterministic=True, sinks=True)
    check(case, BFLOAT16, run_way(case, way, BFLOAT16, xp=cupy, engine="cuda"))


def test_outputs_of_trees_are_those_of_the_unrolled_paths(cupy, kernels):
    case = replace(FAN, slack=0)
    batch = case.batch(1)
    paths, rows = unrolled(batch)
    layer = case.attention(thdattn.comm.init("single"), BFLOAT16, engine="cuda")
    q, k, v, _ = (np.asarray(x) for x in random_inputs(case, BFLOAT16))
    out, _ = layer.forward(*map(cupy.asarray, (q, k, v)), layer.plan(batch))
    of_paths, _ = layer.forward(*(cupy.asarray(x[rows]) for x in (q, k, v)), layer.plan(paths))
    out, of_paths = to_host(out)[rows].astype(float), to_host(of_paths).astype(float)
    assert np.linalg.norm(out - of_paths) < 4e-3 * np.linalg.norm(of_paths)


def test_windows_refuse_trees_and_mixers_refuse_captured_ones(cupy):
    case = replace(MIXED, slack=0)
    comm, batch = thdattn.comm.init("single"), case.batch(1)
    windowed = replace(case, window=(5, 0)).attention(comm, BFLOAT16, engine="cuda")
    mixer = thdattn.Mamba2Mixer(comm, 8, 64, 128, engine="cuda")
    graphs = Graphs(comm, CudaGraphConfig(impl="local", max_packed_nodes=20))
    with pytest.raises(ValueError, match="batch has trees, wanted a causal attention"):
        windowed.plan(batch)
    for planner, message in ((windowed, "batch has trees, wanted a causal attention"),
                             (mixer, "batch has trees with nodes on a GPU, wanted them on the host for a mixer")):
        with pytest.raises(ValueError, match=message):
            StaticPack(graphs, [planner], batch.total_rows)
