"""The record of measurements: what they were taken on, the CSV file, the table and the plot.

    python benchmarks/record.py benchmarks/results/attention_GPU.csv      prints the table that stands in README.md
"""

from __future__ import annotations

import csv
import datetime
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

Row = dict[str, str]
RESULTS = Path(__file__).with_name("results")
DIRECTIONS = ("forward", "backward")
TIMINGS = ("called", "graph")
OWN = ("deterministic", "portable")  # peers that are this package in another way


def provenance() -> Row:
    """The first columns of every row: when, on what, of which kernels, and by which command."""
    import cupy

    from thdattn import jit

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=30, check=False,
    ).stdout.split()  # fmt: skip
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode(),
        "driver": driver[0] if driver else f"CUDA {cupy.cuda.runtime.driverGetVersion()}",
        "kernel_sources": jit.source_hash(),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def results_file(kind: str, gpu: str) -> Path:
    """Where rows of one kind of benchmark on one kind of GPU are kept."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return RESULTS / f"{kind}_{slug}.csv"


def load(path: Path) -> list[Row]:
    """The rows of a CSV file; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def save(path: Path, rows: Sequence[Row], key: Sequence[str]) -> list[Row]:
    """Adds rows to a CSV file, in place of those that agree with them in the columns of `key`; returns all rows."""
    made = {tuple(row[column] for column in key) for row in rows}
    kept = [row for row in load(path) if tuple(row[column] for column in key) not in made]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *rows])
    return [*kept, *rows]


class Times:
    """Rows of attention measurements, asked by (case, peer, direction, timing)."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {tuple(row[c] for c in ("case", "peer", "direction", "timing")): row for row in rows}
        self.cases = list(dict.fromkeys(case for case, *_ in self._rows))
        self.peers = list(dict.fromkeys(peer for _, peer, *_ in self._rows if peer != "ours"))

    def value(self, column: str, *key: str) -> float:
        """A number of "ms" or "tflops"; NaN where there is none."""
        return float(self._rows.get(key, {}).get(column) or math.nan)

    def ratio(self, case: str, peer: str, direction: str, timing: str) -> float:
        """Our speed over a peer's."""
        ours, theirs = (self.value("tflops", case, name, direction, timing) for name in ("ours", peer))
        return ours / theirs

    def best_peer(self, case: str, direction: str, timing: str) -> float:
        """The highest TFLOP/s of other implementations, NaN where none was timed."""
        found = [self.value("tflops", case, peer, direction, timing) for peer in self.peers if peer not in OWN]
        return max((number for number in found if not math.isnan(number)), default=math.nan)


def table(rows: Iterable[Row]) -> str:
    """Ours in TFLOP/s, forward/backward, and our speed over each peer's; then the host's side of ours."""
    times = Times(rows)
    timed = [(peer, timing) for peer in times.peers for timing in TIMINGS]
    lines = [
        ["case", *(f"ours {timing}" for timing in TIMINGS), *(f"ours/{peer} {timing}" for peer, timing in timed),
         "plan ms host/device", "forward host us"],
    ]  # fmt: skip
    for case in times.cases:
        speeds = [[times.value("tflops", case, "ours", way, timing) for way in DIRECTIONS] for timing in TIMINGS]
        ratios = [[times.ratio(case, peer, way, timing) for way in DIRECTIONS] for peer, timing in timed]
        plans = [times.value("ms", case, "ours", "plan", side) for side in ("host_lengths", "device_lengths")]
        host = times.value("ms", case, "ours", "forward", "host") * 1e3
        cells = [*(_slashed(x, 3) for x in speeds), *(_slashed(x, 2) for x in ratios), _slashed(plans, 2)]
        lines.append([case, *cells, _slashed([host], 3)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def summary(rows: Sequence[Row]) -> str:
    """The README's table, Markdown: TFLOP/s of every peer, forward/backward, with the launch overhead taken out."""
    times = Times(rows)
    peers = ["ours", *times.peers]
    versions = {row["peer"]: row["peer_version"] for row in rows}
    runs: dict[tuple[str, ...], set[str]] = {}
    for row in rows:
        runs.setdefault(tuple(row[x] for x in ("driver", "kernel_sources", "command")), set()).add(row["peer"])
    lines = [
        f"{rows[0]['gpu']}; bfloat16, causal, 16 heads of 128 unless the name says so;",
        "TFLOP/s forward/backward in replayed CUDA graphs.",
        *(f"{', '.join(peer for peer in peers if peer in timed)}: driver {driver}, kernel sources {kernels}, "
          f"{command.removeprefix('python ')}." for (driver, kernels, command), timed in runs.items()),
        f"Versions: {', '.join(f'{peer} {versions[peer]}' for peer in peers)}.",
        "",
        "| case | " + " | ".join(peers) + " |",
        "|---" * (1 + len(peers)) + "|",
    ]
    for case in times.cases:
        speeds = [[times.value("tflops", case, peer, way, "graph") for way in DIRECTIONS] for peer in peers]
        lines.append(f"| {case} | " + " | ".join(_slashed(x, 3) for x in speeds) + " |")
    return "\n".join(lines)


def _slashed(numbers: Iterable[float], digits: int) -> str:
    """Numbers to so many significant digits, or all of a larger integer; a dash for NaN."""
    return "/".join(
        "-" if math.isnan(x) else f"{x:.0f}" if abs(x) >= 10 ** (digits - 1) else f"{x:#.{digits}g}" for x in numbers
    )


def plot(rows: Iterable[Row], path: Path) -> None:
    """Bars of TFLOP/s per case and peer, launch overhead taken out, with ours over the best peer written above."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = list(rows)
    times = Times(rows)
    peers = ["ours", *times.peers]
    width = 0.8 / len(peers)
    figure, panels = plt.subplots(len(DIRECTIONS), figsize=(1.2 + 0.85 * len(times.cases), 8), sharex=True)
    for axes, way in zip(panels, DIRECTIONS, strict=True):
        for i, peer in enumerate(peers):
            speeds = [times.value("tflops", case, peer, way, "graph") for case in times.cases]
            axes.bar([x + (i + 0.5) * width for x in range(len(speeds))], speeds, width, label=peer)
        for x, case in enumerate(times.cases):
            ours, best = times.value("tflops", case, "ours", way, "graph"), times.best_peer(case, way, "graph")
            if not math.isnan(ours / best):
                axes.text(x + 0.4, max(ours, best), f"{ours / best:.2f}x", ha="center", va="bottom", fontsize=8)
        axes.set_ylabel(f"{way}, TFLOP/s")
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_title(f"{rows[-1]['gpu']}, replayed CUDA graphs; above the bars: ours / best peer", pad=28)
    panels[0].legend(ncols=len(peers), loc="lower center", bbox_to_anchor=(0.5, 1))
    panels[-1].set_xticks([x + 0.4 for x in range(len(times.cases))], times.cases, rotation=40, ha="right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    print(summary(load(Path(sys.argv[1]))))
