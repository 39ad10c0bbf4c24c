"""What is kept of runs of bench_mamba.py, and said of them: the table that a run prints, and the page's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import prose
import record
from mamba_cases import BYTES_PER_S, DRAWS, SMALL_ROWS, MixerCase
from mamba_exact import MIXER, SCAN
from record import DIRECTIONS, ERRORS, Row, Times, slashed

KEY = ("gpu", "ranks", "case", "part", "peer", "direction", "timing")
PARTS = {"mixer": MIXER, "scan": SCAN}  # what is timed, and names of its results
OURS, PEER, ONE, A2A = "ours", "mamba_ssm", "one GPU", "all-to-all of heads"
Key = tuple[str, str, str]  # peer, direction, timing
Measured = Mapping[Key, Row]  # the columns of what was measured


def rows_of(
    case: MixerCase, part: str, gpu: str, ranks: int, versions: Mapping[str, str], measured: Measured
) -> Iterable[Row]:
    """A row per measurement."""
    blank = dict.fromkeys(("ms", "ms_p10", "ms_p90", "samples", "rms", "largest", "floor_ms"), "")
    for (peer, direction, how), found in measured.items():
        row = blank | {name: value for name, value in found.items() if name in blank}
        if gpu in BYTES_PER_S and direction in DIRECTIONS:
            share = 1 if peer == ONE else ranks
            row["floor_ms"] = f"{1e3 * case.least_bytes(direction) / share / BYTES_PER_S[gpu]:.4f}"
        yield {
            "ranks": str(ranks), **case.columns, "part": part, "peer": peer, "peer_version": versions.get(peer, ""),
            "direction": direction, "timing": how, **row,
        }  # fmt: skip


def runs(rows: Iterable[Row]) -> dict[tuple[str, str], Times]:
    """The measurements of every number of ranks and part."""
    by_run: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_run.setdefault((row["ranks"], row["part"]), []).append(row)
    return {run: Times(found) for run, found in by_run.items()}


def lines(times: Times, timing: str) -> list[list[str]]:
    """Head and a line per case: milliseconds forward/backward, the floor, and how much longer others take than ours."""
    peers = [peer for peer in (OURS, *times.peers) if any(ms(times, case, peer, timing) for case in times.cases)]
    others = [peer for peer in peers if peer != OURS]
    table = [["case", *peers, "floor", *(f"{peer} / ours" for peer in others)]]
    for case in times.cases:
        if not any(ms(times, case, peer, timing) for peer in peers):
            continue
        floor = next(floor for peer in peers if (floor := milliseconds(times, case, peer, timing, "floor_ms")))
        ratios = [[times.value("ms", case, peer, way, timing) / times.value("ms", case, OURS, way, timing)
                   for way in DIRECTIONS] for peer in others]  # fmt: skip
        cells = [slashed(ms(times, case, peer, timing) or [math.nan] * 2, 3) for peer in peers]
        table.append([case, *cells, slashed(floor, 2), *(slashed(found, 3) for found in ratios)])
    return table


def ms(times: Times, case: str, peer: str, timing: str) -> list[float]:
    """Forward and backward; none where nothing was measured."""
    return milliseconds(times, case, peer, timing, "ms")


def milliseconds(times: Times, case: str, peer: str, timing: str, column: str) -> list[float]:
    """Of a column, for both directions; none where nothing was measured."""
    found = [times.value(column, case, peer, way, timing) for way in DIRECTIONS]
    return [] if all(map(math.isnan, found)) else found


def error_lines(times: Times, names: Sequence[str]) -> list[list[str]]:
    """Head and a line per case and peer: relative RMS in thousandths."""
    table = [["case", "", *names]]
    for case in times.cases:
        for peer in (OURS, *times.peers):
            if times.text("rms", case, peer, names[0], ERRORS):
                found = [1e3 * times.value("rms", case, peer, name, ERRORS) for name in names]
                table.append([case, peer, *(slashed([x], 3) for x in found)])
    return table


def table(rows: Sequence[Row]) -> str:
    """What a run prints."""
    parts = []
    for (ranks, part), times in runs(rows).items():
        for timing in (how for how in record.TIMINGS if any(row["timing"] == how for row in rows)):
            made = lines(times, timing)
            if len(made) > 1:
                parts.append(f"{part} on {ranks} GPUs, {timing}: ms forward/backward\n{record.aligned(made)}")
        made = error_lines(times, PARTS[part])
        if len(made) > 1:
            parts.append(f"{part}: relative RMS against float64, in thousandths\n{record.aligned(made)}")
    return "\n\n".join(parts)


def summary(path: Path, rows: Sequence[Row]) -> str:
    """The part of the page on the mixer."""
    parts = [prose.prose(
        f"Milliseconds forward/backward; floor: what the GPU's memory takes to read what a mixer gets, and to write "
        f"what it makes, once. \"mixer\" is from convolution to gate, \"scan\" the same without the convolution. "
        f"{PEER}: its Triton kernels with `seq_idx`."
    )]  # fmt: skip
    for (ranks, part), times in runs(rows).items():
        timing = "graph" if ranks == "1" else "called"
        head, *others = lines(times, timing)
        if others:
            parts.append(prose.table([f"{part}, {'one GPU' if ranks == '1' else f'{ranks} GPUs'}", *head[1:]], others))
    for (_, part), times in runs(rows).items():
        head, *others = error_lines(times, PARTS[part])
        if others:
            parts += [prose.prose(f"Relative RMS against float64 of the {part}, over the first {SMALL_ROWS:,} rows, in "
                                  f"thousandths; of gradients of weights that of {DRAWS} draws of inputs together:"),
                      prose.table(head, others)]  # fmt: skip
    versions = dict.fromkeys(row["peer_version"] for row in rows if row["peer"] in (PEER, A2A))
    said = f"{rows[0]['gpu']}; {record.runs(rows)}. {PEER}: {', '.join(filter(None, versions))}."
    parts.append(prose.prose(f"{said} All spreads are in the [CSV file]({prose.linked(path)})."))
    return "\n\n".join(parts)
