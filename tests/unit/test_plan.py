"""The plan of a rank against brute force over every pair of rows, written from the rule on positions."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from cases import BIG, LONG, SMALL, Case, to_host, token_rows
from hypothesis import given, settings
from hypothesis import strategies as st

import thdattn
from thdattn.kernels.configs import TILES
from thdattn.plan.ranges import host_arrays
from thdattn.plan.workspace import FLOAT32, INT32, Buffer

WINDOWS = [(-1, -1), (-1, 0), (0, 0), (5, 0), (3, 40), (40, 3), (-1, 7), (7, -1), (100_000, 100_000)]


@dataclass
class Wanted:
    """rows, positions, valid, key_ranges, query_ranges of a rank, from the visibility of every pair."""

    rows: list[int]
    positions: list[int]
    valid: list[bool]
    key_ranges: list[list[int]]
    query_ranges: list[list[int]]


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
    rows = np.array(rows, int)
    return Wanted(rows.tolist(), position[rows].tolist(), valid[rows].tolist(), ranges(visible), ranges(visible.T))


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
        arrays = {name: x for name, x in vars(plan).items() if x is not None}
        assert all(x.dtype == (bool if name == "valid" else np.int32) for name, x in arrays.items())
        assert plan.valid.tolist() == wanted.valid
        assert_tiles(plan.query_tiles, batch, wanted.rows, wanted.key_ranges, tiles[0], batch.total_rows)
        assert_tiles(plan.key_tiles, batch, range(batch.total_rows), wanted.query_ranges, tiles[1], len(wanted.rows))
        gathered += wanted.rows
    for cp_rank in range(cp_size):
        assert host_arrays(shared, cp_rank, window, tiles).rank_order.tolist() == gathered


def assert_tiles(orders, batch, rows, ranges_of_rows, tile, num_others):
    """Every tile once, in either order: tiles of the longest sequence first, sequence by sequence, and there by falling
    span; by falling span. In their own order where these are equal. Both by span alone, where that is on average an
    eighth of the other side."""
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
    few = 8 * sum(spans) >= len(spans) * num_others
    assert orders[0].tolist() == sorted(tiles, key=lambda t: (not few and sequences[t], -spans[t], t))
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
    # Tiles of four query rows: 0-1 are of the sequence of 8 tokens, 2-6 of that of 20, 7-8 of that of 8 again, and then
    # there are none. But for those, the sequences would be few.
    by_span, orders = [6, 5, 4, 1, 3, 8, 0, 2, 7], [
        host_arrays(thdattn.Sharding(batch, 1), 0, (-1, 0), (4, 4)).query_tiles.tolist()
        for batch in (thdattn.PackedBatch([0, 8, 28, 36], total_rows=rows) for rows in (100, 36))]  # fmt: skip
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


@pytest.mark.parametrize("lengths", [(7, 3), (1,), (0, 5, 0)], ids=str)
def test_one_rank_takes_any_lengths_in_order(lengths):
    batch = thdattn.PackedBatch.from_lengths(lengths)
    plan = thdattn.CPAttention(thdattn.comm.init("single"), 1, 8, engine="reference").plan(batch)
    assert plan.sharding.strategy == "dual_chunk" and plan.rows.tolist() == list(range(batch.total_rows))


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
                 lambda: attention.plan(batch)):  # fmt: skip
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


class OnGpu:
    """What is asked of an array on a GPU."""

    def __init__(self, *values):
        self.values = np.array(values, np.int32)

    def get(self):
        return self.values


@pytest.mark.parametrize(("offsets", "keys", "cp_size", "message"), [
    (([0, 7, 10], [0, 7, 10]), None, 2, r"sequence 0 has padded length 7, wanted a multiple of 2\*cp_size = 4 .* to 8"),
    (([0, 6, 8], [0, 4, 12]), None, 1, r"sequence 0 has 6 tokens but cu_seqlens_padded leaves it 4 rows.* pad it to 6"),
    (([0, 8, 4], [0, 8, 4]), None, 1, r"cu_seqlens decreases from 8 at index 1 to 4 at index 2; .*pass the cumulative"),
    (([2, 8, 9], [0, 8, 9]), None, 1, r"cu_seqlens\[0\] is 2, wanted 0; put a 0 in front"),
    (([0, 8, 13], [0, 8, 13]), None, 1, r"total_rows is 12 but cu_seqlens_padded ends at 13; wanted at least that"),
    (([0, 8, 12], [0, 8, 12]), ([0, 9, 5], [0, 9, 9]), 1, r"cu_seqlens decreases from 9 at index 1 to 5 at index 2"),
    (([0, 8, 12], [0, 8, 12]), None, 1, r"wrong when they were planned, and have changed since; .*make a plan from"),
])  # fmt: skip
def test_wrong_lengths_are_named_as_on_the_host(offsets, keys, cp_size, message):
    pytest.importorskip("cupy")
    from thdattn.engines.cuda.plan import DeviceLengths

    batch = SimpleNamespace(total_rows=12)
    lengths = object.__new__(DeviceLengths)
    lengths.sharding = SimpleNamespace(batch=batch, cp_size=cp_size, strategy="dual_chunk")
    lengths.key_batch = batch
    lengths._offsets = [OnGpu(*x) for x in (*offsets, *(keys or offsets))]
    lengths._notice, lengths.wrong = SimpleNamespace(says_wrong=lambda: False), OnGpu(1)
    lengths.check(wait=False)
    with pytest.raises(ValueError, match=message) as caught:
        lengths.check(wait=True)
    assert "lengths on the GPU were" in str(caught.value) and "results of the plan are NaN" in str(caught.value)
    lengths.wrong = OnGpu(0)
    lengths.check(wait=True)


class Stream:
    """A stream of CUDA that writes down what it waits for."""

    def __init__(self, ptr, log, capturing=False):
        self.ptr, self.log, self.capturing = ptr, log, capturing

    def is_capturing(self):
        return self.capturing

    def record(self):
        return f"event of {self.ptr}"

    def wait_event(self, event):
        self.log.append(f"{self.ptr} waits for {event}")


def test_work_on_another_stream_comes_after_the_making_and_before_what_takes_the_memory(monkeypatch):
    pytest.importorskip("cupy")
    from thdattn.engines.cuda import plan as on_gpu

    log = []
    current = made_on = Stream(1, log)
    fake = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: current))
    monkeypatch.setattr(on_gpu, "cupy", fake)
    plan = thdattn.CPAttention(thdattn.comm.init("single"), 1, 8, engine="reference").plan(thdattn.PackedBatch([0, 4]))
    plan.enter()  # of NumPy: nothing to be ordered
    engine = SimpleNamespace(enter=on_gpu.enter, capture=lambda: None)
    made = replace(plan, arrays=replace(plan.arrays, stream=made_on), engine=engine)
    made.enter()
    current = Stream(3, log, capturing=True)
    made.enter()
    assert not log, "the stream that it was made on needs no order, and a capture can have none"
    for _ in range(2):
        current = Stream(2, log)
        made.enter()
    assert log == ["2 waits for event of 1"]
    del made
    assert log == ["2 waits for event of 1", "1 waits for event of 2"]


@pytest.mark.parametrize("call", ["refresh", "check"])
def test_what_is_asked_of_lengths_on_another_stream_comes_after_the_making(monkeypatch, call):
    pytest.importorskip("cupy")
    from thdattn.engines.cuda import plan as on_gpu

    log = []
    current = Stream(2, log)
    monkeypatch.setattr(on_gpu, "cupy", SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: current)))
    plan = thdattn.CPAttention(thdattn.comm.init("single"), 1, 8, engine="reference").plan(thdattn.PackedBatch([0, 4]))
    lengths = SimpleNamespace(made_in=None, make_again=lambda: log.append("refresh"), follow=lambda: log.append("late"),
                              check=lambda wait: log.append("check"))
    engine = SimpleNamespace(enter=on_gpu.enter, capture=lambda: None, plan_backward=lambda plan: None)
    made = replace(plan, arrays=replace(plan.arrays, lengths=lengths, stream=Stream(1, log)), engine=engine)
    if call == "check":
        made.check(wait=False)
        assert log == ["check"], "the host's memory is read, which costs nothing"
        log.clear()
    getattr(made, call)()
    assert log == ["2 waits for event of 1", call]


def test_work_buffers_are_made_once_per_declaration():
    plan = thdattn.CPAttention(thdattn.comm.init("single"), 1, 8, engine="reference").plan(thdattn.PackedBatch([0, 4]))
    buffer = plan.workspace.array(Buffer("x", (3, 2), FLOAT32))
    assert buffer.shape == (3, 2) and buffer.dtype == np.float32
    assert plan.workspace.array(Buffer("x", (3, 2), np.dtype(np.float32))) is buffer
    for other in (Buffer("y", (3, 2), FLOAT32), Buffer("x", (2, 3), FLOAT32), Buffer("x", (3, 2), INT32),
                  Buffer("x", (3, 2), FLOAT32, "part")):  # fmt: skip
        other = plan.workspace.array(other)
        assert other is not buffer and not np.shares_memory(other, buffer)


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
def test_tokens_before_all_padding_are_counted(strategy, cp_size):
    lengths = np.array([5, 0, 40, 7, 300]) * 2 * cp_size
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    for total_rows in (ends[-1], ends[-1] + 7, 3 * ends[-1]):
        sharding = thdattn.Sharding(thdattn.PackedBatch(ends, total_rows=total_rows), cp_size, strategy)
        for rank in range(cp_size):
            tokens = (sharding.rows(rank) >= 0) & (sharding.rows(rank) < ends[-1])
            assert tokens.tolist() == [row < sharding.leading_tokens(rank) for row in range(len(tokens))]


@pytest.mark.parametrize("strategy", ["dual_chunk", "contiguous", "balanced"])
@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_tokens_behind_padding_are_not_counted_as_leading(strategy, cp_size):
    lengths, padded = (2 * cp_size * np.array(x) for x in ((1, 8, 3, 40, 2), (3, 10, 3, 41, 9)))
    case = Case("gaps", tuple(lengths.tolist()), tuple(padded.tolist()))
    batch = case.batch(cp_size)
    sharding = thdattn.Sharding(batch, cp_size, strategy)
    is_token = np.isin(np.arange(batch.total_rows), token_rows(batch))
    found = []
    for rank in range(cp_size):
        rows, leading = sharding.rows(rank), sharding.leading_tokens(rank)
        tokens = (rows >= 0) & is_token[rows]
        assert leading is None or tokens.tolist() == [row < leading for row in range(len(rows))]
        found.append(leading)
    assert None in found


def padded_results(engine, attention, plan):
    """out, lse and gradients of a pack whose padding holds large finite numbers."""
    batch, rng, (head_dim, v_head_dim) = plan.batch, np.random.default_rng(0), plan.head_dims
    q, k, v, dout = (
        engine.xp.asarray(batch.pack([rng.standard_normal((n, heads, width)) for n in batch.lengths], fill=1e4)
                          .astype(attention.dtype))
        for heads, width in ((4, head_dim), (2, head_dim), (2, v_head_dim), (4, v_head_dim))
    )  # fmt: skip
    out, saved = attention.forward(q, k, v, plan)
    return [to_host(x).tobytes() for x in (out, saved.lse, *attention.backward(dout, saved))]


@pytest.mark.parametrize("dims", TILES, ids=str)
def test_finite_padding_needs_no_copies_and_changes_no_bit(engine, dims):
    attention = thdattn.CPAttention(thdattn.comm.init("single"), 4, dims[0], 2, dims[1], engine=engine.name,
                                    deterministic=True)  # fmt: skip
    batch = thdattn.PackedBatch([0, 40, 40, 260], [0, 48, 64, 300], total_rows=333)
    plan, finite = attention.plan(batch), attention.plan(batch, finite_padding=True)
    assert plan.has_unseen_keys and plan.has_masked_out_queries
    assert not finite.has_unseen_keys and not finite.has_masked_out_queries
    assert padded_results(engine, attention, plan) == padded_results(engine, attention, finite)


def test_finite_padding_is_a_bool():
    attention = thdattn.CPAttention(thdattn.comm.init("single"), 4, 8, engine="reference")
    with pytest.raises(TypeError, match="finite_padding is 'no'"):
        attention.plan(thdattn.PackedBatch([0, 4]), finite_padding="no")
