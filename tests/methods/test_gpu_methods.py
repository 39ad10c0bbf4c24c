"""Every method of the CUDA engine against the float64 oracle, on one GPU that simulated ranks share.

Every allocation starts as NaN and every row that holds no token is NaN.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16, Case, check, to_host
from loopback import SIZE, Loopback, Mirror
from ways import BY_NAME, Way, inputs_of, on_host, run_way, step, ways

import thdattn
from thdattn import PackedBatch
from thdattn.kernels.configs import TILES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

LONGER = (257, 3, 64, 0, 100, 17, 190)  # than tiles
PACKS = (
    Case("longer-causal", LONGER),
    Case("longer-full", LONGER, causal=False, slack=70),
    Case("longer-window", LONGER, causal=False, window=(70, 16)),
    Case("longer-window-left", LONGER, window=(10, 0)),
    *(BY_NAME[name] for name in ("slack", "one-document", "fewer-tokens-than-ranks", "empty-padded", "padded-between",
                                 "nothing", "nothing-slack")),
)  # fmt: skip
WAYS = ways((2, 2), (2, 1), (1, 2), (4, 2), sizes=(2, 4), heads=(2, 4, 8))
TELLING = [*ways((2, 2), sizes=(4,), heads=(4,)), Way("a2a", "contiguous", 2)]


def every(cases, some=WAYS):
    return [pytest.param(replace(case, heads=way.heads), way, id=f"{case}-{way}") for case in cases for way in some]


def bits(outcome):
    return {field: x.tobytes() for field, x in outcome.tokens.items()}


@pytest.mark.parametrize(("case", "way"), every(PACKS))
def test_every_pack_and_mask_is_the_oracle(cupy, case, way):
    check(case, BFLOAT16, run_way(case, way, BFLOAT16, xp=cupy, engine="cuda"))


@pytest.mark.parametrize("dims", TILES, ids=str)
@pytest.mark.parametrize(("case", "way"), every(PACKS[:3:2], TELLING))
def test_head_dims_are_the_oracle(cupy, case, way, dims):
    case = replace(case, dims=dims)
    check(case, BFLOAT16, run_way(case, way, BFLOAT16, xp=cupy, engine="cuda"))


@pytest.mark.parametrize(("case", "way"), every(PACKS[:4], TELLING))
def test_portable_kernels_are_the_oracle(cupy, portable, case, way):
    check(case, BFLOAT16, run_way(case, way, BFLOAT16, xp=cupy, engine="cuda"))


@pytest.mark.parametrize("heads", [(8, 8), (8, 1), (28, 4)], ids=str)
@pytest.mark.parametrize("sharding", ["contiguous", "dual_chunk"])
def test_heads_that_divide_or_are_shared(cupy, sharding, heads):
    case = replace(PACKS[0], heads=heads, dims=(128, 128))
    check(case, BFLOAT16, run_way(case, Way("a2a", sharding, 4), BFLOAT16, xp=cupy, engine="cuda"))


@pytest.mark.parametrize("way", [Way("a2a+all_gather", "dual_chunk", 4, inner=1), Way("a2a", "contiguous", 4)], ids=str)
def test_levels_of_one_are_the_method_alone(cupy, way):
    other = replace(way, cp_comm_type="all_gather", inner=None)
    if way.inner is None:
        other = replace(way, cp_comm_type="a2a+all_gather", inner=4)
    case = replace(PACKS[0], heads=(8, 4))
    one, two = (run_way(case, each, BFLOAT16, xp=cupy, engine="cuda", deterministic=True) for each in (way, other))
    assert bits(one) == bits(two)


# --- lengths on the GPU ------------------------------------------------------------------------------------------

FIRST, LATER = [0, 40, 48, 128], [0, 16, 112, 128]


@pytest.mark.parametrize("way", [way for way in TELLING if way.sharding != "balanced"], ids=str)
def test_plans_follow_lengths_on_the_gpu(cupy, way):
    lengths = cupy.asarray(FIRST, np.int32)
    case = Case("device", (1,), heads=(8, 4))
    inputs = [cupy.asarray(np.random.default_rng(i).standard_normal((128 // way.cp_size, *shape)).astype(BFLOAT16))
              for i, shape in enumerate(case.shapes().values())]  # fmt: skip

    def program(comm):
        layer = case.attention(way.comm(comm), BFLOAT16, engine="cuda", deterministic=True,
                               cp_comm_type=way.cp_comm_type)  # fmt: skip
        plan = layer.plan(PackedBatch(lengths, total_rows=128), way.sharding)
        for now in (FIRST, LATER):
            cupy.cuda.get_current_stream().synchronize()
            comm.barrier()
            if comm.rank == 0:
                lengths[...] = cupy.asarray(now, np.int32)
                cupy.cuda.get_current_stream().synchronize()
            comm.barrier()
            plan.refresh()
            plan.check()
            host = layer.plan(PackedBatch(now, total_rows=128), way.sharding)
            found, wanted = (on_host(step(layer, each, inputs)) for each in (plan, host))
            for field, x in wanted.items():
                assert found[field].tobytes() == x.tobytes(), field
            assert to_host(plan.rows).tolist() == host.sharding.rows(comm.rank).tolist()

    thdattn.comm.run_local(way.cp_size, program)


@pytest.mark.parametrize("way", [way for way in TELLING if way.sharding != "balanced"], ids=str)
def test_wrong_lengths_on_the_gpu_make_results_nan(cupy, way, monkeypatch):
    case, check_plan = Case("device", (1,), heads=(8, 4)), thdattn.Plan.check
    monkeypatch.setattr(thdattn.Plan, "check", lambda plan, wait=True: None)  # which may know at once

    def program(comm):
        layer = case.attention(way.comm(comm), BFLOAT16, engine="cuda", cp_comm_type=way.cp_comm_type)
        plan = layer.plan(PackedBatch(cupy.asarray([0, 64, 32, 128], np.int32), total_rows=128), way.sharding)
        inputs = [cupy.asarray(np.ones((plan.local_rows, *shape), BFLOAT16)) for shape in case.shapes().values()]
        out, saved = layer.forward(*inputs[:3], plan)
        for x in (out, *layer.backward(inputs[3], saved)):
            assert np.isnan(to_host(x).astype(np.float32)).all()
        with pytest.raises(ValueError, match="lengths on the GPU were planned that are wrong"):
            check_plan(plan)

    thdattn.comm.run_local(way.cp_size, program)


# --- peer memory on one GPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_groups", [1, 2])
@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize(("kind", "sharding"), [("a2a", "contiguous"), ("a2a", "dual_chunk"), ("p2p", "dual_chunk")])
def test_slices_through_peer_memory_are_those_of_copies(cupy, monkeypatch, kind, sharding, keep_keys, head_groups):
    """A rank of two whose other rank is itself: what it computes makes no sense, but the same one."""
    case = replace(PACKS[1], heads=(8, 4))

    def results(comm):
        layer = case.attention(comm, BFLOAT16, engine="cuda", deterministic=True, cp_comm_type=kind,
                               keep_keys=keep_keys, head_groups=head_groups)  # fmt: skip
        plan = layer.plan(case.batch(SIZE), sharding)
        inputs = inputs_of(case, plan, BFLOAT16, cupy, fill=0)
        return [[to_host(x).tobytes() for x in step(layer, plan, inputs).values()] for _ in range(3)]

    with cupy.cuda.Stream(non_blocking=True):
        comm = Loopback(monkeypatch)
        copied, pulled = results(Mirror()), results(comm)
        comm.peer.close()
    assert copied == pulled and copied[1:] == copied[:1] * 2


@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("kv_heads", [8, 1])
@pytest.mark.parametrize(("kind", "sharding"), [("a2a", "contiguous"), ("a2a", "dual_chunk"), ("p2p", "dual_chunk")])
def test_no_more_memory_is_taken_than_is_said(cupy, kind, sharding, kv_heads, keep_keys):
    """The most at a time of all that CuPy's pool gave since the plan was asked for."""

    class Taken(cupy.cuda.MemoryHook):
        name, now, most = "Taken", 0, 0

        def malloc_postprocess(self, **of):
            self.now += of["mem_size"]
            self.most = max(self.most, self.now)

        def free_postprocess(self, **of):
            self.now -= of["mem_size"]

    layer = thdattn.CPAttention(Mirror(), 8, 128, kv_heads, engine="cuda", cp_comm_type=kind, keep_keys=keep_keys)
    batch = PackedBatch.from_lengths([5000, 300, 2000, 892], 4)
    q, k, v, dout = (cupy.asarray(np.ones((batch.total_rows // SIZE, heads, 128), BFLOAT16))
                     for heads in (8, kv_heads, kv_heads, 8))  # fmt: skip
    memory = layer.memory(batch, sharding)
    with Taken() as taken:
        plan = layer.plan(batch, sharding)
        _, saved = layer.forward(q, k, v, plan)
        layer.backward(dout, saved)
    assert taken.most <= 1.03 * memory.wanted() + (1 << 20)
