"""What the page on measurements says of one layer over several GPUs, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import cp_record
import record
from accuracy import RESULTS
from attention_page import LEVEL
from prose import linked, prose, table
from record import ERRORS, Row, Times, slashed


def context_parallel(path: Path, rows: Sequence[Row]) -> str:
    """The layer over several GPUs: a table for every number of them, and which runs they are of."""
    parts = [prose(
        "TFLOP/s per GPU, forward/backward/both, of calls one after the other; in parentheses the part of that time "
        "that the attention kernels alone take, and exposed communication is the rest. One graph is forward and "
        "backward with all communication inside. Host times are from a call to its return, in microseconds."
    )]  # fmt: skip
    for ranks, times in cp_record.runs(rows).items():
        others = cp_record.peers(times)
        head = [str(ranks), "ours", *others, "attention alone", "one graph", "exposed, ms",
                "host, forward", "plan", "GiB"]  # fmt: skip
        lines = [cp_cells(times, case, others) for case in cp_record.timed_cases(times)
                 if times.text("tflops", case, "ours", "both", "called")]  # fmt: skip
        if lines:
            parts.append(table(head, lines))
        parts += cp_methods(str(ranks), times)
        parts += [cp_errors(times, case, [*cp_record.by_methods(times), *others]) for case in times.cases
                  if times.text("rms", case, "ours", RESULTS[0], ERRORS)]  # fmt: skip
    versions = {row["peer"]: row["peer_version"] for row in rows if row["peer"].startswith("te+")}
    kernels = "".join(f" {peer} is Transformer Engine's schedule with kernels of version {version}."
                      for peer, version in versions.items())  # fmt: skip
    parts.append(prose(f"{rows[0]['gpu']}; {record.runs(rows)}.{kernels}"))
    picture = path.with_suffix(".png")
    if picture.exists():
        parts.append(f"![TFLOP/s per GPU as bars]({linked(picture)})")
    return "\n\n".join(parts)


def cp_cells(times: Times, case: str, others: Sequence[str]) -> list[str]:
    """A line of the table of context parallelism."""

    def number(name: str, timing: str) -> str:
        return slashed([times.value("tflops", case, name, "both", timing)], 3)

    host, plan = (1e3 * times.value("ms", case, "ours", what, "host") for what in ("forward", "plan"))
    return [
        case,
        f"{cp_record.speeds(times, case, 'ours')} ({cp_record.share(times, case, 'ours', 'called'):.2f})",
        *(cp_record.speeds(times, case, peer) for peer in others),
        number(cp_record.ALONE, "called"),
        f"{number('ours', 'graph')} ({cp_record.share(times, case, 'ours', 'graph'):.2f})",
        slashed([cp_record.exposed(times, case, "ours", "called")], 2),
        slashed([host], 3),
        slashed([plan], 3),
        times.text("memory_gib", case, "ours", "both", "called"),
    ]


def cp_methods(ranks: str, times: Times) -> list[str]:
    """The methods side by side, where others than the usual one were measured: what they are, and the table."""
    ways = cp_record.by_methods(times)
    if len(ways) < 2:
        return []
    names = ["all_gather", *(way.removeprefix(f"{cp_record.OURS}, ") for way in ways[1:])]
    lines = []
    for case in cp_record.timed_cases(times):
        speed = {way: times.value("tflops", case, way, "both", "called") for way in (*ways, cp_record.ONE)}
        best = max(speed[way] for way in ways if not math.isnan(speed[way]))
        lines.append([case, slashed([speed[cp_record.ONE]], 3), *(cp_method(times, case, way, best) for way in ways)])
    said = prose(
        "Methods by `cp_comm_type`, with the sharding where it is not the usual one: TFLOP/s per GPU, forward and "
        "backward; in parentheses as a part of what one GPU reaches with the whole pack, and MiB that a rank receives. "
        "The fastest are bold."
    )
    return [said, table([ranks, "one GPU", *names], lines)]


def cp_method(times: Times, case: str, way: str, best: float) -> str:
    """A cell of the table of methods."""
    speed = times.value("tflops", case, way, "both", "called")
    if math.isnan(speed):
        return "-"
    number = slashed([speed], 3)
    of_one, mebibytes = cp_record.of_one_gpu(times, case, way), cp_record.received(times, case, way)
    more = f" ({slashed([of_one], 2)}; {slashed([mebibytes], 3)})"
    return (f"**{number}**" if speed >= LEVEL * best else number) + more


def cp_errors(times: Times, case: str, names: Sequence[str]) -> str:
    """The errors of ours and of peers for one pack."""
    errors = {name: [times.value("rms", case, name, result, ERRORS) for result in RESULTS]
              for name in names if times.text("rms", case, name, RESULTS[0], ERRORS)}  # fmt: skip
    said = "; ".join(f"{name.removeprefix(f'{cp_record.OURS}, ')} {', '.join(f'{1e3 * error:.2f}' for error in found)}"
                     for name, found in errors.items())  # fmt: skip
    return prose(f"Relative RMS against float64 of {', '.join(RESULTS)}, in thousandths, for `{case}`: {said}.")
