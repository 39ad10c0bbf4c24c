"""Static packs without a GPU: inactive ones on the reference engine, what fits, and what is refused."""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import fake_cupy
import numpy as np
import pytest
from test_layout_tables import expanded

import thdattn
from thdattn import PackedBatch, Sharding
from thdattn.capacity import BalancedCapacity, Mask
from thdattn.graphs import CudaGraphConfig, Graphs, StaticPack, capture
from thdattn.plan.key_transfers import split_key_side
from thdattn.plan.layout_tables import needed_capacity

ROWS, POISON = 96, -7


def attention(comm, num_heads=2, num_kv_heads=1, **options):
    return thdattn.CPAttention(comm, num_heads, 8, num_kv_heads, dtype="float32", engine="reference", **options)


def method(comm, cp_comm_type, inner):
    """Return an attention's arguments for a method; inner: neighbours, of two levels."""
    if inner:
        comm = comm.split(comm.rank // inner), comm.split(comm.rank % inner)
    return {"comm": comm, "cp_comm_type": cp_comm_type}


@pytest.mark.usefixtures("poisoned_host")
@pytest.mark.parametrize(("cp_comm_type", "sharding", "cp_size", "inner"), [
    *(("all_gather", sharding, cp_size, None) for sharding in ("dual_chunk", "contiguous") for cp_size in (1, 2, 4)),
    ("a2a", None, 2, None), ("a2a", "dual_chunk", 2, None), ("a2a+all_gather", None, 4, 2),
    ("a2a+all_gather", "contiguous", 2, 2), ("a2a+p2p", None, 4, 2),
    *((kind, sharding, cp_size, None) for kind, sharding in (("all_gather", "balanced"), ("p2p", "balanced"),
                                                             ("p2p", "contiguous")) for cp_size in (1, 2, 4)),
    *((kind, "balanced", 4, 2) for kind in ("a2a+all_gather", "a2a+p2p")),
])
def test_inactive_graphs_of_a_static_pack_are_the_plain_attention(cp_comm_type, sharding, cp_size, inner):
    """The loop of a program with graphs, on simulated ranks, beside the same without them."""
    rng = np.random.default_rng(0)
    batches = [PackedBatch.from_lengths(lengths, 2 * cp_size) for lengths in ([30, 7], [], [1] * 6, [64, 0, 3])]
    inputs = [rng.standard_normal((ROWS, heads, 8), np.float32) for heads in (4, 2, 2, 4)]

    def program(comm):
        graphs = Graphs(comm, CudaGraphConfig(impl="local", max_packed_seqs=6))
        assert not graphs.active
        spread = {"num_heads": 4, "num_kv_heads": 2, **method(comm, cp_comm_type, inner)}
        full, near = attention(**spread), attention(**spread, window=(5, 0))
        pack = StaticPack(graphs, [full, near], ROWS, sharding)
        pair = graphs.pair(lambda q, k, v: near.forward(q, k, v, pack.plans()[1]), near.backward, "layer")
        for batch in batches:
            assert pack.fits([batch])
            pack.load([batch])
            sharded = pack.sharding(batch)
            q, k, v, dout = (sharded.shard(x, comm.rank) for x in inputs)
            out, kept = pair.forward(q, k, v)
            found = out, *pair.backward(dout, kept)
            plan = near.plan(sharded.batch, sharded)
            out, saved = near.forward(q, k, v, plan)
            for x, wanted in zip(found, (out, *near.backward(dout, saved)), strict=True):
                assert x.tobytes() == wanted.tobytes()
            for made, alone in zip(pack.plans(), (full.plan(sharded.batch, sharded), plan), strict=True):
                assert made.batch.total_rows == ROWS
                for name, x in vars(alone.arrays).items():
                    assert x is None or np.array_equal(getattr(made.arrays, name), x), name
        assert graphs.num_overflows == 0

    thdattn.comm.run_local(cp_size, program)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_mixer_has_its_plan_from_a_static_pack_too(cp_size):
    """Alone, or that of a causal attention beside it."""
    rng = np.random.default_rng(0)
    batches = [PackedBatch.from_lengths(lengths) for lengths in ([30, 7], [], [1, 0, 95])]
    shapes = [(14, 4), (14,), (2,), (2,), (2,)]
    weights = thdattn.Mamba2Weights(*(rng.standard_normal(shape, np.float32) for shape in shapes))
    rows = rng.standard_normal((ROWS, 22), np.float32)

    def program(comm):
        mixer = thdattn.Mamba2Mixer(comm, 2, 3, 4, dtype="float32", engine="reference")
        graphs = Graphs(comm, CudaGraphConfig(impl="full_iteration"))
        packs = [StaticPack(graphs, [one], ROWS) for one in (mixer, attention(comm, 4, 2, cp_comm_type="a2a"))]
        for batch in batches:
            for pack in packs:
                assert pack.fits([batch])
                pack.load([batch])
            padded = PackedBatch(batch.cu_seqlens, batch.cu_seqlens_padded, total_rows=ROWS)
            plans = mixer.plan(padded), *(pack.plans()[0] for pack in packs)
            wanted, *outs = (mixer.forward(plan.shard(rows), weights, plan)[0].tobytes() for plan in plans)
            assert outs == [wanted] * 2

    thdattn.comm.run_local(cp_size, program)


def test_several_batches_are_loaded_at_once(comm):
    pack = StaticPack(Graphs(comm, CudaGraphConfig()), [attention(comm)], 40, num_batches=2)
    first, second = PackedBatch([0, 3, 9]), PackedBatch([0, 40])
    pack.load([first, second])
    for number in (1, 0, 1):
        (plan,) = pack.plans(number)
        np.testing.assert_array_equal(plan.batch.cu_seqlens, (first, second)[number].cu_seqlens)
    for batches in ([first], [first] * 3):
        with pytest.raises(ValueError, match=f"batches holds {len(batches)} batches, wanted num_batches = 2"):
            pack.load(batches)


@pytest.mark.parametrize("number", [-1, 1])
def test_a_batch_that_is_not_there_has_no_plans(comm, number):
    pack = StaticPack(Graphs(comm, CudaGraphConfig()), [attention(comm)], 40)
    with pytest.raises(ValueError, match=f"number is {number}, wanted [<>]= 0; batches are numbered from 0"):
        pack.plans(number)


def test_before_the_first_load_all_rows_are_padding(comm):
    (plan,) = StaticPack(Graphs(comm, CudaGraphConfig()), [attention(comm)], 40).plans()
    assert plan.local_rows == 40 and not plan.valid.any() and not plan.key_ranges.any()


@pytest.mark.parametrize(("lengths", "found"), [([1] * 5, "5 sequences, wanted at most 4"),
                                                ([50, 47], "97 rows, wanted at most 96")])
def test_overflow_runs_eagerly_and_is_counted_or_raises(comm, lengths, found):
    small, large = PackedBatch.from_lengths([3, 0, 90]), PackedBatch.from_lengths(lengths)
    eager, error = (CudaGraphConfig(max_packed_seqs=4, on_overflow=rule) for rule in ("eager", "error"))
    graphs = Graphs(comm, eager)
    pack = StaticPack(graphs, [attention(comm)], ROWS, num_batches=2)
    assert pack.fits([small, small]) and graphs.num_overflows == 0
    assert not pack.fits([large, small]) and not pack.fits([small, large]) and graphs.num_overflows == 2
    assert pack.fits([small, small]) and graphs.num_overflows == 2
    pack = StaticPack(Graphs(comm, error), [attention(comm)], ROWS, num_batches=2)
    assert pack.fits([small, small])
    with pytest.raises(ValueError, match=f"batch 1 has {found}, the room of the static pack"):
        pack.fits([small, large])
    with pytest.raises(ValueError, match=rf"batch 1 has {found}, the room of the static pack; ask fits\(\) first"):
        pack.load([small, large])  # nothing is ever cut off


def test_a_layout_beyond_its_capacity_does_not_fit_on_any_rank():
    """The documents are dealt as by any other balanced plan; only what ranks exchange is bounded."""
    alone, split = PackedBatch([0, 40, 80], total_rows=ROWS), PackedBatch([0, ROWS])

    def program(comm):
        graphs = Graphs(comm, CudaGraphConfig())
        for wrong, message in ((BalancedCapacity(-1, ROWS), "message_rows is -1, wanted >= 0"),
                               (BalancedCapacity(8, ROWS, early_queries=49), "early_queries is 49, wanted <= 48"),
                               (BalancedCapacity(8, ROWS, early_keys=-1), "early_keys is -1, wanted >= 0"),
                               ({(5, 0): BalancedCapacity(8, ROWS)}, r"for the windows \(5, 0\), wanted one for \(-1")):
            with pytest.raises(ValueError, match=message):
                StaticPack(graphs, [attention(comm)], ROWS, wrong)
        least, most = (StaticPack(graphs, [attention(comm)], ROWS, sharding)
                       for sharding in (BalancedCapacity(8, ROWS), "balanced"))
        assert most.balanced == {(-1, 0): (ROWS // 2, ROWS, 0, ROWS)}
        assert least.fits([alone]) and not least.fits([split])
        assert most.fits([alone]) and most.fits([split]) and graphs.num_overflows == 1
        with pytest.raises(ValueError, match=r"batch 0 has .* message_rows = 8, the room of the static pack; ask fits"):
            least.load([split])
        least.load([alone])
        (plan,) = least.plans()
        assert plan.routes.is_empty and plan.key_rows == 40

    thdattn.comm.run_local(2, program)


def test_every_mask_has_a_capacity_of_its_own():
    """Through a window ranks exchange few rows of a document that they share."""
    def program(comm):
        graphs, masks = Graphs(comm, CudaGraphConfig()), [attention(comm), attention(comm, window=(3, 0))]
        split = PackedBatch([0, ROWS])
        usual = StaticPack(graphs, masks, ROWS, "balanced")
        assert usual.balanced == {(-1, 0): (48, ROWS, 0, ROWS), (3, 0): (24, 72, 0, 72)}
        assert usual.fits([split])
        for rows, fits in ((6, True), (2, False)):
            capacities = {(-1, 0): BalancedCapacity(48, ROWS), (3, 0): BalancedCapacity(rows, ROWS)}
            assert StaticPack(graphs, masks, ROWS, capacities).fits([split]) == fits

    thdattn.comm.run_local(2, program)


def test_a_static_pack_takes_what_a_layout_needs_at_least():
    """Also where its last tile is not full."""
    def program(comm):
        graphs, layer, batch = Graphs(comm, CudaGraphConfig()), attention(comm), PackedBatch.from_lengths([45, 45])
        least = needed_capacity(Sharding(batch, 2, "balanced"), [Mask(layer.window, (32, 32))])
        assert least.early_queries == 45 and StaticPack(graphs, [layer], 90, least).balanced[layer.window] == least

    thdattn.comm.run_local(2, program)


@contextmanager
def filled(pack, behind=100):
    """Have an inactive pack upload as an active one, to host memory with poison behind it, and yield that."""
    words = np.full(2 * pack._slots + pack._sizes.num_words + behind, POISON, np.int32)
    pack._upload = SimpleNamespace(writing=lambda: nullcontext(words[:-behind]))
    pack._graphs = SimpleNamespace(active=True, config=pack._graphs.config, num_overflows=0)
    yield words
    assert (words[-behind:] == POISON).all()


@pytest.mark.parametrize(("cp_comm_type", "cp_size", "inner"), [
    ("all_gather", 3, None), ("p2p", 3, None), ("a2a+all_gather", 4, 2), ("a2a+p2p", 6, 2), ("a2a+all_gather", 4, 1),
])
def test_loaded_tables_are_the_arrays_of_the_plan_between_groups(cp_comm_type, cp_size, inner):
    rng = np.random.default_rng(cp_size)
    batches = [PackedBatch.from_lengths(rng.multinomial(ROWS - 9, rng.dirichlet(np.full(n, 0.3))))
               for n in (1, 2, 4, 8)]

    def program(comm):
        layer = attention(num_heads=4, num_kv_heads=2, **method(comm, cp_comm_type, inner))
        pack = StaticPack(Graphs(comm, CudaGraphConfig(max_packed_seqs=8)), [layer], ROWS, "balanced")
        (capacity,), (mask,) = pack.balanced.values(), pack._sizes.capacities
        for batch in batches:
            padded = pack.padded(batch)
            plan = layer.plan(padded, Sharding(padded, cp_size, "balanced", inner or 1, capacity))
            assert pack.fits([batch])
            with filled(pack) as words:
                pack.load([batch])
            offsets, nodes, tables = pack._parts(words[:-100])
            assert nodes is None and offsets.tolist() == padded.offsets(pack._slots).tolist()
            between = plan.core or plan
            assert expanded(tables.rows, between.cp_size * between.local_rows).tolist() == (
                between.arrays.all_rows.tolist())
            found = split_key_side(expanded(tables.key_side(mask), sum(between.key_side_sizes)), between.key_side_sizes)
            for name, x in found.items():
                assert x.tolist() == getattr(between.arrays, name).ravel().tolist(), name

    thdattn.comm.run_local(cp_size, program)


def test_a_pack_that_does_not_fit_writes_nowhere():
    """Of tables on a GPU, in host memory here, and behind them."""
    rng = np.random.default_rng(0)
    batches = [PackedBatch.from_lengths(rng.multinomial(ROWS, rng.dirichlet(np.full(n, 0.3))))
               for n in rng.integers(1, 12, 60)]

    def program(comm):
        pack = StaticPack(Graphs(comm, CudaGraphConfig(max_packed_seqs=8)), [attention(comm)], ROWS,
                          BalancedCapacity(24, 80))
        fitting = 0
        with filled(pack) as words:
            for batch in batches:
                before = words.copy()
                if pack.fits([batch]):
                    pack.load([batch])
                    fitting += 1
                    begins, values = pack._parts(words[:-100])[2].key_side(*pack._sizes.capacities)[0].reshape(2, -1)
                    assert begins[0] == 0 and (np.diff(begins.astype(np.int64)) >= 0).all()
                    used = values[begins < begins.max()]
                    assert used.min() == -1 and used.max() < ROWS
                else:
                    with pytest.raises(ValueError, match="ask fits"):
                        pack.load([batch])
                    assert np.array_equal(words, before)
        assert 5 < fitting < len(batches) - 5

    thdattn.comm.run_local(2, program)


def test_room_is_as_many_sequences_as_rows_unless_the_configuration_says_so(comm):
    def room(rows, **options):
        return StaticPack(Graphs(comm, CudaGraphConfig(**options)), [attention(comm)], rows).max_seqs

    assert (room(100), room(5000), room(100, max_packed_seqs=7)) == (100, 2048, 7)
    assert room(100, max_tokens_per_rank=100) == 100


def test_lengths_that_the_sharding_cannot_split_are_refused_as_they_are_loaded():
    def program(comm):
        pack = StaticPack(Graphs(comm, CudaGraphConfig()), [attention(comm)], ROWS)
        with pytest.raises(ValueError, match="sequence 1 has"):
            pack.load([PackedBatch([0, 8, 15])])

    thdattn.comm.run_local(2, program)


WRONG_PACKS = {
    "rows": ({"num_rows": 0}, ValueError, "num_rows is 0, wanted >= 1"),
    "rows-type": ({"num_rows": 9.5}, TypeError, "num_rows is 9.5"),
    "batches": ({"num_batches": 0}, ValueError, "num_batches is 0, wanted >= 1"),
    "attentions": ({"attentions": []}, ValueError, "attentions is empty"),
    "sharding": ({"sharding": "dual"}, ValueError, "'dual'"),
    "tokens": ({"num_rows": 97}, ValueError, "97 per rank, wanted at most max_tokens_per_rank = 96"),
}


@pytest.mark.parametrize("name", WRONG_PACKS)
def test_wrong_static_packs_are_refused(comm, name):
    wrong, kind, message = WRONG_PACKS[name]
    arguments = {"attentions": [attention(comm)], "num_rows": ROWS} | wrong
    with pytest.raises(kind, match=message):
        StaticPack(Graphs(comm, CudaGraphConfig(max_tokens_per_rank=96)), **arguments)


def test_rows_that_the_method_cannot_have_are_refused():
    def program(comm):
        graphs, layer = Graphs(comm, CudaGraphConfig(impl="local")), attention(comm, 4, 2, cp_comm_type="a2a")
        with pytest.raises(ValueError, match="sharding is 'balanced' and cp_comm_type 'a2a', wanted 'contiguous' or"):
            StaticPack(graphs, [layer], ROWS, "balanced")

    thdattn.comm.run_local(2, program)


def test_engines_that_no_graph_can_hold_are_refused(comm, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy.module())
    monkeypatch.setattr(capture, "choose_engine", lambda engine, comm: (SimpleNamespace(device="cuda"), "a fake"))
    with pytest.raises(ValueError, match="attentions holds one of engine 'reference', wanted 'cuda' as graphs are act"):
        StaticPack(Graphs(comm, CudaGraphConfig(impl="local")), [attention(comm)], ROWS)


def test_what_is_of_the_wrong_kind_is_named(comm):
    graphs = Graphs(comm, CudaGraphConfig())
    pack = StaticPack(graphs, [attention(comm)], ROWS)
    for message, call in (
        ("comm is None, a NoneType; wanted a Comm", lambda: Graphs(None, CudaGraphConfig())),
        ("config is 'local', a str; wanted a CudaGraphConfig", lambda: Graphs(comm, "local")),
        ("graphs is CudaGraphConfig.*; wanted a Graphs", lambda: StaticPack(CudaGraphConfig(), [], ROWS)),
        ("attentions is <CPAttention.*; wanted a Sequence; pass", lambda: StaticPack(graphs, attention(comm), ROWS)),
        ("batches is <PackedBatch.*; wanted a Sequence; pass a list", lambda: pack.fits(PackedBatch([0]))),
        ("batches is <PackedBatch.*; wanted a Sequence; pass a list", lambda: pack.load(PackedBatch([0]))),
    ):
        with pytest.raises(TypeError, match=message):
            call()


def test_captured_plans_have_room_for_the_nodes_that_the_configuration_says(comm):
    trees, documents = PackedBatch.from_trees([5, 0, 3], [-1, 0, 0]), PackedBatch.from_lengths([10] * 3)
    for most, active, message in (
        (None, False, ""), (3, False, ""), (3, True, ""),
        (2, False, "batch 0 has 3 nodes, wanted at most 2, the room of the static pack; ask fits"),
        (None, True, "batch 0 has trees, wanted sequences, as config.max_packed_nodes is None; ask fits"),
    ):
        config = CudaGraphConfig(impl="local", max_packed_nodes=most)
        pack = StaticPack(Graphs(comm, config), [attention(comm)], ROWS)
        pack._graphs = SimpleNamespace(active=active, config=config, num_overflows=0)
        assert pack.fits([trees]) is (not message) and pack.fits([documents]) is (most != 2), "a document is a node"
        if message:
            with pytest.raises(ValueError, match=message):
                pack.load([trees])
    pack = StaticPack(Graphs(comm, CudaGraphConfig(impl="local")), [attention(comm)], ROWS)
    pack.load([trees])
    assert pack.plans()[0].batch.parents.tolist() == [-1, 0, 0]
