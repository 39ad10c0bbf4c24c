"""Rows of a rank in a pack whose nodes have whole segments, and what ranks need from each other for it, on the host.

Ranks cut nodes of prefix trees into pieces. A piece continues another one: the piece before it of its node, or the last
piece of an ancestor. If that is on an earlier rank, the rank has an entry in front. It is a segment without tokens that
gets the state behind the other piece. The rank of the other piece has an exit, a segment without tokens behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thdattn.mamba.shape import CHUNK, segment_rows
from thdattn.packing import PackedBatch, rows_of_runs
from thdattn.plan.node_table import node_table, rows_before
from thdattn.plan.plan import Plan

Ints = NDArray[np.int64]

_BEGINNING = 2 * CHUNK  # rows that take as long as the beginning of a segment


class Pieces(NamedTuple):
    """Pieces of all ranks, in the order of their rows.

    begins, ends: rows of the pack.
    before: the piece that each continues; -1: none.
    copied: (pieces, reach), the last rows on the path in front of each, the nearest first; total_rows: there is none.
    """

    begins: Ints
    ends: Ints
    ranks: Ints
    before: Ints
    copied: Ints

    @property
    def crossing(self) -> NDArray[np.bool_]:
        """True for pieces that continue one of an earlier rank."""
        crossing: NDArray[np.bool_] = (self.before >= 0) & (self.ranks[self.before] != self.ranks)
        return crossing


class Layout(NamedTuple):
    """The pack of one rank.

    batch: trees whose nodes are pieces, entries and exits, each with whole segments.
    rows: (tokens,), rows of the rank; places: (tokens,), where they go.
    copies: (2, number), rows of the rank, and the place of a copy of each.
    received: (2, number), rows of the pack on other ranks, and the place of a copy of each.
    entries, exits: (number,), their segments, in the order of the pieces that they follow.
    """

    batch: PackedBatch
    rows: Ints
    places: Ints
    copies: Ints
    received: Ints
    entries: Ints
    exits: Ints


def cut(plan: Plan, reach: int) -> Pieces:
    """Cut the nodes of all ranks."""
    table, rows = node_table(plan.batch), max(1, plan.local_rows)
    first, behind, _, _, above = table[:, :-1].astype(np.int64)
    parts = (behind - 1) // rows - first // rows + 1
    last = np.cumsum(parts) - 1
    node, number = np.repeat(np.arange(len(first)), parts), np.arange(parts.sum())
    part = number - (last - parts + 1)[node]
    ranks = first[node] // rows + part
    begins = np.maximum(first[node], ranks * rows)
    before = np.where(part > 0, number - 1, np.where(above[node] < 0, -1, last[above[node]]))
    copied = [rows_before(table, begins, distance, plan.batch.total_rows) for distance in range(1, reach + 1)]
    return Pieces(begins, np.minimum(behind[node], (ranks + 1) * rows), ranks, before,
                  np.array(copied, np.int64).reshape(reach, len(begins)).T)


def layout(plan: Plan, pieces: Pieces, most: int) -> Layout:
    """Lay the rows of this rank out in segments of at most `most` rows."""
    first, reach, none = plan.cp_rank * plan.local_rows, pieces.copied.shape[1], plan.batch.total_rows
    mine = np.flatnonzero(pieces.ranks == plan.cp_rank)
    parents, node_of, exits = _nodes(pieces, mine)
    nodes, front = np.array([node_of[piece] for piece in mine.tolist()], np.int64), reach * (pieces.before[mine] >= 0)
    lengths = np.ones(len(parents), np.int64)
    lengths[nodes] = pieces.ends[mine] - pieces.begins[mine] + front
    batch = _whole_segments(lengths, parents, most)
    assert batch.trees is not None
    begins = batch.trees.nodes[nodes] + front
    rows, places = (rows_of_runs(x, lengths[nodes] - front).astype(np.int64)
                    for x in (pieces.begins[mine] - first, begins))
    piece, distance = np.nonzero(pieces.copied[mine] < none)
    copies = np.stack([pieces.copied[mine][piece, distance], begins[piece] - distance - 1])
    here = copies[0] >= first
    entries = sorted((piece, node) for piece, node in node_of.items() if pieces.ranks[piece] != plan.cp_rank)
    segment = batch.trees.nodes.astype(np.int64) // segment_rows(batch, most)
    return Layout(batch, rows, places, copies[:, here] - [[first], [0]], copies[:, ~here],
                  *(segment[[node for _, node in each]] for each in (entries, exits)))


def _nodes(pieces: Pieces, mine: Ints) -> tuple[list[int], dict[int, int], list[tuple[int, int]]]:
    """Return the parents of all nodes of a rank, the node of each piece or entry, and (piece, node) of exits."""
    left = set(pieces.before[pieces.crossing].tolist())
    parents: list[int] = []
    node_of: dict[int, int] = {}
    exits = []

    def add(parent: int) -> int:
        parents.append(parent)
        return len(parents) - 1

    for piece in mine.tolist():
        before = int(pieces.before[piece])
        if before >= 0 and before not in node_of:
            node_of[before] = add(-1)
        node_of[piece] = add(node_of.get(before, -1))
        if piece in left:
            exits.append((piece, add(node_of[piece])))
    return parents, node_of, exits


def _whole_segments(lengths: Ints, parents: Sequence[int], most: int) -> PackedBatch:
    """Return trees whose nodes have whole segments.

    Segments are as long as is fastest: shorter ones need fewer fillers, but each takes time to begin.
    """

    def segments(rows: int) -> Ints:
        return -(-lengths // rows)

    sizes = [CHUNK << i for i in range((most // CHUNK).bit_length())]
    rows = min(sizes, key=lambda rows: segments(rows).sum() * (rows + _BEGINNING))
    return PackedBatch.from_trees(segments(rows) * rows, np.array(parents, np.int64))


class Crossings(NamedTuple):
    """The exits and entries of all ranks as a tree, and where gathered arrays have their states.

    slots: exits or entries of a rank, at most; a gathered array has as many for each rank.
    before: (nodes,), the exit that each exit or entry follows; -1: none.
    of_exits, of_entries: (nodes,), the slot of each exit (entry) in a gathered array; -1: it is the other.
    exits, entries: (number,), the nodes of this rank, in the order of Layout.
    """

    slots: int
    before: Ints
    of_exits: Ints
    of_entries: Ints
    exits: Ints
    entries: Ints


def crossings(pieces: Pieces, rank: int) -> Crossings:
    """Return what the states of this rank pass through."""
    left, entered = pieces.before[pieces.crossing], pieces.ranks[pieces.crossing]
    # In the order of a tree: each exit, whose reader is -1, the entries that follow it, and then later exits.
    piece, reader = np.unique(np.stack([np.tile(left, 2), np.append(np.full_like(left, -1), entered)]), axis=1)
    is_exit = reader < 0
    owner, exits = np.where(is_exit, pieces.ranks[piece], reader), np.flatnonzero(is_exit)
    number = ordinals(2 * owner + is_exit)
    slots = int(number.max(initial=-1)) + 1
    slot = slots * owner + number
    node_of = dict(zip(piece[exits].tolist(), exits.tolist(), strict=True)) | {-1: -1}
    before = exits[np.cumsum(is_exit) - 1]
    before[exits] = [node_of[_entered(pieces, exit)] for exit in piece[exits].tolist()]
    return Crossings(slots, before, np.where(is_exit, slot, -1), np.where(is_exit, -1, slot),
                     *(np.flatnonzero((owner == rank) & (is_exit == kind)) for kind in (True, False)))


def _entered(pieces: Pieces, piece: int) -> int:
    """Return the piece of an earlier rank that a piece follows at last; -1: none."""
    rank = pieces.ranks[piece]
    while piece >= 0 and pieces.ranks[piece] == rank:
        piece = int(pieces.before[piece])
    return piece


class Sent(NamedTuple):
    """Rows that ranks send to each other, for copies on other ranks.

    slots: rows that a rank sends, at most. copy_slots: copies that a rank receives, at most.
    rows: (number,), the rows of this rank that it sends.
    sources: (received,), the slot in the gathered rows of each copy that this rank receives, in the order of Layout.
    copies: (2, number), rows of this rank, and the slot of a copy of each in what ranks gather of all copies.
    """

    slots: int
    copy_slots: int
    rows: Ints
    sources: Ints
    copies: Ints


def sent(plan: Plan, pieces: Pieces) -> Sent:
    """Return which rows ranks need of each other."""
    rows, rank = max(1, plan.local_rows), plan.cp_rank
    piece, distance = np.nonzero((pieces.copied < plan.batch.total_rows)
                                 & (pieces.copied // rows != pieces.ranks[:, None]))
    row, receiver = pieces.copied[piece, distance], pieces.ranks[piece]
    wanted, which = np.unique(row, return_inverse=True)
    owner = wanted // rows
    slots, copy_slots = (int(np.bincount(x).max(initial=0)) for x in (owner, receiver))
    of_copy = copy_slots * receiver + ordinals(receiver)
    mine = row // rows == rank
    return Sent(slots, copy_slots, wanted[owner == rank] - rank * rows,
                (slots * owner + ordinals(owner))[which[receiver == rank]],
                np.stack([row[mine] - rank * rows, of_copy[mine]]))


def ordinals(keys: Ints) -> Ints:
    """Return the number of equal keys in front of each."""
    order = np.argsort(keys, kind="stable")
    made = np.empty(len(keys), np.int64)
    made[order] = np.arange(len(keys)) - np.searchsorted(keys[order], keys[order])
    return made
