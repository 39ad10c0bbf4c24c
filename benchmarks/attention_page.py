"""What the page on measurements says of attention on one GPU, in Markdown: speeds, errors, sinks and soft-caps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import record
from accuracy import RESULTS
from prose import linked, listed, prose, table
from record import DIRECTIONS, ERRORS, OWN, SUSTAINED, Row, Times, slashed
from workloads import CASES

LONG = 4096  # keys that an average query sees, from which on a pack is one of long documents
WIDE = 0.03  # of a median: from so wide a spread on, it stands beside the number
DETAIL = "1x16384"  # the case whose errors are shown one by one
COMMON = "16/16"  # query and kv heads of most cases
STAR = r"\*"
LEVEL = 0.98  # of a peer's speed: from there on ours is not behind


def numbers(path: Path, rows: Sequence[Row], reorder: tuple[Path, Sequence[Row]]) -> str:
    """Everything under "Attention"."""
    rows = sorted(rows, key=lambda row: list(CASES).index(row["case"]))  # the file has the last measured last
    times = Times(rows)
    parts = [about(rows), speeds(times, rows), heads(rows), ratios(times, rows), deterministic(times, rows)]
    parts += [unknown_lengths(times), host(times, rows), without_rest(times), detail(times), moves(*reorder)]
    parts.append(files(path))
    return "\n\n".join(filter(None, parts))


def about(rows: Sequence[Row]) -> str:
    """What the table's numbers are, and of which run."""
    versions = {row["peer"]: row["peer_version"] for row in rows}
    runs: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        run = record.software(row), row["kernel_sources"], row["command"].removeprefix("python ")
        runs[run] = sorted({*runs.get(run, []), row["peer"]}, key=list(versions).index)
    lines = [
        f"{rows[0]['gpu']}; bfloat16, causal, head dim 128 unless the name says so; TFLOP/s forward/backward in "
        f"replayed CUDA graphs.",
        f"± where p10 to p90 are further than {100 * WIDE:.0f} % of the median apart."
        if any(row.get("ms_p10") for row in rows) else "Their spread was not recorded.",
    ]  # fmt: skip
    if any(row["timing"] == ERRORS for row in rows):
        lines.append(
            "In parentheses the error against float64 on a small version of the case: the relative RMS, in "
            "thousandths, of whichever of out, dq, dk and dv has the largest."
        )
    for (software, sources, command), peers in runs.items():
        lines.append(f"{', '.join(peers)}: {software}, sources {sources}, `{command}`.")
    lines.append(f"Versions: {', '.join(f'{peer} {version}' for peer, version in versions.items())}.")
    return "\n".join(map(prose, lines))


def speeds(times: Times, rows: Iterable[Row]) -> str:
    """The table: a row per case, a column per peer."""
    star = starred(rows)
    peers = columns(times)
    lines = [[star[case], *(cell(times, case, peer) for peer in peers)] for case in times.cases]
    return table(["case", *peers], lines) + explained(star.values())


def starred(rows: Iterable[Row]) -> dict[str, str]:
    """The cases with their names, which have a star where ours was measured with older kernels than the newest."""
    sources = {row["case"]: row["kernel_sources"] for row in sorted(rows, key=lambda row: row["date"])
               if row["peer"] == "ours" and (row["direction"], row["timing"]) == ("forward", "graph")}  # fmt: skip
    newest = list(sources.values())[-1:]
    return {case: case if [of] == newest else f"{case} {STAR}" for case, of in sources.items()}


def explained(names: Iterable[str]) -> str:
    """What a star means, if there is one."""
    return f"\n\n{STAR} measured with older kernels than the others." if any(STAR in name for name in names) else ""


def columns(times: Times) -> list[str]:
    """Ours and who is compared with it, number by number."""
    return ["ours", *(peer for peer in times.peers if peer != "gpu_lengths")]


def cell(times: Times, case: str, peer: str) -> str:
    """Speeds forward/backward, with their spread where it is wide, and the largest of the errors."""
    numbers = "/".join(
        slashed([times.value("tflops", case, peer, way, "graph")], 3) + wide(times, case, peer, way, "graph")
        for way in DIRECTIONS
    )
    errors = [float(text) for result in RESULTS if (text := times.text("rms", case, peer, result, ERRORS))]
    worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error, default=None)
    return numbers if worst is None else f"{numbers} ({1e3 * worst:.2f})"


def wide(times: Times, *key: str) -> str:
    """Half the distance from p10 to p90, if that is wide."""
    low, ms, high = (times.value(column, *key) for column in ("ms_p10", "ms", "ms_p90"))
    return f" ±{50 * (high - low) / ms:.0f} %" if high - low > WIDE * ms else ""


def heads(rows: Iterable[Row]) -> str:
    """Query and kv heads of the cases."""
    cases: dict[str, list[str]] = {}
    for case, layout in {row["case"]: f"{row['heads']}/{row['kv_heads']}" for row in rows}.items():
        cases.setdefault(layout, []).append(f"`{case}`")
    others = "; ".join(f"{layout} in {listed(names)}" for layout, names in cases.items() if layout != COMMON)
    return prose(f"Query and kv heads are {COMMON}; {others}." if others else f"Query and kv heads are {COMMON}.")


def groups(rows: Iterable[Row]) -> dict[str, list[str]]:
    """The cases by how many keys an average query sees, which their FLOPs say."""
    keys: dict[str, float] = {}
    for row in rows:
        if row["peer"] == "ours" and row["direction"] == "forward" and row.get("tflops"):
            per_pair = 2 * int(row["heads"]) * (int(row["head_dim"]) + int(row["v_head_dim"]))
            keys[row["case"]] = float(row["tflops"]) * float(row["ms"]) * 1e9 / per_pair / int(row["total_tokens"])
    return {
        f"{LONG:,} keys and more": [case for case, number in keys.items() if number >= 0.99 * LONG],
        "fewer keys": [case for case, number in keys.items() if number < 0.99 * LONG],
    }


def ratios(times: Times, rows: Sequence[Row]) -> str:
    """Who is ahead of ours where, and ours over every other peer: lowest and highest, of long packs and of others."""
    others = [peer for peer in times.peers if peer not in OWN]
    lines = []
    for peer in others:
        cells = [
            extremes({case: times.ratio(case, peer, way, "graph") for case in cases})
            for cases in groups(rows).values() for way in DIRECTIONS
        ]  # fmt: skip
        lines.append([peer, *cells])
    head = ["ours over", *(f"{way}, {name}" for name in groups(rows) for way in DIRECTIONS)]
    return prose(
        f"**Ahead of ours by more than {100 * (1 - LEVEL):.0f} %:** {ahead(times, 'graph')}. Speed of ours over "
        f"others', by how many keys an average query sees:"
    ) + f"\n\n{table(head, lines)}"


def ahead(times: Times, timing: str) -> str:
    """Who is ahead of ours where."""
    others = [peer for peer in times.peers if peer not in OWN]
    said = "; ".join(f"{peer} {way} in {listed(cases)}" for peer in others for way in DIRECTIONS
                     if (cases := behind(times, peer, way, timing)))  # fmt: skip
    return said or "none of them"


def behind(times: Times, peer: str, way: str, timing: str) -> list[str]:
    """The cases in which a peer is ahead of ours."""
    return [f"`{case}`" for case in times.cases if times.ratio(case, peer, way, timing) < LEVEL]


def extremes(values: Mapping[str, float]) -> str:
    """The lowest and the highest value, with their cases."""
    found = {case: value for case, value in values.items() if not math.isnan(value)}
    if not found:
        return "-"
    low, high = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
    ends = [f"{found[case]:.2f} (`{case}`)" for case in dict.fromkeys((low, high))]
    return " to ".join(ends)


def deterministic(times: Times, rows: Sequence[Row]) -> str:
    """What deterministic=True costs."""
    slower = {case: times.ratio(case, "deterministic", "backward", "graph") for case in times.cases}
    said = [f"{range_of} times as long where an average query sees {name}" for name, cases in groups(rows).items()
            if (range_of := extremes({case: slower[case] for case in cases if case in slower})) != "-"]  # fmt: skip
    return prose(f"Backward with `deterministic=True` takes {' and '.join(said)}.") if said else ""


def unknown_lengths(times: Times) -> str:
    """What it costs where only the GPU knows the lengths."""
    said = [f"{way} takes {range_of}" for way in DIRECTIONS
            if (range_of := extremes({case: times.ratio(case, "gpu_lengths", way, "graph") for case in times.cases}))
            != "-"]  # fmt: skip
    return prose(f"Where only the GPU knows the lengths, {' and '.join(said)} times as long.") if said else ""


def host(times: Times, rows: Iterable[Row]) -> str:
    """How long the host is busy with what, by the newest kernels' launchers."""
    star, said = starred(rows), []
    for what, name in (("forward", "a forward"), ("varlen_attention", "`varlen_attention`"), ("plan", "a new plan")):
        ms = [times.value("ms", case, "ours", what, "host") for case in times.cases if star[case] == case]
        if found := [1e3 * number for number in ms if not math.isnan(number)]:
            said.append(f"with {name} for {min(found):.0f} to {max(found):.0f} µs")
    return prose(f"From a call to its return the host is busy {listed(said)}.") if said else ""


def without_rest(times: Times) -> str:
    """The table of sustained speeds, beside those of a rested GPU."""
    peers = columns(times)
    sustained = {(case, peer): times.value("tflops", case, peer, *SUSTAINED) for case in times.cases for peer in peers}
    cases = [case for case in times.cases if any(not math.isnan(sustained[case, peer]) for peer in peers)]
    if not cases:
        return ""

    def both(case: str, peer: str) -> float:
        ms, speed = ([times.value(x, case, peer, way, "graph") for way in DIRECTIONS] for x in ("ms", "tflops"))
        return sum(map(float.__mul__, ms, speed)) / sum(ms)

    lines = [
        [case, *(slashed([sustained[case, peer], both(case, peer)], 3) + wide(times, case, peer, *SUSTAINED)
                 for peer in peers)]
        for case in cases
    ]  # fmt: skip
    head = "As training loads a GPU: TFLOP/s of forward and backward together, two seconds without rest / rested:"
    return f"{head}\n\n{table(['case', *peers], lines)}"


def detail(times: Times) -> str:
    """The errors of every result for one case."""
    lines = []
    for peer in columns(times):
        if times.text("rms", DETAIL, peer, RESULTS[0], ERRORS):
            errors = [[times.value(column, DETAIL, peer, result, ERRORS) for column in ("rms", "largest")]
                      for result in RESULTS]  # fmt: skip
            lines.append([peer, *(f"{1e3 * rms:.2f}, {largest:.1e}" for rms, largest in errors)])
    head = f"Errors of the small version of `{DETAIL}` against float64: relative RMS in thousandths, and the largest:"
    return f"{head}\n\n{table(['', *RESULTS], lines)}" if lines else ""


def moves(path: Path, rows: Sequence[Row]) -> str:
    """How fast rows are moved between the orders."""
    others = {"ratio": "a plain copy on the device", "over_select": "`torch.index_select`",
              "over_take": "`take` and a mask in CuPy"}  # fmt: skip
    found = {name: [float(row[column]) for row in rows if row.get(column)] for column, name in others.items()}
    said = [f"{min(ratios):.2f} to {max(ratios):.2f} of {name}" for name, ratios in found.items() if ratios]
    return prose(
        f"Moving rows between the two orders runs at {listed(said)} "
        f"([reorder]({linked(path)}), {rows[0]['gpu'].removeprefix('NVIDIA ')})."
    )


def files(path: Path) -> str:
    """Where the rest of the numbers is."""
    text = f"Timings as called, the plan's own, all spreads and all errors are in the [CSV file]({linked(path)})."
    picture = path.with_suffix(".png")
    return prose(text) + (f"\n\n![TFLOP/s as bars]({linked(picture)})" if picture.exists() else "")


def logits(path: Path, rows: Sequence[Row]) -> str:
    """What sinks and soft-caps cost, and what they err."""
    found = {(row["case"], row["kind"], row["direction"]): row for row in rows}
    cases, kinds = ([*dict.fromkeys(row[column] for row in rows)] for column in ("case", "kind"))

    def cells(column: str, case: str, kind: str, directions: Sequence[str]) -> list[float]:
        return [float(found[case, kind, direction][column]) for direction in directions]

    times = [[case, *(slashed(cells("ratio", case, kind, DIRECTIONS), 3) for kind in kinds[1:])] for case in cases]
    rms = [[kind, *(f"{1e3 * error:.2f}" for error in cells("rms", cases[0], kind, RESULTS))] for kind in kinds]
    return "\n\n".join([
        "Time over that with neither, forward/backward:", table(["case", *kinds[1:]], times),
        f"Relative RMS against float64 of the small version of `{cases[0]}`, in thousandths:",
        table(["", *RESULTS], rms),
        prose(f"{rows[0]['gpu']}; {record.runs(rows)}. All spreads are in the [CSV file]({linked(path)})."),
    ])  # fmt: skip
