"""Workspace sizes of the backward: accumulators, semaphores, statistics of query rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from thdattn.engines.cuda import launch, scheduler
from thdattn.engines.cuda.launch import Gpu
from thdattn.kernels.configs import STATS_ROWS, TILES, Tiles
from thdattn.kernels.hopper_configs import BackwardByGradientSm90
from thdattn.plan.memory import Bytes, Layer, num_bytes
from thdattn.plan.owners import partials_bytes
from thdattn.plan.plan import Plan

Groups = Sequence[tuple[int, int]]  # (query heads, kv heads) of the groups that share work buffers, ascending
MAX_PARTIALS = 2**15 - 1  # of one accumulator; kClaimed of kernels/hopper/backward_common.cuh


def backward_bytes(plan: Plan, layer: Layer, sum_dtype: DTypeLike, where: str) -> Bytes:
    """Return the bytes of the work buffers of attn_bwd by name; see reference.backward_bytes."""
    gpu, row, rows = launch.this_gpu(), TILES[plan.head_dims], plan.local_rows
    if not (rows and plan.key_rows):
        return {}
    heads_bytes = most_heads(layer.group_heads) * num_bytes((rows, sum(plan.head_dims)), layer.dtype)
    made = {"delta": num_bytes(stats_shape(rows, most_heads(layer.group_heads)), np.float32)}
    if not gpu.sm90:
        made["dq in float32"] = num_bytes(
            dq_accum_shape(rows, most_heads(layer.group_heads), row, layer.deterministic), np.float32)
        if len(layer.groups) > 1:
            made["a group's dout, q, out and dq"] = 2 * heads_bytes
        return made | partials_bytes(plan, layer, sum_dtype, where)
    accum = largest_accum(gpu, row, plan, layer.group_heads, np.dtype(sum_dtype), layer.deterministic, where)
    made["gradients in float32"] = num_bytes(accum.shape, np.float32)
    made["partial sums per tile"] = num_bytes(num_partials_shape(row, rows), np.int32)
    if accum.deterministic and not isinstance(row.backward_sm90, BackwardByGradientSm90):
        made["order of tiles"] = num_bytes(plan.num_tiles[1:], np.int32)
    if plan.has_masked_out_queries and plan.leading_tokens is None:
        made["q and dout without padding"] = heads_bytes + num_bytes((rows,), np.int32)
    return made


class Accum(NamedTuple):
    """Parts of the accumulators of the Hopper kernels: floats of dk and dv, floats of dq, semaphores.

    deterministic: thread blocks wait for each other.
    splits: as scheduler.splits_per_kv_head returns them.
    semaphore_rows: semaphores of a kv head for each of dk and dv; they follow the semaphores of dq.
    """

    deterministic: bool
    splits: list[tuple[int, float]]
    dkv_size: int
    dq_size: int
    dq_semaphores: int
    semaphore_rows: int
    num_semaphores: int

    @property
    def shape(self) -> tuple[int]:
        """Shape of one array of all parts."""
        return (self.dkv_size + self.dq_size + -(-self.num_semaphores // 4) * 4,)


def _accum(gpu: Gpu, row: Tiles, plan: Plan, num_heads: int, num_kv_heads: int, dkv_dtype: np.dtype[Any],
           deterministic: bool, where: str) -> Accum:
    """Return the accumulators of a call with these heads. where: see reference.backward_bytes."""
    tiles, num_tiles, (head_dim, v_head_dim) = row.backward_sm90, plan.num_tiles[1], plan.head_dims
    stats_rows, wide = padded_rows(plan.local_rows), isinstance(tiles, BackwardByGradientSm90)
    deterministic = deterministic or (not wide and num_tiles > MAX_PARTIALS)
    splits = [(1, math.inf)]
    if not deterministic:
        group = num_heads // num_kv_heads
        splits = scheduler.splits_per_kv_head(gpu, plan, num_tiles, num_kv_heads, group, head_dim)
    # dk and dv of several splits are accumulated in float32, which may be their final dtype.
    adds_elsewhere = splits[-1][0] > 1
    if dkv_dtype == np.float32 and where != "own":
        adds_elsewhere = where == "made"
    dkv_size = plan.key_rows * num_kv_heads * (head_dim + v_head_dim) if adds_elsewhere else 0
    dq_semaphores, semaphore_rows = stats_rows // 64 * num_heads, num_tiles * tiles.tile_n // 16
    dq_size = 0 if wide and deterministic else stats_rows * num_heads * head_dim
    return Accum(deterministic, splits, dkv_size, dq_size, dq_semaphores,
                 semaphore_rows, dq_semaphores + 2 * semaphore_rows * num_kv_heads)


def largest_accum(gpu: Gpu, row: Tiles, plan: Plan, groups: Groups, *how: Any) -> Accum:
    """Return the largest accumulators of several groups: a group of few heads may need more, because it has splits."""
    return max((_accum(gpu, row, plan, *heads, *how) for heads in groups), key=lambda accum: accum.shape)


def padded_rows(num_rows: int) -> int:
    """Return the number of rows of the statistics of num_rows query rows."""
    return -(-num_rows // STATS_ROWS) * STATS_ROWS


def stats_shape(num_rows: int, num_heads: int) -> tuple[int, int, int]:
    """Return the shape of the statistics that thd_attn_delta computes."""
    return 2, num_heads, padded_rows(num_rows)


def num_partials_shape(row: Tiles, num_rows: int) -> tuple[int]:
    """Return the shape of the counts of thd_attn_count_partials_sm90, one for each tile of query rows."""
    return (padded_rows(num_rows) // row.backward_sm90.tile_m,)


def dq_accum_shape(num_rows: int, num_heads: int, row: Tiles, deterministic: bool) -> tuple[int, ...]:
    """Return the shape of dq in float32, in the portable backward."""
    return (0,) if deterministic else (num_rows, num_heads, row.head_dim)


def most_heads(groups: Groups) -> int:
    """Return the query heads of the largest group."""
    return groups[-1][0]
