"""Records of measurements: CSV files, one for each kind of benchmark and GPU, with the last row of each measurement.

A row says when, on what GPU and driver, with which kernel sources and by which command it was measured. Columns that
older rows lack are blank.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from types import MappingProxyType

import thdattn

Row = dict[str, str]
Key = tuple[str, str, str]  # peer, direction, timing
Measured = dict[Key, Row]  # the columns of what was measured; none of what failed
RESULTS = Path(__file__).with_name("results")
DIRECTIONS = ("forward", "backward")
TIMINGS = ("called", "graph")
SUSTAINED = "both", "sustained"  # direction and timing of forward and backward without rest
PASSES = (*DIRECTIONS, "both")
ERRORS = "float64"  # the "timing" of rows with errors, whose "direction" is a result
PORTABLE_OWN = ("portable", "portable-deterministic")  # peers that are this package with its portable kernels
OWN = ("deterministic", "gpu_lengths", *PORTABLE_OWN)  # peers that are this package in another way
ORDER = (*OWN, "fa4", "varlen", "cudnn")  # of peers in tables and plots, whichever was measured first


def provenance(ranks: int) -> Row:
    """Return the first columns of a row: date, GPU, driver, CUDA, kernel sources and command."""
    import cupy

    from thdattn.cli import info
    from thdattn.cli.record import now
    from thdattn.jit import compiler

    start = ["python"] if ranks == 1 else ["mpiexec", "-n", str(ranks), "python", "-m", "mpi4py"]
    return {
        "date": now(),
        "gpu": cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode(),
        "driver": info.driver_version(),
        "cuda": "{}.{}".format(*divmod(cupy.cuda.runtime.runtimeGetVersion() // 10, 100)),
        "kernel_sources": compiler.source_hash(),
        "command": shlex.join([*start, f"benchmarks/{Path(sys.argv[0]).name}", *_what(sys.argv[1:])]),
    }


def _what(options: Sequence[str]) -> list[str]:
    """Drop --out from options, which does not say what is measured."""
    at = next((i for i, option in enumerate(options) if option == "--out"), len(options))
    return [option for option in (*options[:at], *options[at + 2 :]) if not option.startswith("--out=")]


def add_options(parser: argparse.ArgumentParser, kind: str, repeats: int = 0) -> None:
    """Add --out, and --repeats with its default, to a program of one kind of benchmark."""
    if repeats:
        parser.add_argument("--repeats", type=positive, default=repeats, help=f"turns of each, {repeats} by default")
    parser.add_argument("--out", type=Path, help=f"CSV file to add to; benchmarks/results/{kind}_GPU.csv by default")


def positive(text: str) -> int:
    """Read a number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"found {text}, wanted >= 1")
    return int(text)


class Recorder:
    """CSV file of one kind of benchmark on this GPU, and the rows that a program has added to it.

    Args:
        out: the file; None: benchmarks/results/KIND_GPU.csv.
        key: columns in which a row agrees with the older row that it replaces.
        more: columns of all rows, which may replace those of provenance.
    """

    def __init__(
        self, kind: str, out: Path | None, key: Sequence[str], ranks: int = 1,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.about = provenance(ranks) | dict(more)
        self.path, self._key = out or results_file(kind, self.about["gpu"]), key
        self.rows: list[Row] = []

    def add(self, rows: Iterable[Row], writes: bool = True) -> None:
        """Add rows; of several ranks one writes them."""
        made = [self.about | row for row in rows]
        if writes:
            save(self.path, made, self._key)
        self.rows += made

    def show(self, tables: Callable[[Sequence[Row]], list[str]]) -> None:
        """Print the tables of all rows."""
        blank = dict.fromkeys((column for row in self.rows for column in row), "")
        shown = tables([blank | row for row in self.rows])
        print("\n\n".join([*shown, f"wrote {self.path}; benchmarks/pages.py writes the pages"]))


def rows_of(columns: Row, measured: Measured, versions: Mapping[str, str] = MappingProxyType({})) -> Iterator[Row]:
    """Yield a row for each measurement; one that failed has no columns of its own, and replaces an older row.

    Args:
        columns: of all rows, such as those of a case.
        versions: of peers; the others are this package.
    """
    for (peer, direction, how), found in measured.items():
        yield columns | {"peer": peer, "peer_version": versions.get(peer, thdattn.__version__), "direction": direction,
                         "timing": how} | found


def results_file(kind: str, gpu: str) -> Path:
    """Return the CSV file of one kind of benchmark on one GPU."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return RESULTS / f"{kind}_{slug}.csv"


def load(path: Path) -> list[Row]:
    """Read the rows of a CSV file; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def save(path: Path, rows: Sequence[Row], key: Sequence[str]) -> list[Row]:
    """Add rows to a CSV file, in place of rows that agree with them in the columns of `key`; return all rows.

    Older rows are empty in new columns.
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
    """Return the 10th and the 90th percentile; of fewer than ten samples, the lowest and the highest."""
    if len(samples) < 10:
        return min(samples), max(samples)
    low, *_, high = quantiles(samples, n=10)
    return low, high


def timed(samples: Sequence[float], flops: float | None = None) -> Row:
    """Return the columns of a measured time.

    Args:
        samples: milliseconds.
        flops: operations, where a speed makes sense.
    """
    ms, (low, high) = median(samples), spread(samples)
    return {
        "ms": f"{ms:.5f}", "ms_p10": f"{low:.5f}", "ms_p90": f"{high:.5f}", "samples": str(len(samples)),
        "tflops": f"{flops / ms / 1e9:.2f}" if flops else "",
    }


class Times:
    """Rows that are found by (case, peer, direction, timing)."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {tuple(row[c] for c in ("case", "peer", "direction", "timing")): row for row in rows}
        self.cases = list(dict.fromkeys(case for case, *_ in self._rows))
        found = dict.fromkeys(peer for _, peer, *_ in self._rows if peer != "ours")
        self.peers = sorted(found, key=lambda peer: ORDER.index(peer) if peer in ORDER else len(ORDER))

    def text(self, column: str, *key: str) -> str:
        """Return a column; "" where there is none."""
        return self._rows.get(key, {}).get(column) or ""

    def value(self, column: str, *key: str) -> float:
        """Return a number of a column; NaN where there is none."""
        return float(self.text(column, *key) or math.nan)

    def both(self, column: str, case: str, peer: str, timing: str) -> list[float]:
        """Return a column for forward and backward."""
        return [self.value(column, case, peer, way, timing) for way in DIRECTIONS]

    def together(self, case: str, peer: str) -> float:
        """Return TFLOP/s of forward and backward together, on the GPU alone."""
        ms, speed = (self.both(column, case, peer, "graph") for column in ("ms", "tflops"))
        return sum(map(float.__mul__, ms, speed)) / sum(ms)
