"""Every method and sharding over simulated ranks: results, some on each engine and the others on the NumPy engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16, FIELDS, Case, check, gpu_only, inputs_of, step, to_host
from ways import BY_NAME, MORE_WAYS, TELLING, WAYS, Way, attention, of, run_way, ways

import thdattn
from thdattn import PackedBatch
from thdattn.comm.local import LocalComm
from thdattn.engines import reference
from thdattn.kernels.configs import TILES

FLOAT64 = np.dtype("float64")


def every(names, some=WAYS, more=()):
    """The ways of one case come one after another, so that its oracle is computed once for each number of heads."""
    return [pytest.param(of(way, name), way, id=f"{name}-{way}", marks=[pytest.mark.exhaustive] if way in more else [])
            for name in names for way in (*some, *more)]


def bits(outcome):
    return {field: x.tobytes() for field, x in outcome.tokens.items()}


def run_on(engine, case, way, **options):
    """Run a case in bfloat16, deterministic, and check it."""
    case = engine.suited(case)
    outcome = run_way(case, way, BFLOAT16, xp=engine.xp, engine=engine.name, deterministic=True, **options)
    check(case, BFLOAT16, outcome)
    return outcome


LONGER = Case("longer-full", (257, 3, 64, 0, 100, 17, 190), causal=False, slack=70)  # than tiles
EACH_TELLING_WAY = pytest.mark.parametrize("way", TELLING, ids=str)


@pytest.mark.parametrize(("case", "way"), every(BY_NAME, more=MORE_WAYS))
def test_float64_is_the_oracle(case, way):
    check(case, FLOAT64, run_way(case, way, FLOAT64, engine="reference"))


@pytest.mark.parametrize(("case", "way"), every(["causal", "window-two-sided", "one-document"], more=MORE_WAYS))
def test_errs_no_more_than_plain_attention_in_bfloat16(case, way):
    check(case, BFLOAT16, run_way(case, way, BFLOAT16, engine="reference"))


@pytest.mark.parametrize("sharding", ["contiguous", "dual_chunk"])
@pytest.mark.parametrize(("heads", "cp_size"), [
    ((8, 8), 2), ((8, 8), 4), ((8, 8), 8), ((8, 2), 8), ((8, 1), 2), ((8, 1), 4), ((8, 1), 8), ((28, 4), 2),
    ((28, 4), 4), pytest.param((28, 4), 28, marks=pytest.mark.exhaustive), ((6, 2), 6), ((12, 2), 4),
])
def test_heads_that_divide_or_are_shared(engine, heads, cp_size, sharding):
    case, way = replace(LONGER, causal=True, heads=heads, dims=(128, 128)), Way("a2a", sharding, cp_size)
    run_on(engine, case, way)
    if engine.name == "reference":
        check(case.slim(), FLOAT64, run_way(case.slim(), way, FLOAT64, engine="reference"))


@pytest.mark.parametrize("kind", ["all_gather", "p2p"])
def test_what_ranks_sum_is_rounded_once(kind):
    """Ranks give a key 256.5, 1, 1 and 0.75: 259.25, in bfloat16 260. Rounded before, it is less."""
    def program(comm):
        attention = thdattn.CPAttention(comm, 1, 8, causal=False, engine="reference", cp_comm_type=kind)
        plan = attention.plan(PackedBatch([0, 64]))
        x = np.ones((16, 1, 8), BFLOAT16)
        # All scores are equal: P is 1/64 everywhere. A rank gives out, and dv of every key, a quarter of its mean.
        values = x * BFLOAT16.type([1024, 4, 4, 3][comm.rank])
        if comm.rank == 0:
            values[0] = 1056
        out, saved = attention.forward(x, x, values, plan)
        return out, attention.backward(values, saved)[2]

    for out, dv in thdattn.comm.run_local(4, program):
        assert (out.astype(np.float64) == 260).all()
        assert (dv.astype(np.float64) == 260).all()


def test_gradients_of_shared_heads_are_rounded_once_after_the_sum_over_ranks():
    """As above, by ranks that share a head."""
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


# --- padding, buffers, and when things arrive ------------------------------------------------------------------


@EACH_TELLING_WAY
@pytest.mark.parametrize("case", [LONGER, *(BY_NAME[name] for name in ("padded-between", "slack", "window-two-sided"))],
                         ids=str)
def test_what_padding_holds_changes_no_bit(engine, case, way):
    case = replace(case, heads=way.heads)
    finite, *others = (bits(run_on(engine, case, way, fill=fill)) for fill in (0, np.nan, np.inf, -np.inf))
    assert others == [finite] * 3


@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)], ids=str)
def test_rows_move_between_the_two_orders_by_the_engine_and_fillers_stay_empty(heads, keep_keys, monkeypatch, request):
    """q, k, v, out, dout, dq, dk and dv all do, into arrays that held NaN."""
    request.getfixturevalue("poisoned_host")
    moved, move = [], reference.pack_rows

    def pack_rows(xs, order, into):
        fillers = np.asarray(order) < 0
        move(xs, order, into)
        assert all(not x[fillers].any() for x in into)
        moved.append((len(xs), bool(fillers.any())))

    monkeypatch.setattr(reference, "pack_rows", pack_rows)
    way, case = Way("a2a", "dual_chunk", 4), replace(BY_NAME["slack"], heads=heads, dims=(12, 8))
    check(case, BFLOAT16, run_way(case, way, BFLOAT16, engine="reference", keep_keys=keep_keys, head_groups=1))
    into_sequence, into_ranks = [3, 1 if keep_keys else 5], [1, 3]
    assert sorted(moved) == sorted([(n, False) for n in into_sequence] * 4 + [(n, True) for n in into_ranks] * 4)


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


# --- what may not matter -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("two", "one"), [
    *((Way(f"a2a+{one.cp_comm_type}", one.sharding, 4, inner=1), one) for one in (
        Way("all_gather", "dual_chunk", 4), Way("all_gather", "contiguous", 4), Way("all_gather", "balanced", 4),
        Way("p2p", "dual_chunk", 4), Way("p2p", "contiguous", 4))),
    *((Way(f"a2a+{kind}", "contiguous", 4, inner=4), Way("a2a", "contiguous", 4)) for kind in ("all_gather", "p2p")),
], ids=str)
def test_levels_of_one_are_the_method_alone(engine, two, one):
    for case in (replace(LONGER, causal=True), BY_NAME["slack"]):
        case = replace(case, heads=(8, 4))
        assert bits(run_on(engine, case, two)) == bits(run_on(engine, case, one))


@pytest.mark.parametrize("way", [*TELLING, Way("a2a+all_gather", "contiguous", 4, inner=4)], ids=str)
def test_what_is_kept_and_how_heads_are_grouped_changes_no_bit(engine, way):
    case = replace(LONGER, heads=(12, 12) if way.cp_size == 3 else (8, 8))
    first, *others = (
        bits(run_on(engine, case, way, keep_keys=keep, head_groups=groups))
        for keep, groups in ((None, 1), (None, 1), (False, 1), (True, 2), (False, 2), (True, 1), (None, None))
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


@EACH_TELLING_WAY
def test_gradients_that_are_asked_for_later_are_the_same(way, late):
    case = of(way, "causal")
    wanted = bits(run_way(case, way, BFLOAT16, engine="reference"))
    assert bits(run_way(case, way, BFLOAT16, engine="reference", call=started)) == wanted
    assert not late


@EACH_TELLING_WAY
def test_gradients_that_nobody_asks_for_harm_nobody(way, late):
    def dropped(layer, plan, inputs):
        *qkv, dout = inputs
        _, saved = layer.forward(*qkv, plan)
        layer.start_backward(dout, saved)
        return step(layer, plan, inputs)

    case = of(way, "causal")
    check(case, BFLOAT16, run_way(case, way, BFLOAT16, engine="reference", call=dropped))
    assert not late


@EACH_TELLING_WAY
def test_layers_share_a_plan_and_its_work_buffers(engine, way):
    """All forwards before all backwards, as in a model, and everything as if alone."""
    case = replace(engine.suited(LONGER), heads=way.heads)

    def program(comm):
        layer = attention(case, way, comm, BFLOAT16, engine=engine.name, deterministic=True)
        plan = layer.plan(way.batch(case), way.sharding)
        inputs = [inputs_of(case, plan, BFLOAT16, engine.xp, seed=seed) for seed in range(3)]
        forwards = [layer.forward(*one[:3], plan, return_max_logit=True) for one in inputs]
        coming = [layer.start_backward(one[3], saved) for one, (_, saved) in zip(inputs, forwards, strict=True)]
        made = [[out, saved.lse, saved.max_logit, dq, *dk_dv()]
                for (out, saved), (dq, dk_dv) in zip(forwards, coming, strict=True)]
        alone = [step(layer, layer.plan(way.batch(case), way.sharding), one).values() for one in inputs]
        return [[[to_host(x).tobytes() for x in one] for one in results] for results in (made, alone)]

    for made, alone in thdattn.comm.run_local(way.cp_size, program, timeout=240):
        assert made == alone


@EACH_TELLING_WAY
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
        buffers = [*plan.workspace.arrays(), *(plan.core or plan).workspace.arrays()]
        assert not any(np.shares_memory(x, buffer) for x in made for buffer in buffers)

    thdattn.comm.run_local(way.cp_size, program)


@EACH_TELLING_WAY
def test_arrays_that_are_not_contiguous_are_accepted(way):
    case = of(way, "causal")

    def strided(layer, plan, inputs):
        return step(layer, plan, [np.asfortranarray(x) for x in inputs])

    check(case, FLOAT64, run_way(case, way, FLOAT64, engine="reference", call=strided))


# --- on a GPU alone ----------------------------------------------------------------------------------------------

LENGTHS = (257, 3, 64, 0, 100, 17, 190)  # than tiles
PACKS_ON_GPU = (
    Case("longer-causal", LENGTHS),
    Case("longer-full", LENGTHS, causal=False, slack=70),
    Case("longer-window", LENGTHS, causal=False, window=(70, 16)),
    Case("longer-window-left", LENGTHS, window=(10, 0)),
    *(BY_NAME[name] for name in ("slack", "one-document", "fewer-tokens-than-ranks", "empty-padded", "padded-between",
                                 "nothing", "nothing-slack")),
)
ON_GPU = ways((2, 2), (2, 1), (1, 2), (4, 2), sizes=(2, 4), heads=(2, 4, 8))
TELLING_ON_GPU = [*ways((2, 2), sizes=(4,), heads=(4,)), Way("a2a", "contiguous", 2)]


@pytest.mark.gpu
@pytest.mark.parametrize(("engine", "case", "way"), [
    pytest.param(engine, replace(case, heads=way.heads), way, id=f"{engine}-{case}-{case.dims}-{way}")
    for engine, cases, some in (
        ("cuda", PACKS_ON_GPU, ON_GPU), ("portable", PACKS_ON_GPU[:4], TELLING_ON_GPU),
        ("cuda", [replace(case, dims=dims) for case in PACKS_ON_GPU[:3:2] for dims in TILES], TELLING_ON_GPU))
    for case in cases for way in some
], indirect=["engine"])
def test_every_pack_mask_and_head_dim_is_the_oracle_on_a_gpu(engine, case, way):
    check(case, BFLOAT16, run_way(case, way, BFLOAT16, xp=engine.xp, engine="cuda"))


@gpu_only
@pytest.mark.parametrize("way", [way for way in TELLING_ON_GPU if way.sharding != "balanced"], ids=str)
def test_wrong_lengths_on_the_gpu_make_results_nan(cupy, way, monkeypatch):
    case, check_plan = Case("device", (1,), heads=(8, 4)), thdattn.Plan.check
    monkeypatch.setattr(thdattn.Plan, "check", lambda plan, wait=True: None)  # which may know at once

    def program(comm):
        layer = case.attention(way.comm(comm), BFLOAT16, engine="cuda", cp_comm_type=way.cp_comm_type)
        plan = layer.plan(PackedBatch(cupy.asarray([0, 64, 32, 128], np.int32), total_rows=128), way.sharding)
        inputs = [cupy.asarray(np.ones((plan.local_rows, *shape), BFLOAT16)) for shape in case.shapes().values()]
        out, saved = layer.forward(*inputs[:3], plan)
        for x in (out, *layer.backward(inputs[3], saved)):
            assert np.isnan(to_host(x).astype(np.float32)).all()
        with pytest.raises(ValueError, match="lengths on the GPU were planned that are wrong"):
            check_plan(plan)

    thdattn.comm.run_local(way.cp_size, program)
