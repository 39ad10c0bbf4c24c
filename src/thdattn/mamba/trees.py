"""Prefix trees in a Mamba-2 mixer: states and the convolution fork at nodes.

The recurrence works at segments of rows, each with one state in front of it. So every node gets segments of its own:
rows move to a pack whose nodes are filled up to whole segments, and results move back. A segment then continues the one
before it on its path. The gradient of a state is the sum over the segments that continue it. In front of a node's
tokens are copies of the rows that its convolution reads, the last ones of its ancestors. The dt of fillers and copies
is 0, so they change no state. Gradients of copies are added to those of their rows.

Ranks cut nodes into pieces, see nodes.py. They send each other the rows that others copy. They fold their segments from
states of 0, and gather the states at all exits with the decays from the entries. They fold these too, and so know the
states at their entries. Gradients of states pass from entries to exits in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from thdattn.arguments import Array
from thdattn.mamba import context_parallel
from thdattn.mamba.context_parallel import (
    Kept,
    Layer,
    compute,
    compute_gradients,
    gather,
    last_rows,
    of_ranks,
)
from thdattn.mamba.nodes import Crossings, Ints, Layout, Sent, crossings, cut, layout, sent
from thdattn.mamba.shape import Copies, Inputs, Mamba2Weights, MixerShape, segment_rows
from thdattn.packing import PackedBatch
from thdattn.plan.build import with_arrays
from thdattn.plan.memory import Memory, largest_windows
from thdattn.plan.plan import NO_ARRAYS, Plan
from thdattn.plan.workspace import Buffer, bytes_by_name
from thdattn.sharding import Sharding


class _Outline(NamedTuple):
    """The pack of this rank with whole segments, and what ranks exchange, as numbers on the host."""

    layout: Layout
    crossings: Crossings
    sent: Sent


class _Nodes(NamedTuple):
    """The pack of this rank with whole segments. Tables are int32 arrays of the engine.

    plan: its plan, of one rank.
    outline: the same in numbers on the host.
    sources: (its rows,), the row of this rank that each holds; -1: a filler, or a row of another rank.
    tokens: as sources, but -1 for copies too.
    places: (local_rows,), where each token goes; -1: padding.
    others: the rows that hold no token.
    copies: rows of this rank that have copies here.
    starts: of its segments, see _starts.
    sent: (slots,), rows that this rank sends; -1: none.
    received: the slot in the gathered rows of each copy of a row of another rank.
    returned: (copy_slots,), where these copies are; -1: none.
    foreign_copies: rows of this rank that have copies on others, among the gathered gradients of copies.
    crossing_starts: of all exits and entries.
    """

    plan: Plan
    outline: _Outline
    sources: Array
    tokens: Array
    places: Array
    others: Array
    copies: Copies
    starts: Array
    sent: Array
    received: Array
    returned: Array
    foreign_copies: Copies
    crossing_starts: Array


def forward(layer: Layer, plan: Plan, zxbcdt: Array, weights: Mamba2Weights) -> tuple[Any, Kept]:
    """Compute context_parallel.forward of trees. Kept has whole segments; its halo has the rows of other ranks."""
    nodes = _nodes(layer, plan)
    rows, of_nodes, _ = map(nodes.plan.workspace.array, _buffers(layer.shape, nodes.outline))
    received = _receive(layer, plan, nodes, zxbcdt)
    kept = compute(layer, _filled(layer, nodes, zxbcdt, received, rows, weights), of_nodes,
                   partial(_pass_states, layer, plan, nodes))
    out = plan.engine.empty((plan.local_rows, layer.shape.d_inner), zxbcdt.dtype)
    _move(plan, of_nodes, nodes.places, out)
    return out, kept._replace(halo=received)


def backward(
    layer: Layer, plan: Plan, dout: Array, zxbcdt: Array, weights: Mamba2Weights, kept: Kept
) -> tuple[Any, Mamba2Weights]:
    """Compute context_parallel.backward of trees."""
    nodes = _nodes(layer, plan)
    rows, of_nodes, gradients = map(nodes.plan.workspace.array, _buffers(layer.shape, nodes.outline))
    inputs = _filled(layer, nodes, zxbcdt, kept.halo, rows, weights)
    _move(plan, dout, nodes.tokens, of_nodes)
    dweights, _ = compute_gradients(layer, inputs, of_nodes, kept._replace(halo=inputs.halo), gradients,
                                    partial(_pass_states, layer, plan, nodes, reverse=True))
    dzxbcdt = plan.engine.empty(zxbcdt.shape, zxbcdt.dtype)
    _move(plan, gradients, nodes.places, dzxbcdt)
    layer.engine.mixer_add_copies(gradients, nodes.copies, layer.shape, dzxbcdt)
    if nodes.outline.sent.copy_slots:
        send = plan.workspace.array(_sent_gradients(layer.shape, nodes.outline))
        _move(plan, gradients, nodes.returned, send)
        of_copies, wait = gather(layer.comm, plan, "gradients of rows", send)
        wait()
        layer.engine.mixer_add_copies(of_copies, nodes.foreign_copies, layer.shape, dzxbcdt)
    return dzxbcdt, dweights


def memory(layer: Layer, plan: Plan) -> Memory:
    """Return the bytes of context_parallel.memory: the pack with whole segments is kept, and rows move to it."""
    outline, shape = _outline(layer, plan), layer.shape
    given, moved = (context_parallel.memory(layer, x) for x in (plan, _plan(plan, outline.layout.batch)))
    rows, of_nodes, gradients = _buffers(shape, outline)
    there, back, windows = [rows, of_nodes], [gradients], {}
    received = {}
    if plan.cp_size > 1:
        sends = copied, states, copies = [of(shape, outline) for of in (_sent_rows, _sent_states, _sent_gradients)]
        there += [copied, states, of_ranks("rows", plan, copied), of_ranks("states", plan, states),
                  *_state_buffers(layer, outline)]
        back += [copies, of_ranks("gradients of states", plan, states), of_ranks("gradients of rows", plan, copies)]
        windows = largest_windows([layer.comm.gather_bytes([x.nbytes], 1) for x in sends])
        received = bytes_by_name([_received(shape, outline)])
    arrays = {"plan": given["plan"] + moved["plan"]}
    return Memory(moved.forward | arrays | bytes_by_name(there) | windows, moved.backward | bytes_by_name(back),
                  moved.saved | {name: given[name] for name in ("zxbcdt", "out")} | received, given.grads)


# ----------------------------------------------------------------------------------------------------- buffers


def _buffers(shape: MixerShape, outline: _Outline) -> tuple[Buffer, Buffer, Buffer]:
    """Declare zxbcdt of a pack with whole segments, out or dout, and dzxbcdt."""
    rows = outline.layout.batch.total_rows
    return (Buffer("rows of nodes", (rows, shape.columns), shape.dtype),
            Buffer("out of nodes", (rows, shape.d_inner), shape.dtype),
            Buffer("gradients of nodes", (rows, shape.columns), shape.dtype))


def _sent_rows(shape: MixerShape, outline: _Outline) -> Buffer:
    return Buffer("rows sent", (outline.sent.slots, shape.columns), shape.dtype)


def _received(shape: MixerShape, outline: _Outline) -> Buffer:
    return Buffer("rows in front", (len(outline.sent.sources), shape.columns), shape.dtype)


def _sent_gradients(shape: MixerShape, outline: _Outline) -> Buffer:
    return Buffer("gradients sent", (outline.sent.copy_slots, shape.columns), shape.dtype)


def _sent_states(shape: MixerShape, outline: _Outline) -> Buffer:
    """Declare the states, or their gradients, that a rank sends, each with the decays from its entries to its exits."""
    numbers = math.prod(shape.state) + 4 * shape.num_heads
    return Buffer("states sent", (outline.crossings.slots, numbers), shape.sum_dtype)


def _state_buffers(layer: Layer, outline: _Outline) -> tuple[Buffer, Buffer, Buffer, Buffer]:
    """Declare the states of this rank's segments from 0, decays from entries, and the same of all exits and entries.

    Decays are folded as states of four equal numbers per head.
    """
    shape, batch = layer.shape, outline.layout.batch
    segments = batch.total_rows // segment_rows(batch, layer.engine.mixer_segment_rows)
    nodes, heads, dtype = len(outline.crossings.before), shape.num_heads, shape.sum_dtype
    return (Buffer("states from 0", (segments, *shape.state), dtype), Buffer("decays", (segments, heads, 4), dtype),
            Buffer("states of exits", (nodes, *shape.state), dtype), Buffer("decays", (nodes, heads), dtype, "exits"))


# ----------------------------------------------------------------------------------------------------- tables


def _outline(layer: Layer, plan: Plan) -> _Outline:
    pieces = cut(plan, layer.shape.reach)
    made = layout(plan, pieces, layer.engine.mixer_segment_rows)
    return _Outline(made, crossings(pieces, plan.cp_rank), sent(plan, pieces))


def _plan(plan: Plan, batch: PackedBatch) -> Plan:
    """Return the plan of the pack with whole segments, without its arrays."""
    return replace(plan, sharding=Sharding(batch, 1, "contiguous"), cp_rank=0, key_batch=batch, arrays=NO_ARRAYS,
                   like=None, core=None)


def _nodes(layer: Layer, plan: Plan) -> _Nodes:
    """Return the pack with whole segments, which mixers with a convolution of the same width share."""
    nodes = plan.memoize(("nodes", layer.shape.reach), lambda: _make(layer, plan))
    nodes.plan.enter()
    return nodes


def _make(layer: Layer, plan: Plan) -> _Nodes:
    outline, most = _outline(layer, plan), layer.engine.mixer_segment_rows
    (batch, rows, places, copies, received, _, _), sent = outline.layout, outline.sent
    tokens = _table(batch.total_rows, places, rows)
    sources = tokens.copy()
    sources[copies[1]] = copies[0]
    tables = {
        "sources": sources,
        "tokens": tokens,
        "places": _table(plan.local_rows, rows, places),
        "others": np.flatnonzero(tokens < 0),
        "copies": _copies(copies),
        "starts": _starts(_segments_before(batch, most)),
        "sent": _table(sent.slots, np.arange(len(sent.rows)), sent.rows),
        "received": sent.sources,
        "returned": _table(sent.copy_slots, np.arange(len(received[1])), received[1]),
        "foreign_copies": _copies(sent.copies),
        "crossing_starts": _starts(outline.crossings.before),
    }
    arrays = {name: _uploaded(plan, table) for name, table in tables.items()}
    return _Nodes(with_arrays(_plan(plan, batch)), outline, **arrays)


def _segments_before(batch: PackedBatch, most: int) -> Ints:
    """Return for every segment of trees the one before it on its path; -1: there is none."""
    trees, rows = batch.trees, segment_rows(batch, most)
    assert trees is not None
    first = np.arange(0, batch.total_rows, rows)
    node = trees.node_of(first)
    before: Ints = np.where(trees.nodes[node] == first, trees.before[node], first - 1) // rows
    return before


def _starts(before: Ints) -> Ints:
    """Return where each segment of trees gets its state from, for mixer_fold_trees: (segments, 2), see there.

    Args:
        before: the segment before each on its path; -1: there is none. Segments are in the order of trees, depth first.
    """
    own = np.arange(len(before))
    first = np.where(before == own - 1, own, np.where(before < 0, -1, before + 1))
    return np.stack([first, np.isin(own, first[first != own])], axis=1)


def _table(length: int, index: Ints, values: Ints) -> Ints:
    """Return a table that has values at some indices, and -1 elsewhere."""
    made = np.full(length, -1)
    made[index] = values
    return made


def _copies(copies: Ints) -> Copies:
    """Return Copies of (2, number): rows, and the place of a copy of each."""
    rows, counts = np.unique(copies[0], return_counts=True)
    return Copies(rows, np.append(0, np.cumsum(counts)), copies[1][np.argsort(copies[0], kind="stable")])


def _uploaded(plan: Plan, table: Any) -> Any:
    """Return a table of the host, or Copies, as int32 arrays of the plan's engine."""
    if isinstance(table, Copies):
        return Copies(*(_uploaded(plan, x) for x in table))
    return np.asarray(table.astype(np.int32), like=plan.rows)  # of CuPy arrays this is cupy.asarray


# ----------------------------------------------------------------------------------------------------- rows


def _receive(layer: Layer, plan: Plan, nodes: _Nodes, zxbcdt: Array) -> Any:
    """Return the rows of other ranks that this rank copies, in a new array."""
    outline, shape = nodes.outline, layer.shape
    of_others = _received(shape, outline)
    received = plan.engine.empty(of_others.shape, of_others.dtype)
    if outline.sent.slots:
        send = plan.workspace.array(_sent_rows(shape, outline))
        _move(plan, zxbcdt, nodes.sent, send)
        rows, wait = gather(layer.comm, plan, "rows", send)
        wait()
        _move(plan, rows, nodes.received, received)
    return received


def _filled(
    layer: Layer, nodes: _Nodes, zxbcdt: Array, received: Array, rows: Array, weights: Mamba2Weights
) -> Inputs:
    """Move rows to the pack with whole segments, the array `rows`; rows that hold no token change no state."""
    _move(nodes.plan, zxbcdt, nodes.sources, rows)
    if len(received):
        nodes.plan.engine.place_rows([received[:, None]], nodes.returned[: len(received)], nodes.plan, [rows[:, None]])
    layer.engine.mixer_clear_dt(rows, nodes.others, layer.shape)
    return Inputs(rows, weights, nodes.plan, layer.shape, last_rows(nodes.plan, layer.shape, rows))


def _move(plan: Plan, x: Array, order: Array, into: Array) -> None:
    """Put row order[i] of x at i; a row of -1 becomes 0."""
    plan.engine.pack_rows([x[:, None]], order, [into[:, None]])


# ----------------------------------------------------------------------------------------------------- states


def _pass_states(
    layer: Layer, plan: Plan, nodes: _Nodes, states: Array, decays: Array, scan: Callable[[slice], None],
    reverse: bool = False,
) -> None:
    """Turn what segments add to states into the states in front of them, through all ranks, and scan all segments."""
    if nodes.outline.crossings.slots:
        _exchange(layer, plan, nodes, states, decays, reverse)
    layer.engine.mixer_fold_trees(states, decays, nodes.starts, reverse)
    scan(slice(len(states)))


def _exchange(layer: Layer, plan: Plan, nodes: _Nodes, states: Array, decays: Array, reverse: bool) -> None:
    """Let entries add the states of other ranks; reverse: exits the gradients from other ranks."""
    engine, comm, shape, _ = layer
    here, all_ranks = nodes.outline.layout, nodes.outline.crossings
    array = plan.workspace.array
    alone, path, of_exits, decays_of_exits = map(array, _state_buffers(layer, nodes.outline))
    alone[...] = states
    engine.mixer_fold_trees(alone, decays, nodes.starts, reverse)
    path.fill(0)
    for segment in here.entries.tolist():
        path[segment] = 1
    engine.mixer_fold_trees(path, decays, nodes.starts)
    send, numbers = array(_sent_states(shape, nodes.outline)), math.prod(shape.state)
    _pick(_flat(alone), here.entries if reverse else here.exits, send[:, :numbers])
    _pick(_flat(path), here.exits, send[:, numbers:])
    gathered, wait = gather(comm, plan, "gradients of states" if reverse else "states", send)
    wait()
    _pick(gathered[:, :numbers], all_ranks.of_entries if reverse else all_ranks.of_exits, _flat(of_exits))
    _pick(gathered[:, numbers::4], all_ranks.of_exits, decays_of_exits)
    engine.mixer_fold_trees(of_exits, decays_of_exits, nodes.crossing_starts, reverse)
    into, mine = (here.exits, all_ranks.exits) if reverse else (here.entries, all_ranks.entries)
    for segment, node in zip(into.tolist(), mine.tolist(), strict=True):
        states[segment] = of_exits[node]


def _pick(x: Array, index: Ints, into: Array) -> None:
    """Put x[index[i]] at i, 0 where the index is -1 or missing."""
    into.fill(0)
    for i, j in enumerate(index.tolist()):
        if j >= 0:
            into[i] = x[j]


def _flat(x: Array) -> Any:
    """Return a view with one row per item."""
    return x.reshape(len(x), math.prod(x.shape[1:]))
