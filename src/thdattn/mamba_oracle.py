"""A Mamba-2 mixer by its definition, row by row in float64, and as plain low-precision maths: what engines are held to.

It knows documents, not plans: it shares no code with engines, plans or ranks. `packed_mixer` cuts a packed batch into
documents by their lengths and computes each for itself, so padding never takes part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from thdattn.packing import PackedBatch

Array = NDArray[Any]


class Sizes(NamedTuple):
    """Of a mixer; conv_width is that of its weights."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int = 1


@dataclass
class Result:
    """Of one document or a packed batch, float64; gradients are 0 without dout.

    out: (rows, d_inner). zxbcdt: (rows, columns), gradient of the input.
    conv_weight, conv_bias, A_log, D, dt_bias: gradients of the weights.
    """

    out: Array
    zxbcdt: Array
    conv_weight: Array
    conv_bias: Array
    A_log: Array
    D: Array
    dt_bias: Array


FIELDS = ("out", "zxbcdt", "conv_weight", "conv_bias", "A_log", "D", "dt_bias")


def packed_mixer(
    batch: PackedBatch, zxbcdt: Array, weights: tuple[Array, ...], dout: Array, sizes: Sizes,
    rounding: DTypeLike | None = None,
) -> Result:
    """The mixer over every document of a packed batch, in sequence order, and its gradients.

    Args:
        batch: lengths and row offsets, on the host.
        zxbcdt, dout: (total_rows, columns), (total_rows, d_inner); padding is never read.
        weights: conv_weight, conv_bias, A_log, D, dt_bias.
        rounding: None for the recurrence in float64; a dtype for `plain`.
    """
    total = Result(np.zeros(dout.shape), np.zeros(zxbcdt.shape), *(np.zeros(x.shape) for x in weights))
    for begin, length in zip(batch.cu_seqlens_padded[:-1].tolist(), batch.lengths.tolist(), strict=True):
        rows = slice(begin, begin + length)
        if length:
            document = mixer(zxbcdt[rows], weights, dout[rows], sizes, rounding)
            total.out[rows], total.zxbcdt[rows] = document.out, document.zxbcdt
            for name in FIELDS[2:]:
                setattr(total, name, getattr(total, name) + getattr(document, name))
    return total


def mixer(
    zxbcdt: Array, weights: tuple[Array, ...], dout: Array, sizes: Sizes, rounding: DTypeLike | None = None
) -> Result:
    """The mixer over one document, and the gradients of sum(out * dout).

    Args:
        zxbcdt: (length, columns): z, x, B, C, dt; length > 0.
        weights, dout, sizes, rounding: as in packed_mixer.

    Returns:
        `Result`, float64 (for a baseline: the rounded values).
    """
    dtype = np.float64 if rounding is None else np.float32 if np.dtype(rounding).itemsize == 2 else np.dtype(rounding)
    zxbcdt, dout = zxbcdt.astype(dtype), dout.astype(dtype)
    weights = tuple(x.astype(dtype) for x in weights)
    if rounding is None:
        return _exact_gradients(_recurrence(zxbcdt, weights, sizes), zxbcdt, weights, dout, sizes)
    return _plain(zxbcdt, weights, dout, sizes, rounding)


class _Rows(NamedTuple):
    """What the recurrence makes: by row, of all heads; b and c of the group of each head."""

    z: Array
    before: Array
    x: Array
    b: Array
    c: Array
    raw: Array
    dt: Array
    states: list[Array]
    y: Array

    @property
    def out(self) -> Array:
        return self.y.reshape(self.z.shape) * _silu(self.z)


def recurrence(zxbcdt: Array, weights: tuple[Array, ...], sizes: Sizes) -> Array:
    """out of one document, row by row; also of complex numbers, for derivatives by complex steps."""
    return _recurrence(zxbcdt, weights, sizes).out


def _recurrence(zxbcdt: Array, weights: tuple[Array, ...], sizes: Sizes) -> _Rows:
    rows = _inputs(zxbcdt, weights, sizes)
    a_log, d = weights[2:4]
    state = np.zeros((sizes.num_heads, sizes.head_dim, sizes.state_dim), np.result_type(zxbcdt, *weights))
    y = np.zeros(rows.x.shape, state.dtype)
    states = [state]
    for t in range(len(zxbcdt)):
        kept = np.exp(-np.exp(a_log) * rows.dt[t])[:, None, None] * state
        state = kept + (rows.dt[t][:, None] * rows.x[t])[:, :, None] * rows.b[t][:, None, :]
        y[t] = (state * rows.c[t][:, None, :]).sum(axis=2) + d[:, None] * rows.x[t]
        states.append(state)
    return rows._replace(states=states, y=y)


def _inputs(zxbcdt: Array, weights: tuple[Array, ...], sizes: Sizes) -> _Rows:
    """All but states and y."""
    conv_weight, conv_bias, _, _, dt_bias = weights
    heads, groups = sizes.num_heads, sizes.num_groups
    inner, width = heads * sizes.head_dim, groups * sizes.state_dim
    z, xbc, raw = np.split(zxbcdt, [inner, 2 * inner + 2 * width], axis=1)
    before = np.zeros(xbc.shape, np.result_type(xbc, conv_weight, conv_bias))
    for t in range(len(xbc)):
        before[t] = conv_bias
        for back in range(min(t + 1, conv_weight.shape[1])):
            before[t] += conv_weight[:, -1 - back] * xbc[t - back]
    x, b, c = np.split(_silu(before), [inner, inner + width], axis=1)
    b, c = (np.repeat(m.reshape(-1, groups, sizes.state_dim), heads // groups, axis=1) for m in (b, c))
    raw = raw + dt_bias
    big = np.real(raw) > 0
    dt = np.where(big, raw, 0) + np.log1p(np.exp(np.where(big, -raw, raw)))
    return _Rows(z, before, x.reshape(-1, heads, sizes.head_dim), b, c, raw, dt, [], np.zeros(0))


def _exact_gradients(
    rows: _Rows, zxbcdt: Array, weights: tuple[Array, ...], dout: Array, sizes: Sizes
) -> Result:
    """From the last row to the first, one state at a time."""
    rates = -np.exp(weights[2])
    dy = (dout * _silu(rows.z)).reshape(rows.x.shape)
    dx, db, dc = weights[3][:, None] * dy, np.zeros(rows.b.shape), np.zeros(rows.c.shape)
    ddt, of_rates = np.zeros(rows.dt.shape), np.zeros(rates.shape)
    dstate = np.zeros(rows.states[0].shape)
    for t in reversed(range(len(zxbcdt))):
        dc[t] = (rows.states[t + 1] * dy[t][:, :, None]).sum(axis=1)
        dstate = dstate + dy[t][:, :, None] * rows.c[t][:, None, :]
        db[t] = rows.dt[t][:, None] * (dstate * rows.x[t][:, :, None]).sum(axis=1)
        du = (dstate * rows.b[t][:, None, :]).sum(axis=2)
        dstate = np.exp(rates * rows.dt[t])[:, None, None] * dstate
        da = (dstate * rows.states[t]).sum(axis=(1, 2))
        dx[t] += rows.dt[t][:, None] * du
        ddt[t] = (rows.x[t] * du).sum(axis=1) + rates * da
        of_rates += rows.dt[t] * da
    of_d = (dy * rows.x).sum(axis=(0, 2))
    dz = dout * rows.y.reshape(rows.z.shape) * _slope(rows.z)
    return _inputs_gradients(rows, zxbcdt, weights, sizes, rows.out, dz, (dx, db, dc), ddt, rates * of_rates, of_d)


def _inputs_gradients(
    rows: _Rows, zxbcdt: Array, weights: tuple[Array, ...], sizes: Sizes, out: Array, dz: Array,
    of_channels: tuple[Array, Array, Array], ddt: Array, of_a_log: Array, of_d: Array,
) -> Result:  # fmt: skip
    """From gradients of x, B and C of every head, and of dt, to those of what _inputs gets."""
    conv_weight = weights[0]
    length, inner = dz.shape
    dx, *of_heads = of_channels
    of_groups = [m.reshape(length, sizes.num_groups, -1, sizes.state_dim).sum(axis=2) for m in of_heads]
    dact = np.concatenate([m.reshape(length, -1) for m in (dx, *of_groups)], axis=1)
    dbefore = dact * _slope(rows.before)
    xbc = zxbcdt[:, inner : inner + dact.shape[1]]
    dxbc, dconv = np.zeros(xbc.shape, dz.dtype), np.zeros(conv_weight.shape, dz.dtype)
    for t in range(length):
        for back in range(min(t + 1, conv_weight.shape[1])):
            dxbc[t - back] += conv_weight[:, -1 - back] * dbefore[t]
            dconv[:, -1 - back] += xbc[t - back] * dbefore[t]
    draw = ddt * np.exp(-np.logaddexp(0, -rows.raw))
    dzxbcdt = np.concatenate([dz, dxbc, draw], axis=1)
    return Result(out, dzxbcdt, dconv, dbefore.sum(axis=0), of_a_log, of_d, draw.sum(axis=0))


def _plain(
    zxbcdt: Array, weights: tuple[Array, ...], dout: Array, sizes: Sizes, rounding: DTypeLike
) -> Result:
    """The mixer as attention with decays, all pairs of rows at once, rounding what kernels round.

    Rounded are x, B and C behind the convolution, operands of products of matrices, y, dy, their gradients and the
    results; dt, decays and sums are not.
    """
    def stored(x: Array) -> Array:
        return x.astype(rounding).astype(zxbcdt.dtype)

    rows = _inputs(zxbcdt, weights, sizes)
    x, b, c = (stored(m).swapaxes(0, 1) for m in (rows.x, rows.b, rows.c))  # heads first
    dt, rates, d = rows.dt.T, -np.exp(weights[2]), weights[3][:, None, None]
    sums = np.cumsum(rates[:, None] * dt, axis=1)
    decay = np.tril(np.exp(np.minimum(sums[:, :, None] - sums[:, None], 0)))
    products = c @ b.swapaxes(1, 2)
    y = _by_row(stored(products * decay * dt[:, None]) @ x + d * x)
    out = stored(y * _silu(rows.z))
    dy = stored(dout * _silu(rows.z))
    dz = stored(dout * stored(y) * _slope(rows.z))

    g = dy.reshape(rows.x.shape).swapaxes(0, 1)
    dproducts = decay * dt[:, None] * (g @ x.swapaxes(1, 2))
    du = stored(products * decay).swapaxes(1, 2) @ g
    per_group = dproducts.reshape(sizes.num_groups, -1, *dproducts.shape[1:])
    of_group = stored(per_group.sum(axis=1))
    group = b.shape[0] // sizes.num_groups
    # _inputs_gradients adds up the heads of a group, so the first one of each has all.
    db, dc = np.zeros(b.shape, b.dtype), np.zeros(c.shape, c.dtype)
    db[::group], dc[::group] = of_group.swapaxes(1, 2) @ c[::group], of_group @ b[::group]
    dx = dt[:, :, None] * du + d * g
    pairs = np.tril(dproducts * products, -1)
    da = np.cumsum((pairs.sum(axis=2) - pairs.sum(axis=1))[:, ::-1], axis=1)[:, ::-1]
    ddt = (x * du).sum(axis=2) + rates[:, None] * da
    of_channels = stored(dx).swapaxes(0, 1), stored(db).swapaxes(0, 1), stored(dc).swapaxes(0, 1)
    made = _inputs_gradients(rows, zxbcdt, weights, sizes, out, dz, of_channels, ddt.T,
                             rates * (dt * da).sum(axis=1), (g * x).sum(axis=(1, 2)))  # fmt: skip
    made.zxbcdt = stored(made.zxbcdt)
    return Result(**{name: x.astype(np.float64) for name, x in vars(made).items()})


def _by_row(x: Array) -> Array:
    """(heads, rows, width) -> (rows, heads * width)."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def _silu(x: Array) -> Array:
    product: Array = x / (1 + np.exp(-x))
    return product


def _slope(x: Array) -> Array:
    sigmoid = 1 / (1 + np.exp(-x))
    return sigmoid * (1 + x * (1 - sigmoid))
