"""The attention forward: thd_attn_fwd_sm90 on Hopper, thd_attn_fwd elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cupy
import numpy as np

from thdattn.engines import NEW_ARRAYS, AttentionOptions, ForwardInputs, ForwardOutputs
from thdattn.engines.cuda import launch, scheduler
from thdattn.engines.cuda.launch import Array, Gpu, Heads, Launch, heads_of
from thdattn.engines.cuda.plan import nan_if_invalid, parts_of
from thdattn.engines.cuda.softcap import kind_of, logits_of
from thdattn.jit import compiler
from thdattn.jit.structs import FORWARD_SIZE, KV_PARTIALS
from thdattn.kernels.configs import TILES, Tiles
from thdattn.kernels.instances import Kind
from thdattn.plan.memory import Bytes, Layer, num_bytes
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
        *results, max_logit = attn_fwd(
            inputs._replace(q=cupy.ascontiguousarray(q)), options, whole, on_first_part)
        for x, result in zip((out, lse), results, strict=True):
            x[...] = result
        return out, lse, max_logit
    heads = heads_of(q, k, v, options.head_groups)
    spec = _Spec(heads, outputs.accumulate, on_first_part is not None, kind_of(options.softcap, sinks))
    (*first, last), boxes, max_logits = plan.memoize(("forward", spec), lambda: _launches(plan, spec))

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
    return out, lse, max_logits.max(axis=(0, 2)) if outputs.max_logit else None


class _Spec(NamedTuple):
    """Properties of a call that its launches depend on, besides the plan, which caches launches by them.

    in_parts: tiles that see no key of another rank come first, in launches of their own.
    """

    heads: Heads
    accumulate: bool
    in_parts: bool
    kind: Kind

    @property
    def out_dtype(self) -> str:
        """Name of the dtype of out."""
        return "float32" if self.accumulate else str(self.heads.dtype.name)


def forward_bytes(plan: Plan, layer: Layer) -> Bytes:
    """Return the bytes of the work buffers of attn_fwd by name; see reference.forward_bytes."""
    group_heads, (width, v_width) = [heads for heads, _ in layer.group_heads], plan.head_dims
    row, gpu = TILES[plan.head_dims], launch.this_gpu()
    made = {"logits of tiles": num_bytes(_max_logits(row, plan, max(group_heads)), np.float32)}
    is_slice = plan.keys_of is not None
    if gpu.sm90 and not is_slice and scheduler.splits_keys(gpu, row.forward_sm90, plan, layer.num_heads):
        most = scheduler.most_kv_splits(gpu, plan.num_tiles[0], layer.num_heads)
        made["partial results of tiles"] = num_bytes(_partials(row, most, max(group_heads)), np.float32)
        made["splits of tiles"] = sum(
            num_bytes(_splits(gpu, most, plan.num_tiles[0], heads), np.int32) for heads in group_heads)
    if len(layer.groups) > 1 and not gpu.sm90:
        made["a group's q, out and lse"] = (
            plan.local_rows * max(group_heads) * ((width + v_width) * layer.dtype.itemsize + 4))
    return made


def _max_logits(row: Tiles, plan: Plan, num_heads: int) -> tuple[int, int, int]:
    """Return the shape of the largest logits of every tile, head and warp."""
    tiles = row.forward_sm90 if launch.this_gpu().sm90 else row.forward
    return plan.num_tiles[0], num_heads, tiles.warps


def _partials(row: Tiles, most_splits: int, num_heads: int) -> tuple[int, int]:
    """Return the shape of the partial results of tiles whose keys are split."""
    return most_splits * num_heads, row.partial_floats


def _splits(gpu: Gpu, most_splits: int, num_tiles: int, num_heads: int) -> tuple[int]:
    """Return the shape of the list of splits: their number, split tiles, other tiles, and entries read beyond them."""
    return (1 + most_splits + num_tiles + -(-gpu.multiprocessors // num_heads),)


def _launches(plan: Plan, spec: _Spec) -> tuple[list[Launch], tuple[int, ...], Array]:
    """Return the launches, the rows of the boxes of their tensor maps (none: pointers), and the logits of tiles."""
    gpu, heads = launch.this_gpu(), spec.heads
    row = TILES[heads.head_dim, heads.v_head_dim]
    shape, most = (_max_logits(row, plan, n) for n in (heads.num_heads, heads.most_heads))
    max_logits = plan.buffer("logits of tiles", shape, np.float32, most)
    orders = plan.arrays.query_tiles
    parts = parts_of(orders, plan.foreign_tiles[0]) if spec.in_parts else [orders]
    if gpu.sm90:
        keys = row.forward_sm90.keys(spec.kind)
        return _hopper(gpu, row, plan, spec, parts, max_logits), (row.forward_sm90.tile_m, keys, keys), max_logits
    kernel = compiler.kernel(*row.thd_attn_fwd(heads.dtype.name, spec.out_dtype, spec.kind))
    sizes = tuple(map(np.int32, (plan.local_rows, plan.key_rows, heads.group)))
    runs = [Launch(kernel, (tiles.shape[1], heads.num_heads), 32 * row.forward.warps,
                   (max_logits, plan.key_ranges, plan.query_ranges, tiles[1], *sizes)) for tiles in parts]
    return runs, (), max_logits


def _hopper(
    gpu: Gpu, row: Tiles, plan: Plan, spec: _Spec, parts: list[Array], max_logits: Array
) -> list[Launch]:
    """Return a launch of thd_attn_fwd_sm90 for each part of the tiles."""
    tiles, heads = row.forward_sm90, spec.heads
    # The kernel with capped logits spills registers beside split keys.
    splits = (not spec.accumulate and not spec.kind.caps
              and scheduler.splits_keys(gpu, tiles, plan, heads.row_heads))
    kernel = compiler.kernel(*row.thd_attn_fwd_sm90(heads.dtype.name, spec.out_dtype, spec.kind, splits))
    together = max(heads.group, tiles.together)

    def launch_of(orders: Array) -> Launch:
        num_tiles, how = orders.shape[1], (1, heads.num_heads)
        if splits:
            order, partials = _split_keys(gpu, row, plan, orders[1], heads)
            blocks = gpu.multiprocessors if num_tiles else 0
        else:
            (order, how), partials = scheduler.schedule(gpu, plan, orders, heads.num_heads, together), _WHOLE
            blocks = min(gpu.multiprocessors, num_tiles * heads.num_heads)
        size = np.array(
            (plan.local_rows, num_tiles, heads.num_heads, heads.group, *how, heads.row_heads), FORWARD_SIZE)[()]
        return Launch(kernel, (blocks,), 128 * (1 + tiles.consumers),
                      (max_logits, plan.key_ranges, order, cupy.zeros(1, np.int32), partials, size))

    return [launch_of(orders) for orders in parts]


_WHOLE = np.zeros((), KV_PARTIALS)[()]


def _split_keys(gpu: Gpu, row: Tiles, plan: Plan, order: Array, heads: Heads) -> tuple[Array, Any]:
    """Return the splits of some tiles, the longest first, in the order of work, and the place of their partial results.

    The number of splits follows from all tiles of the plan and all heads of the layer, of which a launch has some.
    """
    every = plan.arrays.query_tiles[1]
    most = scheduler.most_kv_splits(gpu, len(every), heads.row_heads)
    partials = plan.buffer("partial results of tiles", _partials(row, most, heads.num_heads), np.float32,
                           _partials(row, most, heads.most_heads))
    arrived = plan.memoize(
        ("arrived", partials.shape), lambda: cupy.zeros(len(partials) * row.forward_sm90.warps, np.uint32))
    splits = launch.empty(_splits(gpu, most, len(order), heads.num_heads), np.int32)
    args = splits, plan.key_ranges, order, every, *map(np.int32, (
        plan.local_rows, len(order), len(every), heads.row_heads, gpu.multiprocessors, most))
    plan.make(lambda: compiler.kernel(*row.thd_attn_split_kv_sm90())((1,), 1024, args))
    return splits, np.array((partials.data.ptr, arrived.data.ptr), KV_PARTIALS)[()]

