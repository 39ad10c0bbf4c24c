"""What bench_cp.py keeps: shares of the attention alone, the table that a run prints, and the plot; needs no GPU.

Rows are those of record.Times, apart for every number of ranks and transport. "ours" is what CPAttention chooses by
itself, "ours, 2 groups" the same with so many groups of heads, "ours, a2a" another method, whose cp_comm_type and
sharding stand in columns of their own (older rows are of all_gather and dual_chunk), and "alone" the attention kernels
of a rank, forward and backward, in one launch each, on keys and values that are there already. "one GPU" has the whole
pack to itself, and its speed is its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from record import DIRECTIONS, ERRORS, Row, Times, aligned, slashed
from workloads import cp_cases

KEY = ("gpu", "ranks", "as_rank_of", "transport", "case", "peer", "direction", "timing")
WAYS = (*DIRECTIONS, "both")
OURS, ALONE, ONE = "ours", "alone", "one GPU"
USUAL = ["all_gather", "dual_chunk"]  # cp_comm_type and sharding of OURS
TITLES = ("way", "method", "sharding", "groups", "kept", "fwd ms", "bwd ms", "both ms", "of alone", "exposed ms",
          "predicted", "TFLOP/s", "of one GPU", "MiB", "GiB", "host us", "graph ms")  # fmt: skip


class Ranks(NamedTuple):
    """How many ranks a run seemed to have and really had, and by what keys and gradients travelled."""

    played: int
    real: int
    transport: str

    def __str__(self) -> str:
        return f"{self.real} GPUs{'' if self.real == self.played else f' as ranks of {self.played}'}, {self.transport}"


def runs(rows: Iterable[Row]) -> dict[Ranks, Times]:
    """The rows by ranks, few before many, cases in their usual order."""
    order = [*cp_cases(1)]
    groups: dict[Ranks, list[Row]] = {}
    for row in sorted(rows, key=lambda row: order.index(row["case"]) if row["case"] in order else len(order)):
        groups.setdefault(Ranks(int(row["as_rank_of"]), int(row["ranks"]), row["transport"]), []).append(row)
    return {ranks: Times(groups[ranks]) for ranks in sorted(groups)}


def in_groups(number: int) -> str:
    """The name of ours with so many groups of heads."""
    return f"{OURS}, {number} group{'s' * (number > 1)}"


def by_method(name: str) -> str:
    """The name of ours by another method than the usual one."""
    return f"{OURS}, {name}"


def own(times: Times) -> list[str]:
    """All ways of ours."""
    return [OURS, *(name for name in times.peers if name.startswith(OURS))]


def by_methods(times: Times) -> list[str]:
    """Ours by every method, each with as many groups of heads as CPAttention chooses."""
    return [way for way in own(times) if way == OURS or any(method(times, case, way) != USUAL for case in times.cases)]


def timed_cases(times: Times) -> list[str]:
    """The cases with speeds; others have only errors."""
    ways = own(times)
    return [case for case in times.cases if any(times.text("tflops", case, way, "both", "called") for way in ways)]


def peers(times: Times) -> list[str]:
    """Other implementations."""
    return [peer for peer in times.peers if peer not in (ALONE, ONE) and not peer.startswith(OURS)]


def of_one_gpu(times: Times, case: str, way: str) -> float:
    """Speed per GPU, forward and backward, over that of one GPU with the whole pack; NaN where one is missing."""
    mine, alone = (times.value("tflops", case, name, "both", "called") for name in (way, ONE))
    return mine / alone


def received(times: Times, case: str, way: str) -> float:
    """MiB that a rank has got from others in forward and backward; NaN where nobody counted."""
    return times.value("received_bytes", case, way, "both", "called") / 2**20


def method(times: Times, case: str, way: str) -> list[str]:
    """cp_comm_type and sharding of a way of ours, also of older rows, which do not say."""
    if not way.startswith(OURS):
        return ["-", "-"]
    columns = zip(("method", "sharding"), USUAL, strict=True)
    return [times.text(column, case, way, "both", "called") or usual for column, usual in columns]


def share(times: Times, case: str, way: str, timing: str) -> float:
    """Of the time of forward and backward, the part that the attention alone takes; NaN where one is missing."""
    return times.value("ms", case, ALONE, "both", timing) / times.value("ms", case, way, "both", timing)


def exposed(times: Times, case: str, way: str, timing: str) -> float:
    """Milliseconds of forward and backward beyond those of the attention alone."""
    return times.value("ms", case, way, "both", timing) - times.value("ms", case, ALONE, "both", timing)


def speeds(times: Times, case: str, peer: str, timing: str = "called") -> str:
    """TFLOP/s per GPU, forward/backward/both."""
    return slashed((times.value("tflops", case, peer, way, timing) for way in WAYS), 3)


def table(rows: Iterable[Row]) -> str:
    """A block for every number of ranks and transport, a line for every case and way."""
    blocks = []
    for ranks, times in runs(rows).items():
        ways = *own(times), *peers(times), ALONE, ONE
        lines = [line(times, case, way) for case in timed_cases(times) for way in ways
                 if times.text("ms", case, way, "both", "called")]  # fmt: skip
        blocks.append(aligned([[str(ranks), *TITLES], *lines]))
    return "\n\n".join(blocks)


def line(times: Times, case: str, way: str) -> list[str]:
    """Of the table; in parentheses, how many times as long as the attention alone in a graph.

    The attention alone has rows and keys as all_gather with dual_chunk has them, so others are not set beside it.
    """
    called = [times.value("ms", case, way, direction, "called") for direction in WAYS]
    host = [1e3 * times.value("ms", case, way, direction, "host") for direction in ("forward", "both")]
    graph, compared = times.value("ms", case, way, "both", "graph"), way not in (ALONE, ONE)
    alike = compared and method(times, case, way) in (["-", "-"], USUAL)
    of_alone = share(times, case, way, "graph") if alike else math.nan
    return [
        case, way, *method(times, case, way),
        *(times.text(choice, case, way, "both", "called") or "-" for choice in ("head_groups", "keep_keys")),
        *(slashed([ms], 4) for ms in called),
        *((slashed([of(times, case, way, "called")], 3) if alike else "-") for of in (share, exposed)),
        slashed([times.value("predicted_ms", case, way, "both", "called")], 4),
        slashed([times.value("tflops", case, way, "both", "called")], 3),
        slashed([of_one_gpu(times, case, way)], 3) if compared else "-",
        slashed([received(times, case, way)], 3),
        times.text("memory_gib", case, way, "both", "called") or "-",
        slashed(host, 3) if compared else "-",
        slashed([graph], 4) + (f" ({1 / of_alone:.2f})" if of_alone > 0 else ""),
    ]  # fmt: skip


def recommendations(rows: Iterable[Row]) -> str:
    """Which method is predicted to be the fastest for every case, which one was, and how many times as long it took."""
    lines = []
    for ranks, times in runs(rows).items():
        for case in timed_cases(times):
            key = ("both", "called")
            both = {way: [times.value(column, case, way, *key) for column in ("predicted_ms", "ms")]
                    for way in by_methods(times)}  # fmt: skip
            both = {way: found for way, found in both.items() if not any(map(math.isnan, found))}
            if len(both) > 1:
                foreseen, fastest = (min(both, key=lambda way: both[way][i]) for i in (0, 1))
                lines.append([str(ranks), case, *(":".join(method(times, case, way)) for way in (foreseen, fastest)),
                              f"{both[foreseen][1] / both[fastest][1]:.2f}"])  # fmt: skip
    return aligned([["ranks", "case", "predicted", "fastest", "times as long"], *lines]) if lines else ""


def errors(rows: Iterable[Row]) -> str:
    """Relative RMS against float64, a line for every number of ranks and implementation."""
    lines = [[row["ranks"], row["case"], row["peer"], row["direction"], row["rms"], row["largest"]]
             for row in rows if row["timing"] == ERRORS and row["rms"]]  # fmt: skip
    return aligned([["ranks", "case", "of", "result", "rms", "largest"], *lines]) if lines else ""


def plot(rows: Iterable[Row], path: Path) -> None:
    """Bars of TFLOP/s per GPU, forward and backward together, with the share of the attention alone above ours.

    Dashed, what one GPU reaches with the whole pack.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = list(rows)
    found = runs(rows)
    names = [*dict.fromkeys(name for times in found.values() for name in (*by_methods(times), *peers(times))), ALONE]
    colors = {name: f"C{i}" for i, name in enumerate(names)} | {ALONE: "lightgrey"}
    figure, panels = plt.subplots(len(found), figsize=(12, 1 + 3.2 * len(found)), squeeze=False, layout="constrained")
    drawn: dict[str, Any] = {}
    for axes, (ranks, times) in zip(panels[:, 0], found.items(), strict=True):
        drawn = {**_bars(axes, times, colors), **drawn}
        axes.set_ylabel("TFLOP/s per GPU")
        axes.set_title(str(ranks), loc="left")
        axes.grid(axis="y", alpha=0.3)
    figure.legend(drawn.values(), drawn.keys(), ncols=4, loc="outside lower center", frameon=False)
    figure.suptitle(f"{rows[-1]['gpu']}, forward and backward; above ours: its share of the attention alone")
    figure.savefig(path, dpi=120)


def _bars(axes: Any, times: Times, colors: Mapping[str, str]) -> dict[str, Any]:
    """Draws the cases of some ranks; returns what was drawn by name."""
    cases, names = timed_cases(times), [*by_methods(times), *peers(times), ALONE]
    width, drawn = 0.8 / len(names), {}
    for i, name in enumerate(names):
        heights = [times.value("tflops", case, name, "both", "called") for case in cases]
        places = [x + (i + 0.5) * width for x in range(len(cases))]
        drawn["attention alone" if name == ALONE else name] = axes.bar(places, heights, width, color=colors[name])
    whole = [times.value("tflops", case, ONE, "both", "called") for case in cases]
    if not all(map(math.isnan, whole)):
        drawn[ONE] = axes.hlines(whole, range(len(cases)), [x + 0.8 for x in range(len(cases))], "black", "dashed")
    for x, case in enumerate(cases):
        speed = times.value("tflops", case, OURS, "both", "called")
        if not math.isnan(speed):
            axes.text(x + width / 2, speed, f"{share(times, case, OURS, 'called'):.2f}", ha="center", va="bottom",
                      fontsize=8)  # fmt: skip
    axes.set_xticks([x + 0.4 for x in range(len(cases))], cases)
    return drawn
