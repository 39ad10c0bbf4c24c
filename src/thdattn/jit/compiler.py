"""Compile CUDA source with NVRTC, cache the cubin on disk, load it, and launch it.

NVRTC gets the files that a kernel includes from memory. It needs no host compiler and no other headers, and builds a
cubin for any architecture on a machine without a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver, function, nvrtc

from thdattn import spans
from thdattn.jit import cache, structs
from thdattn.kernels import configs, generated

log = logging.getLogger("thdattn")

FOLDER = Path(__file__).parents[1]
OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")


def device_arch() -> str:
    """Return NVRTC's name of the current device's architecture; sm_90a on Hopper, for wgmma and setmaxnreg."""
    capability = cupy.cuda.Device().compute_capability
    return "sm_90a" if capability == "90" else f"sm_{capability}"


# Constants of device code that Python repeats, by their names there; a function takes the columns of a row.
CONSTANTS: dict[str, int | Callable[[int], int]] = {
    "kMaxRanks": structs.MAX_RANKS, "kChunks": structs.CHUNKS, "kMaxSlices": structs.MAX_SLICES, "kPad": configs.PAD,
    "kSlab": configs.SLAB, "kMaxKvSplits": configs.MAX_KV_SPLITS, "kMaxSplits": configs.Decode.max_splits,
    "kTreeGroup": configs.TREE_GROUP, "kBehindKeys": configs.BEHIND_KEYS,
    "slab_of": configs.slab_of, "lanes_of": configs.lanes_of,
}
GENERATED: dict[str, Callable[[], str]] = {
    "generated/struct_checks.cuh": lambda: structs.checks() + generated.constant_checks(CONSTANTS),
    "generated/wgmma.cuh": lambda: generated.wrappers(configs.WGMMA_COLUMNS),
}
_INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)
_KERNEL = re.compile(r"__global__ void(?: __launch_bounds__\([^;{]*?\))? (thd_\w+)\(")
_IGNORED = re.compile(r"//[^\n]*|^#(?:include|pragma once)[^\n]*", re.MULTILINE)


def files(name: str) -> dict[str, str]:
    """Return the texts that NVRTC gets for a C++ name expression of a kernel, by path below the package.

    The file that defines the kernel comes last, and each file after those that it includes.
    """
    texts: dict[str, str] = {}
    _add(_file_of(name.partition("<")[0]), texts)
    return texts


def _add(file: str, texts: dict[str, str]) -> None:
    text = _text(file)
    for included in _INCLUDE.findall(text):
        if included not in texts:
            _add(included, texts)
    texts[file] = text


@functools.cache
def _file_of(kernel: str) -> str:
    """Return the only file that defines a kernel."""
    (file,) = (file for file in device_files() if kernel in kernels_in(file))
    return file


def kernels_in(file: str) -> list[str]:
    """Return the names of the kernels that a file defines."""
    return _KERNEL.findall(_text(file))


@functools.cache
def _text(file: str) -> str:
    return GENERATED[file]() if file in GENERATED else (FOLDER / file).read_text()


def device_files() -> list[str]:
    """Return the paths of all files of device code, relative to the package."""
    return sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.cu*"))


def forget_files() -> None:
    """Forget the texts of device code, so that they are read again."""
    for known in (_text, _file_of):
        known.cache_clear()


def source_hash() -> str:
    """Return 16 hex digits that identify the device code, for records of tests and measurements.

    They depend only on the compiled text, not on comments, nor on names and folders of files.
    """
    texts = (_IGNORED.sub("", _text(file)) for file in [*GENERATED, *device_files()])
    lines = ("\n".join(filter(None, map(str.rstrip, text.split("\n")))) for text in texts)
    digests = sorted(hashlib.sha256(text.encode()).digest() for text in lines)
    return hashlib.sha256(b"".join(digests)).hexdigest()[:16]


def compile_kernel(name: str, arch: str) -> tuple[bytes, str, str]:
    """Compile one kernel with NVRTC. It needs no GPU.

    Args:
        name: a C++ name expression, for instance "thd_reorder<true>".
        arch: "sm_80", "sm_90a", ...

    Returns:
        (cubin, lowered name, compiler log with registers and spills).

    Raises:
        RuntimeError: NVRTC refused the source; its log is the message.
    """
    texts = {file.encode(): text.encode() for file, text in files(name).items()}
    *_, last = texts
    program = nvrtc.createProgram(f'#include "{last.decode()}"\n', "thdattn", tuple(texts.values()), tuple(texts))
    try:
        nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, (f"-arch={arch}", *OPTIONS))
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"{name} for {arch}: {error}\n{nvrtc.getProgramLog(program)}") from None
        # CuPy drops the last byte of a cubin, which disassemblers miss in a file.
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getLoweredName(program, name), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def cached_cubin(name: str, arch: str) -> tuple[bytes, str]:
    """Return (cubin, lowered name) of a kernel from the disk cache; compile it on a miss.

    The key has source, options, name, architecture and NVRTC's version.
    """
    key = repr((files(name), OPTIONS, name, arch, nvrtc.getVersion()))
    entry = f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"
    kept = cache.read(entry)
    if kept is not None:
        lowered, _, cubin = kept.partition(b"\0")
        return cubin, lowered.decode()
    start = time.perf_counter()
    cubin, low, compiler_log = compile_kernel(name, arch)
    registers = re.search(re.escape(low) + r"'.*?Used (\d+) registers", compiler_log, re.DOTALL)
    log.info("compiled %s for %s in %.1f s, %s registers", name, arch, time.perf_counter() - start,
             registers[1] if registers else "?")
    cache.write(entry, low.encode() + b"\0" + cubin)
    return cubin, low


class Arguments:
    """Arguments of a kernel in the driver's layout, for many launches. They do not keep arrays alive."""

    def __init__(self, args: Iterable[Any]) -> None:
        self._values = [np.array(x.data.ptr if isinstance(x, cupy.ndarray) else x) for x in args]
        self._addresses = np.array([x.ctypes.data for x in self._values], np.uint64)
        self.address = int(self._addresses.ctypes.data)

    def change(self, number: int, value: int) -> None:
        """Set the value of one argument, from the next launch on."""
        self._values[number][...] = value


class Kernel:
    """Loaded kernel of the current device; call it with (grid, block, args)."""

    def __init__(self, name: str, shared_bytes: int) -> None:
        cubin, lowered = cached_cubin(name, device_arch())
        self._name = name
        self._module = function.Module()
        self._module.load(cubin)
        self._function = self._module.get_function(lowered)
        self._shared_bytes = shared_bytes
        if shared_bytes > 48 * 1024:
            attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.funcSetAttribute(self._function.ptr, attribute, shared_bytes)

    def __call__(self, grid: tuple[int, ...], block: int, args: tuple[Any, ...], stream: Any = None) -> None:
        """Launch on a stream, CuPy's current one by default. A grid without blocks launches nothing."""
        if all(grid):
            stream = stream or cupy.cuda.get_current_stream()
            end = spans.begin(self._name, stream) if spans.active else None
            self._function(grid, (block,), args, shared_mem=self._shared_bytes, stream=stream)
            if end is not None:
                end()

    def launch(self, grid: tuple[int, ...], block: int, arguments: Arguments, early: bool = False) -> None:
        """Launch on the current stream with prepared arguments, in a third of the host's time.

        early: by launch_early.
        """
        if not all(grid):
            return
        end = spans.begin(self._name, cupy.cuda.get_current_stream()) if spans.active else None
        if early:
            launch_early(self._function.ptr, grid, block, self._shared_bytes, arguments)
        else:
            x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
            stream = cupy.cuda.get_current_stream().ptr
            driver.launchKernel(
                self._function.ptr, x, y, z, block, 1, 1, self._shared_bytes, stream, arguments.address, 0)
        if end is not None:
            end()


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, of which a value has 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("value", ctypes.c_int * 17))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint))


def launch_early(function_ptr: int, grid: tuple[int, ...], block: int, shared_bytes: int, arguments: Arguments) -> None:
    """Launch a kernel that may start while the one before it on the current stream still runs.

    The kernel itself must wait (griddepcontrol.wait) before it reads what was written shortly before, and before it
    writes. It starts when the kernel before allows it (griddepcontrol.launch_dependents), or else when that one is
    done, as always on GPUs before Hopper. A captured CUDA graph keeps this order.

    Source: CUDA driver API, cuLaunchKernelEx.
    """
    config = _LaunchConfig((*grid, 1, 1)[:3], (block, 1, 1), shared_bytes, cupy.cuda.get_current_stream().ptr)
    config.attributes = ctypes.addressof(_EARLY)
    config.num_attributes = int(_starts_early(cupy.cuda.runtime.getDevice()))
    status = _driver().cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(function_ptr), ctypes.c_void_p(arguments.address), None)
    driver.check_status(status)


_EARLY = _LaunchAttribute(6, (0, 1))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


@functools.cache
def _starts_early(device: int) -> bool:
    return int(cupy.cuda.Device(device).compute_capability) >= 90


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


_loaded: dict[tuple[int, str], Kernel] = {}
_loading = threading.Lock()


def kernel(name: str, shared_bytes: int = 0) -> Kernel:
    """Return the kernel of a C++ name expression, loaded once per device, with so much dynamic shared memory."""
    key = cupy.cuda.runtime.getDevice(), name
    with _loading:  # simulated ranks are threads: the first compiles, the others wait
        if key not in _loaded:
            _loaded[key] = Kernel(name, shared_bytes)
        return _loaded[key]
