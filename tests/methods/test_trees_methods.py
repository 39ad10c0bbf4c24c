"""Attention over prefix trees on the NumPy engine: every method, sharding and option, and the unrolled paths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16, check, random_inputs, run
from tree_cases import MIXED, TREES, random_case, unrolled
from ways import MORE_WAYS, TELLING, WAYS, run_way

import thdattn
from thdattn import CPAttention
from thdattn.comm import run_local
from thdattn.methods import group_cast

FLOAT64 = np.dtype(np.float64)


def narrow(case, way):
    """The case with narrow heads, as many as the way can spread."""
    return replace(case, heads=way.heads, dims=(12, 8))


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("sharding", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("case", TREES, ids=str)
def test_trees_agree_with_the_oracle(case, sharding, cp_size):
    case = replace(case, sharding=sharding).slim()
    check(case, FLOAT64, run(case, cp_size, FLOAT64, engine="reference"))


@pytest.mark.parametrize("way", [*WAYS, *MORE_WAYS], ids=str)
def test_every_method_and_sharding_takes_trees(way):
    for case in (MIXED, TREES[3], TREES[6], TREES[7]):
        case = narrow(case, way)
        check(case, FLOAT64, run_way(case, way, FLOAT64, engine="reference"))


@pytest.mark.parametrize("seed", range(10))
def test_random_trees_agree_with_the_oracle(seed):
    for way in TELLING:
        case = narrow(random_case(seed), way)
        check(case, FLOAT64, run_way(case, way, FLOAT64, engine="reference"))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"softcap": 5.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)], ids=str)
def test_trees_take_every_option(heads, options, dtype):
    case = replace(MIXED, name=f"trees-mixed-{options}", heads=heads, **options).slim()
    check(case, dtype, run(case, 2, np.dtype(dtype), engine="reference"))
    for way in TELLING[:2]:
        check(case, dtype, run_way(case, way, np.dtype(dtype), engine="reference"))


@pytest.mark.parametrize("way", TELLING, ids=str)
def test_trees_take_groups_of_heads(way):
    case = replace(narrow(MIXED, way), name="trees-groups", sinks=True)
    groups = 2 if way.heads[1] % 2 == 0 else 1
    for options in ({"head_groups": groups, "keep_keys": True}, {"keep_keys": False}):
        check(case, FLOAT64, run_way(case, way, FLOAT64, engine="reference", **options))


@pytest.mark.parametrize("cp_size", [2, 3])
def test_an_exchange_that_overlaps_two_parts_of_the_tiles_gives_the_same(cp_size, monkeypatch):
    monkeypatch.setattr(group_cast, "is_worth_overlapping", lambda *_: True)
    case = replace(MIXED, sharding="balanced", dims=(12, 8))
    check(case, FLOAT64, run(case, cp_size, FLOAT64, engine="reference"))


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("case", [MIXED, *TREES[1:6], random_case(3)], ids=str)
def test_trees_give_what_the_unrolled_paths_give(case, cp_size):
    """Outputs are those of the paths. A gradient is the sum over the paths that share the row."""
    batch = case.batch(cp_size)
    paths, rows = unrolled(batch)
    q, k, v, _ = (batch.pack(np.split(x, batch.nodes[1:-1])) for x in random_inputs(case, FLOAT64))
    dout_paths = np.random.default_rng(5).standard_normal((len(rows), *q.shape[1:2], v.shape[2]))
    dout = np.zeros((len(q), *dout_paths.shape[1:]))
    np.add.at(dout, rows, dout_paths)

    def step(comm, of, arrays, sharding):
        layer = CPAttention(comm, case.heads[0], case.dims[0], case.heads[1], dtype=FLOAT64, engine="reference")
        plan = layer.plan(of, sharding)
        *qkv, grad = map(plan.shard, arrays)
        out, saved = layer.forward(*qkv, plan)
        return [plan.unshard(x, comm) for x in (out, *layer.backward(grad, saved))]

    tree = run_local(cp_size, lambda comm: step(comm, batch, (q, k, v, dout), case.sharding))[0]
    single = thdattn.comm.init("single")
    out, *gradients = step(single, paths, (q[rows], k[rows], v[rows], dout_paths), "contiguous")
    np.testing.assert_allclose(tree[0][rows], out, rtol=1e-10, atol=1e-12)
    for found, path in zip(tree[1:], gradients, strict=True):
        wanted = np.zeros_like(found)
        np.add.at(wanted, rows, path)
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-11)
