"""The CUDA engine's Mamba-2 mixer, forward, against the NumPy engine in float64, on one GPU.

Simulated ranks share the GPU. Every allocation starts as NaN and every row that holds no token is NaN. Both the kernels
of this GPU and the portable ones are held to the errors of the NumPy engine in the same dtype, which rounds what the
kernels round, and which tests without a GPU hold to the definition.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from cases import to_host
from mixer_cases import (
    BFLOAT16,
    FLOAT16,
    FLOAT64,
    GPU_SIZES,
    ON_GPUS,
    Case,
    adding_up,
    extreme_inputs,
    random_inputs,
)

import thdattn
from thdattn import oracle
from thdattn.mamba.oracle import Sizes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

DTYPES = [FLOAT16, BFLOAT16]
PACKS = [
    *ON_GPUS,
    Case("chunk-edges", (63, 64, 65, 1, 127, 128, 129), sizes=GPU_SIZES),
    Case("segment-edges", (2047, 2048, 2049, 1), sizes=GPU_SIZES),
    Case("starts-with-a-segment", (2048, 2048, 30), padded=(2048, 2054, 41), sizes=GPU_SIZES),
    Case("over-all-ranks", (4500,), sizes=GPU_SIZES),
    Case("capacity", (700, 21), slack=1500, sizes=GPU_SIZES),
    Case("many-short", tuple(np.random.default_rng(0).integers(1, 21, 250).tolist()), sizes=GPU_SIZES),
]
CROSSING = [case for case in PACKS if case.name in (
    "one-token", "shorter-than-the-convolution", "ranks-of-padding", "segment-edges", "over-all-ranks",
    "ends-with-a-rank", "many-short")]  # fmt: skip
MIXED = (300, 1, 2, 0, 900, 3, 170)
KINDS = [
    *(Case(f"{sizes.num_groups}-groups-of-{sizes.head_dim}-{sizes.state_dim}", MIXED, sizes=sizes) for sizes in (
        Sizes(8, 64, 64, 1), Sizes(8, 64, 64, 8), Sizes(16, 64, 128, 2), Sizes(8, 64, 128, 8), Sizes(24, 64, 128, 8),
        Sizes(8, 64, 256, 1), Sizes(8, 128, 64, 4), Sizes(8, 128, 128, 1), Sizes(8, 128, 128, 8), Sizes(8, 128, 256, 8),
    )),
    *(Case(f"convolution-of-{width}", MIXED, sizes=GPU_SIZES, conv_width=width) for width in (1, 2, 3, 8)),
]  # fmt: skip
BY_NAME = {case.name: case for case in (*PACKS, *KINDS)}


@pytest.fixture
def small_gpu(kernels, monkeypatch):
    """Let thread blocks of a scan walk over all segments, as on a GPU of one multiprocessor."""
    from thdattn.engines.cuda import launch

    gpu = replace(launch.this_gpu(), multiprocessors=1)
    monkeypatch.setattr(launch, "this_gpu", lambda: gpu)


@cache
def on_the_host(case, dtype, computed_in):
    """Return out of the NumPy engine for inputs that are made in dtype."""
    zxbcdt, weights, _ = random_inputs(case, dtype)
    kind = np.promote_types(computed_in, np.float32)
    mixer = case.mixer(thdattn.comm.init("single"), computed_in, engine="reference")
    weights = thdattn.Mamba2Weights(*(x.astype(kind) for x in weights))
    return mixer.forward(zxbcdt.astype(computed_in), weights, mixer.plan(case.batch))[0]


def forward(cupy, case, cp_size, dtype, inputs=None, fill=np.nan):
    """Return out of the CUDA engine, the whole pack; exactly 0 on padding."""
    zxbcdt, weights, _ = inputs or random_inputs(case, dtype)

    def program(comm):
        mixer = case.mixer(comm, dtype, engine="cuda")
        plan = mixer.plan(case.batch)
        rows = np.where(case.valid[:, None], zxbcdt, dtype.type(fill))
        return to_host(mixer.forward(plan.shard(cupy.asarray(rows)), on_the_gpu(cupy, weights), plan)[0])

    sharding = thdattn.Sharding(case.batch, cp_size, "contiguous")
    out = sharding.unshard(thdattn.comm.run_local(cp_size, program, timeout=240))
    assert not out[~case.valid].view(np.uint8).any(), "exactly 0"
    return out


def on_the_gpu(cupy, weights):
    return thdattn.Mamba2Weights(*map(cupy.asarray, weights))


def check(case, dtype, out):
    """Check by the accuracy rule; for bfloat16, which the NumPy engine rounds as kernels do, also against a second
    rounding.
    """
    assert out.dtype == dtype
    exact, plain = (on_the_host(case, dtype, kind).astype(np.float64) for kind in (FLOAT64, dtype))
    verdict = oracle.judge(out, exact, plain, fused=plain if dtype == BFLOAT16 else None)
    assert verdict.good, f"{case}: {verdict}"


def every(cases, cp_sizes=(1,), dtypes=DTYPES):
    return [pytest.param(case, dtype, cp_size, id=f"{case}-{dtype}-cp{cp_size}")
            for case in cases for dtype in dtypes for cp_size in cp_sizes]  # fmt: skip


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("case", "dtype", "cp_size"), every(PACKS, (1, 3), [BFLOAT16]))
def test_every_pack_is_as_exact_as_the_reference(cupy, case, dtype, cp_size):
    check(case, dtype, forward(cupy, case, cp_size, dtype))


@pytest.mark.usefixtures("small_gpu")
@pytest.mark.parametrize(("case", "dtype", "cp_size"), every(
    [BY_NAME["segment-edges"], BY_NAME["over-all-ranks"], BY_NAME["many-short"]], (1, 2), [BFLOAT16]))  # fmt: skip
def test_segments_that_one_thread_block_walks_over_are_as_exact_as_the_reference(cupy, case, dtype, cp_size):
    check(case, dtype, forward(cupy, case, cp_size, dtype))


@pytest.mark.parametrize(("case", "dtype", "cp_size"), every(KINDS))
def test_every_size_is_as_exact_as_the_reference(cupy, case, dtype, cp_size):
    check(case, dtype, forward(cupy, case, cp_size, dtype))


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize(("case", "dtype", "cp_size"), [*every(KINDS[:10], dtypes=[BFLOAT16]), *every(KINDS[2:3])[:1]])
def test_every_size_of_portable_kernels_is_as_exact_as_the_reference(cupy, case, dtype, cp_size):
    check(case, dtype, forward(cupy, case, cp_size, dtype))


@pytest.mark.parametrize(("case", "dtype", "cp_size"), every(CROSSING, (2, 4, 8), [BFLOAT16]))
def test_every_number_of_ranks_is_as_exact_as_the_reference(cupy, case, dtype, cp_size):
    check(case, dtype, forward(cupy, case, cp_size, dtype))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["empty-between", "padding-ends-a-chunk", "starts-with-a-segment"])
def test_what_padding_holds_changes_no_bit(cupy, name):
    case = BY_NAME[name]
    outs = [forward(cupy, case, cp_size, BFLOAT16, fill=fill)
            for cp_size in (1, 3) for fill in (0, np.nan, np.inf, -1e30)]  # fmt: skip
    for cp in (outs[:4], outs[4:]):
        assert len({out.tobytes() for out in cp}) == 1


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("cp_size", [1, 3])
@pytest.mark.parametrize("name", ["resets-inside-chunks", "segment-edges", "shorter-than-the-convolution"])
def test_a_document_changes_no_bit_of_another(cupy, name, cp_size):
    case = BY_NAME[name]
    zxbcdt, weights, dout = random_inputs(case, BFLOAT16)
    calm = forward(cupy, case, cp_size, BFLOAT16)
    for document in range(1, len(case.lengths), 2):
        begin, end = (int(x) for x in case.batch.cu_seqlens_padded[document : document + 2])
        changed = zxbcdt.copy()
        changed[begin:end] = 3 * changed[begin:end][::-1]
        changed[begin:end, -case.sizes.num_heads :] = 50  # steps so large that sums of their decays are rough
        wild = forward(cupy, case, cp_size, BFLOAT16, (changed, weights, dout))
        others = np.r_[0:begin, end : len(zxbcdt)]
        assert calm[others].tobytes() == wild[others].tobytes()
        assert calm[begin:end].tobytes() != wild[begin:end].tobytes()


@pytest.mark.usefixtures("kernels")
def test_two_runs_are_bitwise_the_same(cupy):
    case = BY_NAME["segment-edges"]
    for cp_size in (1, 4):
        assert len({forward(cupy, case, cp_size, BFLOAT16).tobytes() for _ in range(3)}) == 1


@pytest.mark.usefixtures("kernels")
def test_extreme_steps_and_rates(cupy):
    case, inputs = extreme_inputs()
    zxbcdt, weights, _ = inputs
    out = forward(cupy, case, 3, BFLOAT16, inputs)

    def host(kind):
        mixer = case.mixer(thdattn.comm.init("single"), kind, engine="reference")
        wide = thdattn.Mamba2Weights(*(x.astype(np.promote_types(kind, np.float32)) for x in weights))
        return mixer.forward(zxbcdt.astype(kind), wide, mixer.plan(case.batch))[0].astype(np.float64)

    verdict = oracle.judge(out, host(FLOAT64), host(BFLOAT16))
    assert verdict.good, verdict


@pytest.mark.usefixtures("kernels")
def test_states_beyond_float16_are_read_without_loss(cupy):
    """States grow far beyond 65,504 in 2,000 steps of 50 that hardly decay; small rows of C keep y in range."""
    case = Case("large-states", (2000,), sizes=GPU_SIZES)
    zxbcdt, weights, dout = random_inputs(case, FLOAT16)
    inner, state = 512, 128
    zxbcdt[:, inner : 2 * inner + state] = abs(zxbcdt[:, inner : 2 * inner + state]) + 1  # x and B
    zxbcdt[:, 2 * inner + state : 2 * inner + 2 * state] = -10.5  # C: its silu is -3e-4
    zxbcdt[:, -8:] = 50
    weights = adding_up(weights)
    out = forward(cupy, case, 1, FLOAT16, (zxbcdt, weights, dout))
    mixer = case.mixer(thdattn.comm.init("single"), FLOAT64, engine="reference")
    wide = thdattn.Mamba2Weights(*(x.astype(FLOAT64) for x in weights))
    exact, saved = mixer.forward(zxbcdt.astype(FLOAT64), wide, mixer.plan(case.batch))
    assert abs(saved.kept.states).max() > 1e5 and abs(exact).max() < 60_000
    error = np.sqrt(np.mean((out.astype(np.float64) - exact) ** 2) / np.mean(exact**2))
    assert error < 2e-3


def last_rows_without_decay(zxbcdt, weights, rounding):
    """Return out of the last 64 rows of one document where nothing decays: the state is a plain sum over all rows."""
    def stored(x):
        return x.astype(rounding).astype(FLOAT64)

    heads, head_dim, state_dim, _ = GPU_SIZES
    inner = heads * head_dim
    z, xbc, raw = np.split(zxbcdt.astype(FLOAT64), [inner, 2 * inner + 2 * state_dim], axis=1)
    taps = weights.conv_weight.astype(FLOAT64).T
    before = np.concatenate([np.zeros((3, xbc.shape[1])), xbc])
    total = weights.conv_bias + sum(taps[i] * before[i : i + len(xbc)] for i in range(4))
    x, b, c = np.split(stored(total / (1 + np.exp(-total))), [inner, inner + state_dim], axis=1)
    dt = np.logaddexp(0, raw + weights.dt_bias)
    products = np.tril(c[-64:] @ b.T, len(x) - 64)
    x = x.reshape(-1, heads, head_dim)
    made = [stored(products * dt[:, h]) @ x[:, h] + weights.D[h] * x[-64:, h] for h in range(heads)]
    return stored(np.concatenate(made, axis=1) * z[-64:] / (1 + np.exp(-z[-64:])))


def test_sums_over_131072_rows_without_decay_do_not_lose(cupy):
    case = Case("no-decay", (131_072,), sizes=GPU_SIZES)
    zxbcdt, weights, _ = random_inputs(case, BFLOAT16)
    weights = weights._replace(A_log=np.full(8, -30, np.float32))
    out = forward(cupy, case, 1, BFLOAT16, (zxbcdt, weights, None))[-64:]
    exact, plain = (last_rows_without_decay(zxbcdt, weights, kind) for kind in (FLOAT64, BFLOAT16))
    verdict = oracle.judge(out, exact, plain)
    assert verdict.good, verdict


# --- what the kernels are not there for ------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "kind", "message"), [
    ({"head_dim": 96}, ValueError, "head_dim is 96, wanted one of 64, 128 for a Mamba-2 mixer on engine 'cuda'"),
    ({"state_dim": 32}, ValueError, "state_dim is 32, wanted one of 64, 128, 256"),
    ({"conv_width": 9}, ValueError, "conv_width is 9, wanted 1 to 8"),
    ({"num_heads": 12}, ValueError, "num_heads is 12, wanted a multiple of 8"),
    ({"dtype": "float32"}, TypeError, "dtype is float32, wanted one of float16, bfloat16 for engine 'cuda'"),
])  # fmt: skip
def test_sizes_without_kernels_are_refused(cupy, changes, kind, message):
    sizes = {"num_heads": 8, "head_dim": 64, "state_dim": 128}
    with pytest.raises(kind, match=message):
        thdattn.Mamba2Mixer(thdattn.comm.init("single"), **{**sizes, **changes}, engine="cuda")


def test_auto_is_the_gpu(cupy):
    assert thdattn.Mamba2Mixer(thdattn.comm.init("single"), 8, 64, 128).engine == "cuda"
