"""Decode of a Mamba-2 mixer on either engine, for CPU and GPU tests: texts whose rows a mixer case has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from cases import to_host
from decoding import poison
from mixer_cases import Case, random_inputs

import thdattn
from thdattn.fuzz.runs import next_rows
from thdattn.mamba.oracle import Sizes

# Lengths of texts, and how much of each is its prompt: none, all, fewer rows than the convolution sees, chunk borders.
TEXTS = Case("texts", (70, 5, 66, 9, 3, 0, 140, 64), padded=(70, 8, 70, 9, 3, 0, 150, 64), slack=5)
PROMPTS = (60, 0, 65, 2, 3, 0, 128, 63)
ONE_GROUP = replace(TEXTS, name="one group", sizes=Sizes(3, 2, 4, 1))
A_GROUP_PER_HEAD = replace(TEXTS, name="a group per head", sizes=Sizes(3, 2, 4, 3))
SINGLE = thdattn.comm.init("single")


def prompts_of(case: Case, prompts: tuple[int, ...]) -> Case:
    """Return the pack of the prompts, with padding between."""
    return replace(case, name="prompts", lengths=prompts, padded=tuple(n + i % 3 for i, n in enumerate(prompts)))


def filled_cache(
    mixer: thdattn.Mamba2Mixer, case: Case, prompts: tuple[int, ...], texts: list[np.ndarray],
    weights: thdattn.Mamba2Weights, xp: Any,
) -> tuple[thdattn.Mamba2Cache, list[np.ndarray]]:
    """Return a cache after the prompts, NaN before it is filled, and the forward's rows of these."""
    batch = prompts_of(case, prompts).batch
    packed = batch.pack([text[:n] for text, n in zip(texts, prompts, strict=True)], fill=np.nan)
    out, saved = mixer.forward(xp.asarray(packed), weights, mixer.plan(batch))
    cache = mixer.cache(len(prompts))
    for x in (cache.rows, cache.states):
        poison(x)
    cache.fill(saved)
    return cache, batch.unpack(to_host(out))


def decode_all(case: Case, prompts: tuple[int, ...], dtype: Any, engine: str, xp: Any) -> np.ndarray:
    """Return out of all texts, packed as the case: the prompts by forward, the rest by decode.

    Texts that are done are not active, and have rows of NaN.
    """
    zxbcdt, weights, _ = random_inputs(case, dtype)
    weights = thdattn.Mamba2Weights(*map(xp.asarray, weights))
    texts = case.batch.unpack(zxbcdt)
    mixer = case.mixer(SINGLE, dtype, engine=engine)
    cache, made = filled_cache(mixer, case, prompts, texts, weights, xp)
    rows = [[x] for x in made]
    for step in range(max(len(text) - n for text, n in zip(texts, prompts, strict=True))):
        starts = [n + step for n in prompts]
        active = [start < len(text) for start, text in zip(starts, texts, strict=True)]
        cache.active[...] = xp.asarray(active)
        out = to_host(mixer.decode(xp.asarray(next_rows(texts, starts, 1)), weights, cache))
        assert not out[~np.array(active)].view(np.uint8).any(), "exactly 0"
        for text in np.flatnonzero(active):
            rows[text].append(out[text : text + 1])
    return case.batch.pack([np.concatenate(x) for x in rows])


def assert_rounded_once(out: np.ndarray, exact: np.ndarray) -> None:
    """Assert that the RMS error of out is that of the exact result in its dtype."""
    allowed, error = (np.sqrt(np.mean((x.astype(np.float64) - exact) ** 2)) for x in (exact.astype(out.dtype), out))
    assert error <= 1.05 * allowed, f"RMS error {error:.2e}, allowed 1.05 * {allowed:.2e}"
