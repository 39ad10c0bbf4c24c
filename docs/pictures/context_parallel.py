"""Draw context_parallel.png: the rows of a pack, the ranks that own them, and what moves between the ranks.

    PYTHONPATH=src python docs/pictures/context_parallel.py [FILE]

The rows of every rank are those that thdattn.Sharding returns.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import thdattn

LENGTHS = (4800, 1600, 2400, 400, 3200, 3600)  # tokens of every document
RANKS = 4
COLOURS = ("#4477aa", "#ccbb44", "#ee6677", "#aa3377", "#66ccee", "#228833")  # Paul Tol's "bright", for all eyes
DARK = (0, 3, 5)  # documents whose colour needs white letters
PALE = 0.25  # opacity of rows that another rank owns
FORWARD, BACKWARD = "#222222", "#bb4400"
PANELS = {
    "dual_chunk": "dual_chunk: each document has 8 chunks; rank r owns chunks r and 7 - r",
    "balanced": "balanced: most documents stay whole on one rank, so few keys move",
}


def draw(path: Path) -> None:
    batch = thdattn.PackedBatch.from_lengths(LENGTHS, multiple=2 * RANKS)
    figure = Figure(figsize=(8, 7.3), facecolor="white")
    grid = {"left": 0.075, "right": 0.855, "top": 0.955, "bottom": 0.135, "hspace": 0.28}
    pack, *panels = figure.subplots(1 + len(PANELS), 1, sharex=True, height_ratios=(1, 5, 5), gridspec_kw=grid)
    draw_pack(pack, batch)
    for axes, (strategy, title) in zip(panels, PANELS.items(), strict=True):
        axes.set_title(title, fontsize=11, loc="left", weight="bold")
        draw_ranks(axes, batch, thdattn.Sharding(batch, RANKS, strategy))
    draw_moves(panels[-1])
    panels[-1].set_xlabel("row of the pack", fontsize=10)
    figure.legend(handles=[
        Patch(color="#555555", label="rows that the rank owns: it has their q, k, v, out and gradients"),
        Patch(color="#555555", alpha=PALE, label="rows of other ranks: it gathers their k and v"),
    ], loc="lower left", bbox_to_anchor=(0.055, 0), frameon=False, fontsize=10)
    figure.savefig(path, dpi=200)


def draw_pack(axes: Any, batch: thdattn.PackedBatch) -> None:
    """Draw the documents, one behind the other."""
    axes.set_title(f"The pack: {batch.num_seqs} documents in one buffer of {batch.total_rows:,} rows, one row a token",
                   fontsize=11, loc="left", weight="bold")
    for document, (begin, length) in enumerate(zip(batch.cu_seqlens_padded.tolist(), LENGTHS, strict=False)):
        axes.broken_barh([(begin, length)], (-0.45, 0.9), facecolors=COLOURS[document], edgecolor="white")
        axes.text(begin + length / 2, 0, "ABCDEF"[document], ha="center", va="center", weight="bold", fontsize=11,
                  color="white" if document in DARK else "black")
    clean(axes)
    axes.set_yticks([])


def draw_ranks(axes: Any, batch: thdattn.PackedBatch, sharding: thdattn.Sharding) -> None:
    """Draw a lane per rank: its own rows solid, those whose keys it gathers pale."""
    for rank in range(RANKS):
        own, gathered = rows_of(batch, sharding, rank)
        for document, start in enumerate(batch.cu_seqlens_padded[:-1].tolist()):
            rows = slice(start, start + LENGTHS[document])
            for mask, opacity in ((own, 1.0), (gathered, PALE)):
                axes.broken_barh(runs(mask[rows], start), (rank - 0.4, 0.8), facecolors=COLOURS[document],
                                 alpha=opacity)
        axes.text(batch.total_rows * 1.012, rank, f"owns {own.sum():,} rows\ngathers {gathered.sum():,}",
                  va="center", fontsize=9, linespacing=1.3)
    clean(axes)
    axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)], fontsize=10)
    axes.invert_yaxis()


def rows_of(batch: thdattn.PackedBatch, sharding: thdattn.Sharding, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two masks, (total_rows,) bool each: a rank's own rows, and those that it gathers for a causal mask."""
    own = np.zeros(batch.total_rows, bool)
    own[sharding.rows(rank)] = True
    if sharding.strategy != "balanced":
        return own, ~own  # all ranks gather all rows
    seen = np.zeros_like(own)
    for begin, end in zip(batch.cu_seqlens_padded[:-1], batch.cu_seqlens_padded[1:], strict=True):
        last = np.flatnonzero(own[begin:end])[-1:]
        seen[begin : begin + int(last.sum())] = True
    return own, seen & ~own


def runs(mask: np.ndarray, start: int) -> list[tuple[int, int]]:
    """Return (first row, number of rows) of every run of True."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return [(start + int(a), int(b - a)) for a, b in edges.reshape(-1, 2)]


def draw_moves(axes: Any) -> None:
    """Draw what moves between the ranks that share document C of the balanced sharding, and say it beside."""
    for column, (begin, end) in ((6700, (1, 2)), (7000, (1, 3))):
        axes.annotate("", (column, end - 0.1), (column, begin), arrowprops=arrow(FORWARD))
    for column, (begin, end) in ((7400, (2, 1)), (7700, (3, 1))):
        axes.annotate("", (column, end + 0.1), (column, begin), arrowprops=arrow(BACKWARD))
    for line, (colour, text) in enumerate((
        (FORWARD, "forward: an owner sends k and v\nto the ranks whose queries see them"),
        (BACKWARD, "backward: they send their parts of dk\nand dv back; the owner adds them up"),
    )):
        axes.text(8900, 0.02 + 0.98 * line, text, color=colour, fontsize=10, va="center", linespacing=1.35)


def arrow(colour: str) -> dict[str, Any]:
    return {"arrowstyle": "-|>", "color": colour, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 14}


def clean(axes: Any) -> None:
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelsize=9)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".png"))
