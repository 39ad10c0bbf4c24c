"""Launchers of the Mamba-2 mixer's backward: gate, states and their gradients, gradients of chunks, convolution.

Arguments are those of thdattn.mamba.reference. Grids depend on numbers of rows alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from thdattn.engines.cuda import launch
from thdattn.engines.cuda.launch import Array, Launch
from thdattn.jit import compiler
from thdattn.kernels.instances import instance
from thdattn.mamba import configs
from thdattn.mamba.cuda.forward import (
    boxes_of,
    chunks_of,
    grid_of_rows,
    memoized,
    segment_chunks,
    segments_of,
    size_of,
)
from thdattn.mamba.cuda.norm import norm_bwd
from thdattn.mamba.shape import CHUNK, Activations, Inputs, Mamba2Weights, MixerShape
from thdattn.plan.plan import Plan
from thdattn.plan.workspace import FLOAT32, Buffer

_AT_ONCE = 8 * configs.SEGMENT_CHUNKS  # chunks with states in memory at a time; enough to fill the largest GPUs


class Gradients(NamedTuple):
    """Results of mixer_bwd, in buffers of the plan.

    dx: (local_rows, d_inner), gradient of x after the convolution, in the dtype of the mixer.
    dbc: (splits, local_rows, 2 * num_groups * state_dim), partial sums of the gradients of B and C.
    ddt: (num_heads, chunks * CHUNK), the layout of Activations.dt.
    partials: (chunks, numbers of all weights but norm_weight), partial sums of the weights' gradients by chunk, in
    their order; for A_log those of A.
    of_norm: (chunks, d_inner), partial sums of the gradient of norm_weight; None without a norm.
    """

    dx: Array
    dbc: Array
    ddt: Array
    partials: Array
    of_norm: Any = None


def mixer_gradients(plan: Plan, shape: MixerShape) -> Gradients:
    """Return buffers for the results of mixer_bwd."""
    return Gradients(*map(plan.workspace.array, _gradient_buffers(plan, shape)))


def mixer_backward_buffers(plan: Plan, shape: MixerShape) -> list[Buffer]:
    """Declare the work buffers of a backward; see reference.mixer_backward_buffers."""
    return [*_gate_buffers(plan, shape), *_gradient_buffers(plan, shape), *_chunk_buffers(plan, shape), _ends(shape)]


def _gate_buffers(plan: Plan, shape: MixerShape) -> list[Buffer]:
    segments = segments_of(plan)
    return [Buffer("dy", (plan.local_rows, shape.d_inner), shape.dtype),
            Buffer("gradients of states", (segments, *shape.state), FLOAT32),
            Buffer("gradients of states", (segments, shape.num_heads), FLOAT32, "decays")]


def _gradient_buffers(plan: Plan, shape: MixerShape) -> list[Buffer]:
    rows, chunks = plan.local_rows, chunks_of(plan)
    made = [Buffer("dx", (rows, shape.d_inner), shape.dtype),
            Buffer("dB and dC", (_splits(chunks, shape), rows, shape.channels - shape.d_inner), FLOAT32),
            Buffer("ddt", (shape.num_heads, chunks * CHUNK), FLOAT32),
            Buffer("partial sums of weights", (chunks, _offsets(shape)[-1]), FLOAT32)]
    if shape.norm:
        made.append(Buffer("partial sums of norm_weight", (chunks, shape.d_inner), FLOAT32))
    return made


def _chunk_buffers(plan: Plan, shape: MixerShape) -> tuple[Buffer, Buffer]:
    """Declare the states at every chunk and their scales, forward and then backward."""
    kept = 2 * min(chunks_of(plan), _AT_ONCE)
    return (Buffer("states at chunks", (kept, *shape.state), shape.dtype),
            Buffer("scales of states", (kept, shape.num_heads, _slices(shape)), FLOAT32))


def _ends(shape: MixerShape) -> Buffer:
    """Declare the gradients of the first rows that a rank reads and of the last rows that other ranks read."""
    return Buffer("gradients of ends", (2, shape.reach, shape.channels), FLOAT32)


def _slices(shape: MixerShape) -> int:
    return -(-shape.state_dim // configs.WALK_SLICE)


def _splits(chunks: int, shape: MixerShape) -> int:
    """Return how many parts the heads of a group are split into, so that every multiprocessor has work."""
    gpu, heads = launch.this_gpu(), shape.num_heads // shape.num_groups
    wanted = _tile(shape).blocks * gpu.multiprocessors * 3 // 4
    of_split = min(chunks, _AT_ONCE) * shape.num_groups
    enough = (s for s in range(1, heads + 1) if heads % s == 0 and s * of_split >= wanted)
    return next(enough, heads)


def _tile(shape: MixerShape) -> configs.ChunkTile | configs.ChunkTileSm90:
    gpu = launch.this_gpu()
    return configs.chunk_tile_for(shape.head_dim, shape.state_dim, gpu.shared_bytes, gpu.sm90)


def _walk(shape: MixerShape) -> configs.Walk | configs.WalkSm90:
    return configs.walk_for(_tile(shape), shape.d_inner // shape.num_groups, launch.this_gpu().shared_bytes)


def _offsets(shape: MixerShape) -> list[int]:
    """Return where the partial sums of each weight but norm_weight begin in those of a chunk, and their number."""
    return [0, *itertools.accumulate(map(math.prod, shape.weights[: len(Mamba2Weights._fields)]))]


def _partials_of(gradients: Gradients, weight: str, shape: MixerShape) -> tuple[Array, np.uint64]:
    """Return the partial sums of a weight but norm_weight, and the distance between those of two chunks."""
    offsets = _offsets(shape)
    return gradients.partials.ravel()[offsets[Mamba2Weights._fields.index(weight)] :], np.uint64(offsets[-1])


def mixer_gate_states(
    inputs: Inputs, act: Activations, y: Array, dout: Array, dzxbcdt: Array, gradients: Gradients
) -> tuple[Array, Array, Array]:
    """Return dy, dstates and decays; write dz and partial sums of weights' gradients. See reference.mixer_gate_states.

    On Hopper, without a norm, the kernel of dstates computes dy itself, so that it does not read it.
    """
    zxbcdt, weights, plan, shape, _ = inputs
    dy, *of_states = map(plan.workspace.array, _gate_buffers(plan, shape))
    of_d = _partials_of(gradients, "D", shape)
    if shape.norm or isinstance(_walk(shape), configs.Walk):
        gate, states = _gate_then_states(plan, shape)
        weight, of_weight = ([weights.norm_weight], [gradients.of_norm]) if shape.norm else ([], [])
        gate(dout, zxbcdt, y, act.channels, *weight, dy, dzxbcdt, *of_weight, *of_d)
        states(act.channels, dy, act.sums, plan.key_ranges, *of_states)
    elif plan.local_rows:
        z, dz = (x[:, : shape.d_inner] for x in (zxbcdt, dzxbcdt))
        _gate_states(plan, shape)(*map(boxes_of, (dout, z, y, act.channels, dy, dz)), *of_d, act.sums,
                                  plan.key_ranges, *of_states)
    return dy, *of_states


@memoized
def _gate_then_states(plan: Plan, shape: MixerShape) -> tuple[Launch, Launch]:
    """Return two launches for every GPU: dy, and dstates and decays from it."""
    size, dtype, gpu = size_of(plan, shape), shape.dtype.name, launch.this_gpu()
    if shape.norm:
        gate = norm_bwd(plan, shape)
    else:
        grid = grid_of_rows(-(-shape.d_inner // 1024), chunks_of(plan))
        gate = Launch(compiler.kernel(*instance("thd_mixer_gate_bwd", dtype)), grid, 128, (plan.key_ranges, size))
    walk = configs.portable_walk(shape.head_dim, shape.state_dim, shape.d_inner // shape.num_groups, gpu.shared_bytes)
    blocks = segments_of(plan), shape.d_inner // walk.columns, _slices(shape)
    return gate, Launch(compiler.kernel(*walk.thd_ssd_dstates(dtype)), blocks, walk.threads, (size,))


@memoized
def _gate_states(plan: Plan, shape: MixerShape) -> Launch:
    walk = _walk(shape)
    assert isinstance(walk, configs.WalkSm90)
    grid = shape.num_heads // walk.heads, segments_of(plan)
    return Launch(compiler.kernel(*walk.gate_kernel(shape.dtype.name)), grid, walk.gate_threads,
                  (size_of(plan, shape),))


def mixer_bwd(
    inputs: Inputs, act: Activations, dy: Array, states: Array, dstates: Array, segments: slice, gradients: Gradients
) -> None:
    """Compute the gradients of mixer_scan for some segments, a few at a time. See reference.mixer_bwd."""
    first, end, _ = segments.indices(len(states))
    most = _AT_ONCE // segment_chunks(inputs.plan)
    for begin in range(first, end, most):
        count = min(most, end - begin)
        run = _bwd(inputs.plan, inputs.shape, count, begin + count == len(states))
        run(act, dy, states, dstates, inputs.weights, gradients, begin)


@memoized
def _bwd(plan: Plan, shape: MixerShape, segments: int, last: bool) -> Callable[..., None]:
    """Return a function that launches two kernels: states at every chunk, then gradients of the chunks.

    last: True for the last segments, the last of which may have fewer chunks.
    """
    of_segment, dtype, size = segment_chunks(plan), shape.dtype.name, size_of(plan, shape)
    chunks = segments * of_segment - (-chunks_of(plan) % of_segment if last else 0)
    kept, scales = map(plan.workspace.array, _chunk_buffers(plan, shape))
    walk, tile, splits = _walk(shape), _tile(shape), _splits(chunks_of(plan), shape)
    grid = segments, shape.d_inner // walk.columns, _slices(shape)
    forward, back = (
        Launch(compiler.kernel(*walk.thd_ssd_chunk_states(dtype, back)), grid, walk.threads, (part, scale, size))
        for back, part, scale in ((False, kept, scales), (True, kept[chunks:], scales[chunks:])))
    main = Launch(compiler.kernel(*tile.thd_ssd_bwd(dtype)), (chunks, shape.num_groups * splits), tile.threads,
                  (np.int32(chunks), size))
    ranges = plan.key_ranges

    def run(act: Activations, dy: Array, states: Array, dstates: Array, weights: Mamba2Weights, into: Gradients,
            begin: int) -> None:
        rows = _rows(walk.by_boxes, act.channels, dy)
        for walks, of in ((forward, states), (back, dstates)):
            walks(*rows, act.sums, act.leave, ranges, of, np.int32(begin))
        main(*_rows(tile.by_boxes, act.channels, dy), kept, scales, act.dt, act.sums, ranges, weights.A_log, weights.D,
             into.dx, into.dbc, into.ddt, *_partials_of(into, "A_log", shape), np.int32(begin * of_segment))

    return run


def _rows(by_boxes: bool, *rows: Array) -> list[Any]:
    """Return rows as kernels take them: arrays, or tensor maps of their columns."""
    return [boxes_of(x) if by_boxes and len(x) else x for x in rows]


def mixer_conv_bwd(inputs: Inputs, gradients: Gradients, dzxbcdt: Array) -> tuple[Mamba2Weights, Array]:
    """Compute the gradients of mixer_conv and of all weights. See reference.mixer_conv_bwd."""
    zxbcdt, weights, plan, shape, halo = inputs
    ends = plan.workspace.array(_ends(shape))
    if not plan.local_rows:
        ends.fill(0)
    conv, sums, of_norm = _conv_bwd(plan, shape)
    conv(zxbcdt, halo, weights.conv_weight, weights.conv_bias, weights.dt_bias, dzxbcdt, plan.key_ranges, gradients.dx,
         gradients.dbc, gradients.ddt, np.int32(len(gradients.dbc)), gradients.partials, ends)
    offsets = _offsets(shape)
    made = launch.empty((offsets[-1],), np.float32)
    sums(gradients.partials, weights.A_log, made)
    parts = [made[begin:end].reshape(of_one)
             for begin, end, of_one in zip(offsets, offsets[1:], shape.weights, strict=False)]
    if shape.norm:
        parts.append(launch.empty((shape.d_inner,), np.float32))
        of_norm(gradients.of_norm, weights.A_log, parts[-1])
    return Mamba2Weights(*parts), ends


@memoized
def _conv_bwd(plan: Plan, shape: MixerShape) -> tuple[Launch, Launch, Launch]:
    """Return three launches: gradients of columns, sums of the weights' partial sums, and sums of those of norm_weight.
    """
    chunks, columns = chunks_of(plan), -(-shape.channels // configs.CONV_BACK_COLUMNS)
    conv = Launch(
        compiler.kernel(*instance("thd_mixer_conv_bwd", shape.dtype.name, shape.conv_width)),
        grid_of_rows(columns + -(-shape.num_heads // configs.CONV_BACK_HEADS), chunks), 128,
        (np.int32(columns), size_of(plan, shape)))
    _, _, a_log, *_, total = _offsets(shape)
    return conv, _sums(chunks, total, a_log, shape.num_heads), _sums(chunks, shape.d_inner)


def _sums(chunks: int, columns: int, a_log: int = 0, heads: int = 0) -> Launch:
    """Return the launch that sums partial sums of `columns` columns; those of A, from column a_log on, become dA_log.
    """
    numbers = map(np.int32, (chunks, columns, a_log, heads))
    return Launch(compiler.kernel("thd_mixer_sum"), (-(-columns // configs.SUM_COLUMNS),), 256, tuple(numbers))


def mixer_add_halos(halos: Array, tail: Array, plan: Plan, shape: MixerShape, dzxbcdt: Array) -> None:
    """Add the gradients from other ranks to the last rows of x, B and C. See reference.mixer_add_halos."""
    grid = -(-shape.channels // configs.CONV_BACK_COLUMNS), min(shape.reach, plan.local_rows)
    ranks = map(np.int32, (shape.reach, plan.cp_rank, plan.cp_size))
    compiler.kernel(*instance("thd_mixer_add_halos", shape.dtype.name))(
        grid, 128, (halos, tail, dzxbcdt, *ranks, size_of(plan, shape)))
