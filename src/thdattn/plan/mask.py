"""The rule of the mask: the keys that a query sees, from the positions of both in their sequences.

This module has everything that the host knows of masks. A new mask changes this module and its twin on the GPU,
`in_sight` of kernels.cu, which plans of lengths on a GPU and caches use. The tests compare the two element by element.
The oracle has a rule of its own, because it judges this one.

Masks are windows (left, right), -1 = unlimited; a causal mask is right = 0. Plans, routes, costs and kernels assume of
every mask the following, which tests/unit/test_mask.py checks:

* A row sees one range of positions of its own sequence, on the other side.
* Both ends of these ranges ascend along the tokens of a sequence, and so do those of the transposed mask.
* In self-attention a token sees itself. So the rows of a run together see one range too.
* In cross-attention tokens that see nothing come first in their sequence.
* The transposed mask says of a key which queries see it.

Prefix trees add one condition. Key k is seen by query q if and only if

    key_begin[q] <= k < key_end[q]  and  q < query_end[k].

The first half is that of a causal mask over the whole tree, whose tokens are written depth first. query_end[k] is the
end of the subtree of k's node. So the second half hides nodes that are no ancestors of q's node. Elsewhere the first
half implies the second. `ends_in_sight` is this rule: it lets a token's sequence end with the token's subtree. Ends of
ranges then do not ascend along a tree, and windows, which are distances along a path, are no ranges.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thdattn.packing import PackedBatch

Window = tuple[int, int]
Ints = NDArray[np.signedinteger[Any]]


def in_sight(position: Ints, length: Ints, other_length: Ints, mask: Window) -> tuple[Ints, Ints]:
    """Return [first, last), the positions of the other side that each token sees; first >= last where it sees none.

    The last positions of both sides are the same place. Arguments broadcast, and have one dtype.

    Args:
        length: number of tokens of its sequence.
        other_length: number of tokens of this sequence on the other side: keys, if `position` is of queries.
        mask: the mask, or the transposed mask if `position` is of keys.
    """
    left, right = mask
    place = position + (other_length - length)
    first = np.maximum(0, place - left) if left >= 0 else np.zeros_like(place)
    last = np.minimum(other_length, place + right + 1) if right >= 0 else np.broadcast_to(other_length, place.shape)
    return first, last


def ends_in_sight(batch: PackedBatch, sequence: Ints, position: Ints) -> Ints:
    """Return the end of each token's sequence, as in_sight takes its length: in trees, the end of its subtree.

    Args:
        batch: lengths on the host; not without sequences.
        position: place of each token in its sequence; places behind the last token get the sequence's length.
    """
    ends: Ints = batch.lengths[sequence]
    if batch.trees is None:
        return ends
    first, inside = batch.cu_seqlens[sequence], position < ends
    node = batch.trees.node_of((first + position)[inside])
    ends[inside] = batch.trees.ends[node] - first[inside]
    return ends


def positions_in_paths(batch: PackedBatch, sequence: Ints, position: Ints) -> Ints:
    """Return the position of each token on its path from the root of its tree; without trees, in its sequence.

    Positions count on over padding. Arguments are those of ends_in_sight.
    """
    trees = batch.trees
    if trees is None or not trees.nodes[-1]:
        return position
    lengths = batch.lengths[sequence]
    last = np.minimum(position, np.maximum(lengths, 1) - 1)
    node = np.minimum(trees.node_of(batch.cu_seqlens[sequence] + last), trees.num_nodes - 1)
    skipped = batch.cu_seqlens[sequence] + trees.depths[node] - trees.nodes[node]  # tokens of other paths, negative
    return np.where(lengths > 0, position + skipped, position)


def transposed(mask: Window) -> Window:
    """Return the mask as keys see it: in_sight then finds the queries that see a key."""
    return mask[::-1]


def most_in_sight(mask: Window, length: int) -> int:
    """Return the largest number of `length` keys that one query sees."""
    return min(length, sum(mask) + 1) if min(mask) >= 0 else length


def hides_tokens(batch: PackedBatch, other: PackedBatch, mask: Window) -> bool:
    """Return whether a token of batch (lengths on the host) sees no token of other; then the first one sees none."""
    lengths, others = batch.lengths, other.lengths
    first, last = in_sight(np.zeros_like(lengths), lengths, others, mask)
    return bool(((lengths > 0) & (first >= last)).any())


def visible_pairs(batch: PackedBatch, key_batch: PackedBatch, mask: Window) -> int:
    """Return the number of (query, key) pairs that a mask leaves; the lengths must be on the host.

    Each side of the window removes a triangle from the rectangle of queries and keys, cut off at its far side.
    """
    for lengths in (batch, key_batch):
        lengths.require_host("counting visible pairs")
    if batch.trees is not None:
        tokens = batch.trees.lengths.astype(np.int64)
        return int((tokens * batch.trees.depths + _triangle(tokens)).sum())
    queries, keys = (x.lengths.astype(np.int64) for x in (batch, key_batch))
    pairs = queries * keys
    for side, base, height in zip(mask, (keys, queries), (queries, keys), strict=True):
        if side >= 0:
            whole = np.maximum(base - 1 - side, 0)
            pairs -= _triangle(whole) - _triangle(np.maximum(whole - height, 0))
    return int(pairs.sum())


def _triangle(n: NDArray[np.int64]) -> NDArray[np.int64]:
    return n * (n + 1) // 2
