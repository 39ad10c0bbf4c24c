"""The gated RMSNorm of the Mamba-2 mixer on the NumPy engine, against its definition in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mixer_cases import (
    BFLOAT16,
    CASES,
    FIELDS_WITH_NORM,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    NORMS,
    Case,
    assert_equal,
    assert_same_bits,
    random_inputs,
    run,
    truth,
)  # fmt: skip
from mixer_decoding import PROMPTS, SINGLE, TEXTS, assert_rounded_once, decode_all
from wrong_values import refuses, table

import thdattn
from thdattn import oracle
from thdattn.mamba.oracle import Norm, Sizes

PACKS = [CASES[name] for name in (
    "no-sequences-slack", "all-empty-padded", "fewer-rows-than-ranks", "resets-inside-chunks", "ranks-of-padding",
    "empty-between", "padding-ends-a-chunk", "over-all-ranks", "one-group", "a-group-per-head",
)]  # fmt: skip
WIDE = Case("wide", (200, 57, 130), sizes=Sizes(4, 64, 32, 2))
PADDED = replace(CASES["empty-between"], name="padded")


def of(case, norm):
    """Return the case with a norm; "groups" of B and C are those of the norm too."""
    place, groups = norm
    return replace(case, name=f"{case} {place} {groups}", norm=Norm(place == "after_gate", {
        "groups": case.sizes.num_groups, "one": 1, "heads": case.sizes.num_heads}[groups]))  # fmt: skip


@pytest.mark.parametrize("cp_size", [1, 3, pytest.param(8, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("norm", NORMS, ids="-".join)
@pytest.mark.parametrize("case", PACKS, ids=str)
def test_float64_is_the_definition(case, norm, cp_size):
    case = of(case, norm)
    made = run(case, cp_size, FLOAT64)
    assert tuple(made) == FIELDS_WITH_NORM
    assert_equal(made, truth(case, FLOAT64), 1e-12)


def test_eps_counts():
    for eps in (1e-5, 3.0):
        case = replace(WIDE, name=f"eps {eps}", lengths=(20, 7), norm=Norm(True, 2, eps))
        assert_equal(run(case, 2, FLOAT64), truth(case, FLOAT64), 1e-12)


def test_groups_are_those_of_b_and_c_where_none_are_said():
    for groups in (1, 2, 4):
        made = thdattn.Mamba2Mixer(SINGLE, 4, 3, 5, groups, dtype="float32", engine="reference", norm="after_gate")
        said = thdattn.Mamba2Mixer(SINGLE, 4, 3, 5, groups, dtype="float32", engine="reference", norm="after_gate",
                                   norm_groups=groups, norm_eps=1e-5)  # fmt: skip
        assert repr(made) == repr(said) and f"groups={groups}, eps=1e-05" in repr(made)


@pytest.mark.parametrize("norm", NORMS, ids="-".join)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_errs_no_more_than_plain_maths(dtype, norm):
    """Rows by the accuracy rule, which for 16 bits has no room for a second rounding."""
    case = of(WIDE, norm)
    exact, plain = truth(case, dtype), truth(case, dtype, dtype)
    inner = case.sizes.num_heads * case.sizes.head_dim
    made = run(case, 3, dtype)
    for field, part in (("out", slice(None)), ("zxbcdt", slice(inner)), ("zxbcdt", slice(inner, 2 * inner))):
        wanted, baseline = (getattr(x, field)[:, part] for x in (exact, plain))
        verdict = oracle.judge(made[field][:, part], wanted, baseline, fused=baseline if dtype.itemsize == 2 else None)
        assert verdict.good, f"{field}: {verdict}"
    assert made["norm_weight"].dtype == FLOAT32
    ours, theirs = (np.sqrt(np.mean((x - exact.norm_weight) ** 2))
                    for x in (made["norm_weight"].astype(np.float64).sum(axis=0), plain.norm_weight))
    assert ours <= 2 * theirs + 1e-6 * np.abs(exact.norm_weight).max()


@pytest.mark.parametrize("norm", NORMS, ids="-".join)
@pytest.mark.parametrize("fill", [np.nan, np.inf])
def test_poison_in_rows_without_a_token_changes_no_bit(norm, fill, poisoned_host):
    case = of(PADDED, norm)
    for dtype in (FLOAT64, BFLOAT16):
        clean, poisoned = (run(case, 3, dtype, fill=value) for value in (0, fill))
        assert_same_bits(clean, poisoned)
        assert all(np.isfinite(x.astype(np.float64)).all() for x in poisoned.values())


@pytest.mark.parametrize("norm", NORMS[:2], ids="-".join)
def test_a_row_of_zeros_has_finite_gradients(norm):
    """The first tokens of a new layer may have such rows, with D and dt of 0."""
    case = of(WIDE, norm)
    zxbcdt, weights, dout = random_inputs(case, FLOAT32)
    zxbcdt[3], weights.conv_bias[:] = 0, 0
    zxbcdt[:3, 256:-4] = 0  # x, B and C that its convolution sees
    made = run(case, 1, FLOAT32, (zxbcdt, weights, dout))
    assert not made["out"][3].any() and all(np.isfinite(x).all() for x in made.values())


# --- decode ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS, ids="-".join)
@pytest.mark.parametrize("prompts", [PROMPTS, (0,) * 8], ids=["prompts", "no prompts"])
def test_step_after_step_is_the_forward_over_whole_texts(norm, prompts):
    case = of(TEXTS, norm)
    out, exact = decode_all(case, prompts, FLOAT64, "reference", np), truth(case, FLOAT64).out
    assert np.abs(out - exact).max() <= 1e-12 * np.abs(exact).max()


@pytest.mark.parametrize("norm", NORMS, ids="-".join)
def test_of_texts_without_a_prompt_the_result_alone_is_rounded(norm):
    case = of(replace(TEXTS, name="wide texts", sizes=Sizes(4, 64, 32, 2)), norm)
    assert_rounded_once(decode_all(case, (0,) * 8, BFLOAT16, "reference", np), truth(case, BFLOAT16).out)


# --- errors ----------------------------------------------------------------------------------------------------------


def mixer(**changes):
    arguments = {"num_heads": 4, "head_dim": 3, "state_dim": 5, "num_groups": 2, "dtype": "float32",
                 "engine": "reference", "norm": "after_gate"}  # fmt: skip
    return thdattn.Mamba2Mixer(SINGLE, **{**arguments, **changes})


@table(
    ("norm", "rms", ValueError, "norm is 'rms', wanted 'after_gate' or 'before_gate'; pass one of these"),
    ("norm", True, TypeError, "norm is True, a bool; wanted 'after_gate' or 'before_gate'"),
    ("norm_groups", 3, ValueError, "norm_groups is 3, wanted a divisor of num_heads = 4 … pass 1, or num_groups = 2"),
    ("norm_groups", 0, ValueError, "norm_groups is 0, wanted >= 1"),
    ("norm_groups", 1.0, TypeError, "norm_groups is 1.0, a float; wanted an int"),
    ("norm_eps", 0, ValueError, "norm_eps is 0, wanted a finite number > 0; 1e-5 is usual"),
    ("norm_eps", "1e-5", TypeError, "norm_eps is '1e-5', wanted a number"),
)  # fmt: skip
def test_bad_norm(argument, value, kind, message):
    refuses(mixer, argument, value, kind, message)


def test_groups_without_a_norm_are_refused():
    refuses(lambda norm_groups: mixer(norm=None, norm_groups=norm_groups), "norm_groups", 2, ValueError,
            "norm_groups is 2, but norm is None, wanted both or none; pass norm='after_gate'")


CASE = Case("some", (9, 4), norm=Norm(True, 2))
ZXBCDT, WEIGHTS, DOUT = random_inputs(CASE, FLOAT32)


@table(
    ("norm_weight", None, ValueError,
     "weights.norm_weight is None, wanted an array for norm='after_gate'; pass those of this layer"),
    ("norm_weight", np.ones(3, np.float32), ValueError, "weights.norm_weight has shape (3,), wanted (12,)"),
    ("norm_weight", np.ones(12), TypeError, "weights.norm_weight is float64, wanted float32 for a mixer of float32"),
)  # fmt: skip
def test_bad_weights_of_a_norm(argument, value, kind, message):
    layer = mixer()
    plan = layer.plan(CASE.batch)
    refuses(lambda **bad: layer.forward(ZXBCDT, WEIGHTS._replace(**bad), plan), argument, value, kind, message)


def test_a_mixer_without_a_norm_refuses_its_weight():
    layer = mixer(norm=None)
    wanted = "weights.norm_weight is a ndarray … wanted None for a mixer without a norm"
    for call in (lambda weights: layer.forward(ZXBCDT, weights, layer.plan(CASE.batch)),
                 lambda weights: layer.decode(ZXBCDT[:2], weights, layer.cache(2))):  # fmt: skip
        refuses(call, "weights", WEIGHTS, ValueError, wanted)


@pytest.mark.parametrize("changes", [
    {"norm": None}, {"norm": "before_gate"}, {"norm_groups": 1}, {"norm_eps": 1e-6}], ids=str)  # fmt: skip
def test_saved_and_caches_are_those_of_one_norm(changes):
    layer, other = mixer(), mixer(**changes)
    _, saved = layer.forward(ZXBCDT, WEIGHTS, layer.plan(CASE.batch))
    with pytest.raises(ValueError, match=r"saved was made with norm GatedNorm.*, wanted .*; pass what this mixer's"):
        other.backward(DOUT, saved)
    weights = WEIGHTS if other._shape.norm else WEIGHTS._replace(norm_weight=None)
    with pytest.raises(ValueError, match=r"cache was made for norm GatedNorm.*, wanted .*; make it with this mixer's"):
        other.decode(ZXBCDT[:2], weights, layer.cache(2))
    with pytest.raises(ValueError, match="saved was made with norm GatedNorm"):
        other.cache(2).fill(saved)


def test_ranks_agree_on_the_norm():
    def program(comm):
        layer = replace(CASE, norm=Norm(True, 2, 1e-5 if comm.rank else 1e-6)).mixer(comm, FLOAT32)
        with pytest.raises(ValueError, match="the plan is not the same on all ranks: norm is"):
            layer.plan(CASE.batch)

    thdattn.comm.run_local(2, program)


def test_weights_of_a_norm_are_a_sixth_array():
    five = WEIGHTS._replace(norm_weight=None)
    assert len(five) == 5 and five._fields == thdattn.Mamba2Weights._fields and five.norm_weight is None
    assert len(WEIGHTS) == 6 and WEIGHTS._fields == (*five._fields, "norm_weight") == tuple(WEIGHTS._asdict())
    assert WEIGHTS[5] is WEIGHTS.norm_weight is five._replace(norm_weight=WEIGHTS[5])[5]
    assert repr(WEIGHTS).endswith("dt_bias (4,), norm_weight (12,)>")
