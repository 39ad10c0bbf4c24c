"""Tables of measurements in Markdown, by one function for each kind of record.

Programs print the table of what they have just measured, and pages.py writes those of all records. Every function
takes rows of one CSV file, which are of one GPU, and returns paragraphs and tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

from cp_methods import ALONE, BESIDE, EXCHANGE, ONE, OURS, PARTS, USUAL, Method
from record import DIRECTIONS, ERRORS, OWN, PORTABLE_OWN, SUSTAINED, Row, Times
from workloads import CASES, cp_cases

from thdattn.methods.select import SHARDINGS

NAMES = {"ours": "thdattn", "fa4": "FlashAttention-4", "varlen": "FlashAttention-2", "cudnn": "cuDNN",
         "te+fa4": "Transformer Engine's schedule on FA4", "flex": "FlexAttention",
         ALONE: "attention alone"}
LOGITS = {"sinks": "sinks", "softcap": "softcap 50", "both": "sinks and softcap 50", "low": "softcap 5"}
PACKS = "causal", "unrolled"  # that bench_trees.py compares trees with
RESULTS = ("out", "dq", "dk", "dv")
PORTABLE = "portable"
ELSEWHERE = "The portable kernels, which other GPUs than Hopper run, on this GPU"
Lines = list[list[str]]


# --- cells -------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table with aligned columns; "" without lines."""
    lines = [*lines]
    if not lines:
        return ""
    widths = [max(3, *map(len, column)) for column in zip(head, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in (head, rule, *lines))


def number(x: float, digits: int = 3) -> str:
    """Format a number with so many significant digits, a larger integer with all of them, NaN as a dash."""
    return "-" if math.isnan(x) else f"{x:,.0f}" if abs(x) >= 10 ** (digits - 1) else f"{x:#.{digits}g}"


def pair(numbers: Iterable[float], digits: int = 3) -> str:
    """Format numbers with slashes between them, as forward / backward; a dash where none was measured."""
    numbers = [*numbers]
    return "-" if all(map(math.isnan, numbers)) else " / ".join(number(x, digits) for x in numbers)


def ratio(x: float) -> str:
    return "-" if math.isnan(x) else f"{x:.2f}"


def percent(fraction: str, digits: int = 1) -> str:
    return f"{100 * float(fraction):.{digits}f} %" if fraction else "-"


def named(peer: str) -> str:
    return NAMES.get(peer, peer)


def software(rows: Sequence[Row]) -> str:
    """Describe what rows were measured with: days, drivers, CUDA, kernel sources, and versions of other libraries."""
    found = {name: [*dict.fromkeys(filter(None, (row.get(column) for row in rows)))] for name, column in (
        ("driver", "driver"), ("CUDA", "cuda"), ("kernel sources", "kernel_sources"), ("example", "example_sources"))}
    versions = dict.fromkeys(f"{named(row['peer'])} {row['peer_version']}" for row in rows
                             if row.get("peer_version") and row["peer"] not in (*PARTS, *OWN, *PACKS)
                             and not row["peer"].startswith(OURS))
    days = sorted({row["date"][:10] for row in rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return "; ".join([when, *(f"{name} {', '.join(each)}" for name, each in found.items() if each), *versions])


# --- attention on one GPU ----------------------------------------------------------------------------------------


def attention(rows: Sequence[Row]) -> list[str]:
    """Make the tables of bench_attention.py: work on the GPU alone, calls, options, and speeds without rest."""
    known = {row["case"]: row for row in rows}
    order = [*CASES]
    times = Times(sorted(rows, key=lambda row: order.index(row["case"]) if row["case"] in order else len(order)))
    peers = [OURS, *(peer for peer in times.peers if peer not in OWN)]
    speeds = [
        [case, heads(known[case]), *(speed_and_error(times, case, peer) for peer in peers),
         versus(times, case, "graph")[0], spread(times, case)]
        for case in times.cases if measured(times, case, "graph")
    ]
    calls = [
        [case, *(pair(times.both("tflops", case, peer, "called")) for peer in peers), versus(times, case, "called")[0],
         *(number(1e3 * times.value("ms", case, OURS, what, "host"))
           for what in ("forward", "varlen_attention", "plan"))]
        for case in times.cases if measured(times, case, "called")
    ]
    options = [OURS, *(peer for peer in OWN if peer in times.peers and peer not in PORTABLE_OWN)]
    names = [named(peer) for peer in peers]
    return described([
        ("Work on the GPU alone (replayed CUDA graphs): TFLOP/s, forward / backward. In parentheses: the largest "
         "relative RMS error of out, dq, dk and dv against float64, in thousandths.",
         table(["pack", "heads", *names, "thdattn / best peer", "spread"], speeds)),
        ("Calls as a program makes them: TFLOP/s, forward / backward, and µs of host time for a call of thdattn.",
         table(["pack", *names, "thdattn / best peer", "forward, µs", "varlen_attention, µs", "new plan, µs"], calls)),
        ("Options of thdattn: TFLOP/s, forward / backward, on the GPU alone.",
         table(["pack", *map(named, options)], side_by_side(times, options))),
        (f"{ELSEWHERE}: TFLOP/s, forward / backward, on the GPU alone, and RMS errors as above. Like FlashAttention-2, "
         "they multiply matrices with mma.sync.",
         table(["pack", PORTABLE, named("varlen"), "portable / FlashAttention-2"], portable(times))),
        ("Options of the portable kernels: TFLOP/s, forward / backward, on the GPU alone.",
         table(["pack", *PORTABLE_OWN], side_by_side(times, PORTABLE_OWN))),
        ("Two seconds without rest, and rested: TFLOP/s of forward and backward together.",
         table(["pack", *names], sustained(times, peers))),
    ])


def side_by_side(times: Times, peers: Sequence[str]) -> Lines:
    """Return lines with the speeds of peers where one but the first was measured."""
    return [[case, *(pair(times.both("tflops", case, peer, "graph")) for peer in peers)] for case in times.cases
            if any(measured(times, case, "graph", peer) for peer in peers[1:])]


def portable(times: Times) -> Lines:
    """Return lines with the speeds of the portable kernels and of FlashAttention-2."""
    lines = []
    for case in times.cases:
        ours, theirs = (times.both("tflops", case, peer, "graph") for peer in (PORTABLE, "varlen"))
        if measured(times, case, "graph", PORTABLE):
            faster = pair(x / y for x, y in zip(ours, theirs, strict=True))
            lines.append([case, *(speed_and_error(times, case, peer) for peer in (PORTABLE, "varlen")), faster])
    return lines


def described(parts: Iterable[tuple[str, str]]) -> list[str]:
    """Drop what has no table, with its description."""
    return [text for said, made in parts if made for text in (said, made)]


def measured(times: Times, case: str, timing: str, peer: str = OURS) -> bool:
    return any(not math.isnan(x) for x in times.both("ms", case, peer, timing))


def heads(row: Row) -> str:
    """Describe the heads of a row: query heads / kv heads x head_dim."""
    widths = row["head_dim"], row.get("v_head_dim") or row["head_dim"]
    return f"{row['heads']}/{row['kv_heads']} x {'/'.join(dict.fromkeys(widths))}"


def speed_and_error(times: Times, case: str, peer: str, timing: str = "graph") -> str:
    """Format TFLOP/s of both directions, and the largest RMS error in thousandths; NaN is the largest of all."""
    errors = [float(text) for result in RESULTS if (text := times.text("rms", case, peer, result, ERRORS))]
    worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error, default=None)
    speeds = pair(times.both("tflops", case, peer, timing))
    return speeds if worst is None or speeds == "-" else f"{speeds} ({1e3 * worst:.2f})"


def versus(times: Times, case: str, timing: str) -> tuple[str, str]:
    """Compare with the fastest other implementation of each direction: (speed over it, its name)."""
    ratios, names = [], []
    for way in DIRECTIONS:
        found = {peer: times.value("tflops", case, peer, way, timing) for peer in times.peers if peer not in OWN}
        found = {peer: speed for peer, speed in found.items() if not math.isnan(speed)}
        best = max(found, key=found.__getitem__, default="")
        ratios.append(times.value("tflops", case, OURS, way, timing) / found[best] if best else math.nan)
        names.append(named(best) if best else "-")
    return " / ".join(map(ratio, ratios)) if any(x > 0 for x in ratios) else "-", " / ".join(dict.fromkeys(names))


def spread(times: Times, case: str) -> str:
    """Format half the distance from p10 to p90 of the timing of a case that varies most, in percent of its median."""
    keys = [(case, peer, way, "graph") for peer in (OURS, *times.peers) for way in DIRECTIONS]
    widths = [(times.value("ms_p90", *key) - times.value("ms_p10", *key)) / times.value("ms", *key) for key in keys]
    known = [width for width in widths if not math.isnan(width)]
    return f"±{50 * max(known):.1f} %" if known else "-"


def sustained(times: Times, peers: Sequence[str]) -> Lines:
    """Return lines with the speed of both directions together: without rest / rested."""
    return [[case, *(pair([times.value("tflops", case, peer, *SUSTAINED), times.together(case, peer)])
                     for peer in peers)] for case in times.cases if times.text("tflops", case, OURS, *SUSTAINED)]


def logits(rows: Sequence[Row]) -> list[str]:
    """Make the tables of bench_attention.py --logits: time over that of plain attention, and errors; then the portable
    kernels.
    """
    times = Times(rows)
    return described([
        *logits_over(times, OURS, "Time over that of attention with neither, forward / backward, of calls."),
        *logits_over(times, PORTABLE, f"{ELSEWHERE}: time over that with neither, forward / backward, of calls."),
    ])


def logits_over(times: Times, plain: str, said: str) -> list[tuple[str, str]]:
    """Return two tables of a plain peer and the same kernels with sinks and softcaps; `said` describes the first."""
    names = {kind if plain == OURS else f"{plain}-{kind}": said_of for kind, said_of in LOGITS.items()}
    names = {peer: said_of for peer, said_of in names.items() if peer in times.peers}
    cases = [case for case in times.cases if names and measured(times, case, "called", plain)]
    ratios = [[case, *(pair(map(float.__truediv__, times.both("ms", case, peer, "called"),
                                times.both("ms", case, plain, "called"))) for peer in names)]
              for case in cases]
    errors = [[case, said_of, *(number(1e3 * times.value("rms", case, peer, name, ERRORS)) for name in RESULTS)]
              for case in cases for peer, said_of in {plain: "neither", **names}.items()]
    return [(said, table(["pack", *names.values()], ratios)),
            ("Relative RMS error against float64, in thousandths.", table(["pack", "", *RESULTS], errors))]


def dense(rows: Sequence[Row]) -> list[str]:
    """Make the table of bench_attention.py --dense: packs beside dense batches of the same tokens."""
    times, lines = Times(rows), []
    known = {row["case"]: row for row in rows}
    for case in times.cases:
        ms = {peer: times.both("ms", case, peer, "graph") for peer in (OURS, *times.peers)}
        ours = ms.pop(OURS)
        batch = {peer: both for peer, both in ms.items() if not math.isnan(sum(both))}
        if math.isnan(sum(ours)) or not batch:
            continue
        best = min(batch, key=lambda peer: sum(batch[peer]))
        theirs = batch[best]
        ratios = [mine / other for mine, other in zip([*ours, sum(ours)], [*theirs, sum(theirs)], strict=True)]
        lines.append([f"{int(known[case]['total_tokens']):,}", known[case]["num_seqs"], pair(ours), pair(theirs),
                      named(best), pair(ratios)])
    said = ("Milliseconds, forward / backward, on the GPU alone. The dense batch has equal lengths, no offsets, and "
            "its fastest kernels; a ratio above 1 says that the pack takes longer.")
    head = ["tokens", "sequences", "pack, ms", "dense, ms", "dense by", "pack / dense: forward / backward / both"]
    return described([(said, table(head, lines))])


def reorder(rows: Sequence[Row]) -> list[str]:
    """Make the table of bench_reorder.py: rates of moving rows between rank order and sequence order."""
    ways = {OURS: "thd_reorder", "copy": "copy", "select": "torch.index_select"}
    found: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        move = row["case"], row["cp_size"], f"{row['direction'].replace('_', ' ')}, {row['dtype']}"
        found.setdefault(move, {})[row["peer"]] = float(row["gb_per_s"])
    lines = [[*move, *(number(rates.get(way, math.nan)) for way in ways), ratio(rates[OURS] / rates["copy"])]
             for move, rates in found.items()]
    return described([("GB/s, read and written bytes together.",
                       table(["pack", "ranks", "direction", *ways.values(), "thd_reorder / copy"], lines))])


# --- attention over several GPUs ---------------------------------------------------------------------------------


class Ranks(NamedTuple):
    """Number of ranks that a run behaved as, number of GPUs that it had, and what carried keys between them."""

    played: int
    real: int
    transport: str

    def __str__(self) -> str:
        return f"{self.real} GPUs{'' if self.real == self.played else f' as ranks of {self.played}'}, {self.transport}"


def runs(rows: Iterable[Row]) -> dict[Ranks, Times]:
    """Group rows of bench_cp.py by ranks, few before many, with cases in their usual order."""
    order = [*cp_cases(1)]
    groups: dict[Ranks, list[Row]] = {}
    for row in sorted(rows, key=lambda row: order.index(row["case"]) if row["case"] in order else len(order)):
        groups.setdefault(Ranks(int(row["as_rank_of"]), int(row["ranks"]), row["transport"]), []).append(row)
    return {ranks: Times(groups[ranks]) for ranks in sorted(groups)}


def context_parallel(rows: Sequence[Row]) -> list[str]:
    """Make the tables of bench_cp.py: methods side by side and their costs, by number of GPUs; then errors."""
    parts = []
    for ranks, times in runs(rows).items():
        ways = [*methods(times), *cp_peers(times)]
        cases = [case for case in times.cases if any(speed(times, case, way) > 0 for way in ways)]
        beside = [name for name in (ONE, ALONE) if any(speed(times, case, name) > 0 for case in cases)]
        found = [[case, *(fastest(times, case, way, ways) for way in ways),
                  *(number(speed(times, case, name)) for name in beside)] for case in cases]
        costs = [cost(times, case, way) for case in cases for way in (*own(times), *cp_peers(times))
                 if speed(times, case, way) > 0]
        parts += [(f"**{ranks}**: TFLOP/s per GPU, forward and backward, of one call after the other. Bold are the "
                   f"fastest and what is within 2 % of it.",
                   table([str(ranks), *map(way_name, ways), *map(named, beside)], found)),
                  (f"{ranks}, what each way costs.", table([
                      str(ranks), "way", "forward / backward, TFLOP/s", "over one GPU", "exposed, ms",
                      "one graph, TFLOP/s", "host forward, µs", "host plan, µs", "received, MiB", "memory, GiB"],
                      costs)),
                  (f"{ranks}, what overlaps: times of forward and backward, ms. The exchange alone takes all heads at "
                   f"once.", table([
                      str(ranks), "groups of heads", "layer", "attention alone", "exchange alone", "attention / layer",
                      "layer / the longer one", "attention beside the exchange / alone"],
                      overlaps(times)))]
    lines = [[str(ranks), case, way_name(way), *(number(1e3 * times.value("rms", case, way, name, ERRORS))
                                                 for name in RESULTS)]
             for ranks, times in runs(rows).items() for case in times.cases
             for way in (*methods(times), *cp_peers(times))
             if times.text("rms", case, way, RESULTS[0], ERRORS)]
    parts.append(("Relative RMS error against float64, in thousandths.", table(["", "pack", "way", *RESULTS], lines)))
    return described(parts)


def own(times: Times) -> list[str]:
    """List the ways of thdattn, with those of a given number of head groups."""
    return [OURS, *(name for name in times.peers if name.startswith(f"{OURS},"))]


def methods(times: Times) -> list[str]:
    """List thdattn's methods, each with as many head groups as it chooses."""
    return [way for way in own(times) if way == OURS or any(method(times, case, way) != USUAL for case in times.cases)]


def cp_peers(times: Times) -> list[str]:
    return [peer for peer in times.peers if peer not in PARTS and not peer.startswith(OURS)]


def method(times: Times, case: str, way: str) -> Method:
    """Return the method of a way; rows without its columns are of the usual one."""
    columns = zip(("method", "sharding"), USUAL, strict=True)
    return Method(*(times.text(column, case, way, "both", "called") or usual for column, usual in columns))


def way_name(way: str) -> str:
    return "all_gather" if way == OURS else named(way.removeprefix(f"{OURS}, "))


def speed(times: Times, case: str, way: str) -> float:
    """Return TFLOP/s per GPU, forward and backward, of calls."""
    return times.value("tflops", case, way, "both", "called")


def fastest(times: Times, case: str, way: str, ways: Sequence[str]) -> str:
    """Format a speed, in bold where it is among the fastest."""
    best = max(x for name in ways if (x := speed(times, case, name)) > 0)
    mine = speed(times, case, way)
    return f"**{number(mine)}**" if mine >= 0.98 * best else number(mine)


def cost(times: Times, case: str, way: str) -> list[str]:
    """Return a line of the table of costs; the attention alone has the rows and keys of all_gather and dual_chunk."""
    alike = method(times, case, way) == USUAL
    exposed = times.value("ms", case, way, "both", "called") - times.value("ms", case, ALONE, "both", "called")
    host = [1e3 * times.value("ms", case, way, what, "host") for what in ("forward", "plan")]
    return [
        case, way_name(way), pair(times.both("tflops", case, way, "called")),
        ratio(speed(times, case, way) / speed(times, case, ONE)), number(exposed, 2) if alike else "-",
        number(times.value("tflops", case, way, "both", "graph")), *map(number, host),
        number(times.value("received_bytes", case, way, "both", "called") / 2**20),
        times.text("memory_gib", case, way, "both", "called") or "-",
    ]


def overlaps(times: Times) -> Lines:
    """Return lines that compare a layer with its attention and its exchange alone, for each number of groups."""
    lines = []
    for case, way in product(times.cases, own(times)):
        layer, alone, exchange, beside = (times.value("ms", case, name, "both", "called")
                                          for name in (way, ALONE, EXCHANGE, BESIDE))
        if method(times, case, way) == USUAL and layer > 0 < exchange:
            lines.append([case, times.text("head_groups", case, way, "both", "called"),
                          *map(number, (layer, alone, exchange)),
                          *map(ratio, (alone / layer, layer / max(alone, exchange), beside / alone))])
    return lines


# --- prefix trees ------------------------------------------------------------------------------------------------


def trees(rows: Sequence[Row]) -> list[str]:
    """Make the tables of bench_trees.py: trees beside other packs on one GPU, then over several GPUs."""
    one = Times(row for row in rows if row["ranks"] == "1")
    groups = {key: Times(row for row in rows if (row["ranks"], row["transport"]) == key)
              for key in sorted({(row["ranks"], row["transport"]) for row in rows if row["ranks"] != "1"})}
    lines = [[case, *(number(over(one, case, column, "unrolled")) for column in ("total_tokens", "pairs")),
              speed_and_error(one, case, OURS, "called"), pair(one.both("tflops", case, "causal", "called")),
              ratios(one, case, "causal", "pairs"), ratios(one, case, "causal", "tiles"),
              *(ratios(one, case, peer) for peer in ("unrolled", "flex"))] for case in one.cases]
    head = ["trees", "rows saved", "pairs saved", "thdattn, TFLOP/s", "causal pack, TFLOP/s", "over it, by pairs",
            "over it, by tiles", "times as fast as unrolled", "as FlexAttention"]
    several = [[f"{ranks} GPUs, {transport}", case, speed_and_error(times, case, OURS, "called"),
                number(speed(times, case, OURS)), number(speed(times, case, ONE)),
                ratio(speed(times, case, OURS) / speed(times, case, ONE)),
                times.text("work", case, OURS, "both", "called")]
               for (ranks, transport), times in groups.items() for case in times.cases]
    return described([
        ("Prefix trees, forward / backward, of calls. In parentheses: the largest relative RMS error against float64, "
         "in thousandths. Saved: rows and visible pairs of the unrolled paths over those of the trees. The causal pack "
         "has as many rows and as many tiles of 128 x 128 with a visible pair.", table(head, lines)),
        ("Prefix trees over several GPUs (all_gather:balanced): TFLOP/s per GPU of calls. Work: pairs of the busiest "
         "rank over the mean.",
         table(["", "trees", "forward / backward", "both", ONE, "over one GPU", "work"], several)),
    ])


def over(times: Times, case: str, column: str, peer: str, way: str = "both") -> float:
    """Return a column of a peer over that of thdattn."""
    theirs, ours = (times.value(column, case, name, way, "called") for name in (peer, OURS))
    return theirs / ours


def ratios(times: Times, case: str, peer: str, per: str = "") -> str:
    """Format how many times as fast as a peer thdattn is, forward / backward: per pack, or per unit of a column."""
    units = over(times, case, per, peer) if per else 1.0
    return pair(over(times, case, "ms", peer, way) / units for way in DIRECTIONS)


# --- mixers, graphs, decode --------------------------------------------------------------------------------------


def mixers(rows: Sequence[Row]) -> list[str]:
    """Make the tables of bench_mamba.py: times beside other implementations and the memory floor; those of the portable
    kernels; then errors.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["part"], row["ranks"]), []).append(row)
    parts = []
    for (part, ranks), found in groups.items():
        times, timing = Times(found), "graph" if ranks == "1" else "called"
        peers = [peer for peer in (OURS, *times.peers)
                 if peer not in OWN and any(measured(times, x, timing, peer) for x in times.cases)]
        lines = [[case, *(pair(times.both("ms", case, peer, timing)) for peer in peers), floor(times, case, timing),
                  *(pair(map(float.__truediv__, times.both("ms", case, peer, timing),
                             times.both("ms", case, OURS, timing))) for peer in peers[1:])]
                 for case in times.cases if measured(times, case, timing)]
        where = "one GPU, on the GPU alone" if ranks == "1" else f"{ranks} GPUs, calls one after the other"
        parts.append((f"The {part} on {where}: milliseconds, forward / backward.",
                      table([part, *map(named, peers), "memory floor, ms", *(f"{named(peer)} / thdattn"
                                                                             for peer in peers[1:])], lines)))
    parts += [(f"{ELSEWHERE}, in the {part}, on the GPU alone: milliseconds, forward / backward.",
               table([part, PORTABLE, named("mamba_ssm"), "mamba_ssm / portable"], portable_mixers(Times(found))))
              for (part, _), found in groups.items()]
    for (part, _), found in groups.items():
        times = Times(found)
        names = [*dict.fromkeys(row["direction"] for row in found if row["timing"] == ERRORS)]
        lines = [[case, named(peer), *(number(1e3 * times.value("rms", case, peer, name, ERRORS)) for name in names)]
                 for case in times.cases for peer in (OURS, *times.peers)
                 if names and times.text("rms", case, peer, names[0], ERRORS)]
        parts.append((f"The {part}: relative RMS error against float64 over the first 2,048 rows, in thousandths.",
                      table(["pack", "", *names], lines)))
    return described(parts)


def portable_mixers(times: Times) -> Lines:
    """Return lines with the times of the portable kernels and of mamba_ssm."""
    lines = []
    for case in times.cases:
        ours, theirs = (times.both("ms", case, peer, "graph") for peer in (PORTABLE, "mamba_ssm"))
        if measured(times, case, "graph", PORTABLE):
            lines.append([case, pair(ours), pair(theirs), pair(map(float.__truediv__, theirs, ours))])
    return lines


def floor(times: Times, case: str, timing: str) -> str:
    """Format the time in which the GPU's memory reads all inputs and writes all outputs once."""
    return pair(times.both("floor_ms", case, OURS, timing), 2)


def graphs(rows: Sequence[Row]) -> list[str]:
    """Make the tables of bench_graphs.py: layers called kernel by kernel and as graphs; then costs of empty slots."""
    ways = {"eager_static": "kernel by kernel, ms", "local": "a graph per direction, ms",
            "full_iteration": "one graph, ms"}
    found: dict[tuple[str, ...], dict[str, float]] = {}
    slots: dict[str, dict[str, float]] = {}
    for row in rows:
        layer = (row["case"], f"{row['heads']} of a mixer" if row["kv_heads"] == "mixer" else
                 f"{row['heads']}/{row['kv_heads']}", row["ranks"])
        if row["way"] in ways:
            found.setdefault(layer, {})[row["way"]] = float(row["ms"])
        if row["way"].endswith("_slots") or row["way"] == "exact":
            slots.setdefault(row["ranks"], {})[row["way"].removesuffix("_slots")] = float(row["ms"])
    lines = [[*layer, *(number(ms.get(way, math.nan)) for way in ways),
              ratio(ms["eager_static"] / min(ms[way] for way in ms if way != "eager_static"))]
             for layer, ms in found.items()]
    unused = [[gpus, number_of, number(ms[number_of]), f"{ms[number_of] / ms['exact']:.2f}"]
              for gpus, ms in slots.items() for number_of in ms if "exact" in ms]
    return described([
        ("One layer, forward and backward, in packs whose lengths only the GPU knows. A mixer has 64 heads of 64 "
         "columns, with states of 128.", table(["pack", "heads", "GPUs", *ways.values(), "times as fast"], lines)),
        ("16 documents of 1,024 tokens in one graph with slots for more documents, and with a plan of the exact size.",
         table(["GPUs", "slots", "ms", "over exact"], unused)),
    ])


def decode(rows: Sequence[Row]) -> list[str]:
    """Make the tables of bench_decode.py: bytes per second of the language model, and rates of kernels for one row."""
    ways = {"eager": "kernel by kernel", "layer": "a graph per layer", "block": "one graph"}
    rates = {(row["what"], row["texts"], row["way"]): float(row["bytes_per_s"]) for row in rows if row["bytes_per_s"]}
    models = [[size, texts, *(number(rates.get((size, texts, way), math.nan)) for way in ways)]
              for size, texts in dict.fromkeys((size, texts) for size, texts, _ in rates)]
    kernels = [[row["what"], row["texts"], row["bytes"], f"{1e3 * float(row['ms']):.1f}", row["gb_per_s"],
                row["copy_gb_per_s"]] for row in rows if row["gb_per_s"]]
    return described([
        ("Bytes per second that the language model writes, all texts together, each behind 2,000 bytes.",
         table(["model", "texts", *ways.values()], models)),
        ("One kernel for a new row, the same on all GPUs, and a plain copy of as many bytes as it reads.",
         table(["kernel", "texts", "bytes of each", "µs", "GB/s", "GB/s of a copy"], kernels)),
    ])


# --- training steps ----------------------------------------------------------------------------------------------

IMPLS = ("none", "local", "full_iteration")


def training(rows: Iterable[Row]) -> list[str]:
    """Make the tables of bench_bytelm.py: training steps, and costs of a maximum of documents per graph."""
    rows = sorted(rows, key=place)
    usual = [row for row in rows if not row.get("maximum")]
    lines = [[
        f"{row['size']}, {millions(row)}", gpus(row), f"{tokens_per_step(row):,}", row["cuda_graph_impl"],
        milliseconds(row["ms_per_step"]), f"{milliseconds(row['ms_p10'])} to {milliseconds(row['ms_p90'])}",
        f"{int(row['tokens_per_s']):,}", percent(row["mfu"], 0), of_one_gpu(row, usual),
        number(float(row["attention_tflops"] or "nan")), percent(row["padding"]),
        row["date"][:10],
    ] for row in usual]
    head = ["model, weights", "GPUs", "tokens per step", "CUDA graphs", "ms per step", "p10 to p90, ms", "tokens/s",
            "MFU", "over one GPU", "attention, TFLOP/s per GPU", "padding", "measured"]
    slots = ["model", "GPUs", "tokens per step", "CUDA graphs", "slots", "packs with more", "mean ms per step",
             "p10 to p90, ms", "times the least"]
    return described([
        ("Training steps of the language model on real documents, medians. MFU: share of the dense bfloat16 peak.",
         table(head, lines)),
        ("Steps by the number of slots that a graph has for documents (P90: enough for nine of ten packs); a pack with "
         "more documents runs without a graph.", table(slots, maxima(rows))),
    ])


def maxima(rows: Iterable[Row]) -> Lines:
    """Return lines of the table of maxima, fewest slots first, behind the same steps without graphs."""
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (place(row), int(row.get("slots") or 0))):
        names = "size", "ranks", "cp", "tokens", "accumulate", "cp_comm_type"
        alike.setdefault(tuple(row.get(name) or "" for name in names), []).append(row)
    lines = []
    for found in alike.values():
        shown = [row for row in found if row.get("ms_mean")
                 and (row.get("maximum") or row["cuda_graph_impl"] == "none")]
        least = min((float(row["ms_mean"]) for row in shown), default=0.0)
        lines += [[
            row["size"], gpus(row), f"{tokens_per_step(row):,}", row["cuda_graph_impl"], slots_of(row),
            percent(row.get("eager_packs") or ""), milliseconds(row["ms_mean"]),
            f"{milliseconds(row['ms_p10'])} to {milliseconds(row['ms_p90'])}", f"{float(row['ms_mean']) / least:.2f}",
        ] for row in shown if any(other.get("maximum") for other in shown)]
    return lines


def slots_of(row: Row) -> str:
    """Format a maximum: "exact" without one, "5 (P90)", or "16"."""
    if not row.get("maximum"):
        return "exact"
    return f"{row['slots']} ({row['maximum']})" if row["maximum"] != row["slots"] else row["slots"]


def millions(row: Row) -> str:
    return f"{int(row['weights']) / 1e6:,.{1 if int(row['weights']) < 1e7 else 0}f} million"


def place(row: Row) -> tuple[object, ...]:
    """Return the key that sorts steps: small models first, few ranks first, the same step with and without graphs."""
    return (int(row["weights"]), row["size"], int(row["ranks"]), num_groups(row), tokens_per_step(row), gpus(row),
            IMPLS.index(row["cuda_graph_impl"]))


def of_one_gpu(row: Row, rows: Iterable[Row]) -> str:
    """Format tokens per second and GPU over the best of one GPU with as many tokens a step; a dash without one."""
    alike = [float(other["tokens_per_s"]) for other in rows if other["ranks"] == "1"
             and (other["size"], tokens_per_step(other)) == (row["size"], tokens_per_step(row))]
    if row["ranks"] == "1" or not alike:
        return "-"
    return f"{float(row['tokens_per_s']) / int(row['ranks']) / max(alike):.2f}"


def tokens_per_step(row: Row) -> int:
    """Return the rows of all micro-batches of all groups."""
    return int(row["tokens"]) * int(row["accumulate"]) * num_groups(row)


def num_groups(row: Row) -> int:
    """Return the number of groups of ranks that share micro-batches; one where the row does not say."""
    return int(row["ranks"]) // int(row.get("cp") or row["ranks"])


def gpus(row: Row) -> str:
    """Format the GPUs, such as 4, or 2 x 2 for two groups of two; then method and sharding if they are not usual."""
    groups, way, sharding = num_groups(row), row.get("cp_comm_type") or "", row.get("sharding") or "dual_chunk"
    ranks = row["ranks"] if groups == 1 else f"{groups} x {row['cp']}"
    usual = SHARDINGS[way.partition(" ")[0] or "all_gather"]
    return ", ".join(filter(None, (ranks, way, sharding if sharding != usual else "")))


def milliseconds(text: str) -> str:
    return f"{float(text):,.{0 if float(text) >= 100 else 1}f}"
