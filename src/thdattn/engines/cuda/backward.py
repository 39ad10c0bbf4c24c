"""The attention backward: the kernels that a call launches, and their arguments.

Every backward starts with thd_attn_delta. On Hopper, thd_attn_bwd_sm90 follows, or for head dims 192/128
thd_attn_bwd_shared_dq_sm90, or beyond them thd_attn_bwd_by_gradient_sm90 and thd_attn_round_dq_sm90; deterministic,
the latter without dq, and thd_attn_bwd_dq_sm90. Elsewhere thd_attn_bwd and thd_attn_round_dq; deterministic,
thd_attn_bwd without dq and thd_attn_bwd_dq.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import cupy
import numpy as np
from numpy.typing import DTypeLike

from thdattn.engines import AttentionOptions, BackwardInputs, BackwardOutputs
from thdattn.engines.cuda import launch, scheduler
from thdattn.engines.cuda.launch import Array, Heads, Launch, heads_of
from thdattn.engines.cuda.plan import pairs_of, parts_of, trees_of
from thdattn.engines.cuda.rows import reorder
from thdattn.engines.cuda.softcap import logits_of, lse_unit
from thdattn.engines.cuda.workspace import (
    WITHOUT_PADDING,
    SumOptions,
    dq_accum,
    group_array,
    largest_accum,
    num_partials,
    padded_rows,
    statistics,
)
from thdattn.jit import compiler
from thdattn.jit.structs import BACKWARD_SIZE, GRADIENTS, OWNERS, PACK_FILTER, PARTIALS
from thdattn.kernels.configs import TILES, BackwardDqSm90, lanes_of
from thdattn.kernels.instances import ROUND_KERNELS, instance
from thdattn.plan.owners import places_of_keys
from thdattn.plan.plan import Plan
from thdattn.plan.workspace import Buffer, pair_of

OnFirstPart = Callable[[Array, Array], None]
Arguments = Callable[[], tuple[Any, ...]]
_NO_OWNERS = bytes(PARTIALS.itemsize), 0


def attn_bwd(
    inputs: BackwardInputs, options: AttentionOptions, outputs: BackwardOutputs,
    on_first_part: OnFirstPart | None = None,
) -> tuple[Array, Array, Array]:
    """Compute the gradients of attn_fwd; see reference.attn_bwd.

    Where dq comes from several tiles of keys, it is accumulated in float32 and rounded once. Deterministic, on Hopper
    up to head dims 192/128, thread blocks wait for each other to add from the last tile of keys to the first.
    Otherwise dq has a kernel of its own, for 1.4 times the matrix products. Where blocks wait for each other, all
    tiles are complete before on_first_part. Groups of heads share accumulators: the launches of one group follow those
    of another.
    """
    _, q, k, v, _, _, plan = inputs
    if not (len(q) and len(k)):  # no tiles to launch a kernel for
        return _zeros(inputs, outputs, on_first_part)
    dq = launch.empty(q.shape, q.dtype) if outputs.dq is None else outputs.dq
    if not launch.this_gpu().sm90 and not q.flags.c_contiguous:  # the portable kernels take whole rows
        dout, q, out = map(cupy.ascontiguousarray, (inputs.dout, q, inputs.out))
        inputs = inputs._replace(dout=dout, q=q, out=out)
    where = "own" if outputs.owners is not None else "made" if outputs.dk_dv is None else "given"
    spec = _Spec(heads_of(q, k, v, options.head_groups), dq.dtype, outputs.kv_dtype, options.deterministic,
                 where, on_first_part is not None, options.softcap > 0)
    launches = plan.memoize(("backward", spec), lambda: (_Hopper if launch.this_gpu().sm90 else _Portable)(plan, spec))
    whole = dq
    if launch.row_heads(dq) != launch.row_heads(q):
        whole = cupy.ascontiguousarray(dq) if outputs.accumulate else launch.empty(q.shape, q.dtype)
    dk_dv = outputs.dk_dv or (() if where == "own" else launches.new_dk_dv(k, v))
    call = _Call(inputs, options, whole, dk_dv, outputs.own_rows, _NO_OWNERS if outputs.owners is None else (
        outputs.owners[0].tobytes(), outputs.owners[1].data.ptr))
    launches(call, on_first_part)
    if whole is not dq:
        dq[...] = whole
    dk, dv = dk_dv or (None, None)
    return dq, dk, dv


def _zeros(
    inputs: BackwardInputs, outputs: BackwardOutputs, on_first_part: OnFirstPart | None
) -> tuple[Array, Array, Array]:
    """Return the gradients of an attention without queries or without keys."""
    q, k, v = inputs.q, inputs.k, inputs.v
    dq = launch.empty(q.shape, q.dtype) if outputs.dq is None else outputs.dq
    if not outputs.accumulate:
        dq[...] = 0
    if outputs.owners is not None:
        return dq, None, None
    dk, dv = outputs.dk_dv or [launch.empty(x.shape, outputs.kv_dtype) for x in (k, v)]
    dk[...], dv[...] = 0, 0
    if on_first_part is not None:
        on_first_part(dk, dv)
    return dq, dk, dv


class _Spec(NamedTuple):
    """Properties of a call that its launches depend on, besides the plan, which caches launches by them.

    dq_dtype: float32 where dq is accumulated over calls.
    where: see reference.backward_buffers.
    in_parts: the tiles of plan.first_tiles have launches of their own.
    """

    heads: Heads
    dq_dtype: np.dtype[Any]
    kv_dtype: np.dtype[Any]
    deterministic: bool
    where: str
    in_parts: bool
    caps: bool


class _Call:
    """Arguments of one call, which differ between calls of the same launches.

    dk_dv: arrays for dk and dv; empty: their rows go to the ranks that own the keys.
    owners: bytes of a PARTIALS, and the address of places; see BackwardOutputs.
    key: by which launches know the arguments of calls.
    """

    def __init__(
        self, inputs: BackwardInputs, options: AttentionOptions, dq: Array, dk_dv: Sequence[Array],
        own_rows: Sequence[Array], owners: tuple[bytes, int],
    ) -> None:
        self.dout, self.q, self.k, self.v, self.out, self.lse, self.plan = inputs
        self.softmax_scale, self.softcap = options.softmax_scale, options.softcap
        self.dq, self.dk_dv, self._own_rows, self._owners = dq, dk_dv, own_rows, owners
        arrays = *inputs[:6], dq, *dk_dv, *own_rows
        self.key = (self.softmax_scale, self.softcap, owners, self.dout.strides, self.k.strides, self.v.strides,
                    *[x.data.ptr for x in arrays])

    @property
    def logits(self) -> Any:
        """Logits<caps> of the kernels."""
        return logits_of(self.softmax_scale, self.softcap)

    @property
    def owners(self) -> Any:
        """OWNERS struct of the kernels."""
        partials, places = self._owners
        return np.array((np.frombuffer(partials, PARTIALS)["of"][0], places), OWNERS)[()]

    def addresses(self, accum: Sequence[Any] = ()) -> list[int]:
        """Return the addresses of dk, dv, accumulators on Hopper, rounded rows and their places; 0 for none."""
        places = (*self._own_rows, self.plan.arrays.places) if self._own_rows else [None] * 3
        return [0 if x is None else x.data.ptr for x in (*(self.dk_dv or [None] * 2), *accum, *places)]


def rounded(x: Array, dtype: DTypeLike) -> Array:
    """Return a float32 array (rows, heads, head_dim) rounded to a 16-bit dtype, as a new array."""
    out = launch.empty(x.shape, dtype)
    compiler.kernel(ROUND_KERNELS[out.dtype.name])((-(-x.size // 2048),), 256, (out, x, np.uint64(x.size)))
    return out


class _Launches:
    """Launches of a backward: of delta, of dk and dv for every part of the tiles, and of dq alone or its rounding."""

    _delta: Launch
    _mains: list[list[Launch]]
    _dq: Launch | None = None
    _round_dq: Launch | None = None
    _dq_accum: Array
    _kv_dtype: np.dtype[Any]

    def new_dk_dv(self, k: Array, v: Array) -> Sequence[Array]:
        """Return arrays for dk and dv."""
        return [launch.empty(x.shape, self._kv_dtype) for x in (k, v)]

    def arguments(self, call: _Call) -> tuple[Arguments, Arguments]:
        """Return functions that return a call's arguments of the kernels of dk and dv, and of dq alone."""
        raise NotImplementedError

    def __call__(self, call: _Call, on_first_part: OnFirstPart | None) -> None:
        """Launch all kernels of a call, and call on_first_part after the first part of dk and dv."""
        self._delta.launch_as(call.key, lambda: (
            call.out, call.dout, call.lse, lse_unit(call.softmax_scale, call.softcap)))
        of_main, of_dq = self.arguments(call)
        for number, launches in enumerate(self._mains):
            for run in launches:
                run.launch_as(call.key, of_main)
            if number == 0 and on_first_part is not None:
                on_first_part(*call.dk_dv)
        if self._dq is not None:
            self._dq.launch_as(call.key, of_dq)
        if self._round_dq is not None:
            self._round_dq.launch_as(call.key, lambda: (call.dq, self._dq_accum, np.float32(call.softmax_scale)))


class _Hopper(_Launches):
    """Launches on Hopper. dq is accumulated in a layout of its own and rounded once."""

    def __init__(self, plan: Plan, spec: _Spec) -> None:
        heads, tiles = spec.heads, TILES[plan.head_dims].backward_sm90
        options = SumOptions(spec.kv_dtype, spec.deterministic, spec.where)
        accum, largest = (largest_accum(plan, groups, heads.group, options)
                          for groups in ((heads.num_kv_heads,), heads.groups))
        in_order = accum.deterministic and tiles.dq is None  # thread blocks add to dq in order
        self._spec, self._kv_dtype, self._accum, self._in_order = spec, spec.kv_dtype, accum, in_order

        floats = plan.workspace.array(largest.buffer, accum.buffer.shape)
        self._dkv_accum, rest = floats[: accum.dkv_size], floats[accum.dkv_size :]
        self._dq_accum, semaphores = rest[: accum.dq_size], rest[accum.dq_size :]
        self._grad_semaphores = semaphores[accum.dq_semaphores :]
        # The first partial sum of a claimed accumulator is stored, so that only semaphores have to be zero.
        # thd_attn_bwd_by_gradient_sm90 claims no accumulators of dq.
        stats, self._delta = _delta(plan, heads, semaphores if tiles.dq is None else rest)
        self._fixed = (self._dq_accum, *((semaphores, stats, plan.key_ranges) if tiles.dq is None else (stats,)))

        # The queries of a key are one range in trees too, so only the order of dq's partial sums needs to know them.
        self._trees = trees_of(plan) if in_order else ()
        self._kernel = compiler.kernel(*tiles.kernel(
            plan.head_dims, heads.dtype.name, spec.dq_dtype.name, spec.kv_dtype.name, accum.deterministic, spec.caps,
            bool(self._trees)))
        self._partials, choices = partials_per_tile(plan), _packs_of(accum.splits, plan)
        self._mains = [[self._main(plan, orders, *choice) for choice in choices]
                       for orders in _parts(plan, spec.in_parts and not in_order)]
        self._boxes = [_boxes(tiles.tile_m, tiles.tile_n // tiles.blocks)]
        if tiles.dq is not None and accum.deterministic:
            self._dq = _dq_alone(tiles.dq, spec, plan, stats)
            self._boxes.append(_boxes(tiles.dq.tile_m, tiles.dq.tile_n))
        elif tiles.dq is not None:
            size = self._mains[0][0].fixed[-1]
            self._round_dq = Launch(
                compiler.kernel(*instance("thd_attn_round_dq_sm90", spec.dq_dtype.name, heads.head_dim)),
                (padded_rows(plan.local_rows) // 64, heads.num_heads), 128, (self._partials, size))

    def _main(self, plan: Plan, orders: Array, num_splits: int, packs: Any) -> Launch:
        """Return a launch of the kernel that makes dk and dv for some tiles of keys; see _packs_of."""
        gpu, heads, tiles = launch.this_gpu(), self._spec.heads, TILES[plan.head_dims].backward_sm90
        stats_rows = padded_rows(plan.local_rows)
        blocks, splits = 1 if self._accum.deterministic else tiles.blocks, heads.num_kv_heads * num_splits
        num_tiles = orders.shape[1] * tiles.blocks // blocks
        # Splits that add to the same rows at the same time wait for each other.
        short = scheduler.SHORT_UP_TO if num_splits == 1 else scheduler.LONG_FROM
        # Partial sums of a tile of queries come in turn: if these tiles are few, those of other heads come meanwhile.
        together = max(1, gpu.multiprocessors * 64 // stats_rows) if self._in_order else tiles.together
        order, how = scheduler.schedule(gpu, plan, orders, splits, together, short)
        if self._in_order:  # a block that waits for others finds them at work
            order = plan.memoize("falling", lambda: cupy.arange(num_tiles - 1, -1, -1, dtype=np.int32))
        size = np.array((plan.local_rows, plan.key_rows, stats_rows, num_tiles, splits, *how, heads.group // num_splits,
                         heads.group, heads.num_kv_heads, self._accum.semaphore_rows, heads.row_heads),
                        BACKWARD_SIZE)[()]
        grid = (blocks * min(gpu.multiprocessors // blocks, num_tiles * splits),)
        return Launch(self._kernel, grid, tiles.threads,
                      (*self._fixed, plan.query_ranges, self._partials, order, cupy.zeros(1, np.int32), packs, size,
                       *self._trees))

    def new_dk_dv(self, k: Array, v: Array) -> Sequence[Array]:
        """Return arrays for dk and dv: the accumulators, if float32 is wanted."""
        return _dk_dv(self._dkv_accum, k, v) if self._kv_dtype == np.float32 else super().new_dk_dv(k, v)

    def arguments(self, call: _Call) -> tuple[Arguments, Arguments]:
        q, k, v, dout, plan = call.q, call.k, call.v, call.dout, call.plan
        num_rows, num_keys = len(q), len(k)
        if plan.has_masked_out_queries:
            if plan.leading_tokens is None:
                declared = pair_of(WITHOUT_PADDING, (num_rows, self._spec.heads.most_heads), plan.head_dims, q.dtype)
                q, dout = without_padding((q, dout), declared, plan)
            else:  # rows outside a map arrive as zeros
                num_rows = max(1, plan.leading_tokens)

        def inputs(boxes: tuple[int, ...]) -> Iterator[Any]:
            return launch.tensor_maps((q, k, v, dout), (num_rows, num_keys, num_keys, num_rows), boxes)

        def of_main() -> tuple[Any, ...]:
            accum = _dk_dv(self._dkv_accum, k, v) if self._dkv_accum.size else call.dk_dv or (None, None)
            grads = np.array((*call.addresses((*accum, self._grad_semaphores)), call.owners), GRADIENTS)
            return *inputs(self._boxes[0]), call.dq, grads[()], call.logits

        return of_main, lambda: (*inputs(self._boxes[1]), call.dq, call.logits)


def _boxes(query_rows: int, key_rows: int) -> tuple[int, ...]:
    """Return the rows of the boxes of q, k, v and dout."""
    return query_rows, key_rows, key_rows, query_rows


def _dq_alone(tiles: BackwardDqSm90, spec: _Spec, plan: Plan, stats: Array) -> Launch:
    """Return the launch of thd_attn_bwd_dq_sm90, which has the forward's tiles of queries and scheduler."""
    gpu, heads, orders, num_rows = launch.this_gpu(), spec.heads, plan.arrays.query_tiles, plan.local_rows
    num_tiles, together = orders.shape[1], TILES[plan.head_dims].forward_sm90.together
    order, how = scheduler.schedule(gpu, plan, orders, heads.num_heads, max(heads.group, together))
    size = np.array((num_rows, num_rows, padded_rows(num_rows), num_tiles, heads.num_heads, *how, 1, 1,
                     heads.num_heads, 0, heads.row_heads), BACKWARD_SIZE)[()]
    kernel = compiler.kernel(*tiles.kernel(
        plan.head_dims, heads.dtype.name, spec.dq_dtype.name, spec.caps, plan.has_trees))
    return Launch(kernel, (min(gpu.multiprocessors, num_tiles * heads.num_heads),), tiles.threads,
                  (stats, plan.key_ranges, order, cupy.zeros(1, np.int32), np.int32(heads.group), size,
                   *trees_of(plan)))


def plan_backward(plan: Plan) -> None:
    """Make the arrays that the backward needs of a plan, so that a refresh of the plan makes them again."""
    if launch.this_gpu().sm90:
        partials_per_tile(plan)
        pairs_of(plan)
    if plan.keys_of is not None or plan.cp_size == 1:
        return
    if plan.sharding.tables is not None:
        for side in range(2):
            parts_of(plan, side)
    if not plan.sharding.by_runs:
        places_of_keys(plan)


def partials_per_tile(plan: Plan) -> Array:
    """Return the number of key tiles that add to dq of each query tile, (tiles,) int32."""
    tiles = TILES[plan.head_dims].backward_sm90

    def make() -> Array:
        numbers = launch.new(num_partials(plan))
        kernel = compiler.kernel(*instance("thd_attn_count_partials_sm90", tiles.tile_n // 64, tiles.tile_m))
        # Not the plan, which keeps `count` for a refresh: it would keep itself.
        grid, args = (plan.arrays.key_tiles.shape[1],), (numbers, plan.query_ranges, np.int32(plan.key_rows))

        def count() -> None:
            numbers.fill(0)
            kernel(grid, 32, args)

        plan.make(count)
        return numbers

    return plan.memoize("partials per tile", make)


class _Portable(_Launches):
    """Launches on every GPU: dq is accumulated in float32 and rounded, or has a kernel of its own."""

    def __init__(self, plan: Plan, spec: _Spec) -> None:
        gpu, heads, row = launch.this_gpu(), spec.heads, TILES[plan.head_dims]
        dtype, dq_dtype, kv_dtype = (x.name for x in (heads.dtype, spec.dq_dtype, spec.kv_dtype))
        self._dq_accum = group_array(plan, heads, lambda num_heads: dq_accum(plan, num_heads, spec.deterministic))
        self._kv_dtype = spec.kv_dtype
        stats, self._delta = _delta(plan, heads, self._dq_accum)
        sizes = tuple(map(np.int32, (plan.local_rows, plan.key_rows, padded_rows(plan.local_rows), heads.group)))
        tiles = scheduler.portable_backward(gpu, plan.head_dims)
        main = compiler.kernel(*tiles.kernel(row.dims, dtype, kv_dtype, not spec.deterministic, spec.caps))
        key_ranges = plan.key_ranges if plan.has_masked_out_queries else launch.NONE
        self._mains = [[Launch(
            main, (orders.shape[1], heads.num_kv_heads), 32 * tiles.warps,
            (stats, self._dq_accum, key_ranges, plan.query_ranges, orders[1], *sizes))]
            for orders in _parts(plan, spec.in_parts)]
        if spec.deterministic:
            alone = row.backward_dq
            self._dq = Launch(
                compiler.kernel(*alone.kernel(row.dims, dtype, dq_dtype, spec.caps, plan.has_trees)),
                (-(-plan.local_rows // alone.tile_m), heads.num_heads), 32 * alone.warps,
                (stats, plan.key_ranges, plan.query_ranges, *sizes, *trees_of(plan)))
            return
        columns = heads.num_heads * heads.head_dim
        threads = -(-plan.local_rows // 16) * columns
        self._round_dq = Launch(compiler.kernel(*instance("thd_attn_round_dq", dq_dtype)), (-(-threads // 256),), 256,
                                (np.int32(plan.local_rows), np.int32(columns)))

    def arguments(self, call: _Call) -> tuple[Arguments, Arguments]:
        inputs = call.q, call.k, call.v, call.dout
        return (lambda: (*inputs, *map(np.uint64, call.addresses()), call.owners, call.logits),
                lambda: (*inputs, call.dq, call.logits))


def _parts(plan: Plan, in_parts: bool) -> list[Array]:
    """Return the orders of all key tiles; in parts, those of plan.first_tiles, then of other tiles."""
    return parts_of(plan, 1) if in_parts else [plan.arrays.key_tiles]


def _packs_of(splits: list[tuple[int, float]], plan: Plan) -> list[tuple[int, Any]]:
    """Return numbers of splits, each with the PACK_FILTER of the packs that it is for: the GPU takes one of several."""
    if len(splits) == 1:
        return [(splits[0][0], np.zeros((), PACK_FILTER)[()])]
    pairs, before, packs = pairs_of(plan).data.ptr, 0, []
    for num_splits, most in splits:
        to = 2**64 - 1 if most == math.inf else int(most * plan.key_rows) + 1
        packs.append((num_splits, np.array((pairs, before, to), PACK_FILTER)[()]))
        before = to
    return packs


def _delta(plan: Plan, heads: Heads, cleared: Array) -> tuple[Array, Launch]:
    """Return stats and the launch that fills it and sets `cleared` to zero; see thd_attn_delta."""
    num_rows, stats_rows = plan.local_rows, padded_rows(plan.local_rows)
    stats = group_array(plan, heads, lambda num_heads: statistics(plan, num_heads))
    blocks = -(-stats_rows * heads.num_heads * lanes_of(heads.v_head_dim) // 256)
    return stats, Launch(
        compiler.kernel(*instance("thd_attn_delta", heads.dtype.name, heads.v_head_dim)), (blocks,), 256,
        (plan.key_ranges, stats, cleared, np.uint64(-(-cleared.size // 4)),
         *map(np.int32, (num_rows, stats_rows, heads.num_heads, heads.row_heads))))


def _dk_dv(dkv: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Return dk and dv, which follow each other in memory."""
    return dkv[: k.size].reshape(k.shape), dkv[k.size :].reshape(v.shape)


def without_padding(arrays: Sequence[Array], buffers: Sequence[Buffer], plan: Plan) -> list[Array]:
    """Return copies of two arrays whose padding rows are 0, as 0 * NaN would spread through a product.

    buffers: see reference.without_padding.
    """
    copies = [plan.workspace.array(buffer, x.shape) for buffer, x in zip(buffers, arrays, strict=True)]
    order = plan.memoize("local_order", lambda: cupy.arange(plan.local_rows, dtype=np.int32))
    reorder(False, copies, [[x] for x in arrays], order, plan.key_ranges)
    return copies
