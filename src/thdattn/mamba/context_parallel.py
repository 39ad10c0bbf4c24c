"""Context parallelism of a Mamba-2 mixer, forward and backward, for every engine and comm: ranks exchange states, not
rows.

A rank has a slice of the pack. Its first rows need the last rows of earlier ranks, which the convolution reads (the
halo), and the state that their sequence has reached. A rank maps the state in front of its rows to `decay * state +
own` behind them. decay is 0 if a sequence begins on the rank. So ranks exchange decay and own, one state of all heads,
whatever the lengths are. Each rank accumulates those of the ranks before it. Gradients of states come from the ranks
behind in the same way.

Rows whose sequence began on this rank need no state of other ranks. Enough of them to overlap the gather of the states
run before its first use. The gather uses the transport of the attention's keys: peer memory, where ranks have it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from thdattn.arguments import Array
from thdattn.comm import Pending
from thdattn.comm.slices import copy
from thdattn.mamba.shape import Inputs, segment_rows
from thdattn.plan.memory import Memory, largest_windows
from thdattn.plan.workspace import Buffer, bytes_by_name, total_bytes

if TYPE_CHECKING:
    from thdattn.comm import Comm
    from thdattn.mamba import MixerEngine
    from thdattn.mamba.shape import Activations, Mamba2Weights, MixerShape
    from thdattn.plan.plan import Plan


# Takes states, decays, and a scan of a slice of segments; see _pass_states.
PassStates = Callable[[Any, Any, Callable[[slice], None]], None]

AHEAD = 16  # segments that run while states are exchanged


class Kept(NamedTuple):
    """Arrays that a forward keeps for its backward beside its arguments.

    y: (local_rows, d_inner), before the gate.
    halo: (conv_width - 1, channels), the rows of x, B and C in front of this rank's.
    states: (segments, num_heads, head_dim, state_dim), in front of each segment of rows.
    act: the results of the convolution; None: backward recomputes them.
    """

    y: Array
    halo: Array
    states: Array
    act: Activations | None = None


class Layer(NamedTuple):
    """A mixer: its functions, thdattn.mamba.reference or thdattn.mamba.cuda, its ranks and its sizes.

    keep: forward keeps the results of the convolution.
    """

    engine: MixerEngine
    comm: Comm
    shape: MixerShape
    keep: bool = True


def forward(layer: Layer, plan: Plan, zxbcdt: Array, weights: Mamba2Weights) -> tuple[Any, Kept]:
    """Compute out of this rank's rows, and what the backward needs; see Mamba2Mixer.

    zxbcdt, weights: the engine's arrays.
    """
    _, comm, shape, _ = layer
    halo = last_rows(plan, shape, zxbcdt)
    if comm.size > 1 and shape.reach:
        tails, wait = gather(comm, plan, "rows", halo)
        wait()
        halo = _halo(plan, shape, tails)
    out = plan.engine.empty((len(zxbcdt), shape.d_inner), zxbcdt.dtype)
    kept = compute(layer, Inputs(zxbcdt, weights, plan, shape, halo), out, partial(_pass_states, layer, plan))
    plan.engine.nan_if_invalid(plan, out)
    return out, kept


def last_rows(plan: Plan, shape: MixerShape, zxbcdt: Array) -> Any:
    """Return the last rows of x, B and C, (reach, channels), which the convolution of later ranks reads.

    Rows that this rank does not have hold anything; on one rank all do.
    """
    tail = plan.workspace.array(_last_rows(shape))
    count = min(shape.reach, plan.local_rows)
    if plan.cp_size > 1 and count:
        copy(tail[-count:], shape.parts(zxbcdt)[1][-count:])
    return tail


def _last_rows(shape: MixerShape) -> Buffer:
    return Buffer("last rows", (shape.reach, shape.channels), shape.dtype)


def _halo(plan: Plan, shape: MixerShape, tails: Array) -> Any:
    """Return the rows in front of this rank's, a new array (reach, channels), from the last rows of all ranks.

    Rows in front of the pack hold anything, as nothing reads them.
    """
    halo = plan.engine.empty((shape.reach, shape.channels), shape.dtype)
    missing = shape.reach
    for rank in reversed(range(plan.cp_rank)):
        if count := min(missing, plan.local_rows):
            end = (rank + 1) * shape.reach
            copy(halo[missing - count : missing], tails[end - count : end])
            missing -= count
    return halo


def compute(layer: Layer, inputs: Inputs, out: Array, pass_states: PassStates) -> Kept:
    """Compute out, a given array, of rows whose halo has arrived."""
    engine, _, shape, keep = layer
    act, states, decays = engine.mixer_conv_states(inputs, keep)
    y = inputs.plan.engine.empty(out.shape, out.dtype)
    pass_states(states, decays, lambda segments: engine.mixer_scan(inputs, act, states, segments, y, out))
    if shape.norm:
        engine.mixer_norm(inputs, y, out)
    return Kept(y, inputs.halo, states, act if keep else None)


def memory(layer: Layer, plan: Plan) -> Memory:
    """Return the bytes that forward and backward allocate for a mixer with this plan, which needs no arrays."""
    engine, comm, shape, keep = layer
    rows, segments = plan.local_rows, -(-plan.local_rows // segment_rows(plan.batch, engine.mixer_segment_rows))
    zxbcdt = Buffer("zxbcdt", (rows, shape.columns), shape.dtype)
    work = [_last_rows(shape), *engine.mixer_forward_buffers(plan, shape)]
    backward = engine.mixer_backward_buffers(plan, shape)
    saved = [zxbcdt, *[Buffer(name, (rows, shape.d_inner), shape.dtype) for name in ("out", "y")],
             Buffer("states", (segments, *shape.state), shape.sum_dtype)]
    (saved if keep else work).extend(engine.mixer_activations(plan, shape))
    windows = {}
    if plan.cp_size > 1:
        halo = _last_rows(shape)._replace(name="rows in front")
        summary = Buffer("summary", (1, shape.summary), shape.sum_dtype)
        there = [of_ranks("rows", plan, halo), of_ranks("states", plan, summary)]
        back = [of_ranks("gradients of states", plan, summary),
                of_ranks("gradients of rows", plan, halo._replace(dtype=shape.sum_dtype))]
        saved, work, backward = [*saved, halo], work + there, backward + back
        windows = largest_windows([comm.gather_bytes([x.nbytes // comm.size], 1) for x in (*there, *back)])
    forward = bytes_by_name([*plan.engine.plan_buffers(plan).values(), *work]) | windows
    dweights = total_bytes(Buffer("dweights", of_one, shape.sum_dtype) for of_one in shape.weights)
    return Memory(forward, bytes_by_name(backward), bytes_by_name(saved),
                  {"dzxbcdt": zxbcdt.nbytes, "dweights": dweights})


def of_ranks(name: str, plan: Plan, send: Array) -> Buffer:
    """Declare the arrays of all ranks, one behind the other, for a gather of an array or buffer."""
    return Buffer(f"{name} of ranks", (plan.cp_size * send.shape[0], *send.shape[1:]), send.dtype)


def activations(engine: MixerEngine, inputs: Inputs, kept: Kept) -> Activations:
    """Return the results of the convolution, recomputed if they were not kept."""
    return engine.mixer_conv(inputs) if kept.act is None else kept.act


def backward(
    layer: Layer, plan: Plan, dout: Array, zxbcdt: Array, weights: Mamba2Weights, kept: Kept
) -> tuple[Any, Mamba2Weights]:
    """Return the gradients of forward: dzxbcdt of this rank's rows, and their partial sums of the weights' gradients.
    """
    engine, comm, shape, _ = layer
    dzxbcdt = plan.engine.empty(zxbcdt.shape, zxbcdt.dtype)
    dweights, ends = compute_gradients(layer, Inputs(zxbcdt, weights, plan, shape, kept.halo), dout, kept, dzxbcdt,
                                       partial(_pass_states, layer, plan, reverse=True))
    if comm.size > 1 and shape.reach:
        halos, wait = gather(comm, plan, "gradients of rows", ends[0])
        wait()
        engine.mixer_add_halos(halos, ends[1], plan, shape, dzxbcdt)
    plan.engine.nan_if_invalid(plan, dzxbcdt, *dweights)
    return dzxbcdt, dweights


def compute_gradients(
    layer: Layer, inputs: Inputs, dout: Array, kept: Kept, dzxbcdt: Array, pass_states: PassStates
) -> tuple[Mamba2Weights, Any]:
    """Compute dzxbcdt, a given array, as far as it comes from this rank's rows, and return what mixer_conv_bwd does."""
    engine, states = layer.engine, kept.states
    act, gradients = activations(engine, inputs, kept), engine.mixer_gradients(inputs.plan, layer.shape)
    dy, dstates, decays = engine.mixer_gate_states(inputs, act, kept.y, dout, dzxbcdt, gradients)
    pass_states(dstates, decays,
                lambda segments: engine.mixer_bwd(inputs, act, dy, states, dstates, segments, gradients))
    return engine.mixer_conv_bwd(inputs, gradients, dzxbcdt)


def _pass_states(
    layer: Layer, plan: Plan, states: Array, decays: Array, scan: Callable[[slice], None], reverse: bool = False
) -> None:
    """Turn what segments add to states into the states in front of them, through all ranks, and scan all segments.

    reverse: gradients of states pass from the last segment to the first.
    """
    engine, comm, shape, _ = layer
    summary = engine.mixer_fold(states, decays, plan, shape, reverse)
    if comm.size == 1:
        scan(slice(len(states)))
        return
    summaries, wait = gather(comm, plan, "gradients of states" if reverse else "states", summary)
    ahead, waiting, others = plan.memoize(("turns", reverse), lambda: _turns(engine, plan, reverse))
    scan(ahead)
    wait()
    engine.mixer_enter(states, decays, engine.mixer_start(summaries, plan, shape, reverse), waiting, reverse)
    scan(others)


def gather(comm: Comm, plan: Plan, name: str, send: Array) -> tuple[Any, Pending]:
    """Start to gather the arrays of all ranks, one behind the other in a buffer of the plan, and return it with its
    Pending.

    Through peer memory the rows of this rank itself are missing, as no rank reads its own.
    """
    recv = plan.workspace.array(of_ranks(name, plan, send))
    (arrival,) = comm.gather_heads([send[:, None]], [[recv[:, None]]], at_once=False)
    return recv, Pending(arrival.wait, recv)


def _turns(engine: MixerEngine, plan: Plan, reverse: bool) -> tuple[slice, slice, slice]:
    """Return slices of segments that run during the gather, that other ranks' states may reach, and that run after it.

    States of earlier ranks reach the rows up to the first sequence that begins on this rank. Gradients of later ranks
    reach the rows of the last one. For lengths on a GPU, the host must assume all segments.

    All segments run during the gather if none depends on it. Else as many run as outlast the exchange, if enough are
    left: a launch that does not fill the GPU costs more than it overlaps.
    """
    rows, each = plan.local_rows, engine.mixer_segment_rows
    segments = -(-rows // each)
    begins = [] if plan.batch.on_device else (plan.batch.cu_seqlens_padded - plan.cp_rank * rows).tolist()
    inside = [begin for begin in begins if 0 <= begin <= rows]
    if reverse:
        free = segments if plan.cp_rank == plan.cp_size - 1 else max(inside, default=0) // each
        waiting = slice(free, segments)
    else:
        reached = 0 if plan.cp_rank == 0 else -(-min(inside, default=rows) // each)
        waiting, free = slice(0, reached), segments - reached
    ahead = free if free == segments else AHEAD if min(free, segments - AHEAD) >= AHEAD else 0
    if reverse:
        return slice(0, ahead), waiting, slice(ahead, segments)
    return slice(segments - ahead, segments), waiting, slice(0, segments - ahead)
