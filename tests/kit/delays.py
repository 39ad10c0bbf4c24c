"""Attention on a GPU whose streams are late at random: layers in flight, plans that are dropped at work, graphs.

What must come out are the bits of the same calls one after another, each waited for, with no stream late.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from cases import to_host

import thdattn
from thdattn import PackedBatch
from thdattn.comm.nccl.transport import NcclTransport
from thdattn.comm.peer import transport, windows

HEADS, KV_HEADS = 8, 4
PACKS = (300, 500), (33, 1, 64, 0, 100) * 3, (900,)
NUM_LAYERS = 3
SPIN = """
extern "C" __global__ void spin(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {}
}
"""
LONGEST = 500_000  # clock cycles: some 300 us
ENGINE = "attn_fwd", "attn_bwd", "to_sequence_order", "to_rank_order", "pack_rows", "add_partials"
GATHERED = "all_gather", None  # cp_comm_type and sharding
# Those that nothing is gathered for: cp_comm_type, sharding, groups of heads.
METHODS = (("a2a", "contiguous", 1), ("a2a", "contiguous", 2), ("a2a", "dual_chunk", 2), ("all_gather", "balanced", 1),
           ("p2p", "dual_chunk", 1))


class Pointer(NamedTuple):
    """A stream of which only the address is known, as CuPy takes it."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol, and the address."""
        return 0, self.address


@contextlib.contextmanager
def late(cupy: Any, seed: int) -> Iterator[None]:
    """Delay half of all that is enqueued, on the stream of the kernels and on the one that pulls."""
    from thdattn.engines import cuda

    draw, spin = random.Random(seed), cupy.RawKernel(SPIN, "spin")
    spin((1,), (1,), (np.int64(0),))  # is compiled

    def delayed(function: Callable[..., Any], stream_of: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if draw.random() < 0.5:
                with stream_of(*args):
                    spin((1,), (1,), (np.int64(draw.randrange(LONGEST)),))
            return function(*args, **named)

        return call

    def current(*args: Any) -> Any:
        return cupy.cuda.get_current_stream()

    def last(*args: Any) -> Any:
        return cupy.cuda.Stream.from_external(Pointer(args[-1])) if isinstance(args[-1], int) else args[-1]

    peers = ((windows.MemOps, "__call__"), (transport._Slice, "pull"), (transport, "_copy_rows"),
             (transport.PeerTransport, "_copy"), (transport.PeerTransport, "_add"),
             *((NcclTransport, name) for name in ("_gather", "_exchanged", "_reduced", "_follow", "_recorded")))
    places = [*((cuda, name, current) for name in ENGINE), *((*method, last) for method in peers),
              (transport.PeerTransport, "all_to_all", current)]
    with contextlib.ExitStack() as stack:
        for owner, name, stream_of in places:
            stack.enter_context(mock.patch.object(owner, name, delayed(getattr(owner, name), stream_of)))
        yield


@contextlib.contextmanager
def failing(draw: random.Random) -> Iterator[None]:
    """Let some attentions of the engine raise, alike on all ranks that draw alike."""
    from thdattn.engines import cuda

    def raising(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if draw.random() < 1 / 16:
                raise MemoryError
            return function(*args, **named)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("attn_fwd", "attn_bwd"):
            stack.enter_context(mock.patch.object(cuda, name, raising(getattr(cuda, name))))
        yield


# --- calls -------------------------------------------------------------------------------------------------------


def attention(comm: thdattn.comm.Comm, dims: tuple[int, int] = (128, 128), **options: Any) -> thdattn.CPAttention:
    return thdattn.CPAttention(comm, HEADS, dims[0], KV_HEADS, dims[1], engine="cuda", deterministic=True, **options)


def inputs_of(cupy: Any, layer: thdattn.CPAttention, plan: Any, seed: int = 0) -> list[Any]:
    """Return this rank's q, k, v, dout, of which rows without a token are NaN."""
    rng, valid = np.random.default_rng([seed, plan.cp_rank]), to_host(plan.valid)
    shapes = ((layer.num_heads, layer.head_dim), (layer.num_kv_heads, layer.head_dim),
              (layer.num_kv_heads, layer.v_head_dim), (layer.num_heads, layer.v_head_dim))
    made = [rng.standard_normal((plan.local_rows, *shape), np.float32) for shape in shapes]
    for x in made:
        x[~valid] = np.nan
    return [cupy.asarray(x.astype(layer.dtype)) for x in made]


def step(layer: thdattn.CPAttention, plan: Any, q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
    out, saved = layer.forward(q, k, v, plan, return_max_logit=True)
    return out, saved.lse, saved.max_logit, *layer.backward(dout, saved)


def one_by_one(layer: thdattn.CPAttention, plan: Any, inputs: list[Any]) -> list[list[bytes]]:
    """Return the bits of each layer's results, each waited for before the next begins."""
    return [bits(step(layer, plan, *one)) for one in inputs]


def bits(results: Any) -> list[bytes]:
    return [to_host(x).tobytes() for x in results]


def in_flight(layer: thdattn.CPAttention, plan: Any, inputs: list[Any]) -> list[tuple[Any, ...]]:
    """Return the same results, with keys of two layers under way, then the sums of three."""
    keys = [layer.gather(k, v, plan) for _, k, v, _ in inputs[:2]]
    made = []
    for number, (q, k, v, _) in enumerate(inputs):
        made.append(layer.forward(q, k, v, plan, return_max_logit=True, keys=keys[number]))
        keys += [layer.gather(k, v, plan) for _, k, v, _ in inputs[number + 2 : number + 3]]
    again = [] if made[0][1].keys else [layer.gather(saved.k, saved.v, plan) for _, saved in made[:-3:-1]]
    grads = []
    for number in reversed(range(len(inputs))):
        ahead = again.pop(0) if again else None
        grads.insert(0, layer.start_backward(inputs[number][3], made[number][1], ahead))
        if again and number > 1:
            again.append(layer.gather(made[number - 2][1].k, made[number - 2][1].v, plan))
    return [(out, saved.lse, saved.max_logit, dq, *dk_dv())
            for (out, saved), (dq, dk_dv) in zip(made, grads, strict=True)]


def same(found: list[Any], wanted: list[list[bytes]], what: str) -> None:
    for number, (results, expected) in enumerate(zip(found, wanted, strict=True)):
        for name, x, y in zip(("out", "lse", "max_logit", "dq", "dk", "dv"), bits(results), expected, strict=True):
            assert x == y, f"{what}: {name} of layer {number}"


# --- what is shown -----------------------------------------------------------------------------------------------


def check(
    cupy: Any, comm: thdattn.comm.Comm, head_groups: int | None, keep_keys: bool, method: tuple[Any, Any] = GATHERED,
    seeds: range = range(2),
) -> None:
    """Check all of this, with a non-blocking stream current.

    Args:
        method: cp_comm_type and sharding. Other ones than GATHERED have no gathers ahead, and are not captured.
    """
    (cp_comm_type, sharding), calls = method, in_flight if method == GATHERED else together
    layer = attention(comm, cp_comm_type=cp_comm_type, head_groups=head_groups, keep_keys=keep_keys)
    batches = [PackedBatch.from_lengths(lengths, 2 * comm.size) for lengths in PACKS]
    inputs, wanted = [], []
    for batch in batches:
        plan = layer.plan(batch, sharding)
        inputs.append([inputs_of(cupy, layer, plan, seed) for seed in range(NUM_LAYERS)])
        wanted.append(one_by_one(layer, plan, inputs[-1]))
    del plan
    for seed in seeds:
        with late(cupy, 100 * seed + comm.rank):
            plans_that_are_dropped_at_work(cupy, layer, batches, sharding, inputs, wanted, calls)
            errors_on_the_way(cupy, layer, batches, sharding, inputs, wanted, seed)
    if method == GATHERED:
        with late(cupy, comm.rank):
            captured(cupy, comm, layer, layer.plan(batches[0]), inputs[0], wanted[0])


def together(layer: thdattn.CPAttention, plan: Any, inputs: list[Any]) -> list[tuple[Any, ...]]:
    """Run all forwards, then start all backwards before the gradients of one are asked for."""
    made = [layer.forward(q, k, v, plan, return_max_logit=True) for q, k, v, _ in inputs]
    grads = [layer.start_backward(dout, saved) for (*_, dout), (_, saved) in zip(inputs, made, strict=True)]
    return [(out, saved.lse, saved.max_logit, dq, *dk_dv())
            for (out, saved), (dq, dk_dv) in zip(made, grads, strict=True)]


def plans_that_are_dropped_at_work(
    cupy: Any, layer: thdattn.CPAttention, batches: Any, sharding: str | None, inputs: Any, wanted: Any,
    calls: Callable[..., Any],
) -> None:
    """Drop plans at work without a wait of the host; gathers go to two streams in turn, and work is left under way."""
    here = cupy.cuda.get_current_stream()
    streams = [here, here, *[cupy.cuda.Stream(non_blocking=True)] * 2] if calls is in_flight else [here]
    cupy.cuda.runtime.deviceSynchronize()  # inputs are there for both
    results = []
    for number in range(8):
        which = number % len(batches)
        with streams[number % len(streams)]:
            plan = layer.plan(batches[which], sharding)
            results.append((which, calls(layer, plan, inputs[which])))
            q, k, v, dout = inputs[which][0]
            _, saved = layer.forward(q, k, v, plan)
            layer.start_backward(dout, saved)  # sums that nobody asks for
            if calls is in_flight:
                layer.gather(k, v, plan)  # and keys
            del plan, saved
    cupy.cuda.runtime.deviceSynchronize()
    for which, found in results:
        same(found, wanted[which], f"plans dropped at work, pack {which}")


def errors_on_the_way(
    cupy: Any, layer: thdattn.CPAttention, batches: Any, sharding: str | None, inputs: Any, wanted: Any, seed: int
) -> None:
    """Give up layers on all ranks while rows travel, with their plans; others get the memory of these rows."""
    found, draw = [], random.Random(seed)
    for number in range(12):
        which = number % len(batches)
        plan = layer.plan(batches[which], sharding)
        with contextlib.suppress(MemoryError), failing(draw):
            found.append((which, together(layer, plan, inputs[which])))
        found.append((which, together(layer, plan, inputs[which])))
    cupy.cuda.runtime.deviceSynchronize()
    for which, results in found:
        same(results, wanted[which], f"errors on the way, pack {which}")


def captured(
    cupy: Any, comm: thdattn.comm.Comm, layer: thdattn.CPAttention, plan: Any, inputs: Any, wanted: Any
) -> None:
    """Replay a graph between eager calls, whose sums and keys are under way."""
    stream, pool = cupy.cuda.get_current_stream(), cupy.cuda.MemoryPool()
    step(layer, plan, *inputs[0])  # what the first call of a kind makes is made
    stream.synchronize()
    comm.barrier()
    with cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        found = in_flight(layer, plan, inputs)
        graph = stream.end_capture()
    for _ in range(3):
        q, k, v, dout = inputs[0]
        _, saved = layer.forward(q, k, v, plan)
        dq, dk_dv = layer.start_backward(dout, saved)
        keys = layer.gather(*inputs[1][1:3], plan)
        with comm.watched("replay"):
            graph.launch(stream)
        same(found, wanted, "replayed")
        assert bits((dq, *dk_dv())) == wanted[0][3:], "sums beside a replay"
        out, saved = layer.forward(*inputs[1][:3], plan, return_max_logit=True, keys=keys)
        assert bits((out, saved.lse, saved.max_logit)) == wanted[1][:3], "keys beside a replay"
    stream.synchronize()
    comm.barrier()
    del graph
