"""Check that the host does not wait for the GPU, for every GPU test of work that must only be enqueued."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np


def held(cupy: Any, work: Callable[[], object]) -> bool:
    """Return whether work came back while a kernel that runs until the host lets it go kept the current stream busy.

    Prepare what work needs before: compiling a kernel, or allocating memory, may wait.
    """
    import cupyx

    hold = cupy.RawKernel('extern "C" __global__ void hold(volatile int* go) { while (!*go); }', "hold")
    cupy.cuda.Device().synchronize()  # a copy on its way may still write to memory that `go` is about to get
    go = cupyx.zeros_pinned(1, np.int32)
    hold((1,), (1,), (go.ctypes.data,))
    rescue = threading.Timer(60, go.fill, (1,))
    rescue.start()
    work()
    was_held = not go[0]
    go[0] = 1
    rescue.cancel()
    cupy.cuda.Device().synchronize()
    return was_held
