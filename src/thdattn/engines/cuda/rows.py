"""Launchers that move rows of keys, values and gradients between orders, and sum partial gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from thdattn.comm import PeerExchange
from thdattn.comm.overlap.reduce import add_up
from thdattn.comm.peer.exchange import NO_MARKS, THREADS
from thdattn.engines.cuda import launch
from thdattn.engines.cuda.launch import Array, Launch
from thdattn.jit import compiler
from thdattn.jit.structs import ALL_GATHER, MAX_RANKS, PARTIALS, ROWS
from thdattn.kernels.instances import GATHER_KERNEL, REORDER_KERNELS
from thdattn.plan.plan import Plan

_GATHER_BLOCKS = 256  # two for each multiprocessor


def to_sequence_order(
    parts: Sequence[Sequence[Array]], plan: Plan, into: Sequence[Array] | None = None,
    own: Sequence[Array] | None = None, peer_exchange: PeerExchange | None = None,
) -> tuple[Array, Array]:
    """Move rows of all ranks to sequence order; rows that no local query sees become 0.

    Args:
        own: this rank's rows, which `parts` lack; with peer_exchange, the kernel sends them to the other ranks.
        peer_exchange: arguments of the kernel that exchanges rows with all peers, see Arrival.
    """
    k, v = into or [launch.empty((plan.key_rows, *x.shape[1:]), x.dtype) for x, *_ in parts]
    if peer_exchange is None or own is None:
        reorder(False, (k, v), parts, plan.rank_order, plan.query_ranges, own, plan.first_own)
    else:
        _gather(plan, (k, v), parts, own, peer_exchange)
    return k, v


def _gather(
    plan: Plan, outs: Sequence[Array], sources: Sequence[Sequence[Array]], own: Sequence[Array],
    peer_exchange: PeerExchange,
) -> None:
    """Launch thd_peer_exchange for all rows."""
    if not plan.local_key_rows:  # then no rank has any
        return
    run: Launch = plan.memoize(
        "gather", lambda: Launch(compiler.kernel(GATHER_KERNEL), (_GATHER_BLOCKS,), THREADS, NO_MARKS))

    def arguments() -> tuple[Any, ...]:
        rows = [_moved(out.data.ptr, launch.row_bytes(out), mine.data.ptr, launch.row_bytes(mine), parts[0].strides[0],
                       *[part.data.ptr for part in parts])
                for out, parts, mine in zip(outs, sources, own, strict=True)]
        order, ranges = plan.rank_order.data.ptr, plan.query_ranges.data.ptr
        to = [(*places, *[0] * (MAX_RANKS - len(places))) for places in peer_exchange.to]
        return np.array((*rows, to, order, ranges, plan.local_key_rows), ALL_GATHER)[()], peer_exchange.flags

    key = (id(peer_exchange.flags), *[(x.data.ptr, x.nbytes) for x in outs], *[(x.data.ptr, x.strides) for x in own])
    run.launch_as(key, arguments, (peer_exchange.marks, peer_exchange.number))


def to_rank_order(dk: Array, dv: Array, plan: Plan) -> tuple[Array, Array]:
    """Move gradients to rank order, the inverse of to_sequence_order; filler rows become 0."""
    dk_ranks, dv_ranks = (launch.empty((len(plan.rank_order), *x.shape[1:]), x.dtype) for x in (dk, dv))
    reorder(True, (dk_ranks, dv_ranks), ([dk], [dv]), plan.rank_order, plan.query_ranges)
    return dk_ranks, dv_ranks


def pack_rows(xs: Sequence[Array], order: Array, into: Sequence[Array]) -> None:
    """Put row order[t] of each array at t, two arrays in a launch; a row of -1 becomes 0."""
    for i in range(0, len(xs), 2):
        reorder(True, into[i : i + 2], [[x] for x in xs[i : i + 2]], order, order)  # to rank order, ranges are unused


def place_rows(xs: Sequence[Array], order: Array, plan: Plan, into: Sequence[Array]) -> None:
    """Put rows of two arrays at their places in key buffers: into[order[t]] = x[t], except where order is -1."""
    reorder(False, into, [[x] for x in xs], order, plan.query_ranges)


def add_partials(own: Sequence[Array], back: Sequence[Array], plan: Plan, results: Sequence[Array]) -> None:
    """Add the partial sums of dk and dv of this rank's rows; see reference.add_partials."""
    partials = np.zeros((), PARTIALS)
    for places, mine, theirs in zip(partials["of"], own, back, strict=True):
        places[:2] = theirs.data.ptr, mine.data.ptr
    add_up(partials[()], plan.cp_size, plan.arrays.returns, results, own=plan.cp_rank)


def reorder(
    to_rank_order: bool, outs: Sequence[Array], sources: Sequence[Sequence[Array]], order: Array, ranges: Array,
    own: Sequence[Array] | None = None, first_own: int = 0,
) -> None:
    """Move the rows of one or two arrays in one launch. In sequence order, rows whose range is empty become 0.

    Args:
        sources: for each array of outs, the equal parts that make up its rows, with as many heads as the array. A part
            may be some of the heads of a larger array.
        own: for each array, a part that replaces the rows from first_own on.
    """
    rows = [(out.data.ptr, launch.row_bytes(out), mine.data.ptr, launch.row_bytes(mine), launch.row_bytes(parts[0]),
             *[part.data.ptr for part in parts]) for out, parts, mine in zip(outs, sources, own or outs, strict=True)]
    arguments = _arguments(rows[0], rows[-1], order.data.ptr, ranges.data.ptr, len(order), max(1, len(sources[0][0])),
                           first_own, len(own[0]) if own else 0)
    compiler.kernel(REORDER_KERNELS[to_rank_order]).launch((-(-len(order) // 8), len(rows)), 256, arguments)


@functools.lru_cache(maxsize=4096)
def _arguments(x: tuple[int, ...], y: tuple[int, ...], order: int, ranges: int, *sizes: int) -> compiler.Arguments:
    """Return the cached arguments of thd_reorder."""
    return compiler.Arguments((_moved(*x), _moved(*y), np.uint64(order), np.uint64(ranges), *map(np.int32, sizes)))


def _moved(out: int, out_pitch: int, own: int, own_pitch: int, pitch: int, *parts: int) -> Any:
    """Return a Rows struct."""
    places = (*parts, *[0] * (MAX_RANKS - len(parts)))
    return np.array((places, own, out, out_pitch // 16, pitch // 16, own_pitch // 16), ROWS)[()]
