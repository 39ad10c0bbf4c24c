"""Decode and samples on the GPU: logits of the forward, the same bytes with any CUDA graph, and no wait."""

from __future__ import annotations

import numpy as np
import pytest
import sample
from held import held
from model import Model
from sizes import VOCAB, Config
from texts import busy_weights, to_host

import thdattn
from thdattn.graphs import CudaGraphConfig, Graphs

pytestmark = pytest.mark.gpu

HEADS_OF_64 = Config(layers=3, width=128, heads=4, kv_heads=2, head_dim=64, hidden=192, window=6)
HEADS_OF_128 = Config(layers=2, width=256, heads=2, kv_heads=2, head_dim=128, hidden=320, tied=True)
HYBRID = Config(layers=4, width=128, heads=4, kv_heads=2, head_dim=64, hidden=192, pattern="M*MM", mixer_heads=8,
                mixer_groups=2, state_dim=64)
CONFIGS = {"64": HEADS_OF_64, "128": HEADS_OF_128, "hybrid": HYBRID}
PROMPTS = [b"import os", b"", b"x", b"class Error(Exception):\n" * 40]
NUM_BYTES = 150


def busy_model(config, engine, **options):
    model = Model(config, thdattn.comm.init("single"), engine=engine, **options)
    model.weights[...] = model.layers.xp.asarray(busy_weights(config))
    model.refresh()
    return model


def graphs_of(model, scope):
    config = CudaGraphConfig(impl="none" if scope == "none" else "local", inference_scope=scope)
    return Graphs(model.comm, config)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_decode_errs_no_more_than_twice_as_much_as_the_forward(cupy, config):
    rng, prompts, steps = np.random.default_rng(0), (0, 1, 300), 70
    texts = [rng.integers(0, VOCAB, n + steps, np.int32) for n in prompts]
    whole = thdattn.PackedBatch.from_lengths([len(text) for text in texts])
    truth, forward = (
        to_host(model.logits(model.layers.xp.asarray(whole.pack(texts)), model.plan(whole, "contiguous")))
        for model in (busy_model(config, "reference", dtype="float64"), busy_model(config, "cuda"))
    )
    model = busy_model(config, "cuda")
    caches = model.caches(len(texts), 400)
    batch = thdattn.PackedBatch.from_lengths(prompts)
    starts = batch.pack([text[:n] for text, n in zip(texts, prompts, strict=True)])
    before = to_host(model.prefill(cupy.asarray(starts), model.plan(batch, "contiguous"), caches))
    made = [[rows] for rows in batch.unpack(before)]
    for step in range(steps):
        tokens = cupy.asarray(np.array([text[n + step] for text, n in zip(texts, prompts, strict=True)], np.int32))
        for rows, logits in zip(made, to_host(model.decode(tokens, caches)), strict=True):
            rows.append(logits[None, :VOCAB])
    decoded = np.concatenate([rows for text in made for rows in text])
    rest = np.concatenate([np.arange(len(text)) >= n for text, n in zip(texts, prompts, strict=True)])
    assert np.isfinite(decoded).all()
    error, allowed = (np.linalg.norm((x - truth)[rest]) for x in (decoded, forward))
    assert 0 < error <= 2 * allowed < 0.2 * np.linalg.norm(truth[rest])


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["4", "1"])
def test_eager_layer_and_block_write_the_same_bytes(cupy, config, prompts):
    model = busy_model(config, "cuda")
    capacity = max(map(len, prompts)) + NUM_BYTES
    written = {}
    for scope in ("none", "layer", "block"):
        with graphs_of(model, scope) as graphs:
            sampler = sample.Sampler(model, len(prompts), capacity, graphs=graphs)
            # Again with the same graphs, and with other lengths.
            written[scope] = [
                sampler.generate(list(texts), NUM_BYTES, np.random.default_rng(seed))
                for seed, texts in enumerate((prompts, prompts[::-1], prompts))
            ]
    assert written["none"] == written["layer"] == written["block"]
    longest = max(len(text) for texts in written["none"] for text in texts)
    assert longest > capacity // 2, "not all have ended at once"


@pytest.mark.parametrize("config", [HEADS_OF_64, HYBRID], ids=["attention", "hybrid"])
def test_no_step_waits_for_the_gpu(cupy, config):
    sampler = sample.Sampler(busy_model(config, "cuda"), 2, 40)

    def steps():
        for _ in range(5):
            sampler.step()

    with cupy.cuda.Stream(non_blocking=True):
        sampler.generate([b"a", b""], 10, np.random.default_rng(0))  # kernels are compiled and memory is found
        assert held(cupy, steps), "the steps came back only when the GPU was let go"
