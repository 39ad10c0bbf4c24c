"""What bench_dense.py keeps, and what is said of it: the time of a pack over that of a dense layout of its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import prose
import record
from record import DIRECTIONS, Row, Times, slashed

KEY = ("gpu", "case", "peer", "direction", "timing")
HEAD = ["tokens", "segments", "ours, ms", "best dense, ms", "by", "THD/dense, forward", "backward", "both"]


def lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield a line for every case, of GPU time alone, beside the dense kernels that take least for both directions."""
    times = Times(rows)
    known = {row["case"]: row for row in rows}
    for case in times.cases:
        ms = {peer: [times.value("ms", case, peer, way, "graph") for way in DIRECTIONS]
              for peer in ("ours", *times.peers)}  # fmt: skip
        ours = ms.pop("ours")
        dense = {peer: found for peer, found in ms.items() if not math.isnan(sum(found))}
        if math.isnan(sum(ours)) or not dense:
            continue
        best = min(dense, key=lambda peer: sum(dense[peer]))
        theirs = dense[best]
        pairs = zip([*ours, sum(ours)], [*theirs, sum(theirs)], strict=True)
        yield [f"{int(known[case]['total_tokens']):,}", known[case]["num_seqs"], slashed(ours, 3), slashed(theirs, 3),
               best, *(f"{mine / other:.2f}" for mine, other in pairs)]  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """The table that a run prints."""
    return record.aligned([HEAD, *lines(rows)])


def summary(path: Path, rows: Sequence[Row]) -> str:
    """The page's table, Markdown, and where and how it was measured."""
    versions = ", ".join(dict.fromkeys(f"{row['peer']} {row['peer_version']}" for row in rows if row["peer"] != "ours"))
    about = (f"{rows[0]['gpu']}; {record.runs(rows)}; {versions}. All spreads are in the [CSV "
             f"file]({prose.linked(path)}).")  # fmt: skip
    return "\n\n".join([prose.table(HEAD, lines(rows)), prose.prose(about)])
