"""The plan of a rank against brute force over every pair of rows, and whole arrays cut by it."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from cases import BFLOAT16, BIG, CASES, LONG, SMALL, Case, to_host
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import WINDOWS, assert_masked, places

import thdattn
from thdattn.kernels.configs import TILES
from thdattn.plan.ranges import host_arrays


def owned_rows(batch, cp_size, cp_rank, sharding):
    """The sequence-order rows of a rank's local rows: two chunks of every sequence and a slice of what lies behind
    the last one, or a slice of the buffer; one rank owns all."""
    local_rows = (batch.total_rows + cp_size - 1) // cp_size
    if sharding == "contiguous" or cp_size == 1:
        rows = [row for row in range(cp_rank * local_rows, (cp_rank + 1) * local_rows) if row < batch.total_rows]
    else:
        rows = []
        starts = batch.cu_seqlens_padded.tolist()
        for begin, end in itertools.pairwise(starts):
            chunk = (end - begin) // (2 * cp_size)
            for c in (cp_rank, 2 * cp_size - 1 - cp_rank):
                rows += range(begin + c * chunk, begin + (c + 1) * chunk)
        spare = local_rows - len(rows)
        behind = starts[-1] + cp_rank * spare
        rows += [row for row in range(behind, behind + spare) if row < batch.total_rows]
    return rows + [-1] * (local_rows - len(rows))


def assert_plan(batch, cp_size, sharding, window, tiles=(16, 8)):
    shared = thdattn.Sharding(batch, cp_size, sharding)
    owned = [owned_rows(batch, cp_size, cp_rank, sharding) for cp_rank in range(cp_size)]
    positions = np.zeros(batch.total_rows + 1, int)  # the last is that of fillers, row -1
    for begin, end in itertools.pairwise(batch.cu_seqlens_padded.tolist()):
        positions[begin:end] = range(end - begin)
    is_token = np.append(places(batch)[0] >= 0, False)
    for cp_rank, rows in enumerate(owned):
        plan = host_arrays(shared, cp_rank, window, tiles)
        assert plan.rows.tolist() == rows and len(rows) == shared.local_rows
        assert plan.positions.tolist() == positions[rows].tolist() and plan.valid.tolist() == is_token[rows].tolist()
        assert_masked(plan, batch, rows, range(batch.total_rows), window, tiles)
        assert plan.rank_order.tolist() == [*itertools.chain(*owned)]


def test_two_ranks_of_the_worked_example_by_hand():
    # Lengths 7 and 3 padded to 8 and 4: rows 0-6 and 8-10 hold tokens, rows 7 and 11 are padding.
    batch = thdattn.PackedBatch([0, 7, 10], [0, 8, 12])
    sharding = thdattn.Sharding(batch, 2)
    first, second = (host_arrays(sharding, rank, (-1, 0), (4, 4)) for rank in (0, 1))
    assert first.rows.tolist() == [0, 1, 6, 7, 8, 11] and second.rows.tolist() == [2, 3, 4, 5, 9, 10]
    assert first.positions.tolist() == [0, 1, 6, 7, 0, 3] and second.positions.tolist() == [2, 3, 4, 5, 1, 2]
    assert first.key_ranges.tolist() == [[0, 1], [0, 2], [0, 7], [0, 0], [8, 9], [0, 0]]
    assert second.key_ranges.tolist() == [[0, 3], [0, 4], [0, 5], [0, 6], [8, 10], [8, 11]]
    assert first.query_ranges.tolist() == [
        [0, 3], [1, 3], [2, 3], [2, 3], [2, 3], [2, 3], [2, 3], [0, 0], [4, 5], [0, 0], [0, 0], [0, 0],
    ]
    assert second.query_ranges.tolist() == [
        [0, 4], [0, 4], [0, 4], [1, 4], [2, 4], [3, 4], [0, 0], [0, 0], [4, 6], [4, 6], [5, 6], [0, 0],
    ]
    assert first.rank_order.tolist() == second.rank_order.tolist() == [0, 1, 6, 7, 8, 11, 2, 3, 4, 5, 9, 10]
    assert first.query_tiles.tolist() == second.query_tiles.tolist() == [[0, 1], [0, 1]]
    assert first.key_tiles.tolist() == second.key_tiles.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_tiles_of_a_sequence_are_near_each_other():
    # Tiles of four query rows: 0-1 are of the sequence of 8 tokens, 2-6 of that of 20, 7-8 of that of 8 again, and then
    # there are none. But for those, the sequences would be few.
    by_span, orders = [6, 5, 4, 1, 3, 8, 0, 2, 7], [
        host_arrays(thdattn.Sharding(batch, 1), 0, (-1, 0), (4, 4)).query_tiles.tolist()
        for batch in (thdattn.PackedBatch([0, 8, 28, 36], total_rows=rows) for rows in (100, 36))]
    assert orders[0] == [[6, 5, 4, 3, 2, 1, 0, 8, 7, *range(9, 25)], [*by_span, *range(9, 25)]]
    assert orders[1] == [by_span, by_span]


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_plan_of_every_pack_is_brute_force(case, cp_size):
    if cp_size not in case.cp_sizes:
        pytest.skip("the case fixes padded lengths for fewer ranks")
    window = (case.window[0], 0) if case.causal else case.window
    assert_plan(case.batch(cp_size), cp_size, case.sharding, window, tiles=(64, 128))
    if case.name in ("edge-lengths", "edge-lengths-contiguous", "capacity", "capacity-contiguous"):
        for window in WINDOWS:
            assert_plan(case.batch(cp_size), cp_size, case.sharding, window)


PACKS = st.lists(st.tuples(st.integers(0, 21), st.integers(0, 2)), max_size=6)
SIDES = st.one_of(st.just(-1), st.integers(0, 24))


@settings(deadline=None, max_examples=400)
@given(PACKS, st.sampled_from([1, 2, 3, 4, 8]), st.sampled_from(["dual_chunk", "contiguous"]),
       st.tuples(SIDES, SIDES), st.integers(0, 20), st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_plan_of_any_pack_is_brute_force(pack, cp_size, sharding, window, slack, tiles):
    multiple = 2 * cp_size if sharding == "dual_chunk" else 1
    lengths = tuple(length for length, _ in pack)
    padded = tuple(-(-length // multiple) * multiple + extra * multiple for length, extra in pack)
    assert_plan(Case("any", lengths, padded, slack).batch(cp_size), cp_size, sharding, window, tiles)


@pytest.mark.parametrize("sharding", ["dual_chunk", "contiguous"])
@pytest.mark.parametrize("case", [*BIG, LONG], ids=str)
def test_big_packs_are_planned_in_well_under_a_second_a_rank(case, sharding):
    case = replace(case, sharding=sharding)
    shared = thdattn.Sharding(case.batch(4), 4, sharding)
    began = time.thread_time()
    plan = host_arrays(shared, 1, (-1, 0), (128, 64))
    assert time.thread_time() - began < 2
    # Sums over the pack, counted by the formula: every key is seen as often as the transpose says.
    seen = (plan.key_ranges[:, 1] - plan.key_ranges[:, 0]).sum(dtype=np.int64)
    assert seen == (plan.query_ranges[:, 1] - plan.query_ranges[:, 0]).sum(dtype=np.int64) > 0
    query_tiles, key_tiles = -(-shared.local_rows // 128), -(-case.batch(4).total_rows // 64)
    assert np.sort(plan.query_tiles).tolist() == [list(range(query_tiles))] * 2
    assert np.sort(plan.key_tiles).tolist() == [list(range(key_tiles))] * 2


# --- lengths on a GPU, told from the host ---------------------------------------------------------------------------


class Lengths:
    """Stands for lengths on a GPU, which are wrong; the host knows of it when it waits, or when it is `noticed`."""

    noticed, made_in, generation = False, None, 0

    def follow(self):
        """Nothing is late."""

    def check(self, wait):
        if wait or self.noticed:
            raise ValueError("lengths on the GPU were planned that are wrong")


def test_lengths_on_the_host_need_no_check():
    plan = thdattn.CPAttention(thdattn.comm.init("single"), 1, 8, engine="reference").plan(thdattn.PackedBatch([0, 4]))
    assert plan.check() is None and plan.check(wait=False) is None


def test_wrong_lengths_raise_at_the_next_call_that_knows():
    attention = thdattn.CPAttention(thdattn.comm.init("single"), 1, 8, dtype="float32", engine="reference")
    batch, x, lengths = thdattn.PackedBatch([0, 4]), np.ones((4, 1, 8), np.float32), Lengths()
    plan = attention.plan(batch)
    plan = replace(plan, arrays=replace(plan.arrays, lengths=lengths))
    attention._lengths = lengths
    _, saved = attention.forward(x, x, x, plan)
    with pytest.raises(ValueError, match="that are wrong"):
        plan.check()
    lengths.noticed = True
    for call in (lambda: attention.forward(x, x, x, plan), lambda: attention.backward(x, saved),
                 lambda: attention.plan(batch)):
        with pytest.raises(ValueError, match="that are wrong"):
            call()
    attention.plan(batch)  # who was told may go on


@pytest.mark.parametrize("mixer", [False, True])
def test_over_several_ranks_only_the_next_plan_raises_for_wrong_lengths(mixer):
    """The GPU of rank 1 has told its host, that of rank 0 has not: a rank that raised alone would leave the other."""

    def program(comm):
        lengths, batch, zeros = Lengths(), thdattn.PackedBatch([0, 8]), partial(np.zeros, dtype=np.float32)
        lengths.noticed = comm.rank == 1
        if mixer:
            layer = thdattn.Mamba2Mixer(comm, 2, 3, 4, dtype="float32", engine="reference")
            weights = thdattn.Mamba2Weights(*map(zeros, ((14, 4), (14,), (2,), (2,), (2,))))
            inputs, dout = (zeros((4, 22)), weights), zeros((4, 6))
        else:
            layer = thdattn.CPAttention(comm, 1, 8, dtype="float32", engine="reference")
            inputs, dout = [zeros((4, 1, 8))] * 3, zeros((4, 1, 8))
        plan = layer.plan(batch)
        plan, layer._lengths = replace(plan, arrays=replace(plan.arrays, lengths=lengths)), lengths
        _, saved = layer.forward(*inputs, plan)
        layer.backward(dout, saved)
        with pytest.raises(ValueError, match=r"^rank 1: lengths on the GPU were planned that are wrong$"):
            layer.plan(batch)
        layer.plan(batch)

    thdattn.comm.run_local(2, program)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_plan_knows_whether_some_row_sees_or_is_seen_by_nothing(case):
    for cp_size in case.cp_sizes:
        batch = case.batch(cp_size)

        def plan_of(comm, case=case, batch=batch):
            attention = thdattn.CPAttention(comm, 1, 64, engine="reference")
            return attention.plan(batch, case.sharding)

        plans = thdattn.comm.run_local(cp_size, plan_of)
        sees_a_key = np.concatenate([plan.key_ranges[:, 1] > plan.key_ranges[:, 0] for plan in plans])
        assert {plan.has_masked_out_queries for plan in plans} == {not sees_a_key.all()}
        for plan in plans:
            leading = plan.leading_tokens
            assert leading is None or (plan.valid == (np.arange(plan.local_rows) < leading)).all()
        is_seen = np.any([plan.query_ranges[:, 1] > plan.query_ranges[:, 0] for plan in plans], axis=0)
        assert {plan.has_unseen_keys for plan in plans} == {not is_seen.all()}


@pytest.mark.parametrize("strategy", ["dual_chunk", "contiguous", "balanced"])
@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize(("lengths", "padded", "slack"), [
    *(((5, 0, 40, 7, 300), None, slack) for slack in (0, 7, 5000)), ((1, 8, 3, 40, 2), (3, 10, 3, 41, 9), 0)])
def test_tokens_before_all_padding_are_counted(strategy, cp_size, lengths, padded, slack):
    """None where padding comes before tokens, as on some rank of the last pack."""
    lengths, padded = (tuple((2 * cp_size * np.array(x)).tolist()) for x in (lengths, padded or lengths))
    batch = Case("any", lengths, padded, slack).batch(cp_size)
    sharding, is_token = thdattn.Sharding(batch, cp_size, strategy), np.append(places(batch)[0] >= 0, False)
    found = [sharding.leading_tokens(rank) for rank in range(cp_size)]
    for rank, leading in enumerate(found):
        tokens = is_token[sharding.rows(rank)].tolist()
        assert leading is None or tokens == [row < leading for row in range(len(tokens))]
    assert (None in found) == (padded != lengths)


def padded_results(engine, attention, plan):
    """out, lse and gradients of a pack whose padding holds large finite numbers."""
    batch, rng, (head_dim, v_head_dim) = plan.batch, np.random.default_rng(0), plan.head_dims
    q, k, v, dout = (
        engine.xp.asarray(batch.pack([rng.standard_normal((n, heads, width)) for n in batch.lengths], fill=1e4)
                          .astype(attention.dtype))
        for heads, width in ((4, head_dim), (2, head_dim), (2, v_head_dim), (4, v_head_dim))
    )
    out, saved = attention.forward(q, k, v, plan)
    return [to_host(x).tobytes() for x in (out, saved.lse, *attention.backward(dout, saved))]


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_finite_padding_needs_no_copies_and_changes_no_bit(engine, dims):
    attention = thdattn.CPAttention(thdattn.comm.init("single"), 4, dims[0], 2, dims[1], engine=engine.name,
                                    deterministic=True)
    batch = thdattn.PackedBatch([0, 40, 40, 260], [0, 48, 64, 300], total_rows=333)
    plan, finite = attention.plan(batch), attention.plan(batch, finite_padding=True)
    assert plan.has_unseen_keys and plan.has_masked_out_queries
    assert not finite.has_unseen_keys and not finite.has_masked_out_queries
    assert padded_results(engine, attention, plan) == padded_results(engine, attention, finite)


def test_finite_padding_is_a_bool():
    attention = thdattn.CPAttention(thdattn.comm.init("single"), 4, 8, engine="reference")
    with pytest.raises(TypeError, match="finite_padding is 'no'"):
        attention.plan(thdattn.PackedBatch([0, 4]), finite_padding="no")


# --- whole arrays and a rank's rows ------------------------------------------------------------------------------


def plans_over(cp_size, batch, sharding, program, engine="reference"):
    """What program(plan, comm) returns on every simulated rank."""
    def on_rank(comm):
        return program(thdattn.CPAttention(comm, 1, 64, engine=engine).plan(batch, sharding), comm)

    return thdattn.comm.run_local(cp_size, on_rank)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.int64, bool, np.complex128], ids=str)
@pytest.mark.parametrize("shape", [(), (2, 5), (0,)], ids=str)
@pytest.mark.parametrize("name", ["edge-lengths", "capacity-contiguous", "all-empty"])
def test_unshard_is_the_inverse_of_shard(engine, name, shape, dtype, cp_size):
    case = CASES[name]
    batch = case.batch(cp_size)
    size = int(np.prod((batch.total_rows, *shape)))
    whole = (np.arange(1, size + 1) % 251).astype(dtype).reshape(batch.total_rows, *shape)
    sharding = thdattn.Sharding(batch, cp_size, case.sharding)

    def program(plan, comm):
        local = plan.shard(engine.xp.asarray(whole))
        assert isinstance(local, engine.xp.ndarray)
        mine, fillers = to_host(local), sharding.rows(comm.rank) < 0
        assert mine.dtype == whole.dtype and not mine[fillers].any()
        np.testing.assert_array_equal(mine, sharding.shard(whole, comm.rank))
        mine[fillers] = 1
        return plan.unshard(engine.xp.asarray(mine), comm)

    for again in plans_over(cp_size, batch, sharding, program, engine.name):
        assert isinstance(again, engine.xp.ndarray) and again.dtype == whole.dtype
        assert engine.name == "cuda" or not np.shares_memory(again, whole)
        np.testing.assert_array_equal(to_host(again), whole)


def test_shard_and_unshard_name_what_is_wrong():
    batch = thdattn.PackedBatch.from_lengths([7, 3], 4)

    def program(plan, comm):
        with pytest.raises(ValueError, match=r"x has shape \(6, 3\), wanted 12 rows; pass the whole packed array"):
            plan.shard(np.zeros((6, 3)))
        with pytest.raises(ValueError, match=r"x has shape \(12,\), wanted 6 rows; pass this rank's rows"):
            plan.unshard(np.zeros(12), comm)
        with pytest.raises(ValueError, match=r"comm is rank 0 of 1, wanted rank \d of 2 as the plan; pass the comm"):
            plan.unshard(np.zeros(6), thdattn.comm.init("single"))
        with pytest.raises(TypeError, match=r"comm is a NoneType, wanted a Comm; pass that of the attention"):
            plan.unshard(np.zeros(6), None)
        with pytest.raises(TypeError, match=r"x is a builtins\.list, wanted a NumPy array"):
            plan.shard([0.0] * 12)
        for x in (np.zeros((6, 1 + comm.rank)), np.zeros(6, [np.float32, np.float64][comm.rank])):
            with pytest.raises(ValueError, match=r"x of unshard is not the same on all ranks"):
                plan.unshard(x, comm)

    plans_over(2, batch, "dual_chunk", program)
