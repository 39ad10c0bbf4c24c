"""CPAttention: validate arguments, select an engine and a method, plan batches, and run the method; and its Saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from numpy.typing import DTypeLike

from thdattn.arguments import (
    Array,
    as_array,
    as_bool,
    as_count,
    as_softcap,
    as_softmax_scale,
    as_window,
    check_kind,
    check_same,
    found,
    is_array,
    shown,
)
from thdattn.comm import Comm
from thdattn.engines import AttentionOptions, BackwardInputs, Engine, ForwardInputs
from thdattn.engines.select import as_engine_dtype, check_head_dims, choose_engine
from thdattn.kv_cache import CACHE_TRAITS, KVCache, make_cache, rows_to_decode
from thdattn.methods import all_gather
from thdattn.methods.all_gather import GatheredKV
from thdattn.methods.base import MethodOptions, lse_dtype
from thdattn.methods.select import MethodSelection, keeps_keys
from thdattn.packing import PackedBatch, as_like
from thdattn.plan import build
from thdattn.plan.handles import give_handle
from thdattn.plan.mask import visible_pairs
from thdattn.plan.memory import Flops, Layer, Memory, attention_flops, count_as_free, shortage
from thdattn.plan.plan import NO_ARRAYS, Plan
from thdattn.sharding import Sharding

_SAME_PLAN = "pass every rank the same batch and sharding, and make CPAttention with the same arguments"


class CPAttention:
    """Attention over packed sequences whose rows are spread over the ranks of a comm.

    Query head h reads kv head h // (num_heads // num_kv_heads). Padding rows of q, k, v and dout never change a
    result, even if they hold NaN. Padding rows of out, dq, dk and dv are exactly 0.

    Args:
        comm: the ranks, from thdattn.comm.init or thdattn.comm.run_local. A cp_comm_type with a "+" has two levels and
            takes (inner, outer) or thdattn.comm.levels.Levels: inner connects neighbours, outer connects the ranks
            that have the same number in their groups of neighbours.
        num_heads: query heads.
        head_dim: width of q and k.
        num_kv_heads: heads of k and v, a divisor of num_heads; num_heads by default.
        v_head_dim: width of v and out; head_dim by default.
        causal: a query sees no later position.
        window: (left, right), how many positions before and after its own a query sees; -1 = unlimited. Causal
            attention has no right side: -1 or 0.
        softmax_scale: factor on q.k, > 0; head_dim**-0.5 by default.
        dtype: of q, k, v: "bfloat16" or "float16"; the reference engine also takes "float32" and "float64".
        deterministic: results are bitwise the same on every run with the same inputs and cp_size. The CUDA engine's
            backward is then slower, because it sums dq in a fixed order.
        engine: "cuda", "reference", or "auto": cuda where a GPU is usable and the comm takes GPU arrays.
        head_groups: number of groups of kv heads, a divisor of num_kv_heads; the same on all ranks. Groups are gathered
            and computed one after another, so that the exchange of one group overlaps the compute of another. The
            default follows the bytes that a rank receives; it is 1 where nothing overlaps (comm.overlaps). all_gather
            uses up to 3 groups by default, of which the first is the smallest; over NCCL it uses up to 8 equal ones,
            if the exchange takes a large enough share of the attention.
        keep_keys: forward keeps the gathered keys and values for the backward, which otherwise gathers them again; the
            same on all ranks. By default they are kept if they are no larger than what the layer keeps anyway, and
            with "balanced" whenever ranks exchange some. a2a keeps q, k, v and out as exchanged, by default always.
            p2p keeps nothing.
        cp_comm_type: what ranks exchange. "all_gather": the keys and values of all ranks; with the sharding "balanced",
            those that a rank's queries see. "a2a": heads, so that a rank has all rows of some heads. "p2p": keys and
            values round a ring, with every sharding those of all ranks, where these would take too much memory at once.
            "a2a+all_gather", "a2a+p2p": heads among the ranks of inner, keys and values among the ranks of outer.
        softcap: if > 0, a logit is softcap * tanh(softmax_scale * q.k / softcap), which stays below softcap; 0: no cap.
        sinks: every query head has a sink: a logit without a value that joins the softmax of each of the head's rows.
            A query may then attend to nothing. forward takes the sinks, and backward returns their gradient.

    Raises:
        TypeError: an argument of the wrong type, or a dtype that the engine does not compute in.
        ValueError: a value out of range, head dims that the engine has no kernel for, or an engine that does not
            work with this comm.
        RuntimeError: engine="cuda" where CuPy or a GPU is missing; the message says which.
    """

    def __init__(
        self,
        comm: Comm | tuple[Comm, Comm],
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
        cp_comm_type: str = "all_gather",
        softcap: float = 0.0,
        sinks: bool = False,
    ) -> None:
        self._selection = MethodSelection.of(comm, cp_comm_type)
        self.comm, self.cp_comm_type = self._selection.comm, self._selection.cp_comm_type
        self.num_heads = as_count("num_heads", num_heads)
        self.num_kv_heads = as_count("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads)
        self.head_dim = as_count("head_dim", head_dim)
        self.v_head_dim = as_count("v_head_dim", head_dim if v_head_dim is None else v_head_dim)
        self.causal = as_bool("causal", causal)
        self.window = as_window(window, self.causal)
        self.softmax_scale = self.head_dim**-0.5 if softmax_scale is None else as_softmax_scale(softmax_scale)
        self.softcap, self.sinks = as_softcap(softcap), as_bool("sinks", sinks)
        self.deterministic = as_bool("deterministic", deterministic)
        self.head_groups = None if head_groups is None else as_count("head_groups", head_groups)
        self.keep_keys = None if keep_keys is None else as_bool("keep_keys", keep_keys)
        self._selection.check_heads(self.num_heads, self.num_kv_heads, self.head_groups)
        self._engine: Engine = choose_engine(engine, self.comm)[0]
        self.engine: str = self._engine.name
        self.dtype = as_engine_dtype(self._engine, dtype)
        check_head_dims(self._engine, self.head_dim, self.v_head_dim)
        self._tiles = self._engine.tiles(self.head_dim, self.v_head_dim)
        self._attention = AttentionOptions(self.softmax_scale, self.softcap, self.deterministic)
        self._lengths: Any = None  # of the last plan, if they are on a GPU
        self._options: WeakKeyDictionary[Plan, MethodOptions] = WeakKeyDictionary()
        self._plans = {
            "cp_size": self.comm.size, "cp_rank": self.comm.rank, "window": self.window, "engine": self.engine,
            "head_dims": (self.head_dim, self.v_head_dim), "tiles": self._tiles, "head_ranks": self._selection.inner,
        }
        self._saves = {
            "num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim, "softmax_scale": self.softmax_scale, "dtype": self.dtype,
            "deterministic": self.deterministic, "softcap": self.softcap, "sinks": self.sinks,
        }
        self._asked = {
            **self._saves, "dtype": self.dtype.name, "causal": self.causal, "window": self.window,
            "engine": self.engine, "cp_comm_type": self.cp_comm_type, "head_groups": self.head_groups,
            "keep_keys": self.keep_keys,
        }
        self._caches = {name: {**self._plans, **self._saves}[name] for name in CACHE_TRAITS}
        self._handle: Any  # by which thdattn.torch finds it again in code that torch.compile made
        give_handle(self)

    def __repr__(self) -> str:
        layer = {**self._saves, "causal": self.causal, "window": self.window, "engine": repr(self.engine),
                 "cp_comm_type": repr(self.cp_comm_type)}
        return f"<CPAttention {', '.join(f'{name}={value}' for name, value in layer.items())}, {self.comm!r}>"

    def plan(
        self, batch: PackedBatch, sharding: str | Sharding | None = None, key_batch: PackedBatch | None = None,
        like: PackedBatch | None = None, finite_padding: bool = False, forward_only: bool = False,
    ) -> Plan:
        """Plan one batch for this rank; every layer with this mask and these head dims can use the plan.

        Collective: every rank calls it with the same batch, which is checked (lengths on a GPU are not read).

        Args:
            batch: the global lengths. Plans of one batch for several masks share arrays where they can. Prefix trees
                need a causal attention without a window. Lengths on a GPU need engine "cuda": nothing is copied to the
                host, and a captured CUDA graph may make the plan. Wrong lengths on a GPU make all results NaN; see
                Plan.check.
            sharding: "dual_chunk", "contiguous" or "balanced", or a Sharding of this batch over comm.size ranks. The
                default is "contiguous" for a2a, which also takes "dual_chunk", and "dual_chunk" for the other methods.
                With two levels it spreads rows over groups of neighbours, who own equal slices of their group's rows.
            key_batch: for cross-attention on one rank, the lengths and rows of the keys, sequence by sequence, on the
                same side (host or GPU) as batch; None: self-attention. Queries and keys of a sequence are aligned at
                the end: the query at position p of L_q has position p + L_k - L_q among the L_k keys.
            like: for lengths on a GPU, a batch on the host with typical lengths, the same on all ranks. It decides how
                many heads are exchanged and computed together; results do not depend on it.
            finite_padding: padding of q, k, v and dout holds finite numbers, as in a model that computes those rows
                too. One rank then reads rows in place, where it would otherwise first copy them without padding.
            forward_only: backward is not called with this plan, so free memory need not hold its buffers.

        Raises:
            TypeError: batch, key_batch or like is no PackedBatch, or sharding neither a str nor a Sharding.
            ValueError: an unknown sharding, lengths that it cannot split, or a Sharding of another batch or size. A
                key_batch of another number of sequences, on the other side, or for several ranks. On every rank: prefix
                trees that this attention cannot have, or a batch or like that differs between ranks. Also on every
                rank: one of several has too little free GPU memory for the work buffers and one layer (see memory), or
                wrong lengths on a GPU in its previous plan.
            RuntimeError: lengths on the host, inside a captured CUDA graph.
        """
        plan = self._outline(batch, sharding, key_batch, like, finite_padding)
        forward_only = as_bool("forward_only", forward_only)
        refusal = build.refused_trees(plan) or build.exceeded_capacity(plan) or build.found_wrong(self._lengths)
        self._lengths = None
        if self.comm.size > 1:
            refusal = refusal or shortage(self._engine, self.comm, self._memory(plan), forward_only)
        self.comm.agree("the plan", self._description(plan), refusal, _SAME_PLAN)
        plan = build.with_arrays(plan)
        self._lengths = plan.arrays.lengths
        count_as_free(self.comm, plan)
        return plan

    def sharding(self, batch: PackedBatch, sharding: str | Sharding | None = None) -> Sharding:
        """Return the sharding that plan would use, for example to decide in advance which rank reads which document.

        Args:
            batch, sharding: as for plan.

        Raises:
            TypeError, ValueError: as plan, for what it finds on one rank.
        """
        return self._selection.sharding(batch, sharding)

    def prepare(self, batch: PackedBatch, sharding: str | Sharding | None = None) -> None:
        """Compute the host's part of plan ahead, in another thread, for lengths on the host. Not collective.

        The sharding "balanced" derives from the lengths which rank owns each row and which rows ranks exchange. The
        result is kept as long as the batch.

        Args:
            batch, sharding: as for plan, which is then to be called with the same batch.

        Raises:
            TypeError, ValueError: as plan, for what it finds on one rank.
        """
        plan = self._outline(batch, sharding, None, None, False)
        if refusal := build.refused_trees(plan):
            raise ValueError(refusal)
        _ = (plan.core or plan).routes

    def memory(
        self, batch: PackedBatch, sharding: str | Sharding | None = None, key_batch: PackedBatch | None = None,
        like: PackedBatch | None = None, finite_padding: bool = False,
    ) -> Memory:
        """Return the bytes of every buffer that a layer and its plan take on this rank, before any allocation.

        Not collective, as it depends on the shapes of the batch alone; lengths on a GPU are not read.

        Args:
            batch, sharding, key_batch, like, finite_padding: as for plan.

        Returns:
            name -> bytes. A step of `n` layers that share a plan, forwards before backwards, takes work + n *
            per_layer + the gradients of one layer.

        Raises:
            TypeError, ValueError: as plan, for what it finds on one rank.
        """
        return self._memory(self._outline(batch, sharding, key_batch, like, finite_padding))

    def _outline(
        self, batch: PackedBatch, sharding: str | Sharding | None, key_batch: PackedBatch | None,
        like: PackedBatch | None, finite_padding: bool,
    ) -> Plan:
        """Return a plan without its arrays."""
        sharding = self.sharding(batch, sharding)
        if key_batch is not None:
            build.check_key_batch(key_batch, batch, self.comm.size)
        plan = Plan(sharding, self.comm.rank, self.window, (self.head_dim, self.v_head_dim), self._tiles, NO_ARRAYS,
                    self._engine, key_batch or sharding.batch, as_like(like), as_bool("finite_padding", finite_padding))
        return build.with_core(plan, self._selection.inner)

    def _memory(self, plan: Plan) -> Memory:
        layer = Layer(self.num_heads, self.num_kv_heads, self.dtype, self.deterministic, self._groups(plan),
                      self._keeps(plan))
        return self._selection.memory(plan, layer)

    def forward(
        self, q: Any, k: Any, v: Any, plan: Plan, return_max_logit: bool = False, keys: GatheredKV | None = None,
        sinks: Any = None,
    ) -> tuple[Any, Saved]:
        """Compute attention of this rank's rows over the keys of all ranks. Collective.

        Args:
            q: (local_rows, num_heads, head_dim), this rank's rows in the order of plan.rows.
            k: (local_rows, num_kv_heads, head_dim); for cross-attention plan.key_rows rows, in sequence order.
            v: (local_rows, num_kv_heads, v_head_dim), rows as k.
            plan: from the plan method of this attention, or of one with the same mask and head dims.
            return_max_logit: also compute saved.max_logit.
            keys: from gather, of the same k, v and plan, if gather has been called before.
            sinks: (num_heads,) float32 (float64 for float64 inputs), finite, or -inf for a head without a sink; the
                same on all ranks. Required by an attention with sinks, refused by one without.

        Returns:
            (out, saved): out is a new (local_rows, num_heads, v_head_dim) array. A query that sees no key has out 0
                and gradient 0. Pass saved to backward.

        Raises:
            TypeError: an array of the wrong dtype or on the wrong device, or plan is no Plan.
            ValueError: an array of the wrong shape; a plan of another rank, size, mask, engine or head dim; on one rank
                also a plan whose lengths the GPU has found wrong. Over several ranks out is NaN for such a plan.
        """
        with self.comm.checked("attention forward", self._description, plan):
            self._enter(plan)
            return_max_logit = as_bool("return_max_logit", return_max_logit)
            q = self._checked("q", q, (plan.local_rows, self.num_heads, self.head_dim))
            self._check_gathered(keys, k, v, plan)
            k, v = self._checked_keys(*((k, v) if keys is None else (keys.k, keys.v)), plan)
            sinks = self._checked_sinks(sinks)
        out, lse, max_logit, kept = self._selection.method(plan).forward(
            self._selection.ranks, ForwardInputs(q, k, v, plan, sinks), self._method_options(plan), return_max_logit,
            keys)
        return out, Saved(q, k, v, out, lse, max_logit, plan, self._saves, kept, sinks, plan.generation)

    def gather(self, k: Any, v: Any, plan: Plan) -> GatheredKV:
        """Start to gather the keys and values of all ranks for a later forward or backward. Collective.

        The exchange then overlaps other work, such as computing q, or the next layer:

        ```python
        keys = attn.gather(k, v, plan)
        out, saved = attn.forward(q, k, v, plan, keys=keys)
        ...
        keys = attn.gather(saved.k, saved.v, saved.plan)  # unless saved.keys has them
        dq, dk, dv = attn.backward(dout, saved, keys=keys)
        ```

        Args:
            k, v, plan: as for forward.

        Returns:
            GatheredKV for one call. A plan allows two unfinished gathers at a time.

        Raises:
            TypeError, ValueError: as forward; also a ValueError for a third unfinished gather.
        """
        with self.comm.checked("attention gather", self._description, plan):
            self._enter(plan)
            self._selection.check_gathers("gather was called", plan)
            checked = self._checked_keys(k, v, plan)
        keys = all_gather.gather(self._selection.ranks, plan, *checked, self._groups(plan), given=(k, v))
        keys.generation = plan.generation
        return keys

    def can_gather(self, plan: Plan) -> bool:
        """Return whether gather takes this plan: whether ranks exchange keys and values only, and all of them."""
        return self._selection.can_gather(plan)

    def backward(self, dout: Any, saved: Saved, keys: GatheredKV | None = None) -> tuple[Any, ...]:
        """Compute the gradients of forward for this rank's rows. Collective.

        Args:
            dout: (local_rows, num_heads, v_head_dim), gradient of out.
            saved: from forward of this attention, or of one that agrees in all fields of saved.made_with.
            keys: from gather, of saved.k and saved.v, if gather has been called before; saved.keys take precedence.

        Returns:
            (dq, dk, dv): new arrays with the shapes and dtype of q, k, v. dk and dv are summed over ranks in float32.
            With sinks (dq, dk, dv, dsinks): dsinks is this rank's partial sum. Sum it over ranks, as for weights.

        Raises:
            TypeError, ValueError: as forward; also a ValueError for saved of another attention, or of lengths that
                the plan no longer has.
        """
        dq, dk_dv = self._backward(dout, saved, keys, at_once=True)
        return dq, *dk_dv()

    def start_backward(
        self, dout: Any, saved: Saved, keys: GatheredKV | None = None
    ) -> tuple[Any, Callable[[], tuple[Any, ...]]]:
        """Compute dq and start to reduce dk and dv, so that work on dq overlaps the reduction. Collective.

        Args:
            dout, saved, keys: as for backward.

        Returns:
            (dq, dk_dv): dk_dv() makes the current stream wait and returns (dk, dv), with sinks (dk, dv, dsinks).

        Raises:
            TypeError, ValueError: as backward.
        """
        return self._backward(dout, saved, keys, at_once=False)

    def _backward(
        self, dout: Any, saved: Saved, keys: GatheredKV | None, at_once: bool
    ) -> tuple[Any, Callable[[], tuple[Any, ...]]]:
        with self.comm.checked("attention backward", lambda of: self._description(of.plan), saved):
            check_kind("saved", saved, Saved, "pass the one that forward returned")
            remedy = "pass what this attention's forward returned"
            check_same("saved was made with", saved.made_with, self._saves, remedy)
            plan = saved.plan
            self._enter(plan)
            dout = self._checked("dout", dout, (plan.local_rows, self.num_heads, self.v_head_dim))
            saved._check(type(dout))
            keys = None if saved.keys is not None else keys
            self._check_gathered(keys, saved.k, saved.v, plan)
        inputs = BackwardInputs(dout, saved.q, saved.k, saved.v, saved.out, saved.lse, plan)
        dq, dk_dv = self._selection.method(plan).backward(
            self._selection.ranks, inputs, self._method_options(plan), saved.keys, at_once, keys)
        if not self.sinks:
            return dq, dk_dv
        dsinks = self._engine.sinks_grad(dout, saved.out, saved.lse, saved.sinks)
        return dq, lambda: (*dk_dv(), dsinks)

    def cache(self, num_texts: int, capacity: int) -> KVCache:
        """Return an empty KV cache for decode: num_texts sequences of up to `capacity` rows of keys and values each.

        Raises:
            TypeError: a count that is no int.
            ValueError: a count out of range, or a comm of several ranks.
        """
        return make_cache(self._engine, self.comm.size, num_texts, capacity, self._caches)

    def decode(self, q: Any, k: Any, v: Any, cache: KVCache, sinks: Any = None) -> Any:
        """Append the next rows of every sequence to the cache, and compute their attention over the whole sequence.

        decode copies nothing to the host and never waits. After a first call a CUDA graph may capture it; replays
        continue from the lengths in the cache.

        Args:
            q: (num_texts * n, num_heads, head_dim), n rows of sequence 0, then of sequence 1, ...; any n >= 1.
            k: (num_texts * n, num_kv_heads, head_dim), appended to the cache.
            v: (num_texts * n, num_kv_heads, v_head_dim), appended to the cache.
            cache: from the cache method of this attention, or of one with the same kv heads, head dims and mask.
            sinks: as for forward.

        Returns:
            (num_texts * n, num_heads, v_head_dim), a new array; 0 for sequences that do not fit, see KVCache.lengths.

        Raises:
            TypeError: an array of the wrong dtype or on the wrong device, or cache is no KVCache.
            ValueError: an array of the wrong shape, or a cache of another attention.
        """
        rows = rows_to_decode(q, cache)
        check_same("cache was made for", cache.made_for, self._caches, "make it with this attention's cache method")
        q = self._checked("q", q, (rows, self.num_heads, self.head_dim))
        k = self._checked("k", k, (rows, self.num_kv_heads, self.head_dim))
        v = self._checked("v", v, (rows, self.num_kv_heads, self.v_head_dim))
        sinks = self._checked_sinks(sinks)
        key_ranges = self._engine.cache_append(k, v, cache)
        out, _ = self._engine.attn_decode(q, key_ranges, cache, self._attention, sinks)
        return out

    def flops(self, plan: Plan | PackedBatch) -> Flops:
        """Count the operations of one forward and one backward over a batch, summed over all ranks.

        FlashAttention's convention makes speeds comparable: it counts matrix products over visible pairs alone. The
        forward has two products, one of q's width and one of v's. The backward counts 2.5 times the forward.

        Args:
            plan: as for forward, or a batch of self-attention that needs no plan; lengths on the host.

        Raises:
            TypeError, ValueError: as forward; also a ValueError if the lengths are on a GPU.
        """
        if not isinstance(plan, PackedBatch):
            self._enter(plan)
        pairs = visible_pairs(plan, plan, self.window) if isinstance(plan, PackedBatch) else plan.visible_pairs
        return attention_flops(pairs, self.num_heads, (self.head_dim, self.v_head_dim))

    def _groups(self, plan: Plan) -> tuple[int, ...]:
        return self._selection.head_groups(plan, self.num_heads, self.num_kv_heads, self.dtype, self.head_groups)

    def _keeps(self, plan: Plan) -> bool:
        return keeps_keys(plan, self.num_heads, self.num_kv_heads, self.keep_keys)

    def _enter(self, plan: Plan) -> None:
        """Enter a plan for a call; raise for a plan of another attention, or of lengths that are known to be wrong."""
        check_kind("plan", plan, Plan, "make it with attn.plan(batch)")
        check_same("plan was made for", plan.made_for, self._plans, "make it with this attention's plan(batch)")
        plan.enter_call()

    def _check_gathered(self, keys: GatheredKV | None, k: Any, v: Any, plan: Plan) -> None:
        """Raise for gathered keys, unless None, that do not belong to these k, v and plan."""
        if keys is not None:
            self._selection.check_gathers("keys were passed", plan)
            if not isinstance(keys, GatheredKV):
                raise TypeError(f"keys is {found(keys)}; wanted what gather returned; pass that, or leave it out")
            keys.check(k, v, plan)

    def _method_options(self, plan: Plan) -> MethodOptions:
        """Return this plan's cached method options."""
        options = self._options.get(plan)
        if options is None:
            outer = None if plan.core is None else self._selection.between(plan)
            options = MethodOptions(self._attention, self._groups(plan), self._keeps(plan), outer)
            self._options[plan] = options
        return options

    def _checked(self, name: str, x: Any, shape: tuple[int, ...]) -> Any:
        return as_array(
            name, self._engine.from_user(name, x), shape, self.dtype,
            " = (local_rows, heads, width); pass this rank's rows (Sharding.shard cuts them out) with the heads that "
            "CPAttention was made for", "; cast it, or make CPAttention(dtype=...) match",
        )

    def _checked_sinks(self, sinks: Any) -> Any:
        """Return the engine's array of the sinks that a user passed, or None for an attention without."""
        if (sinks is not None) != self.sinks:
            raise ValueError(
                f"sinks is {'None' if sinks is None else shown(sinks)}, but the attention was made with sinks="
                f"{self.sinks}, wanted one with the other; pass (num_heads,) logits to CPAttention(sinks=True), and to "
                f"no other"
            )
        if sinks is None:
            return None
        sinks = self._engine.from_user("sinks", sinks)
        return as_array("sinks", sinks, (self.num_heads,), lse_dtype(self.dtype),
                        "; pass a logit for every query head", ", as lse; cast it")

    def _checked_keys(self, k: Any, v: Any, plan: Plan) -> tuple[Any, Any]:
        both = plan.local_key_rows, self.num_kv_heads
        return self._checked("k", k, (*both, self.head_dim)), self._checked("v", v, (*both, self.v_head_dim))

    def _description(self, plan: Plan) -> dict[str, Any]:
        return build.description(plan, self._asked)


@dataclass(frozen=True, eq=False, repr=False)  # comparing or printing arrays would make the host wait for a GPU
class Saved:
    """State that forward saves for backward.

    Attributes:
        q, k, v, plan: as passed, without a copy: do not write to them before backward.
        out: (local_rows, num_heads, v_head_dim), as returned.
        lse: (num_heads, local_rows) float32 (float64 for float64 input), natural log of the softmax sum, which includes
            the sink; -inf on padding, and for a query that sees no key.
        max_logit: (num_heads,) float32, the largest scaled and capped logit over the valid rows of all ranks, without
            sinks; -inf without valid rows, None if not asked for.
        made_with: heads, head dims, softmax_scale, dtype, deterministic, softcap and sinks, which must equal those of
            the attention whose backward takes it.
        keys: the received rows that the method keeps for its backward, such as the keys and values of all ranks by
            group of heads; None: backward receives them again.
        sinks: as passed, without a copy; None for an attention without sinks.
        generation: the Generation of the plan's lengths if these are on a GPU, else None.
    """

    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    max_logit: Array
    plan: Plan
    made_with: dict[str, Any]
    keys: tuple[Any, ...] | None = None
    sinks: Array = None
    generation: Any = None

    def __repr__(self) -> str:
        arrays = (f"{name} {_kind(getattr(self, name))}" for name in ("q", "k", "v", "out", "lse", "max_logit"))
        return f"<Saved: {', '.join(arrays)}, {self.plan!r}>"

    def _check(self, kind: Any) -> None:
        """Raise a ValueError for arrays that forward did not save, and for a plan that was refreshed since.

        It compares attributes alone, as this is on the hot path. A kernel would read out of bounds.

        Args:
            kind: type of the engine's arrays.
        """
        if self.generation is not None:
            self.generation.check("saved")
        rows, key_rows, (head_dim, v_head_dim) = self.plan.local_rows, self.plan.local_key_rows, self.plan.head_dims
        heads, kv_heads, dtype, sinks = (
            self.made_with[name] for name in ("num_heads", "num_kv_heads", "dtype", "sinks"))
        arrays = {
            "q": ((rows, heads, head_dim), dtype), "k": ((key_rows, kv_heads, head_dim), dtype),
            "v": ((key_rows, kv_heads, v_head_dim), dtype), "out": ((rows, heads, v_head_dim), dtype),
            "lse": ((heads, rows), lse_dtype(dtype)),
        }
        if sinks:
            arrays["sinks"] = (heads,), lse_dtype(dtype)
        for name, (shape, wanted) in arrays.items():
            x = getattr(self, name)
            if type(x) is not kind or x.shape != shape or x.dtype != wanted or not x.flags.c_contiguous:
                raise ValueError(
                    f"saved.{name} is {_kind(x)}, a {type(x).__name__}; wanted {wanted} {shape} as forward saved it; "
                    f"pass what forward returned, or the same arrays C-contiguous on the same device"
                )


def _kind(x: Any) -> str:
    """Describe an array by dtype and shape, without its contents."""
    return f"{x.dtype} {tuple(x.shape)}" if is_array(x) else shown(x)
