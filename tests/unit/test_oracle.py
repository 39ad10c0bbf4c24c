"""The oracle against cases worked by hand, finite differences and invariances; never against an engine."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from thdattn import oracle

MASKS = [
    pytest.param(True, (-1, -1), id="causal"),
    pytest.param(False, (-1, -1), id="full"),
    pytest.param(True, (2, 0), id="causal-left"),
    pytest.param(False, (1, 2), id="two-sided"),
    pytest.param(False, (-1, 1), id="right-only"),
    pytest.param(False, (3, -1), id="left-only"),
]


def random_document(length, num_heads=4, num_kv_heads=2, head_dim=3, v_head_dim=2, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((length, num_heads, head_dim)),
        rng.standard_normal((length, num_kv_heads, head_dim)),
        rng.standard_normal((length, num_kv_heads, v_head_dim)),
        rng.standard_normal((length, num_heads, v_head_dim)),
    )


def batch_of(lengths, padded_lengths, slack=0):
    cu_seqlens_padded = np.concatenate([[0], np.cumsum(padded_lengths)]).astype(np.int32)
    return SimpleNamespace(
        lengths=np.array(lengths, np.int32),
        cu_seqlens_padded=cu_seqlens_padded,
        total_rows=int(cu_seqlens_padded[-1]) + slack,
        parents=None,
    )


def test_one_token_returns_its_value_and_its_logit():
    q, k, v, dout = random_document(1, num_heads=2, num_kv_heads=2)
    result = oracle.attention(q, k, v, dout, softmax_scale=0.5)
    logit = 0.5 * (q * k).sum(axis=-1)[0]
    np.testing.assert_array_equal(result.out, v)
    np.testing.assert_allclose(result.lse[:, 0], logit, rtol=1e-15)
    np.testing.assert_allclose(result.max_logit, logit, rtol=1e-15)
    np.testing.assert_array_equal(result.dv, dout)
    np.testing.assert_array_equal(result.dq, 0)
    np.testing.assert_array_equal(result.dk, 0)


def test_two_causal_tokens_worked_by_hand():
    # Scores of the second row: log 1 = 0 and log 3, so its weights are 1/4 and 3/4.
    q, k, v = (np.array(x, float).reshape(2, 1, 1) for x in ([1, 1], [0, np.log(3)], [8, 4]))
    dout = np.array([0.0, 1.0]).reshape(2, 1, 1)
    result = oracle.attention(q, k, v, dout, softmax_scale=1.0)
    np.testing.assert_allclose(result.out.ravel(), [8, 5])
    np.testing.assert_allclose(result.lse.ravel(), [0, np.log(4)], atol=1e-15)
    np.testing.assert_allclose(result.max_logit, np.log(3))
    np.testing.assert_allclose(result.dv.ravel(), [0.25, 0.75])
    # dS = P * (v - out) = (1/4 * 3, 3/4 * -1); dq = dS k, dk = dS q.
    np.testing.assert_allclose(result.dk.ravel(), [0.75, -0.75])
    np.testing.assert_allclose(result.dq.ravel(), [0, -0.75 * np.log(3)], atol=1e-15)


@pytest.mark.parametrize(
    ("causal", "window", "seen"),
    [
        (True, (-1, -1), [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]),
        (False, (-1, -1), [[0, 1, 2, 3]] * 4),
        (True, (1, 0), [[0], [0, 1], [1, 2], [2, 3]]),
        (True, (1, 5), [[0], [0, 1], [1, 2], [2, 3]]),  # causal wins over the right side of the window
        (False, (0, 1), [[0, 1], [1, 2], [2, 3], [3]]),
        (False, (1, 1), [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]]),
        (False, (0, 0), [[0], [1], [2], [3]]),
        (False, (2, -1), [[0, 1, 2, 3]] * 3 + [[1, 2, 3]]),
        (False, (-1, 0), [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]),
    ],
)
def test_equal_keys_give_the_mean_of_the_visible_values(causal, window, seen):
    q, k, v, _ = random_document(4)
    k[:] = k[:1, :1]
    result = oracle.attention(q, k, v, causal=causal, window=window)
    wanted = np.stack([np.repeat(v[rows].mean(axis=0), 2, axis=0) for rows in seen])
    np.testing.assert_allclose(result.out, wanted, rtol=1e-14)
    logit = 3**-0.5 * (q * k[0, 0]).sum(axis=-1).T
    np.testing.assert_allclose(result.lse, logit + np.log([len(rows) for rows in seen]), rtol=1e-13)
    np.testing.assert_allclose(result.max_logit, logit.max(axis=1), rtol=1e-14)


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "causal", "window", "seen"),
    [
        # The two examples of flash_attn_varlen_func, and a window around the shifted diagonal.
        (2, 5, True, (-1, -1), [[0, 1, 2, 3], [0, 1, 2, 3, 4]]),
        (5, 2, True, (-1, -1), [[], [], [], [0], [0, 1]]),
        (5, 2, False, (-1, -1), [[0, 1]] * 5),
        (2, 5, False, (1, 0), [[2, 3], [3, 4]]),
        (5, 2, False, (1, 1), [[], [], [0], [0, 1], [0, 1]]),
        (3, 6, False, (0, 1), [[3, 4], [4, 5], [5]]),
        (3, 0, False, (-1, -1), [[], [], []]),
    ],
)
def test_last_query_stands_at_the_last_key(num_queries, num_keys, causal, window, seen):
    q, _, _, dout = random_document(num_queries)
    _, k, v, _ = random_document(num_keys)
    k[:] = k[:1, :1]
    result = oracle.attention(q, k, v, dout, causal=causal, window=window)
    wanted = np.stack([np.repeat(v[rows].sum(axis=0) / max(1, len(rows)), 2, axis=0) for rows in seen])
    np.testing.assert_allclose(result.out, wanted, rtol=1e-14)
    for row, keys in enumerate(seen):
        assert (result.lse[:, row] == -np.inf).all() == (not keys) == (not result.out[row].any())
    unseen = sorted(set(range(num_keys)).difference(*seen))
    assert not result.dk[unseen].any() and not result.dv[unseen].any()
    assert result.max_logit.max(initial=-np.inf) == -np.inf or any(seen)


def test_query_head_h_reads_kv_head_h_over_group():
    q, k, v, _ = random_document(1, num_heads=6, num_kv_heads=2)
    out = oracle.attention(q, k, v).out
    np.testing.assert_array_equal(out, v[:, [0, 0, 0, 1, 1, 1]])


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize(("lengths", "heads", "options"), [
    *(((6, 6), heads, {}) for heads in ((2, 2), (4, 2), (3, 1))), ((6, 4), (4, 2), {}), ((3, 7), (4, 2), {}),
    *(((6, 6), (4, 2), {"softcap": softcap, "sinks": np.array([-1.5, 0, 0.3, 2])}) for softcap in (0.0, 0.7, 30.0)),
], ids=str)
def test_gradients_are_central_differences_of_the_forward(causal, window, lengths, heads, options):
    q, _, _, dout = random_document(lengths[0], *heads)
    _, k, v, _ = random_document(lengths[1], *heads, seed=1)
    how = {"causal": causal, "window": window, "softmax_scale": 0.7, **options}
    result = oracle.attention(q, k, v, dout, **how)
    inputs, gradients, step = [q, k, v], [result.dq, result.dk, result.dv], 1e-5
    if options:
        inputs, gradients = [*inputs, how["sinks"]], [*gradients, result.dsinks]
    for x, gradient in zip(inputs, gradients, strict=True):
        numeric = np.zeros_like(x)
        for index in np.ndindex(x.shape):
            kept, sides = x[index], []
            for x[index] in (kept + step, kept - step):
                sides.append((oracle.attention(q, k, v, **how).out * dout).sum())
            x[index] = kept
            numeric[index] = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(gradient, numeric, atol=2e-9)


def test_a_row_block_more_changes_nothing(monkeypatch):
    q, k, v, dout = random_document(70)
    sinks = np.linspace(-1, 1, q.shape[1])
    for causal, window in [(True, (-1, -1)), (False, (5, 9)), (False, (-1, 3)), (False, (-1, -1))]:
        monkeypatch.setattr(oracle, "MAX_BLOCK_ROWS", 256)
        whole = oracle.attention(q, k, v, dout, causal=causal, window=window, sinks=sinks)
        monkeypatch.setattr(oracle, "MAX_BLOCK_ROWS", 8)
        blocked = oracle.attention(q, k, v, dout, causal=causal, window=window, sinks=sinks)
        for field in vars(whole):
            np.testing.assert_allclose(getattr(blocked, field), getattr(whole, field), rtol=1e-12, atol=1e-13)


def test_padding_is_exactly_zero_and_never_read():
    batch = batch_of([3, 0, 5, 0], [4, 2, 8, 0], slack=3)
    padding = np.ones(batch.total_rows, bool)
    padding[[0, 1, 2, 6, 7, 8, 9, 10]] = False
    inputs = random_document(batch.total_rows)
    for x in inputs:
        x[padding] = np.nan
    result = oracle.packed_attention(batch, *inputs)
    for x in (result.out, result.dq, result.dk, result.dv):
        assert np.isfinite(x).all()
        assert (x[padding] == 0).all()
        assert (x[~padding] != 0).any()
    assert (result.lse[:, padding] == -np.inf).all()
    second = oracle.attention(*(x[6:11] for x in inputs))
    np.testing.assert_array_equal(result.out[6:11], second.out)
    np.testing.assert_array_equal(result.dk[6:11], second.dk)
    np.testing.assert_array_equal(result.lse[:, 6:11], second.lse)
    np.testing.assert_array_equal(
        result.max_logit, np.maximum(second.max_logit, oracle.attention(*(x[:3] for x in inputs)).max_logit)
    )


def test_packed_documents_may_have_keys_of_other_lengths():
    batch, key_batch = batch_of([3, 0, 5, 2], [4, 2, 8, 2], slack=3), batch_of([2, 4, 7, 0], [2, 4, 9, 3], slack=1)
    (q, _, _, dout), (_, k, v, _) = (random_document(x.total_rows) for x in (batch, key_batch))
    for x, tokens in ((q, [0, 1, 2, *range(6, 11), 14, 15]), (dout, [0, 1, 2, *range(6, 11), 14, 15]),
                      (k, range(13)), (v, range(13))):
        x[np.setdiff1d(np.arange(len(x)), tokens)] = np.nan
    result = oracle.packed_attention(batch, q, k, v, dout, key_batch=key_batch)
    for rows, keys in ((slice(0, 3), slice(0, 2)), (slice(6, 11), slice(6, 13))):
        alone = oracle.attention(q[rows], k[keys], v[keys], dout[rows])
        np.testing.assert_array_equal(result.out[rows], alone.out)
        np.testing.assert_array_equal(result.lse[:, rows], alone.lse)
        np.testing.assert_array_equal(result.dv[keys], alone.dv)
    assert not result.dk[2:6].any() and not result.dk[13:].any(), "keys without queries, and padding"
    assert not result.out[14:].any() and (result.lse[:, 14:] == -np.inf).all(), "queries without keys, and padding"


def test_no_documents_or_empty_documents_give_zeros():
    for batch in (batch_of([], [], slack=2), batch_of([0, 0], [0, 2])):
        result = oracle.packed_attention(batch, *random_document(2))
        assert not result.out.any() and not result.dq.any() and not result.dk.any() and not result.dv.any()
        assert (result.lse == -np.inf).all() and (result.max_logit == -np.inf).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_baseline_holds_values_of_its_dtype_and_errs_like_it(dtype):
    inputs = [x.astype(dtype) for x in random_document(100, head_dim=32, v_head_dim=16)]
    truth = oracle.attention(*inputs)
    baseline = oracle.attention(*inputs, rounding=dtype)
    eps = float(ml_dtypes.finfo(dtype).eps)
    for field in ("out", "dq", "dk", "dv"):
        actual, wanted = getattr(baseline, field), getattr(truth, field)
        assert actual.dtype == np.float64
        np.testing.assert_array_equal(actual.astype(dtype).astype(np.float64), actual)
        error = np.abs(actual - wanted).max()
        assert eps / 16 < error / np.abs(wanted).max() < 2 * eps


def test_baseline_rounds_every_stored_matrix_once():
    q, k, v, dout = (x[:, 0].astype(np.float16) for x in random_document(20, 1, 1, 32, 32))

    def product(a, b):
        return (a.astype(np.float32) @ b.astype(np.float32)).astype(np.float16)

    scores = product(q, k.T).astype(np.float32)
    p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    p = p.astype(np.float16)
    dp = product(dout, v.T).astype(np.float32)
    ds = (p * (dp - (p * dp).sum(axis=1, keepdims=True))).astype(np.float16)
    by_hand = {"out": product(p, v), "dq": product(ds, k), "dk": product(ds.T, q), "dv": product(p.T, dout)}
    result = oracle.attention(
        *(x[:, None] for x in (q, k, v, dout)), causal=False, softmax_scale=1.0, rounding=np.float16
    )
    for field, wanted in by_hand.items():
        differs = getattr(result, field)[:, 0] != wanted
        assert differs.mean() < 0.02, field  # a sum in another order may round to the neighbour, rarely


def test_fused_baseline_rounds_operands_and_results_once():
    q, k, v, dout = (x[:, 0].astype(np.float16) for x in random_document(20, 1, 1, 32, 32))
    wide_q, wide_k, wide_v, wide_dout = (x.astype(np.float32) for x in (q, k, v, dout))
    scores = wide_q @ wide_k.T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    total = weights.sum(axis=1, keepdims=True)
    out = (weights.astype(np.float16).astype(np.float32) @ wide_v / total).astype(np.float16)
    p = weights / total
    delta = (wide_dout * out.astype(np.float32)).sum(axis=1, keepdims=True)
    ds = (p * (wide_dout @ wide_v.T - delta)).astype(np.float16).astype(np.float32)
    dv = p.astype(np.float16).astype(np.float32).T @ wide_dout
    by_hand = {"out": out, "dq": ds @ wide_k, "dk": ds.T @ wide_q, "dv": dv}
    result = oracle.attention(
        *(x[:, None] for x in (q, k, v, dout)), causal=False, softmax_scale=1.0, rounding=np.float16, fused=True
    )
    for field, wanted in by_hand.items():
        differs = getattr(result, field)[:, 0] != wanted.astype(np.float16)
        assert differs.mean() < 0.02, field  # a sum in another order may round to the neighbour, rarely
    np.testing.assert_allclose(result.lse[0], np.log(total[:, 0]) + scores.max(axis=1), rtol=1e-6)


def judged(dtype=ml_dtypes.bfloat16):
    """The truth over a document of 64 tokens."""
    inputs = [x.astype(dtype) for x in random_document(64, head_dim=32, v_head_dim=16)]
    return inputs, oracle.truth(batch_of([64], [64]), *inputs)


@pytest.mark.parametrize("field", ["out", "dq", "dk", "dv"])
def test_the_baselines_are_within_their_budgets_and_three_times_as_wrong_is_not(field):
    _, truth = judged()
    exact, plain, fused = (getattr(result, field) for result in (truth.exact, truth.plain, truth.fused))
    verdict = truth.judge(field, fused.astype(ml_dtypes.bfloat16))
    assert verdict.good and 0 < verdict.rms < verdict.rms_budget / 1.05
    verdict = truth.judge(field, plain.astype(ml_dtypes.bfloat16))
    assert not verdict.good and verdict.largest <= verdict.largest_budget / 2, "plain attention rounds more than once"
    verdict = truth.judge(field, (3 * plain - 2 * exact).astype(np.float32))
    assert verdict.largest > verdict.largest_budget


def test_one_wrong_element_shows_in_the_largest_error():
    _, truth = judged()
    dq = truth.fused.dq.copy()
    dq[40, 1, 5] = 0.0
    assert abs(truth.exact.dq[40, 1, 5]) > 0.05
    assert truth.judge("dq", truth.fused.dq).good
    verdict = truth.judge("dq", dq)
    assert verdict.largest > verdict.largest_budget and not verdict.good


def test_a_dropped_key_shows():
    inputs, truth = judged()
    dropped = oracle.attention(*inputs, window=(62, 0))  # the last row does not see the first key
    assert not truth.judge("out", dropped.out.astype(np.float32)).good


def test_verdict_on_infinities_nan_and_exact_zeros():
    lse = np.array([[0.5, -np.inf]])
    verdict = oracle.judge(lse.astype(np.float32), lse, lse)
    assert verdict.good and verdict.rms == verdict.largest == 0.0
    for wrong in ([0.5, 0.0], [0.5, np.inf], [0.5, np.nan], [-np.inf, -np.inf]):
        assert not oracle.judge(np.array([wrong], np.float32), lse, lse).good
    zeros = np.zeros((4, 2, 64))
    verdict = oracle.judge(zeros.astype(np.float16), zeros, zeros, zeros)
    assert verdict.good and 0 < verdict.rms_budget < 1e-6 < verdict.largest_budget < 1e-4
    assert not oracle.judge((zeros + 1e-4).astype(np.float16), zeros, zeros, zeros).good
    nothing = np.zeros((0, 2, 64))
    assert oracle.judge(nothing.astype(np.float16), nothing, nothing, nothing).good


def test_allowance_falls_with_the_square_root_of_the_rows():
    error = np.random.default_rng(0).choice([-1e-3, 1e-3], (400, 4, 64))
    exact = np.ones_like(error)
    few, many = (oracle.judge(exact[:n].astype(np.float16), exact[:n], exact[:n] + error[:n], exact[:n] + error[:n])
                 for n in (4, 400))
    assert few.rms_budget == pytest.approx(1e-3 * (1.05 + (2 * 4 * 4) ** -0.5), rel=1e-4)
    assert many.rms_budget == pytest.approx(1e-3 * (1.05 + (2 * 4 * 400) ** -0.5), rel=1e-4)


def test_float32_is_judged_by_plain_attention_alone():
    _, truth = judged(dtype=np.float32)
    assert truth.fused is None
    assert truth.judge("dk", truth.plain.dk.astype(np.float32)).good
    assert not truth.judge("dk", truth.exact.dk.astype(np.float16).astype(np.float32)).good


def test_shapes_that_do_not_belong_together_are_named():
    q, k, v, dout = random_document(4)
    with pytest.raises(ValueError, match=r"v has shape \(4, 2, 2\), wanted \(3, heads, width\): as many"):
        oracle.attention(q, k[:3], v)
    with pytest.raises(ValueError, match="a divisor of those of q"):
        oracle.attention(q[:, :3], k, v)
    with pytest.raises(ValueError, match=r"dout has shape \(4, 4, 3\), wanted \(4, 4, 2\)"):
        oracle.attention(q, k, v, q)
    with pytest.raises(ValueError, match="q has 4 rows, the batch total_rows = 8"):
        oracle.packed_attention(batch_of([3], [8]), q, k, v, dout)
