"""Records in JSON that several processes add to; that of soaks: packs, seeds and failures by machine and ranks."""

from __future__ import annotations

import datetime
import fcntl
import importlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ADDED = ("packs", "rounds", "near", "seconds")  # numbers that are summed over processes
LISTED = ("seeds", "failures")


def save(path: Path, engine: str, made: dict[str, Any]) -> None:
    """Add the work of one process to the entry of its machine; others may do so at the same time.

    Args:
        path: a JSON file, which need not exist.
        made: kind, ranks, and numbers and lists by the names of ADDED and LISTED.
    """
    sources, key = _sources(), f"{made['kind']}, {engine} on {_machine(engine)}, {made['ranks']}"
    with records(path) as found:
        entry = found.get(key, {})
        found[key] = merged(entry if entry.get("sources") == sources else {}, made, sources)


@contextmanager
def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of a JSON file, {} if there is none, and write it back, while other processes wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.parent.joinpath(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        yield found
        path.write_text(json.dumps(found, indent=1) + "\n")


def merged(entry: dict[str, Any], made: dict[str, Any], sources: dict[str, Any]) -> dict[str, Any]:
    """Return an entry with the work of one more process added."""
    total: dict[str, Any] = {"sources": sources, "date": now(), "ranks": made["ranks"]}
    total["processes"] = entry.get("processes", 0) + 1
    total |= {name: round(entry.get(name, 0) + made[name], 1) for name in ADDED if name in made}
    total["worst"] = max(entry.get("worst", 0.0), made.get("worst", 0.0))
    total["command"] = shlex.join(["python3", "-m", "thdattn", *sys.argv[1:]])  # the last process's
    total |= {name: [*entry.get(name, []), *made[name]] for name in LISTED if name in made}
    return total


def _machine(engine: str) -> str:
    if engine != "cuda":
        return f"{os.cpu_count()} CPU cores"
    cupy = importlib.import_module("cupy")
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    return f"{cupy.cuda.runtime.getDeviceCount()}x {name}"


def _sources() -> dict[str, Any]:
    """Return the commit, and the hash of the kernels' sources where CuPy is installed to make it."""
    try:
        kernels = importlib.import_module("thdattn.jit.compiler").source_hash()
    except Exception:  # CuPy without a driver raises more than ImportError
        kernels = None
    return {"commit": commit(), "kernel_sources": kernels}


def now() -> str:
    """Return the time, UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def commit() -> str | None:
    """Return $THDATTN_COMMIT, or the commit of this checkout, with "-dirty" if its files differ; None: unknown."""
    if said := os.environ.get("THDATTN_COMMIT"):
        return said
    what = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    command = ["git", "-C", str(Path(__file__).parent), *what]
    try:
        head = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return None
    return head.stdout.strip() or None
