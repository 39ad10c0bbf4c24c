"""Plan.shift: values of later tokens, against what each document alone gives, over ranks and for every sharding."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16, to_host
from ways import BY_NAME, TELLING, Way, attention, of

import thdattn
from thdattn.graphs import CudaGraphConfig, Graphs, StaticPack

DTYPES = (np.int32, np.int64, np.float32, BFLOAT16, np.uint8, np.complex128)
ONE_LEVEL = [Way("all_gather", sharding, size) for sharding in ("dual_chunk", "contiguous", "balanced")
             for size in (1, 2, 3, 4)]
SHIFTS = (1, 2, 5, 40, 10**6, -1, -7, 0)


def documents_of(batch, shape, dtype, seed=0):
    """Values of every document; none is one that rows without a token hold, or the fill."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 120, (int(n), *shape)).astype(dtype) for n in batch.lengths]


def poisoned(batch, rows, documents):
    """A rank's rows; what holds no token is NaN, or a number that no document has."""
    first = documents[0] if documents else np.zeros(0, np.int32)
    nothing = np.nan if first.dtype.kind not in "iu" else 200
    return filled(batch, rows, documents, np.full(first.shape[1:], nothing, first.dtype))


def filled(batch, rows, documents, fill):
    """A rank's rows, row by row; those without a token are fill."""
    token = {int(begin) + i: x for begin, document in zip(batch.cu_seqlens_padded[:-1], documents, strict=True)
             for i, x in enumerate(document)}
    made = [token.get(int(row), fill) for row in rows]
    return np.array(made, fill.dtype).reshape(len(rows), *fill.shape)


def later(documents, n, fill):
    """Every document alone, n tokens later."""
    made = []
    for document in documents:
        whole = np.broadcast_to(fill, document.shape).copy()
        for i in range(len(document)):
            if 0 <= i + n < len(document):
                whole[i] = document[i + n]
        made.append(whole)
    return made


def assert_shifts(way, batch, documents, shifts, fill, engine="reference", xp=np, place=None):
    """Shifts on all ranks are those of each document alone; place: what makes the batch that is planned."""
    dtype, shape = documents[0].dtype if documents else np.dtype(np.int32), documents[0].shape[1:] if documents else ()
    filling = np.full(shape, fill, dtype)
    case = replace(of(way, "causal"), dims=(64, 64))

    def program(comm):
        layer = attention(case, way, comm, BFLOAT16, engine=engine)
        plan = layer.plan(batch if place is None else place(batch), way.sharding)
        rows = to_host(plan.rows)
        x = xp.asarray(poisoned(batch, rows, documents))
        made = []
        for n in shifts:
            y = plan.shift(x, n, fill, None if comm.size == 1 and n % 2 else layer.comm)
            assert type(y) is type(x) and not xp.shares_memory(x, y)
            made.append(to_host(y))
        return rows, made

    for rows, made in thdattn.comm.run_local(way.cp_size, program):
        for n, y in zip(shifts, made, strict=True):
            wanted = filled(batch, rows, later(documents, n, filling), filling)
            assert (y.dtype, y.tobytes()) == (dtype, wanted.tobytes()), n


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("way", ONE_LEVEL, ids=str)
def test_shifts_are_those_of_every_document_alone(way, name):
    batch = way.batch(of(way, name))
    assert_shifts(way, batch, documents_of(batch, (), np.int32), SHIFTS, -1)


@pytest.mark.parametrize("way", TELLING, ids=str)
def test_shifts_of_every_method(way):
    for name in ("padded-between", "slack"):
        batch = way.batch(of(way, name))
        assert_shifts(way, batch, documents_of(batch, (), np.int64), (1, 3, -2), -100)


@pytest.mark.parametrize("seed", range(12))
def test_shifts_of_random_packs(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, rng.choice([3, 30, 90]), rng.integers(1, 12)) * rng.integers(0, 2)
    for way in ONE_LEVEL:
        batch = thdattn.PackedBatch.from_lengths(lengths, multiple=2 * way.cp_size * int(rng.integers(1, 3)))
        slack = thdattn.PackedBatch(batch.cu_seqlens, batch.cu_seqlens_padded, total_rows=batch.total_rows + 2 * seed)
        assert_shifts(way, slack, documents_of(slack, (), np.int32, seed), (1, int(rng.integers(-99, 99))), -1)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_shifts_of_every_dtype_and_shape(dtype, shape):
    way = Way("all_gather", "dual_chunk", 2)
    batch = way.batch(of(way, "padded-between"))
    for fill in (0, 7) if np.dtype(dtype).kind == "u" else (-1, 0):
        assert_shifts(way, batch, documents_of(batch, shape, dtype), (1, -3), fill)


def test_a_plan_of_a_mixer_and_one_of_other_keys_shift_too():
    comm = thdattn.comm.init("single")
    batch = thdattn.PackedBatch.from_lengths([4, 0, 2], 3)
    mixer = thdattn.Mamba2Mixer(comm, 2, 8, 16, dtype="float32", engine="reference")
    cross = thdattn.CPAttention(comm, 1, 8, causal=False, dtype="float32", engine="reference")
    for plan in (mixer.plan(batch), cross.plan(batch, key_batch=thdattn.PackedBatch.from_lengths([9, 1, 1]))):
        x = np.array([1, 2, 3, 4, 99, 99, 5, 6, 99])
        assert plan.shift(x).tolist() == [2, 3, 4, -1, -1, -1, 6, -1, -1]
        assert plan.shift(x.astype(float), fill=np.nan).tolist()[:3] == [2, 3, 4]


WRONG = {  # x by rank, n, fill; the error of one rank alone; its text
    "rows": ([np.zeros(6), np.zeros(5)], 1, -1, ValueError, r"x has shape \(5,\), wanted 6 rows; pass this rank's"),
    "no array": ([np.zeros(6), [0] * 6], 1, -1, TypeError, r"x is a builtins\.list, wanted a NumPy array"),
    "n": ([np.zeros(6)] * 2, [1, 1.5], -1, TypeError, r"n is 1\.5, a float; wanted an int"),
    "n beyond int32": ([np.zeros(6)] * 2, [1, 2**31], -1, ValueError, r"n is 2147483648, wanted <= 2147483647"),
    "fill": ([np.zeros(6)] * 2, 1, [0, None], TypeError, r"fill is None, a NoneType; wanted a number; pass"),
    "fill of ints": ([np.zeros(6, int)] * 2, 1, [0, 0.5], ValueError, r"fill is 0\.5, wanted a value of int64, the"),
    "fill is NaN": ([np.zeros(6, int)] * 2, 1, [0, np.nan], ValueError, r"fill is nan, wanted a value of int64"),
    "fill of bytes": ([np.zeros(6, np.uint8)] * 2, 1, [0, -1], ValueError, r"fill is -1, wanted a value of uint8"),
    "fill of flags": ([np.zeros(6, bool)] * 2, 1, [0, 2], ValueError, r"fill is 2, wanted a value of bool"),
    "a large fill": ([np.zeros(6, int)] * 2, 1, [0, 2**70], ValueError, r"fill is 1180\d+, wanted a value of int64"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(what):
    arrays, n, fill, kind, text = WRONG[what]
    shifts, fills = (x if isinstance(x, list) else [x, x] for x in (n, fill))
    batch = thdattn.PackedBatch.from_lengths([7, 3], 4)

    def program(comm):
        plan = thdattn.CPAttention(comm, 1, 8, engine="reference").plan(batch)
        with pytest.raises(ValueError, match=f"^rank 1: {text}"):
            plan.shift(arrays[comm.rank], shifts[comm.rank], fills[comm.rank], comm)

    thdattn.comm.run_local(2, program)
    alone = thdattn.CPAttention(thdattn.comm.init("single"), 1, 8, engine="reference").plan(
        thdattn.PackedBatch.from_lengths([6])
    )
    with pytest.raises(kind, match=f"^{text}"):
        alone.shift(arrays[1], shifts[1], fills[1])


def test_ranks_that_ask_for_different_shifts_and_other_comms_are_refused():
    batch = thdattn.PackedBatch.from_lengths([7, 3], 4)

    def program(comm):
        plan = thdattn.CPAttention(comm, 1, 8, engine="reference").plan(batch)
        x = np.zeros(6)
        for args, text in (
            ((x.astype([float, int][comm.rank]),), r"dtype is 'float64' \(rank 0\), 'int64' \(rank 1\)"),
            ((x.reshape(6, 1)[:, : comm.rank],), r"shape is \(6, 0\) \(rank 0\), \(6, 1\) \(rank 1\)"),
            ((x, 1 + comm.rank), r"n is 1 \(rank 0\), 2 \(rank 1\)"),
            ((x, 1, comm.rank), r"fill is '0\.0' \(rank 0\), '1\.0' \(rank 1\)"),
        ):
            with pytest.raises(ValueError, match=f"the call of shift is not the same on all ranks: {text}"):
                plan.shift(*args, comm=comm)
        with pytest.raises(TypeError, match="comm is a NoneType, wanted a Comm; pass that of the attention"):
            plan.shift(x)
        with pytest.raises(ValueError, match=r"comm is rank 0 of 1, wanted rank \d of 2 as the plan; pass the comm"):
            plan.shift(x, comm=thdattn.comm.init("single"))

    thdattn.comm.run_local(2, program)


# --- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("way", "dtype", "lengths_on_gpu"), [
    *((way, dtype, False) for way in [*ONE_LEVEL, Way("a2a", "contiguous", 2)] for dtype in DTYPES),
    *((way, np.int32, True) for way in ONE_LEVEL if way.sharding != "balanced"),
], ids=str)
def test_shifts_on_a_gpu(cupy, poisoned_gpu, way, dtype, lengths_on_gpu):
    def there(batch):
        offsets = map(cupy.asarray, (batch.cu_seqlens, batch.cu_seqlens_padded))
        return thdattn.PackedBatch(*offsets, total_rows=batch.total_rows)

    other, fill, place = ("causal", -1, there) if lengths_on_gpu else ("nothing-slack", 0, None)
    for name in ("padded-between", "slack", "empty-padded", other):
        batch = way.batch(of(way, name))
        assert_shifts(way, batch, documents_of(batch, (), dtype), (1, 40, -2), fill, "cuda", cupy, place)


@pytest.mark.gpu
def test_shifts_follow_lengths_that_change(cupy, poisoned_gpu):
    offsets = cupy.asarray([0, 4, 6], dtype=np.int32)
    layer = thdattn.CPAttention(thdattn.comm.init("single"), 1, 64, engine="cuda")
    plan = layer.plan(thdattn.PackedBatch(offsets, total_rows=7))
    x = cupy.arange(7)
    assert plan.shift(x).tolist() == [1, 2, 3, -1, 5, -1, -1]
    offsets[1] = 1
    plan.refresh()
    assert plan.shift(x).tolist() == [-1, 2, 3, 4, 5, -1, -1]
    offsets[1] = 7  # beyond the next one, which the GPU finds wrong
    plan.refresh()
    assert plan.shift(x).tolist() == [-1] * 7


@pytest.mark.gpu
def test_shifts_of_plans_that_a_graph_makes(cupy, poisoned_gpu):
    with thdattn.comm.init("single") as comm, cupy.cuda.Stream(non_blocking=True):
        layer = thdattn.CPAttention(comm, 1, 64, engine="cuda")
        graphs = Graphs(comm, CudaGraphConfig("local", max_packed_seqs=4, warmup_steps=1))
        pack, x = StaticPack(graphs, [layer], 12), cupy.arange(12)
        planned = graphs.captured(pack.plans, "plan")
        for lengths in ((4, 2), (1, 5, 3), (0, 3, 0, 3), (12,), ()):
            batch = thdattn.PackedBatch.from_lengths(lengths)
            pack.load([batch])
            (plan,) = planned()
            documents = [np.arange(begin, end) for begin, end in itertools.pairwise(batch.cu_seqlens)]
            wanted = filled(batch, range(12), later(documents, 2, np.array(-1)), np.array(-1))
            assert plan.shift(x, 2).tolist() == wanted.tolist()
