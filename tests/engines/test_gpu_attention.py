"""The CUDA engine against the float64 oracle: every pack, mask and head dim, forward and backward, on one GPU.

Simulated ranks share the GPU. Every allocation starts as NaN and every row that holds no token is NaN.
"""

from __future__ import annotations

import numpy as np
import pytest
from cases import (
    BFLOAT16,
    BIG,
    CROSS,
    DIMS,
    LONG,
    SMALL,
    Case,
    assert_same_bits,
    check,
    check_long,
    local_rows,
    on_engines,
    random_inputs,
    run,
)

import thdattn
from thdattn.kernels.configs import TILES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

DTYPES = [np.dtype("float16"), BFLOAT16]


@on_engines(DIMS, cuda=DTYPES, portable=[BFLOAT16])
def test_every_head_dim_is_the_oracle(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype)


@on_engines([case for case in DIMS if case.heads[0] > case.heads[1]], cuda=DTYPES)
def test_query_heads_of_a_group_may_be_split(engine, monkeypatch, case, dtype, cp_size):
    from thdattn.engines.cuda import scheduler

    group = case.heads[0] // case.heads[1]
    for splits in (splits for splits in range(1, group + 1) if group % splits == 0):
        monkeypatch.setattr(scheduler, "splits_per_kv_head", lambda *_, splits=splits: [(splits, np.inf)])
        engine.check(case, cp_size, dtype)


@on_engines([*DIMS, *CROSS], cuda=DTYPES, portable=[BFLOAT16])
def test_deterministic_is_the_oracle_and_bitwise_the_same_three_times(engine, case, dtype, cp_size):
    assert_same_bits(*(engine.check(case, cp_size, dtype, deterministic=True) for _ in range(3)))


@on_engines([
    Case(f"apart-{dim}-{mask}", (1300, 0, 90, 500), slack=70, heads=(4, 2), dims=(dim, dim), causal=causal,
         window=window, cp_sizes=(1, 2))
    for dim in (64, 128) for mask, causal, window in (("causal", True, (-1, -1)), ("window", False, (900, 200)))
], cuda=[BFLOAT16])  # fmt: skip
def test_tiles_of_keys_that_begin_their_queries_apart_are_the_oracle(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype)


@on_engines(BIG, cuda=[BFLOAT16])
def test_big_packs_are_the_oracle(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [(18, 18), (6, 3)], ids=["mha", "gqa"])
def test_heads_done_in_several_groups_are_the_oracle(cupy, heads, deterministic):
    # So many tiles that the last group of heads is a small one, and others come before it.
    case = Case(f"{heads[0]}-heads-of-many-tiles", (34,) * 1000, heads=heads)
    check(case, BFLOAT16, run(case, 1, BFLOAT16, xp=cupy, engine="cuda", deterministic=deterministic))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_blocks_go_from_tile_to_tile(cupy, dims, deterministic):
    # What thread blocks and roles tell each other too early is wrong in one of some thousand calls.
    case = Case("many-tiles", (1100, 0, 64, 130, 600, 1), slack=150, heads=(12, 6), dims=dims, causal=False)
    options = {"deterministic": deterministic}
    check(case, BFLOAT16, run(case, 1, BFLOAT16, xp=cupy, engine="cuda", **options))
    attn, batch = case.attention(thdattn.comm.init("single"), BFLOAT16, **options), case.batch(1)
    q, k, v, dout = (cupy.asarray(local_rows(batch, np.arange(batch.total_rows), x, np.nan))
                     for x in random_inputs(case, BFLOAT16))  # fmt: skip
    _, saved = attn.forward(q, k, v, attn.plan(batch, case.sharding))

    def gradients():
        return [(x.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for x in attn.backward(dout, saved)]

    first, farthest = gradients(), cupy.zeros(3, np.float32)
    for _ in range(1500):
        pairs = zip(gradients(), first, strict=True)
        farthest = cupy.maximum(farthest, cupy.stack([abs(x - y).max() for x, y in pairs]))
    within = [0 if deterministic else 0.02 * float(abs(x).max()) for x in first]
    assert (farthest.get() <= within).all(), (farthest, within)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("cp_size", [1, 8])
def test_one_document_of_65536_among_a_thousand_of_16(cupy, cp_size, deterministic):
    outcome = run(LONG, cp_size, BFLOAT16, xp=cupy, engine="cuda", deterministic=deterministic)
    check_long(LONG, BFLOAT16, outcome)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_that_are_not_aligned_to_16_bytes_are_accepted(cupy, dtype):
    """A view one element into a buffer is contiguous, but no kernel can read it 16 bytes at a time."""
    case = next(case for case in SMALL if case.name == "causal")

    def shifted(x):
        view = cupy.zeros(x.size + 1, x.dtype)[1:].reshape(x.shape)
        view[...] = x
        assert view.data.ptr % 16 and view.flags.c_contiguous
        return view

    check(case, dtype, run(case, 2, dtype, xp=cupy, engine="cuda", wrap=shifted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_tensors_go_in_and_results_become_torch_tensors(cupy, dtype):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    case = next(case for case in SMALL if case.name == "causal")
    check(case, dtype, run(case, 2, dtype, xp=cupy, engine="cuda", wrap=torch.from_dlpack))
    x = torch.zeros(4, 2, 64, dtype=getattr(torch, str(dtype)), device="cuda")
    attention = thdattn.CPAttention(thdattn.comm.init("single"), 2, 64, dtype=dtype, engine="cuda")
    out, _ = attention.forward(x, x, x, attention.plan(thdattn.PackedBatch([0, 4])))
    assert torch.from_dlpack(out).dtype == x.dtype


def test_host_arrays_are_refused(cupy):
    attention = thdattn.CPAttention(thdattn.comm.init("single"), 2, 64, engine="cuda")
    plan = attention.plan(thdattn.PackedBatch([0, 4]))
    x = np.zeros((4, 2, 64), BFLOAT16)
    with pytest.raises(TypeError, match=r"q is a ndarray on the host, wanted an array on the GPU"):
        attention.forward(x, cupy.asarray(x), cupy.asarray(x), plan)


def test_head_dim_without_a_kernel_is_refused(cupy):
    with pytest.raises(ValueError, match=r"head_dim/v_head_dim is 72/72, wanted one of 64, 96"):
        thdattn.CPAttention(thdattn.comm.init("single"), 2, 72, engine="cuda")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype_without_a_kernel_is_refused(cupy, dtype):
    with pytest.raises(TypeError, match=rf"dtype is {dtype}, wanted one of float16, bfloat16"):
        thdattn.CPAttention(thdattn.comm.init("single"), 2, 64, dtype=dtype, engine="cuda")


def test_auto_takes_the_gpu(cupy):
    assert thdattn.CPAttention(thdattn.comm.init("single"), 2, 64).engine == "cuda"
