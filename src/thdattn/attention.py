"""CPAttention: validates once, has an engine and a method chosen, plans, and runs the method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from numpy.typing import DTypeLike

from thdattn.arguments import as_bool, as_count, as_softcap, as_softmax_scale, as_window, check_kind
from thdattn.checks import as_rows, as_sinks, check_plan, check_same
from thdattn.comm import Comm
from thdattn.engines import AttentionOptions, BackwardInputs, Engine, ForwardInputs
from thdattn.engines.select import as_engine_dtype, check_head_dims, choose_engine
from thdattn.kv_cache import CACHE_TRAITS, KVCache, make_cache, rows_to_decode
from thdattn.methods import all_gather
from thdattn.methods.all_gather import GatheredKV
from thdattn.methods.base import MethodOptions
from thdattn.methods.select import MethodSelection, keeps_keys
from thdattn.packing import PackedBatch, as_like
from thdattn.plan import build, free_memory
from thdattn.plan.flops import Flops, attention_flops
from thdattn.plan.handles import give_handle
from thdattn.plan.mask import visible_pairs
from thdattn.plan.memory import Layer, Memory
from thdattn.plan.plan import NO_ARRAYS, Plan
from thdattn.saved import Saved, check_keys, check_saved
from thdattn.sharding import Sharding

_SAME_PLAN = "pass every rank the same batch and sharding, and make CPAttention with the same arguments"


class CPAttention:
    """Attention over packed sequences whose rows are spread over the ranks of a comm.

    Query head h reads kv head h // (num_heads // num_kv_heads). Rows of padding in q, k, v, dout never change a
    result, NaN included, and out, dq, dk, dv are exactly 0 there.

    Args:
        comm: the ranks, from thdattn.comm.init or thdattn.comm.run_local; for the two levels of a cp_comm_type with a
            "+", (inner, outer), or thdattn.comm.levels.Levels of them: neighbours, and the ranks with the same number
            among theirs.
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
            another, so that what one group sends hides behind another's work; by default by the bytes that a rank
            gets, for all_gather the first of 3 groups being the smallest, and 1 where nothing hides (comm.overlaps).
            The same on all ranks.
        keep_keys: whether forward keeps the keys and values of all ranks for the backward, which gathers them again
            otherwise; by default if they are no larger than what has to be kept of the layer anyway, and of "balanced"
            whenever some travel. The same on all ranks. Of a2a, whether it keeps q, k, v, out as exchanged: by default
            it does. p2p keeps nothing.
        cp_comm_type: what travels between ranks. "all_gather": the keys and values of all ranks, or, with the sharding
            "balanced", those that a rank's queries see. "a2a": heads, so that a rank has all rows of some of them.
            "p2p": keys and values, round a ring, where those of all ranks would take too much memory.
            "a2a+all_gather", "a2a+p2p": heads among the ranks of inner, keys and values between those of outer.
        softcap: > 0: a logit is softcap * tanh(softmax_scale * q.k / softcap), which stays below it; 0: as it is.
        sinks: whether every query head has a sink, a logit that takes part in the softmax of each of its rows and has
            no value, so that a query may attend to nothing; forward takes them, and backward returns their gradient.

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
        """Plans one batch for this rank; every layer with this mask and these head dims can use it.

        Collective: every rank calls it with the same batch, which is checked (lengths on a GPU are not read).

        Args:
            batch: the global lengths. Plans of one batch for several masks share what they can. On a GPU only with
                engine "cuda"; then nothing is copied to the host and the plan may be made inside a captured CUDA graph.
                Wrong ones make all results NaN; see Plan.check.
            sharding: "dual_chunk", "contiguous" or "balanced", or a Sharding of this batch over comm.size ranks; by
                default "contiguous" for a2a, which takes "dual_chunk" too, and "dual_chunk" for the others. With two
                levels it is how rows are spread over the groups of neighbours, who have slices of a group's rows.
            key_batch: for cross-attention on one rank, lengths and rows of the keys, sequence by sequence, on the side
                (host or GPU) where batch has its own; None: those of batch. The last query of a sequence stands at its
                last key, and the others before it: a query at position p of L_q at position p + L_k - L_q of L_k keys.
            like: where the lengths of batch lie on a GPU, a batch on the host as they usually are, which says how many
                heads are best done together; results do not depend on it.
            finite_padding: padding of q, k, v and dout holds finite numbers, as in a model that computes those rows
                too; it is then left in its place, where on one rank it would be copied around.
            forward_only: backward is not called with this plan, so that there need not be room for it.

        Raises:
            TypeError: batch, key_batch or like is no PackedBatch, or sharding neither a str nor a Sharding.
            ValueError: an unknown sharding, lengths that the sharding cannot split, a Sharding of another batch or
                size, a key_batch of another number of sequences, on the other side or for several ranks, or (on every
                rank) a batch that differs between ranks, or one for whose work buffers and one layer there is no room
                on the GPU of a rank of several, see memory, or the GPU of one has told meanwhile that lengths of the
                last plan were wrong.
            RuntimeError: lengths on the host, inside a captured CUDA graph.
        """
        plan = self._outline(batch, sharding, key_batch, like, finite_padding)
        forward_only = as_bool("forward_only", forward_only)
        refusal, self._lengths = build.found_wrong(self._lengths), None
        if self.comm.size > 1:
            refusal = refusal or free_memory.shortage(self._engine, self.comm, self._memory(plan), forward_only)
        self.comm.agree("the plan", self._description(plan), refusal, _SAME_PLAN)
        plan = build.with_arrays(plan)
        self._lengths = plan.arrays.lengths
        free_memory.note(self.comm, plan)
        return plan

    def sharding(self, batch: PackedBatch, sharding: str | Sharding | None = None) -> Sharding:
        """How plan spreads the rows of a batch: for what has to know it before, such as who reads which document.

        Args:
            batch, sharding: as for plan.

        Raises:
            TypeError, ValueError: as plan, for what it finds on one rank.
        """
        return self._selection.sharding(batch, sharding)

    def prepare(self, batch: PackedBatch, sharding: str | Sharding | None = None) -> None:
        """Does ahead what plan will ask of the host, if it does not lie on a GPU, for another thread. Not collective.

        That is to find whose the rows are and which ones travel, where that depends on the lengths: "balanced". It is
        kept as long as the batch.

        Args:
            batch, sharding: as for plan, which is then to be called with the same batch.

        Raises:
            TypeError, ValueError: as plan, for what it finds on one rank.
        """
        plan = self._outline(batch, sharding, None, None, False)
        _ = (plan.core or plan).routes

    def memory(
        self, batch: PackedBatch, sharding: str | Sharding | None = None, key_batch: PackedBatch | None = None,
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
        self, batch: PackedBatch, sharding: str | Sharding | None, key_batch: PackedBatch | None,
        like: PackedBatch | None, finite_padding: bool,
    ) -> Plan:
        """A plan without its arrays."""
        sharding = self.sharding(batch, sharding)
        if key_batch is not None:
            build.check_key_batch(key_batch, batch, self.comm.size)
        plan = Plan(sharding, self.comm.rank, self.window, (self.head_dim, self.v_head_dim), self._tiles, NO_ARRAYS,
                    self._engine, key_batch, as_like(like), as_bool("finite_padding", finite_padding))
        return build.with_core(plan, self._selection.inner)

    def _memory(self, plan: Plan) -> Memory:
        layer = Layer(self.num_heads, self.num_kv_heads, self.dtype, self.deterministic, self._groups(plan),
                      self._keeps(plan))
        return self._selection.memory(plan, layer)

    def forward(
        self, q: Any, k: Any, v: Any, plan: Plan, return_max_logit: bool = False, keys: GatheredKV | None = None,
        sinks: Any = None,
    ) -> tuple[Any, Saved]:
        """Attention of this rank's rows over the keys of all ranks. Collective.

        Args:
            q: (local_rows, num_heads, head_dim), this rank's rows in the order of plan.rows.
            k: (local_rows, num_kv_heads, head_dim); for cross-attention plan.key_rows rows, in sequence order.
            v: (local_rows, num_kv_heads, v_head_dim), rows as k.
            plan: from this attention's plan method, or that of one with the same mask and head dims.
            return_max_logit: also compute saved.max_logit.
            keys: from gather, of the same k, v and plan, if that has been called before.
            sinks: (num_heads,) float32 (float64 for float64 inputs), finite or -inf, which is none; the same on all
                ranks. For an attention with sinks, and only for that.

        Returns:
            (out, saved): out (local_rows, num_heads, v_head_dim), a new array, 0 for a query that sees no key, as its
                gradient; saved goes to backward.

        Raises:
            TypeError: an array of the wrong dtype or on the wrong device, or a plan that is none.
            ValueError: an array of the wrong shape, a plan of another rank, size, mask, engine or head dim, or on one
                rank one whose lengths the GPU has found wrong meanwhile. Over several ranks out is NaN then.
        """
        with self.comm.checked("attention forward", self._description, plan):
            check_plan(plan, self._plans)
            return_max_logit = as_bool("return_max_logit", return_max_logit)
            q = self._checked("q", q, (plan.local_rows, self.num_heads, self.head_dim))
            self._check_gathered(keys, k, v, plan)
            k, v = self._checked_keys(*((k, v) if keys is None else (keys.k, keys.v)), plan)
            sinks = as_sinks(self._engine, sinks, self.num_heads, self.dtype, self.sinks)
        out, lse, max_logit, kept = self._selection.method(plan).forward(
            self._selection.ranks, ForwardInputs(q, k, v, plan, sinks), self._method_options(plan), return_max_logit,
            keys)
        return out, Saved(q, k, v, out, lse, max_logit, plan, self._saves, kept, sinks, plan.generation)

    def gather(self, k: Any, v: Any, plan: Plan) -> GatheredKV:
        """Start to gather the keys and values of all ranks, for a forward or backward to come. Collective.

        It lets the exchange overlap other work, such as making q, or the layer behind this one:

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
            GatheredKV and values for one call. Two of a plan may be on their way at a time.

        Raises:
            TypeError, ValueError: as forward; also a ValueError if two are on their way.
        """
        with self.comm.checked("attention gather", self._description, plan):
            check_plan(plan, self._plans)
            self._selection.check_gathers("gather was called", plan)
            checked = self._checked_keys(k, v, plan)
        keys = all_gather.gather(self._selection.ranks, plan, *checked, self._groups(plan), given=(k, v))
        keys.generation = plan.generation
        return keys

    def can_gather(self, plan: Plan) -> bool:
        """Whether gather may be called with this plan: whether keys and values alone travel, and all of them."""
        return self._selection.can_gather(plan)

    def backward(self, dout: Any, saved: Saved, keys: GatheredKV | None = None) -> tuple[Any, ...]:
        """Gradients of forward for this rank's rows. Collective.

        Args:
            dout: (local_rows, num_heads, v_head_dim), gradient of out.
            saved: from forward of this attention, or of one that differs in nothing that saved.made_with names.
            keys: from gather, of saved.k and saved.v, if that has been called before; saved.keys are used first.

        Returns:
            (dq, dk, dv): new arrays, shapes and dtype of q, k, v. dk and dv are summed over ranks in float32; with
            sinks also dsinks: what this rank's rows give to their gradient, to be summed over ranks as of weights.

        Raises:
            TypeError, ValueError: as forward; also a ValueError for a saved of another attention, or of lengths that
                its plan no longer has.
        """
        dq, dk_dv = self._backward(dout, saved, keys, at_once=True)
        return dq, *dk_dv()

    def start_backward(
        self, dout: Any, saved: Saved, keys: GatheredKV | None = None
    ) -> tuple[Any, Callable[[], tuple[Any, ...]]]:
        """backward, with dq at once, and dk and dv on their way, for what needs dq alone meanwhile. Collective.

        Args:
            dout, saved, keys: as for backward.

        Returns:
            (dq, dk_dv): dk_dv() has the current stream wait and returns (dk, dv), and with sinks (dk, dv, dsinks).

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
            check_plan(plan, self._plans)
            dout = self._checked("dout", dout, (plan.local_rows, self.num_heads, self.v_head_dim))
            check_saved(saved, type(dout))
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
        """An empty cache for decode, with room for `capacity` rows of keys and values of each of num_texts texts.

        Raises:
            TypeError: a count that is no int.
            ValueError: a count out of range, or a comm of several ranks.
        """
        shape = self.num_kv_heads, (self.head_dim, self.v_head_dim)
        return make_cache(self._engine, self.comm.size, num_texts, capacity, *shape, self.dtype, self.window)

    def decode(self, q: Any, k: Any, v: Any, cache: KVCache, sinks: Any = None) -> Any:
        """Attention of the next rows of every text over all that the cache has of it, these rows included.

        It copies nothing to the host and waits for nothing. Once it has run, it can be captured in a CUDA graph, whose
        replays go on from the lengths that they find.

        Args:
            q: (num_texts * n, num_heads, head_dim), n rows of text 0, then of text 1, ...; n is any number >= 1.
            k: (num_texts * n, num_kv_heads, head_dim); v: (.., v_head_dim): appended to the cache.
            cache: from this attention's cache method, or from that of one with the same kv heads, head dims and mask.
            sinks: as for forward.

        Returns:
            (num_texts * n, num_heads, v_head_dim), a new array; 0 for texts that do not fit, see KVCache.lengths.

        Raises:
            TypeError: an array of the wrong dtype or on the wrong device, or a cache that is none.
            ValueError: an array of the wrong shape, or a cache of another attention.
        """
        rows = rows_to_decode(q, cache)
        check_same("cache was made for", cache.made_for, self._caches, "make it with this attention's cache method")
        q = self._checked("q", q, (rows, self.num_heads, self.head_dim))
        k = self._checked("k", k, (rows, self.num_kv_heads, self.head_dim))
        v = self._checked("v", v, (rows, self.num_kv_heads, self.v_head_dim))
        sinks = as_sinks(self._engine, sinks, self.num_heads, self.dtype, self.sinks)
        key_ranges = self._engine.cache_append(k, v, cache)
        out, _ = self._engine.attn_decode(q, key_ranges, cache, self._attention, sinks)
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
            check_plan(plan, self._plans)
        pairs = visible_pairs(plan, plan, self.window) if isinstance(plan, PackedBatch) else plan.visible_pairs
        return attention_flops(pairs, self.num_heads, (self.head_dim, self.v_head_dim))

    def _groups(self, plan: Plan) -> tuple[int, ...]:
        return self._selection.head_groups(plan, self.num_kv_heads, self.dtype, self.head_groups)

    def _keeps(self, plan: Plan) -> bool:
        return keeps_keys(plan, self.num_heads, self.num_kv_heads, self.keep_keys)

    def _check_gathered(self, keys: GatheredKV | None, k: Any, v: Any, plan: Plan) -> None:
        """Raise for keys, if there are some, that were not gathered for a call with these k, v and plan."""
        if keys is not None:
            self._selection.check_gathers("keys were passed", plan)
            check_keys(self._engine, keys, k, v, plan)

    def _method_options(self, plan: Plan) -> MethodOptions:
        """Return the method's options for this plan, which are made once."""
        options = self._options.get(plan)
        if options is None:
            outer = None if plan.core is None else self._selection.between(plan)
            options = MethodOptions(self._attention, self._groups(plan), self._keeps(plan), outer)
            self._options[plan] = options
        return options

    def _checked(self, name: str, x: Any, shape: tuple[int, ...]) -> Any:
        return as_rows(self._engine, name, x, shape, self.dtype)

    def _checked_keys(self, k: Any, v: Any, plan: Plan) -> tuple[Any, Any]:
        both = plan.local_key_rows, self.num_kv_heads
        return self._checked("k", k, (*both, self.head_dim)), self._checked("v", v, (*both, self.v_head_dim))

    def _description(self, plan: Plan) -> dict[str, Any]:
        """Return the fields in which ranks must agree, by name."""
        return build.description(plan, self._asked)
