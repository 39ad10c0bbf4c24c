"""Plans of every method, and what forward keeps: of which attentions they are, and where tokens are."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16
from ways import BY_NAME, TELLING, Way, attention, inputs_of, of

import thdattn

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
