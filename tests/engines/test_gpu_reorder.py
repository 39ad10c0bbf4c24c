"""thd_reorder and thd_peer_exchange between rank order and sequence order, in both directions, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from cases import BFLOAT16, SMALL, plan_with

import thdattn
from thdattn.comm import PeerExchange
from thdattn.engines import reference
from thdattn.jit.structs import MAX_RANKS, PEER_EXCHANGE, RANK_FLAGS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

NAMES = ("worked-example", "edge-lengths", "edge-lengths-contiguous", "capacity", "capacity-contiguous", "no-sequences",
         "no-sequences-slack", "fewer-tokens-than-ranks")
PACKS = [case for case in SMALL if case.name in NAMES]
# (heads, width) of k and of v: rows of 16 bytes and of odd multiples, less and more than the 512 bytes a warp moves.
WIDTHS = [((1, 8), (1, 8)), ((3, 8), (1, 24)), ((1, 264), (5, 72)), ((2, 128), (2, 64)), ((7, 88), (8, 256))]


def engines_and_plans(case, cp_size):
    from thdattn.engines import cuda

    sharding = thdattn.Sharding(case.batch(cp_size), cp_size, case.sharding)
    return [plan_with(engine, sharding, 0, (-1, 0), (64, 64), dims=case.dims) for engine in (reference, cuda)]


def distinct(rows, shape, dtype, first):
    """Bit patterns that differ from element to element, NaN among them, so that a move is compared byte by byte."""
    words = np.arange(first, first + rows * shape[0] * shape[1] * dtype.itemsize // 2, dtype=np.uint64)
    return (words * 40503 % 65521).astype(np.uint16).view(dtype).reshape(rows, *shape)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("float16"), np.dtype("float32")], ids=str)
@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize("case", PACKS, ids=str)
def test_both_directions_move_every_byte_as_numpy_does(cupy, case, cp_size, dtype):
    from thdattn.engines import cuda

    here, there = engines_and_plans(case, cp_size)
    owned = here.rank_order[here.rank_order >= 0]
    for k_shape, v_shape in WIDTHS:
        k, v = (distinct(len(here.rank_order), shape, dtype, i) for i, shape in enumerate((k_shape, v_shape)))
        wanted = reference.to_sequence_order([[k], [v]], here)
        moved = cuda.to_sequence_order([[cupy.asarray(k)], [cupy.asarray(v)]], there)
        for x, y in zip(moved, wanted, strict=True):
            assert x.shape == y.shape and x.dtype == dtype
            y[here.query_ranges[:, 0] == here.query_ranges[:, 1]] = 0  # rows that no local query sees
            assert x.get()[owned].tobytes() == y[owned].tobytes()

        k, v = (distinct(here.key_rows, shape, dtype, i + 7) for i, shape in enumerate((k_shape, v_shape)))
        wanted = reference.to_rank_order(k, v, here)
        moved = cuda.to_rank_order(cupy.asarray(k), cupy.asarray(v), there)
        for x, y in zip(moved, wanted, strict=True):
            assert x.get().tobytes() == y.tobytes()
            assert not x.get()[here.rank_order < 0].any()


@pytest.mark.parametrize("takes", [0, 1])
@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize("case", PACKS, ids=str)
def test_the_kernel_that_meets_other_ranks_offers_and_collects(cupy, case, cp_size, takes):
    """Rank 0, with what all others offer there already: it offers to each, or one part to all who read later."""
    from thdattn.engines import cuda

    here, there = engines_and_plans(case, cp_size)
    owned, rows = here.rank_order[here.rank_order >= 0], here.local_key_rows
    for k_shape, v_shape in WIDTHS:
        values = [distinct(len(here.rank_order), shape, BFLOAT16, i) for i, shape in enumerate((k_shape, v_shape))]
        wanted = reference.to_sequence_order([[x] for x in values], here)
        own, parts, offered = [cupy.asarray(x[:rows]) for x in values], [], []
        for x, mine in zip(values, own, strict=True):
            parts.append([cupy.asarray(x[rank * rows :][:rows]) for rank in range(cp_size)])
            parts[-1][0].view(np.uint8)[...] = 0xFF
            offered.append({rank: cupy.zeros_like(mine) for rank in (range(1, cp_size) if takes else [0])})
        to = [[x[rank].data.ptr if rank in x else 0 for rank in range(cp_size)] for x in offered]
        chunks = slice(32, 32 + rows)  # of one row each, behind the other flags
        mine, theirs = (cupy.zeros((cp_size, RANK_FLAGS.itemsize // 4), np.uint32) for _ in range(2))
        mine[:, 16], mine[1:, chunks], counts, marks = 1, 1, cupy.zeros(2, np.uint32), cupy.zeros(2, np.uint32)
        places = [*(x.data.ptr for x in theirs), *[0] * (MAX_RANKS - cp_size)]
        flags = np.array((places, mine.data.ptr, counts.data.ptr, 0, cp_size, takes), PEER_EXCHANGE)[()]
        moved = cuda.to_sequence_order(parts, there, own=own, peer_exchange=PeerExchange(flags, to, marks.data.ptr, 7))
        for x, y, its, places_of_it in zip(moved, wanted, own, offered, strict=True):
            y[here.query_ranges[:, 0] == here.query_ranges[:, 1]] = 0  # rows that no local query sees
            assert x.get()[owned].tobytes() == y[owned].tobytes()
            assert {place.get().tobytes() for place in places_of_it.values()} == {its.get().tobytes()}
        told = theirs.get()
        if rows:
            assert not mine.get().any() and not counts.get().any() and (marks.get() == 7).all()
            assert (told[:, 16] == takes).all() and (told[1:, chunks] == 1).all()
        assert told.sum() == bool(rows) * cp_size * takes + (cp_size - 1) * rows


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("float16"), np.dtype("float32")], ids=str)
@pytest.mark.parametrize("num_arrays", [1, 2, 3, 5])
def test_any_number_of_arrays_is_packed_and_fillers_become_zero(cupy, num_arrays, dtype):
    """Arrays of different heads and widths, as heads that were exchanged; all bytes are NumPy's."""
    from thdattn.engines import cuda

    order = np.random.default_rng(0).integers(-1, 203, 317).astype(np.int32)
    shapes = [(4, 128), (1, 64), (1, 8), (3, 264), (2, 96)][:num_arrays]
    xs = [distinct(203, shape, dtype, i) for i, shape in enumerate(shapes)]
    wanted, found = ([empty((317, *shape), dtype) for shape in shapes] for empty in (np.empty, cupy.empty))
    reference.pack_rows(xs, order, wanted)
    cuda.pack_rows([cupy.asarray(x) for x in xs], cupy.asarray(order), found)
    for x, y in zip(found, wanted, strict=True):
        assert x.get().tobytes() == y.tobytes() and not y[order < 0].any()
