"""Launch support: properties of the GPU, arrays on it, and kernels with fixed arguments."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import driver
from numpy.typing import DTypeLike

from thdattn.arguments import DLPACK_HOST, dlpack_device, unreadable
from thdattn.jit import compiler
from thdattn.jit.tensor_map import tensor_map
from thdattn.plan.workspace import Buffer

Array = Any  # cupy.ndarray, whose hints are partial
NONE = np.uint64(0)  # a null pointer, passed where there is no array


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return a new uninitialised array; the engine allocates all its arrays by this function."""
    return cupy.empty(shape, dtype)


def new(buffer: Buffer) -> Array:
    """Return a new uninitialised array as declared."""
    return empty(buffer.shape, buffer.dtype)


def free_bytes(wanted: int) -> int | None:
    """Return the free bytes of memory if they are fewer than wanted; None if they suffice or are unknown.

    They are unknown while a CUDA graph is captured, or if another library allocates CuPy's memory. The pool's free
    bytes are read first, because that is fast.
    """
    pool: Any = getattr(cupy.cuda.get_allocator(), "__self__", None)
    if not hasattr(pool, "free_bytes") or cupy.cuda.get_current_stream().is_capturing():
        return None
    free = int(pool.free_bytes())
    if free < wanted:
        room = int(cupy.cuda.runtime.memGetInfo()[0])
        limit = int(pool.get_limit())  # 0: no limit
        free += min(room, limit - int(pool.total_bytes())) if limit else room
    return free if free < wanted else None


def capture() -> int | None:
    """Return the number of the current stream's graph capture; see reference.capture.

    Source: CUDA driver API, cuStreamGetCaptureInfo.
    """
    stream = cupy.cuda.get_current_stream()
    if not stream.is_capturing():
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    driver.check_status(_capture_info()(stream.ptr, ctypes.byref(status), ctypes.byref(number), None, None, None))
    return number.value


@functools.cache
def _capture_info() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    function.argtypes = (ctypes.c_void_p,) * 6
    return function


def from_user(name: str, x: Any) -> Array:
    """Return a user's array as a C-contiguous, 16-byte aligned CuPy array; copy it only if necessary.

    Raises:
        TypeError, ValueError: as in_place.
    """
    x = in_place(name, x)
    if x.flags.c_contiguous and x.data.ptr % 16 == 0:  # the kernels move 16 bytes at a time
        return x
    return x.copy(order="C")


def in_place(name: str, x: Any) -> Array:
    """Return a user's array as a CuPy array in the same memory.

    Raises:
        TypeError: the array is not on a GPU, or cannot be exchanged through DLPack.
        ValueError: the array is on another GPU than the current one.
    """
    if type(x) is not cupy.ndarray:
        if isinstance(x, np.ndarray) or dlpack_device(name, x) in {None, *DLPACK_HOST}:
            raise TypeError(f"{name} is a {type(x).__name__} on the host, wanted an array on the GPU; "
                            f"copy it with cupy.asarray({name}), or use engine='reference'")
        try:
            x = cupy.from_dlpack(x)
        except (BufferError, TypeError, ValueError) as error:
            raise unreadable(name, x, f"through DLPack ({error})", "pass a CuPy array") from error
    current = cupy.cuda.runtime.getDevice()
    if x.device.id != current:
        raise ValueError(f"{name} is on GPU {x.device.id}, wanted the current GPU {current}; copy it there, or "
                         f"make GPU {x.device.id} current with cupy.cuda.Device({x.device.id}).use()")
    return x


def tensor_maps(
    arrays: Sequence[Array], num_rows: Sequence[int], boxes: Sequence[int], l2_bytes: int = 256
) -> Iterator[Any]:
    """Return tensor maps of the first num_rows[i] rows of (rows, heads, width) arrays, by boxes of boxes[i] rows."""
    return (tensor_map(x, rows, row_bytes(x), box, l2_bytes)
            for x, rows, box in zip(arrays, num_rows, boxes, strict=True))


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU that the choice of kernels and grids depends on. arch: NVRTC's name of its architecture."""

    sm90: bool
    multiprocessors: int
    shared_bytes: int
    arch: str = ""


def this_gpu() -> Gpu:
    """Return the properties of the current device."""
    return _gpu(cupy.cuda.runtime.getDevice())


@functools.cache
def _gpu(device: int) -> Gpu:
    attributes = cupy.cuda.Device(device).attributes
    return Gpu(
        sm90=compiler.device_arch() == "sm_90a",
        multiprocessors=attributes["MultiProcessorCount"],
        shared_bytes=attributes["MaxSharedMemoryPerBlockOptin"],
        arch=compiler.device_arch(),
    )


_MOST_PREPARED = 256  # cached argument blocks of a launch


@dataclass(frozen=True)
class Launch:
    """Kernel with the arguments that stay the same for all calls of a plan, after the arguments of each call.

    All arguments of a call are cached, because a training loop repeats the same few calls.

    early: the kernel may start while the previous kernel still runs, see jit.launch_early.
    """

    kernel: compiler.Kernel
    grid: tuple[int, ...]
    block: int
    fixed: tuple[Any, ...]
    early: bool = False
    _prepared: dict[Any, tuple[compiler.Arguments, tuple[Any, ...]]] = field(default_factory=dict, repr=False)

    def __call__(self, *args: Any) -> None:
        # Structs are passed by value and identified by id, so launch_as keeps them alive.
        key = tuple([x.data.ptr if isinstance(x, cupy.ndarray) else id(x) if isinstance(x, np.void) else x
                     for x in args])
        self.launch_as(key, lambda: args)

    def launch_as(self, key: Any, make: Callable[[], tuple[Any, ...]], last: tuple[int, ...] = ()) -> None:
        """Launch the kernel with the arguments that are cached for `key`; build them with `make` on a miss.

        last: values of the last fixed arguments, which differ from launch to launch.
        """
        found = self._prepared.get(key)
        if found is None:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            args = make()
            structs = tuple(x for x in args if isinstance(x, np.void))
            found = self._prepared[key] = compiler.Arguments(args + self.fixed), structs
        for i in range(-len(last), 0) if last else ():
            found[0].change(i, last[i])
        self.kernel.launch(self.grid, self.block, found[0], self.early)


def row_bytes(x: Array) -> int:
    """Return the bytes between rows of a (rows, heads, width) array, which may be some heads of a larger array."""
    return int(x.strides[0]) if len(x) > 1 else int(x.shape[1] * x.shape[2] * x.itemsize)


def row_heads(x: Array) -> int:
    """Return the number of heads of a row in memory; the array may have only some of them."""
    return row_bytes(x) // int(x.shape[2] * x.itemsize)


class Heads(NamedTuple):
    """Heads of a call, their widths and dtype, which launches depend on.

    row_heads: query heads of a row in memory; the call may have only some of them.
    groups: kv heads of the groups that share work buffers; see AttentionOptions.head_groups.
    """

    dtype: np.dtype[Any]
    num_heads: int
    row_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    groups: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer_heads(self) -> int:
        """Query heads of all groups that share work buffers."""
        return sum(self.groups) * self.group

    @property
    def most_heads(self) -> int:
        """Query heads of the largest of the groups that share work buffers."""
        return max(self.groups) * self.group


def heads_of(q: Array, k: Array, v: Array, head_groups: tuple[int, ...]) -> Heads:
    """Return the heads of a call."""
    (_, num_heads, head_dim), (_, num_kv_heads, v_head_dim) = q.shape, v.shape
    groups = head_groups or (num_kv_heads,)
    return Heads(q.dtype, num_heads, row_heads(q), num_kv_heads, head_dim, v_head_dim, groups)
