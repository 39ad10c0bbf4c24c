"""The command line: what this machine has (info), and whether it computes right (check)."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import thdattn
from thdattn import kernel_cache, oracle
from thdattn.attention import choose_engine
from thdattn.comm import Comm

Array = NDArray[Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: as after `python -m thdattn`; those of the process by default.

    Returns:
        The exit status: 0, or 1 if `check` found a wrong result.
    """
    parser = argparse.ArgumentParser(prog="python -m thdattn", description=thdattn.__doc__)
    parser.add_argument("--version", action="version", version=f"thdattn {thdattn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, GPUs, where every library came from, and what is missing")
    checker = commands.add_parser(
        "check", help="run packs and masks of every kind against float64; under mpiexec on the real ranks"
    )
    checker.add_argument("--engine", choices=("auto", "cuda", "reference"), default="auto")
    chosen = parser.parse_args(arguments)
    return info() if chosen.command == "info" else check(chosen.engine)


# ------------------------------------------------------------------------------------------------ info


class Library(NamedTuple):
    """One row of `info`: version is None if the library cannot be used, and `where` then says why."""

    name: str
    version: str | None
    where: str


def info() -> int:
    """Print what this machine has and what is missing; needs nothing but NumPy and ml_dtypes."""
    try:
        comm = thdattn.comm.init("auto")
        if comm.rank != 0:
            return 0
        engine, why = choose_engine("auto", comm)
        ranks = f"{comm.size}, backend {comm.name!r}"
        chosen = f"{engine.name}: {why}"
    except RuntimeError as error:
        ranks = chosen = f"none: {error}"
    packages = [
        Library("thdattn", thdattn.__version__, str(Path(thdattn.__file__).parent)),
        Library("Python", sys.version.split()[0], sys.executable),
        Library("numpy", np.__version__, np.__file__),
        Library("ml_dtypes", ml_dtypes.__version__, ml_dtypes.__file__),
    ]
    driver = _cuda_driver()
    cuda, mpi = _cuda_libraries(), _mpi_libraries()
    for library in (*packages, driver, *cuda, *mpi):
        print(f"{library.name:<13} {library.version or '-':<11} {library.where}")
    for label, text in (("GPU", gpu) for gpu in _gpus()):
        print(f"{label:<13} {text}")
    print(f"{'kernel cache':<13} {_kernel_cache()}")
    print(f"{'ranks':<13} {ranks}")
    print(f"{'engine':<13} {chosen}")
    missing = [library.name for library in (*cuda, *mpi) if library.version is None]
    for remedy in _remedies(missing, driver.version):
        print(f"{'missing':<13} {remedy}")
    return 0


def _remedies(missing: Sequence[str], cuda_version: str | None) -> Iterator[str]:
    """What to install for the libraries that are missing, given the CUDA version of the driver."""
    if cuda_version is None:
        yield "NVIDIA driver: without a GPU the reference engine (NumPy) computes everything"
    cuda = [name for name in missing if name in ("CuPy", "CUDA runtime", "NVRTC", "NCCL")]
    if cuda:
        extra = "cuda12" if cuda_version is not None and cuda_version.startswith("12.") else "cuda13"
        yield f"{', '.join(cuda)}: pip install 'thdattn[{extra}]'" + ("" if cuda_version else " (for a GPU)")
    mpi = [name for name in missing if name in ("mpi4py", "MPI", "mpiexec")]
    if mpi:
        yield (f"{', '.join(mpi)}: pip install 'thdattn[mpich]' brings MPI along, 'thdattn[mpi]' uses this machine's; "
               f"one rank and simulated ranks need neither")


def _cuda_driver() -> Library:
    """The driver and the newest CUDA version that it runs."""
    name = "CUDA driver"
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError) as error:
        return Library(name, None, str(error))
    return Library(name, _dotted(version.value), _loaded_from("libcuda.so"))


def _cuda_libraries() -> list[Library]:
    def cupy() -> Library:
        import cupy

        return Library("CuPy", cupy.__version__, cupy.__file__)

    def runtime() -> Library:
        from cupy import cuda

        return Library("CUDA runtime", _dotted(cuda.get_local_runtime_version()), _loaded_from("libcudart.so"))

    def compiler() -> Library:
        from cupy.cuda import nvrtc

        return Library("NVRTC", ".".join(map(str, nvrtc.getVersion())), _loaded_from("libnvrtc.so"))

    def nccl() -> Library:
        from cupy.cuda import nccl

        if not nccl.available:
            raise RuntimeError("CuPy finds no libnccl.so")
        number = nccl.get_version()
        return Library(
            "NCCL", f"{number // 10000}.{number // 100 % 100}.{number % 100}", _loaded_from("libnccl.so")
        )

    probes = {"CuPy": cupy, "CUDA runtime": runtime, "NVRTC": compiler, "NCCL": nccl}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns of what `missing` says with a remedy
        return [_attempt(name, probe) for name, probe in probes.items()]


def _attempt(name: str, probe: Callable[[], Library]) -> Library:
    """NOTE: libraries that are half there raise anything, RuntimeError and OSError too, not only ImportError."""
    try:
        return probe()
    except Exception as error:
        return Library(name, None, _one_line(f"{type(error).__name__}: {error}"))


_MPI_PROBE = """
import json, mpi4py
print(json.dumps(["mpi4py", mpi4py.__version__, mpi4py.__file__]))
mpi4py.rc.initialize = False
from mpi4py import MPI
version = MPI.Get_library_version().replace("\\n", " ").replace("\\t", " ").replace(",", " ").replace(" Version:", "")
name, number = version.replace("Open MPI", "OpenMPI").split()[:2]
mapped = [line.split()[-1] for line in open("/proc/self/maps") if "/libmpi" in line]
print(json.dumps(["MPI", name + " " + number.lstrip("v"), mapped[0] if mapped else ""]))
"""


def _mpi_libraries() -> list[Library]:
    """mpi4py, the MPI library and its launcher, seen from a process of its own, as loading MPI may end a process."""
    command = [sys.executable, "-c", _MPI_PROBE]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        output, errors = probe.stdout, probe.stderr.strip() or f"exit status {probe.returncode}"
    except subprocess.TimeoutExpired:
        output, errors = "", "no answer within 60 s"
    found = [Library(*json.loads(line)) for line in output.splitlines() if line.startswith("[")]
    for name in ("mpi4py", "MPI")[len(found) :]:
        found.append(Library(name, None, _one_line(errors.splitlines()[-1])))
    beside = Path(sys.executable).with_name("mpiexec")
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
    found.append(Library("mpiexec", "found" if launcher else None, launcher or "not on PATH"))
    return found


def _gpus() -> list[str]:
    """Every GPU with its name, compute capability and memory, or why there is none."""
    try:
        from cupy.cuda import runtime

        found = []
        for device in range(runtime.getDeviceCount()):
            properties = runtime.getDeviceProperties(device)
            capability = f"{properties['major']}.{properties['minor']}"
            usable = "" if properties["major"] >= 8 else ", too old: thdattn needs 8.0"
            memory = properties["totalGlobalMem"] / 2**30
            found.append(
                f"{device}: {properties['name'].decode()}, compute capability {capability}, {memory:.0f} GiB{usable}"
            )
        return found or ["none"]
    except Exception as error:
        return [_one_line(f"none ({type(error).__name__}: {error})")]


def _kernel_cache() -> str:
    path = kernel_cache.cache_dir()
    try:
        with kernel_cache.folder():
            kernels = [file.stat().st_size for file in path.glob("*.cubin")]
    except FileNotFoundError:
        kernels = []
    except OSError as error:
        return f"{path} cannot be used: {error.strerror or error}; or set THDATTN_CACHE_DIR to another directory"
    return f"{path} ({len(kernels)} kernels, {sum(kernels) / 1e6:.1f} MB; $THDATTN_CACHE_DIR moves it)"


def _loaded_from(library: str) -> str:
    """The file of a shared library that this process has loaded; empty if it has not, or if /proc does not tell."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ""
    return next((line[line.index("/") :] for line in maps if f"/{library}" in line), "")


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


# ------------------------------------------------------------------------------------------------ check


@dataclass(frozen=True)
class Case:
    """A pack, a mask and a way to spread them. Padding and whatever lies between documents hold NaN.

    ranks: simulated ranks; under mpiexec the real ones are used.
    multiple: documents are padded to a multiple of this; None is 2 * ranks, what dual_chunk needs.
    heads: query heads, kv heads. widths: head_dim, v_head_dim.
    """

    name: str
    lengths: tuple[int, ...]
    ranks: int = 1
    heads: tuple[int, int] = (4, 4)
    widths: tuple[int, int] = (64, 64)
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    sharding: str = "dual_chunk"
    multiple: int | None = None
    deterministic: bool = False


RAGGED = (130, 7, 261, 33, 1, 64)

CASES = (
    Case("one document", (300,)),
    Case("ragged lengths", RAGGED, ranks=2),
    Case("grouped-query heads 8/2", RAGGED, ranks=4, heads=(8, 2)),
    Case("full mask", RAGGED, ranks=2, causal=False),
    Case("causal window of 50", RAGGED, ranks=4, window=(50, 0)),
    Case("window 20 back, 9 ahead", RAGGED, ranks=4, causal=False, window=(20, 9)),
    Case("empty documents", (0, 90, 0, 0, 41, 0), ranks=2, heads=(4, 2)),
    Case("fewer tokens than ranks", (1, 0, 2), ranks=4),
    Case("contiguous, padded to 3", RAGGED, ranks=4, sharding="contiguous", multiple=3),
    Case("contiguous, no padding", RAGGED, ranks=4, sharding="contiguous", multiple=1, causal=False),
    Case("head dim 128, deterministic", RAGGED, ranks=2, heads=(4, 1), widths=(128, 128), deterministic=True),
    Case("head dims 192 and 128", RAGGED, ranks=2, heads=(4, 2), widths=(192, 128)),
)

NAMES = ("out", "dq", "dk", "dv")


class Verdict(NamedTuple):
    """One result of one case against its budget, see oracle.within_budget."""

    good: bool
    error: float
    budget: float


def check(engine: str = "auto") -> int:
    """Hold every case against the float64 oracle and print a table; under mpiexec only rank 0 prints.

    Args:
        engine: as in CPAttention.

    Returns:
        The exit status: 0 if every error is within its budget and padding is exactly 0, else 1.
    """
    with thdattn.comm.init("auto") as comm:
        module, why = choose_engine(engine, comm)
        shown = comm.rank == 0
        if shown:
            print(f"engine  {module.name}: {why}")
            print(f"ranks   {f'{comm.size}, backend {comm.name!r}' if comm.size > 1 else 'simulated in this process'}")
            print("padding is NaN on purpose; results must be exactly 0 there\n")
            print(f"{'largest error/budget against float64':<38} ranks dtype     "
                  + "".join(f"{name:<14}" for name in NAMES))
        dtypes = ("bfloat16", "float16") if module.name == "cuda" else ("bfloat16", "float32")
        failed = 0
        for case in CASES:
            for dtype in dtypes:
                verdicts, ranks = _judge(comm, case, dtype, module.name)
                good = all(verdict.good for verdict in verdicts)
                failed += not good
                if shown:
                    numbers = "".join(f"{_short(v.error)}/{_short(v.budget)}".ljust(14) for v in verdicts)
                    print(f"{case.name:<38} {ranks:>5} {dtype:<9} {numbers}{'PASS' if good else 'FAIL'}", flush=True)
        if shown:
            print(f"{failed} of {len(CASES) * len(dtypes)} FAILED" if failed else "all PASS")
    return 1 if failed else 0


def _judge(comm: Comm, case: Case, dtype: str, engine: str) -> tuple[list[Verdict], int]:
    """The verdicts on out, dq, dk, dv (on rank 0 only), and on how many ranks they were computed."""
    ranks = comm.size if comm.size > 1 else case.ranks
    batch = thdattn.PackedBatch.from_lengths(case.lengths, case.multiple or 2 * ranks)
    rng = np.random.default_rng(len(case.name))
    (num_heads, num_kv_heads), (head_dim, v_head_dim) = case.heads, case.widths
    inputs = [
        batch.pack([rng.standard_normal((n, heads, width)).astype(dtype) for n in case.lengths], fill=np.nan)
        for heads, width in (
            (num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, v_head_dim), (num_heads, v_head_dim)
        )
    ]
    compute = partial(_compute, case=case, batch=batch, inputs=inputs, dtype=dtype, engine=engine)
    actual = compute(comm) if comm.size > 1 else thdattn.comm.run_local(ranks, compute, timeout=600)[0]
    if comm.rank != 0:
        return [], ranks
    how: dict[str, Any] = {"causal": case.causal, "window": case.window}
    truth = oracle.packed_attention(batch, *inputs, **how)
    baseline = oracle.packed_attention(batch, *inputs, **how, rounding=dtype)
    padding = np.isnan(inputs[0][:, 0, 0].astype(np.float32))
    verdicts = []
    for name, x in zip(NAMES, actual, strict=True):
        good, error, budget = oracle.within_budget(x, getattr(truth, name), getattr(baseline, name))
        verdicts.append(Verdict(good and not x[padding].any(), error, budget))
    return verdicts, ranks


def _compute(
    comm: Comm, case: Case, batch: thdattn.PackedBatch, inputs: Sequence[Array], dtype: str, engine: str
) -> list[Array]:
    """out, dq, dk, dv of the whole pack, in sequence order on the host, from this rank's share of the work."""
    attn = thdattn.CPAttention(
        comm, case.heads[0], case.widths[0], case.heads[1], case.widths[1], case.causal, case.window, None, dtype,
        case.deterministic, engine,
    )  # fmt: skip
    plan = attn.plan(batch, case.sharding)
    xp = importlib.import_module("cupy" if engine == "cuda" else "numpy")
    q, k, v, dout = (xp.asarray(plan.sharding.shard(x, comm.rank)) for x in inputs)
    out, saved = attn.forward(q, k, v, plan)
    results = []
    for x in (out, *attn.backward(dout, saved)):
        gathered = xp.empty((comm.size * len(x), *x.shape[1:]), x.dtype)
        comm.all_gather(xp.ascontiguousarray(x), gathered)
        on_host = gathered.get() if engine == "cuda" else gathered
        results.append(plan.sharding.unshard(np.split(on_host, comm.size)))
    return results


def _short(number: float) -> str:
    """Two digits: 3.9e-3."""
    return f"{number:.1e}".replace("e-0", "e-").replace("e+0", "e+")
