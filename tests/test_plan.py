"""The plan of a rank against brute force over every pair of rows, written from the rule on positions."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
from cases import BIG, CASES, LONG, SMALL, Case
from hypothesis import given, settings
from hypothesis import strategies as st

import thdattn
from thdattn.plan import host_arrays

WINDOWS = [(-1, -1), (-1, 0), (0, 0), (5, 0), (3, 40), (40, 3), (-1, 7), (7, -1), (100_000, 100_000)]


@dataclass
class Wanted:
    """rows, positions, key_ranges, query_ranges of a rank, from the visibility of every pair."""

    rows: list[int]
    positions: list[int]
    key_ranges: list[list[int]]
    query_ranges: list[list[int]]


def owned_rows(batch, cp_size, cp_rank, sharding):
    """The sequence-order rows of a rank's local rows: two chunks of every sequence and a slice of what lies behind
    the last one, or a slice of the buffer."""
    local_rows = (batch.total_rows + cp_size - 1) // cp_size
    if sharding == "contiguous":
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


def brute_force(batch, cp_size, cp_rank, sharding, window):
    """Row by row: which document and position it is, and for each pair of valid rows whether it counts."""
    document = np.full(batch.total_rows + 1, -1)  # the last is that of fillers, row -1
    position = np.zeros(batch.total_rows + 1, int)
    valid = np.zeros(batch.total_rows + 1, bool)
    starts = batch.cu_seqlens_padded.tolist()
    for b, length in enumerate(batch.lengths.tolist()):
        for row in range(starts[b], starts[b + 1]):
            document[row], position[row], valid[row] = b, row - starts[b], row - starts[b] < length
    rows = owned_rows(batch, cp_size, cp_rank, sharding)
    left, right = window
    i, j = np.array(rows, int)[:, None], np.arange(batch.total_rows)[None, :]
    visible = valid[i] & valid[j] & (document[i] == document[j])
    if left >= 0:
        visible &= position[j] >= position[i] - left
    if right >= 0:
        visible &= position[j] <= position[i] + right
    return Wanted(rows, position[rows].tolist() if rows else [], ranges(visible), ranges(visible.T))


def ranges(visible):
    """[first, last + 1) of the True entries of every row, which have no gap; [0, 0] for none."""
    found = []
    for row in visible:
        seen = np.flatnonzero(row)
        found.append([int(seen[0]), int(seen[-1]) + 1] if len(seen) else [0, 0])
        assert found[-1][1] - found[-1][0] == len(seen), "what a row sees is one range"
    return found


def assert_plan(batch, cp_size, sharding, window, tiles=(16, 8)):
    shared = thdattn.Sharding(batch, cp_size, sharding)
    gathered = []
    for cp_rank in range(cp_size):
        plan = host_arrays(shared, cp_rank, window, tiles)
        wanted = brute_force(batch, cp_size, cp_rank, sharding, window)
        assert plan.rows.tolist() == wanted.rows
        assert plan.positions.tolist() == wanted.positions
        assert plan.key_ranges.tolist() == wanted.key_ranges
        assert plan.query_ranges.tolist() == wanted.query_ranges
        assert plan.key_ranges.shape == (shared.local_rows, 2) and plan.query_ranges.shape == (batch.total_rows, 2)
        assert all(x.dtype == np.int32 for x in vars(plan).values())
        assert_tiles(plan.query_tiles, batch, wanted.rows, wanted.key_ranges, tiles[0])
        assert_tiles(plan.key_tiles, batch, range(batch.total_rows), wanted.query_ranges, tiles[1])
        gathered += wanted.rows
    for cp_rank in range(cp_size):
        assert host_arrays(shared, cp_rank, window, tiles).rank_order.tolist() == gathered


def assert_tiles(orders, batch, rows, ranges_of_rows, tile):
    """Every tile once, in either order: tiles of the longest sequence first, sequence by sequence, and there by falling
    span; by falling span. In their own order where these are equal."""
    starts, lengths = batch.cu_seqlens_padded.tolist(), batch.lengths.tolist()
    sequences, spans = [], []
    for first in range(0, len(ranges_of_rows), tile):
        seen = [r for r in ranges_of_rows[first : first + tile] if r[1] > r[0]]
        spans.append(max(end for _, end in seen) - min(begin for begin, _ in seen) if seen else 0)
        found = [(0, 0)]  # rows outside all sequences
        for row in rows[first : first + tile]:
            found += [(-lengths[b], starts[b]) for b in range(len(lengths)) if starts[b] <= row < starts[b + 1]]
        sequences.append(min(found))
    tiles = range(len(spans))
    assert orders[0].tolist() == sorted(tiles, key=lambda t: (sequences[t], -spans[t], t))
    assert orders[1].tolist() == sorted(tiles, key=lambda t: (-spans[t], t))


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
    ]  # fmt: skip
    assert second.query_ranges.tolist() == [
        [0, 4], [0, 4], [0, 4], [1, 4], [2, 4], [3, 4], [0, 0], [0, 0], [4, 6], [4, 6], [5, 6], [0, 0],
    ]  # fmt: skip
    assert first.rank_order.tolist() == second.rank_order.tolist() == [0, 1, 6, 7, 8, 11, 2, 3, 4, 5, 9, 10]
    assert first.query_tiles.tolist() == second.query_tiles.tolist() == [[0, 1], [0, 1]]
    assert first.key_tiles.tolist() == second.key_tiles.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_tiles_of_a_sequence_are_near_each_other():
    # Tiles of four query rows: 0-1 are of the sequence of 8 tokens, 2-6 of that of 20, 7-8 of that of 8 again.
    orders = host_arrays(thdattn.Sharding(thdattn.PackedBatch([0, 8, 28, 36]), 1), 0, (-1, 0), (4, 4)).query_tiles
    assert orders.tolist() == [[6, 5, 4, 3, 2, 1, 0, 8, 7], [6, 5, 4, 1, 3, 8, 0, 2, 7]]


@pytest.mark.parametrize(
    ("padded", "cp_size", "by_rank"),
    [
        ([0, 8, 16], 2, [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]),
        ([0, 8, 16, 24, 40], 4, [
            [0, 7, 8, 15, 16, 23, 24, 25, 38, 39], [1, 6, 9, 14, 17, 22, 26, 27, 36, 37],
            [2, 5, 10, 13, 18, 21, 28, 29, 34, 35], [3, 4, 11, 12, 19, 20, 30, 31, 32, 33],
        ]),
        ([0, 4, 8], 2, [[0, 3, 4, 7], [1, 2, 5, 6]]),
    ],
)  # fmt: skip
def test_rows_are_those_of_transformer_engine(padded, cp_size, by_rank):
    sharding = thdattn.Sharding(thdattn.PackedBatch(padded), cp_size)
    for cp_rank, rows in enumerate(by_rank):
        assert host_arrays(sharding, cp_rank, (-1, 0), (4, 4)).rows.tolist() == rows


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
    began = time.perf_counter()
    plan = host_arrays(shared, 1, (-1, 0), (128, 64))
    assert time.perf_counter() - began < 2
    # Sums over the pack, counted by the formula: every key is seen as often as the transpose says.
    seen = (plan.key_ranges[:, 1] - plan.key_ranges[:, 0]).sum(dtype=np.int64)
    assert seen == (plan.query_ranges[:, 1] - plan.query_ranges[:, 0]).sum(dtype=np.int64) > 0
    query_tiles, key_tiles = -(-shared.local_rows // 128), -(-case.batch(4).total_rows // 64)
    assert np.sort(plan.query_tiles).tolist() == [list(range(query_tiles))] * 2
    assert np.sort(plan.key_tiles).tolist() == [list(range(key_tiles))] * 2


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_dual_chunk_gives_every_rank_the_same_causal_work(cp_size):
    case = CASES["repeated-offsets"]
    batch = replace(case, lengths=(64, 320, 0, 16)).batch(cp_size)
    work = []
    for cp_rank in range(cp_size):
        key_ranges = host_arrays(thdattn.Sharding(batch, cp_size), cp_rank, (-1, 0), (16, 16)).key_ranges
        work.append(int((key_ranges[:, 1] - key_ranges[:, 0]).sum()))
    assert len(set(work)) == 1
    assert sum(work) == sum(n * (n + 1) // 2 for n in (64, 320, 16))


def test_plan_of_a_comm_has_the_arrays_and_sizes_of_its_rank():
    batch = thdattn.PackedBatch.from_lengths([7, 3], 4)

    def program(comm):
        return thdattn.CPAttention(comm, 2, 8, window=(5, 0), engine="reference").plan(batch)

    for cp_rank, plan in enumerate(thdattn.comm.run_local(2, program)):
        assert (plan.cp_rank, plan.cp_size, plan.local_rows, plan.key_rows) == (cp_rank, 2, 6, 12)
        assert plan.batch is batch and plan.window == (5, 0)
        wanted = brute_force(batch, 2, cp_rank, "dual_chunk", (5, 0))
        assert plan.rows.tolist() == wanted.rows and plan.positions.tolist() == wanted.positions
        assert plan.key_ranges.tolist() == wanted.key_ranges and plan.query_ranges.tolist() == wanted.query_ranges


def test_work_buffers_are_made_once_per_name_shape_and_dtype():
    plan = thdattn.CPAttention(thdattn.comm.init("single"), 1, 8, engine="reference").plan(thdattn.PackedBatch([0, 4]))
    buffer = plan.buffer("x", (3, 2), np.float32)
    assert buffer.shape == (3, 2) and buffer.dtype == np.float32
    assert plan.buffer("x", (3, 2), np.float32) is buffer
    for other in (plan.buffer("y", (3, 2), np.float32), plan.buffer("x", (2, 3), np.float32),
                  plan.buffer("x", (3, 2), np.float16)):
        assert other is not buffer and not np.shares_memory(other, buffer)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_plan_knows_whether_a_local_row_of_some_rank_holds_no_token(case):
    for cp_size in case.cp_sizes:
        batch = case.batch(cp_size)

        def plan_of(comm, case=case, batch=batch):
            attention = thdattn.CPAttention(comm, 1, 64, engine="reference")
            return attention.plan(batch, case.sharding)

        plans = thdattn.comm.run_local(cp_size, plan_of)
        holds_a_token = np.concatenate([plan.key_ranges[:, 1] > plan.key_ranges[:, 0] for plan in plans])
        assert {plan.has_local_padding for plan in plans} == {not holds_a_token.all()}
