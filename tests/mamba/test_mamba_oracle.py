"""The oracle of the Mamba-2 mixer against cases worked by hand and derivatives by complex steps; never an engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mixer_cases import BFLOAT16, CASES, FIELDS, FLOAT64, Case, random_inputs, truth

from thdattn.mamba import oracle
from thdattn.mamba.oracle import FIELDS_WITH_NORM, Norm, Sizes

STEP = 1e-30


def silu(x):
    return x / (1 + np.exp(-x))


def test_two_rows_worked_by_hand():
    # One head, one number each; the convolution sees two rows: x, B, C meet weights (1, 2), (0, 1), (0, 1).
    zxbcdt = np.array([[0.5, 1.0, 2.0, 3.0, 0.0], [-1.0, -2.0, 1.0, 4.0, 1.0]])
    weights = (np.array([[1.0, 2], [0, 1], [0, 1]]), np.array([0.0, 0.5, 0]), *np.array([[np.log(2)], [3.0], [0.25]]))
    out = oracle.recurrence(zxbcdt, weights, Sizes(1, 1, 1))
    dt = np.log(1 + np.exp([0.25, 1.25]))
    x, b, c = silu(np.array([2.0, -4 + 1])), silu(np.array([2.5, 1.5])), silu(np.array([3.0, 4]))
    state = dt[0] * x[0] * b[0]
    first = state * c[0] + 3 * x[0]
    state = np.exp(-2 * dt[1]) * state + dt[1] * x[1] * b[1]
    second = state * c[1] + 3 * x[1]
    np.testing.assert_allclose(out[:, 0], [first * silu(0.5), second * silu(-1.0)], rtol=1e-14)


def test_a_row_of_two_groups_normalised_by_hand():
    # Two heads of two columns; as B and C are 0, y is x behind the convolution and silu: of 3, 4, 6 and 8.
    zxbcdt = np.array([[1.0, 1, 1, 1, 30, 40, 60, 80, 0, 0, 0, 0]])
    conv_weight = np.array([[0.1]] * 4 + [[0.0]] * 2)
    weights = conv_weight, np.zeros(6), np.zeros(2), np.ones(2), np.zeros(2), np.arange(1.0, 5)
    y, gate = silu(np.array([3.0, 4, 6, 8])), silu(1.0)
    roots = np.repeat([np.sqrt((y[:2] ** 2).mean() + 1e-3), np.sqrt((y[2:] ** 2).mean() + 1e-3)], 2)
    before = oracle.recurrence(zxbcdt, weights, Sizes(2, 2, 1), Norm(False, 2, 1e-3))
    np.testing.assert_allclose(before[0], y / roots * [1, 2, 3, 4] * gate, rtol=1e-14)
    after = oracle.recurrence(zxbcdt, weights, Sizes(2, 2, 1), Norm(True, 1, 0.25))
    gated = y * gate
    np.testing.assert_allclose(after[0], gated / np.sqrt((gated**2).mean() + 0.25) * [1, 2, 3, 4], rtol=1e-14)


@pytest.mark.parametrize("case", [Case("a", (9,)), Case("b", (3,), sizes=Sizes(2, 2, 1, 2)),
                                  Case("c", (6,), sizes=Sizes(6, 1, 2, 3), conv_width=2),
                                  Case("after", (5,), norm=Norm(True, 2)), Case("before", (5,), norm=Norm(False, 2)),
                                  Case("eps", (4,), norm=Norm(True, 1, 0.5))], ids=str)
def test_gradients_are_the_complex_steps(case):
    zxbcdt, weights, dout = random_inputs(case, FLOAT64)
    arrays = [zxbcdt, *weights]
    exact = oracle.mixer(zxbcdt, weights, dout, case.sizes, norm=case.norm)
    for number, field in enumerate(FIELDS_WITH_NORM[1 : 2 + len(weights)]):
        wanted = np.zeros(arrays[number].size)
        for i in range(len(wanted)):
            moved = [x.astype(complex) for x in arrays]
            moved[number].reshape(-1)[i] += 1j * STEP
            out = oracle.recurrence(moved[0], tuple(moved[1:]), case.sizes, case.norm)
            wanted[i] = (dout * out.imag).sum() / STEP
        np.testing.assert_allclose(getattr(exact, field).ravel(), wanted, rtol=1e-11, atol=1e-13, err_msg=field)


@pytest.mark.parametrize("norm", [None, Norm(True), Norm(False)], ids=str)
@pytest.mark.parametrize("name", ["resets-inside-chunks", "one-group", "a-group-per-head", "convolution-of-nine"])
def test_plain_maths_is_the_recurrence_but_for_its_rounding(name, norm):
    case = replace(CASES[name], norm=norm)
    exact, plain, rounded = truth(case, FLOAT64), truth(case, FLOAT64, FLOAT64), truth(case, BFLOAT16, BFLOAT16)
    for field in FIELDS_WITH_NORM if norm else FIELDS:
        wanted = getattr(exact, field)
        np.testing.assert_allclose(getattr(plain, field), wanted, rtol=1e-10, atol=1e-11, err_msg=field)
        in_bfloat16 = getattr(truth(case, BFLOAT16), field)
        error = np.sqrt(np.mean((getattr(rounded, field) - in_bfloat16) ** 2) / np.mean(in_bfloat16**2))
        assert 1e-4 < error < 2e-2, field


def test_documents_do_not_see_each_other_nor_padding():
    case = Case("three", (3, 0, 4), padded=(5, 2, 4))
    zxbcdt, weights, dout = random_inputs(case, FLOAT64)
    together = oracle.packed_mixer(case.batch, zxbcdt, weights, dout, case.sizes)
    for begin, length in ((0, 3), (7, 4)):
        rows = slice(begin, begin + length)
        alone = oracle.mixer(zxbcdt[rows], weights, dout[rows], case.sizes)
        np.testing.assert_array_equal(together.out[rows], alone.out)
        np.testing.assert_array_equal(together.zxbcdt[rows], alone.zxbcdt)
    assert not together.out[3:7].any() and not together.zxbcdt[3:7].any()
