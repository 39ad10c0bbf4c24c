"""Prefix trees: the nodes of a pack's trees, and their tokens spread evenly over ranks."""

from thdattn.trees.nodes import Trees as Trees
