"""State space recurrence of a Mamba-2 mixer in NumPy, forward and backward, chunk by chunk; and its gate, forward.

Row i has a state s_i = exp(a_i) s_(i-1) + dt_i x_i B_i^T per head, which starts from 0 with every sequence. Its result
is y_i = s_i C_i + D x_i. Inside a chunk of rows this is attention with decays instead of a softmax. A chunk as a whole,
like any run of rows, maps the state in front to `decay * state + own`. So chunks depend on each other only through
states, and so do ranks.

One rule holds as in attention: row j counts for row i iff first[i] <= j <= i. Sums restart with every sequence, and
what does not count is selected away, not multiplied by 0: neither another document nor padding changes a bit of a
result.

Sums, decays, products C B^T and states between chunks are float32 (float64 for float64). For bfloat16 the operands of
matrix products are rounded to it, as tensor cores take them. For float16 they are not, as states and sums may leave its
range.

Inner arrays are (chunks, heads or groups, rows of a chunk, ...).

Source: Mamba-2, arXiv:2405.21060, section 6.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from thdattn.mamba.shape import CHUNK, Activations, Inputs, MixerShape
from thdattn.plan.plan import Plan
from thdattn.plan.workspace import Buffer
from thdattn.spans import on_host

Array = NDArray[Any]

MAX_BLOCK_PAIRS = 2**22  # heads * rows * rows of the chunks that one block computes: 16 MiB of float32

mixer_segment_rows = CHUNK  # rows per state


class Gradients(NamedTuple):
    """Results of mixer_bwd, in buffers of the plan.

    channels: (local_rows, channels), gradients of x, B and C after the convolution, in the dtype of the mixer.
    ddt: (local_rows, num_heads), float32 (float64).
    partials: (segments, 2, num_heads), partial sums of dA and dD by segment.
    of_norm: (segments, d_inner), partial sums of dnorm_weight; None without a norm.
    """

    channels: Array
    ddt: Array
    partials: Array
    of_norm: Any = None


class _Chunks(NamedTuple):
    """Some chunks. Rows after the last one belong to its sequence, and have dt = x = B = C = 0.

    x: (chunks, num_heads, CHUNK, head_dim). b, c: (chunks, num_groups, CHUNK, state_dim).
    dt: (chunks, num_heads, CHUNK).
    goes_on: (chunks, 1, CHUNK), True where a row has the sequence of the row before.
    pair: (chunks, 1, CHUNK, CHUNK), True where row j counts for row i.
    decay: (chunks, num_heads, CHUNK, CHUNK), from row j to row i; 0 where pair is False.
    enter, leave: (chunks, num_heads, CHUNK), from the state in front to a row, and from a row to the state behind.
    through: (chunks, num_heads), from the state in front to the one behind.
    """

    x: Array
    b: Array
    c: Array
    dt: Array
    goes_on: Array
    pair: Array
    decay: Array
    enter: Array
    leave: Array
    through: Array


def first_rows(plan: Plan) -> Array:
    """Return (local_rows,): the first row of each row's sequence, below 0 on an earlier rank; for padding its own
    number + 1.
    """
    begin, end = plan.key_ranges.astype(np.int64).T
    first: Array = np.where(begin < end, begin - plan.cp_rank * plan.local_rows, np.arange(1, plan.local_rows + 1))
    return first


def valid_rows(plan: Plan) -> Array:
    """Return (local_rows, 1) bool, False on padding."""
    valid: Array = first_rows(plan) <= np.arange(plan.local_rows)
    return valid[:, None]


def cleared(x: Array, valid: Array, shape: MixerShape) -> Array:
    """Return rows in the dtype of sums, 0 on padding."""
    return np.where(valid, x.astype(shape.sum_dtype), 0)


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)) without overflow."""
    small = np.exp(-np.abs(x))
    share: Array = np.where(x >= 0, 1, small) / (1 + small)
    return share


def silu(x: Array) -> Array:
    """Return x * sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    """Return log(1 + exp(x)), which is exp(x) far below 0."""
    grown: Array = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    return grown


def slope(x: Array) -> Array:
    """Return the derivative of silu."""
    share = sigmoid(x)
    derivative: Array = share * (1 + x * (1 - share))
    return derivative


def chunk_sums(a: Array, plan: Plan) -> Array:
    """Return the sums of a (local_rows, num_heads) over the rows of the same chunk and sequence up to each row."""
    first = first_rows(plan)
    goes_on = in_chunks(first < np.arange(len(first)))[:, None]
    sums = _restarting_sums(in_chunks(a).swapaxes(1, 2), goes_on)
    return _in_rows(sums[..., None], len(a))


@on_host
def mixer_states(act: Activations, plan: Plan, shape: MixerShape) -> tuple[Array, Array]:
    """Compute the state that every segment of rows adds, and the decay of the state in front of it.

    Returns:
        states: (segments, num_heads, head_dim, state_dim) float32 (float64).
        decays: (segments, num_heads).
    """
    states, decays = _new_states(plan, shape)
    for segments, chunks in _blocks(act, plan, shape):
        b = rounded(_times(chunks.leave * chunks.dt, _per_head(chunks.b, shape)), shape)
        states[segments] = chunks.x.swapaxes(2, 3) @ b
        decays[segments] = chunks.through
    return states, decays


@on_host
def mixer_dstates(act: Activations, dy: Array, plan: Plan, shape: MixerShape) -> tuple[Array, Array]:
    """Compute mixer_states backward: what every segment adds to the gradient of the state in front, and the decay of
    the one behind.

    Args:
        dy: (local_rows, d_inner), gradient of y; 0 on padding.
    """
    dstates, decays = _new_states(plan, shape)
    for segments, chunks in _blocks(act, plan, shape):
        entered = rounded(_times(chunks.enter, _by_head(dy, segments, shape)), shape)
        dstates[segments] = entered.swapaxes(2, 3) @ _per_head(chunks.c, shape)
        decays[segments] = chunks.through
    return dstates, decays


@on_host
def mixer_fold(states: Array, decays: Array, plan: Plan, shape: MixerShape, reverse: bool) -> Array:
    """Turn what segments add into the states in front of them, in place, from 0 in front of the first.

    Args:
        states, decays: from mixer_states; with reverse from mixer_dstates, which become gradients of the states behind
            the segments, from 0 behind the last.

    Returns:
        (1, summary), all segments as one: the state behind (reverse: the gradient of the state in front), then the
            decays.
    """
    state, through = np.zeros(shape.state, states.dtype), np.ones(shape.num_heads, states.dtype)
    for segment in reversed(range(len(states))) if reverse else range(len(states)):
        own = states[segment].copy()
        states[segment] = state
        state = _times(decays[segment], state) + own
        through *= decays[segment]
    return np.concatenate([state.ravel(), through])[None]


@on_host
def mixer_fold_trees(states: Array, decays: Array, starts: Array, reverse: bool = False) -> None:
    """Turn what segments of trees add into the states in front of them, in place, as mixer_fold does.

    Args:
        states: (segments, num_heads, ...), in the order of trees, depth first.
        starts: (segments, 2) int32. First the segment that has the same state in front and comes first: itself, if it
            goes on from the segment in front of it in memory; -1: it starts from 0. Then 1 if a later one names it.
    """
    zero = state = np.zeros(states.shape[1:], states.dtype)
    for segment in reversed(range(len(states))) if reverse else range(len(states)):
        own, first = states[segment].copy(), starts[segment, 0]
        if not reverse and first != segment:
            state = states[first] if first >= 0 else zero
        states[segment] = state
        state = _times(decays[segment], state) + own
        if reverse and first != segment:
            if first >= 0:
                states[first] += state
            state = zero


@on_host
def mixer_start(summaries: Array, plan: Plan, shape: MixerShape, reverse: bool) -> Array:
    """Return the state in front of this rank's rows; reverse: the gradient of the state behind them.

    Args:
        summaries: (cp_size, summary), from mixer_fold of every rank.

    Returns:
        (num_heads, head_dim, state_dim), summed in the order of ranks; reverse: against it.
    """
    state = np.zeros(shape.state, summaries.dtype)
    ranks = range(plan.cp_size - 1, plan.cp_rank, -1) if reverse else range(plan.cp_rank)
    for rank in ranks:
        own, decays = np.split(summaries[rank], [-shape.num_heads])
        state = _times(decays, state) + own.reshape(shape.state)
    return state


@on_host
def mixer_enter(states: Array, decays: Array, start: Array, segments: slice, reverse: bool) -> None:
    """Add the state from other ranks, with its decays, to the states that mixer_fold made.

    Args:
        states, decays: as mixer_fold left them; states change.
        start: from mixer_start.
        segments: those that it may reach: the first ones; reverse: the last ones.
    """
    reached = range(len(states))[segments]
    for segment in reversed(reached) if reverse else reached:
        states[segment] += start
        start = _times(decays[segment], start)


@on_host
def mixer_scan(inputs: Inputs, act: Activations, states: Array, segments: slice, y: Array, out: Array) -> None:
    """Compute y of some segments, and out = y * silu(z), which mixer_norm computes if the mixer has a norm.

    Args:
        act: from mixer_conv.
        states: in front of each segment, from mixer_fold and mixer_enter.
        y, out: (local_rows, d_inner) in the dtype of the mixer. Rows of these segments are written; out is 0 on
            padding, and unchanged if the mixer has a norm.
    """
    zxbcdt, weights, plan, shape, _ = inputs
    z, valid, d = shape.parts(zxbcdt)[0], valid_rows(plan), weights.D
    for here, chunks in _blocks(act, plan, shape, segments):
        of_pairs = _products(chunks, shape) * chunks.decay * chunks.dt[:, :, None]
        of_state = _per_head(chunks.c, shape) @ rounded(states[here], shape).swapaxes(2, 3)
        result = rounded(of_pairs, shape) @ chunks.x + _times(chunks.enter, of_state) + d[:, None, None] * chunks.x
        rows = _rows_of(here, len(y))
        result = _in_rows(result, len(y[rows]))
        y[rows] = result.astype(y.dtype)
        if shape.norm is None:
            out[rows] = np.where(valid[rows], result * silu(cleared(z[rows], valid[rows], shape)), 0).astype(out.dtype)


def mixer_backward_buffers(plan: Plan, shape: MixerShape) -> list[Buffer]:
    """Declare the buffers that backwards share besides, of mixer_gradients first."""
    rows, chunks = plan.local_rows, -(-plan.local_rows // CHUNK)
    made = [Buffer("dchannels", (rows, shape.channels), shape.dtype),
            Buffer("ddt", (rows, shape.num_heads), shape.sum_dtype),
            Buffer("partial sums of dA and dD", (chunks, 2, shape.num_heads), shape.sum_dtype)]
    if shape.norm:
        made.append(Buffer("partial sums of dnorm", (chunks, shape.d_inner), shape.sum_dtype))
    return made


def mixer_gradients(plan: Plan, shape: MixerShape) -> Gradients:
    """Return buffers for the results of mixer_bwd."""
    return Gradients(*map(plan.workspace.array, mixer_backward_buffers(plan, shape)))


@on_host
def mixer_bwd(
    inputs: Inputs, act: Activations, dy: Array, states: Array, dstates: Array, segments: slice, gradients: Gradients
) -> None:
    """Compute the gradients of mixer_scan for some segments.

    Args:
        act: from mixer_conv.
        dy: (local_rows, d_inner), gradient of y, 0 on padding.
        states, dstates: the states in front of each segment; gradients of the states behind each segment.
        gradients: from mixer_gradients; it gets the rows of these segments, and the partial sums of dA.
    """
    (_, weights, plan, shape, _), (dchannels, ddt, partials, _) = inputs, gradients
    rates = -np.exp(weights.A_log)
    for here, chunks in _blocks(act, plan, shape, segments):
        dout = _by_head(dy, here, shape)
        dx, db, dc, ddt_alone, da = _chunk_gradients(chunks, dout, states[here], dstates[here], weights.D, shape)
        rows = _rows_of(here, len(ddt))
        num_rows = len(ddt[rows])
        dchannels[rows] = np.concatenate([_in_rows(x, num_rows) for x in (dx, db, dc)], axis=1).astype(dchannels.dtype)
        ddt[rows] = _in_rows((ddt_alone + rates[:, None] * da)[..., None], num_rows)
        partials[here, 0] = (chunks.dt * da).sum(axis=2)


def _chunk_gradients(
    chunks: _Chunks, dy: Array, states: Array, dstates: Array, d: Array, shape: MixerShape
) -> tuple[Array, Array, Array, Array, Array]:
    """Return dx, dB, dC, ddt without the part through a, and da."""
    x, b, c, dt = chunks.x, _per_head(chunks.b, shape), _per_head(chunks.c, shape), chunks.dt
    states, dstates = rounded(states, shape), rounded(dstates, shape)
    products = _products(chunks, shape)
    dproducts = np.where(chunks.pair, chunks.decay * dt[:, :, None] * (dy @ x.swapaxes(2, 3)), 0)
    of_group = rounded(_per_group(dproducts, shape), shape)
    from_state = _times(chunks.enter, dy @ states)
    to_state = _times(chunks.leave * dt, x @ dstates)
    dc = of_group @ chunks.b + _per_group(from_state, shape)
    db = of_group.swapaxes(2, 3) @ chunks.c + _per_group(to_state, shape)

    du = rounded(products * chunks.decay, shape).swapaxes(2, 3) @ dy + _times(chunks.leave, b @ dstates.swapaxes(2, 3))
    dx = dt[..., None] * du + d[:, None, None] * dy

    # da at row k sums all that decays across row k: pairs i >= k > j, the state in front to rows i >= k, rows j < k to
    # the state behind, and one state to the other. For pairs this is a suffix sum of row sums minus column sums of the
    # same numbers, which cancels no rounded number; y.dy - u.du would.
    pairs = np.tril(dproducts * products, -1)
    ending = pairs.sum(axis=3) - pairs.sum(axis=2) + (from_state * c).sum(axis=3)
    beginning = _restarting_sums((to_state * b).sum(axis=3), chunks.goes_on)
    before = np.where(chunks.goes_on, np.roll(beginning, 1, axis=2), 0)
    before[..., 0] = 0
    across = _times(chunks.through, (states * dstates).sum(axis=(2, 3)))
    da = _restarting_sums(ending, chunks.goes_on, reverse=True) + before + across[..., None]
    return dx, db, dc, (x * du).sum(axis=3), da


def _products(chunks: _Chunks, shape: MixerShape) -> Array:
    """Return C B^T of every head, (chunks, num_heads, CHUNK, CHUNK), 0 where pair is False."""
    return np.where(chunks.pair, _per_head(chunks.c @ chunks.b.swapaxes(2, 3), shape), 0)


def _new_states(plan: Plan, shape: MixerShape) -> tuple[Array, Array]:
    segments = -(-plan.local_rows // CHUNK)
    return np.empty((segments, *shape.state), shape.sum_dtype), np.empty((segments, shape.num_heads), shape.sum_dtype)


def _blocks(
    act: Activations, plan: Plan, shape: MixerShape, segments: slice = slice(None)
) -> Iterator[tuple[slice, _Chunks]]:
    """Yield the chunks of some segments, as many at a time as MAX_BLOCK_PAIRS allows."""
    first = first_rows(plan)
    begin, end, _ = segments.indices(-(-plan.local_rows // CHUNK))
    step = max(1, MAX_BLOCK_PAIRS // (shape.num_heads * CHUNK**2))
    for at in range(begin, end, step):
        here = slice(at, min(at + step, end))
        yield here, _chunks(act, first, shape, here)


def _chunks(act: Activations, first: Array, shape: MixerShape, here: slice) -> _Chunks:
    rows = _rows_of(here, len(first))
    first = in_chunks(first[rows], edge=True)
    begin = CHUNK * np.arange(here.start, here.stop)[:, None]
    row = begin + np.arange(CHUNK)
    sums = in_chunks(act.sums[rows], edge=True).swapaxes(1, 2)
    last, last_sum = first[:, -1:], sums[:, :, -1:]
    pair = ((first[:, :, None] <= row[:, None]) & (row[:, None] <= row[:, :, None]))[:, None]

    def decay(sums: Array, counts: Array) -> Array:
        """Return exp of sums, which are at most 0 but for rounding; 0 where nothing counts."""
        return np.exp(np.where(counts, np.minimum(sums, 0), -np.inf))

    x, b, c = (in_chunks(part).swapaxes(1, 2).astype(sums.dtype) for part in shape.split(act.channels[rows]))
    return _Chunks(
        x, b, c,
        dt=in_chunks(act.dt[rows]).swapaxes(1, 2),
        goes_on=(first < row)[:, None],
        pair=pair,
        decay=decay(sums[:, :, :, None] - sums[:, :, None], pair),
        enter=decay(sums, (first < begin)[:, None]),
        leave=decay(last_sum - sums, (row >= last)[:, None]),
        through=decay(last_sum, (last < begin)[:, None])[..., 0],
    )


def _rows_of(segments: slice, num_rows: int) -> slice:
    return slice(segments.start * CHUNK, min(segments.stop * CHUNK, num_rows))


def in_chunks(x: Array, edge: bool = False) -> Array:
    """Reshape (rows, ...) to (chunks, CHUNK, ...), padded with zeros or, with edge, with the last row."""
    missing = -len(x) % CHUNK
    fill = np.repeat(x[-1:], missing, axis=0) if edge else np.zeros((missing, *x.shape[1:]), x.dtype)
    return np.concatenate([x, fill]).reshape(-1, CHUNK, *x.shape[1:])


def _in_rows(x: Array, num_rows: int) -> Array:
    """Reshape (chunks, heads, CHUNK, width) to (num_rows, heads * width), without the padding of the last chunk."""
    chunks, heads, _, width = x.shape
    return x.swapaxes(1, 2).reshape(chunks * CHUNK, heads * width)[:num_rows]


def _by_head(x: Array, segments: slice, shape: MixerShape) -> Array:
    """Reshape rows of (local_rows, d_inner) to (chunks, num_heads, CHUNK, head_dim)."""
    rows = x[_rows_of(segments, len(x))]
    heads = rows.reshape(len(rows), shape.num_heads, shape.head_dim)
    return in_chunks(heads).swapaxes(1, 2).astype(shape.sum_dtype)


def _per_head(x: Array, shape: MixerShape) -> Array:
    """Repeat (chunks, num_groups, ...) to (chunks, num_heads, ...)."""
    return np.repeat(x, shape.num_heads // shape.num_groups, axis=1)


def _per_group(x: Array, shape: MixerShape) -> Array:
    """Sum (chunks, num_heads, ...) to (chunks, num_groups, ...)."""
    total: Array = x.reshape(len(x), shape.num_groups, -1, *x.shape[2:]).sum(axis=2)
    return total


def rounded(x: Array, shape: MixerShape) -> Array:
    """Round an operand of a matrix product as tensor cores take it."""
    return x.astype(shape.dtype).astype(x.dtype) if shape.dtype == ml_dtypes.bfloat16 else x


def _times(factor: Array, x: Array) -> Array:
    """Return factor * x for a factor of fewer dimensions, and 0 where it is 0, as 0 * inf is NaN."""
    factor = factor.reshape(*factor.shape, *(1 for _ in range(x.ndim - factor.ndim)))
    product: Array = np.where(factor != 0, factor * x, 0)
    return product


def _restarting_sums(x: Array, goes_on: Array, reverse: bool = False) -> Array:
    """Return sums of (chunks, heads, CHUNK) up to each row (reverse: from it on), over rows of one sequence."""
    sums = x[..., ::-1].copy() if reverse else x.copy()
    goes_on = np.roll(goes_on[..., ::-1], 1, axis=2) if reverse else goes_on
    for row in range(1, CHUNK):
        sums[..., row] += np.where(goes_on[..., row], sums[..., row - 1], 0)
    return sums[..., ::-1] if reverse else sums
