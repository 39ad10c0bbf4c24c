"""Mamba2Mixer: check arguments, select an engine, and run the context-parallel mixer on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import DTypeLike

from thdattn.arguments import as_array, as_bool, as_choice, as_count, as_norm_eps, check_kind, check_same, shown
from thdattn.comm import Comm
from thdattn.engines.select import as_engine_dtype, choose_engine
from thdattn.mamba import context_parallel, mixer_engine, trees
from thdattn.mamba.cache import Mamba2Cache, Mamba2Saved, make_cache, traits
from thdattn.mamba.shape import GatedNorm, Mamba2Weights, MixerShape
from thdattn.packing import PackedBatch, as_like
from thdattn.plan.build import description, found_wrong, with_arrays
from thdattn.plan.memory import Memory
from thdattn.plan.plan import NO_ARRAYS, Plan
from thdattn.sharding import Sharding, as_sharding

CAUSAL = (-1, 0)  # window of a mixer's plans
_SAME_PLAN = "pass every rank the same batch and sharding, and make Mamba2Mixer with the same arguments"


class Mamba2Mixer:
    """Mamba-2 mixer over packed sequences whose rows are spread over the ranks of a comm.

    A row has z, x, B, C and dt, as a model's input projection computes them. A causal convolution and silu transform x,
    B and C, and dt becomes softplus(dt + dt_bias). Each head then runs the recurrence s = exp(dt A) s + dt x B^T, y = s
    C + D x. The result is out = y * silu(z). Convolution and state restart with every sequence, and fork at the nodes
    of prefix trees. Head h reads B and C of group h // (num_heads // num_groups). Padding rows never change a result,
    NaN included, and out and dzxbcdt are exactly 0 there.

    norm="after_gate" gives out = rmsnorm(y * silu(z)) * norm_weight, as layers of mamba_ssm and Megatron-Core do.
    norm="before_gate" gives out = rmsnorm(y) * norm_weight * silu(z). rmsnorm(x) = x / sqrt(mean(x**2) + norm_eps) over
    each of norm_groups groups of columns.

    Ranks hold slices of the pack and exchange states. So the bytes sent do not grow with the rows, but with the forks
    that are open at their borders. Below, d_inner is num_heads * head_dim. The columns of x, B and C are the channels,
    d_inner + 2 * num_groups * state_dim.

    Source: Mamba-2, arXiv:2405.21060.

    Args:
        comm: the ranks, from thdattn.comm.init or thdattn.comm.run_local.
        num_heads: heads.
        head_dim: width of a head of x, z and out.
        state_dim: width of a group of B and C.
        num_groups: groups of B and C, a divisor of num_heads; any number of ranks works with any number of both.
        conv_width: rows that the convolution reads, its own row included.
        dtype: of zxbcdt and out: "bfloat16" or "float16"; the reference engine also takes "float32" and "float64".
        engine: "cuda", "reference" (NumPy), or "auto": CUDA where a GPU and its comm allow it. CUDA has kernels for
            head_dim 64 and 128, state_dim 64, 128 and 256, conv_width up to 8, and a multiple of 8 heads.
        keep_activations: True keeps the results of the convolution from forward to backward: `channels` numbers of 16
            bits and 3 * num_heads of 32 bits a row. That is about a third of what forward keeps anyway. False
            recomputes them in backward.
        norm: "after_gate", "before_gate" (mamba_ssm's norm_before_gate=True), or None for no norm.
        norm_groups: groups of columns that are normalised separately, a divisor of num_heads; None means num_groups.
        norm_eps: number added to the mean of squares.

    Raises:
        TypeError: an argument of the wrong type, or a dtype that the engine does not compute in.
        ValueError: a value out of range, sizes that the engine has no kernels for, or an engine whose arrays the comm
            does not move.
        RuntimeError: engine="cuda" without CuPy or a GPU.
    """

    def __init__(
        self,
        comm: Comm,
        num_heads: int,
        head_dim: int,
        state_dim: int,
        num_groups: int = 1,
        conv_width: int = 4,
        dtype: DTypeLike = "bfloat16",
        engine: str = "auto",
        keep_activations: bool = True,
        norm: str | None = None,
        norm_groups: int | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        check_kind("comm", comm, Comm, "make one with thdattn.comm.init()")
        self.comm = comm
        self.num_heads = as_count("num_heads", num_heads)
        self.head_dim = as_count("head_dim", head_dim)
        self.state_dim = as_count("state_dim", state_dim)
        self.num_groups = as_count("num_groups", num_groups)
        self.conv_width = as_count("conv_width", conv_width)
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"num_heads is {num_heads}, not a multiple of num_groups = {num_groups}; wanted as many heads for "
                f"every group of B and C; use a divisor of num_heads"
            )
        self.keep_activations = as_bool("keep_activations", keep_activations)
        of_norm = _as_norm(norm, norm_groups, norm_eps, self.num_heads, self.num_groups)
        self._engine = choose_engine(engine, comm)[0]
        self._mixer = mixer_engine(self._engine)
        self.engine: str = self._engine.name
        self.dtype = as_engine_dtype(self._engine, dtype)
        sizes = {name: getattr(self, name) for name in ("num_heads", "head_dim", "state_dim", "conv_width")}
        if of_norm:
            sizes["d_inner // norm_groups"] = self.num_heads * self.head_dim // of_norm.groups
        check_sizes(self._mixer.MIXER_SIZES, self.engine, **sizes)
        self._shape = MixerShape(
            self.num_heads, self.head_dim, self.state_dim, self.num_groups, self.conv_width, self.dtype, of_norm
        )
        self._layer = context_parallel.Layer(self._mixer, self.comm, self._shape, self.keep_activations)
        self._lengths: Any = None  # of the last plan, if they are on a GPU

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={value}" for name, value in self._shape._asdict().items())
        return f"<Mamba2Mixer {sizes}, engine={self.engine!r}, {self.comm!r}>"

    def sharding(self, batch: PackedBatch, sharding: str | Sharding | None = None) -> Sharding:
        """Return the sharding that plan gives a batch, without planning it.

        Args:
            batch, sharding: as for plan; None means "contiguous".

        Raises:
            TypeError, ValueError: as plan, for errors that one rank finds by itself.
        """
        made = as_sharding("contiguous" if sharding is None else sharding, batch, self.comm.size)
        _check_sharding(made)
        return made

    def plan(
        self, batch: PackedBatch, sharding: str | Sharding | None = None, like: PackedBatch | None = None,
        finite_padding: bool = False,
    ) -> Plan:
        """Plan one batch for this rank. Every mixer with the same comm and engine can use the plan.

        An attention with the same mask and head_dim can use it too. A mixer can use the plan of a causal attention
        without a window if its sharding is contiguous and both have the same engine.

        Collective: every rank calls it with the same batch, and the ranks compare their batches.

        Args:
            batch: the global lengths, on the host or, for the CUDA engine, on its GPU.
            sharding: "contiguous", or a contiguous Sharding of this batch over comm.size ranks. States pass from one
                rank to the next, so each rank needs consecutive rows.
            like, finite_padding: for an attention that uses the plan too; see CPAttention.plan.

        Raises:
            TypeError: batch or like is no PackedBatch, or sharding neither a str nor a Sharding.
            ValueError: another sharding, a Sharding of another batch or size, or lengths on a GPU for the NumPy engine.
                On every rank: prefix trees whose nodes are on a GPU. On every rank of several: a batch that differs
                between ranks, or wrong lengths of the last plan that the GPU of one rank has reported meanwhile.
        """
        plan = self._outline(batch, sharding, like, finite_padding)
        refusal, self._lengths = _refused_trees(plan) or found_wrong(self._lengths), None
        if self.comm.size > 1 or plan.has_trees:
            self.comm.agree("the plan", self._description(plan), refusal, _SAME_PLAN)
        plan = with_arrays(plan)
        self._lengths = plan.arrays.lengths
        return plan

    def memory(self, batch: PackedBatch, sharding: str | Sharding | None = None) -> Memory:
        """Return the bytes of every buffer that a layer and its plan need on this rank, before anything is allocated.

        The call is not collective, as the bytes depend on the shapes of the batch alone. It reads no lengths on a GPU.

        Args:
            batch, sharding: as for plan.

        Returns:
            name -> bytes. "activations" are the results of the convolution, which each layer keeps, or which all layers
                share where keep_activations is False. A step of `n` layers that share a plan needs work + n * per_layer
                + the gradients of one layer.

        Raises:
            TypeError, ValueError: as plan, for errors that one rank finds by itself.
        """
        plan = self._outline(batch, sharding, None, False)
        memory = trees.memory if plan.has_trees else context_parallel.memory
        return memory(self._layer, plan)

    def _outline(
        self, batch: PackedBatch, sharding: str | Sharding | None, like: PackedBatch | None, finite_padding: bool
    ) -> Plan:
        """Return a plan without its arrays."""
        dims = self.head_dim, self.head_dim
        sharding = self.sharding(batch, sharding)
        return Plan(sharding, self.comm.rank, CAUSAL, dims, self._engine.tiles(*dims), NO_ARRAYS,
                    self._engine, sharding.batch, as_like(like), as_bool("finite_padding", finite_padding))

    def forward(self, zxbcdt: Any, weights: Mamba2Weights, plan: Plan) -> tuple[Any, Mamba2Saved]:
        """Compute the mixer over this rank's rows. Collective.

        Args:
            zxbcdt: (local_rows, d_inner + channels + num_heads), this rank's rows in the order of plan.rows: the
                columns of z, x by head, B by group, C by group, and dt.
            weights: float32, or float64 for a float64 mixer; the same on all ranks; with norm_weight if the mixer has a
                norm.
            plan: from this mixer's plan method, or another plan that the mixer can use; see plan.

        Returns:
            (out, saved): out is a new array (local_rows, d_inner), 0 on padding; backward takes saved.

        Raises:
            TypeError: an array of the wrong dtype or on the wrong device, or weights or a plan of another type.
            ValueError: an array of the wrong shape, or a plan of another rank, size, engine, mask or sharding. On one
                rank also a plan whose lengths the GPU has reported as wrong; over several ranks out is NaN then.
        """
        with self.comm.checked("mixer forward", self._description, plan):
            self._check_plan(plan)
            zxbcdt = self._as_array(
                "zxbcdt", zxbcdt, (plan.local_rows, self._shape.columns), self.dtype,
                "pass this rank's rows (Sharding.shard cuts them out) with the columns z, x, B, C, dt")
            weights = self._as_weights(weights)
        forward = trees.forward if plan.has_trees else context_parallel.forward
        out, kept = forward(self._layer, plan, zxbcdt, weights)
        return out, Mamba2Saved(zxbcdt, weights, plan, kept, self._shape, plan.generation)

    def backward(self, dout: Any, saved: Mamba2Saved) -> tuple[Any, Mamba2Weights]:
        """Compute the gradients of forward. Collective.

        Args:
            dout: (local_rows, d_inner), gradient of out.
            saved: from forward of this mixer, or of one of the same sizes.

        Returns:
            (dzxbcdt, dweights): dzxbcdt has the shape and dtype of zxbcdt. dweights are this rank's partial sums of the
                gradients of the weights; sum them over the ranks with the other gradients.

        Raises:
            TypeError: as forward, or a saved of another type.
            ValueError: as forward, or a saved of a mixer of other sizes, or of lengths that its plan no longer has.
        """
        with self.comm.checked("mixer backward", lambda of: self._description(of.plan), saved):
            check_kind("saved", saved, Mamba2Saved, "pass the one that forward returned")
            made, wanted = saved.made_with._asdict(), self._shape._asdict()
            check_same("saved was made with", made, wanted, "pass what this mixer's forward returned")
            plan = saved.plan
            self._check_plan(plan)
            if saved.generation is not None:
                saved.generation.check("saved")
            dout = self._as_array("dout", dout, (plan.local_rows, self._shape.d_inner), self.dtype,
                                  "pass the gradient of what forward returned")
        backward = trees.backward if plan.has_trees else context_parallel.backward
        return backward(self._layer, plan, dout, saved.zxbcdt, saved.weights, saved.kept)

    def cache(self, num_texts: int) -> Mamba2Cache:
        """Return a decode cache for num_texts empty sequences. Its size does not depend on their lengths.

        Raises:
            TypeError: num_texts is no int.
            ValueError: num_texts is out of range, or the comm has several ranks.
        """
        return make_cache(self._engine, self.comm.size, num_texts, self._shape)

    def decode(self, zxbcdt: Any, weights: Mamba2Weights, cache: Mamba2Cache) -> Any:
        """Compute the mixer over the next row of every active sequence, and advance the cache.

        The call copies nothing to the host and does not wait. After one call it can be captured in a CUDA graph, whose
        replays continue from the current contents of the cache.

        Args:
            zxbcdt: (num_texts, d_inner + channels + num_heads), one row per sequence.
            weights: as for forward.
            cache: from the cache method of this mixer, or of one of the same sizes.

        Returns:
            (num_texts, d_inner), a new array; 0 for sequences that are not active, see Mamba2Cache.active.

        Raises:
            TypeError: an array of the wrong dtype or on the wrong device, or weights or a cache of another type.
            ValueError: an array of the wrong shape, or a cache of a mixer of other sizes.
        """
        check_kind("cache", cache, Mamba2Cache, "make it with mixer.cache(num_texts)")
        check_same("cache was made for", cache.made_for, traits(self._shape, self._engine),
                   "make it with this mixer's cache method")
        zxbcdt = self._as_array("zxbcdt", zxbcdt, (cache.num_texts, self._shape.columns), self.dtype,
                                "pass one row for every sequence of the cache, with the columns z, x, B, C, dt")
        weights = self._as_weights(weights)
        return self._mixer.mixer_decode(zxbcdt, weights, self._shape, cache)

    def _description(self, plan: Plan) -> dict[str, Any]:
        return description(plan, {name: str(value) for name, value in self._shape._asdict().items()})

    def _check_plan(self, plan: Plan) -> None:
        check_kind("plan", plan, Plan, "make it with mixer.plan(batch)")
        wanted = {"cp_size": self.comm.size, "cp_rank": self.comm.rank, "window": CAUSAL, "engine": self.engine}
        made = {name: plan.made_for[name] for name in wanted}
        check_same("plan was made for", made, wanted, "make it with this mixer's plan(batch)")
        if plan.is_cross:
            raise ValueError("plan has keys of their own, wanted those of the queries; make it with this mixer's "
                             "plan(batch)")
        if refusal := _refused_trees(plan):
            raise ValueError(refusal)
        _check_sharding(plan.sharding)
        plan.enter_call()

    def _as_array(self, name: str, x: Any, shape: tuple[int, ...], dtype: Any, remedy: str) -> Any:
        x = self._engine.from_user(name, x)
        return as_array(name, x, shape, dtype, f"; {remedy}", f" for a mixer of {self.dtype}; cast it")

    def _as_weights(self, weights: Mamba2Weights) -> Mamba2Weights:
        check_kind("weights", weights, Mamba2Weights, "make one of the five arrays, and norm_weight for a norm")
        norm, of_norm = self._shape.norm, weights.norm_weight
        if (of_norm is None) == (norm is not None):
            wanted = "None for a mixer without a norm" if norm is None else f"an array for norm={norm.place!r}"
            raise ValueError(f"weights.norm_weight is {shown(of_norm)}, wanted {wanted}; pass those of this layer")
        named = zip(weights._fields, weights, self._shape.weights, strict=True)
        return Mamba2Weights(*(
            self._as_array(f"weights.{name}", x, shape, self._shape.sum_dtype, "pass those of a mixer of these sizes")
            for name, x, shape in named
        ))


def check_sizes(known_sizes: Mapping[str, Sequence[int]], engine_name: str, **sizes: int) -> None:
    """Raise a ValueError where an engine has no kernels for a mixer of these sizes.

    Args:
        known_sizes: MIXER_SIZES of the mixer's functions for that engine; sizes that it does not name may be any.
    """
    for name, size in sizes.items():
        known = known_sizes.get(name)
        if known is not None and size not in known:
            wanted = f"a multiple of {known.step}" if isinstance(known, range) and known.step > 1 else (
                f"{known[0]} to {known[-1]}" if isinstance(known, range) else "one of " + ", ".join(map(str, known)))
            raise ValueError(
                f"{name} is {size}, wanted {wanted} for a Mamba-2 mixer on engine {engine_name!r}; use "
                f"engine='reference', with host arrays, or another {name}"
            )


def _as_norm(
    norm: str | None, groups: int | None, eps: float, num_heads: int, num_groups: int
) -> GatedNorm | None:
    """Return the norm that a user asks for, or None."""
    if norm is None:
        if groups is not None:
            raise ValueError(f"norm_groups is {groups}, but norm is None, wanted both or none; pass norm='after_gate'")
        return None
    place = as_choice("norm", norm, ("after_gate", "before_gate"))
    groups = num_groups if groups is None else as_count("norm_groups", groups)
    if num_heads % groups:
        raise ValueError(
            f"norm_groups is {groups}, wanted a divisor of num_heads = {num_heads}, as whole heads are normalised "
            f"together; pass 1, or num_groups = {num_groups} as the checkpoints of other libraries have"
        )
    return GatedNorm(place, groups, as_norm_eps(eps))


def _refused_trees(plan: Plan) -> str:
    """Return why a mixer cannot have the prefix trees of a batch, and the remedy; "" if it can, or if it has none."""
    if not plan.has_trees or plan.batch.trees is not None:
        return ""
    return ("batch has trees with nodes on a GPU, wanted them on the host for a mixer; pass a batch of from_trees, or "
            "one of the paths (PackedBatch.paths)")


def _check_sharding(sharding: Sharding) -> None:
    """Raise unless rank r has the r-th of equal slices of the pack."""
    if sharding.strategy != "contiguous" and sharding.cp_size > 1:
        raise ValueError(
            f"sharding is {sharding.strategy!r}, wanted 'contiguous' for a mixer over {sharding.cp_size} ranks, as "
            f"states are passed on along the rows; use sharding='contiguous', for attention layers beside it too (with "
            f"cp_comm_type='a2a' their work is even)"
        )
    if sharding.inner not in (1, sharding.cp_size):
        raise ValueError(
            f"sharding has inner {sharding.inner}, wanted 1 or {sharding.cp_size}, as fillers would lie between the "
            f"rows of ranks; make it with Sharding(batch, {sharding.cp_size}, 'contiguous')"
        )
