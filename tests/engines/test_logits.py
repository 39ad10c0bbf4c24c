"""The polynomials that stand for capped logits, as kernels get them. No GPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")
from thdattn.engines.cuda.softcap import DIGITS, LOGITS_ERR, SLOPES_ERR, logits_of

SCALE = 0.125
CURVES = "two", "three", "five"
CAPS = pytest.mark.parametrize("softcap", [0.5, 5.0, 15.0, 30.0, 50.0, 1e3, 1e4, 1e30])


def logits_by(curve, score: np.ndarray) -> np.ndarray:
    """As kernels compute them, in float32, but for the last step's powers of two; a product is not rounded in a sum."""
    square = np.float64(score * score)
    total = np.full_like(score, curve["coefficients"][-1])
    for coefficient in curve["coefficients"][-2::-1]:
        total = np.float32(total * square + np.float64(coefficient))
    return np.log(2) * np.float64(score * total)


def scores_up_to(reach: np.float32) -> np.ndarray:
    return np.linspace(-reach, reach, 20_001, dtype=np.float32)


@pytest.mark.parametrize("name", CURVES)
@CAPS
def test_a_curve_is_the_logit_as_far_as_it_reaches(softcap, name):
    made = logits_of(SCALE, softcap)
    score = scores_up_to(made[name]["reach"])
    right = softcap * np.tanh(score.astype(np.float64) * SCALE / softcap)
    assert made[name]["reach"] > 0
    assert (np.abs(logits_by(made[name], score) - right) <= 1.01 * LOGITS_ERR + 4 * DIGITS * np.abs(right)).all()


@CAPS
def test_slopes_beside_the_shortest_curve_are_its_derivative(softcap):
    made = logits_of(SCALE, softcap)
    score = scores_up_to(made["two"]["reach"])
    right = 1 - np.tanh(score.astype(np.float64) * SCALE / softcap) ** 2
    found = made["slopes"][0] + made["slopes"][1] * (score * score)
    np.testing.assert_allclose(found, right, rtol=0, atol=1.01 * SLOPES_ERR)


@pytest.mark.parametrize(("softcap", "reaches"), [(50.0, (6.5, 16, 40)), (30.0, (4.5, 10, 25)), (15.0, (2.3, 6, 13))])
def test_curves_reach_the_logits_that_they_are_for(softcap, reaches):
    made = logits_of(SCALE, softcap)
    for name, reach in zip(CURVES, reaches, strict=True):
        assert made[name]["reach"] * SCALE >= reach, name


@CAPS
def test_a_hidden_key_stays_hidden(softcap):
    """The curves that are taken where there is one make -inf of its score, and no NaN."""
    made = logits_of(SCALE, softcap)
    for name in ("three", "five"):
        assert logits_by(made[name], np.array([-np.inf], np.float32)) == -np.inf, name
