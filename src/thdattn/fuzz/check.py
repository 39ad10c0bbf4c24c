"""Compare this machine's engine with float64 on every kind of pack, mask and method: python -m thdattn check."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from thdattn.comm import init
from thdattn.engines.select import choose_engine
from thdattn.fuzz.cases import FuzzCase, row_multiple
from thdattn.fuzz.judge import ATTENTION, Judgement, judge
from thdattn.fuzz.runs import SECONDS_FOR_RANKS, Ranks, poisoned, run_on_all
from thdattn.methods import a2a

DTYPES = {"cuda": ("bfloat16", "float16"), "reference": ("bfloat16", "float32")}

_two = partial(FuzzCase, ranks=2, lengths=(130, 7, 261, 33, 1, 64), dims=(64, 64))
_four = partial(_two, ranks=4)

CASES = {  # dtypes, and what ranks need of padding, come with the engine and the ranks
    "one document": _two(ranks=1, lengths=(300,), heads=(4, 4)),
    "ragged lengths": _two(heads=(4, 4)),
    "grouped-query heads 8/2": _four(heads=(8, 2)),
    "full mask": _two(heads=(4, 4), causal=False),
    "causal window of 50": _four(heads=(4, 4), window=(50, 0)),
    "window 20 back, 9 ahead": _four(heads=(4, 4), causal=False, window=(20, 9)),
    "empty documents": _two(lengths=(0, 90, 0, 0, 41, 0)),
    "fewer tokens than ranks": _four(lengths=(1, 0, 2), heads=(4, 4)),
    "contiguous, padded to 3": _four(heads=(4, 4), sharding="contiguous", multiple=3),
    "contiguous, no padding": _four(heads=(4, 4), causal=False, sharding="contiguous"),
    "head dim 128, deterministic": _two(heads=(4, 1), dims=(128, 128), deterministic=True),
    "head dims 192 and 128": _two(dims=(192, 128)),
    "balanced rows": _four(sharding="balanced"),
    "all-to-all": _four(heads=(8, 8), sharding="contiguous", method="a2a"),
    "ring": _four(method="p2p"),
    "two levels": _four(sharding="balanced", method="a2a+all_gather"),
    "sinks": _two(sinks=True),
    "soft-capped logits, sinks": _two(softcap=30.0, sinks=True),
}


def check(engine: str = "auto") -> int:
    """Compare every case with the float64 oracle and print a table; under mpiexec only rank 0 prints.

    Args:
        engine: "auto", "cuda" or "reference", as for CPAttention.

    Returns:
        The exit status: 0 if every error is within its budget and padding is exactly 0, else 1.
    """
    with init("auto", timeout=SECONDS_FOR_RANKS) as comm:
        module, why = choose_engine(engine, comm)
        ranks, is_first = Ranks(comm, module.name), comm.rank == 0
        if is_first:
            print(f"engine  {module.name}: {why}")
            print(f"ranks   {f'{comm.size}, backend {comm.name!r}' if comm.size > 1 else 'simulated in this process'}")
            print("errors  against float64, in percent of the budget: RMS / largest (thdattn.oracle has the rule)")
            print("padding is NaN in the inputs and must be exactly 0 in the results\n")
            print(f"{'case':<28} ranks dtype     {''.join(f'{name:>3}'.ljust(14) for name in ATTENTION)}")
        passed = []
        with poisoned(module.name), ranks.stream():
            for name, case in _runs(module.name, comm.size):
                results = run_on_all(case, ranks)
                if is_first:
                    passed.append(_shown(name, case, judge(case, results)))
        if is_first:
            print("all PASS" if all(passed) else f"{passed.count(False)} of {len(passed)} FAILED")
    return 0 if all(passed) else 1


def _runs(engine: str, num_ranks: int) -> Iterator[tuple[str, FuzzCase]]:
    """Yield the cases for an engine; on several real ranks, for so many, if these can share the heads."""
    for name, case in CASES.items():
        ranks = num_ranks if num_ranks > 1 else case.ranks
        if case.method == "a2a" and a2a.obstacle(case.heads[0], case.heads[1], ranks):
            continue
        inner = 2 if "+" in case.method and ranks % 2 == 0 else 1
        multiple = math.lcm(case.multiple, row_multiple(case.method, case.sharding, ranks, inner))
        for dtype in DTYPES[engine]:
            yield name, replace(case, ranks=ranks, inner=inner, multiple=multiple, dtype=dtype)


def _shown(name: str, case: FuzzCase, found: Judgement) -> bool:
    """Print the row of a case, with its failures; return whether it passes."""
    errors = [[100 * found.shares.get(f"{result} ({kind})", np.nan) for kind in ("RMS", "largest")]
              for result in ATTENTION]
    numbers = "".join(f"{f'{rms:3.0f} / {largest:.0f}':<14}" for rms, largest in errors)
    wrong = found.wrong + [f"{result} is beyond its budget" for result in found.near]
    print(f"{name:<28} {case.ranks:>5} {case.dtype:<9} {numbers}{'FAIL' if wrong else 'PASS'}", flush=True)
    for text in wrong:
        print(f"    {text}")
    if wrong:
        print(f'    to repeat it: python -m thdattn fuzz --case "{case.words()}"')
    return not wrong
