"""The attention forward: thd_attn_fwd_sm90 on Hopper, thd_attn_fwd elsewhere."""

from __future__ import annotations

import cupy
import numpy as np

from thdattn import jit
from thdattn.memory import Bytes, Layer, num_bytes
from thdattn.ops import launch, scheduler
from thdattn.ops.launch import Array, Launch, layout
from thdattn.plan import Plan
from thdattn.structs import FORWARD_SIZE
from thdattn.tiles import TILES, ForwardSm90, Tiles


def attn_fwd(
    q: Array, k: Array, v: Array, plan: Plan, softmax_scale: float, return_max_logit: bool,
    into: tuple[Array, Array] | None = None, merge: bool = False,
) -> tuple[Array, Array, Array | None]:
    """Attention of this rank's query rows over the whole key buffer; see reference.attn_fwd."""
    num_rows, num_heads, _ = q.shape
    out, lse = into or (launch.empty((num_rows, num_heads, v.shape[2]), q.dtype),
                        launch.empty((num_heads, num_rows), np.float32))
    if not (num_rows and len(k)):  # no tiles to launch a kernel for
        if not merge:
            out[...], lse[...] = 0, -np.inf
        return out, lse, cupy.full(num_heads, -np.inf, np.float32) if return_max_logit else None
    if not launch.this_gpu().sm90 and not q.flags.c_contiguous:  # the portable kernel takes whole rows
        whole = (cupy.ascontiguousarray(out), lse) if merge else None
        *results, max_logit = attn_fwd(
            cupy.ascontiguousarray(q), k, v, plan, softmax_scale, return_max_logit, whole, merge)
        for x, result in zip((out, lse), results, strict=True):
            x[...] = result
        return out, lse, max_logit
    run, boxes, max_logits = plan.once(
        ("forward", *layout(q, k, v), merge), lambda: _forward(q, k, v, plan, "float32" if merge else q.dtype.name))
    inputs = launch.tensor_maps((q, k, v), boxes) if boxes else (q, k, v)
    run(*inputs, out, lse, np.float32(softmax_scale))
    return out, lse, max_logits.max(axis=1) if return_max_logit else None


def forward_bytes(plan: Plan, layer: Layer) -> Bytes:
    """Bytes of the work buffers of attn_fwd by name; see reference.forward_bytes."""
    heads, (width, v_width) = layer.num_heads // layer.num_groups, plan.head_dims
    made = {"logits of tiles": num_bytes(_max_logits(TILES[plan.head_dims], plan, heads), np.float32)}
    if layer.num_groups > 1 and not launch.this_gpu().sm90:
        made["a group's q, out and lse"] = plan.local_rows * heads * ((width + v_width) * layer.dtype.itemsize + 4)
    return made


def _max_logits(row: Tiles, plan: Plan, num_heads: int) -> tuple[int, int]:
    """A logit of every head and warp."""
    tiles = row.forward_sm90 if launch.this_gpu().sm90 else row.forward
    return num_heads, plan.num_tiles[0] * tiles.warps


def _forward(q: Array, k: Array, v: Array, plan: Plan, out_dtype: str) -> tuple[Launch, tuple[int, ...], Array]:
    """The launch of the forward, the rows of the boxes that it loads by tensor map (none: by pointer), max_logits."""
    gpu, row, dtype = launch.this_gpu(), TILES[q.shape[2], v.shape[2]], q.dtype.name
    (num_rows, num_heads, _), num_tiles = q.shape, plan.arrays.query_tiles.shape[1]
    group, tiles = num_heads // k.shape[1], row.forward_sm90 if gpu.sm90 else row.forward
    max_logits = plan.buffer("logits of tiles", _max_logits(row, plan, num_heads), np.float32)
    if isinstance(tiles, ForwardSm90):
        order, how = scheduler.schedule(gpu, plan, plan.arrays.query_tiles, num_heads, max(group, tiles.together))
        size = np.array((num_rows, num_tiles, num_heads, group, *how, launch.row_heads(q)), FORWARD_SIZE)[()]
        grid = (min(gpu.multiprocessors, num_tiles * num_heads),)
        run = Launch(jit.kernel(*row.thd_attn_fwd_sm90(dtype, out_dtype)), grid, 128 * (1 + tiles.consumers),
                     (max_logits, plan.key_ranges, order, cupy.zeros(1, np.int32), size))
        return run, (tiles.tile_m, tiles.tile_n, tiles.tile_n), max_logits
    sizes = map(np.int32, (num_rows, len(k), group))
    run = Launch(jit.kernel(*row.thd_attn_fwd(dtype, out_dtype)), (num_tiles, num_heads), 32 * tiles.warps,
                 (max_logits, plan.key_ranges, plan.query_ranges, plan.arrays.query_tiles[1], *sizes))
    return run, (), max_logits
