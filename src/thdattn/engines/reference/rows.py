"""Moves of rows of keys, values and gradients between orders, and sums of partial gradients, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thdattn.engines.reference import arrays
from thdattn.plan.plan import Plan
from thdattn.plan.workspace import Buffer
from thdattn.spans import on_host

if TYPE_CHECKING:
    from thdattn.comm.overlap.collectives import PeerExchange

Array = NDArray[Any]


@on_host
def to_sequence_order(
    parts: Sequence[Sequence[Array]], plan: Plan, into: Sequence[Array] | None = None,
    own: Sequence[Array] | None = None, peer_exchange: PeerExchange | None = None,
) -> tuple[Array, Array]:
    """Move keys and values gathered from all ranks to sequence order: out[rank_order[t]] = in[t].

    Args:
        parts: for keys and for values (cp_size*local_key_rows, ...), in one part or in equal ones, rank order. Filler
            rows (rank_order -1) are dropped. For needed rows: the rows that this rank receives, (num_received, ...).
        plan: gives `rank_order`, int32, `key_rows` and `first_own`.
        into: arrays for k and v; None: new ones.
        own: (local_key_rows, ...), this rank's rows of keys and of values, which the parts may then lack.
        peer_exchange: the exchange that the kernel performs itself; None here, as NumPy has no such kernel.

    Returns:
        k, v: (key_rows, ...), the dtypes of the inputs; rows that no rank owns are 0.
    """
    k, v = into or [arrays.empty((plan.key_rows, *x.shape[1:]), x.dtype) for x, *_ in parts]
    for x, rows, mine in zip((k, v), parts, own or (None, None), strict=True):
        x[...] = 0
        _scatter(x, plan.rank_order, np.concatenate(rows))
        if mine is not None:
            _scatter(x, plan.rank_order[plan.first_own :], mine)
    return k, v


def _scatter(out: Array, order: Array, rows: Array) -> None:
    """Set out[order[t]] = rows[t] where order is not -1."""
    order = order[: len(rows)]
    out[order[order >= 0]] = rows[order >= 0]


@on_host
def to_rank_order(dk: Array, dv: Array, plan: Plan) -> tuple[Array, Array]:
    """Move gradients to rank order, the inverse of `to_sequence_order`: out[t] = in[rank_order[t]], 0 on filler rows.

    Args:
        dk, dv: (key_rows, ...), sequence order.
        plan: gives `rank_order`, (cp_size*local_key_rows,) int32.

    Returns:
        dk_ranks, dv_ranks: (cp_size*local_key_rows, ...), the dtypes of the inputs.
    """
    order = plan.rank_order
    dk_ranks, dv_ranks = (arrays.empty((len(order), *x.shape[1:]), x.dtype) for x in (dk, dv))
    pack_rows((dk, dv), order, (dk_ranks, dv_ranks))
    return dk_ranks, dv_ranks


@on_host
def pack_rows(xs: Sequence[Array], order: Array, into: Sequence[Array]) -> None:
    """Put row order[t] of each array at t, to send rows to other ranks or to move them between two orders.

    Args:
        xs: any number of arrays (rows, ...), which may be some of the heads of larger arrays.
        order: (num_rows,) int32; a row of -1 becomes 0.
        into: (num_rows, ...), of the dtype of xs.
    """
    for out, x in zip(into, xs, strict=True):
        out[...] = 0
        out[order >= 0] = x[order[order >= 0]]


@on_host
def place_rows(xs: Sequence[Array], order: Array, plan: Plan, into: Sequence[Array]) -> None:
    """Put rows of two arrays at their places in key buffers: into[order[t]] = x[t], except where order is -1.

    Args:
        xs: (num_rows, ...); order: (num_rows,) int32.
        plan: the plan of the key buffers.
        into: (key_rows, ...), of the dtype of xs.
    """
    for out, x in zip(into, xs, strict=True):
        out[order[order >= 0]] = x[order >= 0]


@on_host
def add_partials(own: Sequence[Array], back: Sequence[Array], plan: Plan, results: Sequence[Array]) -> None:
    """Add the partial sums of dk and dv of this rank's rows, in the order of ranks, and round once.

    Args:
        own: dk and dv of this rank's key buffer, (key_rows, heads, width) in the dtype of sums.
        back: partial sums from the ranks that received rows of this one, (num_sent, heads, width), in the order of
            `sends`.
        plan: gives `returns`, the place of every rank's partial sum.
        results: arrays for dk and dv, (local_rows, heads, width) in their dtype, which may be some of the heads of
            larger ones; 0 where no rank has a partial sum. Rows that this rank alone needs stay as they are: attn_bwd
            has written them to `own_rows`.
    """
    shared = np.delete(plan.arrays.returns, plan.cp_rank, axis=0) >= 0
    summed = shared.any(axis=0) | (plan.arrays.returns[plan.cp_rank] < 0)
    for mine, theirs, result in zip(own, back, results, strict=True):
        total = np.zeros(result.shape, mine.dtype)
        for rank, rows in enumerate(plan.arrays.returns):
            total[rows >= 0] += (mine if rank == plan.cp_rank else theirs)[rows[rows >= 0]]
        result[summed] = total[summed]


@on_host
def without_padding(arrays: Sequence[Array], buffers: Sequence[Buffer], plan: Plan) -> list[Array]:
    """Return copies of two arrays in which rows that see no key are 0, because such rows may hold NaN.

    Args:
        arrays: (local_rows, heads, width).
        buffers: work buffers of the plan for the copies; they may have more heads.
    """
    sees = plan.key_ranges[:, 0] < plan.key_ranges[:, 1]
    copies = [plan.workspace.array(buffer, x.shape) for buffer, x in zip(buffers, arrays, strict=True)]
    for copy, x in zip(copies, arrays, strict=True):
        copy[...] = 0
        copy[sees] = x[sees]
    return copies
