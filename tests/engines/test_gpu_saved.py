"""Printing and comparing what calls return does not wait for the GPU."""

from __future__ import annotations

import pytest
from test_saved import BATCH, SINGLE, attention, forward

import thdattn
from thdattn import PackedBatch

pytestmark = pytest.mark.gpu


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
