"""Select the mixer's functions for an engine, and reject sizes that it has no kernels for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from thdattn.engines import Engine
from thdattn.mamba import MixerEngine


def mixer_engine(engine: Engine) -> MixerEngine:
    """Return the mixer's functions for an engine: the package thdattn.mamba.cuda or thdattn.mamba.reference."""
    functions: MixerEngine = importlib.import_module(f"thdattn.mamba.{engine.name}")
    return functions


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
