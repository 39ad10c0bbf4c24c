"""Time how fast examples/bytelm writes, and one new row of texts in attention and in a Mamba-2 mixer.

    python benchmarks/bench_decode.py

Sampling: bytes per second of all texts together when each has `--bytes` bytes, by Sampler, kernel by kernel (eager),
with a graph per layer (layer), and with one graph (block). Models have random weights: their bytes mean nothing, and
cost the same.

Attention: thd_attn_decode alone over one text, in a captured graph. Its calls read one cache after another, so that the
L2 cache holds none of them. GB/s of keys and values stand beside those of a copy, which reads and writes.

Mixer: Mamba2Mixer.decode for 1, 32 and 256 texts in the same way; GB/s of states read and written.

Rows go to benchmarks/results/decode_GPU.csv.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples" / "bytelm"))

import numpy as np
import record
import tables
from bench_bytelm import example_hash
from model import Model
from sample import Sampler
from sizes import SIZES

import thdattn
from thdattn.graphs import CudaGraphConfig, Graphs

T = TypeVar("T")

WAYS = ("eager", "layer", "block")
KEY = ("gpu", "what", "texts", "bytes", "way")
ROUNDS = 5
LAYERS = {"32/8 heads of 128": (32, 8, 128), "8/4 heads of 128": (8, 4, 128), "8/4 heads of 64": (8, 4, 64)}
LONG = 2**15
MIXER, MIXER_TEXTS = (64, 64, 128), (1, 32, 256)  # heads, head_dim, state_dim
CACHED_BYTES = 2**29  # of all caches together: far more than an L2 cache


def main() -> int:
    args = parse_arguments()
    records, sources = record.Recorder("decode", args.out, KEY), {"example_sources": example_hash()}
    for size in args.sizes:
        for texts in args.texts:
            for way in WAYS:
                row = sampling(size, texts, args.bytes, way, "cuda", args.steps)
                print(f"{size}, {texts} texts, {way}: {row['bytes_per_s']} bytes/s", file=sys.stderr)
                records.add([sources | row])
    records.add([*map(attention, LAYERS), *map(mixer, MIXER_TEXTS)])
    records.show(tables.decode)
    return 0


def sampling(size: str, num_texts: int, num_bytes: int, way: str, engine: str, steps: int) -> record.Row:
    """Measure one model, one number of texts and one way."""
    model = Model(SIZES[size], thdattn.comm.init("single"), engine)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, num_bytes, np.uint8).tobytes() for _ in range(num_texts)]
    impl, scope = ("local", way) if way in ("layer", "block") else ("none", "none")
    with Graphs(model.comm, CudaGraphConfig(impl=impl, inference_scope=scope)) as graphs:
        total = 10 + ROUNDS * steps
        sampler = Sampler(model, num_texts, num_bytes + total, graphs=graphs)
        sampler.start(texts, rng.integers(2**32, size=(num_texts, total), dtype=np.uint32))
        times = timed_steps(sampler.step, steps, wait(model))
    measured = record.timed(times)
    return {
        "what": size, "texts": str(num_texts), "bytes": str(num_bytes), "way": way, "steps": str(steps), **measured,
        "bytes_per_s": f"{num_texts * 1e3 / float(measured['ms']):.1f}",
    }


def timed_steps(step: Callable[[], object], steps: int, wait: Callable[[], None]) -> list[float]:
    """Return milliseconds per step of ROUNDS rounds; the first steps compile kernels and capture."""
    for _ in range(6):
        step()
    times = []
    for _ in range(ROUNDS):
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        times.append((time.perf_counter() - start) * 1e3 / steps)
    return times


def wait(model: Model) -> Callable[[], None]:
    """Return the function that waits for the model's device."""
    xp = model.layers.xp
    return (lambda: None) if xp is np else (lambda: xp.cuda.get_current_stream().synchronize())


def attention(name: str) -> record.Row:
    """Measure one layout of heads over one text of LONG rows."""
    import cupy

    from thdattn.engines import AttentionOptions, cuda

    num_heads, num_kv_heads, head_dim = LAYERS[name]
    layer = thdattn.CPAttention(thdattn.comm.init("single"), num_heads, head_dim, num_kv_heads, engine="cuda")
    num_bytes = 2 * 2 * LONG * num_kv_heads * head_dim
    with cupy.cuda.Stream(non_blocking=True) as stream:
        caches = [layer.cache(1, LONG) for _ in range(-(-CACHED_BYTES // num_bytes))]
        for cache in caches:
            for x in (cache.k, cache.v):
                x.view(np.uint16)[...] = 0x3C00
        q, ranges = cupy.asarray(np.ones((1, num_heads, head_dim), layer.dtype)), cupy.asarray([[0, LONG]], np.int32)

        def attend(cache: thdattn.KVCache) -> Any:
            return cuda.attn_decode(q, ranges, cache, AttentionOptions(layer.softmax_scale))

        def copy(cache: thdattn.KVCache) -> None:
            cache.v.data.copy_from_device_async(cache.k.data, cache.k.nbytes, stream)

        attended, copied = (replayed(call, caches, stream) for call in (attend, copy))
    ms, copy_ms = median(attended), median(copied)
    return {
        "what": f"attention, {name}", "texts": "1", "bytes": str(LONG), "way": "kernel",
        **record.timed(attended), "gb_per_s": f"{num_bytes / ms / 1e6:.0f}",
        "copy_gb_per_s": f"{2 * caches[0].k.nbytes / copy_ms / 1e6:.0f}",
    }


def mixer(num_texts: int) -> record.Row:
    """Measure a typical mixer with one number of texts."""
    import cupy

    layer, rng = thdattn.Mamba2Mixer(thdattn.comm.init("single"), *MIXER, engine="cuda"), np.random.default_rng(0)
    (heads, head_dim, state_dim), inner = MIXER, MIXER[0] * MIXER[1]
    channels, num_bytes = inner + 2 * state_dim, 2 * 4 * num_texts * inner * state_dim
    shapes = (channels, layer.conv_width), (channels,), (heads,), (heads,), (heads,)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        caches = [layer.cache(num_texts) for _ in range(max(2, CACHED_BYTES // num_bytes))]
        weights = thdattn.Mamba2Weights(*(cupy.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes))
        rows = cupy.asarray(rng.standard_normal((num_texts, inner + channels + heads), np.float32).astype(layer.dtype))

        def decode(cache: thdattn.Mamba2Cache) -> Any:
            return layer.decode(rows, weights, cache)

        def copy(cache: thdattn.Mamba2Cache) -> None:
            other = caches[0 if cache is caches[-1] else -1]
            other.states.data.copy_from_device_async(cache.states.data, cache.states.nbytes, stream)

        decoded, copied = (replayed(call, caches, stream) for call in (decode, copy))
    speeds = (f"{num_bytes / median(times) / 1e6:.0f}" for times in (decoded, copied))
    return {
        "what": f"mixer, {heads} heads of {head_dim}, states of {state_dim}", "texts": str(num_texts), "bytes": "any",
        "way": "kernel", **record.timed(decoded), **dict(zip(("gb_per_s", "copy_gb_per_s"), speeds, strict=True)),
    }


def replayed(call: Callable[[T], Any], caches: list[T], stream: Any) -> list[float]:
    """Return milliseconds per call, in a captured graph with one call for every cache."""
    import timing

    for cache in caches:
        call(cache)
    stream.synchronize()
    stream.begin_capture()
    kept = [call(cache) for cache in caches]  # the graph writes to these results
    graph = stream.end_capture()
    times = [ms for _ in range(ROUNDS) for ms in timing.replayed(lambda: graph.launch(stream), len(caches))]
    del kept
    return times


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes", nargs="+", choices=list(SIZES), default=["tiny", "tiny-hybrid", "small", "base"],
        help="(default: tiny tiny-hybrid small base)")
    add("--texts", nargs="+", type=int, default=[1, 16], metavar="N", help="written together (default: 1 16)")
    add("--bytes", type=int, default=2000, metavar="N", help="of every text (default: 2000)")
    add("--steps", type=int, default=100, metavar="N", help=f"of a round, of which there are {ROUNDS} (default: 100)")
    record.add_options(parser, "decode")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
