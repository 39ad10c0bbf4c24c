"""Select the engine, and check what it takes. No engine is imported before it has been selected."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import Any

import ml_dtypes  # noqa: F401 - makes "bfloat16" a dtype to NumPy
import numpy as np
from numpy.typing import DTypeLike

from thdattn.arguments import as_choice, shown
from thdattn.comm import Comm
from thdattn.engines import Engine
from thdattn.install import expects_gpu

logger = logging.getLogger("thdattn")

ENGINES = {"cuda": "thdattn.engines.cuda", "reference": "thdattn.engines.reference"}


def choose_engine(engine: str, comm: Comm) -> tuple[Engine, str]:
    """Return the engine for a comm, and why it was chosen.

    Args:
        engine: "auto", "cuda" or "reference".
        comm: the ranks; comm.devices says which arrays it moves.

    Raises:
        TypeError: engine is no str.
        ValueError: an unknown engine, or one whose arrays the comm does not move.
        RuntimeError: engine="cuda" without CuPy or a GPU; the message says which.
    """
    engine = as_choice("engine", engine, ("auto", *ENGINES))
    obstacle = None
    if engine != "reference":
        moves_none = comm.no_gpus or f"a comm of backend {comm.name!r} moves host arrays"
        obstacle = _no_gpu() if "cuda" in comm.devices else moves_none
    if engine == "cuda" and obstacle:
        raise (RuntimeError if "cuda" in comm.devices else ValueError)(
            f"engine is 'cuda', but {obstacle}; use engine='reference', or a comm and machine with GPUs"
        )
    why: str | None = "asked for"
    if engine == "auto":
        engine, why = ("reference", obstacle) if obstacle else ("cuda", "a GPU is usable")
        if obstacle and "cuda" in comm.devices and expects_gpu():
            _warn_once(obstacle)
    module: Engine = importlib.import_module(ENGINES[engine])
    if module.device not in comm.devices:
        raise ValueError(
            f"engine {engine!r} computes on {module.device} arrays, but a comm of backend {comm.name!r} moves "
            f"{' and '.join(sorted(comm.devices))} arrays; use engine='cuda', or thdattn.comm.init('mpi')"
        )
    return module, str(why)


@cache
def _warn_once(obstacle: str) -> None:
    logger.warning("thdattn computes with NumPy (engine 'reference'), not on a GPU: %s", obstacle)


def _no_gpu() -> str | None:
    """Return why the CUDA engine cannot run here, or None. Missing drivers raise more than ImportError."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"CuPy finds no usable GPU ({type(error).__name__}: {error})"
    if not count:
        return "CuPy finds no GPU"
    capability = int(cupy.cuda.Device().compute_capability)
    return None if capability >= 80 else f"the GPU has compute capability {capability / 10}, wanted 8.0 or later"


def as_engine_dtype(engine: Engine, dtype: DTypeLike) -> np.dtype[Any]:
    """Return a dtype that the engine computes in; raise a TypeError for any other."""
    try:
        known = np.dtype(dtype) if isinstance(dtype, (str, np.dtype, type)) else None
    except (TypeError, SyntaxError):
        known = None
    if known is None or known.name not in engine.dtypes or not known.isnative:
        remedy = "cast the inputs" if engine.name == "reference" else "cast the inputs, or use engine='reference'"
        raise TypeError(
            f"dtype is {shown(dtype) if known is None else known}, wanted one of {', '.join(engine.dtypes)} "
            f"for engine {engine.name!r}; {remedy}"
        )
    return known


def check_head_dims(engine: Engine, head_dim: int, v_head_dim: int) -> None:
    """Raise a ValueError where the engine has no kernel for these head dims."""
    known = engine.head_dims
    if known is not None and (head_dim, v_head_dim) not in known:
        wanted = ", ".join(str(d) if d == dv else f"{d}/{dv}" for d, dv in known)
        raise ValueError(
            f"head_dim/v_head_dim is {head_dim}/{v_head_dim}, wanted one of {wanted} for engine "
            f"{engine.name!r}; pad the heads with zeros to one of these, or use engine='reference'"
        )
