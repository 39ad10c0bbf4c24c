"""A foreign Saved or Plan is refused before a kernel reads out of bounds; printing one does not wait for the GPU."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16, to_host

import thdattn
from thdattn import PackedBatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_gpu")]

SINGLE = thdattn.comm.init("single")
BATCH = PackedBatch([0, 150, 377], [0, 160, 390], total_rows=400)
KEPT = {"q": (400, 4, 192), "k": (400, 2, 192), "v": (400, 2, 128), "out": (400, 4, 128), "lse": (4, 400)}


def attention(**changed):
    arguments = {"num_heads": 4, "head_dim": 192, "num_kv_heads": 2, "v_head_dim": 128, "engine": "cuda",
                 "deterministic": True}
    return thdattn.CPAttention(SINGLE, **{**arguments, **changed})


def forward(cupy, layer, plan=None):
    """out, saved, dout of a layer; padding is NaN."""
    rng = np.random.default_rng(0)
    heads, kv_heads, dim, v_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim
    q, k, v, dout = (
        cupy.asarray(BATCH.pack([rng.standard_normal((n, *shape)).astype(layer.dtype) for n in BATCH.lengths], np.nan))
        for shape in ((heads, dim), (kv_heads, dim), (kv_heads, v_dim), (heads, v_dim))
    )
    return (*layer.forward(q, k, v, plan or layer.plan(BATCH)), dout)


@pytest.mark.parametrize(("changed", "message"), [
    ({"num_heads": 8}, "num_heads 4, wanted 8"),
    ({"num_kv_heads": 4}, "num_kv_heads 2, wanted 4"),
    ({"v_head_dim": 192}, "v_head_dim 128, wanted 192"),
    ({"head_dim": 128}, "head_dim 192, wanted 128"),
    ({"softmax_scale": 0.5}, f"softmax_scale {192**-0.5}, wanted 0.5"),
    ({"dtype": "float16"}, "dtype bfloat16, wanted float16"),
    ({"deterministic": False}, "deterministic True, wanted False"),
], ids=str)  # fmt: skip
def test_backward_refuses_the_saved_of_another_attention(cupy, changed, message):
    other = attention(**changed)
    _, saved, dout = forward(cupy, attention())
    with pytest.raises(ValueError, match=re.escape(f"saved was made with {message}; pass what this attention's")):
        other.backward(dout, saved)


@pytest.mark.parametrize("changed", [{"head_dim": 128}, {"v_head_dim": 192}], ids=str)
def test_a_plan_made_for_other_head_dims_is_refused(cupy, changed):
    plan = attention(**changed).plan(BATCH)
    with pytest.raises(ValueError, match=re.escape(f"plan was made for head_dims {plan.head_dims}, wanted (192, 128)")):
        forward(cupy, attention(), plan)


@pytest.mark.parametrize("changed", [
    {"num_heads": 8}, {"num_kv_heads": 1}, {"softmax_scale": 0.5}, {"dtype": "float16"}, {"num_heads": 2},
], ids=str)  # fmt: skip
def test_layers_with_the_same_mask_and_head_dims_share_a_plan(cupy, changed):
    first, layer = attention(), attention(**changed)
    plan = first.plan(BATCH)
    _, first_saved, first_dout = forward(cupy, first, plan)
    out, saved, dout = forward(cupy, layer, plan)
    first.backward(first_dout, first_saved)  # work buffers of one layer do not reach the other
    alone, saved_alone, _ = forward(cupy, layer)
    shared = (out, *layer.backward(dout, saved))
    for mine, own in zip(shared, (alone, *layer.backward(dout, saved_alone)), strict=True):
        assert to_host(mine).tobytes() == to_host(own).tobytes()


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("change", ["shape", "dtype", "strides", "host", "missing"])
def test_arrays_that_forward_did_not_save_are_refused(cupy, name, change):
    shape, dtype = KEPT[name], np.dtype("float32") if name == "lse" else BFLOAT16
    changed = {
        "shape": lambda: cupy.zeros((*shape[:-1], shape[-1] - 64), dtype),
        "dtype": lambda: cupy.zeros(shape, np.float16),
        "strides": lambda: cupy.zeros(shape[::-1], dtype).T,
        "host": lambda: np.zeros(shape, dtype),
        "missing": lambda: None,
    }[change]()
    layer = attention()
    _, saved, dout = forward(cupy, layer)
    message = rf"saved\.{name} is .*; wanted {dtype} {re.escape(str(shape))} as forward saved it; pass what forward"
    with pytest.raises(ValueError, match=message):
        layer.backward(dout, replace(saved, **{name: changed}))


def test_printing_comparing_and_hashing_read_nothing_from_the_gpu(cupy):
    layer = attention()
    offsets = map(cupy.asarray, (BATCH.cu_seqlens, BATCH.cu_seqlens_padded))
    plans = [layer.plan(BATCH), layer.plan(PackedBatch(*offsets, total_rows=400))]
    _, saved, _ = forward(cupy, layer, plans[0])
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


def test_torch_tensors_that_require_grad_are_sent_to_autograd(cupy):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    layer = thdattn.CPAttention(SINGLE, 2, 64, engine="cuda")
    plan = layer.plan(PackedBatch([0, 4]))
    x = torch.zeros(4, 2, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with pytest.raises(TypeError, match=r"q is a torch\.Tensor that cannot be read .*pass q\.detach\(\), or use"):
        layer.forward(x, x, x, plan)
    assert layer.forward(x.detach(), x.detach(), x.detach(), plan)[0].shape == (4, 2, 64)
