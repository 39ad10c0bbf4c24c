"""Contract of the context-parallel methods: what an attention asks of them, and what they return.

A method is a module with the functions of the protocol `Method`. Engines compute; methods exchange rows between ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from thdattn.arguments import Array
from thdattn.engines import AttentionOptions, BackwardInputs, ForwardInputs
from thdattn.plan.workspace import Buffer, pair_of

if TYPE_CHECKING:
    from thdattn.plan.memory import Layer, Memory
    from thdattn.plan.plan import Plan


class MethodOptions(NamedTuple):
    """Options of a method that are the same for all calls of an attention with one plan.

    attention: options of the kernels, for all heads at once.
    head_groups: kv heads that are exchanged and computed at a time, one group after another; empty: all.
    keep_keys: forward keeps what it has received, so that the backward need not receive it again.
    outer: the method between groups of ranks, where heads are exchanged inside of these.
    grad_dtype: dtype of dk and dv, on one rank; None: that of k and v.
    """

    attention: AttentionOptions
    head_groups: tuple[int, ...] = ()
    keep_keys: bool = False
    outer: Method | None = None
    grad_dtype: np.dtype[Any] | None = None


class Results(NamedTuple):
    """Results of a forward.

    out, lse, max_logit: as CPAttention.forward has them; max_logit is None if not wanted.
    kept: what the method keeps for the backward beside q, k, v, out and lse; None: nothing.
    """

    out: Array
    lse: Array
    max_logit: Array | None
    kept: Any


class Method(Protocol):
    """Functions of a method. Arrays are this rank's rows, as CPAttention takes and returns them.

    comm: the ranks, for a2a those of both levels.
    keys: from all_gather.gather, if that was called before; None for methods that cannot gather ahead.
    """

    def forward(
        self, comm: Any, inputs: ForwardInputs, options: MethodOptions, max_logit: bool, keys: Any = None
    ) -> Results: ...

    def backward(
        self, comm: Any, inputs: BackwardInputs, options: MethodOptions, kept: Any, at_once: bool, keys: Any = None
    ) -> tuple[Array, Callable[[], tuple[Array, Array]]]:
        """Compute dq, and return it with a function that waits for dk and dv and returns them.

        at_once: that function is called next, so that the last exchange overlaps no computation.
        """
        ...

    def memory(self, comm: Any, plan: Plan, layer: Layer) -> Memory:
        """Return the bytes of all buffers of forward and backward for a layer; the plan needs no arrays."""
        ...


def key_buffers(plan: Plan, num_kv_heads: int, dtype: np.dtype[Any]) -> list[Buffer]:
    """Declare keys and values in sequence order, of some heads."""
    return pair_of("keys in sequence order", (plan.key_rows, num_kv_heads), plan.head_dims, dtype)


def kept_keys(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Declare the same keys and values as what the forward keeps for the backward."""
    return [buffer._replace(name="kept keys") for buffer in buffers]


@functools.cache
def lse_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the log-sum-exp of inputs of a dtype."""
    return np.promote_types(dtype, np.float32)


def joined(parts: Sequence[Array]) -> Array:
    """Return one array of the parts of all groups."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)  # of CuPy arrays this is cupy.concatenate
