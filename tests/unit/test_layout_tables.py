"""Tables of balanced layouts within a capacity, read as kernels read them, and plans whose exchanges they fill up."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from cases import plan_with

import thdattn
from thdattn import PackedBatch, Sharding
from thdattn.capacity import BalancedCapacity, LayoutTables
from thdattn.engines import reference
from thdattn.plan import layout_tables
from thdattn.plan.key_transfers import KeySide, needed_rows

WINDOWS = (-1, 0), (40, 0), (-1, -1)
MAX_RUNS = 300


def random_pack(rng):
    lengths = rng.integers(0, 500, rng.integers(1, 12)) * (rng.random(1) < 0.9)
    batch = PackedBatch.from_lengths(lengths, multiple=int(rng.integers(1, 9)))
    return batch.padded_to(batch.total_rows + int(rng.integers(0, 60)))


def capacity_of(sharding, windows, extra):
    """Return the capacity that a layout needs, and `extra` rows more of each kind."""
    needed = [needed_rows(sharding.batch, sharding.cp_size, window, sharding.local_rows) for window in windows]
    most = [max(int(x.max()) for x in sizes) for sizes in zip(*((n.table, n.sizes) for n in needed), strict=True)]
    return BalancedCapacity(*(number + extra for number in most))


def expanded(table, size):
    """Return the array of a table in pieces, as thd_plan_runs does."""
    words, count = table
    begins, values = words[:count], words[count:]
    t = np.arange(size)
    piece = np.searchsorted(begins, t, side="right") - 1
    return np.where(values[piece] < 0, -1, values[piece] + t - begins[piece])


@pytest.mark.parametrize("cp_size", [2, 3, 8])
def test_tables_are_the_arrays_of_the_host(cp_size):
    rng = np.random.default_rng(cp_size)
    for _ in range(15):
        sharding = Sharding(random_pack(rng), cp_size, "balanced")
        capacity = capacity_of(sharding, WINDOWS, int(rng.integers(0, 30)))
        assert not layout_tables.excess(sharding, WINDOWS, capacity, MAX_RUNS)
        fixed = Sharding(sharding.batch, cp_size, "balanced", capacity=capacity)
        for rank in range(cp_size):
            words = np.concatenate(layout_tables.pack(sharding, rank, WINDOWS, capacity, MAX_RUNS))
            assert len(words) == LayoutTables.num_words(MAX_RUNS, WINDOWS)
            tables = LayoutTables(words, capacity, MAX_RUNS, WINDOWS)
            for window in WINDOWS:
                plan = plan_with(reference, fixed, rank, window, (64, 64))
                arrays, sizes = plan.arrays, plan.key_side_sizes
                found = np.split(expanded(tables.key_side(window), sum(sizes)), np.cumsum(sizes)[:-1])
                for name, x in zip(KeySide._fields, found, strict=True):
                    assert np.array_equal(x, getattr(arrays, name).ravel()), name
                assert np.array_equal(expanded(tables.rows, cp_size * sharding.local_rows), arrays.all_rows)


@pytest.mark.usefixtures("poisoned_host")
@pytest.mark.parametrize("cp_size", [2, 4])
def test_a_larger_exchange_changes_no_bit(cp_size):
    """Rows that nobody needs are exchanged, too, and key buffers end with rows of the buffers before."""
    rng = np.random.default_rng(cp_size)
    for causal, window in ((True, (-1, -1)), (True, (40, 0)), (False, (-1, -1))):
        batch = random_pack(rng)
        tokens = [rng.standard_normal((batch.total_tokens, heads, 16), np.float32) for heads in (4, 2, 2, 4)]
        packed = [np.full((batch.total_rows, *x.shape[1:]), np.nan, np.float32) for x in tokens]
        rows = np.concatenate([np.arange(n) + first for n, first in zip(
            batch.lengths, batch.cu_seqlens_padded[:-1], strict=True)])
        for x, y in zip(packed, tokens, strict=True):
            x[rows] = y

        def program(comm, extra=None, causal=causal, window=window, batch=batch, packed=packed):
            attention = thdattn.CPAttention(comm, 4, 16, 2, dtype="float32", engine="reference", causal=causal,
                                            window=window)
            sharding = Sharding(batch, comm.size, "balanced")
            if extra is not None:
                capacity = capacity_of(sharding, [attention.window], extra)
                sharding = Sharding(batch, comm.size, "balanced", capacity=capacity)
            plan = attention.plan(batch, sharding)
            q, k, v, dout = map(plan.shard, packed)
            out, saved = attention.forward(q, k, v, plan)
            return out, saved.lse, *attention.backward(dout, saved)

        exact, same, larger = (thdattn.comm.run_local(cp_size, partial(program, extra=n)) for n in (None, 0, 23))
        for rank in range(cp_size):
            for wanted, x, y in zip(exact[rank], same[rank], larger[rank], strict=True):
                assert wanted.tobytes() == x.tobytes() == y.tobytes()


@pytest.mark.parametrize(("less", "message"), [
    ((1, 0), r"\d+ rows from one rank to another, wanted at most message_rows = \d+"),
    ((0, 1), r"\d+ rows that one rank's queries see, wanted at most key_rows = \d+"),
])  # fmt: skip
def test_a_layout_that_exceeds_a_capacity_is_refused_on_every_rank(less, message):
    batch = PackedBatch.from_lengths([900, 40, 200])
    sharding = Sharding(batch, 2, "balanced")
    least = capacity_of(sharding, [(-1, 0)], 0)
    capacity = BalancedCapacity(*np.subtract(least, less).tolist())
    assert layout_tables.excess(sharding, [(-1, 0)], least, 2) == "8 runs of rows, wanted at most 2"

    def program(comm):
        attention = thdattn.CPAttention(comm, 2, 8, dtype="float32", engine="reference")
        with pytest.raises(ValueError, match=f"(?s)rank 0: the layout has {message}.*rank 1: the layout has {message}"):
            attention.plan(batch, Sharding(batch, 2, "balanced", capacity=capacity))
        attention.plan(batch, Sharding(batch, 2, "balanced", capacity=least))

    thdattn.comm.run_local(2, program)
