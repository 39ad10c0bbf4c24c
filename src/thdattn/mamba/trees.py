"""Prefix trees in a Mamba-2 mixer, on one rank: states and the convolution fork at nodes.

The recurrence works at chunks of rows, each with one state in front of it. So every node gets chunks of its own: rows
move to a pack whose nodes are filled up to whole chunks, and results move back. A chunk then continues the chunk before
it on its path, and the gradient of a state is the sum over the chunks that continue it. Fillers are leaves beside a
node's children, so that no other row follows them. Their dt is 0, so they change no state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thdattn.mamba import context_parallel
from thdattn.mamba.context_parallel import Kept, Layer
from thdattn.mamba.shape import Mamba2Weights
from thdattn.packing import PackedBatch, rows_of_runs
from thdattn.plan.build import with_arrays
from thdattn.plan.memory import Memory
from thdattn.plan.plan import NO_ARRAYS, Plan
from thdattn.sharding import Sharding
from thdattn.trees import Trees

Rows = NDArray[np.int32]


class _Chunked(NamedTuple):
    """A pack whose nodes have whole chunks.

    plan: its plan.
    sources: (tokens,), row of the original pack of every token.
    places: (tokens,), row of the new pack of every token.
    """

    plan: Plan
    sources: Rows
    places: Rows


def forward(layer: Layer, plan: Plan, zxbcdt: Any, weights: Mamba2Weights) -> tuple[Any, Kept]:
    """Compute context_parallel.forward of trees; what is kept has whole chunks."""
    chunked = _chunked(layer, plan)
    out, kept = context_parallel.forward(layer, chunked.plan, _filled(layer, chunked, zxbcdt), weights)
    return _moved(out, chunked.places, chunked.sources, plan.local_rows), kept


def backward(
    layer: Layer, plan: Plan, dout: Any, zxbcdt: Any, weights: Mamba2Weights, kept: Kept
) -> tuple[Any, Mamba2Weights]:
    """Compute context_parallel.backward of trees."""
    chunked = _chunked(layer, plan)
    dout = _moved(dout, chunked.sources, chunked.places, chunked.plan.local_rows)
    dzxbcdt, dweights = context_parallel.backward(
        layer, chunked.plan, dout, _filled(layer, chunked, zxbcdt), weights, kept)
    return _moved(dzxbcdt, chunked.places, chunked.sources, plan.local_rows), dweights


def memory(layer: Layer, plan: Plan) -> Memory:
    """Return the bytes of context_parallel.memory for the pack with whole chunks."""
    batch, _ = _with_fillers(plan.batch, layer.engine.mixer_segment_rows)
    return context_parallel.memory(layer, _outline(plan, batch))


def _chunked(layer: Layer, plan: Plan) -> _Chunked:
    return plan.memoize("nodes in chunks", lambda: _make(plan, layer.engine.mixer_segment_rows))


def _make(plan: Plan, chunk: int) -> _Chunked:
    trees = plan.batch.trees
    assert trees is not None
    batch, begins = _with_fillers(plan.batch, chunk)
    padding = (plan.batch.cu_seqlens_padded - plan.batch.cu_seqlens)[trees.tree]
    sources, places = (rows_of_runs(first, trees.lengths) for first in (trees.nodes[:-1] + padding, begins))
    return _Chunked(with_arrays(_outline(plan, batch)), sources, places)


def _outline(plan: Plan, batch: PackedBatch) -> Plan:
    return replace(plan, sharding=Sharding(batch, 1, "contiguous"), key_batch=batch, arrays=NO_ARRAYS)


def _with_fillers(batch: PackedBatch, chunk: int) -> tuple[PackedBatch, NDArray[np.int64]]:
    """Return trees whose every node is followed by a leaf that completes its last chunk, and the nodes' first rows."""
    trees = batch.trees
    assert isinstance(trees, Trees)
    fillers = -trees.lengths % chunk
    lengths = np.stack([trees.lengths, fillers], axis=1).ravel()
    parents = np.stack([np.where(trees.parents < 0, -1, 2 * trees.parents), 2 * np.arange(trees.num_nodes)], axis=1)
    return PackedBatch.from_trees(lengths, parents.ravel()), (np.cumsum(lengths) - lengths)[::2]


def _filled(layer: Layer, chunked: _Chunked, zxbcdt: Any) -> Any:
    """Return rows with whole chunks: fillers are 0, and their dt is softplus(-inf) = 0."""
    rows = _moved(zxbcdt, chunked.sources, chunked.places, chunked.plan.local_rows)
    fillers = np.ones(len(rows), bool)
    fillers[chunked.places] = False
    layer.shape.parts(rows)[2][fillers] = -np.inf
    return rows


def _moved(x: Any, sources: Rows, places: Rows, num_rows: int) -> Any:
    """Return num_rows rows, of which places[i] is row sources[i] of x, and the others are 0."""
    moved = np.zeros((num_rows, *x.shape[1:]), x.dtype)
    moved[places] = x[sources]
    return moved
