"""Arrays of the NumPy engine: users' arrays, new arrays, and the arrays of its plans."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from thdattn.arguments import DLPACK_HOST, DLPACK_MANAGED, as_host_array, dlpack_device, unreadable
from thdattn.engines.reference.blocks import MAX_BLOCK_ROWS
from thdattn.plan.plan import Plan, PlanArrays
from thdattn.plan.ranges import host_arrays
from thdattn.plan.workspace import INT32, Buffer

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


def plan_arrays(plan: Plan, lengths: None = None) -> PlanArrays:
    """Compute the arrays of a plan that has none.

    Args:
        lengths: the arrays of another plan, whose lengths on a GPU are refreshed together with this plan's; None here.

    Raises:
        ValueError: lengths on a GPU.
    """
    plan.batch.require_host("a plan of the reference engine")
    key_batch = plan.key_batch if plan.is_cross else None
    return host_arrays(plan.sharding, plan.cp_rank, plan.window, plan.tiles, key_batch, plan.keys_of)


def plan_buffers(plan: Plan) -> dict[str, Buffer]:
    """Declare the arrays of a plan that shares none with another plan."""
    rows, (query_tiles, key_tiles) = plan.local_rows, plan.num_tiles
    ordered = plan.cp_size * rows if plan.cp_size > 1 else plan.key_rows if plan.is_cross else 0
    shapes = {"rows": (rows,), "positions": (rows,), "key_ranges": (rows, 2), "query_ranges": (plan.key_rows, 2),
              "all_rows": (ordered,), "query_tiles": (2, query_tiles), "key_tiles": (2, key_tiles),
              "key_side": (sum(plan.key_side_sizes),)}
    return {"valid": Buffer("plan", (rows,), np.dtype(bool)),
            **{field: Buffer("plan", shape, INT32, field) for field, shape in shapes.items()}}


def enter(plan: Plan) -> None:
    """Order the current stream after the stream that made a plan; NumPy has no streams."""


def free_bytes(wanted: int) -> int | None:
    """Return the free bytes of memory if they are fewer than wanted, None if they suffice or are unknown, as here."""
    return None


def capture() -> int | None:
    """Return the unique number of the current stream's graph capture; None outside captures, as always here."""
    return None
