"""A mixer over prefix trees on the NumPy engine: what the oracle gives for the unrolled paths, one by one."""

from __future__ import annotations

import numpy as np
import pytest
from mixer_cases import (
    BFLOAT16,
    FIELDS,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    SIZES,
    Case,
    assert_equal,
    random_inputs,
    run,
    truth,
)  # fmt: skip
from tree_cases import MIXED, TREES, random_case, unrolled

import thdattn
from thdattn.mamba import oracle
from thdattn.mamba.oracle import Norm, Sizes
from thdattn.oracle import judge


def mixer_case(trees, **options):
    return Case(trees.name, (), trees=trees, **options)


def check(case, **options):
    assert_equal(run(case, 1, FLOAT64, **options), truth(case, FLOAT64), 1e-12)


@pytest.mark.parametrize("trees", [*TREES, *map(random_case, range(8))], ids=str)
def test_trees_give_what_the_paths_give(trees):
    check(mixer_case(trees))


@pytest.mark.parametrize("trees", [*TREES, random_case(9)], ids=str)
def test_the_oracle_of_trees_is_that_of_the_paths(trees):
    case = mixer_case(trees)
    zxbcdt, weights, dout = random_inputs(case, FLOAT64)
    paths, rows = unrolled(case.batch)
    first = np.zeros((len(rows), 1), bool)
    first[np.unique(rows, return_index=True)[1]] = True
    of_paths = oracle.packed_mixer(paths, zxbcdt[rows], weights, np.where(first, dout[rows], 0), case.sizes)
    of_trees = truth(case, FLOAT64)
    np.testing.assert_allclose(of_trees.out[rows], of_paths.out, rtol=1e-12, atol=1e-13)
    summed = np.zeros_like(of_trees.zxbcdt)
    np.add.at(summed, rows, of_paths.zxbcdt)
    np.testing.assert_allclose(of_trees.zxbcdt, summed, rtol=1e-10, atol=1e-12)
    for name in FIELDS[2:]:
        np.testing.assert_allclose(getattr(of_trees, name), getattr(of_paths, name), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("options", [
    {"sizes": Sizes(2, 3, 4, 1), "conv_width": 1}, {"sizes": Sizes(3, 2, 5, 3), "conv_width": 2},
    {"norm": Norm(True, 2)}, {"norm": Norm(False, 1)},
], ids=str)  # fmt: skip
def test_sizes_and_norms(options):
    check(mixer_case(MIXED, **options))
    check(mixer_case(TREES[1], **options), keep_activations=False)


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
def test_low_precision_errs_as_plain_maths_does(dtype):
    case = mixer_case(MIXED)
    made, exact, plain = run(case, 1, dtype), truth(case, dtype), truth(case, dtype, dtype)
    for name in ("out", "zxbcdt"):
        verdict = judge(made[name], getattr(exact, name), getattr(plain, name))
        assert verdict.good, f"{name}: {verdict}"


def test_the_attention_beside_it_has_the_same_plan():
    case = mixer_case(MIXED)
    mixer = case.mixer(thdattn.comm.init("single"), FLOAT64)
    attn = thdattn.CPAttention(thdattn.comm.init("single"), 2, SIZES.head_dim, dtype="float64", engine="reference")
    plan = attn.plan(case.batch, "contiguous")
    zxbcdt, weights, _ = random_inputs(case, FLOAT64)
    out, _ = mixer.forward(zxbcdt, weights, plan)
    np.testing.assert_array_equal(out, mixer.forward(zxbcdt, weights, mixer.plan(case.batch))[0])
    assert mixer.memory(case.batch).work > 0


def test_several_ranks_and_caches_refuse_trees():
    case = mixer_case(MIXED)

    def program(comm):
        with pytest.raises(ValueError, match=r"batch has trees, and the mixer 2 ranks .* wanted one rank and engine"):
            case.mixer(comm, FLOAT64).plan(case.batch)

    thdattn.comm.run_local(2, program)
    mixer = case.mixer(thdattn.comm.init("single"), FLOAT64)
    zxbcdt, weights, _ = random_inputs(case, FLOAT64)
    _, saved = mixer.forward(zxbcdt, weights, mixer.plan(case.batch))
    with pytest.raises(ValueError, match="saved is of trees, wanted one path per sequence of the cache"):
        mixer.cache(case.batch.num_seqs).fill(saved)
