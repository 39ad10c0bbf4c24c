"""The polynomials that stand for capped logits, as kernels get them. No GPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")
from thdattn.ops.logits import LOG2E, logits_of

SCALE = 0.125


@pytest.mark.parametrize("curve", ["below", "near"])
@pytest.mark.parametrize("softcap", [0.5, 5.0, 15.0, 30.0, 50.0, 1e4])
def test_probabilities_by_a_curve_are_those_by_tanh(softcap, curve):
    """In every row whose largest logit is between its bounds, but for logits of hundreds."""
    made = logits_of(SCALE, softcap)[curve]
    low, high, coefficients = float(made["low"]), float(made["high"]), made["coefficients"].astype(np.float64)
    score = np.concatenate([-np.geomspace(1e3, 1e-3, 4000), np.linspace(0, 2, 4000)]) * softcap / SCALE
    found = score * np.polynomial.polynomial.polyval(score**2, coefficients)
    right = LOG2E * softcap * np.tanh(score * SCALE / softcap)
    assert (np.diff(found) > 0).all()
    tops = np.flatnonzero((max(low, -200) <= found) & (found <= min(high, 200)))
    assert len(tops) or softcap < 20
    for top in tops[:: max(1, len(tops) // 50)]:
        p, wanted = (2.0 ** (x[: top + 1] - x[top]) for x in (found, right))
        np.testing.assert_allclose(p, wanted, rtol=1e-4, atol=3e-9)
    if len(tops):
        np.testing.assert_allclose(found[tops], right[tops], rtol=2e-6)


@pytest.mark.parametrize("softcap", [5.0, 50.0, 1e4, 1e30])
def test_a_hidden_key_stays_hidden(softcap):
    """Sums of products with the infinity of its score are no NaN: every curve's last coefficient is above 0."""
    made = logits_of(SCALE, softcap)
    for curve in ("below", "near"):
        assert made[curve]["coefficients"][-1] > 0, curve
