"""Forks of decode caches: several answers continue one prompt, which was computed once."""

from __future__ import annotations

import numpy as np
import pytest
from cases import to_host
from decoding import attention, normal
from mixer_cases import FLOAT64, Case, random_inputs

import thdattn
from thdattn import oracle

SOURCES = [0, 0, 1, 0, 2]
PROMPTS = (30, 7, 0)
HEADS, WIDTHS = (4, 2, 2), (64, 64, 64)  # of q, k, v


def filled(layer, prompts, xp):
    """A cache of prompts, each a triple of q, k and v."""
    batch = thdattn.PackedBatch.from_lengths([len(q) for q, _, _ in prompts])
    q, k, v = (xp.asarray(np.concatenate(side)) for side in zip(*prompts, strict=True))
    plan, cache = layer.plan(batch, "contiguous"), layer.cache(len(prompts), 40)
    layer.forward(q, k, v, plan)
    cache.fill(k, v, plan)
    return cache


def test_answers_continue_their_prompts(engine):
    rng, dtype = np.random.default_rng(0), np.dtype(np.float16)
    layer = attention((4, 2), (64, 64), dtype, engine=engine.name)
    prompts = [[normal(rng, dtype, n, *shape) for shape in zip(HEADS, WIDTHS, strict=True)] for n in PROMPTS]
    cache = filled(layer, prompts, engine.xp)
    fork, same = cache.fork(SOURCES), filled(layer, [prompts[source] for source in SOURCES], engine.xp)
    texts = [[side.copy() for side in prompts[source]] for source in SOURCES]
    for _ in range(4):
        rows = [normal(rng, dtype, len(SOURCES), *shape) for shape in zip(HEADS, WIDTHS, strict=True)]
        out, wanted = (to_host(layer.decode(*map(engine.xp.asarray, rows), each)) for each in (fork, same))
        assert out.tobytes() == wanted.tobytes()
        for i, text in enumerate(texts):
            text[:] = [np.concatenate([side, new[i : i + 1]]) for side, new in zip(text, rows, strict=True)]
    whole = thdattn.PackedBatch.from_lengths([len(q) for q, _, _ in texts])
    truth = oracle.truth(whole, *map(np.concatenate, zip(*texts, strict=True)))
    last = whole.cu_seqlens[1:] - 1
    verdict = oracle.judge(out, *(getattr(truth, kind).out[last] for kind in ("exact", "plain", "fused")))
    assert verdict.good, str(verdict)
    assert to_host(cache.lengths).tolist() == [*PROMPTS], "the cache of the prompts stays as it is"
    assert to_host(fork.lengths).tolist() == [PROMPTS[source] + 4 for source in SOURCES]


def test_a_mixer_s_texts_continue_their_prompts():
    comm, case = thdattn.comm.init("single"), Case("forks", PROMPTS)
    mixer = case.mixer(comm, FLOAT64)
    zxbcdt, weights, _ = random_inputs(case, FLOAT64)
    nodes = np.split(zxbcdt, case.batch.cu_seqlens[1:-1])

    def cache_of(prompts):
        batch = thdattn.PackedBatch.from_lengths([len(prompt) for prompt in prompts])
        cache = mixer.cache(len(prompts))
        cache.fill(mixer.forward(np.concatenate(prompts), weights, mixer.plan(batch))[1])
        return cache

    cache = cache_of(nodes)
    cache.active[2] = False
    fork, same = cache.fork(SOURCES), cache_of([nodes[source] for source in SOURCES])
    same.active[4] = False
    for seed in range(3):
        rows = np.random.default_rng(seed).standard_normal((len(SOURCES), zxbcdt.shape[1]))
        out = mixer.decode(rows, weights, fork)
        np.testing.assert_allclose(out, mixer.decode(rows, weights, same), rtol=1e-12)
        assert out[:4].any(axis=1).all() and not out[4].any()


@pytest.mark.parametrize(("sources", "error", "words"), [
    ([], ValueError, r"sources has shape \(0,\), wanted \(number of sequences,\), one or more"),
    ([[0]], ValueError, r"sources has shape \(1, 1\)"),
    ([0, 3], ValueError, r"sources\[1\] is 3, wanted 0 <= sequence < 3, those of the cache"),
    ([-1], ValueError, r"sources\[0\] is -1, wanted 0 <= sequence < 3"),
    ([0.5], TypeError, "sources holds float64 values, wanted ints"),
])  # fmt: skip
def test_wrong_sources_are_refused_by_name(sources, error, words):
    layer = attention((4, 2), (8, 8), np.float64, engine="reference")
    mixer = Case("forks", PROMPTS).mixer(thdattn.comm.init("single"), FLOAT64)
    for cache in (layer.cache(3, 10), mixer.cache(3)):
        with pytest.raises(error, match=words):
            cache.fork(sources)


def test_a_fork_numbers_no_more_rows_than_a_cache():
    cache = attention((1, 1), (1, 1), np.float64, engine="reference").cache(1, 2**20)
    with pytest.raises(ValueError, match=r"num_texts \* capacity is 2000 \* 1048576, wanted at most"):
        cache.fork([0] * 2000)
