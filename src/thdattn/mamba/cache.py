"""Mamba2Cache: what a Mamba-2 mixer keeps of texts that grow, of one size however long they become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thdattn.arguments import as_count, check_kind
from thdattn.checks import check_same
from thdattn.mamba import context_parallel
from thdattn.mamba.saved import Mamba2Saved
from thdattn.mamba.select import mixer_engine
from thdattn.mamba.shape import MixerShape

MAX_TEXTS = 2**16 - 1  # of one launch


@dataclass(frozen=True, eq=False, repr=False)  # comparing or printing arrays would make the host wait for a GPU
class Mamba2Cache:
    """States and last rows of several texts; made by Mamba2Mixer.cache, moved on by Mamba2Mixer.decode.

    Everything stays where it is, so that a captured CUDA graph goes on from what it finds. Every call uses the work
    buffer: calls with one cache belong on one stream.

    Attributes:
        num_texts: how many texts.
        rows: (num_texts, conv_width - 1, channels), dtype of the mixer: the last rows of x, B and C of each text in
            their order, 0 in front of its first.
        states: (num_texts, num_heads, head_dim, state_dim) float32 (float64 for float64), behind the last row.
        active: (num_texts,) bool, which texts take a step: all at first. To be written to, between replays too. The
            others keep what they have, and whatever their row holds, their result is 0.
        work: (num_texts, channels) float32 (float64), a buffer of the engine's.
    """

    num_texts: int
    rows: Any
    states: Any
    active: Any
    work: Any
    _shape: MixerShape
    _engine: Any

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={value}" for name, value in self.made_for.items())
        return f"<Mamba2Cache num_texts={self.num_texts}, {sizes}>"

    @property
    def made_for(self) -> dict[str, Any]:
        """What must agree with the mixer that uses the cache."""
        return traits(self._shape, self._engine)

    def reset(self) -> None:
        """All texts become empty; which of them are active stays."""
        self.rows.fill(0)
        self.states.fill(0)

    def fill(self, saved: Mamba2Saved) -> None:
        """Takes over what a forward left: sequence i of the pack becomes text i.

        Args:
            saved: from Mamba2Mixer.forward, on one rank, over num_texts sequences, which may be empty.

        Raises:
            TypeError: a saved that is none.
            ValueError: a saved of several ranks, of another number of sequences, of a mixer of other sizes, or of
                lengths that the GPU has found wrong meanwhile; until the host is told, these fill the cache with NaN.
        """
        check_kind("saved", saved, Mamba2Saved, "pass the one that forward returned")
        plan, batch = saved.plan, saved.plan.batch
        if plan.cp_size != 1 or batch.num_seqs != self.num_texts:
            raise ValueError(
                f"saved is of {batch.num_seqs} sequences on {plan.cp_size} ranks, wanted {self.num_texts} on one, the "
                f"texts of the cache; pack one sequence per text, empty ones where there is nothing"
            )
        made = traits(saved.made_with, plan.engine)
        check_same("saved was made with", made, self.made_for, "pass what a forward of this mixer returned")
        if saved.generation is not None:
            saved.generation.check("saved")
        plan.check(wait=False)
        plan.enter()
        mixer = mixer_engine(plan.engine)
        act = context_parallel.activations(mixer, plan, saved.zxbcdt, saved.weights, saved.kept, self._shape)
        mixer.mixer_fill(act, saved.zxbcdt, saved.kept.states, saved.weights, plan, self._shape,
                         (self.rows, self.states))
        plan.engine.poison(plan, self.rows, self.states)


def traits(shape: MixerShape, engine: Any) -> dict[str, Any]:
    """What must agree between a cache, the mixers that use it and the forwards that it is filled from."""
    return {**shape._asdict(), "engine": engine.name}


def make_cache(engine: Any, cp_size: int, num_texts: int, shape: MixerShape) -> Mamba2Cache:
    """A cache of empty texts, see Mamba2Mixer.cache."""
    if cp_size > 1:
        raise ValueError(
            f"comm has {cp_size} ranks, wanted 1: texts in a cache are not spread; give every rank texts of its own, "
            f"with thdattn.comm.init('single')"
        )
    num_texts = as_count("num_texts", num_texts, f"a cache has 1 to {MAX_TEXTS} texts; make several", MAX_TEXTS)
    rows = engine.empty((num_texts, shape.reach, shape.channels), shape.dtype)
    made, work = (engine.empty((num_texts, *sizes), shape.sum_dtype) for sizes in (shape.state, (shape.channels,)))
    active = engine.empty((num_texts,), bool)
    active.fill(True)
    cache = Mamba2Cache(num_texts, rows, made, active, work, shape, engine)
    cache.reset()
    return cache
