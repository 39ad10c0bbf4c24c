"""CUDA source to a loaded kernel: NVRTC to a cubin, kept by kernel_cache, and the launch attributes.

No host compiler and no headers are needed, and a cubin for any architecture can be built on a machine without a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cupy.cuda import driver, function, nvrtc

from thdattn import kernel_cache, structs, tiles, wgmma

log = logging.getLogger("thdattn")

FOLDER = Path(__file__).parent
OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")


def device_arch() -> str:
    """NVRTC's name of the current device's architecture; sm_90a on Hopper, for wgmma and setmaxnreg."""
    capability = cupy.cuda.Device().compute_capability
    return "sm_90a" if capability == "90" else f"sm_{capability}"


# Which files make up the source of a kernel, in this order, its own last; some are written by Python.
GENERATED = {
    "wgmma.wrappers()": lambda: wgmma.wrappers(tiles.WGMMA_COLUMNS),
    "structs.checks()": structs.checks,
}
_ROWS = ("kernels/common.cuh", "structs.checks()", "kernels.cu")
_PORTABLE = ("kernels/common.cuh", "structs.checks()", "kernels/logits.cuh", "kernels/portable/common.cuh")
_HOPPER = ("kernels/common.cuh", *GENERATED, "kernels/logits.cuh", "kernels/hopper/common.cuh")
_HOPPER_BACKWARD = (*_HOPPER, "kernels/homes.cuh", "kernels/hopper/backward_common.cuh")
_HOPPER_TILES = (*_HOPPER_BACKWARD, "kernels/hopper/query_side.cuh", "kernels/hopper/backward_tiles.cuh")
_HOPPER_WIDE = (*_HOPPER_BACKWARD, *(f"kernels/hopper/{file}" for file in ("cluster.cuh", "wide_tiles.cuh", "wide.cu")))
_PORTABLE_BACKWARD = (*_PORTABLE, "kernels/homes.cuh", "kernels/portable/backward.cu")
_MAMBA = (*_PORTABLE, "kernels/mamba/common.cuh")
_MAMBA_BACKWARD = (*_MAMBA, "kernels/mamba/backward_common.cuh")
_MAMBA_HOPPER = (*_HOPPER, "kernels/portable/common.cuh", "kernels/mamba/common.cuh", "kernels/mamba/hopper.cuh")
_MAMBA_HOPPER_BACKWARD = (*_MAMBA_HOPPER, "kernels/mamba/backward_common.cuh", "kernels/mamba/fragments_sm90.cuh")
_CONV_STATES = (*_MAMBA_HOPPER, "kernels/mamba/conv.cu", "kernels/mamba/conv_states_sm90.cu")
_MIXER_DECODE = (*_MAMBA, "kernels/mamba/decode.cu")
FILES = {
    "thd_reorder": _ROWS,
    "thd_meet": (*_ROWS, "kernels/meeting.cu"),
    "thd_plan_check": _ROWS,
    "thd_plan_rows": _ROWS,
    "thd_plan_pieces": _ROWS,
    "thd_plan_ranges": _ROWS,
    "thd_plan_tile_cost": _ROWS,
    "thd_plan_tile_order": _ROWS,
    "thd_plan_parts": _ROWS,
    "thd_plan_pairs": _ROWS,
    "thd_plan_poison": _ROWS,
    "thd_sum": ("kernels/common.cuh", "structs.checks()", "kernels/sum.cu"),
    "thd_cache_append": (*_ROWS, "kernels/cache.cu"),
    "thd_cache_fill": (*_ROWS, "kernels/cache.cu"),
    "thd_mixer_decode_conv": _MIXER_DECODE,
    "thd_mixer_decode": _MIXER_DECODE,
    "thd_mixer_fill_rows": _MIXER_DECODE,
    "thd_mixer_fill": _MIXER_DECODE,
    "thd_attn_sinks_grad": ("kernels/common.cuh", "kernels/sinks.cu"),
    "thd_attn_fwd": (*_PORTABLE, "kernels/portable/forward.cu"),
    "thd_attn_delta": _PORTABLE_BACKWARD,
    "thd_attn_bwd": _PORTABLE_BACKWARD,
    "thd_attn_bwd_dq": _PORTABLE_BACKWARD,
    "thd_attn_round": _PORTABLE_BACKWARD,
    "thd_attn_decode": (*_PORTABLE, "kernels/portable/decode.cu"),
    "thd_mixer_conv": (*_MAMBA, "kernels/mamba/conv.cu"),
    "thd_ssd_states": (*_MAMBA, "kernels/mamba/scan.cu"),
    "thd_ssd_fold": (*_MAMBA, "kernels/mamba/scan.cu"),
    "thd_ssd_start": (*_MAMBA, "kernels/mamba/scan.cu"),
    "thd_ssd_enter": (*_MAMBA, "kernels/mamba/scan.cu"),
    "thd_ssd_scan": (*_MAMBA, "kernels/mamba/scan.cu"),
    "thd_ssd_states_sm90": (*_MAMBA_HOPPER, "kernels/mamba/states_sm90.cu"),
    "thd_ssd_scan_sm90": (*_MAMBA_HOPPER, "kernels/mamba/scan_sm90.cu"),
    "thd_ssd_conv_states_sm90": _CONV_STATES,
    "thd_mixer_gate_bwd": (*_MAMBA_BACKWARD, "kernels/mamba/scan_backward.cu"),
    "thd_ssd_dstates": (*_MAMBA_BACKWARD, "kernels/mamba/scan_backward.cu"),
    "thd_ssd_chunk_states": (*_MAMBA_BACKWARD, "kernels/mamba/scan_backward.cu"),
    "thd_ssd_bwd": (*_MAMBA_BACKWARD, "kernels/mamba/chunk_backward.cuh", "kernels/mamba/chunk_backward.cu"),
    "thd_ssd_gate_states_sm90": (*_MAMBA_HOPPER_BACKWARD, "kernels/mamba/gate_states_sm90.cu"),
    "thd_ssd_chunk_states_sm90": (*_MAMBA_HOPPER_BACKWARD, "kernels/mamba/scan_backward_sm90.cu"),
    "thd_ssd_bwd_sm90": (
        *_MAMBA_HOPPER_BACKWARD, *(f"kernels/mamba/chunk_backward_sm90.{end}" for end in ("cuh", "cu"))),
    "thd_mixer_conv_bwd": (*_MAMBA, "kernels/mamba/conv_backward.cu"),
    "thd_mixer_sum": (*_MAMBA, "kernels/mamba/conv_backward.cu"),
    "thd_mixer_add_halos": (*_MAMBA, "kernels/mamba/conv_backward.cu"),
    "thd_attn_pieces_sm90": (*_HOPPER, "kernels/hopper/pieces.cuh"),
    "thd_attn_fwd_sm90": (
        *_HOPPER, *(f"kernels/hopper/{file}" for file in ("softmax.cuh", "pieces.cuh", "forward.cu"))),
    "thd_attn_shares_sm90": _HOPPER_BACKWARD,
    "thd_attn_bwd_sm90": (*_HOPPER_TILES, "kernels/hopper/backward.cu"),
    "thd_attn_bwd_pair_sm90": (*_HOPPER_TILES, "kernels/hopper/pair.cu"),
    "thd_attn_bwd_dq_sm90": (*_HOPPER_BACKWARD, "kernels/hopper/dq.cu"),
    "thd_attn_bwd_wide_sm90": _HOPPER_WIDE,
    "thd_attn_round_wide_sm90": _HOPPER_WIDE,
}


def source(name: str) -> str:
    """What NVRTC gets for a C++ name expression of a kernel: its files in one text.

    `#line` keeps their names and lines in compiler messages and profilers. The names are relative to the package's
    parent folder: keys of the cache and records follow the text, not where it lies.
    """
    return "".join(f'#line 1 "thdattn/{file}"\n{_text(file)}' for file in FILES[name.partition("<")[0]])


@functools.cache
def _text(file: str) -> str:
    return GENERATED[file]() if file in GENERATED else (FOLDER / file).read_text()


# What decides which kernels run, and how: their sources, and the modules that compile and launch them.
LAUNCH_FILES = ("**/*.cu", "**/*.cuh", "ops/*.py", "*tiles.py", "buffers.py", "cache.py", "comm/meetings.py",
                "instances.py", "jit.py", "plan.py", "structs.py", "sums.py", "tensor_map.py", "wgmma.py")


def source_hash() -> str:
    """The first 16 hex digits of the SHA-256 of LAUNCH_FILES: what a test record or a benchmark row is about."""
    digest = hashlib.sha256()
    files = {path.relative_to(FOLDER).as_posix(): path for pattern in LAUNCH_FILES for path in FOLDER.glob(pattern)}
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def compile_kernel(name: str, arch: str) -> tuple[bytes, str, str]:
    """Compiles one kernel with NVRTC; needs no GPU.

    Args:
        name: a C++ name expression, for instance "thd_reorder<true>".
        arch: "sm_80", "sm_90a", ...

    Returns:
        (cubin, lowered name, compiler log with registers and spills).

    Raises:
        RuntimeError: NVRTC refused the source; its log is the message.
    """
    program = nvrtc.createProgram(source(name), "thdattn", (), ())
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
    """compile_kernel through the disk cache; returns (cubin, lowered name).

    Keyed by source, options, name, architecture and NVRTC version.
    """
    key = repr((source(name), OPTIONS, name, arch, nvrtc.getVersion()))
    entry = f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"
    kept = kernel_cache.read(entry)
    if kept is not None:
        lowered, _, cubin = kept.partition(b"\0")
        return cubin, lowered.decode()
    start = time.perf_counter()
    cubin, low, compiler_log = compile_kernel(name, arch)
    registers = re.search(re.escape(low) + r"'.*?Used (\d+) registers", compiler_log, re.DOTALL)
    log.info("compiled %s for %s in %.1f s, %s registers", name, arch, time.perf_counter() - start,
             registers[1] if registers else "?")
    kernel_cache.write(entry, low.encode() + b"\0" + cubin)
    return cubin, low


class Arguments:
    """Arguments of a kernel as the driver takes them, for many launches; arrays are not kept."""

    def __init__(self, args: Iterable[Any]) -> None:
        self._values = [np.array(x.data.ptr if isinstance(x, cupy.ndarray) else x) for x in args]
        self._addresses = np.array([x.ctypes.data for x in self._values], np.uint64)
        self.address = int(self._addresses.ctypes.data)

    def change(self, number: int, value: int) -> None:
        """Another value for one of them, from the next launch on."""
        self._values[number][...] = value


class Kernel:
    """A loaded kernel of the current device; call it with (grid, block, args)."""

    def __init__(self, name: str, shared_bytes: int = 0):
        cubin, lowered = cached_cubin(name, device_arch())
        self._module = function.Module()
        self._module.load(cubin)
        self._function = self._module.get_function(lowered)
        self._shared_bytes = shared_bytes
        if shared_bytes > 48 * 1024:
            attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.funcSetAttribute(self._function.ptr, attribute, shared_bytes)

    def __call__(self, grid: tuple[int, ...], block: int, args: tuple[Any, ...], stream: Any = None) -> None:
        """Launches on a stream, CuPy's current one by default; a grid without blocks is no launch."""
        if all(grid):
            stream = stream or cupy.cuda.get_current_stream()
            self._function(grid, (block,), args, shared_mem=self._shared_bytes, stream=stream)

    def launch(self, grid: tuple[int, ...], block: int, arguments: Arguments, early: bool = False) -> None:
        """The same, on the current stream, with prepared arguments, in a third of the host's time; early: launch_early.
        """
        if all(grid) and early:
            launch_early(self._function.ptr, grid, block, self._shared_bytes, arguments)
        elif all(grid):
            x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
            stream = cupy.cuda.get_current_stream().ptr
            driver.launchKernel(
                self._function.ptr, x, y, z, block, 1, 1, self._shared_bytes, stream, arguments.address, 0)


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, of which a value has 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("value", ctypes.c_int * 17))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint))


def launch_early(function_ptr: int, grid: tuple[int, ...], block: int, shared_bytes: int, arguments: Arguments) -> None:
    """Launches a kernel that may start while the one before it on the current stream still runs.

    Only for a kernel that waits itself (griddepcontrol.wait) before it reads what was written shortly before, and
    before it writes. The one before, if it is such a kernel too, says when (griddepcontrol.launch_dependents), else it
    is when that one is done, as always on GPUs before Hopper. A captured CUDA graph keeps this.

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
    """The kernel of that C++ name expression with so much dynamic shared memory, loaded once per device."""
    key = cupy.cuda.runtime.getDevice(), name
    with _loading:  # simulated ranks are threads: the first compiles, the others wait
        if key not in _loaded:
            _loaded[key] = Kernel(name, shared_bytes)
        return _loaded[key]
