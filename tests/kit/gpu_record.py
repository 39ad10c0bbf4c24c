"""The record of GPU tests: which passed on which machine, which were skipped and why, and how long each file took.

One entry per machine in a JSON file. It holds the runs of one state of the sources: another run of the same command
replaces the one before, and the first run on other sources, or another driver, begins anew.
"""

from __future__ import annotations

import os
import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from thdattn.cli.record import commit, now, records

OUTCOMES = {"passed": "passed", "failed": "failed", "error": "failed", "skipped": "skipped"}  # of pytest -> of a record


def run(command: str, stats: Mapping[str, Iterable[Any]]) -> dict[str, Any]:
    """Summarise the tests of one run.

    Args:
        command: what was run.
        stats: pytest's reports by outcome, as its terminal reporter keeps them.
    """
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    failed, skipped = [], defaultdict(Counter)
    for outcome, reports in stats.items():
        for report in reports:
            file, _, name = getattr(report, "nodeid", "").partition("::")
            seconds[file] += getattr(report, "duration", 0)
            if outcome not in OUTCOMES:
                continue  # setup and teardown, whose time counts
            counts[file][OUTCOMES[outcome]] += 1
            if OUTCOMES[outcome] == "failed":
                failed.append(report.nodeid)
            elif outcome == "skipped":  # cases of one test are counted
                skipped[_reason(report)][f"{file}::{name.partition('[')[0]}" if name else file] += 1
    total = sum(counts.values(), Counter())
    return {
        "command": command,
        "commit": commit(),
        "date": now(),
        **{outcome: total[outcome] for outcome in ("passed", "failed", "skipped")},
        "seconds": round(seconds.total()),
        "files": {file: {**counts[file], "seconds": round(seconds[file], 1)} for file in sorted(counts)},
        "failed_tests": sorted(failed),
        "skipped_tests": {reason: dict(sorted(tests.items())) for reason, tests in sorted(skipped.items())},
    }


def _reason(report: Any) -> str:
    """Return the reason of a skip, without its place."""
    where = report.longrepr
    return str(where[2] if isinstance(where, tuple) else where).removeprefix("Skipped: ")


def save(path: Path, machine: dict[str, Any], made: dict[str, Any]) -> None:
    """Add a run to the entry of its machine; runs on other GPUs may end at the same time."""
    with records(path) as found:
        name = f"{machine['num_gpus']}x {machine['gpu']}{', shared by ranks' if machine.get('shared') else ''}"
        entry = found.get(name, {})
        same = all(entry.get(key) == machine[key] for key in machine)
        runs = [run for run in entry.get("runs", []) if same and run["command"] != made["command"]]
        found[name] = {**machine, "runs": [*runs, made]}


def machine() -> dict[str, Any] | None:
    """Return the GPUs, the software under the kernels, and the hash of their sources; None without a GPU."""
    try:
        import cupy

        if not cupy.is_available():
            return None
        from thdattn.cli import info
        from thdattn.comm.nccl.gpus import SHARE
        from thdattn.jit import compiler
    except Exception:  # CuPy without a driver raises more than ImportError
        return None
    runtime = cupy.cuda.runtime
    return {
        "gpu": runtime.getDeviceProperties(0)["name"].decode(),
        "num_gpus": runtime.getDeviceCount(),
        "shared": os.environ.get(SHARE) == "1",
        "driver": info.driver_version(),
        "cuda_runtime": runtime.runtimeGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "python": platform.python_version(),
        "kernel_sources": compiler.source_hash(),
    }
