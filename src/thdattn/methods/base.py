"""What an attention asks of a method, and what it gets.

Every method is a module with the same two functions:

    forward(engine, comm, plan, q, k, v, call, return_max_logit) -> Results
    backward(engine, comm, plan, dout, saved, call, at_once) -> (dq, what waits for dk and dv and returns them)

engine is engines.reference or engines.cuda; q, k, v, dout are this rank's rows as CPAttention takes them, and results
this rank's rows as it returns them. A third, memory(engine, comm, plan, layer), says how many bytes both take.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Call(NamedTuple):
    """What is the same for all calls of an attention with plans of a size.

    softmax_scale, deterministic: as CPAttention has them.
    groups: how many kv heads travel and are computed at a time, one group after another; none: all.
    keeps_keys: whether forward keeps what has travelled, so that it need not travel again.
    outer: the method between the groups of ranks among which heads are exchanged.
    softcap: as CPAttention has it.
    sinks: of a forward, (num_heads,) for its query heads; None: none. lse has them, and so a backward needs none.
    grad_dtype: of dk and dv, on one rank; None: that of k and v.
    """

    softmax_scale: float
    deterministic: bool
    groups: tuple[int, ...] = ()
    keeps_keys: bool = False
    outer: Any = None
    softcap: float = 0.0
    sinks: Any = None
    grad_dtype: Any = None


class Results(NamedTuple):
    """Of a forward: out, lse and max_logit (None if not asked for) as CPAttention.forward has them.

    kept: what the method keeps for the backward beside q, k, v, out and lse; None: nothing.
    """

    out: Any
    lse: Any
    max_logit: Any
    kept: Any


class Tensors(NamedTuple):
    """What a backward gets of its forward."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    kept: Any


@functools.cache
def lse_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Of the log-sum-exp of inputs of a dtype."""
    return np.promote_types(dtype, np.float32)


def joined(parts: Sequence[Any]) -> Any:
    """One array of those of all groups."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)  # of CuPy arrays this is cupy.concatenate
