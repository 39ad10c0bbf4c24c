"""Writes the parts of README.md that say what was measured: all that stands between <!-- NAME:begin --> and :end.

    python benchmarks/readme.py

The numbers are those of the files in results/, of the GPU that was measured last, so that page and records agree.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import bench_bytelm
import cp_record
import mamba_record
import record
from accuracy import RESULTS
from prose import listed, prose, table
from record import DIRECTIONS, ERRORS, OWN, SUSTAINED, Row, Times, slashed
from workloads import CASES

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
LONG = 4096  # keys that an average query sees, from which on a pack is one of long documents
WIDE = 0.03  # of a median: from so wide a spread on, it stands beside the number
DETAIL = "1x16384"  # the case whose errors are shown one by one
COMMON = "16/16"  # query and kv heads of most cases
LEVEL = 0.98  # of a peer's speed: from there on ours is not behind


def main() -> int:
    page = README.read_text()
    for name, make in BLOCKS.items():
        page = with_block(page, name, make())
    README.write_text(page)
    print(f"wrote {README}")
    return 0


def with_block(page: str, name: str, text: str) -> str:
    """The page with another text between the marks of that name."""
    begin, end = (f"<!-- {name}:{side} -->" for side in ("begin", "end"))
    before, found, rest = page.partition(f"{begin}\n")
    _, ended, after = rest.partition(f"\n{end}")
    if not (found and ended):
        raise ValueError(f"{README.name} lacks {begin} or {end}, each wanted on a line of its own")
    return f"{before}{found}{text}{ended}{after}"


def tested(records: Mapping[str, Mapping[str, object]]) -> str:
    """On which GPUs, drivers and versions of CUDA anything was run, from the record of the GPU tests."""
    gpus = sorted({str(entry["gpu"]).removeprefix("NVIDIA ") for entry in records.values()})
    cuda = sorted({str(int(str(entry["cuda_runtime"])) // 1000) for entry in records.values()})
    drivers = sorted({str(entry["driver"]) for entry in records.values()})
    return prose(
        f"**On record** are {listed(gpus)} alone, with CUDA {listed(cuda)} and driver {listed(drivers)}: "
        f"[tests](benchmarks/results/gpu_tests.json) and measurements were run there, of the portable kernels as well. "
        f"For other GPUs, kernels are compiled by the tests, and were not run."
    )


def numbers(path: Path, rows: Sequence[Row], reorder: tuple[Path, Sequence[Row]]) -> str:
    """Everything under "Measured"."""
    rows = sorted(rows, key=lambda row: list(CASES).index(row["case"]))  # the file has the last measured last
    times = Times(rows)
    parts = [about(rows), speeds(times, rows), heads(rows), ratios(times, rows), deterministic(times, rows)]
    parts += [unknown_lengths(times), without_rest(times), detail(times), moves(*reorder), files(path)]
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
    """The table: a row per case, a column per peer. Cases that were measured with older kernels have a star."""
    sources = {row["case"]: row["kernel_sources"] for row in sorted(rows, key=lambda row: row["date"])
               if row["peer"] == "ours" and (row["direction"], row["timing"]) == ("forward", "graph")}  # fmt: skip
    newest = list(sources.values())[-1:]
    older = {case for case, of in sources.items() if [of] != newest}
    peers = columns(times)
    lines = [[f"{case} \\*" if case in older else case, *(cell(times, case, peer) for peer in peers)]
             for case in times.cases]  # fmt: skip
    note = f"\n\n\\* measured with older kernels than those of sources {newest[0]}." if older else ""
    return table(["case", *peers], lines) + note


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
    ahead = "; ".join(f"{peer} {way} in {listed(cases)}" for peer in others for way in DIRECTIONS
                      if (cases := behind(times, peer, way)))  # fmt: skip
    return prose(
        f"**Ahead of ours by more than {100 * (1 - LEVEL):.0f} %:** {ahead or 'none of them'}. Speed of ours over "
        f"others', by how many keys an average query sees:"
    ) + f"\n\n{table(head, lines)}"


def behind(times: Times, peer: str, way: str) -> list[str]:
    """The cases in which a peer is ahead of ours."""
    return [f"`{case}`" for case in times.cases if times.ratio(case, peer, way, "graph") < LEVEL]


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
    found = [float(row["ratio"]) for row in rows]
    return prose(
        f"Moving rows between the two orders runs at {min(found):.2f} to {max(found):.2f} of a plain copy on the "
        f"device ([reorder]({path.relative_to(ROOT)}), {rows[0]['gpu'].removeprefix('NVIDIA ')})."
    )


def files(path: Path) -> str:
    """Where the rest of the numbers is."""
    name = path.relative_to(ROOT)
    text = prose(f"Timings as called, the plan's own, all spreads and all errors are in the [CSV file]({name}).")
    picture = path.with_suffix(".png")
    return f"{text}\n\n![TFLOP/s as bars]({picture.relative_to(ROOT)})" if picture.exists() else text


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
        parts += [cp_errors(times, case, ["ours", *others]) for case in times.cases
                  if times.text("rms", case, "ours", RESULTS[0], ERRORS)]  # fmt: skip
    commands = dict.fromkeys(
        (record.software(row), row["kernel_sources"], row["command"].partition("mpi4py ")[2]) for row in rows)
    runs = "; ".join(f"{software}, sources {sources}, `{command}`" for software, sources, command in commands)
    versions = {row["peer"]: row["peer_version"] for row in rows if row["peer"].startswith("te+")}
    kernels = "".join(f" {peer} is Transformer Engine's schedule with kernels of version {version}."
                      for peer, version in versions.items())  # fmt: skip
    parts.append(prose(f"{rows[0]['gpu']}; {runs}.{kernels}"))
    picture = path.with_suffix(".png")
    if picture.exists():
        parts.append(f"![TFLOP/s per GPU as bars]({picture.relative_to(ROOT)})")
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
    said = "; ".join(f"{name} {', '.join(f'{1e3 * error:.2f}' for error in found)}" for name, found in errors.items())
    return prose(f"Relative RMS against float64 of {', '.join(RESULTS)}, in thousandths, for `{case}`: {said}.")


def logits(path: Path, rows: Sequence[Row]) -> str:
    """What sinks and soft-caps cost, and what they err."""
    found = {(row["case"], row["kind"], row["direction"]): row for row in rows}
    cases, kinds = ([*dict.fromkeys(row[column] for row in rows)] for column in ("case", "kind"))

    def cells(column: str, case: str, kind: str, directions: Sequence[str]) -> list[float]:
        return [float(found[case, kind, direction][column]) for direction in directions]

    times = [[case, *(slashed(cells("ratio", case, kind, DIRECTIONS), 3) for kind in kinds[1:])] for case in cases]
    rms = [[kind, *(f"{1e3 * error:.2f}" for error in cells("rms", cases[0], kind, RESULTS))] for kind in kinds]
    runs = {(record.software(row), row["kernel_sources"], row["command"].removeprefix("python ")) for row in rows}
    said = "; ".join(f"{software}, sources {sources}, `{command}`" for software, sources, command in sorted(runs))
    return "\n\n".join([
        "Time over that with neither, forward/backward:", table(["case", *kinds[1:]], times),
        f"Relative RMS against float64 of the small version of `{cases[0]}`, in thousandths:",
        table(["", *RESULTS], rms),
        prose(f"{rows[0]['gpu']}, {said}. All spreads are in the [CSV file]({path.relative_to(ROOT)})."),
    ])  # fmt: skip


BLOCKS: dict[str, Callable[[], str]] = {
    "bytelm": lambda: bench_bytelm.summary(bench_bytelm.load_all()),
    "tested": lambda: tested(json.loads((record.RESULTS / "gpu_tests.json").read_text())),
    "numbers": lambda: numbers(*record.newest("attention"), record.newest("reorder")),
}
if any(record.RESULTS.glob("cp_*.csv")):  # else README.md says that nothing was measured yet
    BLOCKS["context-parallel"] = lambda: context_parallel(*record.newest("cp"))
if any(record.RESULTS.glob("logits_*.csv")):  # the same
    BLOCKS["logits"] = lambda: logits(*record.newest("logits"))
if any(record.RESULTS.glob("mamba_*.csv")):  # the same
    BLOCKS["mamba"] = lambda: mamba_record.summary(*record.newest("mamba"))


if __name__ == "__main__":
    sys.exit(main())
