"""The NumPy engine with plans of any rows, made by brute force; what it writes and where; its blocks of rows."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import ranges, visible

from thdattn import oracle
from thdattn.engines import AttentionOptions, BackwardInputs, BackwardOutputs, ForwardInputs, ForwardOutputs, reference
from thdattn.engines.reference import blocks as host_blocks

BFLOAT16 = ml_dtypes.bfloat16
MASKS = [
    pytest.param(True, (-1, -1), id="causal"),
    pytest.param(False, (-1, -1), id="full"),
    pytest.param(True, (5, 0), id="causal-left"),
    pytest.param(False, (3, 7), id="two-sided"),
    pytest.param(False, (-1, 2), id="right-only"),
    pytest.param(False, (0, 0), id="self"),
]
# (length, padded length) of every sequence; three more rows belong to none.
SEQUENCES = [(7, 8), (0, 4), (1, 1), (0, 0), (40, 48), (150, 150), (3, 16)]
SLACK = 3


def batch_of(sequences, slack=SLACK):
    lengths, padded = np.array(sequences, np.int32).reshape(-1, 2).T
    cu_seqlens_padded = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
    return SimpleNamespace(
        lengths=lengths, cu_seqlens_padded=cu_seqlens_padded, total_rows=int(cu_seqlens_padded[-1]) + slack,
        parents=None,
    )


def brute_force_plan(batch, causal=True, window=(-1, -1), rows=None):
    """What a rank that owns these rows must know, from the visibility of every single pair."""
    keys = np.arange(batch.total_rows)
    rows = keys if rows is None else rows
    seen = visible(batch, rows, keys, (window[0], 0) if causal else window)
    return SimpleNamespace(
        rows=rows,
        key_ranges=np.array(ranges(seen), np.int32).reshape(-1, 2),
        query_ranges=np.array(ranges(seen.T), np.int32).reshape(-1, 2),
        local_rows=len(rows),
        key_rows=batch.total_rows,
        visible_pairs=int(seen.sum()),
        has_trees=False,
    )


def random_inputs(rows, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=6, dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = (num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, v_head_dim), (num_heads, v_head_dim)
    return [rng.standard_normal((rows, *shape)).astype(dtype) for shape in shapes]


def run(q, k, v, dout, plan, softmax_scale=0.3, kv_grad_dtype=None):
    """Forward and backward; any warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = AttentionOptions(softmax_scale)
        out, lse, max_logit = reference.attn_fwd(
            ForwardInputs(q, k, v, plan), options, ForwardOutputs(max_logit=True))
        grads = reference.attn_bwd(
            BackwardInputs(dout, q, k, v, out, lse, plan), options, BackwardOutputs(kv_grad_dtype or k.dtype))
    return SimpleNamespace(out=out, lse=lse, max_logit=max_logit, dq=grads[0], dk=grads[1], dv=grads[2])


def test_kv_gradients_come_in_the_dtype_asked_for():
    batch = batch_of([(9, 9)])
    inputs = random_inputs(batch.total_rows, dtype=np.float16)
    plan = brute_force_plan(batch)
    wide = run(*inputs, plan, kv_grad_dtype=np.float32)
    narrow = run(*inputs, plan)
    assert wide.dk.dtype == wide.dv.dtype == np.float32
    np.testing.assert_array_equal(wide.dk.astype(np.float16), narrow.dk)
    np.testing.assert_array_equal(wide.dv.astype(np.float16), narrow.dv)


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_ranks_with_any_rows_add_up_to_the_whole(causal, window):
    batch = batch_of(SEQUENCES)
    q, k, v, dout = random_inputs(batch.total_rows)
    truth = oracle.packed_attention(batch, q, k, v, dout, causal=causal, window=window, softmax_scale=0.3)
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    max_logit = np.full(q.shape[1], -np.inf)
    for cp_rank in range(3):
        owned = np.arange(cp_rank, batch.total_rows, 3)
        rows = np.append(owned, [-1, -1])  # two fillers
        plan = brute_force_plan(batch, causal, window, rows)
        actual = run(q[rows], k, v, dout[rows], plan)
        np.testing.assert_allclose(actual.out[:-2], truth.out[owned], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(actual.dq[:-2], truth.dq[owned], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(actual.lse[:, :-2], truth.lse[:, owned], rtol=1e-12)
        assert (
            not actual.out[-2:].any() and not actual.dq[-2:].any() and (actual.lse[:, -2:] == -np.inf).all()
        )
        unseen = plan.query_ranges[:, 0] == plan.query_ranges[:, 1]
        assert not actual.dk[unseen].any() and not actual.dv[unseen].any()
        dk, dv, max_logit = dk + actual.dk, dv + actual.dv, np.maximum(max_logit, actual.max_logit)
    np.testing.assert_allclose(dk, truth.dk, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(dv, truth.dv, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(max_logit, truth.max_logit, rtol=1e-6)


def test_gradients_of_keys_go_to_the_ranks_that_own_them():
    batch = batch_of(SEQUENCES)
    plan = brute_force_plan(batch, True, (-1, -1))
    q, k, v, dout = random_inputs(batch.total_rows)
    wanted = run(q, k, v, dout, plan)
    owners = np.random.default_rng(1).integers(-1, 3, plan.key_rows)
    places = np.stack([owners, [np.sum(owners[:row] == owner) for row, owner in enumerate(owners)]], axis=1)
    partials = [[np.full((plan.key_rows, *x.shape[1:]), np.nan) for _ in range(3)] for x in (k, v)]
    inputs = BackwardInputs(dout, q, k, v, wanted.out, wanted.lse, plan)
    outputs = BackwardOutputs(np.float64, owners=(partials, places))
    _, *rest = reference.attn_bwd(inputs, AttentionOptions(0.3), outputs)
    assert rest == [None, None]
    for ranks, x in zip(partials, (wanted.dk, wanted.dv), strict=True):
        for rank, theirs in enumerate(ranks):
            np.testing.assert_array_equal(theirs[: np.sum(owners == rank)], x[owners == rank])
            assert np.isnan(theirs[np.sum(owners == rank) :]).all(), "nothing else is written"


@pytest.mark.parametrize(("sign", "winners"), [(-1, slice(0, 1)), (1, slice(1, 30))])
def test_large_logits_neither_overflow_nor_warn(sign, winners):
    # The first key scores 0, all others sign * 8 * 30 * 30 = sign * 7200: exp of the difference is 0.
    batch = batch_of([(30, 32)])
    q, k, v, dout = random_inputs(batch.total_rows, dtype=np.float32)
    q, k = np.full_like(q, 30), np.full_like(k, 30 * sign)
    k[0] = 0
    actual = run(q, k, v, dout, brute_force_plan(batch), softmax_scale=1.0)
    assert all(np.isfinite(x).all() for x in (actual.out, actual.dq, actual.dk, actual.dv))
    np.testing.assert_allclose(actual.out[29, 0], v[winners, 0].mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual.max_logit, max(0, sign * 7200))


def check_blocks(key_ranges, num_heads):
    """Every non-empty row is in one block, whose span is what its rows see; returns the scores computed."""
    rows, blocks = host_blocks.row_blocks(key_ranges, num_heads)
    np.testing.assert_array_equal(rows, np.flatnonzero(key_ranges[:, 1] > key_ranges[:, 0]))
    covered = [np.arange(begin, end) for begin, end, _, _ in blocks]
    np.testing.assert_array_equal(np.concatenate([np.zeros(0, int), *covered]), np.arange(len(rows)))
    for row_begin, row_end, key_begin, key_end in blocks.tolist():
        inside = key_ranges[rows[row_begin:row_end]]
        seen = np.zeros(key_end, bool)
        for begin, end in inside:
            seen[begin:end] = True
        assert seen[key_begin:].all() and not seen[:key_begin].any()
        count = row_end - row_begin
        assert 0 < count <= host_blocks.MAX_BLOCK_ROWS
        assert count == 1 or num_heads * count * (key_end - key_begin) <= host_blocks.MAX_BLOCK_SCORES
    return int(((blocks[:, 1] - blocks[:, 0]) * (blocks[:, 3] - blocks[:, 2])).sum())


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12), st.booleans(), st.integers(1, 3)
)
def test_short_documents_cost_at_most_twice_their_visible_pairs(documents, causal, cp_size):
    batch = batch_of([(length, length + padding) for length, padding in documents], slack=2)
    scores = visible = 0
    for cp_rank in range(cp_size):
        rows = np.arange(cp_rank, batch.total_rows, cp_size)
        plan = brute_force_plan(batch, causal, rows=rows)
        scores += check_blocks(plan.key_ranges, 4)
        visible += plan.visible_pairs
    assert visible <= scores <= 2 * visible


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=300),
    st.sampled_from([1, 2**16, 2**22]),
)
def test_blocks_cover_any_ranges(pairs, num_heads):
    check_blocks(np.array(pairs, np.int32).reshape(-1, 2), num_heads)


def test_blocks_end_with_the_document_the_row_limit_and_the_memory_limit():
    document = np.arange(300, dtype=np.int32)
    causal = np.stack([np.zeros_like(document), document + 1], axis=1)
    packed = np.concatenate([causal, causal[:2] + 300])
    assert host_blocks.row_blocks(packed, 1)[1].tolist() == [
        [0, 128, 0, 128], [128, 256, 0, 256], [256, 300, 0, 300], [300, 302, 300, 302],
    ]
    # 2**24 / 2**17 heads = 128 scores per head: fits neither 128 rows nor, at 300 keys, a second row.
    blocks = host_blocks.row_blocks(causal, 2**17)[1]
    assert blocks[-1].tolist() == [299, 300, 0, 300]
    assert len(blocks) == 128 + 128 + 44


def test_many_empty_rows_and_many_documents_take_no_loop_over_rows():
    num_documents, length = 2048, 34
    begin = np.arange(num_documents).repeat(length) * length
    ranges = np.concatenate([np.zeros((100_000, 2)), np.stack([begin, begin + length], axis=1)]).astype(
        np.int32
    )
    plan = SimpleNamespace(key_ranges=ranges, key_rows=num_documents * length, has_trees=False)
    _, blocks = host_blocks.row_blocks(ranges, 1)
    assert len(blocks) == num_documents
    q, k, v, dout = random_inputs(len(ranges), 1, 1, 4, 4, np.float32)
    k, v = k[: plan.key_rows], v[: plan.key_rows]
    actual = run(q, k, v, dout, plan)
    last = oracle.attention(*(x[-length:] for x in (q, k, v, dout)), causal=False, softmax_scale=0.3)
    np.testing.assert_allclose(actual.out[-length:], last.out, atol=1e-5)
    np.testing.assert_allclose(actual.dk[-length:], last.dk, atol=1e-5)
    assert not actual.out[:100_000].any()
