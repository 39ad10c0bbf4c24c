"""Arrays of the NumPy engine: users' arrays, new arrays, and the arrays of its plans."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from thdattn.arguments import as_host_array, dlpack_device, unreadable
from thdattn.engines.reference.blocks import MAX_BLOCK_ROWS
from thdattn.packing import DLPACK_HOST, DLPACK_MANAGED, PackedBatch
from thdattn.plan.plan import Plan, PlanArrays, key_side_ints
from thdattn.plan.ranges import host_arrays
from thdattn.sharding import Sharding

Array = NDArray[Any]

DLPACK_DTYPE_CODE, DLPACK_UINT = 20, 1  # offset of dtype.code in a DLTensor, after data, device and ndim


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return a new uninitialised array."""
    return np.empty(shape, dtype)


def from_user(name: str, x: Any) -> Array:
    """Return a user's array as a C-contiguous NumPy array; copy it only if necessary.

    Raises:
        TypeError: as in_place.
    """
    return np.ascontiguousarray(in_place(name, x))


def in_place(name: str, x: Any) -> Array:
    """Return a user's array as a NumPy array in the same memory.

    Raises:
        TypeError: the array is not on the host, or cannot be exchanged through DLPack.
    """
    if isinstance(x, np.ndarray):
        x = x if type(x) is np.ndarray else as_host_array(name, x)
    else:
        device = dlpack_device(name, x)
        if device not in {*DLPACK_HOST, DLPACK_MANAGED}:
            remedy = f"{name}.get(), or use engine='cuda'" if device else f"numpy.asarray({name})"
            raise TypeError(
                f"{name} is a {type(x).__module__}.{type(x).__name__}, wanted a NumPy array, or an array on the host "
                f"that speaks DLPack; copy it with {remedy}"
            )
        try:
            bfloat16 = str(getattr(x, "dtype", "")).endswith("bfloat16")  # of JAX, "torch.bfloat16" of torch
            x = np.from_dlpack(_Bits(x)).view(ml_dtypes.bfloat16) if bfloat16 else np.from_dlpack(x)
        except (BufferError, RuntimeError) as error:
            raise unreadable(name, x, f"through DLPack ({error})", "pass a NumPy array") from error
    return np.asarray(x)


class _Bits:
    """A bfloat16 array that DLPack exports as uint16, because NumPy's DLPack has no bfloat16."""

    def __init__(self, x: Any) -> None:
        self._x = x

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._x.__dlpack_device__()
        return device

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._x.__dlpack__()
        ctypes.c_uint8.from_address(_capsule_pointer(capsule, b"dltensor") + DLPACK_DTYPE_CODE).value = DLPACK_UINT
        return capsule


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def tiles(head_dim: int, v_head_dim: int) -> tuple[int, int]:
    """Return the rows per query tile and per key tile of a plan's tile lists, which this engine does not use."""
    return MAX_BLOCK_ROWS, MAX_BLOCK_ROWS


def plan_arrays(
    sharding: Sharding, cp_rank: int, window: tuple[int, int], tiles: tuple[int, int],
    key_batch: PackedBatch | None = None, keys_of: int | None = None, lengths: None = None,
) -> PlanArrays:
    """Compute the arrays of a plan; see plan.ranges.host_arrays. Raise a ValueError for lengths on a GPU."""
    sharding.batch.require_host("a plan of the reference engine")
    return host_arrays(sharding, cp_rank, window, tiles, key_batch, keys_of)


def plan_bytes(plan: Plan) -> int:
    """Return the bytes of the arrays of a plan."""
    rows, all_rows = plan.local_rows, plan.cp_size * plan.local_rows
    ordered = all_rows if plan.cp_size > 1 else plan.key_rows if plan.is_cross else 0
    return 4 * (4 * rows + 2 * plan.key_rows + ordered + 2 * sum(plan.num_tiles) + key_side_ints(plan)) + rows


def enter(plan: Plan) -> None:
    """Order the current stream after the stream that made a plan; NumPy has no streams."""


def free_bytes(wanted: int) -> int | None:
    """Return the free bytes of memory if they are fewer than wanted, None if they suffice or are unknown, as here."""
    return None


def capture() -> int | None:
    """Return the unique number of the current stream's graph capture; None outside captures, as always here."""
    return None
