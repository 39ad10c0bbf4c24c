"""Every method and sharding over simulated ranks on the NumPy engine: results, bytes, and what is refused."""

from __future__ import annotations

import gc
import re
from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16, FIELDS, Case, check, run
from ways import Way, attention, inputs_of, run_way, step, ways

import thdattn
from thdattn import PackedBatch, Sharding, reference
from thdattn.comm.local import LocalComm

FLOAT64 = np.dtype("float64")

MIXED = (70, 3, 33, 0, 50, 17, 91)
PACKS = (
    Case("causal", MIXED),
    Case("full", MIXED, causal=False),
    Case("window-left", MIXED, window=(20, 0)),
    Case("window-right", MIXED, causal=False, window=(-1, 9)),
    Case("window-two-sided", MIXED, causal=False, window=(5, 30)),
    Case("slack", (40, 0, 9, 65), slack=27),
    Case("one-document", (203,)),
    Case("equal", (16,) * 64, window=(7, 0)),
    Case("fewer-tokens-than-ranks", (1, 0, 2)),
    Case("empty", (0, 0, 0)),
    Case("empty-padded", (0, 0), padded=(48, 96), slack=5),
    Case("padded-between", (40, 0, 9, 0, 1), padded=(48, 96, 48, 0, 48), slack=3),
    Case("nothing", ()),
    Case("nothing-slack", (), slack=19),
)
BY_NAME = {case.name: case for case in PACKS}
WAYS = ways((2, 2), (2, 3), (4, 2), (2, 4), (4, 1), (1, 4), sizes=(1, 2, 3, 4, 6, 8), heads=(1, 2, 3, 4, 6, 8))
# One of each kind.
TELLING = [*ways((2, 2), sizes=(3,), heads=(4,)), Way("a2a", "contiguous", 2)]


def of(way, name):
    """The case of a name with narrow heads, as many as the way can spread."""
    return replace(BY_NAME[name], heads=way.heads, dims=(12, 8))


def every(names, some=WAYS):
    """The ways of one case come one after another, so that its oracle is computed once for each number of heads."""
    return [pytest.param(of(way, name), way, id=f"{name}-{way}") for name in names for way in some]


def bits(outcome):
    return {field: x.tobytes() for field, x in outcome.tokens.items()}


@pytest.mark.parametrize(("case", "way"), every(BY_NAME))
def test_float64_is_the_oracle(case, way):
    check(case, FLOAT64, run_way(case, way, FLOAT64, engine="reference"))


@pytest.mark.parametrize(("case", "way"), every(["causal", "window-two-sided", "one-document"]))
def test_errs_no_more_than_plain_attention_in_bfloat16(case, way):
    check(case, BFLOAT16, run_way(case, way, BFLOAT16, engine="reference"))


@pytest.mark.parametrize("sharding", ["contiguous", "dual_chunk"])
@pytest.mark.parametrize(("heads", "cp_size"), [
    ((8, 8), 2), ((8, 8), 8), ((8, 2), 8), ((8, 1), 2), ((8, 1), 8), ((28, 4), 2), ((28, 4), 4), ((28, 4), 28),
    ((6, 2), 6), ((12, 2), 4),
])  # fmt: skip
def test_heads_that_divide_or_are_shared(heads, cp_size, sharding):
    case = replace(BY_NAME["causal"], heads=heads, dims=(8, 12))
    for dtype in (FLOAT64, BFLOAT16):
        check(case, dtype, run_way(case, Way("a2a", sharding, cp_size), dtype, engine="reference"))


def test_gradients_of_shared_heads_are_rounded_once_after_the_sum_over_ranks():
    """Four ranks give a key 256.5, 1, 1 and 0.75: 259.25, in bfloat16 260. Rounded before, it is less."""

    def program(comm):
        layer = thdattn.CPAttention(comm, 4, 8, 1, causal=False, engine="reference", cp_comm_type="a2a")
        plan = layer.plan(PackedBatch([0, 64]))
        x = np.ones((16, 4, 8), BFLOAT16)
        _, saved = layer.forward(x, x[:, :1], x[:, :1], plan)  # all scores are equal: P is 1/64 everywhere
        dout = x * np.array([256, 1, 1, 0.75], BFLOAT16)[:, None]
        if comm.rank == 0:
            dout[0, 0] = 288
        return layer.backward(dout, saved)[2]

    for dv in thdattn.comm.run_local(4, program):
        assert (dv.astype(FLOAT64) == 260).all()


@pytest.mark.parametrize(("case", "way"), every(["causal", "window-two-sided", "padded-between"], TELLING))
def test_lse_and_max_logit_are_those_of_one_rank(case, way):
    found, alone = run_way(case, way, FLOAT64, engine="reference"), run(case, 1, FLOAT64, engine="reference")
    np.testing.assert_allclose(found.tokens["lse"], alone.tokens["lse"], rtol=1e-13, atol=1e-13)
    np.testing.assert_array_equal(found.tokens["max_logit"], alone.tokens["max_logit"])


# --- padding, buffers, and when things arrive ------------------------------------------------------------------


@pytest.mark.parametrize(("case", "way"), every(["padded-between", "slack", "window-two-sided"], TELLING))
def test_uninitialised_buffers_and_poison_in_padding_change_no_bit(case, way, request):
    clean = bits(run_way(case, way, BFLOAT16, engine="reference", fill=0))
    request.getfixturevalue("poisoned_host")
    for fill in (np.nan, -np.inf):
        outcome = run_way(case, way, BFLOAT16, engine="reference", fill=fill)
        check(case, BFLOAT16, outcome)
        assert bits(outcome) == clean


@pytest.fixture
def late(monkeypatch):
    """What is exchanged is there when it has been waited for, and not a moment before; how many are on their way."""
    at_once, under_way = LocalComm._exchange, []

    def exchange(comm, sends, recvs, sizes):
        arrived = [(np.empty_like(place), peer) for place, peer in recvs]
        at_once(comm, sends, arrived, sizes)
        for place, _ in recvs:
            place[...] = np.nan
        token = object()
        under_way.append(token)

        def wait():
            if token in under_way:
                under_way.remove(token)
                for (place, _), (made, _) in zip(recvs, arrived, strict=True):
                    place[...] = made

        return wait

    monkeypatch.setattr(LocalComm, "_exchange", exchange)
    return under_way


@pytest.mark.parametrize("options", [{}, {"head_groups": 2, "keep_keys": False}], ids=str)
@pytest.mark.parametrize(("case", "way"), every(["causal"], TELLING))
def test_nothing_is_read_before_it_was_waited_for(case, way, options, late):
    if case.heads[1] % options.get("head_groups", 1):
        case = replace(case, heads=(6, 6))
    check(case, BFLOAT16, run_way(case, way, BFLOAT16, engine="reference", **options))
    assert not late


@pytest.mark.parametrize("which", ["attn_fwd", "attn_bwd"])
@pytest.mark.parametrize("way", TELLING, ids=str)
def test_nothing_is_on_its_way_after_an_error(way, which, late, monkeypatch):
    case = replace(of(way, "causal"), heads=(6, 6) if way.cp_size == 3 else (8, 8))

    def fail(*args, **named):
        raise ArithmeticError

    def program(comm):
        layer = attention(case, way, comm, BFLOAT16, engine="reference", head_groups=2)
        plan = layer.plan(way.batch(case), way.sharding)
        *qkv, dout = inputs_of(case, plan, BFLOAT16)
        _, saved = layer.forward(*qkv, plan)
        comm.barrier()
        monkeypatch.setattr(reference, which, fail)
        comm.barrier()
        with pytest.raises(ArithmeticError):
            if which == "attn_fwd":
                layer.forward(*qkv, plan)
            else:
                layer.backward(dout, saved)

    thdattn.comm.run_local(way.cp_size, program, timeout=20)
    gc.collect()
    assert not late


# --- what may not matter -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", ["dual_chunk", "contiguous", "balanced"])
@pytest.mark.parametrize("name", ["causal", "slack"])
def test_groups_of_one_rank_are_the_method_for_rows(name, sharding):
    for kind in ("all_gather", "p2p")[: 1 if sharding == "balanced" else 2]:
        two, one = Way(f"a2a+{kind}", sharding, 4, inner=1), Way(kind, sharding, 4)
        case = of(two, name)
        assert bits(run_way(case, two, BFLOAT16, engine="reference")) == bits(
            run_way(case, one, BFLOAT16, engine="reference"))  # fmt: skip


@pytest.mark.parametrize("kind", ["a2a+all_gather", "a2a+p2p"])
@pytest.mark.parametrize("name", ["causal", "slack"])
def test_one_group_is_the_exchange_of_heads(name, kind):
    one = Way("a2a", "contiguous", 4)
    case = of(one, name)
    wanted = bits(run_way(case, one, BFLOAT16, engine="reference"))
    assert bits(run_way(case, Way(kind, "contiguous", 4, inner=4), BFLOAT16, engine="reference")) == wanted


@pytest.mark.parametrize("grid", [(2, 2), (2, 4), (1, 4)], ids=str)
def test_one_document_lies_balanced_as_in_two_chunks(grid):
    inner, outer = grid
    batch = PackedBatch([0, 2 * outer * 300])
    for rank in range(inner * outer):
        balanced, chunks = (Sharding(batch, inner * outer, strategy, inner) for strategy in ("balanced", "dual_chunk"))
        assert balanced.rows(rank).tolist() == chunks.rows(rank).tolist()


@pytest.mark.parametrize("way", [*TELLING, Way("a2a+all_gather", "contiguous", 4, inner=4)], ids=str)
def test_what_is_kept_and_how_heads_are_grouped_changes_no_bit(way):
    case = replace(of(way, "causal"), heads=(12, 12) if way.cp_size == 3 else (8, 8))
    first, *others = (
        bits(run_way(case, way, BFLOAT16, engine="reference", keep_keys=keep, head_groups=groups))
        for keep, groups in ((None, 1), (False, 1), (True, 2), (False, 2), (True, 1), (None, None))
    )
    assert others == [first] * len(others)


def started(layer, plan, inputs):
    """step, with dk and dv asked for when the gradients of another layer are under way too."""
    *qkv, dout = inputs
    out, saved = layer.forward(*qkv, plan, return_max_logit=True)
    dq, dk_dv = layer.start_backward(dout, saved)
    _, others = layer.start_backward(dout * dout.dtype.type(2), saved)
    results = dict(zip(FIELDS, (out, saved.lse, saved.max_logit, dq, *dk_dv()), strict=True))
    others()
    return results


@pytest.mark.parametrize("way", TELLING, ids=str)
def test_gradients_that_are_asked_for_later_are_the_same(way, late):
    case = of(way, "causal")
    wanted = bits(run_way(case, way, BFLOAT16, engine="reference"))
    assert bits(run_way(case, way, BFLOAT16, engine="reference", call=started)) == wanted
    assert not late


@pytest.mark.parametrize("way", TELLING, ids=str)
def test_gradients_that_nobody_asks_for_harm_nobody(way, late):
    def dropped(layer, plan, inputs):
        *qkv, dout = inputs
        _, saved = layer.forward(*qkv, plan)
        layer.start_backward(dout, saved)
        return step(layer, plan, inputs)

    case = of(way, "causal")
    check(case, BFLOAT16, run_way(case, way, BFLOAT16, engine="reference", call=dropped))
    assert not late


@pytest.mark.parametrize("way", TELLING, ids=str)
def test_same_inputs_give_the_same_bits(way):
    case = of(way, "causal")
    first, *others = (bits(run_way(case, way, BFLOAT16, engine="reference", deterministic=True)) for _ in range(3))
    assert others == [first, first]


@pytest.mark.parametrize("way", TELLING, ids=str)
def test_layers_share_a_plan_and_keep_their_own_results(way, request):
    """All forwards before all backwards, as in a model, and everything as if alone."""
    case = of(way, "slack")
    request.getfixturevalue("poisoned_host")

    def program(comm):
        layer = attention(case, way, comm, BFLOAT16, engine="reference")
        plan = layer.plan(way.batch(case), way.sharding)
        inputs = [inputs_of(case, plan, BFLOAT16, seed=seed) for seed in range(3)]
        forwards = [layer.forward(*one[:3], plan, return_max_logit=True) for one in inputs]
        made = [[out, saved.lse, saved.max_logit, *layer.backward(one[3], saved)]
                for one, (out, saved) in zip(inputs, forwards, strict=True)]
        alone = [step(layer, layer.plan(way.batch(case), way.sharding), one).values() for one in inputs]
        return [[[x.tobytes() for x in one] for one in results] for results in (made, alone)]

    for made, alone in thdattn.comm.run_local(way.cp_size, program):
        assert made == alone


@pytest.mark.parametrize("way", TELLING, ids=str)
def test_results_are_new_arrays_and_inputs_are_left_as_they_were(way):
    case = of(way, "slack")

    def program(comm):
        layer = attention(case, way, comm, BFLOAT16, engine="reference")
        plan = layer.plan(way.batch(case), way.sharding)
        inputs = inputs_of(case, plan, BFLOAT16)
        before = [x.tobytes() for x in inputs]
        for x in inputs:
            x.setflags(write=False)
        made = [*inputs]
        for _ in range(2):
            for x in step(layer, plan, inputs).values():
                assert x.flags.owndata or x.base is not None
                assert not any(np.shares_memory(x, other) for other in made if x.size)
                made.append(x)
        assert [x.tobytes() for x in inputs] == before
        buffers = [*plan._buffers.values(), *(plan.core or plan)._buffers.values()]
        assert not any(np.shares_memory(x, buffer) for x in made for buffer in buffers)

    thdattn.comm.run_local(way.cp_size, program)


@pytest.mark.parametrize("way", TELLING, ids=str)
def test_arrays_that_are_not_contiguous_are_accepted(way):
    case = of(way, "causal")

    def strided(layer, plan, inputs):
        return step(layer, plan, [np.asfortranarray(x) for x in inputs])

    check(case, FLOAT64, run_way(case, way, FLOAT64, engine="reference", call=strided))


# --- what travels ------------------------------------------------------------------------------------------------


def received(way, case, keep_keys):
    """Bytes that every rank's comms bring, of a forward and of a backward, and the plan."""

    def program(comm):
        layer = attention(case, way, comm, BFLOAT16, engine="reference", keep_keys=keep_keys)
        plan = layer.plan(way.batch(case), way.sharding)
        comms = {id(each): each for each in (layer.comm, *(layer._levels or ()))}.values()
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


def test_documents_that_stay_whole_send_nothing():
    case, way = Case("64x256", (256,) * 64, heads=(2, 1), dims=(12, 8)), Way("all_gather", "balanced", 8)
    case = replace(case, padded=case.lengths)
    for forward, backward, _ in received(way, case, keep_keys=False):
        assert forward == backward == 0


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_bytes_of_a_ring_are_those_of_its_hops(cp_size):
    case = replace(BY_NAME["causal"], heads=(8, 2), dims=(12, 8))
    for forward, backward, plan in received(Way("p2p", "dual_chunk", cp_size), case, None):
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


# --- whole arrays, plans and what forward keeps ------------------------------------------------------------------


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
], ids=str)  # fmt: skip
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


@pytest.mark.parametrize("way", TELLING, ids=str)
def test_saved_arrays_are_checked_and_shown_without_their_contents(way):
    case = of(way, "causal")

    def program(comm):
        layer = attention(case, way, comm, FLOAT64, engine="reference")
        plan = layer.plan(way.batch(case), way.sharding)
        *qkv, dout = inputs_of(case, plan, FLOAT64)
        _, saved = layer.forward(*qkv, plan)
        rows, (heads, kv_heads) = plan.local_rows, case.heads
        assert f"q float64 ({rows}, {heads}, 12), k float64 ({rows}, {kv_heads}, 12), v float64" in repr(saved)
        assert f"lse float64 ({heads}, {rows}), max_logit None, {plan!r}" in repr(saved)
        assert len(repr(saved)) < 600 and f"cp_comm_type='{way.cp_comm_type}'" in repr(layer)
        for name in ("q", "k", "v", "out", "lse"):
            wrong = replace(saved, **{name: getattr(saved, name)[:-1]})
            with pytest.raises(ValueError, match=rf"saved.{name} is float64 \(.*\), a ndarray; wanted float64"):
                layer.backward(dout, wrong)
        with pytest.raises(ValueError, match=r"dout has shape .*, wanted .* = \(local_rows, heads, width\)"):
            layer.backward(dout[:-1], saved)

    thdattn.comm.run_local(way.cp_size, program)


# --- what cannot work --------------------------------------------------------------------------------------------


def grid(comm, inner):
    return comm.split(comm.rank // inner), comm.split(comm.rank % inner)


def layer_on(comm, kind="all_gather", heads=(8, 4), **options):
    return thdattn.CPAttention(comm, heads[0], 8, heads[1], dtype="float32", engine="reference", cp_comm_type=kind,
                               **options)


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
     "'contiguous' or 'dual_chunk' with that"),
    (lambda c: layer_on(c, "p2p").plan(BATCH, "balanced"), "sharding is 'balanced' and cp_comm_type 'p2p', wanted "
     "'dual_chunk' or 'contiguous' with that"),
    (lambda c: layer_on(grid(c, 2), "a2a+p2p").plan(BATCH, "balanced"), "sharding is 'balanced' and cp_comm_type "
     "'a2a+p2p', wanted 'dual_chunk' or 'contiguous' with that"),
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
     "wanted a multiple of 2*cp_size = 4 for dual_chunk"),
    (lambda c: layer_on(c, "a2a").plan(BATCH, key_batch=BATCH), "key_batch was passed for 4 ranks, wanted one"),
    (lambda c: layer_on(c, "ring"), "cp_comm_type is 'ring', wanted"),
])  # fmt: skip
def test_what_cannot_work_is_refused_on_every_rank(make, message):
    def program(comm):
        with pytest.raises(ValueError, match=re.escape(message)):
            make(comm)
        comm.barrier()

    thdattn.comm.run_local(4, program, timeout=20)


@pytest.mark.parametrize(("kind", "sharding"), [("a2a", "contiguous"), ("p2p", "dual_chunk"),
                                                ("all_gather", "balanced")])  # fmt: skip
def test_keys_that_do_not_travel_alone_are_not_gathered(kind, sharding):
    def program(comm):
        plain, layer = layer_on(comm), layer_on(comm, kind)
        plan = layer.plan(BATCH, sharding)
        q, k = (np.ones((plan.local_rows, heads, 8), np.float32) for heads in (8, 4))
        wanted = "wanted 'all_gather' without 'balanced', as nothing travels before q is there otherwise; leave it out"
        with pytest.raises(ValueError, match=f"gather was called with cp_comm_type '{kind}' .*, {wanted}"):
            layer.gather(k, k, plan)
        if kind == "p2p":
            keys = plain.gather(k, k, plan)
            with pytest.raises(ValueError, match=f"keys were passed with cp_comm_type '{kind}' .*, {wanted}"):
                layer.forward(q, k, k, plan, keys=keys)

    thdattn.comm.run_local(4, program, timeout=20)


DIFFERING = {
    "method": lambda comm, odd: layer_on(comm, "p2p" if odd else "all_gather").plan(BATCH),
    "all-to-all": lambda comm, odd: layer_on(comm, "a2a" if odd else "all_gather").plan(BATCH, "contiguous"),
    "sharding": lambda comm, odd: layer_on(comm).plan(BATCH, "balanced" if odd else "dual_chunk"),
    "sharding of heads": lambda comm, odd: layer_on(comm, "a2a").plan(BATCH, "dual_chunk" if odd else None),
    "window": lambda comm, odd: layer_on(comm, "a2a", window=(3 + odd, 0)).plan(BATCH),
    "lengths": lambda comm, odd: layer_on(comm).plan(
        PackedBatch.from_lengths([64 - odd, 16], 16), "balanced"),
    "lengths of a ring": lambda comm, odd: layer_on(comm, "p2p").plan(PackedBatch.from_lengths([64, 16 - odd], 16)),
    "heads": lambda comm, odd: layer_on(comm, "a2a", (8, 8 if odd else 4)).plan(BATCH),
    "head_groups": lambda comm, odd: layer_on(comm, "a2a", (8, 8), head_groups=1 + odd).plan(BATCH),
    "keep_keys": lambda comm, odd: layer_on(comm, "a2a", keep_keys=bool(odd)).plan(BATCH),
    "levels": lambda comm, odd: layer_on(grid(comm, 2), "a2a+p2p" if odd else "a2a+all_gather").plan(BATCH),
    "rows of levels": lambda comm, odd: layer_on(grid(comm, 2), "a2a+all_gather").plan(
        BATCH, "contiguous" if odd else "dual_chunk"),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERING)
def test_what_differs_on_one_rank_raises_on_every_rank(what):
    def program(comm):
        with pytest.raises(ValueError, match=r"the plan's batch, .* is not the same on all ranks: .* but rank 3 has"):
            DIFFERING[what](comm, int(comm.rank == 3))
        comm.barrier()

    thdattn.comm.run_local(4, program, timeout=20)
