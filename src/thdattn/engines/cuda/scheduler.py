"""Scheduler: the order of tiles and heads, KV splits, and splits of query heads; all but KV splits on Hopper alone."""

from __future__ import annotations

import math

from thdattn.engines.cuda.launch import Array, Gpu
from thdattn.kernels.configs import MAX_KV_SPLITS, TILES, Backward, Dims, Forward, ForwardSm90
from thdattn.plan.plan import Plan
from thdattn.plan.ranges import FEW_SEQUENCES

# Measured on an H100. "Visible queries" are the local queries that see an average key.
SPLIT_COLUMNS, LONG_FROM = 128, 1100  # columns of the query heads of a split; from so many visible queries on
SHORT_UP_TO, SHORT_TOGETHER = 2048, 16  # up to so many visible queries; heads computed together there
FEW_QUERIES = 256  # of all sequences: loading keys then takes longer than all else
FEW_WAVES, KV_SPLITS = 2, 3  # query tiles of all heads, and their KV splits, per multiprocessor


def forward_tiles(gpu: Gpu, dims: Dims) -> Forward | ForwardSm90:
    """Return the tile sizes of a GPU's forward."""
    row = TILES[dims]
    return row.forward_sm90 if gpu.sm90 else row.on(gpu.arch).forward_for(gpu.shared_bytes)


def portable_backward(gpu: Gpu, dims: Dims) -> Backward:
    """Return the tile sizes of thd_attn_bwd on a GPU."""
    return TILES[dims].on(gpu.arch).backward_for(gpu.shared_bytes)


def splits_keys(gpu: Gpu, tiles: Forward | ForwardSm90, plan: Plan, num_heads: int) -> bool:
    """Tell if there are so few query tiles that their keys may be divided among multiprocessors; not with trees.

    Args:
        num_heads: heads of a layer, in however many launches. The number of launches must change no bit.
    """
    return tiles.split_kv and not plan.has_trees and 0 < plan.num_tiles[0] * num_heads < FEW_WAVES * gpu.multiprocessors


def most_kv_splits(gpu: Gpu, num_tiles: int, num_heads: int) -> int:
    """Return the most KV splits of a layer's query tiles that have several."""
    return min(KV_SPLITS * gpu.multiprocessors // num_heads, MAX_KV_SPLITS * num_tiles)


def schedule(
    gpu: Gpu, plan: Plan, orders: Array, num_heads: int, together: int, short_up_to: int = SHORT_UP_TO
) -> tuple[Array, tuple[int, int]]:
    """Return (tiles in the order of work, (together, last_heads)) for scheduled_tile; orders: those of PlanArrays.

    The order is that of the plan, as only the GPU may know the lengths. Few sequences are ordered by the longest tile:
    thread blocks then read the same keys in step, and the multiprocessors end at the same time. Many sequences are
    computed one after another, for the L2 cache. The heads of a row are neighbours in memory, so short sequences take
    many heads together, and so do long ones with few queries.
    """
    last, pairs = min(num_heads, -(-3 * gpu.multiprocessors // max(1, orders.shape[1]))), plan.expected_pairs
    few = pairs is not None and plan.batch.total_rows * plan.key_rows <= 2 * FEW_SEQUENCES * pairs
    if together >= num_heads:
        last = num_heads
    if plan.local_rows <= FEW_QUERIES or (not few and 0 < _visible_queries(plan) <= short_up_to):
        together, last = SHORT_TOGETHER, 0
    return orders[0], (together, last)


def splits_per_kv_head(
    gpu: Gpu, plan: Plan, num_tiles: int, num_kv_heads: int, group: int, head_dim: int
) -> list[tuple[int, float]]:
    """Choose the number of head splits of a kv head, whose partial sums of dk and dv are added.

    One split needs no accumulators. But few tiles leave multiprocessors idle. And the heads of a split work on
    different rows: beyond short sequences, only so many of their columns fit the L2 cache beside those of other thread
    blocks.

    Returns:
        [(splits, inf)]. If only the GPU knows the lengths: every choice, with the most visible queries it is for.
    """
    if num_tiles * num_kv_heads < 3 * gpu.multiprocessors:
        return [(group, math.inf)]
    choices = [(group // n, math.inf if n == 1 or n * head_dim <= SPLIT_COLUMNS
                else SPLIT_COLUMNS * LONG_FROM / (n * head_dim))
               for n in range(group, 0, -1) if group % n == 0]
    choices = choices[: 1 + [most for _, most in choices].index(math.inf)]
    visible = _visible_queries(plan)
    if visible:
        return [next((splits, math.inf) for splits, most in choices if visible <= most)]
    return choices


def _visible_queries(plan: Plan) -> float:
    """Return how many local queries see an average key; 0 if nothing is known of the lengths."""
    return (plan.expected_pairs or 0) / (plan.cp_size * plan.key_rows)
