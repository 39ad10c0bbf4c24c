"""Times attention with sinks, with soft-capped logits and with both against the same attention with neither.

    python benchmarks/bench_logits.py
    python benchmarks/bench_logits.py --cases 1x16384 1x16384-gqa --kinds sinks softcap

All kinds of a case take turns in one run; calls are those that a user makes. Ratios are times over those with neither;
errors, those of a small version of the case.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import accuracy
import cupy
import numpy as np
import record
import timing
from peers import draw_inputs
from workloads import CASES, Case

import thdattn

# "low": among these logits, so that a longer polynomial takes the place of the shortest one.
KINDS: dict[str, dict[str, Any]] = {
    "neither": {}, "sinks": {"sinks": True}, "softcap": {"softcap": 50.0}, "both": {"softcap": 50.0, "sinks": True},
    "low": {"softcap": 5.0},
}  # fmt: skip


BLANK = dict.fromkeys(("ms", "ms_p10", "ms_p90", "samples", "tflops", "ratio", "rms", "largest"), "")


def main() -> int:
    args = parse_arguments()
    about = record.provenance()
    path = args.out or record.results_file("logits", about["gpu"])
    print(f"{'case':20}{'direction':>10}{'kind':>9}{'ms':>10}{'ratio':>8}{'rms':>12}")
    with cupy.cuda.Stream(non_blocking=True):
        for name in args.cases:
            kinds = ["neither", *args.kinds]
            rows = [about | row for make in (bench, errors) for row in make(CASES[name], kinds, args.repeats)]
            for row in rows:
                print(f"{name:20}{row['direction']:>10}{row['kind']:>9}{row['ms']:>10}{row['ratio']:>8}"
                      f"{row['rms']:>12}",
                      flush=True)
            record.save(path, rows, ("gpu", "case", "direction", "kind", "timing"))
    print(f"wrote {path}")
    return 0


def bench(case: Case, kinds: list[str], rounds: int) -> Iterator[record.Row]:
    """Both directions of one case."""
    inputs = draw_inputs(case)
    calls = {kind: calls_of(case, inputs, **KINDS[kind]) for kind in kinds}
    for number, direction in enumerate(record.DIRECTIONS):
        groups = {}
        for kind in kinds:
            call = calls[kind][number]
            groups[kind] = partial(timing.called, call, timing.calls_per_group(median(timing.called(call, 3))))
        times = timing.interleaved(groups, rounds, lambda _: nullcontext())
        for kind, samples in times.items():
            ratio = median(samples) / median(times["neither"])
            yield case.columns | {"direction": direction, "kind": kind, "timing": "called"} | BLANK | record.timed(
                samples, getattr(case.flops, direction)) | {"ratio": f"{ratio:.3f}"}


def errors(case: Case, kinds: list[str], _: int) -> Iterator[record.Row]:
    """Of out and gradients, against float64."""
    small = accuracy.small(case)
    inputs = draw_inputs(small)
    for kind in kinds:
        options = KINDS[kind]
        sinks = cupy.zeros(small.heads) if "sinks" in options else None
        wanted = accuracy.exact(small, [x.get() for x in inputs], cupy, options.get("softcap", 0.0), sinks)
        forward, backward = calls_of(small, inputs, **options)
        found = [x.get() for x in (forward()[0], *backward()[:3])]
        for name, error in accuracy.errors(found, wanted).items():
            yield (case.columns | {"direction": name, "kind": kind, "timing": record.ERRORS} | BLANK
                   | error.columns)  # fmt: skip


def calls_of(case: Case, inputs: Any, **options: Any) -> tuple[partial[Any], partial[Any]]:
    """A forward and a backward, each called once before."""
    q, k, v, dout = inputs
    layer = thdattn.CPAttention(
        thdattn.comm.init("single"), case.heads, case.head_dim, case.kv_heads, case.v_head_dim, case.causal,
        case.window, engine="cuda", **options)
    sinks = cupy.zeros(case.heads, np.float32) if layer.sinks else None
    forward = partial(layer.forward, q, k, v, layer.plan(case.batch(), "contiguous"), sinks=sinks)
    backward = partial(layer.backward, dout, forward()[1])
    backward()
    return forward, backward


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["1x16384", "1x16384-gqa"], metavar="CASE",
                        help="1x16384 and 1x16384-gqa by default")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS)[1:], default=list(KINDS)[1:])
    parser.add_argument("--repeats", type=int, default=5, help="turns of every kind, 5 by default")
    parser.add_argument("--out", type=Path, help="CSV file to add to; benchmarks/results/logits_GPU.csv by default")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
