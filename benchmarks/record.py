"""The record of measurements: what they were taken on, the CSV file, the table that a run prints, and the plot.

A file is of one GPU and holds the last measurement of everything. Older rows may lack columns, which are then blank.
"""

from __future__ import annotations

import csv
import datetime
import math
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median, quantiles

Row = dict[str, str]
RESULTS = Path(__file__).with_name("results")
DIRECTIONS = ("forward", "backward")
TIMINGS = ("called", "graph")
SUSTAINED = "both", "sustained"  # direction and timing of forward and backward without rest
WAYS = {"called": DIRECTIONS, "graph": DIRECTIONS, "sustained": ("both",)}  # the directions of a timing with a speed
ERRORS = "float64"  # the "timing" of rows with errors, whose "direction" is a result
OWN = ("deterministic", "gpu_lengths", "portable")  # peers that are this package in another way
ORDER = (*OWN, "fa4", "varlen", "cudnn")  # of peers in tables and plots, whichever was measured first


def provenance(ranks: int = 1) -> Row:
    """The first columns of every row: when, on what, of which kernels, and by which command."""
    import cupy

    from thdattn.cli import info
    from thdattn.jit import compiler

    start = ["python"] if ranks == 1 else ["mpiexec", "-n", str(ranks), "python", "-m", "mpi4py"]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode(),
        "driver": info.driver_version(),
        "cuda": "{}.{}".format(*divmod(cupy.cuda.runtime.runtimeGetVersion() // 10, 100)),
        "kernel_sources": compiler.source_hash(),
        "command": shlex.join([*start, f"benchmarks/{Path(sys.argv[0]).name}", *_what(sys.argv[1:])]),
    }


def _what(options: Sequence[str]) -> list[str]:
    """Options that say what is measured, without the file to write to."""
    at = next((i for i, option in enumerate(options) if option == "--out"), len(options))
    return [option for option in (*options[:at], *options[at + 2 :]) if not option.startswith("--out=")]


def software(row: Row) -> str:
    """Driver and CUDA, which older rows do not say."""
    return f"driver {row['driver']}, CUDA {row['cuda']}" if row.get("cuda") else f"driver {row['driver']}"


def runs(rows: Iterable[Row]) -> str:
    """On what, of which kernels, and by which commands rows were measured."""
    return "; ".join(dict.fromkeys(
        f"{software(row)}, sources {row['kernel_sources']}, `{row['command'][row['command'].index('benchmarks/'):]}`"
        for row in rows))  # fmt: skip


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


def newest(kind: str) -> tuple[Path, list[Row]]:
    """The file of the GPU on which one kind of benchmark ran last, and its rows."""
    files = {path: load(path) for path in RESULTS.glob(f"{kind}_*.csv")}
    path = max(files, key=lambda path: max(row["date"] for row in files[path]))
    return path, files[path]


def save(path: Path, rows: Sequence[Row], key: Sequence[str]) -> list[Row]:
    """Adds rows to a CSV file, in place of those that agree with them in the columns of `key`; returns all rows.

    Older rows are empty in columns that there were not yet.
    """
    made = {tuple(row[column] for column in key) for row in rows}
    older = [row for row in load(path) if tuple(row.get(column, "") for column in key) not in made]
    everything = [*older, *rows]
    columns = dict.fromkeys(column for row in [*rows, *everything] for column in row)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(everything)
    return [dict.fromkeys(columns, "") | row for row in everything]


def spread(samples: Sequence[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile; of fewer than ten samples, the lowest and the highest."""
    if len(samples) < 10:
        return min(samples), max(samples)
    low, *_, high = quantiles(samples, n=10)
    return low, high


def timed(samples: Sequence[float], flops: float | None = None) -> Row:
    """The columns of a measured time.

    Args:
        samples: milliseconds.
        flops: of what was timed, where a speed makes sense.
    """
    ms, (low, high) = median(samples), spread(samples)
    return {
        "ms": f"{ms:.5f}", "ms_p10": f"{low:.5f}", "ms_p90": f"{high:.5f}", "samples": str(len(samples)),
        "tflops": f"{flops / ms / 1e9:.2f}" if flops else "",
    }  # fmt: skip


class Times:
    """Rows of attention measurements, asked by (case, peer, direction, timing)."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {tuple(row[c] for c in ("case", "peer", "direction", "timing")): row for row in rows}
        self.cases = list(dict.fromkeys(case for case, *_ in self._rows))
        found = dict.fromkeys(peer for _, peer, *_ in self._rows if peer != "ours")
        self.peers = sorted(found, key=lambda peer: ORDER.index(peer) if peer in ORDER else len(ORDER))

    def text(self, column: str, *key: str) -> str:
        """A column, blank where there is none."""
        return self._rows.get(key, {}).get(column) or ""

    def value(self, column: str, *key: str) -> float:
        """A number of a column; NaN where there is none."""
        return float(self.text(column, *key) or math.nan)

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
    rows = list(rows)
    times = Times(rows)
    timings = [timing for timing in WAYS if any(row["timing"] == timing for row in rows)]
    pairs = [(peer, timing) for peer in times.peers for timing in timings]
    lines = [
        ["case", *(f"ours {timing}" for timing in timings), *(f"ours/{peer} {timing}" for peer, timing in pairs),
         "plan ms host/device", "forward host us"],
    ]  # fmt: skip
    for case in times.cases:
        speeds = [[times.value("tflops", case, "ours", way, timing) for way in WAYS[timing]] for timing in timings]
        ratios = [[times.ratio(case, peer, way, timing) for way in WAYS[timing]] for peer, timing in pairs]
        plans = [times.value("ms", case, "ours", "plan", side) for side in ("host_lengths", "device_lengths")]
        host = times.value("ms", case, "ours", "forward", "host") * 1e3
        cells = [*(slashed(x, 3) for x in speeds), *(slashed(x, 2) for x in ratios), slashed(plans, 2)]
        lines.append([case, *cells, slashed([host], 3)])
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells, in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def slashed(numbers: Iterable[float], digits: int) -> str:
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

