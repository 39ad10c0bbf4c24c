"""Work buffers of the attention on a GPU, declared for one call, and for the largest of all groups of heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from thdattn.engines.cuda import launch, scheduler
from thdattn.engines.cuda.launch import Array, Heads
from thdattn.kernels.configs import STATS_ROWS, TILES
from thdattn.plan.memory import Layer
from thdattn.plan.owners import partials_of_keys
from thdattn.plan.plan import Plan
from thdattn.plan.workspace import FLOAT32, INT32, Buffer, pair_of

MAX_PARTIALS = 2**15 - 1  # of one accumulator; kClaimed of kernels/hopper/backward_common.cuh


def forward_buffers(plan: Plan, layer: Layer) -> list[Buffer]:
    """Declare the work buffers of attn_fwd; see reference.forward_buffers."""
    gpu, num_heads = launch.this_gpu(), layer.group_heads[-1]
    made = [max_logits(plan, num_heads)]
    if not gpu.sm90 and len(layer.groups) > 1:  # the portable kernel takes whole rows
        rows = plan.local_rows, num_heads
        made += pair_of("a group's q, out and lse", rows, plan.head_dims, layer.dtype)
        made.append(Buffer("a group's q, out and lse", rows, FLOAT32))
    tiles = scheduler.forward_tiles(gpu, plan.head_dims)
    if plan.keys_of is None and scheduler.splits_keys(gpu, tiles, plan, layer.num_heads):
        made.append(kv_partials(plan, layer.num_heads, num_heads))
        made += [kv_splits(plan, layer.num_heads, heads, plan.num_tiles[0]) for heads in layer.group_heads]
    return made


def group_array(plan: Plan, heads: Heads, declare: Callable[[int], Buffer]) -> Array:
    """Return a call's work buffer, which is the beginning of that of its largest group of heads.

    declare: returns the buffer of so many query heads.
    """
    return plan.workspace.array(declare(heads.most_heads), declare(heads.num_heads).shape)


def max_logits(plan: Plan, num_heads: int) -> Buffer:
    """Declare the largest logits of every tile, head and warp."""
    warps = scheduler.forward_tiles(launch.this_gpu(), plan.head_dims).warps
    return Buffer("logits of tiles", (plan.num_tiles[0], num_heads, warps), FLOAT32)


def kv_partials(plan: Plan, layer_heads: int, num_heads: int) -> Buffer:
    """Declare the partial results of tiles whose keys are split.

    Args:
        layer_heads: query heads of the layer, of which num_heads are computed at a time.
    """
    tile_m = scheduler.forward_tiles(launch.this_gpu(), plan.head_dims).tile_m
    floats = tile_m * (plan.head_dims[1] + 4)  # of a split and head, kPartialQuads of kernels/split_kv.cuh
    return Buffer("partial results of tiles", (_most_kv_splits(plan, layer_heads) * num_heads, floats), FLOAT32)


def kv_splits(plan: Plan, layer_heads: int, num_heads: int, num_tiles: int) -> Buffer:
    """Declare the list of splits: their number, split tiles, other tiles, and entries read beyond them."""
    beyond = -(-launch.this_gpu().multiprocessors // num_heads)
    return Buffer("splits of tiles", (1 + _most_kv_splits(plan, layer_heads) + num_tiles + beyond,), INT32)


def _most_kv_splits(plan: Plan, layer_heads: int) -> int:
    return scheduler.most_kv_splits(launch.this_gpu(), plan.num_tiles[0], layer_heads)


def backward_buffers(plan: Plan, layer: Layer, sum_dtype: np.dtype[Any], where: str) -> list[Buffer]:
    """Declare the work buffers of attn_bwd; see reference.backward_buffers."""
    num_heads, rows = layer.group_heads[-1], plan.local_rows
    if not (rows and plan.key_rows):
        return []
    made = [statistics(plan, num_heads)]
    if not launch.this_gpu().sm90:
        made.append(dq_accum(plan, num_heads, layer.deterministic))
        if len(layer.groups) > 1:
            name = "a group's dout, q, out and dq"
            made += 2 * pair_of(name, (rows, num_heads), plan.head_dims, layer.dtype)
        return made + partials_of_keys(plan, layer, sum_dtype, where)
    options = SumOptions(sum_dtype, layer.deterministic, where)
    accum = largest_accum(plan, layer.groups, layer.num_heads // layer.num_kv_heads, options)
    made += [accum.buffer, num_partials(plan)]
    if accum.deterministic and TILES[plan.head_dims].backward_sm90.dq is None:
        made.append(Buffer("order of tiles", plan.num_tiles[1:], INT32))
    if plan.has_masked_out_queries and plan.leading_tokens is None:
        made += pair_of(WITHOUT_PADDING, (rows, num_heads), plan.head_dims, layer.dtype)
        made.append(Buffer(WITHOUT_PADDING, (rows,), INT32))
    return made


WITHOUT_PADDING = "q and dout without padding"


class SumOptions(NamedTuple):
    """Options of the sums of dk and dv.

    deterministic: results are the same bits on every run.
    where: see reference.backward_buffers.
    """

    dtype: np.dtype[Any]
    deterministic: bool
    where: str


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
    def buffer(self) -> Buffer:
        """Declaration of one array of all parts."""
        floats = self.dkv_size + self.dq_size + -(-self.num_semaphores // 4) * 4
        return Buffer("gradients in float32", (floats,), FLOAT32)


def accum_of(plan: Plan, num_heads: int, num_kv_heads: int, options: SumOptions) -> Accum:
    """Return the accumulators of a call with these heads."""
    tiles, num_tiles, (head_dim, v_head_dim) = TILES[plan.head_dims].backward_sm90, plan.num_tiles[1], plan.head_dims
    stats_rows = padded_rows(plan.local_rows)
    deterministic = options.deterministic or (tiles.dq is None and num_tiles > MAX_PARTIALS)
    splits = [(1, math.inf)]
    if not deterministic:
        group = num_heads // num_kv_heads
        splits = scheduler.splits_per_kv_head(launch.this_gpu(), plan, num_tiles, num_kv_heads, group, head_dim)
    # dk and dv of several splits are accumulated in float32, which may be their final dtype.
    adds_elsewhere = splits[-1][0] > 1
    if options.dtype == np.float32 and options.where != "own":
        adds_elsewhere = options.where == "made"
    dkv_size = plan.key_rows * num_kv_heads * (head_dim + v_head_dim) if adds_elsewhere else 0
    dq_semaphores, semaphore_rows = stats_rows // 64 * num_heads, num_tiles * tiles.tile_n // 16
    dq_size = 0 if tiles.dq and deterministic else stats_rows * num_heads * head_dim
    return Accum(deterministic, splits, dkv_size, dq_size, dq_semaphores,
                 semaphore_rows, dq_semaphores + 2 * semaphore_rows * num_kv_heads)


def largest_accum(plan: Plan, groups: tuple[int, ...], each: int, options: SumOptions) -> Accum:
    """Return the largest accumulators of several groups: a group of few heads may need more, because it has splits.
    """
    accums = [accum_of(plan, each * size, size, options) for size in sorted({*groups})]
    return max(accums, key=lambda accum: accum.buffer.shape)


def padded_rows(num_rows: int) -> int:
    """Return the number of rows of the statistics of num_rows query rows."""
    return -(-num_rows // STATS_ROWS) * STATS_ROWS


def statistics(plan: Plan, num_heads: int) -> Buffer:
    """Declare the statistics that thd_attn_delta computes."""
    return Buffer("delta", (2, num_heads, padded_rows(plan.local_rows)), FLOAT32)


def num_partials(plan: Plan) -> Buffer:
    """Declare the counts of thd_attn_count_partials_sm90, one for each tile of query rows."""
    tile_m = TILES[plan.head_dims].backward_sm90.tile_m
    return Buffer("partial sums per tile", (padded_rows(plan.local_rows) // tile_m,), INT32)


def dq_accum(plan: Plan, num_heads: int, deterministic: bool) -> Buffer:
    """Declare dq in float32, in the portable backward: in blocks of 16 rows by 8 columns."""
    shape = (0,) if deterministic else (padded_rows(plan.local_rows), num_heads, plan.head_dims[0])
    return Buffer("dq in float32", shape, FLOAT32)
