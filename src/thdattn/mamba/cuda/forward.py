"""Launchers of the Mamba-2 mixer's forward: convolution, states of segments, states in front of them, y and the gate.

Arguments are those of thdattn.mamba.reference. Grids depend on numbers of rows alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from thdattn.engines.cuda import launch
from thdattn.engines.cuda.launch import Array, Launch
from thdattn.jit import compiler
from thdattn.jit.structs import MIXER_SIZE, SEGMENTS
from thdattn.jit.tensor_map import tensor_map
from thdattn.kernels.configs import SLAB
from thdattn.kernels.instances import instance
from thdattn.mamba import configs
from thdattn.mamba.shape import CHUNK, Activations, Inputs, MixerShape, segment_rows
from thdattn.plan.plan import Plan
from thdattn.plan.workspace import FLOAT32, Buffer

P = ParamSpec("P")
T = TypeVar("T")

mixer_segment_rows = CHUNK * configs.SEGMENT_CHUNKS
_FOLD, _START, _ENTER, _FOLD_TREES = configs.MIXER_KERNELS
_MOST_OF_Y = 2**16 - 1  # thread blocks of a grid in y


def memoized(make: Callable[Concatenate[Plan, MixerShape, P], T]) -> Callable[Concatenate[Plan, MixerShape, P], T]:
    """Decorate a function that makes launches: the plan caches its result for each shape and further arguments."""

    def cached(plan: Plan, shape: MixerShape, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return plan.memoize((make, shape, *args), lambda: make(plan, shape, *args, **kwargs))

    return cached


def chunks_of(plan: Plan) -> int:
    """Return the number of chunks of this rank's rows."""
    return -(-plan.local_rows // CHUNK)


def segments_of(plan: Plan) -> int:
    """Return the number of segments of this rank's rows."""
    return -(-chunks_of(plan) // segment_chunks(plan))


def segment_chunks(plan: Plan) -> int:
    """Return the number of chunks of a segment."""
    return segment_rows(plan.batch, mixer_segment_rows) // CHUNK


def size_of(plan: Plan, shape: MixerShape) -> Any:
    """Return the MixerSize of this rank."""
    return mixer_size(plan.local_rows, shape, plan.cp_rank * plan.local_rows, segment_chunks(plan))


def mixer_size(num_rows: int, shape: MixerShape, offset: int = 0, chunks: int = configs.SEGMENT_CHUNKS) -> Any:
    """Return a MixerSize; offset: the number of a row in the pack minus its number here; chunks: of a segment."""
    sizes = shape.num_heads, shape.head_dim, shape.num_groups, shape.state_dim
    return np.array((num_rows, offset, *sizes, chunks), MIXER_SIZE)[()]


def grid_of_rows(blocks: int, tiles: int) -> tuple[int, int, int]:
    """Return a grid with `blocks` thread blocks for each of `tiles` tiles of rows, over z where y cannot hold them.

    Kernels get the tile from y and z; see tile_of_rows of kernels/mamba/common.cuh.
    """
    layers = max(1, -(-tiles // _MOST_OF_Y))
    return blocks, -(-tiles // layers), layers


def boxes_of(x: Array, box_rows: int = CHUNK) -> Any:
    """Return a tensor map of columns of rows."""
    boxes = x.reshape(len(x), x.shape[1] // SLAB, SLAB)
    return tensor_map(boxes, len(x), x.strides[0], box_rows)


def _slab(shape: MixerShape) -> configs.Slab | configs.SlabSm90:
    """Return how this GPU divides x into columns for thread blocks."""
    gpu = launch.this_gpu()
    return configs.slab_for(shape.state_dim, shape.d_inner // shape.num_groups, gpu.shared_bytes, gpu.sm90)


def mixer_activations(plan: Plan, shape: MixerShape) -> list[Buffer]:
    """Declare the results of mixer_conv."""
    of_heads = shape.num_heads, chunks_of(plan) * CHUNK
    return [Buffer("activations", (plan.local_rows, shape.channels), shape.dtype),
            *[Buffer("activations", of_heads, FLOAT32, part) for part in Activations._fields[1:]]]


def mixer_forward_buffers(plan: Plan, shape: MixerShape) -> list[Buffer]:
    """Declare the work buffers of a forward; see reference.mixer_forward_buffers."""
    made = [_decays(plan, shape), _summary(shape)]
    return made if plan.cp_size == 1 else [*made, _start(shape)]


def _decays(plan: Plan, shape: MixerShape) -> Buffer:
    return Buffer("decays", (segments_of(plan), shape.num_heads), FLOAT32)


def _summary(shape: MixerShape) -> Buffer:
    return Buffer("summary", (1, shape.summary), FLOAT32)


def _start(shape: MixerShape) -> Buffer:
    return Buffer("state in front", shape.state, FLOAT32)


def mixer_conv(inputs: Inputs, keep: bool = False) -> Activations:
    """Convolve x, B and C and apply silu; compute dt and its sums. See reference.mixer_conv."""
    return _convolve(inputs, keep, 0)


def mixer_conv_states(inputs: Inputs, keep: bool) -> tuple[Activations, Array, Array]:
    """Run mixer_conv, then mixer_states on its results. See reference.mixer_conv_states.

    On Hopper the kernel of the states convolves x itself, so that x is read once.
    """
    zxbcdt, weights, plan, shape, halo = inputs
    slab = _slab(shape)
    if not (plan.local_rows and isinstance(slab, configs.SlabSm90) and slab.convolves(shape.conv_width)):
        act = mixer_conv(inputs, keep)
        return act, *mixer_states(act, plan, shape)
    act, states = _convolve(inputs, keep, shape.d_inner), _new_states(plan, shape)
    decays, run = _states(plan, shape, True)
    x = zxbcdt[:, shape.d_inner : 2 * shape.d_inner]
    run(boxes_of(x, CHUNK + configs.ROWS_BEFORE), boxes_of(act.channels), halo, weights.conv_weight, weights.conv_bias,
        act.sums, act.leave, states)
    return act, states, decays


def _convolve(inputs: Inputs, keep: bool, column: int) -> Activations:
    """Convolve columns of x, B and C from `column` on, a multiple of CONV_COLUMNS; compute dt and its sums.

    keep: into new arrays, not into buffers of the plan, which the next mixer overwrites.
    """
    zxbcdt, weights, plan, shape, halo = inputs
    made = Activations(*[launch.empty(x.shape, x.dtype) if keep else plan.workspace.array(x)
                         for x in mixer_activations(plan, shape)])
    _conv(plan, shape, column)(zxbcdt, halo, weights.conv_weight, weights.conv_bias, weights.A_log, weights.dt_bias,
                               plan.key_ranges, *made)
    return made


@memoized
def _conv(plan: Plan, shape: MixerShape, column: int) -> Launch:
    first, column_tiles = column // configs.CONV_COLUMNS, -(-(shape.channels - column) // configs.CONV_COLUMNS)
    rates = -(-shape.num_heads // configs.RATES_HEADS)
    grid = grid_of_rows(column_tiles + rates, -(-plan.local_rows // configs.CONV_ROWS))
    kernel = compiler.kernel(*instance("thd_mixer_conv", shape.dtype.name, shape.conv_width))
    return Launch(kernel, grid, 256, (np.int32(first), np.int32(column_tiles), size_of(plan, shape)))


def mixer_states(act: Activations, plan: Plan, shape: MixerShape) -> tuple[Array, Array]:
    """Compute the state that every segment adds, and the decay of the state in front of it. See reference.mixer_states.

    Returns:
        states: (segments, num_heads, head_dim, state_dim) float32, a new array.
        decays: (segments, num_heads), a buffer of the plan.
    """
    states = _new_states(plan, shape)
    decays, run = _states(plan, shape, False)
    if len(states):
        run(boxes_of(act.channels) if _slab(shape).by_boxes else act.channels, act.sums, act.leave, states)
    return states, decays


def _new_states(plan: Plan, shape: MixerShape) -> Array:
    return launch.empty((segments_of(plan), *shape.state), np.float32)


@memoized
def _states(plan: Plan, shape: MixerShape, convolves: bool) -> tuple[Array, Launch]:
    slab, dtype, decays = _slab(shape), shape.dtype.name, plan.workspace.array(_decays(plan, shape))
    if convolves:
        assert isinstance(slab, configs.SlabSm90)
        kernel = slab.conv_states_kernel(dtype, shape.conv_width)
    else:
        kernel = slab.states_kernel(dtype)
    fixed = plan.key_ranges, decays, np.int32(plan.cp_rank + 1 < plan.cp_size), size_of(plan, shape)
    grid = shape.d_inner // slab.columns, segments_of(plan)
    return decays, Launch(compiler.kernel(*kernel), grid, slab.states_threads, fixed)


def mixer_fold(states: Array, decays: Array, plan: Plan, shape: MixerShape, reverse: bool) -> Array:
    """Turn what segments add into the states in front of them, in place. See reference.mixer_fold."""
    summary = plan.workspace.array(_summary(shape))
    _walk(_FOLD, (states, decays, summary), range(len(states)), shape.state, reverse)
    return summary


def mixer_fold_trees(states: Array, decays: Array, starts: Array, reverse: bool = False) -> None:
    """Turn what segments of trees add into the states in front of them, in place. See reference.mixer_fold_trees."""
    if len(states):
        _walk(_FOLD_TREES, (states, decays, starts), range(len(states)), states.shape[1:], reverse)


def mixer_start(summaries: Array, plan: Plan, shape: MixerShape, reverse: bool) -> Array:
    """Return the state in front of this rank's rows; reverse: the gradient behind them. See reference.mixer_start."""
    start = plan.workspace.array(_start(shape))
    ranks = range(plan.cp_rank + 1, plan.cp_size) if reverse else range(plan.cp_rank)
    _walk(_START, (summaries, start), ranks, shape.state, reverse)
    return start


def mixer_enter(states: Array, decays: Array, start: Array, segments: slice, reverse: bool) -> None:
    """Add the state from other ranks to the states that mixer_fold made. See reference.mixer_enter."""
    reached = range(len(states))[segments]
    if reached:
        _walk(_ENTER, (states, decays, start), reached, states.shape[1:], reverse)


def _walk(kernel: str, arrays: tuple[Array, ...], over: range, state: tuple[int, ...], reverse: bool) -> None:
    """Launch a thread for every four numbers of a state, which walks over segments or ranks."""
    over = over[::-1] if reverse else over
    numbers = over.start, over.step, len(over), state[0], math.prod(state[1:])
    grid = (-(-math.prod(state) // (4 * configs.FOLD_THREADS)),)
    compiler.kernel(kernel)(grid, configs.FOLD_THREADS, (*arrays, *map(np.int32, numbers)))


def mixer_scan(inputs: Inputs, act: Activations, states: Array, segments: slice, y: Array, out: Array) -> None:
    """Compute y of some segments, and out = y * silu(z) if there is no norm. See reference.mixer_scan."""
    plan, shape, reached = inputs.plan, inputs.shape, range(len(states))[segments]
    if not reached:
        return
    by_boxes, run = _scan(plan, shape, reached.start, reached.stop)
    rows, results = [act.channels], [y]
    if shape.norm is None:  # a norm reads z and writes out instead of the scan
        rows, results = [act.channels, inputs.zxbcdt[:, : shape.d_inner]], [y, out]
    run(*(map(boxes_of, rows) if by_boxes else rows), act.dt, act.sums, act.leave, states, inputs.weights.D, *results)


@memoized
def _scan(plan: Plan, shape: MixerShape, first: int, end: int) -> tuple[bool, Launch]:
    slab, count = _slab(shape), end - first
    slabs = shape.d_inner // slab.columns
    # Behind a segment of trees, the next one in memory may start from another state.
    of_block = 1 if plan.has_trees else configs.segments_of_block(count, slabs, launch.this_gpu().multiprocessors)
    segments = np.array((first, count, of_block), SEGMENTS)[()]
    kernel = compiler.kernel(*slab.scan_kernel(shape.dtype.name, gates=shape.norm is None))
    fixed = segments, plan.key_ranges, size_of(plan, shape)
    return slab.by_boxes, Launch(kernel, (slabs, -(-count // of_block)), slab.scan_threads, fixed)
