"""Fixtures that poison memory and share it with other workers, and the record of what passed on which GPU."""

from __future__ import annotations

import fcntl
import gc
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

# Tests run side by side, and their ranks are threads or processes: none may spin on a core that others need, as threads
# of OpenBLAS and PyTorch do, and ranks of MPICH in a collective.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")

import cases
import gpu_record
import numpy as np  # reads the first when it is loaded
import pytest

from thdattn.fuzz import runs

RECORD = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "gpu_tests.json"


@pytest.fixture(scope="session")
def cupy():
    """Import CuPy on a machine with a GPU; skip the test elsewhere."""
    cupy = pytest.importorskip("cupy")
    if not cupy.is_available():
        pytest.skip("needs a GPU")
    return cupy


@pytest.fixture(autouse=True)
def unused_memory(request):
    """Give the GPU, which workers share, the memory that a test leaves in CuPy's pool, unless it is little."""
    yield
    cupy = sys.modules.get("cupy") if request.node.get_closest_marker("gpu") else None
    if cupy is not None and cupy.is_available() and cupy.get_default_memory_pool().free_bytes() > 2**30:
        cupy.get_default_memory_pool().free_all_blocks()


@pytest.fixture
def much_memory(cupy, tmp_path_factory):
    """Wait until no other worker runs a test that needs tens of GiB of the GPU."""
    run = tmp_path_factory.getbasetemp().parent  # of all workers of xdist
    with (run / "much_memory.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        cupy.get_default_memory_pool().free_all_blocks()


@pytest.fixture
def torch_cuda(cupy):
    """Return the name of a GPU that torch and CuPy share; skip the test elsewhere."""
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("needs torch with CUDA")
    return "cuda:0"


@pytest.fixture
def poisoned_host():
    """Fill every allocation of the NumPy engine and of its plans with NaN, or -1."""
    with runs.poisoned("reference"):
        yield


@pytest.fixture
def poisoned_gpu(cupy):
    """Fill every allocation of the CUDA engine with NaN, or -1."""
    with runs.poisoned("cuda"):
        yield


@pytest.fixture(params=["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request):
    """Run on each engine in turn, the CUDA engine where there is a GPU; every allocation starts as NaN, or -1.

    The parameter "portable" is the CUDA engine with its kernels for every GPU.
    """
    if request.param == "reference":
        request.getfixturevalue("poisoned_host")
        return cases.Engine("reference", np)
    request.getfixturevalue("poisoned_gpu")
    if request.param == "portable":
        request.getfixturevalue("portable")
    return cases.Engine("cuda", request.getfixturevalue("cupy"))


@pytest.fixture
def unnoticed(cupy, monkeypatch):
    """Keep the host from learning that lengths on a GPU are wrong, so that calls with them return their results."""
    from thdattn.engines.cuda.lengths import DeviceLengths

    monkeypatch.setattr(DeviceLengths, "check", lambda lengths, wait: None)


@pytest.fixture
def portable(cupy):
    """Run the kernels for every GPU, whatever there is for this one."""
    with runs.portable_kernels():
        yield


@pytest.fixture(params=["hopper", "portable"])
def kernels(request, cupy):
    """Run each set of kernels in turn, where there are both."""
    from thdattn.engines.cuda import launch

    if request.param == "portable":
        request.getfixturevalue("portable")
    elif not launch.this_gpu().sm90:
        pytest.skip("needs a Hopper GPU")
    return request.param


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Make edited(file, edit): compile kernels from a copy of the sources whose `file` is edit(text) from then on."""
    from thdattn.jit import compiler

    def edit_copy(file, edit):
        folder = tmp_path / "thdattn"
        shutil.copytree(compiler.FOLDER, folder)
        (folder / file).write_text(edit((folder / file).read_text()))
        monkeypatch.setattr(compiler, "FOLDER", folder)
        compiler.forget_files()

    yield edit_copy
    compiler.forget_files()


def pytest_collection_finish() -> None:
    """Keep modules and tests out of garbage collections, which many tests ask for."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Record the outcome of `pytest -m gpu` on a machine with a GPU, with what it was measured on."""
    machine = None
    of_a_worker = hasattr(config, "workerinput")  # of xdist, which knows its own tests alone
    if config.option.markexpr == "gpu" and not config.option.collectonly and not of_a_worker:
        machine = gpu_record.machine()
    if machine is not None:
        command = shlex.join(["python3", "-m", "pytest", *config.invocation_params.args])
        gpu_record.save(RECORD, machine, gpu_record.run(command, terminalreporter.stats))
        terminalreporter.write_line(f"wrote {RECORD.relative_to(RECORD.parents[2])}")
