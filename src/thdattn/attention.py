"""CPAttention: validates once, picks the engine, and runs the pipeline."""

from __future__ import annotations

import hashlib
import importlib
import math
import weakref
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 - makes "bfloat16" a dtype to NumPy
import numpy as np
from numpy.typing import DTypeLike

from thdattn import pipeline
from thdattn.arguments import as_bool, as_choice, as_count, as_softmax_scale, as_window, found, is_array, shown
from thdattn.cache import CACHE_TRAITS, KVCache, make_cache, rows_to_decode
from thdattn.comm import Comm
from thdattn.memory import Layer, Memory, in_units
from thdattn.packing import PackedBatch, as_batch
from thdattn.pipeline import Keys, Sums
from thdattn.plan import NO_ARRAYS, Plan, visible_pairs
from thdattn.sharding import Sharding

# Groups of heads, and from how many bytes of keys and values that a rank gets they hide more than they cost.
HEAD_GROUPS = {2: 2**26, 4: 2**28}
# Those that somebody holds, for their buffers.
_plans: weakref.WeakKeyDictionary[Comm, weakref.WeakSet[Plan]] = weakref.WeakKeyDictionary()
ENGINES = {"cuda": "thdattn.ops", "reference": "thdattn.reference"}


@dataclass(frozen=True, eq=False, repr=False)  # comparing or printing arrays would make the host wait for a GPU
class Saved:
    """What forward keeps for backward.

    q, k, v, plan: as passed, without a copy: nobody may write to them before backward; out: as returned.
    lse: (num_heads, local_rows) float32 (float64 for float64 input), natural log of the softmax sum; -inf on padding.
    max_logit: (num_heads,) float32, the largest scaled logit over all ranks' valid rows (-inf without any); None if
        not asked for.
    made_with: what must agree with the attention whose backward takes it: heads, head dims, softmax_scale, dtype and
        deterministic.
    keys: ((k, v), ...), the keys and values of all ranks by group of heads, in sequence order; None: the backward
        gathers them again.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    max_logit: Any
    plan: Plan
    made_with: dict[str, Any]
    keys: tuple[tuple[Any, Any], ...] | None = None

    def __repr__(self) -> str:
        arrays = (f"{name} {_kind(getattr(self, name))}" for name in ("q", "k", "v", "out", "lse", "max_logit"))
        return f"<Saved: {', '.join(arrays)}, {self.plan!r}>"


class Flops(NamedTuple):
    """Floating-point operations of one attention layer, all ranks together: exact ints.

    forward, backward: of one call each.
    """

    forward: int
    backward: int


class CPAttention:
    """Attention over packed sequences whose rows are spread over the ranks of a comm.

    Query head h reads kv head h // (num_heads // num_kv_heads). Rows of padding in q, k, v, dout never change a
    result, NaN included, and out, dq, dk, dv are exactly 0 there.

    Args:
        comm: the ranks, from thdattn.comm.init or thdattn.comm.run_local.
        num_heads: query heads.
        head_dim: width of q and k.
        num_kv_heads: heads of k and v, a divisor of num_heads; num_heads by default.
        v_head_dim: width of v and out; head_dim by default.
        causal: a query sees no later position.
        window: (left, right), how many positions before and after its own a query sees; -1 = unlimited. Causal
            attention has no right side: -1 or 0.
        softmax_scale: factor on q.k, > 0; head_dim**-0.5 by default.
        dtype: of q, k, v: "bfloat16" or "float16"; the reference engine also takes "float32" and "float64".
        deterministic: bitwise the same results on every run with the same inputs and cp_size; the backward of the
            CUDA engine is then slower, as it adds up dq in a fixed order.
        engine: "cuda", "reference", or "auto": cuda where a GPU is usable and the comm takes GPU arrays.
        head_groups: how many groups of kv heads, a divisor of num_kv_heads, are gathered and computed one after
            another, so that what one group sends hides behind another's work; by default 1, 2 or 4 by the bytes that
            a rank gets, and 1 where nothing hides (comm.overlaps). The same on all ranks.
        keep_keys: whether forward keeps the keys and values of all ranks for the backward, which gathers them again
            otherwise; by default if they are no larger than what has to be kept of the layer anyway. The same on all
            ranks.

    Raises:
        TypeError: an argument of the wrong type, or a dtype that the engine does not compute in.
        ValueError: a value out of range, head dims that the engine has no kernel for, or an engine that does not
            work with this comm.
        RuntimeError: engine="cuda" where CuPy or a GPU is missing; the message says which.
    """

    def __init__(
        self,
        comm: Comm,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        v_head_dim: int | None = None,
        causal: bool = True,
        window: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
        dtype: DTypeLike = "bfloat16",
        deterministic: bool = False,
        engine: str = "auto",
        head_groups: int | None = None,
        keep_keys: bool | None = None,
    ) -> None:
        if not isinstance(comm, Comm):
            raise TypeError(f"comm is a {type(comm).__name__}, wanted a Comm; make one with thdattn.comm.init()")
        self.comm = comm
        self.num_heads = as_count("num_heads", num_heads)
        self.num_kv_heads = as_count("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads)
        self.head_dim = as_count("head_dim", head_dim)
        self.v_head_dim = as_count("v_head_dim", head_dim if v_head_dim is None else v_head_dim)
        self.causal = as_bool("causal", causal)
        self.window = as_window(window, self.causal)
        self.softmax_scale = self.head_dim**-0.5 if softmax_scale is None else as_softmax_scale(softmax_scale)
        self.deterministic = as_bool("deterministic", deterministic)
        self.head_groups = None if head_groups is None else as_count("head_groups", head_groups)
        self.keep_keys = None if keep_keys is None else as_bool("keep_keys", keep_keys)
        if self.head_groups is not None and self.num_kv_heads % self.head_groups:
            raise ValueError(
                f"head_groups is {head_groups}, not a divisor of num_kv_heads = {self.num_kv_heads}; wanted as many kv "
                f"heads in every group, or None"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {num_heads}, not a multiple of num_kv_heads = {num_kv_heads}; "
                f"wanted as many query heads for every kv head"
            )
        self._engine, _ = choose_engine(engine, comm)
        self.engine: str = self._engine.name
        self.dtype = self._checked_dtype(dtype)
        self._check_head_dims()
        self._tiles = self._engine.tiles(self.head_dim, self.v_head_dim)
        self._lengths: Any = None  # of the last plan, if they lie on a GPU
        self._last_memory: tuple[tuple[Any, ...], Memory] | None = None  # of the last plan, and for which rows
        self._plans = {
            "cp_size": comm.size, "cp_rank": comm.rank, "window": self.window, "engine": self.engine,
            "head_dims": (self.head_dim, self.v_head_dim), "tiles": self._tiles,
        }
        self._saves = {
            "num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim, "softmax_scale": self.softmax_scale, "dtype": self.dtype,
            "deterministic": self.deterministic,
        }
        self._caches = {name: {**self._plans, **self._saves}[name] for name in CACHE_TRAITS}
        self._lse_dtype = pipeline.lse_dtype(self.dtype)

    def __repr__(self) -> str:
        layer = {**self._saves, "causal": self.causal, "window": self.window, "engine": repr(self.engine)}
        return f"<CPAttention {', '.join(f'{name}={value}' for name, value in layer.items())}, {self.comm!r}>"

    def plan(
        self, batch: PackedBatch, sharding: str | Sharding = "dual_chunk", key_batch: PackedBatch | None = None,
        like: PackedBatch | None = None, finite_padding: bool = False, forward_only: bool = False,
    ) -> Plan:
        """Plans one batch for this rank; every layer with this mask and these head dims can use it.

        Collective: every rank calls it with the same batch, which is checked (lengths on a GPU are not read).

        Args:
            batch: the global lengths. Plans of one batch for several masks share what they can. On a GPU only with
                engine "cuda"; then nothing is copied to the host and the plan may be made inside a captured CUDA graph.
                Wrong ones make all results NaN; see Plan.check.
            sharding: "dual_chunk", "contiguous", or a Sharding of this batch over comm.size ranks.
            key_batch: for cross-attention on one rank, lengths and rows of the keys, sequence by sequence, on the side
                (host or GPU) where batch has its own; None: those of batch. The last query of a sequence stands at its
                last key, and the others before it: a query at position p of L_q at position p + L_k - L_q of L_k keys.
            like: where the lengths of batch lie on a GPU, a batch on the host as they usually are, which the order of
                work is chosen by; results do not depend on it.
            finite_padding: padding of q, k, v and dout holds finite numbers, as in a model that computes those rows
                too; it is then left in its place, where on one rank it would be copied around.
            forward_only: backward is not called with this plan, so that there need not be room for it.

        Raises:
            TypeError: batch or key_batch is no PackedBatch, or sharding neither a str nor a Sharding.
            ValueError: an unknown sharding, lengths that the sharding cannot split, a Sharding of another batch or
                size, a key_batch of another number of sequences, on the other side or for several ranks, or (on every
                rank) a batch that differs between ranks, or one for whose work buffers and one layer there is no room
                on the GPU of a rank of several, see memory; or the GPU has told meanwhile that lengths of the last
                plan were wrong.
            RuntimeError: lengths on the host, inside a captured CUDA graph.
        """
        if self._lengths is not None:
            last, self._lengths = self._lengths, None
            last.check(wait=False)
        plan = self._outline(batch, sharding, key_batch, like, finite_padding)
        forward_only = as_bool("forward_only", forward_only)
        fingerprint, refusal = 0, ""
        if self.comm.size > 1:
            fingerprint = self._fingerprint(plan.sharding, plan.key_batch)
            refusal = self._shortage(plan, forward_only)
        self.comm.agree("the plan's batch, sharding and attention", fingerprint, refusal)
        arrays = self._engine.plan_arrays(plan.sharding, self.comm.rank, self.window, self._tiles, key_batch)
        self._lengths = arrays.lengths
        plan = replace(plan, arrays=arrays)
        _plans.setdefault(self.comm, weakref.WeakSet()).add(plan)
        return plan

    def memory(
        self, batch: PackedBatch, sharding: str | Sharding = "dual_chunk", key_batch: PackedBatch | None = None,
        like: PackedBatch | None = None, finite_padding: bool = False,
    ) -> Memory:
        """Bytes of every buffer that a layer and its plan take on this rank, before anything is allocated.

        Not collective, as it depends on the shapes of the batch alone; lengths on a GPU are not read.

        Args:
            batch, sharding, key_batch, like, finite_padding: as for plan.

        Returns:
            name -> bytes. For a step of `n` layers that share a plan and keep everything for the backward, count work
            + n * per_layer + the gradients of one layer.

        Raises:
            TypeError, ValueError: as plan, for what it finds on one rank.
        """
        return self._memory(self._outline(batch, sharding, key_batch, like, finite_padding))

    def _outline(
        self, batch: PackedBatch, sharding: str | Sharding, key_batch: PackedBatch | None, like: PackedBatch | None,
        finite_padding: bool,
    ) -> Plan:
        """A plan without its arrays."""
        if isinstance(sharding, str):
            sharding = Sharding(batch, self.comm.size, sharding)
        if not isinstance(sharding, Sharding):
            raise TypeError(
                f"sharding is {found(sharding)}; wanted 'dual_chunk', 'contiguous' or a Sharding; pass one of these"
            )
        if sharding.batch is not as_batch(batch):
            raise ValueError(
                "sharding was made for another PackedBatch, wanted the one passed as batch; make it with "
                "Sharding(batch, comm.size)"
            )
        if sharding.cp_size != self.comm.size:
            raise ValueError(
                f"sharding has cp_size {sharding.cp_size}, wanted {self.comm.size}, the ranks of comm; "
                f"make it with Sharding(batch, {self.comm.size})"
            )
        if key_batch is not None:
            _check_key_batch(key_batch, batch, self.comm.size)
        return Plan(sharding, self.comm.rank, self.window, (self.head_dim, self.v_head_dim), self._tiles, NO_ARRAYS,
                    self._engine, key_batch, like, as_bool("finite_padding", finite_padding))

    def _memory(self, plan: Plan) -> Memory:
        groups = 1 if self.comm.size == 1 else self._groups(plan)
        layer = Layer(self.num_heads, self.num_kv_heads, self.dtype, self.deterministic, groups, self._keeps(plan))
        return pipeline.memory(self._engine, self.comm, plan, layer)

    def _shortage(self, plan: Plan, forward_only: bool) -> str:
        """Why the plan's work buffers and one layer cannot be there; "" if they can, or nobody knows.

        What only lingers counts as free: windows that are there, and the buffers of plans made before, as a loop still
        holds the last one while it makes the next. Other arrays that it drops later are in use.
        """
        # Packs of as many rows take as much, but for some bytes per sequence.
        rows = plan.local_rows, plan.key_rows, plan.batch.on_device, plan.has_blind_queries
        if self._last_memory is None or self._last_memory[0] != rows:
            self._last_memory = rows, self._memory(plan)
        memory, held = self._last_memory[1], self.comm.held_bytes()
        there = sum(memory[name] for name, size in held.items() if name in memory and memory[name] <= size)
        there += sum(before.held_bytes() for before in _plans.get(self.comm, ()))
        wanted = memory.wanted(forward_only)
        free = self._engine.free_bytes(wanted - there)
        if free is None:
            return ""
        return (f"the batch needs {in_units(wanted)} of GPU memory for its work buffers and one layer, wanted at most "
                f"the {in_units(free + there)} that are free; pass fewer tokens, spread them over more ranks, or make "
                f"CPAttention with keep_keys=False or more head_groups (CPAttention.memory says what takes how much)")

    def forward(
        self, q: Any, k: Any, v: Any, plan: Plan, return_max_logit: bool = False, keys: Keys | None = None
    ) -> tuple[Any, Saved]:
        """Attention of this rank's rows over the keys of all ranks. Collective.

        Args:
            q: (local_rows, num_heads, head_dim), this rank's rows in the order of plan.rows.
            k: (local_rows, num_kv_heads, head_dim); for cross-attention plan.key_rows rows, in sequence order.
            v: (local_rows, num_kv_heads, v_head_dim), rows as k.
            plan: from this attention's plan method, or that of one with the same mask and head dims.
            return_max_logit: also compute saved.max_logit.
            keys: from gather, of the same k, v and plan, if that has been called before.

        Returns:
            (out, saved): out (local_rows, num_heads, v_head_dim), a new array, 0 for a query that sees no key, as its
                gradient; saved goes to backward.

        Raises:
            TypeError: an array of the wrong dtype or on the wrong device, or a plan that is none.
            ValueError: an array of the wrong shape, a plan of another rank, size, mask, engine or head dim, or one
                whose lengths the GPU has found wrong meanwhile.
        """
        self._check_plan(plan)
        return_max_logit = as_bool("return_max_logit", return_max_logit)
        q = self._checked("q", q, (plan.local_rows, self.num_heads, self.head_dim))
        k = self._checked("k", k, (plan.local_key_rows, self.num_kv_heads, self.head_dim))
        v = self._checked("v", v, (plan.local_key_rows, self.num_kv_heads, self.v_head_dim))
        keys = self._checked_keys(keys, k, v, plan)
        kept: list[tuple[Any, Any]] | None = [] if self._keeps(plan) else None
        out, lse, max_logit = pipeline.forward(
            self._engine, self.comm, keys, q, self.softmax_scale, return_max_logit, kept
        )
        return out, Saved(q, k, v, out, lse, max_logit, plan, self._saves, None if kept is None else tuple(kept))

    def gather(self, k: Any, v: Any, plan: Plan) -> Keys:
        """Starts to gather the keys and values of all ranks, for a forward or backward to come. Collective.

        For those who have something else to compute meanwhile, such as q, or the layer behind this one:

            keys = attn.gather(k, v, plan)
            out, saved = attn.forward(q, k, v, plan, keys=keys)
            ...
            keys = attn.gather(saved.k, saved.v, saved.plan)  # unless saved.keys has them
            dq, dk, dv = attn.backward(dout, saved, keys=keys)

        Args:
            k, v, plan: as for forward.

        Returns:
            Keys for one call. Two of a plan may be on their way at a time.

        Raises:
            TypeError, ValueError: as forward; also a ValueError if two are on their way.
        """
        self._check_plan(plan)
        k = self._checked("k", k, (plan.local_key_rows, self.num_kv_heads, self.head_dim))
        v = self._checked("v", v, (plan.local_key_rows, self.num_kv_heads, self.v_head_dim))
        return pipeline.gather(self._engine, self.comm, plan, k, v, self._groups(plan))

    def backward(self, dout: Any, saved: Saved, keys: Keys | None = None) -> tuple[Any, Any, Any]:
        """Gradients of forward for this rank's rows. Collective.

        Args:
            dout: (local_rows, num_heads, v_head_dim), gradient of out.
            saved: from forward of this attention, or of one that differs in nothing that saved.made_with names.
            keys: from gather, of saved.k and saved.v, if that has been called before; saved.keys are used first.

        Returns:
            (dq, dk, dv): new arrays, shapes and dtype of q, k, v. dk and dv are summed over ranks in float32.

        Raises:
            TypeError, ValueError: as forward; also a ValueError for a saved of another attention.
        """
        dq, dk_dv = self._backward(dout, saved, keys, at_once=True)
        return dq, *dk_dv()

    def start_backward(self, dout: Any, saved: Saved, keys: Keys | None = None) -> tuple[Any, Sums]:
        """backward, with dq at once, and dk and dv on their way, for what needs dq alone meanwhile. Collective.

        Args:
            dout, saved, keys: as for backward.

        Returns:
            (dq, dk_dv): dk_dv() has the current stream wait and returns (dk, dv).

        Raises:
            TypeError, ValueError: as backward.
        """
        return self._backward(dout, saved, keys, at_once=False)

    def _backward(self, dout: Any, saved: Saved, keys: Keys | None, at_once: bool) -> tuple[Any, Sums]:
        if not isinstance(saved, Saved):
            raise TypeError(f"saved is {found(saved)}; wanted a Saved; pass the one that forward returned")
        _check_same("saved was made with", saved.made_with, self._saves, "pass what this attention's forward returned")
        plan = saved.plan
        self._check_plan(plan)
        dout = self._checked("dout", dout, (plan.local_rows, self.num_heads, self.v_head_dim))
        self._check_saved(saved, type(dout))
        if saved.keys is not None:
            keys = pipeline.kept(saved.keys, saved.k, saved.v, plan)
        keys = self._checked_keys(keys, saved.k, saved.v, plan)
        return pipeline.backward(
            self._engine, self.comm, keys, dout, saved.q, saved.out, saved.lse, self.softmax_scale, self.deterministic,
            at_once,
        )

    def cache(self, num_texts: int, capacity: int) -> KVCache:
        """An empty cache for decode, with room for `capacity` rows of keys and values of each of num_texts texts.

        Raises:
            TypeError: a count that is no int.
            ValueError: a count out of range, or a comm of several ranks.
        """
        shape = self.num_kv_heads, (self.head_dim, self.v_head_dim)
        return make_cache(self._engine, self.comm.size, num_texts, capacity, *shape, self.dtype, self.window)

    def decode(self, q: Any, k: Any, v: Any, cache: KVCache) -> Any:
        """Attention of the next rows of every text over all that the cache has of it, these rows included.

        It copies nothing to the host and waits for nothing. Once it has run, it can be captured in a CUDA graph, whose
        replays go on from the lengths that they find.

        Args:
            q: (num_texts * n, num_heads, head_dim), n rows of text 0, then of text 1, ...; n is any number >= 1.
            k: (num_texts * n, num_kv_heads, head_dim); v: (.., v_head_dim): appended to the cache.
            cache: from this attention's cache method, or from that of one with the same kv heads, head dims and mask.

        Returns:
            (num_texts * n, num_heads, v_head_dim), a new array; 0 for texts that do not fit, see KVCache.lengths.

        Raises:
            TypeError: an array of the wrong dtype or on the wrong device, or a cache that is none.
            ValueError: an array of the wrong shape, or a cache of another attention.
        """
        rows = rows_to_decode(q, cache)
        _check_same("cache was made for", cache.made_for, self._caches, "make it with this attention's cache method")
        q = self._checked("q", q, (rows, self.num_heads, self.head_dim))
        k = self._checked("k", k, (rows, self.num_kv_heads, self.head_dim))
        v = self._checked("v", v, (rows, self.num_kv_heads, self.v_head_dim))
        out, _ = self._engine.attn_decode(q, self._engine.cache_append(k, v, cache), cache, self.softmax_scale)
        return out

    def flops(self, plan: Plan | PackedBatch) -> Flops:
        """Operations of one forward and one backward over a batch, of all ranks together.

        By FlashAttention's convention, so that speeds can be compared: products of visible pairs alone, two forward
        (one as wide as q and k, one as v), and 2.5 times as many operations backward (five products).

        Args:
            plan: as for forward, or a batch of self-attention that needs no plan; lengths on the host.

        Raises:
            TypeError, ValueError: as forward; also a ValueError if the lengths lie on a GPU.
        """
        if not isinstance(plan, PackedBatch):
            self._check_plan(plan)
        pairs = visible_pairs(plan, plan, self.window) if isinstance(plan, PackedBatch) else plan.visible_pairs
        multiply_adds = pairs * self.num_heads * (self.head_dim + self.v_head_dim)
        return Flops(forward=2 * multiply_adds, backward=5 * multiply_adds)

    def _groups(self, plan: Plan) -> int:
        """How many groups of kv heads are gathered, computed and summed one after another."""
        if self.head_groups is not None:
            return self.head_groups
        foreign = (plan.cp_size - 1) * plan.local_key_rows * self.num_kv_heads * (self.head_dim + self.v_head_dim)
        wanted = max((n for n, size in HEAD_GROUPS.items() if foreign * self.dtype.itemsize >= size), default=1)
        return math.gcd(self.num_kv_heads, wanted) if self.comm.overlaps else 1

    def _keeps(self, plan: Plan) -> bool:
        """Whether forward keeps the keys of all ranks: by default if Saved grows by no more than it is anyway."""
        if self.comm.size == 1:
            return False
        heads = plan.local_rows * self.num_heads + plan.local_key_rows * self.num_kv_heads
        return plan.key_rows * self.num_kv_heads <= heads if self.keep_keys is None else self.keep_keys

    def _checked_keys(self, keys: Keys | None, k: Any, v: Any, plan: Plan) -> Keys:
        """Keys for a call, which have just been asked for if there were none."""
        if keys is None:
            return pipeline.gather(self._engine, self.comm, plan, k, v, self._groups(plan), at_once=True)
        if not isinstance(keys, Keys):
            raise TypeError(f"keys is {found(keys)}; wanted what gather returned; pass that, or leave it out")
        if keys.used:
            raise ValueError("keys were used by a forward or backward before, wanted those of this call; call gather "
                             "again, or leave it out")
        if keys.plan is not plan or any(_place(x) != _place(y) for x, y in ((keys.k, k), (keys.v, v))):
            raise ValueError("keys were gathered from other k and v or with another plan, wanted those of this call; "
                             "call gather with the same arrays, or leave it out")
        return keys

    def _checked_dtype(self, dtype: DTypeLike) -> np.dtype[Any]:
        try:
            known = np.dtype(dtype) if isinstance(dtype, (str, np.dtype, type)) else None
        except (TypeError, SyntaxError):
            known = None
        if known is None or known.name not in self._engine.dtypes or not known.isnative:
            raise TypeError(
                f"dtype is {shown(dtype) if known is None else known}, wanted one of {', '.join(self._engine.dtypes)} "
                f"for engine {self.engine!r}; cast the inputs, or use engine='reference'"
            )
        return known

    def _check_head_dims(self) -> None:
        known = self._engine.head_dims
        if known is not None and (self.head_dim, self.v_head_dim) not in known:
            wanted = ", ".join(str(d) if d == dv else f"{d}/{dv}" for d, dv in known)
            raise ValueError(
                f"head_dim/v_head_dim is {self.head_dim}/{self.v_head_dim}, wanted one of {wanted} for engine "
                f"{self.engine!r}; pad the heads with zeros to one of these, or use engine='reference'"
            )

    def _check_plan(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan is a {type(plan).__name__}, wanted a Plan; make it with attn.plan(batch)")
        _check_same("plan was made for", plan.made_for, self._plans, "make it with this attention's plan(batch)")
        plan.check(wait=False)
        plan.enter()

    def _check_saved(self, saved: Saved, kind: Any) -> None:
        """Compares attributes alone: this is on the hot path, and a kernel would read out of bounds."""
        queries, keys = saved.plan.local_rows, saved.plan.local_key_rows
        for name, rows, heads, width in (
            ("q", queries, self.num_heads, self.head_dim), ("k", keys, self.num_kv_heads, self.head_dim),
            ("v", keys, self.num_kv_heads, self.v_head_dim), ("out", queries, self.num_heads, self.v_head_dim),
            ("lse", queries, self.num_heads, None),
        ):
            x = getattr(saved, name)
            shape, dtype = ((rows, heads, width), self.dtype) if width else ((heads, rows), self._lse_dtype)
            if type(x) is not kind or x.shape != shape or x.dtype != dtype or not x.flags.c_contiguous:
                raise ValueError(
                    f"saved.{name} is {_kind(x)}, a {type(x).__name__}; wanted {dtype} {shape} as forward saved it; "
                    f"pass what forward returned, or the same arrays C-contiguous on the same device"
                )

    def _checked(self, name: str, x: Any, shape: tuple[int, ...]) -> Any:
        x = self._engine.from_user(name, x)
        if x.dtype != self.dtype:
            raise TypeError(f"{name} is {x.dtype}, wanted {self.dtype}; cast it, or make CPAttention(dtype=...) match")
        if x.shape != shape:
            raise ValueError(
                f"{name} has shape {x.shape}, wanted {shape} = (local_rows, heads, width); pass this rank's rows "
                f"(Sharding.shard cuts them out) with the heads that CPAttention was made for"
            )
        return x

    def _fingerprint(self, sharding: Sharding, key_batch: PackedBatch) -> int:
        """A number that differs where ranks would run collectives of different sizes or mask differently."""
        batch = sharding.batch
        state = (
            sharding.strategy, batch.num_seqs, batch.total_rows, key_batch.total_rows, self.window, self.num_heads,
            self.num_kv_heads, self.head_dim, self.v_head_dim, self.softmax_scale, self.dtype.name, self.engine,
            self.head_groups, self.keep_keys,
        )
        digest = hashlib.sha256(repr(state).encode())
        if not batch.on_device:
            for lengths in dict.fromkeys((batch, key_batch)):
                digest.update(lengths.cu_seqlens.tobytes() + lengths.cu_seqlens_padded.tobytes())
        return int.from_bytes(digest.digest()[:7], "little")


def _check_same(what: str, made: dict[str, Any], wanted: dict[str, Any], remedy: str) -> None:
    if made != wanted:
        name = next(name for name in wanted if made[name] != wanted[name])
        raise ValueError(f"{what} {name} {made[name]}, wanted {wanted[name]}; {remedy}")


def _place(x: Any) -> tuple[Any, ...]:
    """Where an array lies, and how."""
    return x.data.ptr if not isinstance(x, np.ndarray) else x.__array_interface__["data"][0], x.shape, x.strides


def _kind(x: Any) -> str:
    """Dtype and shape of an array, without its contents."""
    return f"{x.dtype} {tuple(x.shape)}" if is_array(x) else shown(x)


def choose_engine(engine: str, comm: Comm) -> tuple[Any, str]:
    """The engine module for a comm, and why it was chosen.

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
        obstacle = f"a comm of backend {comm.name!r} moves host arrays" if "cuda" not in comm.devices else _no_gpu()
    if engine == "cuda" and obstacle:
        raise (RuntimeError if "cuda" in comm.devices else ValueError)(
            f"engine is 'cuda', but {obstacle}; use engine='reference', or a comm and machine with GPUs"
        )
    why: str | None = "asked for"
    if engine == "auto":
        engine, why = ("reference", obstacle) if obstacle else ("cuda", "a GPU is usable")
    module = importlib.import_module(ENGINES[engine])
    if module.device not in comm.devices:
        raise ValueError(
            f"engine {engine!r} computes on {module.device} arrays, but a comm of backend {comm.name!r} moves "
            f"{' and '.join(sorted(comm.devices))} arrays; use engine='cuda', or thdattn.comm.init('mpi')"
        )
    return module, str(why)


def _check_key_batch(key_batch: PackedBatch, batch: PackedBatch, cp_size: int) -> None:
    if not isinstance(key_batch, PackedBatch):
        raise TypeError(
            f"key_batch is a {type(key_batch).__name__}, wanted a PackedBatch of the keys' lengths; make it with "
            f"PackedBatch(cu_seqlens), or leave it out for self-attention"
        )
    if cp_size > 1:
        raise ValueError(
            f"key_batch was passed for {cp_size} ranks, wanted one: keys of other lengths are not spread over ranks; "
            f"use thdattn.comm.init('single') on every rank, for sequences of its own"
        )
    if key_batch.num_seqs != batch.num_seqs:
        raise ValueError(
            f"key_batch has {key_batch.num_seqs} sequences, wanted {batch.num_seqs} as batch; pass one length of keys "
            f"per sequence of queries, 0 for none"
        )
    if key_batch.on_device != batch.on_device:
        here, there = ("a GPU", "the host") if batch.on_device else ("the host", "a GPU")
        raise ValueError(
            f"batch has its lengths on {here} but key_batch on {there}; wanted both on one side; "
            f"copy those of key_batch to {here}"
        )


def _no_gpu() -> str | None:
    """Why the CUDA engine cannot run here, or None. Missing drivers raise more than ImportError."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"CuPy finds no usable GPU ({type(error).__name__}: {error})"
    if not count:
        return "CuPy finds no GPU"
    capability = int(cupy.cuda.Device().compute_capability)
    return None if capability >= 80 else f"the GPU has compute capability {capability / 10}, wanted 8.0 or later"
