"""Run every kernel under compute-sanitizer's memcheck, synccheck, initcheck and racecheck, and print a table.

    python3 tools/sanitize.py --jobs 16 --logs build/sanitize

It needs a GPU, and compute-sanitizer of the CUDA toolkit on PATH. Packs are small. Kernels are compiled before, without
the sanitizer. A report counts under its kernel and its kind; logs have the rest. Reports with a reason in EXPLAINED are
printed separately. The exit status is 1 if there were others, or if a program failed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from thdattn.comm import Comm, run_local
from thdattn.fuzz.cases import FuzzCase
from thdattn.fuzz.runs import Ranks, portable_kernels, run
from thdattn.kernels.configs import TILES

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "synccheck", "initcheck", "racecheck")  # in this order, the slowest last
FAMILIES = ("hopper", "portable")
# Tests of kernels that simulated ranks do not call: exchange, sums between GPUs, decode of the mixer, captured graphs.
TESTS = {
    "exchange": "tests/comm/test_gpu_peer.py -k 2-16",
    "exchanged heads": "tests/comm/test_gpu_peer.py -k 'by_one_kernel_as_by_copies or one-row-contiguous-1-False'",
    "sums": "tests/comm/test_gpu_peer.py -k 'memory_gives and one-row and 64 and (None or -1)'",
    "mixer decode": "tests/mamba/test_mamba_decode.py -k 'convolution and 3 or no_prompt'",
    "graphs": "tests/graphs/test_gpu_graph.py -k 'wrong_lengths or made_before_the_capture'",
}
REPORT = re.compile(
    r"^=+ (?:(?:Error|Warning): )?(Invalid [\w ]*?(?:read|write|atomic)|Uninitialized [\w ]*read|Race reported between "
    r"\w+ access|Potential \w+ hazard|Barrier error detected|Missing [\w ]+|Program hit \w+|Out[- ]of[- ]\w+"
    r"|Unaligned [\w ]+|Illegal [\w ]+|Malloc/Free \w+|Stack overflow)(.*)$")
KERNEL = re.compile(r"\bthd_\w+")
LOADED = "loaded kernels:"
MBARRIERS = "mbarriers order bulk copies, reads and writes; racecheck does not follow them"
SOME_MEET = "some warps also meet alone; a barrier of all warps is between the steps that racecheck names"
NAMED = "two roles meet at one named barrier in two places"
HIDDEN = "rows in front that a mask discards"
# (tool, kernel, kind): why a report is no defect. The kernels' sources say more.
EXPLAINED = {
    **{("racecheck", kernel, f"Race reported between {access} access"): MBARRIERS
       for access in ("Read", "Write")
       for kernel in ("thd_attn_fwd_sm90", "thd_attn_bwd_sm90", "thd_attn_bwd_shared_dq_sm90",
                      "thd_attn_bwd_by_gradient_sm90", "thd_attn_bwd_dq_sm90", "thd_ssd_scan_sm90",
                      "thd_ssd_bwd_sm90")},
    **{("racecheck", "thd_ssd_scan", f"Race reported between {access} access"): "bar.arrive orders reads before writes"
       for access in ("Read", "Write")},
    **{("racecheck", "thd_attn_bwd", f"Race reported between {access} access"): SOME_MEET
       for access in ("Read", "Write")},
    **{("synccheck", kernel, "Barrier error detected"): NAMED for kernel in ("thd_ssd_scan", "thd_ssd_bwd_sm90")},
    **{("initcheck", kernel, "Uninitialized __global__ memory read"): HIDDEN
       for kernel in ("thd_mixer_conv", "thd_mixer_conv_bwd", "thd_ssd_conv_states_sm90")},
    **{("initcheck", kernel, "Uninitialized __global__ memory read"): "written by bulk copies"
       for kernel in ("thd_mixer_gate_bwd", "thd_ssd_chunk_states")},
    ("initcheck", "thd_attn_fwd_sm90", "Uninitialized __global__ memory read"): "order behind the last piece, unused",
}
SECONDS, NOT_ENDED, NOT_BEGUN = 200, 124, 125  # that one program may take, and statuses of those out of time


class Program(NamedTuple):
    """Group of cases of a family of kernels, or tests of pytest."""

    name: str
    command: tuple[str, ...]


class Outcome(NamedTuple):
    """Reports of a program by (tool, kernel, kind), its status, and seconds."""

    reports: Counter[tuple[str, str, str]]
    status: int
    seconds: float


# ------------------------------------------------------------------------------------------------ what is run


def programs() -> list[Program]:
    """Return all programs: one for each family and head dim, those of trees and of the mixer, and tests."""
    here = [sys.executable, str(Path(__file__).resolve()), "--inside"]
    groups = [*(f"{family} {head_dim} {v_head_dim}" for family in FAMILIES for head_dim, v_head_dim in TILES),
              *(f"{family} {what}" for what in ("trees", "mixer") for family in FAMILIES)]
    pytest = f"exec {sys.executable} -m pytest -q -x -m gpu -p no:cacheprovider -p sanitize"
    tests = [Program(name, ("bash", "-c", f"{pytest} {words}")) for name, words in TESTS.items()]
    return [*(Program(group, (*here, group)) for group in groups), *tests]


def cases_of(group: str, few: bool = False) -> Iterator[FuzzCase]:
    """Yield the cases of a group, in small packs: every instance of its kernels, or a few for the slowest tool."""
    if group.endswith("mixer"):
        for mixer, dtype in (((8, 64, 128, 1, 4), "bfloat16"), ((8, 128, 64, 2, 3), "float16")):
            for ranks in (1,) if few else (1, 2):
                yield FuzzCase("mixer", ranks, sharding="contiguous", lengths=(70, 0, 140), padded=(71, 3, 140),
                               dtype=dtype, mixer=mixer)
        return
    if group.endswith("trees"):
        for dims in ((64, 64), (128, 128), (192, 128), (256, 256)):
            tree = FuzzCase(lengths=(129, 70, 200, 1, 64), parents=(-1, 0, 0, 2, -1), multiple=2, slack=12,
                            heads=(4, 2), dims=dims)
            yield tree
            if not few:
                yield replace(tree, deterministic=True, softcap=30.0, dtype="float16")
                yield replace(tree, ranks=2, sharding="balanced", sinks=True)
        return
    _, head_dim, v_head_dim = group.split()
    usual = FuzzCase(lengths=(70, 0, 129, 1), padded=(72, 0, 132, 4), slack=12, heads=(4, 2),
                     dims=(int(head_dim), int(v_head_dim)), max_logit=True)
    shared = replace(usual, ranks=2)
    yield usual
    yield replace(usual, deterministic=True, window=(20, 0), dtype="float16")
    yield replace(usual, causal=False, window=(5, 9), softcap=30.0, sinks=True)
    yield replace(usual, causal=False, heads=(2, 2), lengths=(400,), padded=(400,), finite=True)
    yield replace(usual, flow="varlen", lengths=(70, 129), padded=(70, 129), keys=(40, 200), slack=0)
    yield replace(usual, flow="decode", lengths=(40, 9), padded=(40, 9), keys=(2,))
    yield replace(shared, method="p2p")
    if few:
        return
    yield replace(usual, flow="replay", deterministic=True)
    yield replace(shared, flow="split", head_groups=2)
    yield replace(shared, flow="ahead", deterministic=True)
    yield replace(shared, sharding="balanced")
    yield replace(shared, sharding="balanced", deterministic=True, softcap=30.0)
    yield replace(shared, method="p2p", deterministic=True, window=(20, 0))
    yield replace(shared, method="a2a", sharding="contiguous")
    yield replace(shared, method="a2a+all_gather", inner=2)


def run_inside(group: str, few: bool) -> None:
    """Run the cases of a group. Every array has its own allocation, so that memcheck sees its end."""
    cupy = importlib.import_module("cupy")
    cupy.cuda.set_allocator(None)
    with portable_kernels() if group.startswith("portable") else nullcontext():
        for case in cases_of(group, few):
            print(case.words(), flush=True)
            run_local(case.ranks, partial(_run, case), timeout=SECONDS)
    cupy.cuda.runtime.deviceSynchronize()
    pytest_unconfigure()


def pytest_unconfigure() -> None:
    """Print the kernels that this process has loaded, also at the end of pytest, whose plugin this file is."""
    loaded = importlib.import_module("thdattn.jit.compiler")._loaded
    print(LOADED, *sorted({name.partition("<")[0] for _, name in loaded}), flush=True)


def _run(case: FuzzCase, comm: Comm) -> None:
    run(case, Ranks(comm, "cuda"))


# ------------------------------------------------------------------------------------------------ the table


def main() -> int:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--only", metavar="WORD", default="", help="programs whose name has this word")
    parser.add_argument("--jobs", type=int, default=4, help="programs at a time (4)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="when to end all, and print the table (3600)")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "sanitize", help="folder of the logs")
    parser.add_argument("--inside", metavar="GROUP", help=argparse.SUPPRESS)
    parser.add_argument("--few", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside is not None:
        run_inside(chosen.inside, chosen.few)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on PATH; it is part of the CUDA toolkit", file=sys.stderr)
        return 2
    chosen.logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + chosen.seconds
    wanted = [program for program in programs() if chosen.only in program.name]
    with ThreadPoolExecutor(chosen.jobs) as pool:
        list(pool.map(lambda program: play(program, "compile", chosen.logs, end), wanted))
        pairs = [(program, tool) for tool in sorted(chosen.tools, key=TOOLS.index) for program in wanted]
        outcomes = list(pool.map(lambda pair: play(pair[0], pair[1], chosen.logs, end), pairs))
    status = _print_table(pairs, outcomes)
    print("kernels that no program loaded:", *never_loaded(chosen.logs, wanted))
    return status


def play(program: Program, tool: str, logs: Path, end: float) -> Outcome:
    """Run a program under a tool until a time of time.monotonic(). "compile" runs no tool: it compiles the kernels."""
    log, begin = _log(logs, tool, program), time.monotonic()
    above = [] if tool == "compile" else [
        "compute-sanitizer", "--tool", tool, "--print-limit", "100000", "--target-processes", "all",
        "--show-backtrace", "no",  # it would take most of the time
        *(["--report-api-errors", "no"] if tool == "memcheck" else [])]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tools'}", "OPENBLAS_NUM_THREADS": "1"}
    few = ["--few"] if tool == "racecheck" and "--inside" in program.command else []
    left = min(SECONDS, end - begin)
    if left <= 0:
        return Outcome(Counter(), NOT_BEGUN, 0.0)
    with log.open("w") as out:
        process = subprocess.Popen([*above, *program.command, *few], stdout=out, stderr=subprocess.STDOUT, cwd=ROOT,
                                   env=environment, start_new_session=True)
        try:
            status = process.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the program below the tool, too
            status = NOT_ENDED
    return Outcome(found_in(log.read_text(errors="replace"), tool), status, time.monotonic() - begin)


def found_in(text: str, tool: str) -> Counter[tuple[str, str, str]]:
    """Count the reports of a log by tool, kernel and kind. The kernel is the first one that a report names."""
    reports: Counter[tuple[str, str, str]] = Counter()
    kind: str | None = None
    for line in text.splitlines():
        found = REPORT.match(line)
        if found or not line.startswith("==") or "SUMMARY" in line:
            reports += Counter({(tool, "?", kind): 1} if kind else {})
            kind = found[1] if found else None
        named = KERNEL.search(line)
        if kind and named:
            reports[tool, named[0], kind] += 1
            kind = None
    return reports


def never_loaded(logs: Path, wanted: list[Program]) -> list[str]:
    """Return the package's kernels that none of the programs loaded, by the logs of "compile"."""
    compiler = importlib.import_module("thdattn.jit.compiler")
    files = [_log(logs, "compile", program) for program in wanted]
    texts = [file.read_text(errors="replace") for file in files if file.exists()]
    loaded = {name for text in texts for line in text.splitlines() if LOADED in line for name in KERNEL.findall(line)}
    return sorted({name for file in compiler.device_files() for name in compiler.kernels_in(file)} - loaded)


def _log(logs: Path, tool: str, program: Program) -> Path:
    return logs / f"{tool} {program.name}.log".replace(" ", "_")


def _print_table(pairs: list[tuple[Program, str]], outcomes: list[Outcome]) -> int:
    total: Counter[tuple[str, str, str]] = Counter()
    for outcome in outcomes:
        total += outcome.reports
    unexplained = Counter({report: number for report, number in total.items() if report not in EXPLAINED})
    for title, reports in (("unexplained", unexplained), ("explained", total - unexplained)):
        print(f"{title}: {reports.total()} reports")
        for (tool, kernel, kind), number in sorted(reports.items()):
            reason = EXPLAINED.get((tool, kernel, kind), "")
            print(f"{tool:<11}{kernel:<34}{kind:<44}{number:>7}  {reason}".rstrip())
    failed = 0
    for (program, tool), outcome in zip(pairs, outcomes, strict=True):
        if outcome.status in (NOT_ENDED, NOT_BEGUN) or (outcome.status and not outcome.reports):
            failed += 1
            print(f"{tool} of {program.name} ended with status {outcome.status} after {outcome.seconds:.0f} s")
    print(f"{len(pairs)} programs, {failed} did not end well, the longest took "
          f"{max((outcome.seconds for outcome in outcomes), default=0):.0f} s")
    return int(bool(unexplained) or failed > 0)


if __name__ == "__main__":
    sys.exit(main())
