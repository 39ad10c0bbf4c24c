"""Draw trees.png: a prefix tree, and the mask of its rows, which a row's node and its ancestors decide.

    PYTHONPATH=src python docs/pictures/trees.py [FILE]

The mask is the rule on the ranges of a plan that thdattn makes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

import thdattn

LENGTHS = (8, 5, 4, 3, 6, 5)  # tokens of every node, depth first
PARENTS = (-1, 0, 1, 1, 0, -1)
NAMES = ("prompt", "turn A", "A1", "A2", "answer B", "document")
COLOURS = ("#4477aa", "#ccbb44", "#ee6677", "#aa3377", "#228833", "#66ccee")  # Paul Tol's "bright", for all eyes
DARK = (0, 3, 4)  # nodes whose colour needs white letters
PLACES = ((0, 3), (0.9, 2), (0.9, 1), (1.8, 1), (1.8, 2), (0.45, -0.2))  # column and height of every node


def batch() -> thdattn.PackedBatch:
    return thdattn.PackedBatch.from_trees(LENGTHS, PARENTS)


def mask() -> np.ndarray:
    """Return which key each row sees, (rows, rows) bool, by the rule of the kernels."""
    attn = thdattn.CPAttention(thdattn.comm.init("single"), 1, 8, dtype="float32", engine="reference")
    plan = attn.plan(batch())
    (begin, end), query_end = plan.key_ranges.T[..., None], plan.query_ranges[:, 1]
    query, key = np.arange(plan.local_rows)[:, None], np.arange(plan.key_rows)
    seen: np.ndarray = (begin <= key) & (key < end) & (query < query_end)
    return seen


def draw(path: Path) -> None:
    figure = Figure(figsize=(8, 4.4), facecolor="white")
    tree, rows = figure.subplots(1, 2, width_ratios=(1, 1.35))
    figure.subplots_adjust(left=0.02, right=0.985, top=0.9, bottom=0.12, wspace=0.22)
    draw_tree(tree)
    draw_mask(rows)
    figure.savefig(path, dpi=200)


def draw_tree(axes: Any) -> None:
    """Draw the nodes with their tokens and parents."""
    axes.set_title("Two trees of a pack", fontsize=11, loc="left", weight="bold")
    for node, (column, height) in enumerate(PLACES):
        if PARENTS[node] >= 0:
            axes.plot(*zip((column, height), PLACES[PARENTS[node]], strict=True), color="#555555", zorder=1)
        axes.text(column, height, f"{NAMES[node]}\n{LENGTHS[node]} tokens", ha="center", va="center", fontsize=10,
                  color="white" if node in DARK else "black",
                  bbox={"boxstyle": "round,pad=0.4", "facecolor": COLOURS[node], "edgecolor": "white"})
    axes.set(xlim=(-0.6, 2.4), ylim=(-0.8, 3.6))
    axes.axis("off")


def draw_mask(axes: Any) -> None:
    """Draw which rows are seen, in the colour of their node."""
    axes.set_title("Keys (columns) that each row sees", fontsize=11, loc="left", weight="bold")
    node_of, seen = np.repeat(np.arange(len(LENGTHS)), LENGTHS), mask()
    axes.imshow(np.where(seen, node_of + 1, 0), cmap=ListedColormap(("#eeeeee", *COLOURS)), vmin=0, vmax=len(COLOURS))
    edges = np.cumsum((0, *LENGTHS))
    for edge in edges[1:-1]:
        axes.axhline(edge - 0.5, color="white", linewidth=1.2)
        axes.axvline(edge - 0.5, color="white", linewidth=1.2)
    middle = (edges[1:] + edges[:-1] - 1) / 2
    axes.set_yticks(middle, NAMES, fontsize=9)
    axes.set_xticks(middle, NAMES, fontsize=9, rotation=20)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
