"""The CUDA engine's RMSNorm of the Mamba-2 mixer, forward, backward, decode and captured, on one GPU.

Every allocation starts as NaN and every row that holds no token is NaN. Kernels are held to the errors of plain maths
in the same dtype against the definition in float64; simulated ranks share the GPU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import to_host
from mixer_cases import (
    BFLOAT16,
    FIELDS_WITH_NORM,
    FLOAT16,
    GPU_SIZES,
    ON_GPUS,
    Case,
    assert_same_bits,
    random_inputs,
    run,
    truth,
)  # fmt: skip
from mixer_decoding import PROMPTS, SINGLE, TEXTS, assert_rounded_once, decode_all, filled_cache
from ranks import graph_ranks
from test_gpu_mamba_backward import columns_of

import thdattn
from thdattn import oracle
from thdattn.mamba.oracle import Norm, Sizes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

DTYPES = [BFLOAT16, FLOAT16]
MIXED = (130, 1, 2, 0, 70, 3, 20)
WIDTHS = [Norm(True, 8), Norm(False, 4), Norm(True, 1), Norm(False, 1)]
PACKS = [*ON_GPUS, Case("segment-edges", (2047, 130, 1900), sizes=GPU_SIZES),
         Case("capacity", (300, 21), slack=1500, sizes=GPU_SIZES)]  # fmt: skip
# Groups of 64 columns to 8192, some with a number of threads that is no power of 2.
KINDS = [
    (Sizes(8, 64, 64, 8), Norm(True, 8)), (Sizes(16, 64, 128, 2), Norm(True, 2)),
    (Sizes(8, 128, 64, 4), Norm(False, 4)), (Sizes(24, 64, 128, 8), Norm(True, 8)),
    (Sizes(8, 128, 256, 8), Norm(False, 2)), (Sizes(40, 64, 64, 1), Norm(True)),
    (Sizes(64, 64, 128, 1), Norm(False)), (Sizes(80, 64, 64, 1), Norm(True)), (Sizes(128, 64, 64, 8), Norm(True, 1)),
    (Sizes(8, 64, 128, 1), Norm(True, 1, 0.5)),
]  # fmt: skip
USUAL = replace(TEXTS, name="usual texts", sizes=Sizes(8, 64, 128, 2))


def of(case, norm):
    return replace(case, name=f"{case} {norm.after_gate} {norm.groups}", norm=norm)


def check(case, dtype, made):
    """Check rows by the accuracy rule, columns by their names; gradients of weights by the sum of their squares."""
    exact, plain = truth(case, dtype), truth(case, dtype, dtype)
    assert tuple(made) == FIELDS_WITH_NORM and made["out"].dtype == made["zxbcdt"].dtype == dtype
    verdict = oracle.judge(made["out"], exact.out, plain.out, fused=plain.out)
    assert verdict.good, f"out of {case}: {verdict}"
    for name, part in columns_of(case.sizes).items():
        verdict = oracle.judge(made["zxbcdt"][:, part], exact.zxbcdt[:, part], plain.zxbcdt[:, part])
        assert verdict.rms <= verdict.rms_budget, f"d{name} of {case}: {verdict}"
    for field in FIELDS_WITH_NORM[2:]:
        assert made[field].dtype == np.float32
        wanted, found = getattr(exact, field), made[field].astype(np.float64).sum(axis=0)
        ours, allowed = (np.sqrt(np.mean((x - wanted) ** 2)) for x in (found, getattr(plain, field)))
        size = np.sqrt(np.mean(wanted**2))
        assert ours <= 3 * allowed + 1e-3 * size, f"{field} of {case}: {ours:.1e}, plain {allowed:.1e}, of {size:.1e}"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("norm", WIDTHS[:2], ids=str)
@pytest.mark.parametrize("cp_size", [1, 3])
@pytest.mark.parametrize("case", PACKS, ids=str)
def test_every_pack_is_as_exact_as_plain_maths(cupy, case, cp_size, norm):
    check(of(case, norm), BFLOAT16, run(of(case, norm), cp_size, BFLOAT16, xp=cupy))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "norm"), KINDS, ids=str)
def test_every_size_is_as_exact_as_plain_maths(cupy, sizes, norm, dtype):
    case = Case(f"{sizes} {norm}", MIXED, sizes=sizes, norm=norm)
    check(case, dtype, run(case, 2, dtype, xp=cupy))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("norm", WIDTHS, ids=str)
@pytest.mark.parametrize("name", ["empty-between", "padding-ends-a-chunk", "ranks-of-padding"])
def test_what_padding_holds_changes_no_bit(cupy, name, norm):
    case = of(next(case for case in ON_GPUS if case.name == name), norm)
    for cp_size in (1, 3):
        first, *others = (run(case, cp_size, BFLOAT16, fill=fill, xp=cupy) for fill in (0, np.nan, np.inf, -1e30))
        for other in others:
            assert_same_bits(first, other)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("norm", WIDTHS, ids=str)
def test_two_runs_are_bitwise_the_same(cupy, norm):
    case = of(PACKS[-2], norm)
    first, *others = (run(case, 2, BFLOAT16, xp=cupy) for _ in range(3))
    for other in others:
        assert_same_bits(first, other)


def test_a_document_changes_no_bit_of_another(cupy):
    case = of(Case("resets", (10, 50, 7, 30, 90, 2), sizes=GPU_SIZES), Norm(True, 4))
    zxbcdt, weights, dout = random_inputs(case, BFLOAT16)
    calm = run(case, 1, BFLOAT16, xp=cupy)
    changed, of_out = zxbcdt.copy(), dout.copy()
    changed[10:60], of_out[10:60] = 3 * changed[10:60][::-1], 100 * dout[10:60]
    wild = run(case, 1, BFLOAT16, (changed, weights, of_out), xp=cupy)
    for field in ("out", "zxbcdt"):
        others = np.r_[0:10, 60 : len(zxbcdt)]
        assert calm[field][others].tobytes() == wild[field][others].tobytes()
        assert calm[field][10:60].tobytes() != wild[field][10:60].tobytes()


def test_the_gradient_of_the_weight_is_a_long_sum_of_equal_shares(cupy):
    """A pack repeats the same documents of 64 rows 2,048 times: its gradient is as exact as theirs."""
    one, times = of(Case("one", (40, 24), sizes=GPU_SIZES), Norm(True, 2)), 2048
    zxbcdt, weights, dout = random_inputs(one, BFLOAT16)
    many = replace(one, name="many", lengths=one.lengths * times)
    made = run(many, 1, BFLOAT16, (np.tile(zxbcdt, (times, 1)), weights, np.tile(dout, (times, 1))), xp=cupy)
    wanted = run(one, 1, BFLOAT16, xp=cupy)["norm_weight"][0].astype(np.float64)
    found = made["norm_weight"][0].astype(np.float64) / times
    assert np.abs(found - wanted).max() <= 4e-6 * np.abs(wanted).max()


# --- decode ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "norm"), KINDS[:6], ids=str)
def test_step_after_step_is_the_forward_over_whole_texts(cupy, sizes, norm, dtype):
    case = replace(TEXTS, name=f"{sizes} {norm}", sizes=sizes, norm=norm)
    out, plain = decode_all(case, PROMPTS, dtype, "cuda", cupy), truth(case, dtype, dtype).out
    verdict = oracle.judge(out, truth(case, dtype).out, plain, fused=plain)
    assert verdict.good, str(verdict)


@pytest.mark.parametrize("norm", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_texts_without_a_prompt_the_result_alone_is_rounded(cupy, dtype, norm):
    case = of(USUAL, norm)
    assert_rounded_once(decode_all(case, (0,) * 8, dtype, "cuda", cupy), truth(case, dtype).out)


def test_replays_of_one_captured_step_give_the_bits_of_eager_ones(cupy):
    case = of(USUAL, Norm(True, 2))
    zxbcdt, weights, _ = random_inputs(case, BFLOAT16)
    texts, weights = case.batch.unpack(zxbcdt), thdattn.Mamba2Weights(*map(cupy.asarray, weights))
    mixer = case.mixer(SINGLE, BFLOAT16, engine="cuda")
    rng = np.random.default_rng(5)
    steps = [rng.standard_normal((8, zxbcdt.shape[1]), np.float32).astype(BFLOAT16) for _ in range(10)]
    active = [rng.random(8) < 0.8 for _ in steps]
    cache, _ = filled_cache(mixer, case, PROMPTS, texts, weights, cupy)
    again, _ = filled_cache(mixer, case, PROMPTS, texts, weights, cupy)
    eager = []
    for step, which in zip(steps, active, strict=True):
        cache.active[...] = cupy.asarray(which)
        eager.append(to_host(mixer.decode(cupy.asarray(step), weights, cache)))
        assert not eager[-1][~which].view(np.uint8).any(), "exactly 0"
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        given = cupy.asarray(steps[0])
        cupy.cuda.runtime.deviceSynchronize()
        stream.begin_capture()
        out = mixer.decode(given, weights, again)
        graph = stream.end_capture()
        for step, which, expected in zip(steps, active, eager, strict=True):
            given.set(step)
            again.active[...] = cupy.asarray(which)
            graph.launch(stream)
            stream.synchronize()
            assert to_host(out).tobytes() == expected.tobytes()


# --- graphs, sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["after_gate", "before_gate"])
def test_packs_through_one_graph_are_the_eager_results(cupy, norm):
    with thdattn.comm.init("single") as comm, cupy.cuda.Stream(non_blocking=True):
        graph_ranks.replay_mixers(comm, cupy, norm=norm)


def test_groups_that_are_wider_than_a_thread_block_are_refused(cupy):
    with pytest.raises(ValueError, match=r"d_inner // norm_groups is 8704, wanted 1 to 8192 for a Mamba-2 mixer on"):
        thdattn.Mamba2Mixer(SINGLE, 136, 64, 64, engine="cuda", norm="after_gate")
    thdattn.Mamba2Mixer(SINGLE, 136, 64, 64, engine="cuda", norm="after_gate", norm_groups=2)
