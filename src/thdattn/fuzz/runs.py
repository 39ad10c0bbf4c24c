"""Runs of random cases on ranks, for results that judge.py holds against float64, and bits where they are promised.

Inputs are drawn per token and are the same for every number of ranks. Rows that hold no token are NaN, unless the case
says that padding is finite. The oracles share no code with plans, methods and engines.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from thdattn.attention import CPAttention
from thdattn.capacity import BalancedCapacity
from thdattn.comm import Comm, SingleComm, run_local
from thdattn.fuzz.cases import FuzzCase, draw_lengths, offsets
from thdattn.graphs import CudaGraphConfig, Graphs, StaticPack
from thdattn.kv_cache import KVCache
from thdattn.mamba.mixer import Mamba2Mixer
from thdattn.mamba.shape import Mamba2Weights
from thdattn.packing import PackedBatch
from thdattn.plan.plan import Plan
from thdattn.varlen import varlen_attention, varlen_attention_backward

Array = NDArray[Any]
Results = dict[str, Array]

SECONDS_FOR_RANKS = 120.0  # that ranks wait for each other
REPLAYS, STATIC_SEQS = 4, 24  # packs that a captured graph replays, and its capacity of sequences
GRADS = ("dq", "dk", "dv", "dsinks")
MODULES_THAT_ALLOCATE = {"reference": ("thdattn.engines.reference", "thdattn.engines.reference.arrays"),
                         "cuda": ("thdattn.engines.cuda", "thdattn.engines.cuda.launch")}


class Inputs(NamedTuple):
    """Arrays of valid tokens, (tokens, heads, width) each; sinks (num_heads,); None where a case has none."""

    q: Array
    k: Array
    v: Array
    dout: Array | None
    sinks: Array | None


@lru_cache(maxsize=8)
def inputs_of(case: FuzzCase, layer: int = 0) -> Inputs:
    """Return the arrays of a layer of a case."""
    rng, (heads, kv_heads), (head_dim, v_head_dim) = _random(case, layer), case.heads, case.dims
    queries = sum(case.lengths)
    keys = sum(case.keys) if case.flow == "varlen" and case.keys else queries
    shapes = ((queries, heads, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, v_head_dim),
              (queries, heads, v_head_dim))
    q, k, v, dout = (rng.standard_normal(shape, np.float32).astype(case.dtype) for shape in shapes)
    sinks = rng.uniform(-2, 4, heads).astype(np.promote_types(case.dtype, np.float32)) if case.sinks else None
    return Inputs(q, k, v, dout, sinks)


@lru_cache(maxsize=8)
def mixer_inputs_of(case: FuzzCase) -> tuple[Array, Mamba2Weights, Array]:
    """Return zxbcdt, the weights and dout of a mixer's valid tokens."""
    return draw_mixer_inputs(_random(case, 0), sum(case.lengths), case.mixer, case.dtype)


def draw_mixer_inputs(
    rng: np.random.Generator, rows: int, sizes: Sequence[int], dtype: DTypeLike, norm: bool = False
) -> tuple[Array, Mamba2Weights, Array]:
    """Draw zxbcdt, weights and dout of a mixer.

    Args:
        sizes: as FuzzCase.mixer.
        norm: whether the weights have that of a norm.
    """
    heads, head_dim, state_dim, groups, width = sizes
    inner = heads * head_dim
    channels = inner + 2 * groups * state_dim
    zxbcdt, dout = rng.standard_normal((rows, inner + channels + heads)), rng.standard_normal((rows, inner))
    weights = [
        rng.standard_normal((channels, width)) / width**0.5, 0.3 * rng.standard_normal(channels),
        np.log(rng.uniform(0.3, 4, heads)), rng.standard_normal(heads), rng.standard_normal(heads) - 1,
    ]
    weights += [rng.uniform(0.5, 1.5, inner)] if norm else []
    kind = np.promote_types(dtype, np.float32)
    return zxbcdt.astype(dtype), Mamba2Weights(*(x.astype(kind) for x in weights)), dout.astype(dtype)


def _random(case: FuzzCase, layer: int) -> np.random.Generator:
    return np.random.default_rng([case.seed, layer])


def token_rows(batch: PackedBatch) -> Array:
    """Return (total_tokens,), the packed rows that hold a token."""
    starts, lengths = batch.cu_seqlens_padded[:-1], batch.lengths
    first = np.repeat(starts - batch.cu_seqlens[:-1], lengths)
    return np.asarray(first + np.arange(len(first)))


def local_rows(batch: PackedBatch, rows: Array, tokens: Array, fill: float) -> Array:
    """Return a rank's rows of an array of tokens; `fill` in rows that hold none."""
    packed = np.full((batch.total_rows + 1, *tokens.shape[1:]), fill, tokens.dtype)
    packed[token_rows(batch)] = tokens
    return np.asarray(packed[rows])  # row -1, a filler, is the last one


def to_host(x: Any) -> Array:
    """Return a NumPy copy of a NumPy or CuPy array."""
    return np.array(x) if isinstance(x, np.ndarray) else np.asarray(x.get())


class Ranks:
    """Comm with its two levels, which are split off once, and the engine that computes."""

    def __init__(self, comm: Comm, engine: str) -> None:
        self.comm, self.engine = comm, engine
        self.xp = importlib.import_module("cupy" if engine == "cuda" else "numpy")
        self._levels: dict[int, tuple[Comm, Comm]] = {}

    def attention(self, case: FuzzCase) -> CPAttention:
        """Make the attention of a case."""
        comm = SingleComm() if case.flow in ("varlen", "decode") else self.comm
        (heads, kv_heads), (head_dim, v_head_dim) = case.heads, case.dims
        return CPAttention(
            self._level(case.inner) if "+" in case.method else comm, heads, head_dim, kv_heads, v_head_dim, case.causal,
            (case.window[0], case.window[1]), case.scale * head_dim**-0.5, case.dtype, case.deterministic, self.engine,
            case.head_groups or None, {"auto": None, "yes": True, "no": False}[case.keep_keys], case.method,
            case.softcap, case.sinks,
        )

    def stream(self) -> AbstractContextManager[object]:
        """Return a stream of this rank's own on its GPU; simulated ranks share the legacy default stream."""
        if self.engine == "cuda" and self.comm.size > 1:
            stream: AbstractContextManager[object] = self.xp.cuda.Stream(non_blocking=True)
            return stream
        return nullcontext()

    def _level(self, inner: int) -> tuple[Comm, Comm]:
        if inner not in self._levels:
            rank = self.comm.rank
            self._levels[inner] = self.comm.split(rank // inner), self.comm.split(rank % inner)
        return self._levels[inner]


@contextmanager
def replaced(places: Sequence[tuple[Any, str]], make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace attributes (object, name) within the block by what `make` makes of them."""
    before = [getattr(place, name) for place, name in places]
    for (place, name), value in zip(places, before, strict=True):
        setattr(place, name, make(value))
    try:
        yield
    finally:
        for (place, name), value in zip(places, before, strict=True):
            setattr(place, name, value)


def allocators(engine: str) -> list[tuple[Any, str]]:
    """Return the places of the function by which an engine allocates arrays."""
    return [(importlib.import_module(name), "empty") for name in MODULES_THAT_ALLOCATE[engine]]


def poisoned(engine: str) -> AbstractContextManager[None]:
    """Fill everything that an engine allocates within the block with NaN."""

    def poisoning(allocate: Callable[..., Any]) -> Callable[..., Any]:
        def empty(shape: tuple[int, ...], dtype: Any) -> Any:
            made = allocate(shape, dtype)
            if made.size and engine == "cuda":
                made.data.memset_async(0xFF, made.nbytes)
            elif made.size:
                made.reshape(-1).view(np.uint8).fill(0xFF)
            return made

        return empty

    return replaced(allocators(engine), poisoning)


def portable_kernels() -> AbstractContextManager[None]:
    """Run the kernels for every GPU within the block, also on a Hopper GPU."""
    launch = importlib.import_module("thdattn.engines.cuda.launch")
    gpu = replace(launch.this_gpu(), sm90=False)
    return replaced([(launch, "this_gpu")], lambda before: lambda: gpu)


# ------------------------------------------------------------------------------------------------ runs


def run_on_all(case: FuzzCase, ranks: Ranks) -> list[Results] | Exception:
    """Run a case on all ranks, or on simulated ones, whose error is returned. Collective."""
    _ = (mixer_inputs_of if case.mixer else inputs_of)(case)  # once, before several threads ask for them
    if ranks.comm.size == 1:
        try:
            return run_local(case.ranks, lambda comm: run(case, Ranks(comm, ranks.engine)), SECONDS_FOR_RANKS)
        except Exception as error:
            return error
    try:
        return list(ranks.comm._gather_values(run(case, ranks)))
    except BaseException:
        print(f'FAILED --case "{case.words()}" on rank {ranks.comm.rank}', flush=True)
        raise


def run(case: FuzzCase, ranks: Ranks) -> Results:
    """Run a case on this rank and return host arrays by name.

    `rows` are the packed rows of this rank; names of a second layer end in " of B". `unequal` counts the arrays whose
    bits differ where they must not.
    """
    call = FLOWS[case.flow]
    found = call(case, ranks)
    unequal = found.pop("unequal", np.zeros(1, np.int32))
    if case.again:
        unequal += _unequal(found, call(case, ranks))
    return {**found, "unequal": unequal}


def _unequal(results: Results, others: Results) -> int:
    return sum(x.tobytes() != others[name].tobytes() for name, x in results.items())


def _arrays(case: FuzzCase, ranks: Ranks, plan: Plan, layer: int = 0) -> tuple[Any, Any, Any, Any, Any]:
    """Return q, k, v, dout of this rank's rows, and the sinks."""
    return _placed(inputs_of(case, layer), case, ranks, plan.batch, to_host(plan.rows))


def _placed(inputs: Inputs, case: FuzzCase, ranks: Ranks, batch: PackedBatch, rows: Array) -> tuple[Any, ...]:
    """Return inputs as arrays of the engine, of a rank's rows of a batch."""
    *tokens, sinks = inputs
    local = (ranks.xp.asarray(local_rows(batch, rows, x, case.fill)) for x in tokens if x is not None)
    return *local, None if sinks is None else ranks.xp.asarray(sinks)


def _plan(case: FuzzCase, attention: CPAttention) -> Plan:
    return attention.plan(case.batch, case.sharding, finite_padding=case.finite)


def _named(ranks: Ranks, out: Any, saved: Any, grads: Sequence[Any], suffix: str = "") -> Results:
    """Return results of a forward and a backward, on the host, and the packed rows that they belong to."""
    found = {"out": out, "lse": saved.lse, **dict(zip(GRADS, grads, strict=False))}
    if saved.max_logit is not None:
        found["max_logit"] = saved.max_logit
    named = {f"{name}{suffix}": to_host(x) for name, x in found.items()}
    return {"rows": to_host(saved.plan.rows), **named}


def _one_layer(case: FuzzCase, ranks: Ranks) -> Results:
    """Run a layer, while something else is computed: gather keys before it, or take dk and dv after dq, where asked."""
    attention = ranks.attention(case)
    plan = _plan(case, attention)
    q, k, v, dout, sinks = _arrays(case, ranks, plan)
    ahead = case.flow == "ahead" and attention.can_gather(plan)
    keys = attention.gather(k, v, plan) if ahead else None
    _ = q.copy()
    out, saved = attention.forward(q, k, v, plan, case.max_logit, keys, sinks)
    keys = attention.gather(saved.k, saved.v, plan) if ahead and saved.keys is None else None
    _ = dout.copy()
    if case.flow != "split":
        return _named(ranks, out, saved, attention.backward(dout, saved, keys))
    dq, dk_dv = attention.start_backward(dout, saved)
    _ = dq.copy()
    return _named(ranks, out, saved, (dq, *dk_dv()))


def _layers(case: FuzzCase, ranks: Ranks) -> Results:
    """Run forward of A, forward of B, backward of B and backward of A, with one plan."""
    attention = ranks.attention(case)
    plan = _plan(case, attention)
    *_, dout_a, _ = a = _arrays(case, ranks, plan)
    *_, dout_b, _ = b = _arrays(case, ranks, plan, 1)
    (out_a, saved_a), (out_b, saved_b) = (
        attention.forward(q, k, v, plan, case.max_logit, sinks=sinks) for q, k, v, _, sinks in (a, b))
    grads_b = attention.backward(dout_b, saved_b)
    grads_a = attention.backward(dout_a, saved_a)
    return _named(ranks, out_a, saved_a, grads_a) | _named(ranks, out_b, saved_b, grads_b, " of B")


def _replay(case: FuzzCase, ranks: Ranks) -> Results:
    """Replay a captured graph for the case's pack and others; each gives the bits of the same calls without a graph.

    Returns the results of the case's own pack, which is the last one.
    """
    attention, multiple = ranks.attention(case), 2 * case.ranks
    rng, rows = _random(case, 2), -(-max(256, case.batch.total_rows) // multiple) * multiple
    drawn = [draw_lengths(rng, multiple, STATIC_SEQS, rows - 1) for _ in range(REPLAYS - 1)]
    batches = [*(PackedBatch(*map(offsets, each)) for each in drawn), case.batch]
    sinks = inputs_of(case).sinks
    given = None if sinks is None else ranks.xp.asarray(sinks)  # the graph reads it at this address
    most = max(STATIC_SEQS, len(case.lengths))
    config = CudaGraphConfig(impl="local", max_packed_seqs=most, warmup_steps=1)
    unequal, found = 0, {}
    stream = ranks.xp.cuda.Stream(non_blocking=True) if ranks.engine == "cuda" else nullcontext()
    # Every layout of balanced rows fits this.
    sharding = BalancedCapacity(rows, rows) if case.sharding == "balanced" else case.sharding
    with stream, Graphs(attention.comm, config) as graphs:
        pack = StaticPack(graphs, [attention], rows, sharding, finite_padding=case.finite)

        def forward(q: Any, k: Any, v: Any) -> Any:
            return attention.forward(q, k, v, pack.plans()[0], case.max_logit, sinks=given)

        pair = graphs.pair(forward, attention.backward, "layer")
        for number, batch in enumerate(batches):
            pack.load([batch])
            shared = pack.sharding(batch)
            inputs = inputs_of(case) if number == len(batches) - 1 else _others(case, batch)
            q, k, v, dout, _ = _placed(inputs, case, ranks, shared.batch, shared.rows(ranks.comm.rank))
            plan = attention.plan(shared.batch, shared, finite_padding=case.finite)
            out, saved = attention.forward(q, k, v, plan, case.max_logit, sinks=given)
            eager = _named(ranks, out, saved, attention.backward(dout, saved))
            out, saved = pair.forward(q, k, v)
            found = _named(ranks, out, saved, pair.backward(dout, saved))
            unequal += _unequal(found, eager)
    return {**found, "unequal": np.array([unequal], np.int32)}


def _others(case: FuzzCase, batch: PackedBatch) -> Inputs:
    """Draw inputs of another pack of the same heads."""
    rng, mine = _random(case, 3), inputs_of(case)
    q, k, v, dout = (rng.standard_normal((batch.total_tokens, *x.shape[1:]), np.float32).astype(x.dtype)
                     for x in mine[:4] if x is not None)
    return Inputs(q, k, v, dout, mine.sinks)


def _varlen(case: FuzzCase, ranks: Ranks) -> Results:
    q, k, v, dout, sinks = (None if x is None else ranks.xp.asarray(x) for x in inputs_of(case))
    left, right = case.window
    out, saved = varlen_attention(
        q, k, v, offsets(case.lengths), offsets(case.keys or case.lengths),
        softmax_scale=case.scale * case.dims[0] ** -0.5, causal=case.causal, window_size=(left, right),
        softcap=case.softcap, deterministic=case.deterministic, return_saved=True, sinks=sinks)
    return _named(ranks, out, saved.saved, varlen_attention_backward(dout, saved))


def _decode(case: FuzzCase, ranks: Ranks) -> Results:
    """Fill the first half of every sequence into a cache, and decode the rest some rows at a time."""
    attention, (count,) = ranks.attention(case), case.keys
    *tokens, _, sinks = inputs_of(case)
    given = None if sinks is None else ranks.xp.asarray(sinks)
    texts = [np.split(x, np.cumsum(case.lengths)[:-1]) if case.lengths else [] for x in tokens]
    if not sum(case.lengths):
        return {"rows": np.zeros(0, np.int32), "out": np.zeros((0, case.heads[0], case.dims[1]), case.dtype)}
    starts = [length // 2 for length in case.lengths]
    cache = attention.cache(len(starts), max(case.lengths) + count)
    out = decode_all(attention, cache, texts, starts, count, ranks.xp, given)
    return {"rows": np.arange(len(out), dtype=np.int32), "out": out}


def decode_all(
    attention: CPAttention, cache: KVCache, texts: Sequence[Sequence[Array]], starts: Sequence[int], count: int,
    xp: Any, sinks: Any = None,
) -> Array:
    """Return out (all rows, num_heads, v_head_dim) of whole texts: their starts by forward, the rest by decode.

    Texts that have ended go on with rows of NaN, which nobody may see.

    Args:
        texts: q, k, v of every text.
        count: rows of a text per decode.
    """
    batch, lengths = PackedBatch.from_lengths(starts, 3), [len(x) for x in texts[0]]
    plan = attention.plan(batch, "contiguous")
    q, k, v = (xp.asarray(batch.pack([x[:n] for x, n in zip(side, starts, strict=True)], fill=np.nan))
               for side in texts)
    out, _ = attention.forward(q, k, v, plan, sinks=sinks)
    cache.fill(k, v, plan)
    made = [[x] for x in batch.unpack(to_host(out))]
    while any(start < length for start, length in zip(starts, lengths, strict=True)):
        q, k, v = (xp.asarray(next_rows(side, starts, count)) for side in texts)
        with np.errstate(invalid="ignore"):  # from sequences that have ended
            rows = to_host(attention.decode(q, k, v, cache, sinks)).reshape(len(starts), count, *out.shape[1:])
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            made[number].append(rows[number, : max(0, min(count, length - start))])
        starts = [min(start + count, length) for start, length in zip(starts, lengths, strict=True)]
        cache.lengths[...] = xp.asarray(starts, np.int32)  # sequences that have ended drop their NaN
    return np.concatenate([rows for text in made for rows in text])


def next_rows(texts: Sequence[Array], starts: Sequence[int], count: int) -> Array:
    """Return the next rows of every sequence, NaN beyond its end."""
    rows = np.full((len(texts), count, *texts[0].shape[1:]), np.nan, texts[0].dtype)
    for row, text, start in zip(rows, texts, starts, strict=True):
        piece = text[start : start + count]
        row[: len(piece)] = piece
    return rows.reshape(-1, *rows.shape[2:])


def _mixer(case: FuzzCase, ranks: Ranks) -> Results:
    heads, head_dim, state_dim, groups, width = case.mixer
    zxbcdt, weights, dout = mixer_inputs_of(case)
    mixer = Mamba2Mixer(ranks.comm, heads, head_dim, state_dim, groups, width, case.dtype, ranks.engine)
    plan, xp = mixer.plan(case.batch), ranks.xp
    rows = to_host(plan.rows)
    there, grads = (xp.asarray(local_rows(case.batch, rows, x, case.fill)) for x in (zxbcdt, dout))
    out, saved = mixer.forward(there, Mamba2Weights(*map(xp.asarray, weights)), plan)
    dzxbcdt, dweights = mixer.backward(grads, saved)
    made = {"rows": plan.rows, "out": out, "zxbcdt": dzxbcdt, **dweights._asdict()}
    return {name: to_host(x) for name, x in made.items()}


FLOWS: dict[str, Callable[[FuzzCase, Ranks], Results]] = {
    **dict.fromkeys(("plain", "ahead", "split"), _one_layer), "layers": _layers, "replay": _replay, "varlen": _varlen,
    "decode": _decode, "mixer": _mixer,
}
