"""Plans of every method, what forward keeps, bytes by formulas, and what is refused on every rank."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16, inputs_of
from ways import BY_NAME, TELLING, Way, attention, of

import thdattn
from thdattn import PackedBatch, Sharding

FLOAT64 = np.dtype("float64")


@pytest.mark.parametrize("way", TELLING, ids=str)
def test_whole_arrays_are_cut_and_put_together_again(way):
    case = of(way, "slack")
    batch = way.batch(case)
    whole = np.arange(3 * batch.total_rows).reshape(-1, 3).astype(BFLOAT16)

    def program(comm):
        layer = attention(case, way, comm, BFLOAT16, engine="reference")
        plan = layer.plan(batch, way.sharding)
        mine = plan.shard(whole)
        assert mine.tobytes() == plan.sharding.shard(whole, comm.rank).tobytes()
        assert plan.rows.tolist() == plan.sharding.rows(comm.rank).tolist()
        return plan.unshard(mine, layer.comm), mine, plan.sharding

    ranks = thdattn.comm.run_local(way.cp_size, program)
    for again, _, sharding in ranks:
        assert again.tobytes() == whole.tobytes()
        assert sharding.unshard([mine for _, mine, _ in ranks]).tobytes() == whole.tobytes()


@pytest.mark.parametrize("way", TELLING, ids=str)
def test_plans_say_where_tokens_are(way):
    case = of(way, "padded-between")
    batch = way.batch(case)

    def program(comm):
        plan = attention(case, way, comm, FLOAT64, engine="reference").plan(batch, way.sharding)
        return plan.rows, plan.positions, plan.valid

    begins, lengths = batch.cu_seqlens_padded[:-1], batch.lengths
    for rows, positions, valid in thdattn.comm.run_local(way.cp_size, program):
        for row, position, token in zip(rows, positions, valid, strict=True):
            owner = [seq for seq in range(len(lengths)) if begins[seq] <= row < begins[seq] + lengths[seq]]
            assert token == bool(owner)
            if owner:
                assert position == row - begins[owner[0]]


def of_two(one, other, call):
    """call(comm, attention, plan) of two ways on the same ranks."""
    case = replace(BY_NAME["causal"], heads=(8, 4), dims=(12, 8))
    batch = Way("p2p", "dual_chunk", one.cp_size).batch(case)

    def program(comm):
        layers = [attention(case, way, comm, FLOAT64, engine="reference") for way in (one, other)]
        return call(case, *layers, layers[0].plan(batch, one.sharding))

    return thdattn.comm.run_local(one.cp_size, program)


HEADS, ROWS, RING = Way("a2a", "contiguous", 4), Way("all_gather", "contiguous", 4), Way("p2p", "contiguous", 4)
LEVELS = Way("a2a+all_gather", "contiguous", 4, inner=2)


@pytest.mark.parametrize(("one", "other", "found", "wanted"), [
    (HEADS, ROWS, 4, 1), (ROWS, HEADS, 1, 4), (LEVELS, HEADS, 2, 4), (HEADS, LEVELS, 4, 2), (RING, LEVELS, 1, 2),
], ids=str)
def test_plan_and_saved_of_another_method_are_refused(one, other, found, wanted):
    message = re.escape(f"plan was made for head_ranks {found}, wanted {wanted}; make it with this attention's plan")

    def call(case, mine, foreign, plan):
        *qkv, dout = inputs_of(case, plan, FLOAT64)
        with pytest.raises(ValueError, match=message):
            foreign.forward(*qkv, plan)
        with pytest.raises(ValueError, match=message):
            foreign.gather(*qkv[1:], plan)
        saved = mine.forward(*qkv, plan)[1]
        with pytest.raises(ValueError, match=message):
            foreign.backward(dout, saved)

    of_two(one, other, call)


@pytest.mark.parametrize(("one", "other"), [(RING, ROWS), (ROWS, RING)], ids=str)
def test_rings_and_gathers_share_plans_and_what_they_save(one, other):
    def call(case, mine, theirs, plan):
        *qkv, dout = inputs_of(case, plan, FLOAT64)
        _, saved = mine.forward(*qkv, plan)
        for x, y in zip(mine.backward(dout, saved), theirs.backward(dout, saved), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-13)

    of_two(one, other, call)


@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("way", TELLING, ids=str)
def test_groups_of_heads_are_those_of_the_forward(way, keep_keys):
    """Saved goes to any attention that differs in nothing that saved.made_with names: twice, if anybody likes."""
    case = replace(of(way, "causal"), heads=(6, 6) if way.cp_size == 3 else (8, 8))

    def program(comm):
        layers = [attention(case, way, comm, BFLOAT16, engine="reference", head_groups=groups, keep_keys=keep_keys)
                  for groups in (1, 2)]
        plan = layers[0].plan(way.batch(case), way.sharding)
        *qkv, dout = inputs_of(case, plan, BFLOAT16)
        found = set()
        for layer in layers:
            _, saved = layer.forward(*qkv, plan)
            found |= {tuple(x.tobytes() for x in other.backward(dout, saved)) for other in (*layers, layer)}
        return len(found)

    assert set(thdattn.comm.run_local(way.cp_size, program)) == {1}


# --- bytes -------------------------------------------------------------------------------------------------------


def received(way, case, keep_keys):
    """Bytes that every rank's comms bring, of a forward and of a backward, and the plan."""

    def program(comm):
        layer = attention(case, way, comm, BFLOAT16, engine="reference", keep_keys=keep_keys)
        plan = layer.plan(way.batch(case), way.sharding)
        comms = {id(each): each for each in (layer.comm, *(layer._selection.levels or ()))}.values()
        *qkv, dout = inputs_of(case, plan, BFLOAT16)
        counts = [sum(each.received_bytes for each in comms)]
        _, saved = layer.forward(*qkv, plan)
        counts.append(sum(each.received_bytes for each in comms))
        layer.backward(dout, saved)
        counts.append(sum(each.received_bytes for each in comms))
        return *np.diff(counts).tolist(), plan

    return thdattn.comm.run_local(way.cp_size, program)


QUERY, KEY = 2 * (12 + 8), 2 * (12 + 8)  # bytes of q and out, of k and v, of a row and head


@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_bytes_of_heads_are_those_of_the_formula(cp_size, keep_keys):
    for sharding in ("contiguous", "dual_chunk"):
        case = replace(BY_NAME["causal"], heads=(8, 2), dims=(12, 8))
        for forward, backward, plan in received(Way("a2a", sharding, cp_size), case, keep_keys):
            foreign = (cp_size - 1) * plan.local_rows
            heads, kv_heads = 8 // cp_size, max(1, 2 // cp_size)
            there, back = foreign * (heads * 2 * 12 + kv_heads * KEY), foreign * heads * (2 * 8 + 4)  # with lse
            assert forward == there + back
            again = 0 if keep_keys else foreign * (heads * (2 * 12 + 2 * 8 + 4) + kv_heads * KEY)
            shared = 2 if cp_size > 2 else 1  # in float32
            sums = foreign * max(2, cp_size) // cp_size * KEY * shared
            assert backward == foreign * heads * 2 * 8 + again + foreign * heads * 2 * 12 + sums


@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["causal", "window-left", "full", "slack"])
def test_bytes_of_needed_rows_are_those_of_the_routes(name, cp_size, keep_keys):
    case, way = replace(BY_NAME[name], heads=(8, 2), dims=(12, 8)), Way("all_gather", "balanced", cp_size)
    for forward, backward, plan in received(way, case, keep_keys):
        taken, given = (0, 0) if plan.routes is None else (plan.routes.num_received, plan.routes.num_sent)
        assert forward == taken * 2 * KEY
        assert backward == given * 2 * 2 * KEY + (0 if keep_keys else forward)


@pytest.mark.parametrize("sharding", ["dual_chunk", "balanced"])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_bytes_of_a_ring_are_those_of_its_hops(cp_size, sharding):
    case = replace(BY_NAME["causal"], heads=(8, 2), dims=(12, 8))
    for forward, backward, plan in received(Way("p2p", sharding, cp_size), case, None):
        hops = (cp_size - 1) * plan.local_rows * 2 * KEY
        assert (forward, backward) == (hops, 3 * hops)


@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("sharding", ["dual_chunk", "balanced"])
def test_bytes_of_two_levels_are_those_of_both(sharding, keep_keys):
    case, way = replace(BY_NAME["causal"], heads=(8, 2), dims=(12, 8)), Way("a2a+all_gather", sharding, 4, inner=2)
    for forward, backward, plan in received(way, case, keep_keys):
        rows, core = plan.local_rows, plan.core
        taken = given = core.local_rows
        if sharding == "balanced":
            taken, given = core.routes.num_received, core.routes.num_sent
        inside = rows * (4 * (2 * 12 + 2 * 8 + 4) + KEY)
        assert forward == inside + taken * KEY
        again = 0 if keep_keys else inside + taken * KEY
        assert backward == rows * (4 * (2 * 8 + 2 * 12) + KEY) + again + given * 2 * KEY


# --- refusals ----------------------------------------------------------------------------------------------------


def grid(comm, inner):
    return comm.split(comm.rank // inner), comm.split(comm.rank % inner)


def layer_on(comm, kind="all_gather", heads=(8, 4), **options):
    arguments = {"num_heads": heads[0], "head_dim": 8, "num_kv_heads": heads[1], "dtype": "float32",
                 "cp_comm_type": kind, "engine": "reference"}
    return thdattn.CPAttention(comm, **{**arguments, **options})


BATCH = PackedBatch.from_lengths([64, 16], 16)


@pytest.mark.parametrize(("make", "message"), [
    (lambda c: layer_on(c, "a2a", (6, 6)), "num_heads is 6 and num_kv_heads 6, wanted heads that can be spread over "
     "the 4 ranks of the all-to-all, which works for 1, 2, 3, 6 ranks; use so many, or another cp_comm_type"),
    (lambda c: layer_on(c, "a2a", (12, 6)), "num_heads is 12 and num_kv_heads 6, wanted heads that can be spread over "
     "the 4 ranks of the all-to-all, which works for 1, 2, 3, 6, 12 ranks"),
    (lambda c: layer_on(grid(c, 2), "a2a+all_gather", (9, 3)), "num_heads is 9 and num_kv_heads 3, wanted heads that "
     "can be spread over the 2 ranks of the all-to-all, which works for 1, 3, 9 ranks"),
    (lambda c: layer_on(grid(c, 2), "a2a+all_gather", (8, 1)), "num_kv_heads is 1 and comm has 2 ranks in its inner "
     "groups, wanted a divisor of the kv heads with two levels"),
    (lambda c: layer_on(grid(c, 2), "a2a+p2p", (8, 1)), "num_kv_heads is 1 and comm has 2 ranks in its inner groups"),
    (lambda c: layer_on(c, "a2a+p2p"), "cp_comm_type is 'a2a+p2p' and comm has one level, wanted (inner, outer); pass"),
    (lambda c: layer_on(grid(c, 2), "a2a"), "comm has two levels and cp_comm_type is 'a2a', wanted one of two levels"),
    (lambda c: layer_on(grid(c, 2), "p2p"), "comm has two levels and cp_comm_type is 'p2p', wanted one of two levels"),
    (lambda c: layer_on(c, "a2a").plan(BATCH, "balanced"), "sharding is 'balanced' and cp_comm_type 'a2a', wanted "
     "'contiguous' or 'dual_chunk' with that, as each rank has all rows of its heads; use one of these, or cp_comm"),
    (lambda c: layer_on(c).plan(BATCH, Sharding(BATCH, 4, inner=2)), "sharding has inner 2, wanted 1, the ranks among "
     "which cp_comm_type 'all_gather' exchanges heads; make it with Sharding(batch, 4, 'dual_chunk', inner=1)"),
    (lambda c: layer_on(c, "a2a").plan(BATCH, Sharding(BATCH, 4, inner=2)), "sharding has inner 2, wanted 4, the ranks "
     "among which cp_comm_type 'a2a' exchanges heads"),
    (lambda c: layer_on(grid(c, 2), "a2a+p2p").plan(BATCH, Sharding(BATCH, 4)), "sharding has inner 1, wanted 2, the "
     "ranks among which cp_comm_type 'a2a+p2p' exchanges heads"),
    (lambda c: layer_on(grid(c, 2), "a2a+p2p").plan(BATCH, Sharding(BATCH, 4, inner=4)), "sharding has inner 4, wanted "
     "2, the ranks among which"),
    (lambda c: layer_on(grid(c, 2), "a2a+p2p").plan(BATCH, Sharding(BATCH, 2)), "sharding has cp_size 2, wanted 4"),
    (lambda c: layer_on(grid(c, 2), "a2a+all_gather").plan(PackedBatch([0, 6])), "sequence 0 has padded length 6, "
     "wanted a multiple of 2*cp_size/inner = 4 for dual_chunk"),
    (lambda c: layer_on(c, "a2a").plan(BATCH, key_batch=BATCH), "key_batch was passed for 4 ranks, wanted one"),
    (lambda c: layer_on(c, "ring"), "cp_comm_type is 'ring', wanted"),
])
def test_what_cannot_work_is_refused_on_every_rank(make, message):
    def program(comm):
        with pytest.raises(ValueError, match=re.escape(message)):
            make(comm)
        comm.barrier()

    thdattn.comm.run_local(4, program, timeout=20)


@pytest.mark.parametrize(("kind", "sharding"), [("a2a", "contiguous"), ("p2p", "dual_chunk"),
                                                ("all_gather", "balanced")])
def test_keys_that_do_not_travel_alone_are_not_gathered(kind, sharding):
    def program(comm):
        plain, layer = layer_on(comm), layer_on(comm, kind)
        plan = layer.plan(BATCH, sharding)
        q, k = (np.ones((plan.local_rows, heads, 8), np.float32) for heads in (8, 4))
        wanted = "wanted 'all_gather' without 'balanced', as other methods send nothing before they have q"
        with pytest.raises(ValueError, match=f"gather was called with cp_comm_type '{kind}' .*, {wanted}"):
            layer.gather(k, k, plan)
        if kind == "p2p":
            keys = plain.gather(k, k, plan)
            with pytest.raises(ValueError, match=f"keys were passed with cp_comm_type '{kind}' .*, {wanted}"):
                layer.forward(q, k, k, plan, keys=keys)

    thdattn.comm.run_local(4, program, timeout=20)


# Options of which rank 3 has the second value.
OPTIONS = {
    "cp_comm_type": ("all_gather", "p2p"), "window": ((4, 0), (5, 0)), "causal": (True, False), "num_heads": (8, 4),
    "num_kv_heads": (4, 8), "head_dim": (8, 9), "v_head_dim": (8, 9), "softmax_scale": (1.0, 2.0),
    "dtype": ("float32", "float16"), "head_groups": (1, 2), "keep_keys": (True, False), "softcap": (0.0, 2.0),
    "sinks": (False, True),
}
DIFFERING = {
    **{name: (lambda comm, odd, name=name, values=values: layer_on(comm, **{name: values[odd]}).plan(BATCH))
       for name, values in OPTIONS.items()},
    "lengths": lambda comm, odd: layer_on(comm).plan(PackedBatch.from_lengths([64, 16 - odd], 16)),
    "padding": lambda comm, odd: layer_on(comm).plan(PackedBatch([0, 8], [0, 8 + odd * 8])),
    "rows": lambda comm, odd: layer_on(comm).plan(PackedBatch([0, 8], total_rows=16 + odd)),
    "sharding": lambda comm, odd: layer_on(comm).plan(BATCH, "balanced" if odd else "dual_chunk"),
    "all-to-all": lambda comm, odd: layer_on(comm, "a2a" if odd else "all_gather").plan(BATCH, "contiguous"),
    "sharding of heads": lambda comm, odd: layer_on(comm, "a2a").plan(BATCH, "dual_chunk" if odd else None),
    "window of heads": lambda comm, odd: layer_on(comm, "a2a", window=(3 + odd, 0)).plan(BATCH),
    "balanced lengths": lambda comm, odd: layer_on(comm).plan(
        PackedBatch.from_lengths([64 - odd, 16], 16), "balanced"),
    "lengths of a ring": lambda comm, odd: layer_on(comm, "p2p").plan(PackedBatch.from_lengths([64, 16 - odd], 16)),
    "levels": lambda comm, odd: layer_on(grid(comm, 2), "a2a+p2p" if odd else "a2a+all_gather").plan(BATCH),
    "rows of levels": lambda comm, odd: layer_on(grid(comm, 2), "a2a+all_gather").plan(
        BATCH, "contiguous" if odd else "dual_chunk"),
}
FIELDS = {
    "lengths": "cu_seqlens[2]", "padding": "total_rows", "rows": "total_rows", "causal": "window",
    "all-to-all": "cp_comm_type", "sharding of heads": "sharding", "window of heads": "window",
    "balanced lengths": "cu_seqlens[1]", "lengths of a ring": "cu_seqlens[2]", "levels": "cp_comm_type",
    "rows of levels": "sharding",
}


@pytest.mark.parametrize("what", DIFFERING)
def test_what_differs_on_one_rank_raises_on_every_rank_and_names_it(what):
    wanted = f"{re.escape(FIELDS.get(what, what))} is .* " + r"\(ranks 0, 1, 2\), .* \(rank 3\)"

    def program(comm):
        with pytest.raises(ValueError, match=f"^the plan is not the same on all ranks: (.* )?{wanted}"):
            DIFFERING[what](comm, int(comm.rank == 3))
        comm.barrier()

    thdattn.comm.run_local(4, program, timeout=20)
