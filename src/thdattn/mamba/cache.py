"""State between calls of a Mamba-2 mixer: what forward saves for backward, and the cache for decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike

from thdattn.arguments import Array, as_count, check_kind, check_same
from thdattn.engines import Engine
from thdattn.kv_cache import as_sequences, check_one_rank, check_sequences, copy_sequences
from thdattn.mamba import context_parallel, mixer_engine
from thdattn.mamba.context_parallel import Kept
from thdattn.mamba.shape import Inputs, Mamba2Weights, MixerShape
from thdattn.plan.plan import Plan

MAX_SEQUENCES = 2**16 - 1  # thread blocks in y of one launch


@dataclass(frozen=True, eq=False, repr=False)  # to compare or print arrays would wait for the GPU
class Mamba2Saved:
    """State that forward of a Mamba2Mixer saves for its backward.

    Attributes:
        zxbcdt, weights, plan: as passed, without a copy: do not write to them before backward.
        kept: y before the gate, the state in front of every segment of rows, and the halo rows that the convolution
            read. With keep_activations also the results of the convolution.
        made_with: the sizes of the mixer, which the mixer of the backward must share.
        generation: the Generation of the plan's lengths where these are on a GPU, else None.
    """

    zxbcdt: Array
    weights: Mamba2Weights
    plan: Plan
    kept: Kept
    made_with: MixerShape
    generation: Any = None

    def __repr__(self) -> str:
        return f"<Mamba2Saved: zxbcdt {self.zxbcdt.dtype} {tuple(self.zxbcdt.shape)}, {self.plan!r}>"


@dataclass(frozen=True, eq=False, repr=False)  # to compare or print arrays would wait for the GPU
class Mamba2Cache:
    """Decode states and last input rows of several sequences. Mamba2Mixer.cache makes it, Mamba2Mixer.decode advances
    it.

    All arrays keep their addresses, so a captured CUDA graph continues from their current contents. Every call uses the
    work buffer: run the calls with one cache on one stream.

    Attributes:
        num_texts: number of sequences.
        rows: (num_texts, conv_width - 1, channels), dtype of the mixer: the last rows of x, B and C of each sequence in
            order, with 0 in front of its first row.
        states: (num_texts, num_heads, head_dim, state_dim) float32 (float64 for float64), the state after the last row.
        active: (num_texts,) bool, the sequences that decode advances: all at first. Callers may write to it, between
            replays too. The other sequences keep rows and states, and their result is 0 whatever their input holds.
        work: (num_texts, channels) float32 (float64), a work buffer of the engine.
    """

    num_texts: int
    rows: Array
    states: Array
    active: Array
    work: Array
    _shape: MixerShape
    _engine: Engine

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={value}" for name, value in self.made_for.items())
        return f"<Mamba2Cache num_texts={self.num_texts}, {sizes}>"

    @property
    def made_for(self) -> dict[str, Any]:
        """Traits that must agree with the mixer that uses the cache."""
        return traits(self._shape, self._engine)

    def reset(self) -> None:
        """Make all sequences empty, and keep `active`."""
        self.rows.fill(0)
        self.states.fill(0)

    def fork(self, sources: ArrayLike) -> Mamba2Cache:
        """Return a new cache whose sequences continue sequences of this one; see KVCache.fork.

        Args:
            sources: (number of sequences,) integers, at least one: the sequence that each new one continues.

        Raises:
            TypeError: sources that are not integers.
            ValueError: sources of another shape, a sequence that is not in the cache, or too many sequences.
        """
        sequences = as_sequences(sources, self.num_texts)
        as_count("the number of sources", len(sequences), "make several caches", MAX_SEQUENCES)
        rows, states, active = (copy_sequences(self._engine, x, sequences)
                                for x in (self.rows, self.states, self.active))
        work = self._engine.empty((len(sequences), *self.work.shape[1:]), self.work.dtype)
        return Mamba2Cache(len(sequences), rows, states, active, work, self._shape, self._engine)

    def fill(self, saved: Mamba2Saved) -> None:
        """Take over the final rows and states of a forward: sequence i of the pack becomes sequence i of the cache.

        Args:
            saved: from Mamba2Mixer.forward on one rank, over num_texts sequences, which may be empty.

        Raises:
            TypeError: a saved of another type.
            ValueError: a saved of several ranks, of another number of sequences, or of a mixer of other sizes; lengths
                that the GPU has reported as wrong. Until the host knows of wrong lengths, they fill the cache with NaN.
        """
        check_kind("saved", saved, Mamba2Saved, "pass the one that forward returned")
        plan = saved.plan
        check_sequences("saved", plan.batch, plan.cp_size, self.num_texts)
        made = traits(saved.made_with, plan.engine)
        check_same("saved was made with", made, self.made_for, "pass what a forward of this mixer returned")
        if saved.generation is not None:
            saved.generation.check("saved")
        plan.check(wait=False)
        plan.enter()
        mixer = mixer_engine(plan.engine)
        inputs = Inputs(saved.zxbcdt, saved.weights, plan, self._shape, saved.kept.halo)
        mixer.mixer_fill(inputs, context_parallel.activations(mixer, inputs, saved.kept), saved.kept.states, self)
        plan.engine.nan_if_invalid(plan, self.rows, self.states)


def traits(shape: MixerShape, engine: Engine) -> dict[str, Any]:
    """Return the traits in which a cache, its mixers, and the forwards that fill it must agree."""
    return {**shape._asdict(), "engine": engine.name}


def make_cache(engine: Engine, cp_size: int, num_texts: int, shape: MixerShape) -> Mamba2Cache:
    """Make a cache of empty sequences; see Mamba2Mixer.cache."""
    check_one_rank(cp_size)
    remedy = f"a cache has 1 to {MAX_SEQUENCES} sequences; make several"
    num_texts = as_count("num_texts", num_texts, remedy, MAX_SEQUENCES)
    rows = engine.empty((num_texts, shape.reach, shape.channels), shape.dtype)
    made, work = (engine.empty((num_texts, *sizes), shape.sum_dtype) for sizes in (shape.state, (shape.channels,)))
    active = engine.empty((num_texts,), bool)
    active.fill(True)
    cache = Mamba2Cache(num_texts, rows, made, active, work, shape, engine)
    cache.reset()
    return cache
