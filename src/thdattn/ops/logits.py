"""What kernels are told of logits and sinks, see kernels/logits.cuh, and the gradient of sinks."""

from __future__ import annotations

import functools
import math
from typing import Any

import cupy
import numpy as np

from thdattn import jit
from thdattn.instances import Kind, sinks_grad_kernel
from thdattn.ops import launch
from thdattn.ops.launch import Array
from thdattn.structs import LOGITS

LOG2E = math.log2(math.e)

# tanh(x) = x * (TANH[n][0] + TANH[n][1] x^2 + ...), of n terms, with a relative error of 1.2e-6 for |x| <= REACH[n]; it
# rises everywhere.
TANH = {3: np.array([0.9999988389, -0.3331002000, 0.1263393500]),
        5: np.array([0.9999989943, -0.3332537195, 0.1323056549, -0.0491801404, 0.0121001375])}  # fmt: skip
REACH = {3: 0.3, 5: 0.8}
VANISHING = 20.0  # probabilities below exp(-this) of the largest: all of a row together are less than 16 bits round
TINY = 1e-45  # the least float32 above 0

SINKS_BLOCKS = 2048  # of thd_attn_sinks_grad, some for each multiprocessor of the largest GPUs
SINKS_ROWS = 64  # a block has at least so many


def kind_of(softcap: float, sinks: Array | None) -> Kind:
    """Which kernels the forward needs."""
    return Kind(caps=softcap > 0, sinks=sinks is not None)


def logits_of(softmax_scale: float, softcap: float) -> Any:
    """Logits<false> or Logits<true>, by value."""
    return _capped(softmax_scale, softcap) if softcap else np.float32(softmax_scale)


@functools.lru_cache(maxsize=64)
def _capped(softmax_scale: float, softcap: float) -> Any:
    per_score, cap = softmax_scale / softcap, softcap * LOG2E
    return np.array((softmax_scale, cap, 1 / cap, 2 * per_score * LOG2E, REACH[5] / per_score,
                     *(_curve(terms, per_score, softcap) for terms in (3, 5))), LOGITS)[()]  # fmt: skip


def _curve(terms: int, per_score: float, softcap: float) -> tuple[float, float, Array]:
    """Curve: `low`, `high` and `coefficients`."""
    powers = 2.0 * np.arange(terms) + 1
    below = np.linspace(-6, -REACH[terms], 1000)[:, None]  # lower still, both probabilities are those at -6, or less
    found, right = (np.exp(softcap * x) for x in (below**powers @ TANH[terms], np.tanh(below[:, 0])))
    lost = np.abs(found - right).max()
    coefficients = LOG2E * softcap * TANH[terms] * per_score**powers
    coefficients[-1] = max(coefficients[-1], TINY)  # as 0 times the infinity that hides a key is no number
    high = softcap * math.tanh(REACH[terms])
    return LOG2E * (VANISHING + math.log(max(lost, TINY))), LOG2E * high, coefficients


def lse_unit(softmax_scale: float, softcap: float) -> np.float32:
    """What thd_attn_delta divides lse by."""
    return np.float32(math.log(2) if softcap else softmax_scale)


def sinks_grad(dout: Array, out: Array, lse: Array, sinks: Array) -> Array:
    """What this rank's query rows give to the gradient of sinks; see reference.sinks_grad."""
    num_rows, num_heads, v_head_dim = out.shape
    parts = max(1, min(num_rows // SINKS_ROWS, SINKS_BLOCKS // num_heads))
    shares = launch.empty((parts, num_heads), np.float32)
    kernel = jit.kernel(*sinks_grad_kernel(out.dtype.name, v_head_dim))
    kernel((num_heads, parts), 256, (out, dout, lse, sinks, shares, np.int32(num_rows)))
    return cupy.sum(shares, axis=0)
