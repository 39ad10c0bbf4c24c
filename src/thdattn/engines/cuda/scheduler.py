"""The scheduler of the Hopper kernels: in which order they do tiles and heads, and how query heads are split."""

from __future__ import annotations

import math

from thdattn.engines.cuda.launch import Array, Gpu
from thdattn.kernels.configs import MAX_KV_SPLITS
from thdattn.kernels.hopper_configs import ForwardSm90
from thdattn.plan.plan import Plan
from thdattn.plan.ranges import FEW_SEQUENCES

# Measured on an H100. "Queries in sight" are the local queries that see an average key.
SPLIT_COLUMNS, LONG_FROM = 128, 1100  # columns of the query heads of a split; from so many queries in sight on
SHORT_UP_TO, SHORT_TOGETHER = 2048, 16  # up to so many queries in sight; heads done together there
FEW_QUERIES = 256  # of all sequences: to load keys then takes longer than all else
FEW_WAVES, PIECES = 2, 3  # tiles of all heads, and pieces of them, per multiprocessor


def divides_keys(gpu: Gpu, tiles: ForwardSm90, plan: Plan, num_heads: int) -> bool:
    """Whether there are so few tiles of queries that their keys may be divided among multiprocessors.

    Args:
        num_heads: of a layer, in however many launches: their number must change no bit.
    """
    return tiles.split_kv and 0 < plan.num_tiles[0] * num_heads < FEW_WAVES * gpu.multiprocessors


def most_pieces(gpu: Gpu, num_tiles: int, num_heads: int) -> int:
    """At most so many pieces are made of a layer's tiles whose keys are divided."""
    return min(PIECES * gpu.multiprocessors // num_heads, MAX_KV_SPLITS * num_tiles)


def schedule(
    gpu: Gpu, plan: Plan, orders: Array, num_heads: int, together: int, short_up_to: int = SHORT_UP_TO
) -> tuple[Array, tuple[int, int]]:
    """(tiles in the order of work, (together, last_heads)) for scheduled_tile; orders as those of PlanArrays.

    The order is that of the plan, as only the GPU may know the lengths. Few sequences, the longest tile first: blocks
    at work then read the same keys in step, and the multiprocessors end at the same time. Many, one after another, for
    the L2 cache; the heads of a row lie side by side in memory, so short sequences take many together, and so do long
    ones of few queries.
    """
    last, pairs = min(num_heads, -(-3 * gpu.multiprocessors // max(1, orders.shape[1]))), plan.expected_pairs
    few = pairs is not None and plan.batch.total_rows * plan.key_rows <= 2 * FEW_SEQUENCES * pairs
    if together >= num_heads:
        last = num_heads
    if plan.local_rows <= FEW_QUERIES or (not few and 0 < _queries_in_sight(plan) <= short_up_to):
        together, last = SHORT_TOGETHER, 0
    return orders[0], (together, last)


def splits_per_kv_head(
    gpu: Gpu, plan: Plan, num_tiles: int, num_kv_heads: int, group: int, head_dim: int
) -> list[tuple[int, float]]:
    """How many splits of the query heads of a kv head there are, which then add their shares of dk and dv.

    One split needs no accumulators. But few tiles leave multiprocessors idle, and the heads of a split are at work at
    different rows: beyond short sequences, only so many columns of them fit the L2 cache beside what other blocks work
    at.

    Returns:
        [(splits, inf)]; where only the GPU knows the lengths, for every choice up to how many queries in sight.
    """
    if num_tiles * num_kv_heads < 3 * gpu.multiprocessors:
        return [(group, math.inf)]
    choices = [(group // n, math.inf if n == 1 or n * head_dim <= SPLIT_COLUMNS
                else SPLIT_COLUMNS * LONG_FROM / (n * head_dim))
               for n in range(group, 0, -1) if group % n == 0]  # fmt: skip
    choices = choices[: 1 + [most for _, most in choices].index(math.inf)]
    in_sight = _queries_in_sight(plan)
    if in_sight:
        return [next((splits, math.inf) for splits, most in choices if in_sight <= most)]
    return choices


def _queries_in_sight(plan: Plan) -> float:
    """Local queries that see an average key; 0 where nothing is known of the lengths."""
    return (plan.expected_pairs or 0) / (plan.cp_size * plan.key_rows)
