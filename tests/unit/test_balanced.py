"""Balanced sharding: rows and work of every rank, what its key buffer holds, and what travels; key buffers of one rank.

Against brute force over rows and pairs of rows, written from the rules.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from launch import SOURCE
from pairs import WINDOWS, assert_masked, places, plan_of, visible
from wrong_values import DeviceOffsets

import thdattn
from thdattn import PackedBatch, Sharding
from thdattn.balance import balanced_runs
from thdattn.engines import reference
from thdattn.plan.key_transfers import Routes, needed_rows
from thdattn.plan.plan import NO_ARRAYS, Plan
from thdattn.plan.workspace import total_bytes

CP_SIZES = (1, 2, 3, 4, 8)
REAL = SOURCE.parent / "benchmarks/doc_lengths.csv"
MOST_WORK = 1.08  # of the mean, where a rank has more than 512 rows


def adversarial_lengths(rng):
    """Packs that are hard to share out: few long ones, one giant, all equal, nearly none, many of all sizes."""
    kinds = {
        "random": lambda: rng.integers(0, 3000, rng.integers(1, 60)),
        "lognormal": lambda: np.exp(rng.normal(6.5, 1.4, rng.integers(1, 100))).clip(0, 20_000),
        "equal": lambda: np.full(rng.integers(1, 40), rng.integers(1, 2000)),
        "giants": lambda: np.append(rng.integers(5000, 30_000, rng.integers(1, 4)), rng.integers(0, 50, 100)),
        "one more than fits": lambda: np.full(rng.choice([3, 5, 9, 17]), rng.integers(300, 2000)),
        "tiny": lambda: rng.integers(0, 4, rng.integers(0, 20)),
        "powers": lambda: 2 ** rng.integers(0, 13, rng.integers(1, 40)),
    }
    kind = rng.choice(list(kinds))
    return kinds[kind]().astype(int)


def batch_of(lengths, padding=None, slack=0):
    cu_seqlens, padded = (np.cumsum([0, *x]).astype(np.int32) for x in (
        lengths, lengths if padding is None else np.add(lengths, padding)))
    return PackedBatch(cu_seqlens, padded, total_rows=int(padded[-1]) + slack)


def work_of(sharding):
    """Pairs of a query and a key that a causal mask leaves each rank."""
    _, position = places(sharding.batch)
    rows = [sharding.rows(rank) for rank in range(sharding.cp_size)]
    return np.array([(position[r[r >= 0]] + 1).sum() for r in rows])


def random_pack(rng):
    """Small packs with padding in and behind sequences, zero lengths, and fewer tokens than ranks."""
    num_seqs = int(rng.integers(0, 7))
    lengths = rng.integers(0, rng.choice([2, 8, 90]), num_seqs) * (rng.random(num_seqs) < rng.choice([0.5, 1]))
    return batch_of(lengths, rng.integers(0, 4, num_seqs) * rng.integers(0, 2), int(rng.choice([0, 0, 1, 30])))


PACKS = {
    "documents": batch_of([40, 7, 3, 90, 1, 0, 22]),
    "padding between and behind": batch_of([40, 7, 0, 90, 1], [3, 1, 4, 0, 7], 9),
    "one document": batch_of([160]),
    "equal": batch_of([16] * 16),
    "fewer tokens than ranks": batch_of([1, 0, 2]),
    "fewer tokens than ranks, padded": batch_of([1, 0, 2], [3, 3, 3], 5),
    "zero lengths": batch_of([0, 0, 0], [4, 0, 3]),
    "nothing": batch_of([]),
}


# --- who owns what -------------------------------------------------------------------------------------------------


def test_two_ranks_worked_by_hand():
    # 12 tokens, 6 rows each, and each should have 39 of the 78 pairs. The document fits no rank and is too short for
    # chunks of 256 rows, so it is folded: its last three rows and its first three have 10 + 11 + 12 + 1 + 2 + 3 = 39.
    sharding = Sharding(batch_of([12]), 2, "balanced")
    assert [sharding.rows(rank).tolist() for rank in (0, 1)] == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
    # Two documents of 6 tokens stay whole, the first on the first rank; padding fills up, the first rank first.
    sharding = Sharding(batch_of([6, 6], [1, 0], 2), 2, "balanced")
    first, second = [0, 1, 2, 3, 4, 5, 6, 13], [7, 8, 9, 10, 11, 12, 14, -1]
    assert [sharding.rows(rank).tolist() for rank in (0, 1)] == [first, second]


@pytest.mark.parametrize("seed", range(300))
def test_rows_and_work_are_even_for_any_pack(seed):
    rng = np.random.default_rng(seed)
    lengths, cp_size = adversarial_lengths(rng), int(rng.choice([2, 3, 4, 6, 8, 16]))
    padding = rng.integers(0, 40, len(lengths)) * int(rng.integers(0, 2))
    batch = batch_of(lengths, padding, int(rng.choice([0, 100])))
    sharding = Sharding(batch, cp_size, "balanced")
    rows = np.stack([sharding.rows(rank) for rank in range(cp_size)])
    owned = rows >= 0
    assert rows.shape == (cp_size, -(-batch.total_rows // cp_size)) and rows.dtype == np.int32
    assert (~owned).sum() < cp_size and (owned[:, 1:] <= owned[:, :-1]).all()
    assert all((np.diff(r[r >= 0]) > 0).all() for r in rows)
    assert np.sort(rows[owned]).tolist() == list(range(batch.total_rows))
    sequence, _ = places(batch)
    tokens = np.array([(sequence[r[r >= 0]] >= 0).sum() for r in rows])
    assert tokens.max() <= -(-batch.total_tokens // cp_size), "padding takes the place of no token"
    work = work_of(sharding)
    if batch.total_tokens > 512 * cp_size:
        assert work.max() <= MOST_WORK * work.mean()


def test_padding_comes_last_and_in_order():
    for batch in PACKS.values():
        for cp_size in CP_SIZES[1:]:
            sequence, _ = places(batch)
            by_rank = [sharding_rows[sharding_rows >= 0] for sharding_rows in (
                Sharding(batch, cp_size, "balanced").rows(rank) for rank in range(cp_size))]
            padding = np.concatenate([rows[sequence[rows] < 0] for rows in by_rank])
            assert padding.tolist() == np.flatnonzero(sequence < 0).tolist()
            full = [len(rows) == -(-batch.total_rows // cp_size) for rows in by_rank]
            last = max((rank for rank, rows in enumerate(by_rank) if (sequence[rows] < 0).any()), default=0)
            assert all(full[:last]), "a rank is full before the next one gets padding"


@pytest.mark.parametrize(("inner", "outer"), [*((1, size) for size in CP_SIZES), (2, 2), (2, 4)])
def test_one_document_is_dual_chunk(inner, outer):
    batch, cp_size = batch_of([2 * outer * 300]), inner * outer
    for rank in range(cp_size):
        balanced, chunks = (Sharding(batch, cp_size, strategy, inner) for strategy in ("balanced", "dual_chunk"))
        assert balanced.rows(rank).tolist() == chunks.rows(rank).tolist()


def test_documents_stay_on_few_ranks():
    batch = batch_of([2048] * 3 + [512] * 40 + [64] * 100)
    sharding = Sharding(batch, 8, "balanced")
    sequence, _ = places(batch)
    ranks = [sum((sequence[sharding.rows(rank)] == number).any() for rank in range(8)) for number in range(143)]
    assert min(ranks[:3]) > 1, "2,048 tokens have more than one rank's work"
    assert np.mean(np.array(ranks[3:]) == 1) > 0.8, "others have less"


def test_work_is_even_without_sharing_the_longest():
    # On two ranks the longest has 0.92 of a rank's work. Beside whole ones its rank would have 1.12 of the mean work,
    # and were it shared, ranks would get 3,200 rows of keys.
    lengths = [3714, 2617, 1592, 1059, 1009, 953, 901, 883, 860, 852, 768, 345, 109, 101, 64, 43, 27, 18]
    batch = batch_of(lengths)
    sharding = Sharding(batch, 2, "balanced")
    work = work_of(sharding)
    assert work.max() <= MOST_WORK * work.mean()
    for rank in (0, 1):
        rows = sharding.rows(rank)
        seen = visible(batch, rows, np.arange(batch.total_rows), (-1, 0)).any(axis=0)
        assert seen.sum() - (rows >= 0).sum() <= 1500


def documents_of(kind, total):
    """Lengths of real documents, of a log-normal distribution, or of few equal ones, `total` tokens together."""
    rng = np.random.default_rng(len(kind))
    if kind == "equal":
        return np.full(4, total // 4)
    if kind == "log-normal":
        lengths = np.exp(rng.normal(7.5, 1.4, total // 500)).astype(int) + 1
    else:
        low, high, share = np.loadtxt(REAL, delimiter=",", skiprows=2).T
        bins = rng.choice(len(low), total // 500, p=share / share.sum())
        lengths = rng.integers(low[bins], high[bins], endpoint=True)
    ends = np.minimum(np.cumsum(lengths), total)
    return np.diff(ends[: np.searchsorted(ends, total) + 1], prepend=0)


@pytest.mark.parametrize("cp_size", [24, 64, 256, 1024])
@pytest.mark.parametrize("kind", ["real", "log-normal", "equal"])
def test_documents_are_stretched_over_many_ranks(kind, cp_size):
    lengths = documents_of(kind, 2**20)
    batch = batch_of(lengths)
    begin = time.process_time()
    runs = balanced_runs(batch, cp_size)
    needed = needed_rows(Sharding(batch, cp_size, "balanced"), (-1, 0))
    Routes.of(needed, cp_size - 1)
    assert time.process_time() - begin < 1, "host time of a pack"

    order = np.argsort(runs.begin)
    assert runs.begin[order].tolist() == [0, *runs.end[order][:-1].tolist()] and runs.end.max() == lengths.sum()
    rows = np.bincount(runs.rank, runs.end - runs.begin, minlength=cp_size)
    assert rows.max() <= -(-lengths.sum() // cp_size)
    positions = runs.begin - batch.cu_seqlens[runs.sequence], runs.end - batch.cu_seqlens[runs.sequence]
    pairs = [x * (x + 1) // 2 for x in positions]
    work = np.bincount(runs.rank, pairs[1] - pairs[0], minlength=cp_size)
    assert work.max() <= 1.05 * work.mean()
    received = needed.sizes - rows
    assert received.max() <= 2.5 * lengths.max() and needed.num_sent.max() <= 2.5 * lengths.max()


def test_rows_are_the_same_in_a_second_process():
    program = (
        "import hashlib, numpy as np, thdattn\n"
        "lengths = np.exp(np.random.default_rng(3).normal(6, 1.5, 300)).astype(int)\n"
        "sharding = thdattn.Sharding(thdattn.PackedBatch.from_lengths(lengths, 3), 8, 'balanced')\n"
        "print(hashlib.sha256(b''.join(sharding.rows(rank).tobytes() for rank in range(8))).hexdigest())\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True,
                         env={**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONHASHSEED": "7"})
    lengths = np.exp(np.random.default_rng(3).normal(6, 1.5, 300)).astype(int)
    sharding = Sharding(PackedBatch.from_lengths(lengths, 3), 8, "balanced")
    here = hashlib.sha256(b"".join(sharding.rows(rank).tobytes() for rank in range(8))).hexdigest()
    assert run.stdout.strip() == here


def test_lengths_on_a_gpu_are_refused():
    batch = PackedBatch(DeviceOffsets(3), total_rows=8)
    with pytest.raises(ValueError, match=r"sharding 'balanced' needs the offsets on the host, .*; build the Packed"):
        Sharding(batch, 2, "balanced")
    assert Sharding(batch, 1, "balanced").local_rows == 8


# --- what travels ---------------------------------------------------------------------------------------------------


def assert_needed_rows(batch, cp_size, window):
    sharding = Sharding(batch, cp_size, "balanced")
    plans = [plan_of(sharding, rank, window) for rank in range(cp_size)]
    rows = [np.asarray(plan.rows) for plan in plans]
    whole = np.arange(batch.total_rows)
    for rank, plan in enumerate(plans):
        arrays, routes = plan.arrays, plan.routes
        keys = np.flatnonzero(visible(batch, rows[rank], whole, window).any(axis=0))
        assert arrays.rows_of_keys.tolist() == keys.tolist() and plan.key_rows == len(keys)
        assert_masked(arrays, batch, rows[rank], keys, window, (16, 8))
        assert arrays.all_rows.tolist() == np.concatenate(rows).tolist()
        assert not plan.has_unseen_keys

        # What arrives is, in this order, the rows of the buffer that it is said to be; with its own they are all.
        received = [np.intersect1d(rows[peer], keys) for peer in range(cp_size)]
        arrived = np.concatenate([received[peer] for peer in range(cp_size) if peer != rank])
        assert plan.first_own == routes.num_received == len(arrived)
        assert keys[arrays.rank_order[: len(arrived)]].tolist() == arrived.tolist()
        own = arrays.rank_order[plan.first_own :]
        assert len(own) == plan.local_rows
        assert (own >= 0).tolist() == np.isin(rows[rank], keys).tolist()
        assert keys[own[own >= 0]].tolist() == rows[rank][own >= 0].tolist()
        assert np.sort(arrays.rank_order[arrays.rank_order >= 0]).tolist() == list(range(len(keys)))
        assert routes.received.tolist() == [len(x) if peer != rank else 0 for peer, x in enumerate(received)]

        # What it sends to a peer is what the peer is said to get, and comes back where it was sent from.
        wanted, first = np.full((cp_size, plan.local_rows), -1), 0
        for peer, other in enumerate(plans):
            assert routes.table.tolist() == other.routes.table.tolist()
            if peer == rank:
                wanted[peer] = own
                continue
            sent = arrays.sends[first : first + routes.sent[peer]]
            assert rows[rank][sent].tolist() == np.intersect1d(rows[rank], other.arrays.rows_of_keys).tolist()
            wanted[peer, sent] = np.arange(first, first + len(sent))
            first += len(sent)
        assert first == len(arrays.sends) == routes.num_sent
        assert arrays.returns.tolist() == wanted.tolist()
        mine_alone, mine = np.full(len(keys), -1), (np.delete(wanted, rank, axis=0) < 0).all(axis=0) & (own >= 0)
        mine_alone[own[mine]] = np.flatnonzero(mine)
        assert arrays.places.tolist() == mine_alone.tolist()


@pytest.mark.parametrize("cp_size", CP_SIZES[1:])
@pytest.mark.parametrize("name", PACKS)
def test_needed_rows_are_those_that_some_query_sees(name, cp_size):
    for window in WINDOWS:
        assert_needed_rows(PACKS[name], cp_size, window)


@pytest.mark.parametrize("seed", range(100))
def test_needed_rows_of_any_pack(seed):
    rng = np.random.default_rng(seed)
    window = WINDOWS[seed % 2] if seed % 3 else tuple(rng.integers(-1, 40, 2).tolist())
    assert_needed_rows(random_pack(rng), int(rng.choice(CP_SIZES[1:])), window)


@pytest.mark.parametrize("seed", range(8))
def test_needed_rows_of_many_ranks(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, rng.choice([3, 40, 300]), int(rng.integers(1, 12)))
    assert_needed_rows(batch_of(lengths, rng.integers(0, 3, len(lengths)), 7), int(rng.integers(17, 40)),
                       WINDOWS[seed % 4])


def test_other_shardings_gather_all_rows():
    batch = batch_of([32, 48])
    for strategy, cp_size in (("dual_chunk", 2), ("contiguous", 2), ("balanced", 1)):
        sharding = Sharding(batch, cp_size, strategy)
        plan = plan_of(sharding, cp_size - 1, (-1, 0))
        assert plan.routes is plan.arrays.sends is plan.arrays.returns is plan.arrays.rows_of_keys is None
        assert plan.key_rows == 80 and plan.first_own == (cp_size - 1) * 40
        assert plan.rank_order.tolist() == plan.arrays.all_rows.tolist()


# --- the key buffer is the rows of one rank ---------------------------------------------------------------------------


def assert_slices(batch, cp_size, strategy, window):
    sharding = Sharding(batch, cp_size, strategy)
    for rank in range(cp_size):
        counted = 0
        for peer in range(cp_size):
            plan = plan_of(sharding, rank, window, keys_of=peer)
            arrays, keys = plan.arrays, sharding.rows(peer)
            assert arrays.rows_of_keys.tolist() == keys.tolist() and plan.key_rows == len(keys) == plan.local_key_rows
            seen = assert_masked(arrays, batch, sharding.rows(rank), keys, window, (16, 8))
            assert arrays.rank_order is arrays.sends is arrays.returns is None
            counted += int(seen.sum())
        assert counted == int(visible(batch, sharding.rows(rank), np.arange(batch.total_rows), window).sum())


@pytest.mark.parametrize("cp_size", CP_SIZES)
@pytest.mark.parametrize("strategy", ["dual_chunk", "contiguous", "balanced"])
def test_slices_of_the_ring_hold_what_is_visible_of_them(strategy, cp_size):
    multiple = 2 * cp_size
    lengths = np.array([33, 0, 90, 7, 1])
    padding = -lengths % multiple + multiple * np.array([0, 1, 0, 2, 0])
    for window in WINDOWS:
        assert_slices(batch_of(lengths, padding, 5), cp_size, strategy, window)
    assert_slices(batch_of([1, 0, 2], -np.array([1, 0, 2]) % multiple), cp_size, strategy, (-1, 0))


# --- moves of rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("keys_of", [None, 0])
def test_bytes_of_a_plan_are_those_of_its_arrays(cp_size, keys_of):
    for batch in PACKS.values():
        sharding = Sharding(batch, cp_size, "balanced")
        plan = plan_of(sharding, cp_size - 1, (-1, 0), keys_of=keys_of)
        arrays = {id(x): x for x in vars(plan.arrays).values() if x is not None}
        shared = {id(sharding.rows(0))} if cp_size > 1 else set()  # the sharding has them anyway
        wanted = sum(x.nbytes for i, x in arrays.items() if i not in shared)
        assert total_bytes(reference.plan_buffers(plan).values()) == wanted


def test_a_plan_that_is_asked_for_sizes_alone_knows_them():
    batch = PACKS["documents"]
    for rank in range(4):
        sharding = Sharding(batch, 4, "balanced")
        made = plan_of(sharding, rank, (-1, 0))
        plan = Plan(sharding, rank, (-1, 0), (8, 8), (16, 8), NO_ARRAYS, reference, sharding.batch)
        assert (plan.key_rows, plan.first_own) == (len(made.arrays.rows_of_keys), made.first_own)
        assert plan.num_tiles[1] == made.arrays.key_tiles.shape[1]


def test_documents_that_are_whole_on_ranks_neither_travel_nor_are_kept():
    def program(comm):
        attn = thdattn.CPAttention(comm, num_heads=2, head_dim=8, dtype="float32")
        plan = attn.plan(batch_of([32] * 4), "balanced")
        q, k, v = np.random.default_rng(comm.rank).standard_normal((3, plan.local_rows, 2, 8), np.float32)
        before = comm.received_bytes
        out, saved = attn.forward(q, k, v, plan)
        attn.backward(out, saved)
        assert plan.local_rows == 64 and plan.is_apart and comm.received_bytes == before
        assert saved.keys is None and not attn.can_gather(plan)

    thdattn.comm.run_local(2, program)
