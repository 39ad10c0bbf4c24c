"""Prefix trees in a Mamba-2 mixer, on one rank: states and the convolution fork at nodes.

The recurrence works at segments of rows, each with one state in front of it. So every node gets segments of its own:
rows move to a pack whose nodes are filled up to whole segments, and results move back. A segment then continues the one
before it on its path, and the gradient of a state is the sum over the segments that continue it. In front of a node's
tokens are copies of the rows that its convolution reads, the last ones of its ancestors. The dt of fillers and copies
is 0, so they change no state. Gradients of copies are added to those of their rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thdattn.mamba import context_parallel
from thdattn.mamba.context_parallel import Kept, Layer
from thdattn.mamba.shape import CHUNK, Copies, Mamba2Weights
from thdattn.packing import PackedBatch, rows_of_runs
from thdattn.plan.build import with_arrays
from thdattn.plan.memory import Memory
from thdattn.plan.node_table import node_table, rows_before
from thdattn.plan.plan import NO_ARRAYS, Plan
from thdattn.plan.workspace import Buffer, bytes_by_name
from thdattn.sharding import Sharding
from thdattn.trees import Trees

Ints = NDArray[np.int64]

_BEGINNING = 2 * CHUNK  # rows that take as long as the beginning of a segment


class _Nodes(NamedTuple):
    """A pack whose nodes have whole segments. Tables are int32 arrays of the engine.

    plan: its plan.
    sources: (its rows,), the row of the original pack that each holds; -1: a filler.
    tokens: as sources, but -1 for copies too.
    places: (rows of the original pack,), where each token went; -1: padding.
    others: the rows that hold no token.
    copies: rows of the original pack that have copies, and where these are.
    """

    plan: Plan
    sources: Any
    tokens: Any
    places: Any
    others: Any
    copies: Copies


def forward(layer: Layer, plan: Plan, zxbcdt: Any, weights: Mamba2Weights) -> tuple[Any, Kept]:
    """Compute context_parallel.forward of trees; what is kept has whole segments."""
    nodes = _nodes(layer, plan)
    rows, of_nodes, _ = map(nodes.plan.workspace.array, _buffers(layer, nodes.plan))
    _fill(layer, nodes, zxbcdt, rows)
    _, kept = context_parallel.forward(layer, nodes.plan, rows, weights, of_nodes)
    out = plan.engine.empty((plan.local_rows, layer.shape.d_inner), zxbcdt.dtype)
    _move(plan, of_nodes, nodes.places, out)
    return out, kept


def backward(
    layer: Layer, plan: Plan, dout: Any, zxbcdt: Any, weights: Mamba2Weights, kept: Kept
) -> tuple[Any, Mamba2Weights]:
    """Compute context_parallel.backward of trees."""
    nodes = _nodes(layer, plan)
    rows, of_nodes, gradients = map(nodes.plan.workspace.array, _buffers(layer, nodes.plan))
    _fill(layer, nodes, zxbcdt, rows)
    _move(plan, dout, nodes.tokens, of_nodes)
    _, dweights = context_parallel.backward(layer, nodes.plan, of_nodes, rows, weights, kept, gradients)
    dzxbcdt = plan.engine.empty(zxbcdt.shape, zxbcdt.dtype)
    _move(plan, gradients, nodes.places, dzxbcdt)
    layer.engine.mixer_add_copies(gradients, nodes.copies, layer.shape, dzxbcdt)
    return dzxbcdt, dweights


def memory(layer: Layer, plan: Plan) -> Memory:
    """Return the bytes of context_parallel.memory: the pack with whole segments is kept, and rows move to it."""
    batch, _ = _with_whole_segments(plan.batch, layer)
    outline = _outline(plan, batch)
    given, moved = context_parallel.memory(layer, plan), context_parallel.memory(layer, outline)
    rows, of_nodes, gradients = _buffers(layer, outline)
    arrays = {"plan": given["plan"] + moved["plan"]}
    return Memory(moved.forward | arrays | bytes_by_name([rows, of_nodes]),
                  moved.backward | bytes_by_name([gradients]),
                  moved.saved | {name: given[name] for name in ("zxbcdt", "out")}, given.grads)


def _buffers(layer: Layer, plan: Plan) -> tuple[Buffer, Buffer, Buffer]:
    """Declare zxbcdt of a pack with whole segments, out or dout, and dzxbcdt."""
    shape = layer.shape
    return (Buffer("rows of nodes", (plan.local_rows, shape.columns), shape.dtype),
            Buffer("out of nodes", (plan.local_rows, shape.d_inner), shape.dtype),
            Buffer("gradients of nodes", (plan.local_rows, shape.columns), shape.dtype))


def _nodes(layer: Layer, plan: Plan) -> _Nodes:
    """Return the pack with whole segments, which mixers with a convolution of the same width share."""
    nodes = plan.memoize(("nodes", layer.shape.reach), lambda: _make(layer, plan))
    nodes.plan.enter()
    return nodes


def _make(layer: Layer, plan: Plan) -> _Nodes:
    trees, reach, table = plan.batch.trees, layer.shape.reach, layer.engine.mixer_table
    assert trees is not None
    batch, begins = _with_whole_segments(plan.batch, layer)
    firsts = trees.nodes[:-1] + (plan.batch.cu_seqlens_padded - plan.batch.cu_seqlens)[trees.tree]
    rows, new = (rows_of_runs(begin, trees.lengths) for begin in (firsts, begins))
    sources = np.full(batch.total_rows, -1, np.int32)
    some, of_nodes, none = trees.lengths > 0, node_table(plan.batch), plan.batch.total_rows
    for distance in range(1, reach + 1):
        before = rows_before(of_nodes, firsts[some], distance, none)
        sources[(begins[some] - distance)[before < none]] = before[before < none]
    copies = np.flatnonzero(sources >= 0)
    sources[new] = rows
    tokens, places = np.full(batch.total_rows, -1, np.int32), np.full(plan.local_rows, -1, np.int32)
    tokens[new], places[rows] = rows, new
    others = np.flatnonzero(tokens < 0).astype(np.int32)
    return _Nodes(with_arrays(_outline(plan, batch)), table(sources), table(tokens), table(places), table(others),
                  Copies(*map(table, _by_row(sources[copies], copies))))


def _by_row(rows: NDArray[np.int32], copies: Ints) -> list[NDArray[np.int32]]:
    """Return the arrays of Copies, from the row that each copy is of."""
    copied, counts = np.unique(rows, return_counts=True)
    made = copied, np.append(0, np.cumsum(counts)), copies[np.argsort(rows, kind="stable")]
    return [x.astype(np.int32) for x in made]


def _outline(plan: Plan, batch: PackedBatch) -> Plan:
    return replace(plan, sharding=Sharding(batch, 1, "contiguous"), key_batch=batch, arrays=NO_ARRAYS)


def _with_whole_segments(batch: PackedBatch, layer: Layer) -> tuple[PackedBatch, Ints]:
    """Return trees whose nodes have copies in front and whole segments, and the row of each node's first token.

    Segments are as long as is fastest: shorter ones need fewer fillers, but each takes time to begin.
    """
    trees = batch.trees
    assert isinstance(trees, Trees)
    front = np.where(trees.before >= 0, layer.shape.reach, 0)
    lengths = np.where(trees.lengths > 0, trees.lengths + front, 0).astype(np.int64)

    def segments(rows: int) -> Ints:
        return -(-lengths // rows)

    most = layer.engine.mixer_segment_rows
    sizes = [CHUNK << i for i in range((most // CHUNK).bit_length())]
    rows = min(sizes, key=lambda rows: segments(rows).sum() * (rows + _BEGINNING))
    whole = segments(rows) * rows
    return PackedBatch.from_trees(whole, trees.parents), np.cumsum(whole) - whole + front


def _fill(layer: Layer, nodes: _Nodes, zxbcdt: Any, rows: Any) -> None:
    """Move rows to the pack with whole segments; rows that hold no token change no state."""
    _move(nodes.plan, zxbcdt, nodes.sources, rows)
    layer.engine.mixer_clear_dt(rows, nodes.others, layer.shape)


def _move(plan: Plan, x: Any, order: Any, into: Any) -> None:
    """Put row order[i] of x at i; a row of -1 becomes 0."""
    plan.engine.pack_rows([x[:, None]], order, [into[:, None]])
