"""What bench_cp.py keeps: shares of the attention alone, the table that a run prints, and the plot; needs no GPU.

Rows are those of record.Times, for every number of ranks apart. Beside "ours" and the peers they have two other ways:

alone    the attention kernels of a rank, forward and backward, on keys and values that are there already
silent   the whole pipeline with collectives that do nothing: with the moves between the orders of rows
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from record import DIRECTIONS, ERRORS, Row, Times, aligned, slashed
from workloads import cp_cases

KEY = ("gpu", "ranks", "as_rank_of", "case", "peer", "direction", "timing")
WAYS = (*DIRECTIONS, "both")
ALONE, SILENT = "alone", "silent"
Ranks = tuple[int, int]  # that there were, and of how many they behaved as two


def runs(rows: Iterable[Row]) -> dict[Ranks, Times]:
    """The rows by ranks, cases in their usual order: few ranks before many, real ones before those that are played."""
    order = [*cp_cases(1)]
    groups: dict[Ranks, list[Row]] = {}
    for row in sorted(rows, key=lambda row: order.index(row["case"]) if row["case"] in order else len(order)):
        groups.setdefault((int(row["ranks"]), int(row["as_rank_of"])), []).append(row)
    return {ranks: Times(groups[ranks]) for ranks in sorted(groups, key=lambda ranks: (ranks[1], ranks))}


def title(ranks: Ranks) -> str:
    """What the ranks of a run are."""
    real, played = ranks
    return f"{real} GPUs" if real == played else f"{real} GPUs as ranks of {played}"


def timed_cases(times: Times) -> list[str]:
    """The cases with speeds; others have only errors."""
    return [case for case in times.cases if times.text("tflops", case, "ours", "both", "called")]


def peers(times: Times) -> list[str]:
    """Other implementations."""
    return [peer for peer in times.peers if peer not in (ALONE, SILENT)]


def share(times: Times, case: str, timing: str) -> float:
    """Of the time of forward and backward, the part that the attention alone takes; NaN where one is missing."""
    return times.value("ms", case, ALONE, "both", timing) / times.value("ms", case, "ours", "both", timing)


def exposed(times: Times, case: str, timing: str) -> float:
    """Milliseconds of forward and backward beyond those of the attention alone."""
    return times.value("ms", case, "ours", "both", timing) - times.value("ms", case, ALONE, "both", timing)


def speeds(times: Times, case: str, peer: str, timing: str = "called") -> str:
    """TFLOP/s per GPU, forward/backward/both."""
    return slashed((times.value("tflops", case, peer, way, timing) for way in WAYS), 3)


def table(rows: Iterable[Row]) -> str:
    """A block for every number of ranks, a line for every case."""
    blocks = []
    for ranks, times in runs(rows).items():
        others = peers(times)
        lines = [[title(ranks), "ours", "one graph", ALONE, SILENT, *others, *(f"ours/{peer}" for peer in others),
                  "alone/ours", "in graphs", "exposed ms", "in graphs", "host us", "plan us", "GiB"]]  # fmt: skip
        for case in timed_cases(times):
            host = [1e3 * times.value("ms", case, "ours", way, "host") for way in ("forward", "both")]
            lines.append([
                case, speeds(times, case, "ours"), slashed([times.value("tflops", case, "ours", "both", "graph")], 3),
                *(speeds(times, case, peer) for peer in (ALONE, SILENT, *others)),
                *(slashed([times.ratio(case, peer, "both", "called")], 3) for peer in others),
                *(slashed([share(times, case, timing)], 3) for timing in ("called", "graph")),
                *(slashed([exposed(times, case, timing)], 3) for timing in ("called", "graph")),
                slashed(host, 3), slashed([1e3 * times.value("ms", case, "ours", "plan", "host")], 3),
                times.text("memory_gib", case, "ours", "both", "called") or "-",
            ])  # fmt: skip
        blocks.append(aligned(lines))
    return "\n\n".join(blocks)


def errors(rows: Iterable[Row]) -> str:
    """Relative RMS against float64, a line for every number of ranks and implementation."""
    lines = [[row["ranks"], row["case"], row["peer"], row["direction"], row["rms"], row["largest"]]
             for row in rows if row["timing"] == ERRORS and row["rms"]]  # fmt: skip
    return aligned([["ranks", "case", "of", "result", "rms", "largest"], *lines]) if lines else ""


def plot(rows: Iterable[Row], path: Path) -> None:
    """Bars of TFLOP/s per GPU, forward and backward together, with the share of the attention alone above ours."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = list(rows)
    found = runs(rows)
    figure, panels = plt.subplots(len(found), figsize=(9, 1 + 3.2 * len(found)), squeeze=False)
    for axes, (ranks, times) in zip(panels[:, 0], found.items(), strict=True):
        cases, names = timed_cases(times), ["ours", *peers(times), ALONE]
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            heights = [times.value("tflops", case, name, "both", "called") for case in cases]
            look = {"label": "attention alone", "color": "lightgrey"} if name == ALONE else {"label": name}
            axes.bar([x + (i + 0.5) * width for x in range(len(cases))], heights, width, **look)
        for x, case in enumerate(cases):
            axes.text(x + width / 2, times.value("tflops", case, "ours", "both", "called"),
                      f"{share(times, case, 'called'):.2f}", ha="center", va="bottom", fontsize=8)  # fmt: skip
        axes.set_xticks([x + 0.4 for x in range(len(cases))], cases)
        axes.set_ylabel("TFLOP/s per GPU")
        axes.set_title(title(ranks), loc="left")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(ncols=len(names), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    figure.suptitle(f"{rows[-1]['gpu']}, forward and backward; above ours: its share of the attention alone")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
