"""Launchers of kernels.cu: the arrays of a plan, and rows moved between rank order and sequence order."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from thdattn import jit
from thdattn.ops import launch
from thdattn.ops.launch import Array
from thdattn.plan import Plan, PlanArrays, host_arrays
from thdattn.sharding import Sharding
from thdattn.tiles import PLAN_KERNELS, REORDER_KERNELS

_DUAL_CHUNK, _QUERIES, _KEYS, _TILE_COST, _TILE_ORDER = PLAN_KERNELS


def plan_arrays(sharding: Sharding, cp_rank: int, window: tuple[int, int], tiles: tuple[int, int]) -> PlanArrays:
    """The arrays of a plan on the GPU.

    Lengths on the host are planned there and uploaded; lengths on the GPU are planned by kernels, with the same result
    and no copy to the host, so that a captured CUDA graph plans anew for the lengths it finds at each replay.
    """
    if sharding.batch.on_device:
        return _device_arrays(sharding, cp_rank, window, tiles)
    made = host_arrays(sharding, cp_rank, window, tiles)
    return PlanArrays(**{field: cupy.asarray(array) for field, array in vars(made).items()})


def _device_arrays(sharding: Sharding, cp_rank: int, window: tuple[int, int], tiles: tuple[int, int]) -> PlanArrays:
    batch, cp_size, local_rows = sharding.batch, sharding.cp_size, sharding.local_rows
    cu_seqlens, cu_seqlens_padded = (
        launch.from_user(name, x)
        for name, x in (("cu_seqlens", batch.cu_seqlens), ("cu_seqlens_padded", batch.cu_seqlens_padded))
    )
    seqs, left, right = np.int32(batch.num_seqs), np.int32(window[0]), np.int32(window[1])

    if sharding.strategy == "dual_chunk":
        rank_order = launch.empty((cp_size * local_rows,), np.int32)
        _launch_rows(_DUAL_CHUNK, rank_order.size, (rank_order, cu_seqlens_padded, seqs, np.int32(cp_size),
                                                    np.int32(local_rows), np.int32(batch.total_rows)))
    else:  # contiguous rows do not depend on the lengths
        rank_order = cupy.arange(cp_size * local_rows, dtype=np.int32)
        rank_order[batch.total_rows :] = -1
    rows = rank_order[cp_rank * local_rows : (cp_rank + 1) * local_rows]

    positions, key_ranges = launch.empty((local_rows,), np.int32), launch.empty((local_rows, 2), np.int32)
    _launch_rows(_QUERIES, local_rows, (positions, key_ranges, rows, cu_seqlens, cu_seqlens_padded, seqs,
                                        np.int32(local_rows), left, right))
    query_ranges = launch.empty((batch.total_rows, 2), np.int32)
    _launch_rows(_KEYS, batch.total_rows, (query_ranges, rows, cu_seqlens, cu_seqlens_padded, seqs,
                                           np.int32(local_rows), np.int32(batch.total_rows), left, right))
    lengths = cu_seqlens, cu_seqlens_padded, seqs
    return PlanArrays(rows, positions, key_ranges, query_ranges, rank_order,
                      _tile_orders(lengths, key_ranges, rows, tiles[0]),
                      _tile_orders(lengths, query_ranges, None, tiles[1]))


def _tile_orders(lengths: tuple[Any, ...], ranges: Array, rows: Array | None, tile: int) -> Array:
    """Both orders of the tiles of `rows`; None: of all rows, in sequence order."""
    num_rows, num_tiles = len(ranges), -(-len(ranges) // tile)
    # One array, as a replayed graph writes to all of it as long as the orders live: orders, costs, rows.
    made = launch.empty((5 * num_tiles + num_rows,), np.int32)
    cost = made[2 * num_tiles :]
    if rows is None:
        rows, (_, padded, seqs) = made[5 * num_tiles :], lengths
        _launch_rows(_DUAL_CHUNK, num_rows, (rows, padded, seqs, np.int32(1), np.int32(num_rows), np.int32(num_rows)))
    _launch_rows(_TILE_COST, 32 * num_tiles, (cost, ranges, rows, *lengths, np.int32(num_rows), np.int32(tile),
                                              np.int32(num_tiles)))
    _launch_rows(_TILE_ORDER, 32 * num_tiles, (made, cost, np.int32(num_tiles)))
    return made[: 2 * num_tiles].reshape(2, num_tiles)


def _launch_rows(kernel: str, threads: int, args: tuple[Any, ...]) -> None:
    jit.kernel(kernel)((-(-threads // 256),), 256, args)


# ------------------------------------------------------------------------------------------------ reorder


def to_sequence_order(k_ranks: Array, v_ranks: Array, plan: Plan) -> tuple[Array, Array]:
    """Gathered rows moved to sequence order, into buffers of the plan; rows that no local query sees become 0."""
    k, v = (plan.buffer(name, (plan.key_rows, *x.shape[1:]), x.dtype) for name, x in (("k", k_ranks), ("v", v_ranks)))
    reorder(False, (k, k_ranks), (v, v_ranks), plan.rank_order, plan.query_ranges)
    return k, v


def to_rank_order(dk: Array, dv: Array, plan: Plan) -> tuple[Array, Array]:
    """Inverse of to_sequence_order, for the gradients; filler rows become 0."""
    rows = len(plan.rank_order)
    dk_ranks, dv_ranks = (plan.buffer(name, (rows, *x.shape[1:]), x.dtype)
                          for name, x in (("dk_ranks", dk), ("dv_ranks", dv)))
    reorder(True, (dk_ranks, dk), (dv_ranks, dv), plan.rank_order, plan.query_ranges)
    return dk_ranks, dv_ranks


def reorder(
    to_rank_order: bool, first: tuple[Array, Array], second: tuple[Array, Array], order: Array, ranges: Array
) -> None:
    """Each pair is (out, in); one launch moves both. Rows whose range is empty hold nothing."""
    args = [arg for out, source in (first, second)
            for arg in (out, source, np.int32(out.shape[1] * out.shape[2] * out.itemsize // 16))]
    rows = len(order)
    jit.kernel(REORDER_KERNELS[to_rank_order])((-(-rows // 8), 2), 256, (*args, order, ranges, np.int32(rows)))
