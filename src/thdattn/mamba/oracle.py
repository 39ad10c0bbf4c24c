"""Mamba-2 mixer by its definition, row by row in float64, and as plain low-precision maths: the oracle of both engines.

It knows documents, not plans: it shares no code with engines, plans or ranks. `packed_mixer` splits a packed batch into
documents by their lengths and computes each by itself, so padding never takes part. A prefix tree is the documents from
its root to its leaves: the gradient of a shared row of out goes to the first one, and those of its inputs are summed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from thdattn.packing import PackedBatch

Array = NDArray[Any]


class Sizes(NamedTuple):
    """Sizes of a mixer; its weights give conv_width."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int = 1


class Norm(NamedTuple):
    """Norm of a mixer, with its weight w: rmsnorm(y * silu(z)) * w after the gate, else rmsnorm(y) * w * silu(z).

    groups: groups of columns, each divided by the root of its own mean square plus eps.
    """

    after_gate: bool
    groups: int = 1
    eps: float = 1e-5


@dataclass
class Result:
    """Result for one document or a packed batch, float64; without dout the gradients are 0.

    out: (rows, d_inner). zxbcdt: (rows, columns), gradient of the input.
    conv_weight, conv_bias, A_log, D, dt_bias, norm_weight: gradients of the weights; the last is empty without a norm.
    """

    out: Array
    zxbcdt: Array
    conv_weight: Array
    conv_bias: Array
    A_log: Array
    D: Array
    dt_bias: Array
    norm_weight: Array = field(default_factory=lambda: np.zeros(0))


FIELDS = ("out", "zxbcdt", "conv_weight", "conv_bias", "A_log", "D", "dt_bias")
FIELDS_WITH_NORM = (*FIELDS, "norm_weight")


def packed_mixer(
    batch: PackedBatch, zxbcdt: Array, weights: tuple[Array, ...], dout: Array, sizes: Sizes,
    rounding: DTypeLike | None = None, norm: Norm | None = None,
) -> Result:
    """Compute the mixer over every document of a packed batch, in sequence order, and its gradients.

    Args:
        batch: lengths and row offsets, on the host.
        zxbcdt, dout: (total_rows, columns), (total_rows, d_inner); padding is never read.
        weights: conv_weight, conv_bias, A_log, D, dt_bias; and norm_weight for a mixer with a norm.
        rounding: None for the recurrence in float64; a dtype for `plain`.
        norm: None for a mixer without one.
    """
    total = Result(np.zeros(dout.shape), np.zeros(zxbcdt.shape), *(np.zeros(x.shape) for x in weights))
    is_new = np.ones((len(dout), 1), bool)
    for rows in _documents(batch):
        if len(rows):
            document = mixer(zxbcdt[rows], weights, np.where(is_new[rows], dout[rows], 0), sizes, rounding, norm)
            is_new[rows] = False
            total.out[rows] = document.out
            total.zxbcdt[rows] += document.zxbcdt
            for name in FIELDS_WITH_NORM[2 : 2 + len(weights)]:
                setattr(total, name, getattr(total, name) + getattr(document, name))
    return total


def _documents(batch: PackedBatch) -> list[Array]:
    """Return the rows of every document, and of every path from a root to a leaf, from the parents of nodes alone."""
    starts, before = batch.cu_seqlens_padded[:-1].tolist(), batch.cu_seqlens.tolist()
    if batch.parents is None:
        lengths = batch.lengths.tolist()
        return [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    parents, nodes = np.asarray(batch.parents).tolist(), np.asarray(batch.nodes).tolist()
    paths: list[Array] = []
    tree = -1
    for node, parent in enumerate(parents):
        tree += parent < 0
        first = starts[tree] + nodes[node] - before[tree]
        own = np.arange(first, first + nodes[node + 1] - nodes[node])
        paths.append(own if parent < 0 else np.concatenate([paths[parent], own]))
    inner = set(parents)
    return [path for node, path in enumerate(paths) if node not in inner]


def mixer(
    zxbcdt: Array, weights: tuple[Array, ...], dout: Array, sizes: Sizes, rounding: DTypeLike | None = None,
    norm: Norm | None = None,
) -> Result:
    """Compute the mixer over one document, and the gradients of sum(out * dout).

    Args:
        zxbcdt: (length, columns): z, x, B, C, dt; length > 0.
        weights, dout, sizes, rounding, norm: as in packed_mixer.

    Returns:
        `Result`, float64 (for a baseline: the rounded values).
    """
    dtype = np.float64 if rounding is None else np.float32 if np.dtype(rounding).itemsize == 2 else np.dtype(rounding)
    zxbcdt, dout = zxbcdt.astype(dtype), dout.astype(dtype)
    weights = tuple(x.astype(dtype) for x in weights)
    if rounding is None:
        return _exact_gradients(_recurrence(zxbcdt, weights, sizes), zxbcdt, weights, dout, sizes, norm)
    return _plain(zxbcdt, weights, dout, sizes, rounding, norm)


class _Rows(NamedTuple):
    """Values of the recurrence by row, of all heads; b and c are those of each head's group."""

    z: Array
    before: Array
    x: Array
    b: Array
    c: Array
    raw: Array
    dt: Array
    states: list[Array]
    y: Array


def recurrence(zxbcdt: Array, weights: tuple[Array, ...], sizes: Sizes, norm: Norm | None = None) -> Array:
    """Return out of one document, row by row; complex numbers too, for derivatives by complex steps."""
    rows = _recurrence(zxbcdt, weights, sizes)
    return _gated(rows.y.reshape(rows.z.shape), rows.z, weights[-1], norm)


def _gated(y: Array, z: Array, weight: Array, norm: Norm | None) -> Array:
    """Return out of y and z; weight: of the norm, if there is one."""
    gate = _silu(z)
    if norm is None:
        return y * gate
    x = y * gate if norm.after_gate else y
    normal: Array = x * _inverse_root(x, norm) * weight
    return normal if norm.after_gate else normal * gate


def _inverse_root(x: Array, norm: Norm) -> Array:
    """Return 1 / sqrt(mean square + eps) of each number's group."""
    return 1 / np.sqrt(_group_mean(x**2, norm) + norm.eps)


def _group_mean(x: Array, norm: Norm) -> Array:
    groups = x.reshape(len(x), norm.groups, -1)
    return np.broadcast_to(groups.mean(axis=2, keepdims=True), groups.shape).reshape(x.shape)


def _gate_gradients(
    y: Array, z: Array, dout: Array, weight: Array, norm: Norm | None
) -> tuple[Array, Array, Array]:
    """Return the gradients of y, of z, and of the norm's weight, which is empty without a norm."""
    gate = _silu(z)
    if norm is None:
        return dout * gate, dout * y * _slope(z), np.zeros(0)
    x, passed = (y * gate, dout) if norm.after_gate else (y, dout * gate)
    root = _inverse_root(x, norm)
    normal = x * root
    dx = root * (passed * weight - normal * _group_mean(passed * weight * normal, norm))
    dweight = (passed * normal).sum(axis=0)
    if norm.after_gate:
        return dx * gate, dx * y * _slope(z), dweight
    return dx, dout * normal * weight * _slope(z), dweight


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
    """Return all rows but states and y."""
    conv_weight, conv_bias, _, _, dt_bias = weights[:5]
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
    rows: _Rows, zxbcdt: Array, weights: tuple[Array, ...], dout: Array, sizes: Sizes, norm: Norm | None
) -> Result:
    """Return the gradients, from the last row to the first, one state at a time."""
    rates = -np.exp(weights[2])
    y = rows.y.reshape(rows.z.shape)
    dy, dz, of_norm = _gate_gradients(y, rows.z, dout, weights[-1], norm)
    dy = dy.reshape(rows.x.shape)
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
    out = _gated(y, rows.z, weights[-1], norm)
    of_inputs, of_conv, of_bias, of_dt = _inputs_gradients(rows, zxbcdt, weights, sizes, dz, (dx, db, dc), ddt)
    return Result(out, of_inputs, of_conv, of_bias, rates * of_rates, of_d, of_dt, of_norm)


def _inputs_gradients(
    rows: _Rows, zxbcdt: Array, weights: tuple[Array, ...], sizes: Sizes, dz: Array,
    of_channels: tuple[Array, Array, Array], ddt: Array,
) -> tuple[Array, Array, Array, Array]:
    """Return the gradients of zxbcdt, conv_weight, conv_bias and dt_bias.

    Args:
        dz, of_channels, ddt: gradients of z, of x, B and C of every head, and of dt.
    """
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
    return dzxbcdt, dconv, dbefore.sum(axis=0), draw.sum(axis=0)


def _plain(
    zxbcdt: Array, weights: tuple[Array, ...], dout: Array, sizes: Sizes, rounding: DTypeLike, norm: Norm | None
) -> Result:
    """Compute the mixer as attention with decays, all pairs of rows at once, and round what kernels round.

    It rounds x, B and C after the convolution, operands of matrix products, y, dy, their gradients and the results. It
    does not round dt, decays and sums. A gate reads y before rounding, a norm after it.
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
    out = stored(_gated(stored(y) if norm else y, rows.z, weights[-1], norm))
    dy, dz, of_norm = _gate_gradients(stored(y), rows.z, dout, weights[-1], norm)
    dy = stored(dy)

    g = dy.reshape(rows.x.shape).swapaxes(0, 1)
    dproducts = decay * dt[:, None] * (g @ x.swapaxes(1, 2))
    du = stored(products * decay).swapaxes(1, 2) @ g
    per_group = dproducts.reshape(sizes.num_groups, -1, *dproducts.shape[1:])
    of_group = stored(per_group.sum(axis=1))
    group = b.shape[0] // sizes.num_groups
    # _inputs_gradients sums the heads of a group, so the first head holds the whole gradient.
    db, dc = np.zeros(b.shape, b.dtype), np.zeros(c.shape, c.dtype)
    db[::group], dc[::group] = of_group.swapaxes(1, 2) @ c[::group], of_group @ b[::group]
    dx = dt[:, :, None] * du + d * g
    pairs = np.tril(dproducts * products, -1)
    da = np.cumsum((pairs.sum(axis=2) - pairs.sum(axis=1))[:, ::-1], axis=1)[:, ::-1]
    ddt = (x * du).sum(axis=2) + rates[:, None] * da
    of_channels = stored(dx).swapaxes(0, 1), stored(db).swapaxes(0, 1), stored(dc).swapaxes(0, 1)
    of_inputs, of_conv, of_bias, of_dt = _inputs_gradients(rows, zxbcdt, weights, sizes, dz, of_channels, ddt.T)
    made = (out, stored(of_inputs), of_conv, of_bias, rates * (dt * da).sum(axis=1), (g * x).sum(axis=(1, 2)), of_dt,
            of_norm)
    return Result(*[x.astype(np.float64) for x in made])


def _by_row(x: Array) -> Array:
    """Reshape (heads, rows, width) to (rows, heads * width)."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def _silu(x: Array) -> Array:
    product: Array = x / (1 + np.exp(-x))
    return product


def _slope(x: Array) -> Array:
    sigmoid = 1 / (1 + np.exp(-x))
    return sigmoid * (1 + x * (1 - sigmoid))
