"""Prefix trees of a packed batch: nodes whose tokens see the earlier tokens of their node and all tokens of ancestors.

A tree is a sequence of the pack. Its tokens are written depth first: those of a node, then the subtree of each of its
children. So the tokens of a subtree are consecutive, and offsets describe it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thdattn.arguments import INT32_MAX, as_host_ints

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Trees:
    """Nodes of all trees of a pack. A plain sequence is a tree of one node.

    Offsets count valid tokens from the first token of the pack, without padding.

    Attributes:
        parents: (num_nodes,) int32, index of each node's parent; -1: the root of a tree.
        nodes: (num_nodes + 1,) int32, offsets of the nodes' tokens.
        tree: (num_nodes,) int32, number of each node's tree.
        ends: (num_nodes,) int32, offset behind the last token of each node's subtree.
        depths: (num_nodes,) int32, tokens of all ancestors of each node: the position of its first token.
        before: (num_nodes,) int32, the last token of the nearest ancestor with tokens; -1: there is none.
        has_children: (num_nodes,) bool.
    """

    parents: Ints
    nodes: Ints
    tree: Ints
    ends: Ints
    depths: Ints
    before: Ints
    has_children: NDArray[np.bool_]

    @classmethod
    def of(cls, lengths: NDArray[np.int64], parents: ArrayLike) -> Trees:
        """Describe trees by the lengths of nodes and their parents; see PackedBatch.from_trees, which checks lengths.

        Raises:
            TypeError: parents that are not integers.
            ValueError: a wrong number of parents, or nodes that are not depth first.
        """
        above = as_host_ints("parents", parents)
        if above.shape != lengths.shape:
            raise ValueError(f"parents has shape {above.shape}, wanted {lengths.shape} as lengths; pass the index of "
                             f"each node's parent, -1 for the root of a tree")
        nodes = np.append(0, np.cumsum(lengths))
        if nodes[-1] > INT32_MAX:
            raise ValueError(f"lengths of nodes sum to {nodes[-1]} rows, wanted < 2**31 as rows are counted in int32; "
                             f"split the batch")
        behind, depths, before = np.zeros((3, len(lengths)), np.int64)
        path: list[int] = []  # the node before, behind its ancestors
        for node, parent in enumerate(above.tolist()):
            if not -1 <= parent < node:
                raise ValueError(f"parents[{node}] is {parent}, wanted an earlier node or -1 for the root of a tree; "
                                 f"order nodes depth first, each parent before its children")
            while path and path[-1] != parent:
                behind[path.pop()] = node
            if parent >= 0 and not path:
                raise ValueError(f"parents[{node}] is {parent}, but the subtree of node {parent} ends before node "
                                 f"{behind[parent]}; wanted nodes depth first; write the whole subtree of a child "
                                 f"before the next child, and a tree before the next tree")
            depths[node] = depths[parent] + lengths[parent] if path else 0
            before[node] = (nodes[parent + 1] - 1 if lengths[parent] else before[parent]) if path else -1
            path.append(node)
        behind[path] = len(lengths)
        has_children = np.zeros(len(lengths), bool)
        has_children[above[above >= 0]] = True
        counts = above, nodes, np.cumsum(above < 0) - 1, nodes[behind], depths, before
        made: list[Any] = [*(x.astype(np.int32) for x in counts), has_children]
        return cls(*made).frozen()

    def frozen(self) -> Trees:
        """Return these trees, with read-only arrays."""
        for array in vars(self).values():
            array.setflags(write=False)
        return self

    @property
    def num_nodes(self) -> int:
        """Number of nodes, empty ones included."""
        return len(self.parents)

    @property
    def lengths(self) -> Ints:
        """(num_nodes,) int32, tokens of each node."""
        lengths: Ints = np.diff(self.nodes)
        return lengths

    def node_of(self, token: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return the node of each token, from its offset, which must be below the number of tokens."""
        return np.searchsorted(self.nodes[1:], token, side="right").astype(np.int64)

    def rows(self, begins: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return the first row of every node, the row behind its last token, and the row behind its subtree.

        Args:
            begins: first row of every tree in the packed buffer; more may follow.

        Returns:
            (3, num_nodes) int64.
        """
        roots = self.nodes[:-1][self.parents < 0]
        shift = (begins[: len(roots)] - roots).astype(np.int64)
        rows: NDArray[np.int64] = np.stack([self.nodes[:-1], self.nodes[1:], self.ends]) + shift[self.tree]
        return rows

    def tree_lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each tree, (num_trees,)."""
        roots = self.parents < 0
        return (self.ends[roots] - self.nodes[:-1][roots]).astype(np.int64)

    def paths(self) -> list[list[int]]:
        """Return for every leaf the nodes from its root to it, in the order of leaves."""
        paths = []
        for leaf in np.flatnonzero(~self.has_children).tolist():
            path = [leaf]
            while self.parents[path[-1]] >= 0:
                path.append(int(self.parents[path[-1]]))
            paths.append(path[::-1])
        return paths
