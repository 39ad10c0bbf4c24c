"""Tiles of queries whose keys are divided among thread blocks, and choices that the GPU makes from lengths it alone
knows, against float64. Every allocation starts as NaN and every row that holds no token is NaN."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16, CROSS, SMALL, Case, check, local_rows, random_inputs, run, to_host, token_rows, truth

import thdattn
from thdattn.kernels.configs import TILES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu", "kernels")]

SINGLE = thdattn.comm.init("single")
# Few queries of long keys, some without any, in two tiles: what decoding, and rank 0 of many, looks like.
DECODING = Case("few-queries-long-keys", (16, 3, 0, 130, 1), keys=(3000, 700, 5, 2048, 0), heads=(4, 2), cp_sizes=(1,))


def unpacked(pieces):
    """(tile, part, parts) of every piece, from what thd_attn_split_kv makes."""
    count, *words = pieces.get().tolist()
    return [(word & 0xFFFF, word >> 16 & 0xFF, word >> 24) for word in words[:count]]


def pieces_of(case, num_heads, dims=(128, 128)):
    """The pieces of a case's tiles, and key tiles of each tile."""
    from thdattn.engines.cuda import forward, launch, scheduler

    attention = replace(case, heads=(num_heads, num_heads), dims=dims).attention(SINGLE, BFLOAT16, engine="cuda")
    plan = attention.plan(case.batch(1), case.sharding, case.key_batch())
    every = plan.arrays.query_tiles[1]
    heads = launch.Heads(BFLOAT16, num_heads, num_heads, num_heads, *dims, (num_heads,))
    pieces, _ = forward._split_keys(plan, every, heads)
    ranges, tiles = to_host(plan.key_ranges), scheduler.forward_tiles(launch.this_gpu(), dims)
    key_tiles = []
    for first in range(0, len(ranges), tiles.tile_m):
        seen = [r for r in ranges[first : first + tiles.tile_m] if r[0] < r[1]]
        span = max(r[1] for r in seen) - min(r[0] for r in seen) if seen else 0
        key_tiles.append(-(-int(span) // tiles.tile_n))
    return unpacked(pieces), key_tiles


@pytest.mark.parametrize("num_heads", [1, 3, 16, 132])
@pytest.mark.parametrize("case", [
    DECODING, Case("one", (2048,), cp_sizes=(1,)), Case("many", (1000, 3, 0, 500, 64, 64), cp_sizes=(1,)),
    Case("decoding", (16,), keys=(32_768,), cp_sizes=(1,)), Case("empty", (0,), slack=200, cp_sizes=(1,)),
], ids=str)
def test_every_tile_is_there_with_all_its_parts(cupy, case, num_heads):
    from thdattn.engines.cuda import launch, scheduler

    pieces, key_tiles = pieces_of(case, num_heads)
    parts = defaultdict(list)
    for tile, part, count in pieces:
        parts[tile, count].append(part)
    assert sorted(tile for tile, _ in parts) == list(range(len(key_tiles)))
    assert all(found == list(range(count)) for (_, count), found in parts.items())
    lengths = [key_tiles[tile] for tile, *_ in pieces]
    assert lengths == sorted(lengths, reverse=True), "longest first"
    divided = [piece for piece in pieces if piece[2] > 1]
    assert len(divided) <= scheduler.most_kv_splits(launch.this_gpu(), len(key_tiles), num_heads)
    assert pieces[: len(divided)] == divided, "their shares have room for no others"


def test_keys_are_divided_for_idle_multiprocessors_alone(cupy, kernels):
    decoding = Case("decoding", (16,), keys=(32_768,), cp_sizes=(1,))
    pieces, _ = pieces_of(decoding, 16)
    wanted = {"hopper": 8, "portable": 16}[kernels]  # a portable thread block takes half a multiprocessor
    assert len(pieces) == wanted, "16 heads on 132 multiprocessors"
    pieces, _ = pieces_of(Case("short", (128,) * 16, cp_sizes=(1,)), 8)
    assert len(pieces) == 16, "a tile of keys is not divided"


@pytest.mark.parametrize("of_heads", [1, 2, 3])
def test_a_tile_is_divided_alike_in_however_many_launches(cupy, of_heads):
    from thdattn.engines.cuda import forward, launch

    batch = thdattn.PackedBatch.from_lengths((1800, 40, 900))
    plan = thdattn.CPAttention(SINGLE, of_heads, 128, engine="cuda").plan(batch)
    every = plan.arrays.query_tiles[1]

    def divided(order, num_heads):
        heads = launch.Heads(BFLOAT16, num_heads, of_heads, num_heads, 128, 128, (of_heads,))
        pieces, _ = forward._split_keys(plan, order, heads)
        return unpacked(pieces)

    wanted = divided(every, of_heads)
    assert any(count > 1 for *_, count in wanted)
    for first in (0, 1, 7, len(every)):
        orders = [order for order in (every[:first], every[first:]) if len(order)]
        assert [piece for order in orders for piece in divided(order, 1)] == wanted


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("float16")], ids=str)
@pytest.mark.parametrize("dims", TILES, ids=str)
@pytest.mark.parametrize("mask", [
    {}, {"causal": False}, {"causal": False, "window": (500, 90)}, {"sinks": True},
], ids=str)
def test_few_queries_of_long_keys_are_the_oracle_and_bitwise_the_same_twice(cupy, mask, dims, dtype):
    case = replace(DECODING, dims=dims, **mask)
    first, again = (run(case, 1, dtype, xp=cupy, engine="cuda", deterministic=True) for _ in range(2))
    check(case, dtype, first)
    for field, x in first.tokens.items():
        assert again.tokens[field].tobytes() == x.tobytes(), field


def test_nan_of_a_query_or_a_key_reaches_the_rows_that_see_it_and_no_other(cupy):
    case = replace(DECODING, causal=False)
    batch, key_batch = case.batch(1), case.key_batch()
    attention = case.attention(SINGLE, BFLOAT16, engine="cuda")
    plan = attention.plan(batch, case.sharding, key_batch)
    sides = [(batch, np.arange(batch.total_rows)), *2 * [(key_batch, np.arange(key_batch.total_rows))]]
    inputs = [local_rows(*side, x, np.nan) for side, x in zip(sides, random_inputs(case, BFLOAT16, 0)[:3], strict=True)]

    def outputs(query=slice(0), key=slice(0)):
        q, k, v = (cupy.array(x) for x in inputs)
        q[query], k[key] = np.nan, np.nan
        return to_host(attention.forward(q, k, v, plan)[0])

    clean, document = outputs(), range(case.lengths[0])  # the first one, whose rows come first
    for found, wanted in ((outputs(query=5), [5]), (outputs(key=100), document), (outputs(key=2_999), document)):
        assert np.isnan(found[wanted]).all()
        others = np.setdiff1d(np.arange(batch.total_rows), wanted)
        assert found[others].tobytes() == clean[others].tobytes()


@pytest.mark.parametrize("parts", [2, 3, 32])
@pytest.mark.parametrize("case", [*SMALL, *CROSS], ids=str)
def test_any_division_is_the_oracle(cupy, monkeypatch, case, parts):
    """Whatever the ranges are: parts without a key, rows that see none of a part, and tiles with one part."""
    from thdattn.engines.cuda import forward, launch

    def divided(plan, order, heads):
        _, where = split_keys(plan, order, heads)
        words = [tile | part << 16 | count << 24 for number, tile in enumerate(order.get().tolist())
                 for count in (1 if number % 4 == 3 else parts,) for part in range(count)]
        beyond = [0] * launch.this_gpu().multiprocessors  # is read, and not done
        return cupy.asarray([len(words), *words, *beyond], np.int32), where

    split_keys = forward._split_keys
    monkeypatch.setattr(forward, "_split_keys", divided)
    monkeypatch.setattr(forward.scheduler, "most_kv_splits", lambda *_: 32 * 12)
    check(case, BFLOAT16, run(case, 1, BFLOAT16, xp=cupy, engine="cuda"))


# --- choices that the GPU makes ----------------------------------------------------------------------------------

SHORT, LONG = (34,) * 200, (6_400, 0, 17, 300)


def test_splits_follow_the_lengths_that_the_gpu_finds(cupy):
    """A plan made anew for other lengths in the same arrays takes the other choice: 3 query heads share 8 kv heads."""
    case = Case("short", SHORT, heads=(24, 8), slack=6, sharding="contiguous", cp_sizes=(1,))
    attention = case.attention(SINGLE, BFLOAT16, engine="cuda")
    rows, slots = case.batch(1).total_rows, len(SHORT) + 1
    offsets = cupy.empty(slots, np.int32)

    def results(plan, inputs):
        out, saved = attention.forward(*inputs[:3], plan)
        return [to_host(x).astype(np.float32) for x in (out, *attention.backward(inputs[3], saved))]

    there, inputs = None, [cupy.asarray(x) for x in _drawn(rows)]
    for lengths in (SHORT, LONG, SHORT):
        ends = np.cumsum(lengths)
        cu_seqlens = np.concatenate([[0], ends, np.full(slots - 1 - len(ends), ends[-1])]).astype(np.int32)
        offsets.set(cu_seqlens)
        if there is None:
            there = attention.plan(thdattn.PackedBatch(offsets, total_rows=rows), "contiguous")
        else:
            there.refresh()
        here = attention.plan(thdattn.PackedBatch(cu_seqlens, total_rows=rows), "contiguous")
        for x, wanted in zip(results(there, inputs), results(here, inputs), strict=True):
            assert np.linalg.norm(x - wanted) <= 1e-3 * np.linalg.norm(wanted), "but for the order of float32 sums"
            assert not x[ends[-1] :].any()


def _drawn(rows):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((rows, heads, 64), np.float32).astype(BFLOAT16) for heads in (24, 8, 8, 24)]


def test_short_sequences_whose_lengths_only_the_gpu_knows_are_the_oracle(cupy):
    case = Case("short", SHORT, heads=(24, 8), sharding="contiguous", cp_sizes=(1,))
    batch, inputs = case.batch(1), random_inputs(case, BFLOAT16, 0)
    attention = case.attention(SINGLE, BFLOAT16, engine="cuda")
    on_gpu = thdattn.PackedBatch(cupy.asarray(batch.cu_seqlens), cupy.asarray(batch.cu_seqlens_padded),
                                 total_rows=batch.total_rows)
    rows = np.arange(batch.total_rows)
    q, k, v, dout = (cupy.asarray(local_rows(batch, rows, x, np.nan)) for x in inputs)
    plan = attention.plan(on_gpu, "contiguous")
    out, saved = attention.forward(q, k, v, plan)
    right = truth(case, BFLOAT16)
    for field, x in zip(("out", "dq", "dk", "dv"), (out, *attention.backward(dout, saved)), strict=True):
        verdict = right.judge(field, to_host(x)[token_rows(batch)])
        assert verdict.good, f"{field}: {verdict}"
