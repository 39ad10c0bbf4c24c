"""Picture of a timeline: every rank has a line for each lane; communication is pale where it is hidden."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from thdattn.spans import COMPUTE, EXCHANGE, LANES, SUM
from thdattn.timeline import Interval, Row, Timeline, common, length, merged

MOST_RANKS = 16
COLOURS = {COMPUTE: "#4477aa", EXCHANGE: "#ee6677", SUM: "#228833"}  # Paul Tol's "bright", for all eyes
PALE = {EXCHANGE: "#fbdde0", SUM: "#d0e7d5"}
GAP = 0.7  # between ranks, of the height of a line
LETTER = 0.0052  # the width of a letter, of that of the axis


def draw(timeline: Timeline, path: str | PathLike[str]) -> None:
    """Save a picture of the first MOST_RANKS ranks."""
    lanes = [lane for lane in LANES if any(row.lane == lane for row in timeline.rows)]
    busy = timeline.busy(COMPUTE)[:MOST_RANKS]
    tall = len(lanes) + GAP  # of a rank
    figure = Figure(figsize=(12, 1.1 + 0.23 * tall * len(busy)), layout="constrained")
    axes = _axes(figure, timeline, len(busy), tall)
    for rank, computes in enumerate(busy):
        for line, lane in enumerate(lanes):
            rows = [row for row in timeline.rows if (row.rank, row.lane) == (rank, lane)]
            _bars(axes, lane, rows, tall * rank + GAP / 2 + line, computes)
    handles = [Patch(color=COLOURS[lane], label=lane) for lane in lanes]
    if timeline.hidden:
        handles += [Patch(color=PALE[lane], label=f"{lane}, hidden") for lane in lanes if lane in PALE]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(LANES) + len(PALE), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _axes(figure: Figure, timeline: Timeline, ranks: int, tall: float) -> Any:
    """Return axes with a band for each rank, from top to bottom."""
    axes = figure.subplots()
    axes.set_title(str(timeline), loc="left", fontsize=10)
    axes.set_xlabel("ms", fontsize=9)
    axes.set_xlim(0, max([row.end for row in timeline.rows], default=0) or 1)
    axes.set_ylim(tall * ranks, 0)
    axes.set_yticks([tall * (rank + 0.5) for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(labelsize=9)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for rank in range(1, ranks, 2):
        axes.axhspan(tall * rank, tall * (rank + 1), color="#f5f5f5", linewidth=0, zorder=0)
    return axes


def _bars(axes: Any, lane: str, rows: Sequence[Row], top: float, computes: Sequence[Interval]) -> None:
    """Draw one line of bars, and their names where these fit."""
    times, place = [(row.begin, row.end) for row in rows], (top + 0.07, 0.86)
    axes.broken_barh(_widths(times), place, color=COLOURS[lane], linewidth=0)
    if lane in PALE:
        axes.broken_barh(_widths(common(merged(times), computes)), place, color=PALE[lane], linewidth=0)
    edge = COLOURS[lane] if lane in PALE else "white"
    axes.broken_barh(_widths(times), place, facecolor="none", edgecolor=edge, linewidth=0.5)
    _, end = axes.get_xlim()
    for row in rows:
        name, is_pale = row.name.removeprefix("thd_").partition(" (")[0], lane in PALE and _is_hidden(row, computes)
        if (row.end - row.begin) / end > LETTER * (len(name) + 1):
            axes.text((row.begin + row.end) / 2, top + 0.5, name, ha="center", va="center_baseline", fontsize=7,
                      color="black" if is_pale else "white")


def _is_hidden(row: Row, computes: Sequence[Interval]) -> bool:
    """Return whether a rank computes for at least half of a bar."""
    return 2 * length(common([(row.begin, row.end)], computes)) >= row.end - row.begin


def _widths(times: Sequence[Interval]) -> list[Interval]:
    """Return (begin, width) of intervals, as Matplotlib takes them."""
    return [(begin, end - begin) for begin, end in times]
