"""Fixtures that poison memory, and the record of what passed on which GPU."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
from pathlib import Path
from typing import Any

# Simulated ranks are threads already. OpenBLAS threads that spin on busy cores made single tests 30 times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np  # reads the variable when it is loaded
import pytest

RECORD = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "gpu_tests.json"


@pytest.fixture(scope="session")
def cupy():
    """CuPy on a machine with a GPU; skips the test elsewhere."""
    cupy = pytest.importorskip("cupy")
    if not cupy.is_available():
        pytest.skip("needs a GPU")
    return cupy


@pytest.fixture
def poisoned_host(monkeypatch):
    """Every allocation of the NumPy engine and of its plans starts as bytes all ones: NaN, or -1."""
    from thdattn import reference

    def poisoned(shape, dtype):
        return np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xFF, np.uint8).view(dtype).reshape(shape)

    monkeypatch.setattr(reference, "empty", poisoned)


@pytest.fixture
def poisoned_gpu(cupy, monkeypatch):
    """The same for the CUDA engine, whose own modules allocate by launch.empty."""
    from thdattn import ops
    from thdattn.ops import launch

    def poisoned(shape, dtype):
        array = cupy.empty(shape, dtype)
        if array.size:
            array.data.memset_async(0xFF, array.nbytes)
        return array

    for module in (ops, launch):
        monkeypatch.setattr(module, "empty", poisoned)


# --- the record ------------------------------------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """After `pytest -m gpu` on a machine with a GPU, keep the outcome with what it was measured on."""
    if config.option.markexpr != "gpu" or config.option.collectonly:
        return
    machine = _machine()
    if machine is None:
        return
    count = {kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")}
    record = {
        **machine,
        "commit": os.environ.get("THDATTN_COMMIT") or _head(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "passed": count["passed"],
        "failed": count["failed"] + count["error"],
        "skipped": count["skipped"],
        "command": shlex.join(["python3", "-m", "pytest", *config.invocation_params.args]),
    }
    # One entry per machine, so that a run on another one does not wipe it out.
    records = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    records[f"{machine['num_gpus']}x {machine['gpu']}"] = record
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(records, indent=2, sort_keys=True) + "\n")
    terminalreporter.write_line(f"wrote {RECORD.relative_to(RECORD.parents[2])}")


def _machine() -> dict[str, Any] | None:
    """The GPU, the software under the kernels, and the hash of their sources; None without a GPU."""
    try:
        import cupy

        if not cupy.is_available():
            return None
        from thdattn import jit
    except Exception:
        return None
    runtime = cupy.cuda.runtime
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=30, check=False,
    ).stdout.split()  # fmt: skip
    return {
        "kernel_sources": jit.source_hash(),
        "gpu": runtime.getDeviceProperties(0)["name"].decode(),
        "num_gpus": runtime.getDeviceCount(),
        "driver": driver[0] if driver else f"CUDA {runtime.driverGetVersion()}",
        "cuda_runtime": runtime.runtimeGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
    }


def _head() -> str | None:
    # The commit, with "-dirty" where the tree is not what was committed; kernel_sources says what was tested.
    what = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    command = ["git", "-C", str(Path(__file__).parent), *what]
    try:
        head = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return None
    return head.stdout.strip() or None
