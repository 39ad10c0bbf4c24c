"""thdattn.torch.varlen_attention and the module for several ranks, against torch's own attention."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from cases import BFLOAT16, offsets

import thdattn
from thdattn import oracle, varlen

torch = pytest.importorskip("torch")
from torch_cases import (  # noqa: E402 - not before torch is known to be there
    FIELDS,
    HEAD_DIM,
    HEADS,
    KEY_LENGTHS,
    KV_HEADS,
    LENGTHS,
    MASKS,
    by_torch,
    cp_attention,
    one_layer,
    random_documents,
)

from thdattn.torch import (  # noqa: E402
    ContextParallelAttention,
    as_tensor,
    attention,
    on_torch_stream,
    varlen_attention,
)


@pytest.fixture(autouse=True)
def nothing_kept():
    """A plan that an earlier test left would have that test's memory."""
    varlen._kept.cache_clear()


def by_varlen(documents, dtype, causal, window, device="cpu", offsets_on="cpu"):
    """out, dq, dk, dv of the pack in varlen_attention; float64."""
    q, k, v, dout = (torch.from_numpy(np.concatenate(x)).to(device, dtype) for x in documents)
    cu_seqlens = [torch.from_numpy(offsets(tuple(map(len, documents[i])))).to(offsets_on) for i in (0, 1)]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = varlen_attention(*leaves, *cu_seqlens, causal=causal, window_size=window)
    out.backward(dout)
    return {name: x.double().cpu().numpy() for name, x in
            zip(FIELDS, (out.detach(), *(x.grad for x in leaves)), strict=True)}


@pytest.mark.parametrize("key_lengths", [LENGTHS, KEY_LENGTHS], ids=["self", "cross"])
@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_varlen_attention_is_torchs_own_in_float64(causal, window, key_lengths):
    documents = random_documents(np.float64, key_lengths)
    found = by_varlen(documents, torch.float64, causal, window)
    for field, right in by_torch(documents, torch.float64, causal, window).items():
        np.testing.assert_allclose(found[field], right, rtol=1e-10, atol=1e-12, err_msg=field)


def test_gradients_with_sinks_and_capped_logits_are_finite_differences():
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, heads, 3, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 3, 3, 7], dtype=torch.int32)

    def of(*inputs):
        return varlen_attention(*inputs[:3], cu_seqlens, cu_seqlens, causal=True, softcap=1.5, sinks=inputs[3])

    assert torch.autograd.gradcheck(of, (q, k, v, sinks))


def test_sinks_of_16_bits_get_gradients_of_16_bits():
    q = torch.randn(7, 2, 4)
    sinks = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    cu_seqlens = torch.tensor([0, 7], dtype=torch.int32)
    varlen_attention(q, q, q, cu_seqlens, cu_seqlens, sinks=sinks).sum().backward()
    assert sinks.grad.dtype == torch.bfloat16 and sinks.grad.abs().min() > 0


def test_a_tensor_of_offsets_on_the_host_is_planned_once(monkeypatch):
    _, _, q, k, v = one_layer()
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    first = varlen_attention(q, k, v, cu_seqlens, cu_seqlens)
    monkeypatch.setattr(thdattn.PackedBatch, "__init__", None)
    assert torch.equal(varlen_attention(q, k, v, cu_seqlens, cu_seqlens.clone()), first)


def test_varlen_attention_refuses_by_name():
    _, _, q, k, v = one_layer()
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"dropout_p is 0\.1, which is not supported"):
        varlen_attention(q, k, v, cu_seqlens, cu_seqlens, 5, 5, 0.1)
    with pytest.raises(ValueError, match=r"q has shape \(8, 256\), wanted \(tokens, heads, width\)"):
        varlen_attention(q.flatten(1), k, v, cu_seqlens, cu_seqlens)
    with pytest.raises(TypeError, match="cu_seqlens_q of 8 rows is refused: cu_seqlens is int64"):
        varlen_attention(q, k, v, cu_seqlens.long(), cu_seqlens)
    with pytest.raises(TypeError, match=r"cu_seqlens_q of 8 rows is refused: cu_seqlens is a torch\.Tensor that"):
        varlen_attention(q, k, v, cu_seqlens.bfloat16(), cu_seqlens)
    with pytest.raises(TypeError, match="v is float32, wanted float64"):
        varlen_attention(q, k, v.float(), cu_seqlens, cu_seqlens)


def test_tensors_on_a_gpu_without_cupy_say_what_is_missing(monkeypatch):
    def without_gpu(engine, comm):
        raise RuntimeError(f"engine is {engine!r}, but CuPy finds no usable GPU")

    varlen.usable_cupy.cache_clear()
    monkeypatch.setattr(varlen, "choose_engine", without_gpu)
    with pytest.raises(RuntimeError, match="but CuPy finds no usable GPU"), on_torch_stream(torch.device("cuda:0")):
        pass


# --- the module ------------------------------------------------------------------------------------------------


def test_module_computes_over_the_ranks_of_its_comm():
    documents = random_documents(np.float64)
    batch = thdattn.PackedBatch.from_lengths(LENGTHS, multiple=4)
    packs = [batch.pack(x) for x in documents]

    def program(comm):
        module = ContextParallelAttention(comm, HEADS, HEAD_DIM, num_kv_heads=KV_HEADS, dtype=torch.float64,
                                          engine="reference")
        assert not list(module.parameters()) and "num_heads=4, head_dim=64" in repr(module)
        plan = module.plan(batch)
        return plan.sharding, [module(*(torch.from_numpy(plan.sharding.shard(x, comm.rank)) for x in packs[:3]), plan)]

    ranks = thdattn.comm.run_local(2, program)
    found = ranks[0][0].unshard([made[0].numpy() for _, made in ranks])
    right = by_torch(documents, torch.float64, True, (-1, -1))["out"]
    np.testing.assert_allclose(np.concatenate(batch.unpack(found)), right, rtol=1e-10, atol=1e-12)


def test_copies_of_a_module_share_its_attention():
    module = ContextParallelAttention(thdattn.comm.init("single"), 2, 8, dtype="float64", engine="reference")
    twin = copy.deepcopy(torch.nn.ModuleList([module]))[0].eval()
    assert twin is not module and twin.attn is module.attn
    assert module.training and not twin.training


def test_module_names_a_group_that_is_none():
    with pytest.raises(TypeError, match=r"group is 2, a int; wanted a Comm or a process group"):
        ContextParallelAttention(2, 4, 16)


def test_module_takes_a_group_of_torch_distributed():
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        attn, plan, q, k, v = one_layer()
        for group in (None, distributed.group.WORLD, distributed.new_group([0])):
            module = ContextParallelAttention(
                group, HEADS, HEAD_DIM, num_kv_heads=KV_HEADS, dtype="float64", engine="reference")
            out = module(q, k, v, module.plan(plan.batch))
            assert module.attn.comm.size == 1
            assert torch.equal(out, attention(q, k, v, attn, plan))
    finally:
        distributed.destroy_process_group()


# --- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("offsets_on", ["cpu", "cuda"])
@pytest.mark.parametrize("key_lengths", [LENGTHS, KEY_LENGTHS], ids=["self", "cross"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_varlen_attention_is_within_budget(torch_cuda, poisoned_gpu, dtype, key_lengths, offsets_on):
    kept = BFLOAT16 if dtype == torch.bfloat16 else np.dtype(np.float16)
    documents = random_documents(kept, key_lengths)
    found = by_varlen(documents, dtype, True, (-1, -1), torch_cuda, offsets_on)
    truth = oracle.truth(
        thdattn.PackedBatch.from_lengths(LENGTHS), *map(np.concatenate, documents), dtype=kept, causal=True,
        key_batch=thdattn.PackedBatch.from_lengths(key_lengths))
    for field, x in found.items():
        verdict = truth.judge(field, x.astype(kept))
        assert verdict.good, f"{field}: {verdict}"


@pytest.mark.gpu
def test_on_a_gpu_results_are_bitwise_those_of_cpattention(torch_cuda, cupy):
    q, k, v, dout = (
        torch.from_numpy(np.concatenate(x)).to(torch_cuda, torch.bfloat16) for x in random_documents(BFLOAT16))
    attn = cp_attention(thdattn.comm.init("single"), torch.bfloat16, torch_cuda, deterministic=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with on_torch_stream(q.device):
        plan = attn.plan(thdattn.PackedBatch.from_lengths(LENGTHS), "contiguous")
        right, saved = attn.forward(*(x.detach() for x in leaves), plan)
        wanted = right, *attn.backward(dout, saved)
    cu_seqlens = torch.from_numpy(offsets(LENGTHS))
    for out in (attention(*leaves, attn, plan),
                varlen_attention(*leaves, cu_seqlens, cu_seqlens, causal=True, deterministic=True)):
        found = out.detach(), *torch.autograd.grad(out, leaves, dout)
        for field, x, y in zip(FIELDS, found, wanted, strict=True):
            assert torch.equal(x.view(torch.int16), as_tensor(y).view(torch.int16)), field


@pytest.mark.gpu
def test_on_a_gpu_a_torch_graph_is_refused(torch_cuda, cupy):
    packs = [np.concatenate(x) for x in random_documents(BFLOAT16)]
    q, k, v, _ = (torch.from_numpy(x).to(torch_cuda, torch.bfloat16) for x in packs)
    cu_seqlens = torch.from_numpy(offsets(LENGTHS))
    varlen_attention(q, k, v, cu_seqlens, cu_seqlens)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="captures a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        varlen_attention(q, k, v, cu_seqlens, cu_seqlens)
