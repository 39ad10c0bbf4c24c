"""Code of docs/coming_from.md, compared in float64 with the formulas of the libraries that it replaces."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
from launch import SOURCE

PAGE = (SOURCE.parent / "docs" / "coming_from.md").read_text()


@pytest.fixture
def names(request):
    """Run the block of Python below the heading that the test is marked with, and return its names."""
    section = PAGE.split(f"\n## {request.param}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    found: dict[str, object] = {}
    exec(block, found)
    return found


def below(heading):
    return pytest.mark.parametrize("names", [heading], indirect=True)


def partitioned_indices(cu_seqlens_padded, total_tokens, world_size, rank):
    """Return the rows of a rank by the formula of Transformer Engine's thd_get_partitioned_indices, row by row."""
    local = np.asarray(cu_seqlens_padded) // world_size
    rows = []
    for token in range(total_tokens // world_size):
        sequence = np.searchsorted(local, token, side="right") - 1
        index, length = token - local[sequence], local[sequence + 1] - local[sequence]
        offset = rank if index < length // 2 else 2 * (world_size - 1) - rank
        rows.append(int(index + local[sequence] * world_size + (length // 2) * offset))
    return rows


def attention(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window=(-1, -1)):
    """Compute flash_attn_varlen_func in float64: masks are aligned with the last query and the last key."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    out = np.zeros((*q.shape[:2], v.shape[2]))
    for (begin, end), (first, last) in zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True):
        rows, columns = np.arange(end - begin)[:, None], np.arange(last - first)
        behind = rows + (last - first) - (end - begin) - columns
        left, right = (window[0], 0 if causal else window[1])
        visible = ((left < 0) | (behind <= left)) & ((right < 0) | (-behind <= right))
        scores = np.einsum("qhd,khd->hqk", q[begin:end], k[first:last]) * q.shape[2] ** -0.5
        weights = np.where(visible, np.exp(scores - scores.max(axis=2, keepdims=True)), 0)
        sums = weights.sum(axis=2, keepdims=True)
        out[begin:end] = np.einsum("hqk,khd->qhd", weights / np.where(sums > 0, sums, 1), v[first:last])
    return out


def valid_rows(cu_seqlens, cu_seqlens_padded):
    """Return the rows of the padded buffer that hold tokens, in order."""
    lengths = np.diff(cu_seqlens)
    return np.concatenate([begin + np.arange(n) for begin, n in zip(cu_seqlens_padded, lengths, strict=False)])


@below("Transformer Engine")
def test_rows_of_transformer_engine_give_its_results_with_a2a(names):
    padded, valid = names["cu_seqlens_padded"], valid_rows(names["cu_seqlens"], names["cu_seqlens_padded"])
    tokens = (names[x][valid] for x in "qkv")
    wanted = np.zeros((36, 8, 64))
    wanted[valid] = attention(*tokens, names["cu_seqlens"], names["cu_seqlens"], causal=True)
    for rank, (rows, out) in enumerate(names["results"]):
        assert rows.tolist() == partitioned_indices(padded, 36, 2, rank)
        np.testing.assert_allclose(out, wanted[rows], atol=1e-5)


def test_the_default_rows_of_a2a_are_not_those_of_transformer_engine():
    import thdattn

    batch = thdattn.PackedBatch([0, 8, 12, 36])
    plans = thdattn.comm.run_local(2, lambda comm: thdattn.CPAttention(
        comm, 8, 64, engine="reference", cp_comm_type="a2a").plan(batch))
    assert plans[0].rows.tolist() == list(range(18)) != partitioned_indices([0, 8, 12, 36], 36, 2, 0)


@below("Megatron-Core")
def test_labels_of_megatron_are_the_next_tokens_of_the_same_document(names):
    packed, tokens = names["packed"], names["tokens"]
    labels, positions = np.full(36, -100), np.zeros(36, int)
    for begin, length in zip(packed.cu_seqlens_q_padded, np.diff(packed.cu_seqlens_q), strict=False):
        labels[begin : begin + length - 1] = tokens[begin + 1 : begin + length]
        positions[begin : begin + length] = range(length)
    valid = valid_rows(packed.cu_seqlens_q, packed.cu_seqlens_q_padded)
    for rank, (rows, mine, shifted, at) in enumerate(names["results"]):
        assert rows.tolist() == partitioned_indices(packed.cu_seqlens_q_padded, 36, 2, rank)
        assert mine.tolist() == tokens[rows].tolist() and shifted.tolist() == labels[rows].tolist()
        inside = np.isin(rows, valid)
        assert at[inside].tolist() == positions[rows][inside].tolist()


@below("flash-attn")
def test_varlen_attention_is_flash_attn_varlen_func(names):
    arguments = (names[x] for x in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"))
    np.testing.assert_allclose(names["out"], attention(*arguments, causal=True, window=(4, 0)), atol=1e-5)


@below("ring-flash-attention")
def test_shards_and_results_of_the_ring_are_those_of_zigzag(names):
    wanted = attention(names["q"], names["k"], names["v"], names["cu_seqlens"], names["cu_seqlens"], causal=True)

    def extract_local(x, rank):
        chunks = [np.split(x[begin:end], 4) for begin, end in pairwise(names["cu_seqlens"])]
        return np.concatenate([part for c in chunks for part in (c[rank], c[3 - rank])])

    for rank, (q, out) in enumerate(names["results"]):
        assert np.array_equal(q, extract_local(names["q"], rank))
        np.testing.assert_allclose(out, extract_local(wanted, rank), atol=1e-5)


def silu(x):
    return x / (1 + np.exp(-x))


def split_conv1d_scan(zxbcdt, weights, heads, width, states, groups, eps):
    """Run mamba_split_conv1d_scan_combined's definition on one document: (rows, ...) float64, row by row."""
    inner = heads * width
    z, xbc, dt = np.split(zxbcdt, [inner, zxbcdt.shape[1] - heads], axis=1)
    taps = np.concatenate([np.zeros((3, xbc.shape[1])), xbc])
    conv = sum(taps[tap : tap + len(xbc)] * weights.conv_weight[:, tap] for tap in range(4))
    x, b, c = np.split(silu(conv + weights.conv_bias), [inner, inner + groups * states], axis=1)
    x = x.reshape(-1, heads, width)
    b, c = (np.repeat(each.reshape(-1, groups, states), heads // groups, axis=1) for each in (b, c))
    dt = np.log1p(np.exp(dt + weights.dt_bias))
    state, out = np.zeros((heads, width, states)), np.empty_like(z)
    for row in range(len(z)):
        decay = np.exp(-dt[row] * np.exp(weights.A_log))[:, None, None]
        state = decay * state + np.einsum("h,hp,hn->hpn", dt[row], x[row], b[row])
        y = np.einsum("hpn,hn->hp", state, c[row]) + weights.D[:, None] * x[row]
        gated = (y.ravel() * silu(z[row])).reshape(groups, -1)
        out[row] = (gated / np.sqrt((gated**2).mean(axis=1, keepdims=True) + eps)).ravel() * weights.norm_weight
    return out


@below("mamba_ssm")
def test_mixer_is_mamba_split_conv1d_scan_combined_of_every_document(names):
    sizes = names["heads"], names["head_dim"], names["state_dim"], names["groups"], 1e-5
    documents = np.split(names["zxbcdt"], np.cumsum(names["lengths"])[:-1])
    wanted = np.concatenate([split_conv1d_scan(one, names["weights"], *sizes) for one in documents])
    np.testing.assert_allclose(names["out"], wanted, atol=1e-9)
