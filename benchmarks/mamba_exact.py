"""Mamba-2 mixers and their gradients in float64, from the rule on pairs of rows, and the errors of results.

Row j of a sequence counts for row i >= j as exp(a_(j+1) + ... + a_i) dt_j (C_i . B_j), a = A dt; out is gated. All
pairs of a sequence are held at once, so it is for small cases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from accuracy import Error, error
from mamba_cases import MixerCase, MixerInputs
from numpy.typing import NDArray

from thdattn.mamba.shape import Mamba2Weights

Results = dict[str, Any]  # by name, float64
OF_ROWS = ("out", "dz", "dx", "dB", "dC", "ddt")
OF_WEIGHTS = ("dconv_weight", "dconv_bias", "dA_log", "dD", "ddt_bias")  # as in Mamba2Weights
MIXER = (*OF_ROWS, *OF_WEIGHTS)
SCAN = (*OF_ROWS, *OF_WEIGHTS[2:])
PARTS = {"mixer": MIXER, "scan": SCAN}  # names of results


def exact_scan(case: MixerCase, inputs: MixerInputs, xp: Any) -> dict[str, NDArray[np.float64]]:
    """Compute the results SCAN of a scan whose x, B and C are inputs.channels; return them on the host.

    Args:
        inputs: on xp's device, in the dtypes that the kernels get.
        xp: cupy or numpy, which computes.
    """
    return _each_sequence(case, inputs, lambda rows: _scan(case, rows, rows.channels, xp), xp)


def exact_mixer(case: MixerCase, inputs: MixerInputs, xp: Any) -> dict[str, NDArray[np.float64]]:
    """Compute the results MIXER, with the convolution of zxbcdt; return them on the host."""
    return _each_sequence(case, inputs, lambda rows: _mixer(case, rows, xp), xp)


def errors(found: Mapping[str, Any], wanted: Mapping[str, NDArray[np.float64]]) -> dict[str, Error]:
    """Return the errors of results by name; NaN where a result has one."""
    return {name: error(np.asarray(found[name]).reshape(right.shape), right) for name, right in wanted.items()}


def of_draws(errors: Sequence[Error]) -> Error:
    """Return the error of several draws together: one draw says little of few numbers, such as a gradient of rates."""
    return Error(math.sqrt(sum(error.rms**2 for error in errors) / len(errors)), max(x.largest for x in errors))


def _each_sequence(case: MixerCase, inputs: MixerInputs, of_rows: Any, xp: Any) -> dict[str, NDArray[np.float64]]:
    """Compute all sequences in float64: concatenate rows, and add up gradients of weights."""
    zxbcdt, dout, channels = (x.astype(np.float64) for x in (inputs.zxbcdt, inputs.dout, inputs.channels))
    weights = Mamba2Weights(*(x.astype(np.float64) for x in inputs.weights))
    parts: Sequence[Results] = [
        of_rows(MixerInputs(zxbcdt[begin:end], weights, dout[begin:end], channels[begin:end]))
        for begin, end in pairwise(np.cumsum([0, *case.lengths]).tolist())
    ]
    results = {name: xp.concatenate([part[name] for part in parts]) if name in OF_ROWS
               else sum(part[name] for part in parts) for name in parts[0]}
    return {name: x if isinstance(x, np.ndarray) else x.get() for name, x in results.items()}


def _mixer(case: MixerCase, rows: MixerInputs, xp: Any) -> Results:
    shape, (weight, bias, *_) = case.shape, rows.weights
    _, xbc, _ = shape.parts(rows.zxbcdt)
    reach, length = shape.reach, len(xbc)
    behind_zeros = xp.concatenate([xp.zeros((reach, shape.channels)), xbc])
    pre = bias + sum(weight[:, tap] * behind_zeros[tap : tap + length] for tap in range(shape.conv_width))
    results = _scan(case, rows, pre * _sigmoid(pre, xp), xp)
    dchannels = xp.concatenate([results[name] for name in ("dx", "dB", "dC")], axis=1)
    dpre = dchannels * _slope(pre, xp)
    before_zeros = xp.concatenate([dpre, xp.zeros((reach, shape.channels))])
    dxbc = sum(weight[:, tap] * before_zeros[reach - tap : reach - tap + length] for tap in range(shape.conv_width))
    of_weight = [(dpre * behind_zeros[tap : tap + length]).sum(axis=0) for tap in range(shape.conv_width)]
    results |= dict(zip(("dx", "dB", "dC"), (x.reshape(length, -1) for x in shape.split(dxbc)), strict=True))
    results |= {"dconv_weight": xp.stack(of_weight, axis=1), "dconv_bias": dpre.sum(axis=0)}
    return {name: results[name] for name in MIXER}


def _scan(case: MixerCase, rows: MixerInputs, channels: Any, xp: Any) -> Results:
    shape, (_, _, a_log, d, dt_bias) = case.shape, rows.weights
    z, _, raw = shape.parts(rows.zxbcdt)
    length = len(z)
    x, b, c = (part.transpose(1, 0, 2) for part in shape.split(channels))  # heads or groups first
    dt, rates, d = xp.logaddexp(0, raw + dt_bias).T, -xp.exp(a_log), d[:, None, None]
    sums = xp.cumsum(rates[:, None] * dt, axis=1)
    decay = xp.tril(xp.exp(xp.minimum(sums[:, :, None] - sums[:, None], 0)))
    decayed = decay * dt[:, None]  # weight of row j for row i, without C B^T
    products = xp.repeat(c @ b.transpose(0, 2, 1), case.heads // case.groups, axis=0)
    y = (products * decayed) @ x + d * x

    def by_row(part: Any) -> Any:
        return part.transpose(1, 0, 2).reshape(length, -1)

    dout = rows.dout
    dy = (dout * z * _sigmoid(z, xp)).reshape(length, case.heads, case.head_dim).transpose(1, 0, 2)
    pairs = dy @ x.transpose(0, 2, 1)
    dproducts = (pairs * decayed).reshape(case.groups, -1, length, length).sum(axis=1)
    counted = pairs * products * decay
    dsums = (counted * dt[:, None]).sum(axis=2) - (counted * dt[:, None]).sum(axis=1)
    da = xp.cumsum(dsums[:, ::-1], axis=1)[:, ::-1]
    ddt = counted.sum(axis=1) + rates[:, None] * da
    draw = ddt.T * _sigmoid(raw + dt_bias, xp)
    return {
        "out": by_row(y) * z * _sigmoid(z, xp),
        "dz": dout * by_row(y) * _slope(z, xp),
        "dx": by_row((products * decayed).transpose(0, 2, 1) @ dy + d * dy),
        "dB": by_row(dproducts.transpose(0, 2, 1) @ c),
        "dC": by_row(dproducts @ b),
        "ddt": draw,
        "dA_log": rates * (dt * da).sum(axis=1),
        "dD": (dy * x).sum(axis=(1, 2)),
        "ddt_bias": draw.sum(axis=0),
    }


def _sigmoid(x: Any, xp: Any) -> Any:
    return 0.5 * (1 + xp.tanh(0.5 * x))


def _slope(x: Any, xp: Any) -> Any:
    share = _sigmoid(x, xp)
    return share * (1 + x * (1 - share))
