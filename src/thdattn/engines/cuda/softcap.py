"""Kernel arguments for logits and sinks, see kernels/logits.cuh, and the gradient of sinks."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from numpy.polynomial import chebyshev

from thdattn.engines.cuda import launch
from thdattn.engines.cuda.launch import Array
from thdattn.jit import compiler
from thdattn.jit.structs import LOGITS
from thdattn.kernels.instances import Kind, instance

LOG2E = math.log2(math.e)

# Largest errors of a curve, besides float32 rounding: a fifth of the effect of float16 rounding on probabilities.
LOGITS_ERR, SLOPES_ERR, DIGITS = 4e-5, 5e-5, 2.0**-23
LEAST = 1e-45  # the smallest float32 above 0
FARTHEST = 1e18  # scores up to this one have finite squares in float32

SINKS_BLOCKS = 2048  # thread blocks of thd_attn_sinks_grad: several per multiprocessor of the largest GPUs
SINKS_ROWS = 64  # least rows of a block


def kind_of(softcap: float, sinks: Array | None) -> Kind:
    """Return the kind of kernel that the forward needs."""
    return Kind(caps=softcap > 0, sinks=sinks is not None)


def logits_of(softmax_scale: float, softcap: float) -> Any:
    """Return Logits<false> or Logits<true>, to be passed by value."""
    return _capped(softmax_scale, softcap) if softcap else np.float32(softmax_scale)


@functools.lru_cache(maxsize=64)
def _capped(softmax_scale: float, softcap: float) -> Any:
    per_score, cap = softmax_scale / softcap, softcap * LOG2E
    steep = _farthest(lambda reach: _error(_slope, reach, 2) <= SLOPES_ERR)
    two, three, five = (_curve(terms, per_score, softcap, most) for terms, most in ((2, steep), (3, 2.0), (5, 2.0)))
    slopes = _fit(_slope, two[0] * per_score, 2) * per_score ** np.array([0, 2])
    return np.array((softmax_scale, cap, 1 / cap, 2 * per_score * LOG2E, slopes, two, three, five), LOGITS)[()]


def _curve(terms: int, per_score: float, softcap: float, most: float) -> tuple[float, Array]:
    """Return the Curve's `reach`, at most `most` caps, and its `coefficients`, which are float32 in kernels."""
    powers = 2.0 * np.arange(terms) + 1

    def coefficients(reach: float) -> Array:
        found = (LOG2E * softcap * _fit(np.tanh, reach, 2 * terms - 1) * per_score**powers).astype(np.float32)
        if terms > 2:  # 0 times the infinity of a masked key would be NaN
            found[-1] = max(found[-1], LEAST)
        return found

    def is_right(reach: float) -> bool:
        x = np.linspace(0, reach, 400)[1:, None]
        found, right = (x / per_score) ** powers @ np.float64(coefficients(reach)) / LOG2E, softcap * np.tanh(x[:, 0])
        return bool((np.abs(found - right) <= LOGITS_ERR + DIGITS * right).all())

    reach = min(_farthest(is_right), most, FARTHEST * per_score)
    return reach / per_score, coefficients(reach)


def _farthest(is_right: Callable[[float], bool]) -> float:
    """Return the largest reach, in caps, for which is_right holds, to 2 percent."""
    return next(reach for reach in (2 * 0.98**i for i in itertools.count()) if is_right(reach))


def _slope(x: Array) -> Array:
    return 1 - np.tanh(x) ** 2


def _fit(function: Callable[[Array], Array], reach: float, degree: int) -> Array:
    """Return the nonzero coefficients of an odd or even polynomial, near the best approximation up to `reach`."""
    series = chebyshev.chebinterpolate(lambda x: function(reach * x), degree + 20)[: degree + 1]
    return (chebyshev.cheb2poly(series) / reach ** np.arange(degree + 1.0))[degree % 2 :: 2]


def _error(function: Callable[[Array], Array], reach: float, degree: int) -> float:
    x = np.linspace(0, reach, 400)
    fit = x ** (degree % 2) * np.polynomial.polynomial.polyval(x**2, _fit(function, reach, degree))
    return float(np.abs(fit - function(x)).max())


def lse_unit(softmax_scale: float, softcap: float) -> np.float32:
    """Return the number by which thd_attn_delta divides lse."""
    return np.float32(math.log(2) if softcap else softmax_scale)


def sinks_grad(dout: Array, out: Array, lse: Array, sinks: Array) -> Array:
    """Compute this rank's partial sum of the gradient of sinks; see reference.sinks_grad."""
    num_rows, num_heads, v_head_dim = out.shape
    parts = max(1, min(num_rows // SINKS_ROWS, SINKS_BLOCKS // num_heads))
    # One array holds the gradient, then partial sums, so that these live as long as a replayed graph writes them.
    made = launch.empty((1 + parts, num_heads), np.float32)
    kernel = compiler.kernel(*instance("thd_attn_sinks_grad", out.dtype.name, v_head_dim))
    kernel((num_heads, parts), 256, (out, dout, lse, sinks, made[1:], np.int32(num_rows)))
    return cupy.sum(made[1:], axis=0, out=made[0])
