"""The attention forward: thd_attn_fwd_sm90 on Hopper, thd_attn_fwd elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cupy
import numpy as np

from thdattn.engines import NEW_ARRAYS, AttentionOptions, ForwardInputs, ForwardOutputs
from thdattn.engines.cuda import launch, scheduler
from thdattn.engines.cuda.launch import Array, Heads, Launch, heads_of
from thdattn.engines.cuda.plan import nan_if_invalid, parts_of, trees_of
from thdattn.engines.cuda.softcap import kind_of, logits_of
from thdattn.engines.cuda.workspace import group_array, kv_partials, kv_splits, max_logits
from thdattn.jit import compiler
from thdattn.jit.structs import FORWARD_SIZE, KV_PARTIALS
from thdattn.kernels.configs import Forward, ForwardSm90
from thdattn.kernels.instances import Kind, instance
from thdattn.plan.plan import Plan


def attn_fwd(
    inputs: ForwardInputs, options: AttentionOptions, outputs: ForwardOutputs = NEW_ARRAYS,
    on_first_part: Callable[[], Any] | None = None,
) -> tuple[Array, Array, Array | None]:
    """Compute attention of this rank's query rows over the whole key buffer; see reference.attn_fwd."""
    q, k, v, plan, sinks = inputs
    num_rows, num_heads, _ = q.shape
    out, lse = outputs.arrays or (launch.empty((num_rows, num_heads, v.shape[2]), q.dtype),
                                  launch.empty((num_heads, num_rows), np.float32))
    if not (num_rows and len(k)):  # no tiles to launch a kernel for
        if on_first_part is not None:
            on_first_part()
        if not outputs.accumulate:
            out[...], lse[...] = 0, -np.inf
            nan_if_invalid(plan, out, lse)
        return out, lse, cupy.full(num_heads, -np.inf, np.float32) if outputs.max_logit else None
    if not launch.this_gpu().sm90 and not q.flags.c_contiguous:  # the portable kernel takes whole rows
        whole = outputs._replace(arrays=(cupy.ascontiguousarray(out), lse) if outputs.accumulate else None)
        *results, largest = attn_fwd(
            inputs._replace(q=cupy.ascontiguousarray(q)), options, whole, on_first_part)
        for x, result in zip((out, lse), results, strict=True):
            x[...] = result
        return out, lse, largest
    heads = heads_of(q, k, v, options.head_groups)
    spec = _Spec(heads, outputs.accumulate, on_first_part is not None, kind_of(options.softcap, sinks))
    (*first, last), boxes, of_tiles = plan.memoize(("forward", spec), lambda: _launches(plan, spec))

    def arguments() -> tuple[Any, ...]:
        rows = num_rows, len(k), len(v)
        maps = launch.tensor_maps((q, k, v), rows, boxes, l2_bytes=128) if boxes else (q, k, v)
        logits = logits_of(options.softmax_scale, options.softcap)
        return *maps, out, lse, logits, launch.NONE if sinks is None else sinks

    key = (options.softmax_scale, options.softcap, k.shape, k.strides, v.strides,
           *[x.data.ptr for x in (q, k, v, out, lse)], None if sinks is None else sinks.data.ptr)
    for run in first:
        run.launch_as(key, arguments)
    if on_first_part is not None:
        on_first_part()
    last.launch_as(key, arguments)
    return out, lse, of_tiles.max(axis=(0, 2)) if outputs.max_logit else None


class _Spec(NamedTuple):
    """Properties of a call that its launches depend on, besides the plan, which caches launches by them.

    in_parts: the tiles of plan.first_tiles have launches of their own.
    """

    heads: Heads
    accumulate: bool
    in_parts: bool
    kind: Kind

    @property
    def out_dtype(self) -> str:
        return "float32" if self.accumulate else str(self.heads.dtype.name)


def _launches(plan: Plan, spec: _Spec) -> tuple[list[Launch], tuple[int, ...], Array]:
    """Return the launches, the rows of the boxes of their tensor maps (none: pointers), and the logits of tiles."""
    gpu, heads, kind = launch.this_gpu(), spec.heads, spec.kind
    tiles = scheduler.forward_tiles(gpu, plan.head_dims)
    # Kernels with capped logits spill registers beside split keys.
    splits = (not spec.accumulate and not kind.caps
              and scheduler.splits_keys(gpu, tiles, plan, heads.layer_heads))
    kernel = compiler.kernel(*tiles.kernel(
        plan.head_dims, heads.dtype.name, spec.out_dtype, kind, splits, plan.has_trees))
    of_tiles = group_array(plan, heads, lambda num_heads: max_logits(plan, num_heads))
    make: Callable[..., Launch] = _portable if isinstance(tiles, Forward) else _hopper
    parts = parts_of(plan, 0) if spec.in_parts else [plan.arrays.query_tiles]
    boxes = () if isinstance(tiles, Forward) else (tiles.tile_m, tiles.keys(kind), tiles.keys(kind))
    return [make(plan, heads, kernel, tiles, splits, of_tiles, orders) for orders in parts], boxes, of_tiles


def _portable(
    plan: Plan, heads: Heads, kernel: compiler.Kernel, tiles: Forward, splits: bool, of_tiles: Array, orders: Array
) -> Launch:
    """Return the launch of thd_attn_fwd for some tiles."""
    gpu, order, partials = launch.this_gpu(), orders[1], _WHOLE
    blocks = len(order)
    if splits:
        blocks += scheduler.most_kv_splits(gpu, plan.num_tiles[0], heads.layer_heads) if blocks else 0
        order, partials = _split_keys(plan, order, heads)
    sizes = map(np.int32, (plan.local_rows, plan.key_rows, heads.group))
    query_ranges = plan.query_ranges if plan.has_unseen_keys else launch.NONE
    return Launch(kernel, (blocks, heads.num_heads), 32 * tiles.warps,
                  (of_tiles, plan.key_ranges, query_ranges, order, *sizes, partials, *trees_of(plan)))


def _hopper(
    plan: Plan, heads: Heads, kernel: compiler.Kernel, tiles: ForwardSm90, splits: bool, of_tiles: Array, orders: Array
) -> Launch:
    """Return the launch of thd_attn_fwd_sm90 for some tiles."""
    gpu, num_tiles, how, partials = launch.this_gpu(), orders.shape[1], (1, heads.num_heads), _WHOLE
    if splits:
        order, partials = _split_keys(plan, orders[1], heads)
        blocks = gpu.multiprocessors if num_tiles else 0
    else:
        together = max(heads.group, tiles.together)
        order, how = scheduler.schedule(gpu, plan, orders, heads.num_heads, together)
        blocks = min(gpu.multiprocessors, num_tiles * heads.num_heads)
    size = np.array(
        (plan.local_rows, num_tiles, heads.num_heads, heads.group, *how, heads.row_heads), FORWARD_SIZE)[()]
    return Launch(kernel, (blocks,), 128 * (1 + tiles.consumers),
                  (of_tiles, plan.key_ranges, order, cupy.zeros(1, np.int32), partials, size, *trees_of(plan)))


_WHOLE = np.zeros((), KV_PARTIALS)[()]


def _split_keys(plan: Plan, order: Array, heads: Heads) -> tuple[Array, Any]:
    """Return the splits of some tiles, the longest first, in the order of work, and the place of their partial results.

    The number of splits follows from all tiles of the plan and all heads of the layer, of which a launch has some.
    """
    every, layer_heads, gpu = plan.arrays.query_tiles[1], heads.layer_heads, launch.this_gpu()
    tiles = scheduler.forward_tiles(gpu, plan.head_dims)
    partials = group_array(plan, heads, lambda num_heads: kv_partials(plan, layer_heads, num_heads))
    arrived = plan.memoize(
        ("arrived", partials.shape), lambda: cupy.zeros(len(partials) * tiles.warps, np.uint32))
    splits = launch.new(kv_splits(plan, layer_heads, heads.num_heads, len(order)))
    args = splits, plan.key_ranges, order, every, *map(np.int32, (
        plan.local_rows, len(order), len(every), layer_heads, gpu.multiprocessors * tiles.per_multiprocessor,
        scheduler.most_kv_splits(gpu, len(every), layer_heads)))
    kernel = compiler.kernel(*instance("thd_attn_split_kv", tiles.tile_m, tiles.tile_n))
    plan.make(lambda: kernel((1,), 1024, args))
    return splits, np.array((partials.data.ptr, arrived.data.ptr), KV_PARTIALS)[()]
