"""The ring of the CUDA engine against the float64 oracle: simulated ranks share the GPU; see test_gpu_attention.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16, DIMS, assert_same_bits, on_engines, to_host

import thdattn
from thdattn.engines import AttentionOptions, BackwardInputs, BackwardOutputs, ForwardInputs, ForwardOutputs
from thdattn.kernels.configs import TILES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

DTYPES = [np.dtype("float16"), BFLOAT16]


@on_engines(DIMS, cuda=DTYPES, portable=[BFLOAT16], cp_sizes=(2, 4))
def test_every_head_dim_is_the_oracle(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype, cp_comm_type="p2p")


@on_engines(DIMS, cuda=DTYPES, portable=[BFLOAT16], cp_sizes=(4,))
def test_deterministic_is_the_oracle_and_bitwise_the_same_three_times(engine, case, dtype, cp_size):
    assert_same_bits(*(
        engine.check(case, cp_size, dtype, cp_comm_type="p2p", deterministic=True) for _ in range(3)))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_engine_merges_with_what_is_there(cupy, dims, deterministic):
    """Other keys gave each row something known: what these keys give is what the call alone gives, by their shares."""
    from thdattn.engines import cuda

    case = replace(DIMS[0], dims=dims)
    attention = case.attention(thdattn.comm.init("single"), BFLOAT16, engine="cuda")
    plan = attention.plan(case.batch(1))
    rows, heads, kv_heads = plan.local_rows, *case.heads
    draw = np.random.default_rng(5)

    def random(*shape):
        return cupy.asarray(draw.standard_normal(shape).astype(BFLOAT16))

    q, k, v, dout = (random(rows, n, width) for n, width in zip(
        (heads, kv_heads, kv_heads, heads), (*dims[:1] * 2, *dims[1:] * 2), strict=True))
    options = AttentionOptions(0.1, deterministic=deterministic)
    alone, lse, _ = cuda.attn_fwd(ForwardInputs(q, k, v, plan), options)
    others, others_lse = draw.standard_normal(alone.shape), 3 * draw.standard_normal(lse.shape)
    others[::3], others_lse[:, ::3] = 0, -np.inf  # those that have seen nothing yet
    into = cupy.asarray(others.astype(np.float32)), cupy.asarray(others_lse.astype(np.float32))
    cuda.attn_fwd(ForwardInputs(q, k, v, plan), options, ForwardOutputs(into, accumulate=True))
    mine, mine_lse = to_host(alone).astype(np.float64), to_host(lse).astype(np.float64)
    both = np.logaddexp(mine_lse, others_lse)
    with np.errstate(invalid="ignore"):
        parts = [np.nan_to_num(np.exp(x_lse - both)).T[..., None] * x
                 for x_lse, x in ((mine_lse, mine), (others_lse, others))]  # fmt: skip
    np.testing.assert_allclose(to_host(into[1]), both, rtol=1e-5, atol=1e-5)
    rounded = 2**-8 * np.abs(parts[0])  # alone was, to bfloat16
    assert (np.abs(to_host(into[0]) - sum(parts)) <= rounded + 1e-5 * (1 + np.abs(others))).all()
    assert (np.isneginf(both).any(), (~np.isneginf(mine_lse) & np.isneginf(others_lse)).any()) == (True, True)

    inputs = BackwardInputs(dout, q, k, v, alone, lse, plan)
    dq = cuda.attn_bwd(inputs, options, BackwardOutputs(np.dtype(np.float32)))[0].copy()
    start = cupy.asarray(draw.standard_normal(q.shape).astype(np.float32))
    added = start.copy()
    partials = [cupy.empty(x.shape, np.float32) for x in (k, v)]
    cuda.attn_bwd(inputs, options, BackwardOutputs(np.dtype(np.float32), added, partials, accumulate=True))
    dq = to_host(dq).astype(np.float64)
    np.testing.assert_allclose(to_host(added), to_host(start) + dq, rtol=0, atol=2**-8 * np.abs(dq).max() + 1e-6)
    unseen = (to_host(plan.key_ranges)[:, 0] >= to_host(plan.key_ranges)[:, 1])
    assert unseen.any() and to_host(added)[unseen].tobytes() == to_host(start)[unseen].tobytes()


def test_slices_follow_lengths_on_the_gpu(cupy):
    lengths = cupy.asarray([0, 40, 48, 64], np.int32)
    batch, later = thdattn.PackedBatch(lengths, total_rows=64), [0, 8, 48, 56]
    draw = np.random.default_rng(0)
    q, k, v = (cupy.asarray(draw.standard_normal((32, heads, 64)).astype(BFLOAT16)) for heads in (4, 2, 2))

    def program(comm):
        attention = thdattn.CPAttention(comm, 4, 64, 2, engine="cuda", cp_comm_type="p2p")
        plan = attention.plan(batch)
        attention.forward(q, k, v, plan)
        cupy.cuda.get_current_stream().synchronize()
        comm.barrier()
        if comm.rank == 0:
            lengths[...] = cupy.asarray(later, np.int32)
        comm.barrier()
        plan.refresh()
        wanted = attention.plan(thdattn.PackedBatch(later, total_rows=64))
        return [to_host(attention.forward(q, k, v, each)[0]).tobytes() for each in (plan, wanted)]

    for refreshed, wanted in thdattn.comm.run_local(2, program):
        assert refreshed == wanted


def test_rounding_is_that_of_numpy(cupy):
    from thdattn.engines import cuda

    x = np.random.default_rng(0).standard_normal((37, 3, 8)).astype(np.float32)
    for dtype in DTYPES:
        assert to_host(cuda.rounded(cupy.asarray(x), dtype)).tobytes() == x.astype(dtype).tobytes()
