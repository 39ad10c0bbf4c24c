"""Print this machine's libraries and GPUs, where they came from, and what is missing: python -m thdattn info."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import thdattn
from thdattn.comm import Comm, launcher
from thdattn.comm.nccl.comm import NcclComm
from thdattn.engines.select import choose_engine
from thdattn.install import remedy
from thdattn.jit import cache


class Library(NamedTuple):
    """Library or driver in the table; version is None if it cannot be used, and `where` then tells why."""

    name: str
    version: str | None
    where: str


def info() -> int:
    """Print what this machine has and what is missing; needs NumPy and ml_dtypes only."""
    try:
        comm = thdattn.comm.init("auto")
        hosts = comm._gather_values(launcher.hostname())
        if comm.rank != 0:
            return 0
        engine, why = choose_engine("auto", comm)
        ranks = f"{comm.size}, backend {comm.name!r}"
        chosen = f"{engine.name}: {why}"
        machines, transport = _machines(hosts), _transport(comm)
    except RuntimeError as error:
        ranks = machines = transport = chosen = f"none: {error}"
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
    print(f"{'machines':<13} {machines}")
    print(f"{'transport':<13} {transport}")
    print(f"{'engine':<13} {chosen}")
    missing = [library.name for library in (*cuda, *mpi) if library.version is None]
    for text in _remedies(missing, driver.version):
        print(f"{'missing':<13} {text}")
    return 0


def _remedies(missing: Sequence[str], cuda_version: str | None) -> Iterator[str]:
    """Yield what to install for the missing libraries, given the CUDA version of the driver."""
    if cuda_version is None:
        yield "NVIDIA driver: without a GPU, the reference engine (NumPy) computes"
    cuda = [name for name in missing if name in ("CuPy", "CUDA runtime", "NVRTC", "NCCL")]
    if cuda:
        extra = "cuda12" if cuda_version is not None and cuda_version.startswith("12.") else "cuda13"
        yield f"{', '.join(cuda)}: {remedy(extra)}" + ("" if cuda_version else " (for a GPU)")
    mpi = [name for name in missing if name in ("mpi4py", "MPI", "mpiexec")]
    if mpi:
        yield (f"{', '.join(mpi)}: {remedy('mpich')} brings its own MPI; [mpi] in place of [mpich] uses this "
               f"machine's. One rank and simulated ranks need neither")


def driver_version() -> str:
    """Return the version of the NVIDIA driver as nvidia-smi prints it, "580.159.04"; "none" without a driver.

    Some containers lack the driver's management library; the result is then the newest CUDA it runs: "CUDA 13.0".
    """
    text = ctypes.create_string_buffer(80)
    with contextlib.suppress(OSError, AttributeError):
        management = ctypes.CDLL("libnvidia-ml.so.1")
        management.nvmlInit_v2()
        management.nvmlSystemGetDriverVersion(text, len(text))  # leaves it empty if there is no driver
        management.nvmlShutdown()
    if text.value:
        return text.value.decode()
    try:
        return f"CUDA {_newest_cuda()}"
    except (OSError, AttributeError):
        return "none"


def _newest_cuda() -> str:
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return _dotted(version.value)


def _cuda_driver() -> Library:
    """Return the newest CUDA version that the driver runs, and the driver."""
    name = "CUDA driver"
    try:
        return Library(name, _newest_cuda(), f"{_loaded_from('libcuda.so')}, NVIDIA driver {driver_version()}")
    except (OSError, AttributeError) as error:
        return Library(name, None, str(error))


def _cuda_libraries() -> list[Library]:
    def nccl() -> str:
        module = load("cupy.cuda.nccl")
        if not module.available:
            raise RuntimeError("CuPy finds no libnccl.so")
        number = module.get_version()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    load: Callable[[str], Any] = importlib.import_module
    probes = {  # version and place
        "CuPy": lambda: (load("cupy").__version__, load("cupy").__file__),
        "CUDA runtime": lambda: (_dotted(load("cupy").cuda.get_local_runtime_version()), _loaded_from("libcudart.so")),
        "NVRTC": lambda: (".".join(map(str, load("cupy").cuda.nvrtc.getVersion())), _loaded_from("libnvrtc.so")),
        "NCCL": lambda: (nccl(), _loaded_from("libnccl.so")),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns of what `missing` says with a remedy
        return [_attempt(name, probe) for name, probe in probes.items()]


def _attempt(name: str, probe: Callable[[], tuple[str, str]]) -> Library:
    """Run a probe; half-installed libraries raise RuntimeError and OSError too, not only ImportError."""
    try:
        return Library(name, *probe())
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
    """Find mpi4py, the MPI library and its launcher, in a process of its own, as loading MPI may end a process."""
    command = [sys.executable, "-c", _MPI_PROBE]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        output, errors = probe.stdout, probe.stderr.strip() or f"exit status {probe.returncode}"
    except subprocess.TimeoutExpired:
        output, errors = "", "no answer within 60 s"
    found = [Library(*json.loads(line)) for line in output.splitlines() if line.startswith("[")]
    for name in ("mpi4py", "MPI")[len(found) :]:
        found.append(Library(name, None, _one_line(errors.splitlines()[-1])))
    mpiexec = launcher.mpiexec()
    found.append(Library("mpiexec", "found" if mpiexec else None, mpiexec[0] if mpiexec else "not on PATH"))
    return found


def _gpus() -> list[str]:
    """List every GPU with its name, compute capability and memory, or the reason why there is none."""
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


def _transport(comm: Comm) -> str:
    """Tell how these ranks exchange keys and values; for one process, how ranks on this machine would."""
    if isinstance(comm, NcclComm):
        if comm.reads_peers:
            return "peer: the GPUs read each other's memory"
        how = "beside kernels" if comm.overlaps else "before and after kernels"
        inside = "; groups of comm.split within a machine try peer memory" if comm.spans_machines else ""
        return f"nccl, {how}: {comm.no_peer_memory}{inside}"
    if comm.size > 1:
        return f"host arrays: {comm.no_gpus or f'a comm of backend {comm.name!r} moves no others'}"
    try:
        from cupy.cuda import runtime

        count = runtime.getDeviceCount()
        blind = [pair for pair in permutations(range(count), 2) if not runtime.deviceCanAccessPeer(*pair)]
    except Exception:
        count = 0
    if count == 0:
        return "host arrays: there is no GPU"
    if count == 1:
        return "peer or nccl: start several ranks with mpiexec to find out"
    if blind:
        others = f" (pairs like this: {len(blind)})" if len(blind) > 1 else ""
        return "nccl between ranks: GPU {} cannot read the memory of GPU {}".format(*blind[0]) + others
    return f"peer between ranks: GPUs 0 to {count - 1} read each other's memory"


def _machines(hosts: Sequence[str]) -> str:
    """List the machines and the ranks of each, given every rank's machine."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return f"{len(ranks)}: " + ", ".join(f"{host} (rank{'s' * (len(x) > 1)} {_runs(x)})" for host, x in ranks.items())


def _runs(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as "0-3, 8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _kernel_cache() -> str:
    path = cache.cache_dir()
    try:
        with cache.folder():
            kernels = [file.stat().st_size for file in path.glob("*.cubin")]
    except FileNotFoundError:
        kernels = []
    except OSError as error:
        return f"{path} cannot be used: {error.strerror or error}; or set THDATTN_CACHE_DIR to another directory"
    return f"{path} ({len(kernels)} kernels, {sum(kernels) / 1e6:.1f} MB; $THDATTN_CACHE_DIR moves it)"


def _loaded_from(library: str) -> str:
    """Return the file of a shared library that this process has loaded; empty if none is known."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ""
    return next((line[line.index("/") :] for line in maps if f"/{library}" in line), "")


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
