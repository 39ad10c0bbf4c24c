"""A Saved belongs to the attention whose forward made it, a Plan to a mask and head dims."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from wrong_values import OnAGpu

import thdattn
from thdattn import PackedBatch
from thdattn.plan.plan import Plan, PlanArrays

SINGLE = thdattn.comm.init("single")
BATCH = PackedBatch([0, 5, 7], [0, 6, 8])
ROWS = 8


def attention(comm=SINGLE, **changed):
    arguments = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "v_head_dim": 6, "dtype": "float32",
                 "engine": "reference"}
    return thdattn.CPAttention(comm, **{**arguments, **changed})


def inputs(layer, rows=ROWS):
    """q, k, v, dout of a layer, every element distinct."""
    heads, kv_heads, dim, v_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim
    rng = np.random.default_rng(0)
    return [rng.standard_normal((rows, *shape)).astype(layer.dtype)
            for shape in ((heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim))]


def forward(layer, plan=None):
    q, k, v, dout = inputs(layer)
    return (*layer.forward(q, k, v, plan or layer.plan(BATCH)), dout)


# --- whose backward ----------------------------------------------------------------------------------------------

FOREIGN = {
    "num_heads": ({"num_heads": 8}, "num_heads 4, wanted 8"),
    "num_kv_heads": ({"num_kv_heads": 4}, "num_kv_heads 2, wanted 4"),
    "multi-query": ({"num_kv_heads": 1}, "num_kv_heads 2, wanted 1"),
    "head_dim": ({"head_dim": 16, "softmax_scale": 8**-0.5}, "head_dim 8, wanted 16"),
    "v_head_dim": ({"v_head_dim": 8}, "v_head_dim 6, wanted 8"),
    "softmax_scale": ({"softmax_scale": 0.5}, f"softmax_scale {8**-0.5}, wanted 0.5"),
    "dtype": ({"dtype": "float16"}, "dtype float32, wanted float16"),
    "wider dtype": ({"dtype": "float64"}, "dtype float32, wanted float64"),
    "deterministic": ({"deterministic": True}, "deterministic False, wanted True"),
    "softcap": ({"softcap": 30}, "softcap 0.0, wanted 30.0"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_backward_refuses_the_saved_of_another_attention_and_names_what_differs(what):
    changed, message = FOREIGN[what]
    other = attention(**changed)
    *_, dout = forward(other)
    _, saved, _ = forward(attention())
    wanted = re.escape(f"saved was made with {message}; pass what this attention's forward returned")
    with pytest.raises(ValueError, match=wanted):
        other.backward(dout, saved)


def test_gradients_of_a_deterministic_layer_are_never_made_by_one_that_is_not():
    _, saved, dout = forward(attention(deterministic=True))
    with pytest.raises(ValueError, match="saved was made with deterministic True, wanted False; pass what"):
        attention().backward(dout, saved)


@pytest.mark.parametrize(("changed", "message"), [
    ({"window": (3, 0)}, r"plan was made for window \(-1, 0\), wanted \(3, 0\)"),
    ({"causal": False}, r"plan was made for window \(-1, 0\), wanted \(-1, -1\)"),
])  # fmt: skip
def test_backward_refuses_the_saved_of_another_mask(changed, message):
    _, saved, dout = forward(attention())
    with pytest.raises(ValueError, match=message):
        attention(**changed).backward(dout, saved)


def test_backward_refuses_the_saved_of_another_rank():
    batch = PackedBatch.from_lengths([16], 4)

    def program(comm):
        layer = attention(comm)
        q, k, v, _ = inputs(layer)
        return layer.forward(q, k, v, layer.plan(batch))[1]

    saves = thdattn.comm.run_local(2, program)

    def exchanged(comm):
        layer = attention(comm)
        with pytest.raises(ValueError, match=f"plan was made for cp_rank {1 - comm.rank}, wanted {comm.rank}; make it"):
            layer.backward(inputs(layer)[3], saves[1 - comm.rank])
        return True

    assert thdattn.comm.run_local(2, exchanged) == [True, True]


def test_backward_of_an_equal_attention_gives_the_same_gradients():
    # Another object, other spellings: what decides the backward is the same.
    one, equal = attention(), attention(softmax_scale=8**-0.5, window=(-1, 0), dtype=np.float32)
    _, saved, dout = forward(one)
    for mine, other in zip(one.backward(dout, saved), equal.backward(dout, saved), strict=True):
        np.testing.assert_array_equal(mine, other)
        assert not np.isnan(other).any()


def test_backward_of_one_forward_can_be_run_twice():
    layer = attention()
    _, saved, dout = forward(layer)
    for first, again in zip(layer.backward(dout, saved), layer.backward(dout, saved), strict=True):
        np.testing.assert_array_equal(first, again)


# --- what is inside ----------------------------------------------------------------------------------------------

KEPT = {"q": (8, 4, 8), "k": (8, 2, 8), "v": (8, 2, 6), "out": (8, 4, 6), "lse": (4, 8)}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("change", ["shape", "flat", "dtype", "strides", "kind", "missing"])
def test_arrays_that_forward_did_not_save_are_refused(name, change):
    shape = KEPT[name]
    changed = {
        "shape": np.ones((*shape[:-1], shape[-1] + 1), np.float32),
        "flat": np.ones(shape, np.float32).ravel(),
        "dtype": np.ones(shape, np.float64),
        "strides": np.ones(shape[::-1], np.float32).T,
        "kind": OnAGpu(),
        "missing": None,
    }[change]
    layer = attention()
    _, saved, dout = forward(layer)
    message = rf"saved\.{name} is .*; wanted float32 {re.escape(str(shape))} as forward saved it; pass what forward"
    with pytest.raises(ValueError, match=message):
        layer.backward(dout, replace(saved, **{name: changed}))


def test_an_array_whose_shape_was_changed_in_place_is_refused():
    layer = attention(num_kv_heads=4)
    _, saved, dout = forward(layer)
    saved.k.resize((8, 8, 4), refcheck=False)
    with pytest.raises(ValueError, match=r"saved\.k is float32 \(8, 8, 4\), a ndarray; wanted float32 \(8, 4, 8\)"):
        layer.backward(dout, saved)


def test_the_saved_of_another_number_of_rows_is_refused():
    layer = attention()
    _, saved, dout = forward(layer)
    shorter = layer.plan(PackedBatch([0, 6]))
    with pytest.raises(ValueError, match=r"saved\.q is float32 \(8, 4, 8\), a ndarray; wanted float32 \(6, 4, 8\)"):
        layer.backward(dout[:6], replace(saved, plan=shorter))


def test_arrays_that_came_back_from_elsewhere_are_accepted():
    # As a program does that keeps activations in other memory until the backward.
    layer = attention()
    _, saved, dout = forward(layer)
    copies = replace(saved, **{name: getattr(saved, name).copy() for name in KEPT})
    for kept, copied in zip(layer.backward(dout, saved), layer.backward(dout, copies), strict=True):
        np.testing.assert_array_equal(kept, copied)


@pytest.mark.parametrize(("dtype", "lse"), [("float16", "float32"), ("bfloat16", "float32"), ("float64", "float64")])
def test_lse_is_at_least_float32(dtype, lse):
    layer = attention(dtype=dtype)
    _, saved, dout = forward(layer)
    assert saved.lse.dtype == lse
    layer.backward(dout, saved)
    with pytest.raises(ValueError, match=rf"saved\.lse is {dtype if dtype != 'float64' else 'float32'}"):
        layer.backward(dout, replace(saved, lse=saved.lse.astype(dtype if dtype != "float64" else "float32")))


# --- whose plan --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changed", "found"), [({"head_dim": 16}, (16, 6)), ({"v_head_dim": 8}, (8, 8))])
def test_a_plan_made_for_other_head_dims_is_refused(changed, found):
    plan, layer = attention(**changed).plan(BATCH), attention()
    assert plan.head_dims == found
    message = re.escape(f"plan was made for head_dims {found}, wanted (8, 6); make it with")
    q, k, v, _ = inputs(layer)
    with pytest.raises(ValueError, match=message):
        layer.forward(q, k, v, plan)
    with pytest.raises(ValueError, match=message):
        layer.flops(plan)


@pytest.mark.parametrize("changed", [
    {"num_heads": 8}, {"num_kv_heads": 1}, {"num_heads": 2}, {"softmax_scale": 0.5}, {"dtype": "float64"},
    {"dtype": "bfloat16"}, {"deterministic": True},
], ids=str)  # fmt: skip
def test_layers_with_the_same_mask_and_head_dims_share_a_plan(changed):
    plan, layer = attention().plan(BATCH), attention(**changed)
    out, saved, dout = forward(layer, plan)
    alone, saved_alone, _ = forward(layer)
    np.testing.assert_array_equal(out, alone)
    for shared, own in zip(layer.backward(dout, saved), layer.backward(dout, saved_alone), strict=True):
        np.testing.assert_array_equal(shared, own)


# --- comparison and representation -------------------------------------------------------------------------------


def test_plans_and_saves_are_compared_and_hashed_by_identity():
    layer = attention()
    plan, again = layer.plan(BATCH), layer.plan(BATCH)
    (_, saved, _), (_, other, _) = forward(layer, plan), forward(layer, plan)
    for one, two in ((plan, again), (plan.arrays, again.arrays), (saved, other), (plan.sharding, again.sharding)):
        assert one == one and one != two
        assert len({one, two, one}) == 2


def test_representations_say_what_it_is():
    layer = attention(softmax_scale=0.5)
    plan = layer.plan(BATCH)
    _, saved, _ = forward(layer, plan)
    batch = "<PackedBatch num_seqs=2, total_tokens=7, total_rows=8>"
    sharding = "<Sharding 'dual_chunk', cp_size=1, local_rows=8>"
    of_plan = f"<Plan cp_rank=0, {sharding}, {batch}, window=(-1, 0), head_dims=(8, 6), engine='reference'>"
    assert repr(BATCH) == batch
    assert repr(plan.sharding) == sharding
    assert repr(plan) == of_plan
    assert repr(saved) == ("<Saved: q float32 (8, 4, 8), k float32 (8, 2, 8), v float32 (8, 2, 6), "
                           f"out float32 (8, 4, 6), lse float32 (4, 8), max_logit None, {of_plan}>")
    assert repr(layer) == ("<CPAttention num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=6, softmax_scale=0.5, "
                           "dtype=float32, deterministic=False, softcap=0.0, sinks=False, causal=True, "
                           "window=(-1, 0), engine='reference', cp_comm_type='all_gather', <SingleComm rank 0 of 1>>")


def test_representations_read_no_array():
    class Offsets(OnAGpu):
        shape, dtype = (3,), np.dtype("int32")

    batch = PackedBatch(Offsets(), total_rows=8)
    sharding = thdattn.Sharding(batch, 2)
    arrays = PlanArrays(*[OnAGpu()] * 9)
    plan = Plan(sharding, 1, (-1, 0), (64, 64), (64, 64), arrays, SimpleNamespace(name="cuda"))
    saved = thdattn.Saved(*[OnAGpu()] * 6, plan, {})
    assert repr(batch) == "<PackedBatch num_seqs=2, lengths on a GPU, total_rows=8>"
    for thing in (batch, sharding, arrays, plan, saved):
        assert len(repr(thing)) < 500
        assert thing == thing and hash(thing) is not None
    assert "max_logit float32 (8, 4, 8)" in repr(saved)


def test_representations_stay_short_for_long_batches():
    batch = PackedBatch.from_lengths(np.arange(1000) % 9, multiple=2)
    layer = attention()
    plan = layer.plan(batch)
    q, k, v, _ = inputs(layer, plan.local_rows)
    for thing in (batch, plan.sharding, plan, plan.arrays, layer, layer.forward(q, k, v, plan)[1]):
        assert len(repr(thing)) < 500
