"""What plans on the GPU have in common, how long it lives, and that streams find it made and not yet reused."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from cases import BFLOAT16, to_host
from test_gpu_plan import SINGLE, assert_arrays, on_gpu, results

import thdattn
from thdattn.plan.ranges import host_arrays
from thdattn.plan.workspace import FLOAT32, Buffer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

MASKS = {"causal": True}, {"causal": True, "window": (30, 0)}, {"causal": False}
PACK = ((300, 0, 41, 1, 650), (304, 4, 44, 4, 652))  # lengths, padded lengths


def attention_of(comm=SINGLE, **mask):
    return thdattn.CPAttention(comm, 4, 64, 2, engine="cuda", deterministic=True, **mask)


def batch_of(lengths=PACK[0], padded=PACK[1]):
    return thdattn.PackedBatch(*(np.cumsum([0, *x]).astype(np.int32) for x in (lengths, padded)))


def inputs_of(cupy, batch, seed=0):
    """q, k, v, dout of one rank."""
    rng = np.random.default_rng(seed)
    return [cupy.asarray(rng.standard_normal((batch.total_rows, heads, 64)).astype(BFLOAT16)) for heads in (4, 2, 2, 4)]


def test_plans_of_a_batch_share_what_masks_have_in_common(cupy):
    batch, other = batch_of(), batch_of()

    def program(comm):
        causal, window, full = (attention_of(comm, **mask).plan(batch) for mask in MASKS)
        for plan in (window, full):
            for field in ("rows", "positions", "valid", "rank_order", "offsets"):
                assert getattr(plan.arrays, field).data.ptr == getattr(causal.arrays, field).data.ptr, field
            for field in ("key_ranges", "query_ranges", "query_tiles", "key_tiles"):
                assert getattr(plan.arrays, field).data.ptr != getattr(causal.arrays, field).data.ptr, field
        assert attention_of(comm).plan(batch).arrays is causal.arrays
        buffer = Buffer("x", (8,), FLOAT32)
        buffers = [plan.workspace.array(buffer) for plan in (causal, attention_of(comm).plan(batch))]
        assert buffers[0].data.ptr != buffers[1].data.ptr, "work buffers are a plan's own"
        for apart in (attention_of(comm).plan(other), attention_of(comm).plan(batch, "contiguous")):
            assert apart.arrays.positions.data.ptr != causal.arrays.positions.data.ptr
        with cupy.cuda.Stream(non_blocking=True):
            assert attention_of(comm).plan(batch).arrays.positions.data.ptr != causal.arrays.positions.data.ptr
        return causal, window, full

    for cp_size in (1, 2):
        for cp_rank, plans in enumerate(thdattn.comm.run_local(cp_size, program)):
            for plan in plans:
                wanted = host_arrays(thdattn.Sharding(batch, cp_size), cp_rank, plan.window, plan.tiles)
                assert_arrays(plan.arrays, wanted, f"rank {cp_rank} of {cp_size}, window {plan.window}")


@pytest.mark.parametrize("on_device", [False, True])
def test_a_plan_that_nobody_holds_is_gone_at_once(cupy, on_device):
    batch = batch_of()
    attention = attention_of()
    gc.collect()
    gc.disable()
    try:
        plan = attention.plan(on_gpu(cupy, batch) if on_device else batch)
        results(attention, plan, inputs_of(cupy, batch))
        gone = [weakref.ref(x) for x in (plan, plan.arrays)]
        del plan
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def test_lengths_on_the_host_are_not_planned_in_a_capture(cupy):
    attention, batch = attention_of(), batch_of()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match=r"lengths on the host was planned on a stream that captures .*; "):
                attention.plan(batch)
        finally:
            stream.end_capture()


@pytest.mark.parametrize("num_heads", [4, 80])
def test_a_captured_refresh_misses_nothing_that_is_first_made_behind_it(cupy, num_heads):
    """Pieces of keys, where a forward of so few heads divides them among multiprocessors by the lengths."""
    attention = thdattn.CPAttention(SINGLE, num_heads, 64, 2, engine="cuda", deterministic=True)
    offsets = cupy.zeros(5, np.int32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        plan = attention.plan(thdattn.PackedBatch(offsets, total_rows=1000), "contiguous")
        plan.refresh()
        stream.begin_capture()
        plan.refresh()
        graph = stream.end_capture()
        for seed, lengths in enumerate(((300, 41, 1, 650), (1000, 0, 0, 0), (8, 0, 900, 90))):
            batch = thdattn.PackedBatch(np.cumsum([0, *lengths]).astype(np.int32), total_rows=1000)
            offsets.set(batch.cu_seqlens)
            graph.launch(stream)
            _, *kv, dout = inputs_of(cupy, batch, seed)
            inputs = cupy.repeat(dout, num_heads // 4, axis=1), *kv, cupy.repeat(dout, num_heads // 4, axis=1)
            found, wanted = (results(attention, x, inputs) for x in (plan, attention.plan(batch, "contiguous")))
            for name, x, y in zip(("out", "lse", "max_logit", "dq", "dk", "dv"), found, wanted, strict=True):
                assert x.tobytes() == y.tobytes(), f"{name} of {lengths}"


class Gate:
    """Work on a stream that begins when the gate is opened, or after a while, for work behind it to be late for sure.

    passed: whether it was opened in time.
    """

    SOURCE = r"""extern "C" __global__ void gate(volatile int* open, int* passed) {
      unsigned long long begun, now;
      asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
      do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (*open) { *passed = 1; return; }
      } while (now - begun < 30000000000ull);
    }"""

    def __init__(self, cupy):
        import cupyx

        self._cupy, self._gate = cupy, cupy.RawKernel(self.SOURCE, "gate")
        self._open, self._passed = cupyx.zeros_pinned(1, np.int32), cupy.zeros(1, np.int32)
        self._open[0] = 1
        self.close_on(cupy.cuda.get_current_stream())  # loads the kernel
        cupy.cuda.Device().synchronize()
        self._open[0], self._passed[...] = 0, 0
        cupy.cuda.Device().synchronize()

    def close_on(self, stream):
        with stream:
            self._gate((1,), (1,), (np.uint64(self._open.ctypes.data), self._passed))

    def open(self):
        self._open[0] = 1
        self._cupy.cuda.Device().synchronize()
        assert self._passed.get()[0], "the host waited for the GPU"


def on_stream(stream, call, *args):
    with stream:
        return call(*args)


def all_to_host(arrays):
    """On the current stream, behind the work that makes them."""
    return [to_host(x) for x in arrays]


@pytest.mark.parametrize("made_on", ["another stream", "the same stream"])
@pytest.mark.parametrize("on_device", [False, True])
def test_plans_may_go_and_others_come_while_work_is_late(cupy, on_device, made_on):
    """The arrays of a plan that was dropped are not written to before the work that reads them is done."""
    attention, batch = attention_of(), batch_of()
    work, maker = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    if made_on == "the same stream":
        maker = work
    inputs, lengths = inputs_of(cupy, batch), on_gpu(cupy, batch)
    others = [batch_of((977 - i, 20), (980, 28)) for i in range(8)]
    cupy.cuda.Device().synchronize()

    def run(plan):
        out, saved = attention.forward(*inputs[:3], plan)
        return out, saved.lse, *attention.backward(inputs[3], saved)

    def others_come():
        """Plans of as many rows, and whatever else is as large as an array of a plan."""
        plans = [attention.plan(on_gpu(cupy, other) if on_device else other) for other in others]
        return plans, [cupy.full(size, 0xAB, np.uint8) for size in (512, 1024, 2048, 4096, 8192) for _ in range(16)]

    def plan():
        return attention.plan(lengths if on_device else batch)

    wanted = on_stream(work, lambda: all_to_host(run(plan())))
    on_stream(maker, others_come)  # everything is compiled and loaded
    gate = Gate(cupy)
    gate.close_on(work)
    dropped = on_stream(maker, plan)
    found = on_stream(work, run, dropped)
    del dropped
    kept = on_stream(maker, others_come)
    gate.open()
    for x, y in zip(found, wanted, strict=True):
        assert to_host(x).tobytes() == y.tobytes()
    for made, other in zip(kept[0], others, strict=True):
        assert_arrays(made.arrays, host_arrays(thdattn.Sharding(other, 1), 0, made.window, made.tiles), other)


def test_work_on_another_stream_comes_after_the_making_of_the_plan(cupy):
    attention, batch = attention_of(), batch_of()
    work, maker = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    inputs = inputs_of(cupy, batch)
    cupy.cuda.Device().synchronize()

    def run(plan):
        return attention.forward(*inputs[:3], plan)[0], plan.shard(inputs[0])

    wanted = on_stream(work, lambda: all_to_host(run(attention.plan(batch))))
    on_stream(maker, attention.plan, batch)
    gate = Gate(cupy)
    gate.close_on(maker)
    found = on_stream(work, run, on_stream(maker, attention.plan, batch))
    gate.open()
    for x, y in zip(found, wanted, strict=True):
        assert to_host(x).tobytes() == y.tobytes()


def test_lengths_that_wait_for_the_gpu_are_not_overwritten_by_those_of_the_next_plans(cupy):
    attention, batches = attention_of(), [batch_of((1000 - i, 5 * i), (1000, 256)) for i in range(32)]
    stream = cupy.cuda.Stream(non_blocking=True)
    on_stream(stream, lambda: [attention.plan(batch) for batch in batches])
    gate = Gate(cupy)
    gate.close_on(stream)
    plans = on_stream(stream, lambda: [attention.plan(batch) for batch in batches])
    gate.open()
    for plan, batch in zip(plans, batches, strict=True):
        assert_arrays(plan.arrays, host_arrays(thdattn.Sharding(batch, 1), 0, plan.window, plan.tiles), batch)
