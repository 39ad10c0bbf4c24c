"""A Saved belongs to the attention whose forward made it, a Plan to a mask and head dims, on each engine."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cases import BFLOAT16, to_host, token_rows
from wrong_values import DeviceOffsets, OnAGpu

import thdattn
from thdattn import PackedBatch
from thdattn.plan.plan import Plan, PlanArrays

SINGLE = thdattn.comm.init("single")
BATCH = PackedBatch([0, 150, 377], [0, 160, 390], total_rows=400)


def attention(engine, comm=SINGLE, **changed):
    arguments = {"num_heads": 4, "head_dim": 192, "num_kv_heads": 2, "v_head_dim": 128, "deterministic": True,
                 "engine": engine.name}
    return thdattn.CPAttention(comm, **{**arguments, **changed})


def small(comm=SINGLE, **changed):
    """On the NumPy engine."""
    arguments = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "v_head_dim": 6, "dtype": "float32",
                 "engine": "reference"}
    return thdattn.CPAttention(comm, **{**arguments, **changed})


def inputs(layer, rows):
    """q, k, v, dout of a layer, every element distinct."""
    heads, kv_heads, dim, v_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim
    rng = np.random.default_rng(0)
    return [rng.standard_normal((rows, *shape)).astype(layer.dtype)
            for shape in ((heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim))]


def forward(engine, layer, plan=None):
    """out, saved and dout of a layer; padding is NaN."""
    arrays = inputs(layer, BATCH.total_rows)
    for x in arrays:
        x[np.setdiff1d(np.arange(len(x)), token_rows(BATCH))] = np.nan
    *qkv, dout = map(engine.xp.asarray, arrays)
    return (*layer.forward(*qkv, plan or layer.plan(BATCH)), dout)


def bits(arrays):
    return [to_host(x).tobytes() for x in arrays]


# --- whose backward ----------------------------------------------------------------------------------------------

FOREIGN = {
    "num_heads": ({"num_heads": 8}, "num_heads 4, wanted 8"),
    "num_kv_heads": ({"num_kv_heads": 4}, "num_kv_heads 2, wanted 4"),
    "multi-query": ({"num_kv_heads": 1}, "num_kv_heads 2, wanted 1"),
    "head_dim": ({"head_dim": 128, "softmax_scale": 192**-0.5}, "head_dim 192, wanted 128"),
    "v_head_dim": ({"v_head_dim": 192}, "v_head_dim 128, wanted 192"),
    "softmax_scale": ({"softmax_scale": 0.5}, f"softmax_scale {192**-0.5}, wanted 0.5"),
    "dtype": ({"dtype": "float16"}, "dtype bfloat16, wanted float16"),
    "deterministic": ({"deterministic": False}, "deterministic True, wanted False"),
    "softcap": ({"softcap": 30}, "softcap 0.0, wanted 30.0"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_backward_refuses_the_saved_of_another_attention_and_names_what_differs(engine, what):
    changed, message = FOREIGN[what]
    other = attention(engine, **changed)
    *_, dout = forward(engine, other)
    _, saved, _ = forward(engine, attention(engine))
    wanted = re.escape(f"saved was made with {message}; pass what this attention's forward returned")
    with pytest.raises(ValueError, match=wanted):
        other.backward(dout, saved)


@pytest.mark.parametrize(("changed", "message"), [
    ({"window": (3, 0)}, r"plan was made for window \(-1, 0\), wanted \(3, 0\)"),
    ({"causal": False}, r"plan was made for window \(-1, 0\), wanted \(-1, -1\)"),
])
def test_backward_refuses_the_saved_of_another_mask(engine, changed, message):
    _, saved, dout = forward(engine, attention(engine))
    with pytest.raises(ValueError, match=message):
        attention(engine, **changed).backward(dout, saved)


def test_backward_of_an_equal_attention_gives_the_same_gradients_twice(engine):
    # Another object, other spellings: what decides the backward is the same.
    one, equal = attention(engine), attention(engine, softmax_scale=192**-0.5, window=(-1, 0), dtype=BFLOAT16)
    _, saved, dout = forward(engine, one)
    wanted = one.backward(dout, saved)
    assert not any(np.isnan(to_host(x).astype(np.float32)).any() for x in wanted)
    assert bits(equal.backward(dout, saved)) == bits(one.backward(dout, saved)) == bits(wanted)


# --- what is inside ----------------------------------------------------------------------------------------------

KEPT = {"q": (400, 4, 192), "k": (400, 2, 192), "v": (400, 2, 128), "out": (400, 4, 128), "lse": (4, 400)}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("change", ["shape", "flat", "dtype", "strides", "device", "missing"])
def test_arrays_that_forward_did_not_save_are_refused(engine, name, change):
    shape, dtype, zeros = KEPT[name], np.dtype("float32") if name == "lse" else BFLOAT16, engine.xp.zeros
    changed = {
        "shape": lambda: zeros((*shape[:-1], shape[-1] - 64), dtype),
        "flat": lambda: zeros(shape, dtype).ravel(),
        "dtype": lambda: zeros(shape, np.float16),
        "strides": lambda: zeros(shape[::-1], dtype).T,
        "device": lambda: OnAGpu() if engine.name == "reference" else np.zeros(shape, dtype),
        "missing": lambda: None,
    }[change]()
    layer = attention(engine)
    _, saved, dout = forward(engine, layer)
    message = rf"saved\.{name} is .*; wanted {dtype} {re.escape(str(shape))} as forward saved it; pass what forward"
    with pytest.raises(ValueError, match=message):
        layer.backward(dout, replace(saved, **{name: changed}))


def test_an_array_whose_shape_was_changed_in_place_is_refused():
    layer = small(num_kv_heads=4)
    q, k, v, dout = inputs(layer, 8)
    _, saved = layer.forward(q, k, v, layer.plan(PackedBatch([0, 8])))
    saved.k.resize((8, 8, 4), refcheck=False)
    with pytest.raises(ValueError, match=r"saved\.k is float32 \(8, 8, 4\), a ndarray; wanted float32 \(8, 4, 8\)"):
        layer.backward(dout, saved)


def test_arrays_that_came_back_from_elsewhere_are_accepted(engine):
    # As a program does that keeps activations in other memory until the backward.
    layer = attention(engine)
    _, saved, dout = forward(engine, layer)
    copies = replace(saved, **{name: getattr(saved, name).copy() for name in KEPT})
    assert bits(layer.backward(dout, saved)) == bits(layer.backward(dout, copies))


@pytest.mark.parametrize(("dtype", "lse"), [("float16", "float32"), ("bfloat16", "float32"), ("float64", "float64")])
def test_lse_is_at_least_float32(dtype, lse):
    layer, narrow = small(dtype=dtype), "float32" if dtype == "float64" else dtype
    q, k, v, dout = inputs(layer, 8)
    _, saved = layer.forward(q, k, v, layer.plan(PackedBatch([0, 8])))
    assert saved.lse.dtype == lse
    layer.backward(dout, saved)
    with pytest.raises(ValueError, match=rf"saved\.lse is {narrow}"):
        layer.backward(dout, replace(saved, lse=saved.lse.astype(narrow)))


# --- whose plan --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [{"head_dim": 128}, {"v_head_dim": 192}], ids=str)
def test_a_plan_made_for_other_head_dims_is_refused(engine, changed):
    plan, layer = attention(engine, **changed).plan(BATCH), attention(engine)
    assert plan.head_dims == (changed.get("head_dim", 192), changed.get("v_head_dim", 128))
    message = re.escape(f"plan was made for head_dims {plan.head_dims}, wanted (192, 128); make it with")
    with pytest.raises(ValueError, match=message):
        forward(engine, layer, plan)
    with pytest.raises(ValueError, match=message):
        layer.flops(plan)


@pytest.mark.parametrize("changed", [
    {"num_heads": 8}, {"num_kv_heads": 1}, {"num_heads": 2}, {"softmax_scale": 0.5}, {"dtype": "float16"},
    {"deterministic": False},
], ids=str)
def test_layers_with_the_same_mask_and_head_dims_share_a_plan(engine, changed):
    layers = attention(engine), attention(engine, **changed)
    plan = layers[0].plan(BATCH)
    forwards = [forward(engine, layer, plan) for layer in layers]
    shared = [(out, *layer.backward(dout, saved)) for layer, (out, saved, dout) in zip(layers, forwards, strict=True)]
    for layer, found in zip(layers, shared, strict=True):
        out, saved, dout = forward(engine, layer)
        wanted = out, *layer.backward(dout, saved)
        if layer.deterministic:
            assert bits(found) == bits(wanted)
        else:
            assert bits(found[:1]) == bits(wanted[:1])


# --- comparison and representation -------------------------------------------------------------------------------


def test_plans_and_saves_are_compared_and_hashed_by_identity(engine):
    layer, equal_batch = attention(engine), PackedBatch(BATCH.cu_seqlens, BATCH.cu_seqlens_padded, total_rows=400)
    plan, again = layer.plan(BATCH), layer.plan(equal_batch)  # plans of one batch may share arrays
    (_, saved, _), (_, other, _) = forward(engine, layer, plan), forward(engine, layer, plan)
    for one, two in ((plan, again), (plan.arrays, again.arrays), (saved, other), (plan.sharding, again.sharding)):
        assert one == one and one != two
        assert len({one, two, one}) == 2


def test_representations_say_what_it_is():
    layer, short = small(softmax_scale=0.5), PackedBatch([0, 5, 7], [0, 6, 8])
    plan = layer.plan(short)
    _, saved = layer.forward(*inputs(layer, 8)[:3], plan)
    batch = "<PackedBatch num_seqs=2, total_tokens=7, total_rows=8>"
    sharding = "<Sharding 'dual_chunk', cp_size=1, local_rows=8>"
    of_plan = f"<Plan cp_rank=0, {sharding}, {batch}, window=(-1, 0), head_dims=(8, 6), engine='reference'>"
    assert repr(short) == batch
    assert repr(plan.sharding) == sharding
    assert repr(plan) == of_plan
    assert repr(saved) == ("<Saved: q float32 (8, 4, 8), k float32 (8, 2, 8), v float32 (8, 2, 6), "
                           f"out float32 (8, 4, 6), lse float32 (4, 8), max_logit None, {of_plan}>")
    assert repr(layer) == ("<CPAttention num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=6, softmax_scale=0.5, "
                           "dtype=float32, deterministic=False, softcap=0.0, sinks=False, causal=True, "
                           "window=(-1, 0), engine='reference', cp_comm_type='all_gather', <SingleComm rank 0 of 1>>")


def test_representations_read_no_array():
    batch = PackedBatch(DeviceOffsets(3), total_rows=8)
    sharding = thdattn.Sharding(batch, 2)
    arrays = PlanArrays(*[OnAGpu()] * 9)
    plan = Plan(sharding, 1, (-1, 0), (64, 64), (64, 64), arrays, SimpleNamespace(name="cuda"), sharding.batch)
    saved = thdattn.Saved(*[OnAGpu()] * 6, plan, {})
    assert repr(batch) == "<PackedBatch num_seqs=2, lengths on a GPU, total_rows=8>"
    for thing in (batch, sharding, arrays, plan, saved):
        assert len(repr(thing)) < 500
        assert thing == thing and hash(thing) is not None
    assert "max_logit float32 (8, 4, 8)" in repr(saved)


# --- on a GPU alone ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["cuda"], indirect=True)
def test_printing_comparing_and_hashing_read_nothing_from_the_gpu(engine, cupy):
    layer = attention(engine)
    offsets = map(cupy.asarray, (BATCH.cu_seqlens, BATCH.cu_seqlens_padded))
    plans = [layer.plan(BATCH), layer.plan(PackedBatch(*offsets, total_rows=400))]
    _, saved, _ = forward(engine, layer, plans[0])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()  # in which a copy to the host is an error
        try:
            things = [layer, saved, saved.plan.arrays]
            things += [part for plan in plans for part in (plan, plan.sharding, plan.batch)]
            texts = [repr(thing) for thing in things]
            same = [one is two for one in things for two in things if one == two]
            num_hashes = len({*things})
        finally:
            stream.end_capture()
    assert all(len(text) < 500 for text in texts) and all(same)
    assert num_hashes == len({id(thing) for thing in things})
    assert "lengths on a GPU, total_rows=400" in texts[-1]


@pytest.mark.gpu
def test_torch_tensors_that_require_grad_are_sent_to_autograd(torch_cuda):
    torch = pytest.importorskip("torch")
    layer = thdattn.CPAttention(SINGLE, 2, 64, engine="cuda")
    plan = layer.plan(PackedBatch([0, 4]))
    x = torch.zeros(4, 2, 64, dtype=torch.bfloat16, device=torch_cuda, requires_grad=True)
    with pytest.raises(TypeError, match=r"q is a torch\.Tensor that cannot be read .*pass q\.detach\(\), or use"):
        layer.forward(x, x, x, plan)
    assert layer.forward(x.detach(), x.detach(), x.detach(), plan)[0].shape == (4, 2, 64)
