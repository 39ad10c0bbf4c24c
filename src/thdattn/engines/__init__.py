"""Engines compute attention on the rows of one rank: `reference` with NumPy, `cuda` on a GPU.

An engine is a module with the functions of the protocol `Engine`. Plans and methods know engines by it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

from thdattn.arguments import Array

if TYPE_CHECKING:
    from thdattn.comm.overlap.collectives import PeerExchange
    from thdattn.kv_cache import KVCache
    from thdattn.plan.memory import Layer
    from thdattn.plan.plan import Plan, PlanArrays
    from thdattn.plan.workspace import Buffer

Pair = Sequence[Array]  # keys and values, or their gradients


class AttentionOptions(NamedTuple):
    """Options of an attention that are the same for its forward and backward.

    softmax_scale: factor on q.k, > 0.
    softcap: logits are softcap * tanh(softmax_scale * q.k / softcap); 0: softmax_scale * q.k.
    deterministic: the backward returns the same bits on every run.
    head_groups: kv heads of every group of heads that calls are made for one after another, this call's group among
        them, so that their launches share work buffers; empty: this call has all heads.
    """

    softmax_scale: float
    softcap: float = 0.0
    deterministic: bool = False
    head_groups: tuple[int, ...] = ()


class ForwardInputs(NamedTuple):
    """Inputs of an attention forward.

    q: (local_rows, num_heads, head_dim), rows as in `plan.key_ranges`.
    k: (key_rows, num_kv_heads, head_dim), sequence order.
    v: (key_rows, num_kv_heads, v_head_dim), sequence order.
    plan: gives `key_ranges`, (local_rows, 2) int32; empty for padding and for a query that sees no key.
    sinks: (num_heads,), dtype of lse: one more logit of every row, without a value. None: there are none. With
        `accumulate` it is None, and the outputs may begin with sinks: 0 and the sink, in rows that see a key.
    """

    q: Array
    k: Array
    v: Array
    plan: Plan
    sinks: Array | None = None


class ForwardOutputs(NamedTuple):
    """Arrays that an attention forward writes.

    arrays: out and lse, shaped as the results; q may be some of the heads of a larger array, and so may out. None: the
        engine makes new arrays.
    accumulate: the arrays, both in the dtype of lse, hold attention over other keys, or 0 and -inf; the result is
        attention over these keys too. Rows that see none of these keys stay as they are.
    max_logit: the largest logit of every head is wanted, too.
    """

    arrays: tuple[Array, Array] | None = None
    accumulate: bool = False
    max_logit: bool = False


NEW_ARRAYS = ForwardOutputs()


class BackwardInputs(NamedTuple):
    """Inputs of an attention backward.

    dout: (local_rows, num_heads, v_head_dim), gradient of out.
    q, k, v, plan: as for the forward.
    out, lse: results of the forward; where keys come in parts, of all parts.
    """

    dout: Array
    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    plan: Plan


class BackwardOutputs(NamedTuple):
    """Arrays that an attention backward writes, and their dtypes.

    kv_dtype: dtype of dk and dv, which are summed in float32 (float64) and rounded once.
    dq: as q, which may be some of the heads of a larger array; None: a new array.
    dk_dv: arrays for dk and dv; None: arrays of the engine, which stay until the next call.
    accumulate: dq, in float32 (float64), holds the gradient through other keys, to which is added.
    own_rows: arrays as k and v of this rank, for needed rows: rows of dk and dv that have `plan.arrays.places`, not -1,
        are rounded and go there. They are then undefined in dk and dv, which are in float32 (float64).
    owners: (partials, places): dk and dv are not returned, but every row goes to the rank that owns it, in float32
        (float64). partials says, for dk and dv and every rank, where this rank's partial sums for that rank begin:
        arrays for `reference`, a PARTIALS for `cuda`. places: (key_rows, 2) int32, the owner of every row, -1 for none,
        and the number of the row there.
    """

    kv_dtype: np.dtype[Any]
    dq: Array | None = None
    dk_dv: Pair | None = None
    accumulate: bool = False
    own_rows: Pair = ()
    owners: tuple[Any, Array] | None = None


class Engine(Protocol):
    """Functions and properties of an engine; array arguments and results are the engine's arrays.

    Each function is described in thdattn.engines.reference, which is the simpler one to read.
    """

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> str: ...

    @property
    def dtypes(self) -> tuple[str, ...]: ...

    @property
    def head_dims(self) -> tuple[tuple[int, int], ...] | None: ...

    # Arrays, and the GPU if there is one.
    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array: ...

    def from_user(self, name: str, x: Any) -> Array: ...

    def in_place(self, name: str, x: Any) -> Array: ...

    def free_bytes(self, wanted: int) -> int | None: ...

    def capture(self) -> int | None: ...

    # Plans.
    def tiles(self, head_dim: int, v_head_dim: int) -> tuple[int, int]: ...

    def plan_arrays(self, plan: Plan, lengths: Any = None) -> PlanArrays: ...

    def plan_buffers(self, plan: Plan) -> Mapping[str, Buffer]: ...

    def plan_backward(self, plan: Plan) -> None: ...

    def enter(self, plan: Plan) -> None: ...

    def nan_if_invalid(self, plan: Plan, *results: Array) -> None: ...

    # Attention.
    def attn_fwd(
        self, inputs: ForwardInputs, options: AttentionOptions, outputs: ForwardOutputs = ...,
        on_first_part: Callable[[], Any] | None = None,
    ) -> tuple[Array, Array, Array | None]: ...

    def attn_bwd(
        self, inputs: BackwardInputs, options: AttentionOptions, outputs: BackwardOutputs,
        on_first_part: Callable[[Array, Array], None] | None = None,
    ) -> tuple[Array, Array, Array]: ...

    def sinks_grad(self, dout: Array, out: Array, lse: Array, sinks: Array) -> Array: ...

    def rounded(self, x: Array, dtype: DTypeLike) -> Array: ...

    def forward_buffers(self, plan: Plan, layer: Layer) -> list[Buffer]: ...

    def backward_buffers(self, plan: Plan, layer: Layer, sum_dtype: np.dtype[Any], where: str) -> list[Buffer]: ...

    # Rows between the orders and ranks.
    def to_sequence_order(
        self, parts: Sequence[Sequence[Array]], plan: Plan, into: Pair | None = None, own: Pair | None = None,
        peer_exchange: PeerExchange | None = None,
    ) -> tuple[Array, Array]: ...

    def to_rank_order(self, dk: Array, dv: Array, plan: Plan) -> tuple[Array, Array]: ...

    def pack_rows(self, xs: Sequence[Array], order: Array, into: Sequence[Array]) -> None: ...

    def place_rows(self, xs: Pair, order: Array, plan: Plan, into: Pair) -> None: ...

    def add_partials(self, own: Pair, back: Pair, plan: Plan, results: Pair) -> None: ...

    def without_padding(self, arrays: Pair, buffers: Sequence[Buffer], plan: Plan) -> list[Array]: ...

    # Decoding.
    def attn_decode(
        self, q: Array, key_ranges: Array, cache: KVCache, options: AttentionOptions, sinks: Array | None = None
    ) -> tuple[Array, Array]: ...

    def cache_append(self, k: Array, v: Array, cache: KVCache) -> Array: ...

    def cache_fill(self, k: Array, v: Array, plan: Plan, cache: KVCache) -> None: ...
