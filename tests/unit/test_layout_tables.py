"""Tables of balanced layouts within a capacity, read as kernels read them, and plans whose exchanges they fill up."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest
from cases import plan_with
from late_rows import come_late, hide_all

import thdattn
from thdattn import PackedBatch, Sharding
from thdattn.capacity import BalancedCapacity, LayoutSizes, LayoutTables, Mask
from thdattn.engines import reference
from thdattn.plan import layout_tables
from thdattn.plan.key_transfers import KEY_SIDE

WINDOWS = (-1, 0), (40, 0), (-1, -1)
TILES = 64, 32
MAX_RUNS, POISON = 300, -7


def random_pack(rng):
    lengths = rng.integers(0, 500, rng.integers(1, 12)) * (rng.random(1) < 0.9)
    batch = PackedBatch.from_lengths(lengths, multiple=int(rng.integers(1, 9)))
    return batch.padded_to(batch.total_rows + int(rng.integers(0, 60)))


def masks_of(windows, tiles=TILES):
    return tuple(Mask(window, tiles) for window in windows)


def capacity_of(sharding, masks, extra):
    """Return the capacity that a layout needs, and `extra` rows more of each kind."""
    least = layout_tables.needed_capacity(sharding, masks)
    signs = np.array([1, 1, -1, 1])
    return BalancedCapacity(*np.maximum(np.array(least) + extra * signs, 0).tolist())


def sizes_of(sharding, masks, capacity, max_runs=MAX_RUNS):
    return LayoutSizes(sharding.local_rows, max_runs, dict.fromkeys(masks, capacity))


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
        capacity = capacity_of(sharding, masks_of(WINDOWS), int(rng.integers(0, 30)))
        sizes = sizes_of(sharding, masks_of(WINDOWS), capacity)
        assert not layout_tables.excess(sharding, sizes)
        fixed = Sharding(sharding.batch, cp_size, "balanced", capacity=capacity)
        for rank in range(cp_size):
            words = np.full(sizes.num_words + 50, POISON, np.int32)
            tables = LayoutTables(words[:-50], sizes)
            layout_tables.write(sharding, rank, tables)
            assert (words[-50:] == POISON).all()
            for window in WINDOWS:
                plan = plan_with(reference, fixed, rank, window, TILES)
                arrays, lengths = plan.arrays, plan.key_side_sizes
                found = np.split(expanded(tables.key_side(plan.mask), sum(lengths)), np.cumsum(lengths)[:-1])
                for name, x in zip(KEY_SIDE, found, strict=True):
                    assert np.array_equal(x, getattr(arrays, name).ravel()), name
                for second, first, count in zip(
                        tables.second_tiles(plan.mask), plan.first_tiles, plan.num_first_tiles, strict=True):
                    assert np.array_equal(second, ~first) and first.sum() == count
                assert np.array_equal(expanded(tables.rows, cp_size * sharding.local_rows), arrays.all_rows)


@pytest.mark.usefixtures("poisoned_host")
@pytest.mark.parametrize(("cp_comm_type", "cp_size", "inner", "hidden"), [
    *(("all_gather", cp_size, 1, hidden) for cp_size in (2, 4) for hidden in (False, True)),
    ("p2p", 3, 1, False), *((kind, 4, 2, False) for kind in ("a2a+all_gather", "a2a+p2p")),
])
def test_a_larger_exchange_changes_no_bit(monkeypatch, cp_comm_type, cp_size, inner, hidden):
    """Rows that nobody needs are exchanged, too, and key buffers end with rows of the buffers before.

    hidden: rows come late, while a fixed number of tiles is computed, which NumPy rounds in another way.
    """
    rng = np.random.default_rng(cp_size)
    monkeypatch.setattr(reference, "tiles", lambda head_dim, v_head_dim: (8, 4))
    if hidden:
        come_late(monkeypatch)
        hide_all(monkeypatch)
    halves, dtype = [], np.dtype("float64" if hidden else "float32")
    for causal, window in ((True, (-1, -1)), (True, (40, 0)), (False, (-1, -1))):
        batch = random_pack(rng)
        tokens = [rng.standard_normal((batch.total_tokens, heads, 16), dtype) for heads in (4, 2, 2, 4)]
        packed = [np.full((batch.total_rows, *x.shape[1:]), np.nan, dtype) for x in tokens]
        rows = np.concatenate([np.arange(n) + first for n, first in zip(
            batch.lengths, batch.cu_seqlens_padded[:-1], strict=True)])
        for x, y in zip(packed, tokens, strict=True):
            x[rows] = y

        def program(comm, extra=None, causal=causal, window=window, batch=batch, packed=packed):
            levels = (comm.split(comm.rank // inner), comm.split(comm.rank % inner)) if inner > 1 else comm
            attention = thdattn.CPAttention(levels, 4, 16, 2, dtype=dtype.name, engine="reference", causal=causal,
                                            window=window, cp_comm_type=cp_comm_type)
            sharding = Sharding(batch, comm.size, "balanced", inner)
            if extra is not None:
                capacity = capacity_of(sharding.outer or sharding, masks_of([attention.window], (8, 4)), extra)
                sharding = Sharding(batch, comm.size, "balanced", inner, capacity)
            plan = attention.plan(batch, sharding)
            halves.extend((plan.core or plan).has_parts if extra else ())
            q, k, v, dout = map(plan.shard, packed)
            out, saved = attention.forward(q, k, v, plan)
            return out, saved.lse, *attention.backward(dout, saved)

        exact, same, larger = (thdattn.comm.run_local(cp_size, partial(program, extra=n)) for n in (None, 0, 23))
        for rank in range(cp_size):
            for wanted, x, y in zip(exact[rank], same[rank], larger[rank], strict=True):
                for found in x, y:
                    np.testing.assert_allclose(found, wanted, rtol=1e-9 * hidden, atol=1e-12 * hidden)
    assert sum(halves) > len(halves) // 4, "tiles of either part are there"


@pytest.mark.parametrize(("less", "message"), [
    ((1, 0, 0, 0), r"\d+ rows from one rank to another, wanted at most message_rows = \d+"),
    ((0, 1, 0, 0), r"\d+ rows that one rank's queries see, wanted at most key_rows = \d+"),
    ((0, 0, -64, 0), r"\d+ rows of queries that need no other rank, wanted at least early_queries = \d+"),
    ((0, 0, 0, 32), r"\d+ rows of keys in tiles of other ranks, wanted at most early_keys = \d+"),
])
def test_a_layout_that_exceeds_a_capacity_is_refused_on_every_rank(monkeypatch, less, message):
    monkeypatch.setattr(reference, "tiles", lambda head_dim, v_head_dim: TILES)
    batch, masks = PackedBatch.from_lengths([900, 40, 200]), masks_of([(-1, 0)])
    sharding = Sharding(batch, 2, "balanced")
    least = capacity_of(sharding, masks, 0)
    capacity = BalancedCapacity(*np.subtract(least, less).tolist())
    assert layout_tables.excess(sharding, sizes_of(sharding, masks, least, 2)) == "8 runs of rows, wanted at most 2"
    assert not layout_tables.excess(sharding, sizes_of(sharding, masks, least))
    over = layout_tables.excess(sharding, sizes_of(sharding, masks, capacity))
    assert re.fullmatch(message, over), over

    def program(comm):
        attention = thdattn.CPAttention(comm, 2, 8, dtype="float32", engine="reference")
        with pytest.raises(ValueError, match=f"rank [01]: the layout has {message}"):
            attention.plan(batch, Sharding(batch, 2, "balanced", capacity=capacity))
        attention.plan(batch, Sharding(batch, 2, "balanced", capacity=least))

    thdattn.comm.run_local(2, program)
