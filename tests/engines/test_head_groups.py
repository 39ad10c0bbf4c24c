"""Keys gathered group of heads by group of heads, kept or gathered again, asked for early: the same results."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
from cases import BFLOAT16, CASES, FIELDS, local_rows, random_inputs, run

import thdattn
from thdattn.costs.model import OnPaper
from thdattn.methods.all_gather import IN_FLIGHT
from thdattn.plan.build import description

FLOAT64 = np.dtype("float64")


@pytest.mark.parametrize("cp_size", [2, 3])
def test_results_do_not_depend_on_how_keys_come(cp_size):
    case = CASES["gqa-12-2"]
    wanted = run(case, cp_size, BFLOAT16, engine="reference", head_groups=1, keep_keys=False)
    found = run(case, cp_size, BFLOAT16, engine="reference", head_groups=2, keep_keys=True)
    for field in FIELDS:
        assert found.tokens[field].tobytes() == wanted.tokens[field].tobytes(), field


def test_groups_divide_the_kv_heads():
    with pytest.raises(ValueError, match="head_groups is 3, not a divisor of num_kv_heads = 4"):
        thdattn.CPAttention(thdattn.comm.init("single"), 8, 16, 4, head_groups=3)


@pytest.mark.parametrize(("kv_heads", "groups"), [(1, (1,)), (2, (1, 1)), (3, (1, 1, 1)), (4, (1, 1, 2)),
                                                  (6, (1, 2, 3)), (8, (1, 3, 4)), (64, (8, 24, 32))])
def test_groups_grow_where_much_travels_beside_kernels(kv_heads, groups):
    def made(rows, **options):
        batch = thdattn.PackedBatch.from_lengths([2 * rows])
        return default_groups(OnPaper(0, 2, per_node=2), batch, kv_heads, kv_heads, **options)

    enough = -(-(2**26) // (kv_heads * 1024)) * 2  # rows that a rank gets, an even number, 512 bytes of each head
    assert made(enough) == groups
    assert made(enough - 2) == made(enough, head_groups=1) == (kv_heads,)
    assert made(enough, head_groups=kv_heads) == (1,) * kv_heads


@pytest.mark.parametrize(("lengths", "between_machines", "groups"), [
    ([65536], False, 1),  # 128 MiB, but 131,000 operations a byte
    ([8192], False, 1),  # 16,000 operations a byte, but 16 MiB
    ([16384] * 2, False, 1),  # 33,000 operations a byte and 64 MiB, too little for two groups
    ([16384] * 4, False, 2),
    ([16384] * 8, False, 4),
    ([16384] * 16, False, 8),
    ([16384] * 32, False, 8),
    ([32768] * 4, False, 1),  # 66,000 operations a byte
    ([65536], True, 8),
    ([8192], True, 4),
    ([4096], True, 2),
    ([2048], True, 1),
    ([2**19], True, 1),  # 1,050,000 operations a byte, of which those between machines count 16 times
], ids=str)
def test_groups_over_nccl_follow_the_share_of_the_exchange(lengths, between_machines, groups):
    comm = over_nccl(between_machines)
    assert default_groups(comm, thdattn.PackedBatch.from_lengths(lengths), 32, 8) == (8 // groups,) * groups


@pytest.mark.parametrize(("pairs", "groups"), [(2**30, 4), (2**33, 1), (None, 1)])
def test_groups_over_nccl_follow_expected_pairs_or_else_one_long_sequence(pairs, groups):
    layer, plan = outline(over_nccl(False), thdattn.PackedBatch.from_lengths([16384] * 8), 32, 8)
    vars(plan)["expected_pairs"] = pairs  # as with lengths on a GPU
    assert layer._groups(plan) == (8 // groups,) * groups


def test_ranks_agree_on_the_expected_lengths_that_decide_on_groups():
    _, plan = outline(over_nccl(False), thdattn.PackedBatch.from_lengths([16384] * 8), 32, 8)
    on_gpu = SimpleNamespace(on_device=True, described=dict)
    one, same, other = (
        description(SimpleNamespace(sharding=plan.sharding, core=None, is_cross=False, batch=on_gpu,
                                    like=thdattn.PackedBatch.from_lengths(lengths)), {})
        for lengths in ([4, 8], [4, 8], [8, 4]))
    np.testing.assert_equal(one, same)
    with pytest.raises(AssertionError):
        np.testing.assert_equal(one, other)


def over_nccl(between_machines):
    """One of two ranks whose keys NCCL carries."""
    comm = OnPaper(0, 2, per_node=2)
    comm.reads_peers, comm.spans_machines = False, between_machines
    return comm


def outline(comm, batch, num_heads, num_kv_heads, **options):
    layer = thdattn.CPAttention(comm, num_heads, 128, num_kv_heads, engine="reference", dtype="bfloat16", **options)
    return layer, layer._outline(batch, None, None, None, False)


def default_groups(*args, **options):
    layer, plan = outline(*args, **options)
    return layer._groups(plan)


# --- gather: one's own order of work -----------------------------------------------------------------------------


def on_two_ranks(program):
    """What program(attention, plan, q, k, v, dout) returns on each of two ranks."""
    case = CASES["gqa-12-2"]
    batch = case.batch(2)

    def one(comm):
        attention = case.attention(comm, FLOAT64, engine="reference", head_groups=2, keep_keys=False)
        plan = attention.plan(batch, case.sharding)
        q, k, v, dout = (local_rows(batch, plan.rows, x, np.nan) for x in random_inputs(case, FLOAT64))
        return program(attention, plan, q, k, v, dout)

    return thdattn.comm.run_local(2, one)


def plain(attention, plan, q, k, v, dout):
    out, saved = attention.forward(q, k, v, plan)
    return out, *attention.backward(dout, saved)


def early(attention, plan, q, k, v, dout):
    first = attention.gather(k, v, plan)
    second = attention.gather(2 * k, v, plan)  # of the next layer, as it were
    out, saved = attention.forward(q, k, v, plan, keys=first)
    keys = attention.gather(saved.k, saved.v, saved.plan)
    dq, dk_dv = attention.start_backward(dout, saved, keys)
    assert not second.used
    return out, dq, *dk_dv()


def from_slices(attention, plan, q, k, v, dout):
    """Slices of one projection, as most models have them, are copied once, as they are not contiguous."""
    k, v = np.split(np.concatenate([k, v], axis=1), 2, axis=1)
    assert not k.flags.c_contiguous
    keys = attention.gather(k, v, plan)
    out, saved = attention.forward(q, k, v, plan, keys=keys)
    assert saved.k is keys.k and saved.v is keys.v
    return out, *attention.backward(dout, saved, attention.gather(saved.k, saved.v, plan))


def two_layers(attention, plan, q, k, v, dout):
    keys = [attention.gather(scale * k, v, plan) for scale in (1, 2)]
    return [attention.forward(q, held.k, held.v, plan, keys=held)[0] for held in keys]


def one_waits(attention, plan, q, k, v, dout):
    """A gather that waits for its call leaves the rest to others."""
    waiting = attention.gather(k, v, plan)
    found = [attention.forward(q, 2 * k, v, plan)[0] for _ in range(IN_FLIGHT + 1)]
    return attention.forward(q, k, v, plan, keys=waiting)[0], *found


def one_by_one(attention, plan, q, k, v, dout):
    doubled = attention.forward(q, 2 * k, v, plan)[0]
    return attention.forward(q, k, v, plan)[0], *[doubled] * (IN_FLIGHT + 1)


@pytest.mark.parametrize(("gathering", "without"), [
    (early, plain), (from_slices, plain), (two_layers, one_by_one), (one_waits, one_by_one)])
def test_keys_that_were_asked_for_early_give_the_same_bits(gathering, without):
    for found, wanted in zip(on_two_ranks(gathering), on_two_ranks(without), strict=True):
        assert [x.tobytes() for x in found] == [x.tobytes() for x in wanted[: len(found)]]


def test_more_gathers_than_there_are_buffers_for_are_refused():
    def program(attention, plan, q, k, v, dout):
        under_way = [attention.gather(k, v, plan) for _ in range(IN_FLIGHT)]
        with pytest.raises(ValueError, match="gather was called with 2 gathers of this plan under way, wanted fewer"):
            attention.gather(k, v, plan)
        attention.forward(q, k, v, plan, keys=under_way[0])
        attention.gather(k, v, plan)

    on_two_ranks(program)


def test_a_gather_that_nobody_holds_any_more_holds_no_buffer():
    def program(attention, plan, q, k, v, dout):
        for _ in range(IN_FLIGHT + 1):
            attention.gather(k, v, plan)
            gc.collect()

    on_two_ranks(program)


@pytest.mark.parametrize(("what", "message"), [
    ("twice", "keys were used by a forward or backward before"),
    ("other arrays", "keys were gathered from other k and v"),
    ("another plan", "keys were gathered from other k and v or with another plan"),
    ("no keys", "keys is"),
])
def test_keys_of_something_else_are_refused(what, message):
    def program(attention, plan, q, k, v, dout):
        keys = attention.gather(k, v, plan)
        if what == "twice":
            attention.forward(q, k, v, plan, keys=keys)
        given = {"keys": k if what == "no keys" else keys}
        if what == "other arrays":
            k = k.copy()
        if what == "another plan":
            plan = attention.plan(plan.batch, plan.sharding)
        with pytest.raises((TypeError, ValueError), match=message):
            attention.forward(q, k, v, plan, **given)

    on_two_ranks(program)


# --- what is kept ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "cp_size", "kept"), [
    ((8, 2), 2, True), ((8, 2), 4, True), ((4, 4), 2, True), ((4, 4), 4, False), ((8, 2), 8, False),
])
def test_keys_are_kept_where_saved_at_most_doubles(heads, cp_size, kept):
    batch = thdattn.PackedBatch.from_lengths([64, 16], 16)

    def program(comm):
        attention = thdattn.CPAttention(comm, heads[0], 8, heads[1], dtype="float32", engine="reference")
        plan = attention.plan(batch)
        q, k = (np.ones((plan.local_rows, n, 8), np.float32) for n in heads)
        return attention.forward(q, k, k, plan)[1].keys is not None

    assert thdattn.comm.run_local(cp_size, program) == [kept] * cp_size
