"""Lanes of CuPy's streams, by which the watchdog sees where a stream is."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from thdattn.comm.failures.watchdog import Lane

logger = logging.getLogger("thdattn")

# Lanes by thread, GPU and stream. They are never dropped: a stream may write to one after all comms are closed.
_lanes: dict[tuple[int, int | None, int], Lane] = {}


def lane_of(cupy: Any, gpu: int | None, stream: Any) -> Lane:
    """Return the lane of this thread on a stream."""
    key = (threading.get_ident(), gpu, stream.ptr)
    lane = _lanes.get(key)
    if lane is None:
        lane = _lanes[key] = _lane(cupy, stream.ptr)
    return lane


def _lane(cupy: Any, stream: int) -> Lane:
    """Make the lane of a stream, in pinned memory, which the GPU writes under the host's address."""
    numbers = np.frombuffer(cupy.cuda.alloc_pinned_memory(8), np.uint32, 2)
    write = partial(_stream_writes(), stream)
    lane = Lane(numbers, write)
    if status := write(numbers.ctypes.data, 0, 0):
        logger.warning("the driver has streams write no numbers (cuStreamWriteValue32: error %d), so no deadline holds "
                       "for collectives on this GPU", status)
    return lane


@cache
def _stream_writes() -> Callable[[int, int, int, int], int]:
    """Load the driver's call that makes a stream write a number to memory, which CuPy lacks; it releases the GIL."""
    function = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue32_v2
    function.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    called: Callable[[int, int, int, int], int] = function
    return called
