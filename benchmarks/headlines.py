"""The most important of what was measured, for README.md, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import attention_page
import bench_bytelm
import cp_record
import mamba_record
from prose import prose, table
from record import DIRECTIONS, OWN, TIMINGS, Row, Times, slashed
from workloads import CASES, Case

PACKS = ("1x16384", "1x16384-gqa", "bucket32k", "4x4096", "16x1024", "64x256", "1x2048", "doc128k-gqa",
         "lognormal192k", "1x65536-w1024", "1x16384-full", "1x16384-d64", "1x16384-d192v128", "1x16384-d192",
         "1x16384-d256")  # fmt: skip
MIXERS = ("1x16384", "64x256", "lognormal128k")
NAMES = {"fa4": "FlashAttention-4", "cudnn": "cuDNN"}


def attention(rows: Sequence[Row]) -> str:
    """Speeds of ours on one GPU, as called and in graphs, over those of others, and where others are ahead."""
    times = Times(row for row in rows if row["case"] in PACKS)
    others = [peer for peer in times.peers if peer not in OWN]
    star = attention_page.starred(rows)
    lines = [[star[case], *described(CASES[case]), *(x for timing in TIMINGS for x in speeds(times, case, timing))]
             for case in PACKS]  # fmt: skip
    over = [f"over {NAMES.get(peer, peer)}" for peer in others]
    head = ["pack", "documents, tokens", "heads", "called: ours", *over, "graphs: ours", *over]
    said = (f"One layer on one {rows[0]['gpu']} in bfloat16, forward/backward: TFLOP/s of calls as a program makes "
            f"them, and of the same in replayed CUDA graphs, and how many times those of others:")  # fmt: skip
    ahead = [attention_page.ahead(times, timing) for timing in TIMINGS]
    return "\n\n".join([prose(said), table(head, lines) + attention_page.explained(star[case] for case in PACKS),
                        prose(f"**Ahead of ours by more than {100 * (1 - attention_page.LEVEL):.0f} %,** as called: "
                              f"{ahead[0]}; in graphs: {ahead[1]}.")])  # fmt: skip


def speeds(times: Times, case: str, timing: str) -> list[str]:
    """Of ours in TFLOP/s, and over each other peer's."""
    ours = slashed((times.value("tflops", case, "ours", way, timing) for way in DIRECTIONS), 3)
    over = [slashed((times.ratio(case, peer, way, timing) for way in DIRECTIONS), 3)
            for peer in times.peers if peer not in OWN]  # fmt: skip
    return [ours, *over]


def described(case: Case) -> list[str]:
    """Lengths and mask of a pack, and its heads."""
    number, least, most = len(case.lengths), min(case.lengths), max(case.lengths)
    lengths = f"{number} x {most:,}" if least == most else f"{number}, of {least:,} to {most:,}"
    mask = f", window of {case.window[0]:,}" if case.window[0] >= 0 else "" if case.causal else ", not causal"
    dims = str(case.head_dim) if case.head_dim == case.v_head_dim else f"{case.head_dim} and {case.v_head_dim}"
    return [lengths + mask, f"{case.heads}/{case.kv_heads} of {dims}"]


def context_parallel(rows: Iterable[Row]) -> str:
    """The fastest method per number of GPUs: its speed, and that over one GPU's."""
    runs = {ranks: times for ranks, times in cp_record.runs(rows).items() if ranks.real == ranks.played}
    cases = dict.fromkeys(case for times in runs.values() for case in cp_record.timed_cases(times))
    lines = [[case, *(_fastest(times, case) for times in runs.values())] for case in cases]
    said = prose("TFLOP/s per GPU of one layer, forward and backward, by the fastest method; in parentheses as a part "
                 "of what one GPU reaches with the whole pack:")  # fmt: skip
    return "\n\n".join([said, table(["pack", *(f"{ranks.real} GPUs" for ranks in runs)], lines)])


def _fastest(times: Times, case: str) -> str:
    speeds = {way: times.value("tflops", case, way, "both", "called") for way in cp_record.by_methods(times)}
    speeds = {way: speed for way, speed in speeds.items() if not math.isnan(speed)}
    if not speeds:
        return "-"
    way = max(speeds, key=speeds.__getitem__)
    of_one = slashed([cp_record.of_one_gpu(times, case, way)], 2)
    return f"{slashed([speeds[way]], 3)} ({of_one}), `{':'.join(cp_record.method(times, case, way))}`"


def mamba(rows: Iterable[Row]) -> str:
    """The mixer beside the Triton kernels of mamba_ssm."""
    times = mamba_record.runs(rows)["1", "mixer"]
    head, *found = mamba_record.lines(times, "graph")
    lines = [line for line in found if line[0] in MIXERS]
    said = prose("Milliseconds forward/backward of one mixer on one GPU; floor: what its memory takes to read and to "
                 "write what goes in and out, once:")  # fmt: skip
    return "\n\n".join([said, table(head, lines)])


def bytelm(rows: Iterable[Row]) -> str:
    """Of every size and number of GPUs, the training steps that use them best."""
    rows = sorted(bench_bytelm.without_maxima(rows), key=lambda row: float(row["mfu"] or 0))
    best = {(row["size"], row["ranks"]): row for row in rows}
    lines = [[row["size"], bench_bytelm.gpus(row), f"{bench_bytelm.tokens_per_step(row):,}", row["cuda_graph_impl"],
              f"{int(row['tokens_per_s']):,}", f"{100 * float(row['mfu']):.0f} %", bench_bytelm.of_one_gpu(row, rows)]
             for row in sorted(best.values(), key=bench_bytelm.place)]  # fmt: skip
    return table(["model", "GPUs", "tokens per step", "CUDA graphs", "tokens/s", "MFU", "of one GPU"], lines)
