"""Tensor maps, which tell the TMA unit of Hopper GPUs how to copy boxes of a (rows, heads, width) array."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from thdattn.jit.structs import TENSOR_MAP
from thdattn.kernels.configs import slab_of

DATA_TYPES = {"float16": 6, "bfloat16": 9}  # CUtensorMapDataType
SWIZZLES = {64: 2, 128: 3}  # CUtensorMapSwizzle, by the bytes of a row of a box
L2_PROMOTION = {128: 2, 256: 3}


def tensor_map(x: Any, num_rows: int, row_bytes: int, box_rows: int, l2_bytes: int = 256) -> Any:
    """Make a CUtensorMap of a CuPy array, to be passed to a kernel by value.

    Args:
        x: (rows, heads, width), 16-bit, 16-byte aligned.
        num_rows: number of its first rows that the map covers, at least one.
        row_bytes: bytes from one row to the next, which may have more heads than x.
        box_rows: rows of a box. A box has 64 columns of one head, or 32 if 64 does not divide the width. Elements
            outside the map arrive as zeros.
        l2_bytes: bytes that a copy brings into the L2 cache at once. 256 prefetch the next 64 columns; 128 are cheaper
            if a kernel is bound by memory bandwidth.

    Returns:
        NumPy void scalar of 128 bytes. Maps are cached, as a training loop uses the same few buffers again and again.

    Source: CUDA driver API, cuTensorMapEncodeTiled.
    """
    return _encode(x.data.ptr, (num_rows, *x.shape[1:]), row_bytes, x.dtype, box_rows, l2_bytes)


@functools.lru_cache(maxsize=4096)
def _encode(
    address: int, shape: tuple[int, int, int], pitch: int, dtype: np.dtype[Any], box_rows: int, l2_bytes: int
) -> Any:
    rows, heads, width = shape
    columns = slab_of(width)
    storage = (ctypes.c_ubyte * 192)()
    aligned = (ctypes.addressof(storage) + 63) & ~63
    u64, u32 = ctypes.c_uint64, ctypes.c_uint32
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned), DATA_TYPES[dtype.name], 3, ctypes.c_void_p(address), (u64 * 3)(width, heads, rows),
        (u64 * 2)(2 * width, pitch), (u32 * 3)(columns, 1, box_rows), (u32 * 3)(1, 1, 1),
        0, SWIZZLES[2 * columns], L2_PROMOTION[l2_bytes], 0,
    )
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled returned {status} for an array of shape {shape} at {address:#x}")
    return np.frombuffer(ctypes.string_at(aligned, TENSOR_MAP.itemsize), dtype=TENSOR_MAP)[0]


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
