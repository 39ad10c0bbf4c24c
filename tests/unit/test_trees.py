"""Prefix trees: nodes, paths, plans, counts and balanced rows, against rules that are written down independently."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
from cases import token_rows
from tree_cases import MIXED, TREES, random_case, sees, unrolled

import thdattn
from thdattn import CPAttention, PackedBatch, oracle
from thdattn.balance import balanced_runs
from thdattn.capacity import Mask
from thdattn.comm import run_local
from thdattn.costs import predicted
from thdattn.plan.key_transfers import foreign_tiles, needed_rows
from thdattn.plan.mask import visible_pairs
from thdattn.plan.node_table import node_table
from thdattn.plan.ranges import host_arrays

EVERY = pytest.mark.parametrize("case", [*TREES, *map(random_case, range(12))], ids=str)
CAUSAL = (-1, 0)


def attention(comm, **options):
    return CPAttention(comm, 2, 8, dtype="float64", engine="reference", **options)


def test_trees_worked_by_hand():
    batch = PackedBatch.from_trees([3, 2, 0, 4, 1, 5], [-1, 0, 0, 2, 2, -1], multiple=4)
    assert batch.cu_seqlens.tolist() == [0, 10, 15]
    assert batch.cu_seqlens_padded.tolist() == [0, 12, 20]
    assert batch.nodes.tolist() == [0, 3, 5, 5, 9, 10, 15]
    assert batch.parents.tolist() == [-1, 0, 0, 2, 2, -1]
    assert [path.tolist() for path in batch.paths()] == [
        [0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7, 8], [0, 1, 2, 9], [12, 13, 14, 15, 16]]
    plan = attention(thdattn.comm.init("single")).plan(batch)
    valid = plan.positions[plan.valid]
    assert valid.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 3, 0, 1, 2, 3, 4]
    assert repr(batch) == "<PackedBatch num_seqs=2, num_nodes=6, total_tokens=15, total_rows=20>"


def test_pack_and_unpack_take_one_array_per_node():
    lengths = [3, 2, 0, 4, 1, 5]
    batch = PackedBatch.from_trees(lengths, [-1, 0, 0, 2, 2, -1], multiple=4)
    nodes = [np.full(length, node) for node, length in enumerate(lengths)]
    rows = batch.pack(nodes, fill=-1)
    assert rows.tolist() == [0, 0, 0, 1, 1, 3, 3, 3, 3, 4, -1, -1, 5, 5, 5, 5, 5, -1, -1, -1]
    for node, again in zip(nodes, batch.unpack(rows), strict=True):
        np.testing.assert_array_equal(again, node)
    with pytest.raises(ValueError, match="arrays holds 2 arrays, wanted 6; pass one array per node"):
        batch.pack(nodes[:2])


@pytest.mark.parametrize(("lengths", "parents", "words"), [
    ([1, 1], [-1, 1], r"parents\[1\] is 1, wanted an earlier node or -1 .* order nodes depth first"),
    ([1, 1], [2, -1], r"parents\[0\] is 2, wanted an earlier node"),
    ([1], [-2], r"parents\[0\] is -2"),
    ([1] * 4, [-1, 0, 0, 1], r"parents\[3\] is 1, but the subtree of node 1 ends before node 2; wanted nodes depth"),
    ([1] * 3, [-1, -1, 0], r"parents\[2\] is 0, but the subtree of node 0 ends before node 1"),
    ([1, 2], [-1], r"parents has shape \(1,\), wanted \(2,\) as lengths"),
    ([3, -1], [-1, 0], r"lengths\[1\] is -1, wanted 0 <= length .* of every node"),
    ([[3]], [-1], r"lengths has shape \(1, 1\), wanted \(num_nodes,\); pass one length per node"),
    ([2**31 - 1, 1], [-1, 0], "lengths of nodes sum to 2147483648 rows, wanted < 2.*split the batch"),
])
def test_wrong_trees_are_refused_by_name(lengths, parents, words):
    with pytest.raises(ValueError, match=words):
        PackedBatch.from_trees(lengths, parents)


def test_parents_have_to_be_integers():
    with pytest.raises(TypeError, match="parents holds float64 values, wanted ints"):
        PackedBatch.from_trees([1, 2], [-1.0, 0.0])


def test_copies_keep_trees_and_nobody_can_write_to_them():
    batch = MIXED.batch(1)
    for other in (batch, copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch)),
                  batch.padded_to(999)):
        assert other.nodes.tolist() == batch.nodes.tolist() and other.parents.tolist() == batch.parents.tolist()
        for array in (other.nodes, other.parents):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1


def test_a_batch_without_trees_has_no_nodes_and_its_paths_are_sequences():
    batch = PackedBatch.from_lengths([3, 0, 2], multiple=4)
    assert batch.nodes is None and batch.parents is None
    assert [path.tolist() for path in batch.paths()] == [[0, 1, 2], [], [4, 5]]


@EVERY
def test_paths_are_the_ancestors_of_leaves(case):
    batch = case.batch(1)
    leaves = [node for node in range(len(case.lengths)) if node not in case.parents]
    paths = batch.paths()
    assert len(paths) == len(leaves)
    token = {row: i for i, row in enumerate(token_rows(batch).tolist())}
    seen = sees(case.lengths, case.parents)
    for path in paths:
        tokens = [token[row] for row in path.tolist()]
        if tokens:
            assert tokens == np.flatnonzero(seen[tokens[-1]]).tolist()


@EVERY
def test_plan_ranges_say_together_what_a_token_sees(case):
    for cp_size in (1, 3):
        batch = case.batch(cp_size)
        arrays = [host_arrays(thdattn.Sharding(batch, cp_size), rank, CAUSAL, (64, 64)) for rank in range(cp_size)]
        rows = token_rows(batch)
        seen = np.zeros((batch.total_rows + 1,) * 2, bool)
        for plan in arrays:
            query, key = np.arange(len(plan.rows))[:, None], np.arange(batch.total_rows)
            (begin, end), query_end = plan.key_ranges.T[..., None], plan.query_ranges[:, 1]
            seen[plan.rows, :-1] |= (key >= begin) & (key < end) & (query < query_end)
        np.testing.assert_array_equal(seen[np.ix_(rows, rows)], sees(case.lengths, case.parents))
        assert seen.sum() == sees(case.lengths, case.parents).sum(), "no padding sees or is seen"


def test_tiles_of_a_tree_follow_its_branches():
    """Tiles of one depth see as many rows, but other rows; two trees are few, and still come one after the other."""
    batch = PackedBatch.from_trees([8, 4, 4, 16, 8, 8, 16], [-1, 0, 0, -1, 3, 4, 3])
    plan = host_arrays(thdattn.Sharding(batch, 1), 0, CAUSAL, (8, 8))
    assert plan.key_tiles.tolist() == [[2, 3, 4, 5, 6, 7, 0, 1], [2, 3, 0, 4, 6, 1, 5, 7]]
    assert plan.query_tiles.tolist() == [[7, 6, 5, 4, 3, 2, 1, 0], [7, 6, 5, 4, 1, 3, 0, 2]]


@EVERY
def test_slices_of_a_ring_have_empty_ranges_exactly_where_no_key_is_seen(case):
    batch = case.batch(3)
    sharding = thdattn.Sharding(batch, 3)
    full = np.zeros((batch.total_rows + 1,) * 2, bool)
    full[np.ix_(token_rows(batch), token_rows(batch))] = sees(case.lengths, case.parents)
    for rank in range(3):
        for of in range(3):
            plan = host_arrays(sharding, rank, CAUSAL, (64, 64), keys_of=of)
            wanted = full[plan.rows][:, sharding.rows(of)]
            np.testing.assert_array_equal(plan.key_ranges[:, 0] < plan.key_ranges[:, 1], wanted.any(axis=1))
            np.testing.assert_array_equal(plan.query_ranges[:, 0] < plan.query_ranges[:, 1], wanted.any(axis=0))


@EVERY
def test_positions_count_from_the_root(case):
    batch = case.batch(2)
    wanted = sees(case.lengths, case.parents).sum(axis=1) - 1
    for rank in range(2):
        plan = host_arrays(thdattn.Sharding(batch, 2), rank, CAUSAL, (64, 64))
        found = np.full(batch.total_rows + 1, -1)
        found[token_rows(batch)] = wanted
        np.testing.assert_array_equal(plan.positions[plan.valid], found[plan.rows[plan.valid]])


@EVERY
def test_visible_pairs_and_flops_are_counted(case):
    batch, pairs = case.batch(1), int(sees(case.lengths, case.parents).sum())
    assert visible_pairs(batch, batch, CAUSAL) == pairs
    layer = attention(thdattn.comm.init("single"))
    assert layer.flops(batch) == layer.flops(layer.plan(batch)) == (4 * 2 * 8 * pairs, 10 * 2 * 8 * pairs)


@EVERY
def test_oracle_of_trees_is_that_of_the_paths(case):
    batch, rng = case.batch(1), np.random.default_rng(1)
    paths, rows = unrolled(batch)
    q, k, v, dout = rng.standard_normal((4, batch.total_rows, 2, 8))
    dout_paths = rng.standard_normal((len(rows), 2, 8))
    dout = np.zeros_like(q)
    np.add.at(dout, rows, dout_paths)
    tree = oracle.packed_attention(batch, q, k, v, dout)
    path = oracle.packed_attention(paths, q[rows], k[rows], v[rows], dout_paths)
    np.testing.assert_allclose(tree.out[rows], path.out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(tree.lse[:, rows], path.lse, rtol=1e-12, atol=1e-13)
    np.testing.assert_array_equal(tree.max_logit, path.max_logit)
    for name in ("dq", "dk", "dv"):
        summed = np.zeros_like(getattr(tree, name))
        np.add.at(summed, rows, getattr(path, name))
        np.testing.assert_allclose(getattr(tree, name), summed, rtol=1e-10, atol=1e-12)


@EVERY
@pytest.mark.parametrize("n", [0, -1, -3])
def test_shift_follows_the_path_to_the_root(case, n):
    def program(comm):
        batch = case.batch(comm.size)
        plan = attention(comm).plan(batch)
        return plan.unshard(plan.shift(plan.rows.astype(np.int64), n, fill=-7, comm=comm), comm), batch

    found, batch = run_local(2, program)[0]
    tokens = token_rows(batch)
    seen = sees(case.lengths, case.parents)
    for index, row in enumerate(tokens):
        path = tokens[seen[index]]
        assert found[row] == (path[n - 1] if len(path) > -n else -7)


@EVERY
@pytest.mark.parametrize("spare", [None, 3])
def test_the_table_of_nodes_says_what_is_above_and_below_each_token(case, spare):
    batch, seen = case.batch(2), sees(case.lengths, case.parents)
    num_columns = spare and np.count_nonzero(case.lengths) + spare
    table, rows = node_table(batch, num_columns), token_rows(batch)
    assert table.dtype == np.int32 and table.shape == (5, num_columns or np.count_nonzero(case.lengths) + 1)
    begins = batch.cu_seqlens_padded
    for index, row in enumerate(rows):
        tree = np.searchsorted(begins, row, side="right") - 1
        node = np.searchsorted(table[0], row, side="right") - 1
        first, behind, end, skipped, above = table[:, node]
        path = rows[seen[index]]
        assert first <= row < behind and end == rows[seen[:, index]][-1] + 1
        assert row - begins[tree] + skipped == len(path) - 1
        ancestors = path[path < first]
        assert above == (np.searchsorted(table[0], ancestors[-1], side="right") - 1 if len(ancestors) else -1)
    outside = np.arange(begins[-1], batch.total_rows)
    assert (np.searchsorted(table[0], outside, side="right") == table.shape[1]).all() and not table[1:4, -1].any()


def test_shift_to_later_tokens_is_refused_on_all_ranks():
    def program(comm):
        plan = attention(comm).plan(MIXED.batch(comm.size))
        with pytest.raises(ValueError, match=r"n is 1, but batch has trees: wanted n <= 0.*pass n=-1"):
            plan.shift(plan.rows, comm=comm)

    run_local(2, program)


@pytest.mark.parametrize("window", [(5, 0), (5, -1)])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_windows_are_refused_by_name(window, cp_size):
    def program(comm):
        layer = attention(comm, window=window)
        with pytest.raises(ValueError, match=r"window is \(5, 0\) and batch has trees, wanted a causal attention"):
            layer.plan(MIXED.batch(comm.size))
        with pytest.raises(ValueError, match="batch has trees"):
            layer.prepare(MIXED.batch(comm.size))

    run_local(cp_size, program)


def test_ranks_with_other_trees_are_told_so():
    batches = [PackedBatch.from_trees([4, 4, 4], parents) for parents in ([-1, 0, 0], [-1, 0, 1])]

    def program(comm):
        with pytest.raises(ValueError, match="parents"):
            attention(comm).plan(batches[comm.rank], "contiguous")
        with pytest.raises(ValueError, match=r"nodes|parents"):
            plain = PackedBatch.from_lengths([12])
            attention(comm).plan([plain, batches[0]][comm.rank], "contiguous")

    run_local(2, program)


def test_a_rank_whose_trees_are_refused_makes_all_raise():
    def program(comm):
        layer = attention(comm, window=(3, 0))
        with pytest.raises(ValueError, match="batch has trees"):
            layer.plan([PackedBatch.from_lengths([12]), PackedBatch.from_trees([12], [-1])][comm.rank], "contiguous")

    run_local(2, program)


ALONE, WHOLE = attention(thdattn.comm.init("single")), replace(MIXED, slack=0).batch(1)
PLAIN, KEYS = PackedBatch.from_lengths([3] * WHOLE.num_seqs), np.zeros((WHOLE.total_rows, 2, 8))
CROSS_TREES = "key_batch was passed and one of the batches has trees, wanted"


@pytest.mark.parametrize(("call", "message"), [
    (lambda: attention(thdattn.comm.init("single"), causal=False).plan(WHOLE),
     r"window is \(-1, -1\) and batch has trees, wanted a causal attention"),
    (lambda: ALONE.plan(WHOLE, key_batch=PLAIN), CROSS_TREES),
    (lambda: ALONE.plan(PLAIN, key_batch=WHOLE), CROSS_TREES),
    (lambda: ALONE.cache(WHOLE.num_seqs, 500).fill(KEYS, KEYS, ALONE.plan(WHOLE, "contiguous")),
     "plan is of trees, wanted one path per sequence of the cache"),
    (lambda: predicted(MIXED.batch(2), 2, num_heads=8, num_kv_heads=8, cp_comm_type="p2p", sharding="dual_chunk"),
     "batch has trees, wanted sequences, as the model"),
], ids=["full mask", "trees as queries", "trees as keys", "KV cache", "cost model"])
def test_what_takes_no_trees_says_so(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- balanced rows -----------------------------------------------------------------------------------------------


SMALL = [*TREES, *map(random_case, range(8))]


def rollouts(seed, prompt, fan, depth, mean, num_rows):
    """Trees of prompts with turns of lognormal lengths, `fan` of them at each of `depth` levels."""
    rng = np.random.default_rng(seed)
    lengths, parents = [], []

    def grow(parent, level, length):
        node = len(lengths)
        lengths.append(length)
        parents.append(parent)
        for _ in range(fan if level else 0):
            grow(node, level - 1, max(1, int(mean * np.exp(rng.normal(0, 0.6)))))

    while sum(lengths) < num_rows:
        grow(-1, depth, prompt)
    return thdattn.PackedBatch.from_trees(lengths, parents)


LARGE = {
    "answers": (1024, 8, 1, 1024), "many answers": (4096, 16, 1, 512), "turns": (512, 3, 4, 256),
    "long prompt": (16384, 8, 1, 2048), "documents": (1024, 1, 1, 1024),
}


@pytest.mark.parametrize("num_rows", [40_000, 200_000])
@pytest.mark.parametrize("name", LARGE)
def test_ranks_have_equal_rows_and_equal_visible_pairs(name, num_rows):
    batch = rollouts(0, *LARGE[name], num_rows)
    depth = np.concatenate([[0], np.cumsum(np.concatenate([
        first + np.arange(1, length + 1)
        for first, length in zip(batch.trees.depths.tolist(), np.diff(batch.nodes).tolist(), strict=True)]))])
    for cp_size in (2, 3, 4, 8, 16):
        runs = balanced_runs(batch, cp_size)
        assert np.bincount(runs.rank, runs.end - runs.begin).max() <= -(-batch.total_rows // cp_size)
        work = np.bincount(runs.rank, depth[runs.end] - depth[runs.begin], cp_size)
        assert work.max() <= 1.06 * work.mean()


@pytest.mark.parametrize("cp_size", [2, 3, 8])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_every_row_has_one_owner_and_runs_keep_to_their_tree(case, cp_size):
    batch = case.batch(cp_size)
    rows = np.concatenate([thdattn.Sharding(batch, cp_size, "balanced").rows(rank) for rank in range(cp_size)])
    assert np.sort(rows[rows >= 0]).tolist() == list(range(batch.total_rows))
    runs = balanced_runs(batch, cp_size)
    for begin, end, tree in zip(runs.begin, runs.end, runs.sequence, strict=True):
        if tree >= 0:
            first = batch.cu_seqlens_padded[tree]
            assert first <= begin < end <= first + batch.lengths[tree]


@pytest.mark.parametrize("cp_size", [2, 3, 8])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_rank_gets_exactly_the_keys_that_its_queries_see(case, cp_size):
    batch = case.batch(cp_size)
    sharding = thdattn.Sharding(batch, cp_size, "balanced")
    full = np.zeros((batch.total_rows + 1,) * 2, bool)
    tokens = token_rows(batch)
    full[np.ix_(tokens, tokens)] = sees(case.lengths, case.parents)
    needed = needed_rows(sharding, CAUSAL)
    for rank in range(cp_size):
        mine = sharding.rows(rank)
        seen = np.flatnonzero(full[mine].any(axis=0))
        assert needed.key_side(rank).filled()["rows_of_keys"].tolist() == seen.tolist()
        others = np.setdiff1d(seen, mine)
        queries, keys = foreign_tiles(sharding, Mask(CAUSAL, (16, 8)), rank)
        foreign = full[mine][:, others].any(axis=1)
        assert queries.tolist() == [bool(foreign[i : i + 16].any()) for i in range(0, len(mine), 16)]
        assert keys.tolist() == [bool(np.isin(seen[i : i + 8], others).any()) for i in range(0, len(seen), 8)]


def test_whole_trees_stay_on_one_rank_where_they_fit():
    batch = thdattn.PackedBatch.from_trees([300, 200, 200] * 8, [parent for i in range(8)
                                                                 for parent in (-1, 3 * i, 3 * i)])
    assert not needed_rows(thdattn.Sharding(batch, 4, "balanced"), CAUSAL).key_side(0).filled()["sends"].size
    for tree in range(8):
        assert len(set(balanced_runs(batch, 4).rank[balanced_runs(batch, 4).sequence == tree])) == 1
