"""thdattn.torch inside torch's autograd: attention, varlen_attention and the module, against torch's own attention."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import numpy as np
import pytest
from cases import BFLOAT16, offsets
from torch_cases import (
    FIELDS,
    HEAD_DIM,
    HEADS,
    KEY_LENGTHS,
    KV_HEADS,
    LENGTHS,
    MASKS,
    by_ranks,
    by_torch,
    cp_attention,
    one_layer,
    random_documents,
    spied,
    torch,
)
from ways import Way

import thdattn
from thdattn import oracle, varlen
from thdattn.torch import ContextParallelAttention, as_tensor, attention, on_torch_stream, varlen_attention

WAYS = [Way("all_gather", "balanced", 2), Way("a2a", "contiguous", 2), Way("p2p", "dual_chunk", 2),
        Way("a2a+all_gather", "balanced", 4, 2)]


@pytest.fixture(autouse=True)
def nothing_kept():
    """A plan that an earlier test left would have that test's memory."""
    varlen._kept.cache_clear()


@pytest.mark.parametrize(("causal", "window", "cp_size", "way"), [
    *((*mask, cp_size, None) for mask in MASKS for cp_size in (1, 2, 4)),
    *((True, (20, 0), way.cp_size, way) for way in WAYS),
], ids=str)
def test_float64_is_torchs_own_attention(causal, window, cp_size, way):
    documents = random_documents(np.float64)
    found = by_ranks(documents, torch.float64, causal, window, cp_size, way=way)
    for field, right in by_torch(documents, torch.float64, causal, window).items():
        np.testing.assert_allclose(found[field], right, rtol=1e-10, atol=1e-12, err_msg=field)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_module_passes_the_method_on(way):
    """With its own sharding where none is asked for."""

    def program(comm):
        module = ContextParallelAttention(way.comm(comm), HEADS, HEAD_DIM, num_kv_heads=KV_HEADS, dtype=torch.float64,
                                          engine="reference", cp_comm_type=way.cp_comm_type)
        batch = thdattn.PackedBatch.from_lengths(LENGTHS, 2 * comm.size)
        assert module.attn.cp_comm_type == way.cp_comm_type and module.attn.comm.size == comm.size
        assert module.plan(batch, way.sharding).sharding.strategy == way.sharding
        return module.plan(batch).sharding.strategy

    found = thdattn.comm.run_local(way.cp_size, program)
    assert found == ["contiguous" if way.cp_comm_type == "a2a" else "dual_chunk"] * way.cp_size


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_nothing_is_copied_on_the_way_in_or_out(monkeypatch, dtype):
    forward, backward = spied(monkeypatch, "forward"), spied(monkeypatch, "backward")
    attn, plan, q, k, v = one_layer(dtype)
    out = attention(q, k, v, attn, plan)
    dout = torch.ones_like(out)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    [((dout_seen, saved), gradients)], [(_, (result, _))] = backward, forward
    tensors = (out, out, q, k, v, dq, dk, dv)
    arrays = (result, saved.out, saved.q, saved.k, saved.v, *gradients)
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.data_ptr() == address(array)
    assert dout_seen.data_ptr() == dout.data_ptr()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_results_in_bfloat16_are_bitwise_those_of_cpattention(device, request):
    if device != "cpu":
        request.getfixturevalue("torch_cuda")
    q, k, v, dout = (
        torch.from_numpy(np.concatenate(x)).to(device, torch.bfloat16) for x in random_documents(BFLOAT16))
    attn = cp_attention(thdattn.comm.init("single"), torch.bfloat16, device, deterministic=True)
    with on_torch_stream(q.device):
        plan = attn.plan(thdattn.PackedBatch.from_lengths(LENGTHS), "contiguous")
        right, saved = attn.forward(q, k, v, plan)
        wanted = [as_tensor(x) for x in (right, *attn.backward(dout, saved))]
    leaves, ends = [x.requires_grad_() for x in (q, k, v)], torch.from_numpy(offsets(LENGTHS))
    for out in (attention(*leaves, attn, plan),
                varlen_attention(*leaves, ends, ends, causal=True, deterministic=True)):
        found = out.detach(), *torch.autograd.grad(out, leaves, dout)
        for field, x, y in zip(FIELDS, found, wanted, strict=True):
            assert x.dtype == torch.bfloat16 and torch.equal(x.view(torch.int16), y.view(torch.int16)), field


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept(without):
    attn, plan, q, _, v = one_layer()
    array = np.ones((8, KV_HEADS, HEAD_DIM))
    kept = weakref.ref(array)
    with without():
        out = attention(q, torch.from_numpy(array), v, attn, plan)
    del array
    gc.collect()
    assert kept() is None
    assert out.grad_fn is None and not out.requires_grad


def test_a_backward_frees_what_the_forward_kept_though_the_loss_lives_on():
    attn, plan, q, _, v = one_layer()
    array = np.ones((8, KV_HEADS, HEAD_DIM))
    kept = weakref.ref(array)
    loss = attention(q, torch.from_numpy(array), v, attn, plan).sum()
    del array
    gc.collect()
    assert kept() is not None
    loss.backward()
    gc.collect()
    assert kept() is None
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_retained_graph_runs_again():
    attn, plan, q, k, v = one_layer()
    loss = attention(q, k, v, attn, plan).square().sum()
    first, second = (torch.autograd.grad(loss, (q, k, v), retain_graph=True) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)


def test_saved_tensors_may_be_moved_away_and_back():
    """As torch.autograd.graph.save_on_cpu does."""
    attn, plan, q, k, v = one_layer()
    wanted = torch.autograd.grad(attention(q, k, v, attn, plan).square().sum(), (q, k, v))
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x.clone()) or len(held) - 1, held.__getitem__):
        out = attention(q, k, v, attn, plan)
    assert len(held) == 5  # q, k, v, out, lse
    for x, y in zip(torch.autograd.grad(out, (q, k, v), 2 * out.detach()), wanted, strict=True):
        assert torch.equal(x, y)


def test_inputs_that_are_not_contiguous_are_copied_once(monkeypatch):
    forward, backward = spied(monkeypatch, "forward"), spied(monkeypatch, "backward")
    attn, plan, *leaves = one_layer()
    wanted = torch.autograd.grad(attention(*leaves, attn, plan).square().sum(), leaves)
    spread = [x.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_() for x in leaves]
    assert not any(x.is_contiguous() for x in spread)
    found = torch.autograd.grad(attention(*spread, attn, plan).square().sum(), spread)
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y)
    for seen, name in zip(forward[-1][0], "qkv", strict=False):
        assert seen.data_ptr() == address(getattr(backward[-1][0][1], name))


def test_checkpointed_layers_compute_again():
    attn, plan, *leaves = one_layer()
    wanted = torch.autograd.grad(attention(*leaves, attn, plan).square().sum(), leaves)
    out = torch.utils.checkpoint.checkpoint(lambda *x: attention(*x, attn, plan), *leaves, use_reentrant=False)
    for x, y in zip(torch.autograd.grad(out.square().sum(), leaves), wanted, strict=True):
        assert torch.equal(x, y)


def test_gradients_that_are_not_contiguous_are_accepted():
    attn, plan, q, k, v = one_layer()
    weights = torch.randn(8, HEADS, HEAD_DIM, dtype=torch.float64)
    expanded, transposed = torch.ones(()).double(), weights.permute(2, 1, 0)
    for loss in (lambda out: out.sum() * expanded, lambda out: (out.permute(2, 1, 0) * transposed).sum()):
        leaves = (q, k, v)
        found = torch.autograd.grad(loss(attention(*leaves, attn, plan)), leaves)
        plain = [x.repeat_interleave(HEADS // x.shape[1], dim=1).transpose(0, 1) for x in leaves]
        own = torch.nn.functional.scaled_dot_product_attention(*plain, is_causal=True).transpose(0, 1)
        for x, y in zip(found, torch.autograd.grad(loss(own), leaves), strict=True):
            torch.testing.assert_close(x, y)


def imaginary(x):
    """Of the conjugate of x * 1j: torch's is a view of x with a bit for the sign, of which DLPack does not tell."""
    return torch.complex(torch.zeros_like(x), x).conj().imag


@pytest.mark.parametrize("negated", [imaginary, torch._neg_view])
def test_signs_of_lazy_views_are_kept(negated):
    _, _, *leaves = one_layer()
    ends, sinks = torch.tensor([0, 3, 8], dtype=torch.int32), torch.ones(HEADS, dtype=torch.float64)
    views = [negated(x.detach()).requires_grad_() for x in (*leaves, sinks)]
    assert all(x.is_neg() for x in views)
    plain = [x.detach().resolve_neg().requires_grad_() for x in views]
    found = varlen_attention(*views[:3], torch._neg_view(-ends), torch._neg_view(-ends), sinks=views[3])
    wanted = varlen_attention(*plain[:3], ends, ends, sinks=plain[3])
    assert torch.equal(found, wanted)
    found, wanted = (torch.autograd.grad((x**3).sum(), y) for x, y in ((found, views), (wanted, plain)))
    assert all(map(torch.equal, found, wanted))


def test_signs_of_lazy_gradients_are_kept():
    """As torch's own of what goes into a complex number."""
    attn, plan, *leaves = one_layer()
    seen, found = [], attention(*leaves, attn, plan)
    found.register_hook(lambda dout: seen.append(dout.is_neg()))
    parts = torch.view_as_real(torch.complex(torch.zeros_like(found), found).conj().resolve_conj())
    found = torch.autograd.grad((parts[..., 1] ** 3).sum(), leaves)
    wanted = torch.autograd.grad(((-attention(*leaves, attn, plan)) ** 3).sum(), leaves)
    assert seen == [True]
    assert all(map(torch.equal, found, wanted))


def test_signs_of_lazy_views_are_not_lost_outside_of_autograd():
    attn, plan, *leaves = one_layer()
    q, k, v = (x.detach() for x in leaves)
    with pytest.raises(TypeError, match=r"k is a torch\.Tensor that cannot be read .* sign .* pass k\.resolve_neg\(\)"):
        attn.forward(q, imaginary(k), v, plan)


@pytest.mark.parametrize("name", ["k", "out"])
def test_backward_refuses_what_was_changed_in_place(name):
    attn, plan, q, k, v = one_layer()
    k = k * 1
    out = attention(q, k, v, attn, plan)
    loss = out.sum()
    with torch.no_grad():
        {"k": k, "out": out}[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- what is refused -------------------------------------------------------------------------------------------


def test_second_derivatives_are_refused():
    """Also where the gradient depends on q and k alone, as dout is constant: it is no constant."""
    attn, plan, q, k, v = one_layer()
    out = attention(q, k, v, attn, plan)
    for loss in (out**2, out):
        (dq,) = torch.autograd.grad(loss.sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="asked for derivatives of second order, wanted first ones"):
            (dq.square().sum() + q.sum()).backward()


def test_transforms_are_refused():
    attn, plan, *leaves = one_layer()
    q, k, v = (x.detach() for x in leaves)
    ends = offsets((8,))

    for of in (lambda q: attention(q, k, v, attn, plan).sum(), lambda q: varlen_attention(q, k, v, ends, ends).sum()):
        for transformed in (torch.func.grad(of), torch.func.hessian(of), torch.func.vmap(of)):
            with pytest.raises(RuntimeError, match=r"asked for derivatives by a transform of torch\.func"):
                transformed(q)
        for second in (torch.autograd.functional.hessian, torch.autograd.functional.hvp):
            with pytest.raises(RuntimeError, match="asked for derivatives of second order"):
                second(of, q, *[q] * (second is torch.autograd.functional.hvp))
        with pytest.raises(RuntimeError, match="several gradients at a time"):
            torch.autograd.grad(of(leaves[0]), leaves[0], torch.ones(2, dtype=q.dtype), is_grads_batched=True)
        with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="derivatives of forward mode"):
            of(torch.autograd.forward_ad.make_dual(q, q))


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_what_is_no_tensor_is_named(name):
    attn, plan, q, k, v = one_layer()
    ends = offsets((8,))
    for value, seen in ((np.ones(3), r"a ndarray of shape \(3,\)"), ([1.0], r"\[1\.0\], a list")):
        given = {"q": q, "k": k, "v": v} | {name: value}
        with pytest.raises(TypeError, match=rf"{name} is {seen}; wanted a torch\.Tensor; use CPAttention\.forward for"):
            attention(attn=attn, plan=plan, **given)
        with pytest.raises(TypeError, match=rf"{name} is {seen}; wanted a torch\.Tensor; use thdattn\.varlen_atten"):
            varlen_attention(cu_seqlens_q=ends, cu_seqlens_k=ends, **given)


def test_tensors_without_rows_that_follow_each_other_are_named():
    attn, plan, q, k, v = one_layer()
    with pytest.raises(TypeError, match=r"k has layout torch\.sparse_coo, wanted torch\.strided"):
        attention(q, k.detach().to_sparse(), v, attn, plan)
    nested = torch.nested.nested_tensor([q[:3], q[3:]], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"q has layout torch\.jagged, .*values\(\)"):
        varlen_attention(nested, k, v, offsets((3, 5)), offsets((3, 5)))


def test_other_arguments_of_the_wrong_kind_are_named():
    attn, plan, q, k, v = one_layer()
    with pytest.raises(TypeError, match=r"attn is .*, a Plan; wanted a CPAttention; pass the one that the plan is"):
        attention(q, k, v, plan, attn)
    with pytest.raises(TypeError, match=r"sinks is torch\.int64, wanted a float dtype; cast it"):
        attention(q, k, v, attn, plan, torch.zeros(HEADS, dtype=torch.int64))


# --- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_on_a_gpu_errors_are_within_budget(torch_cuda, poisoned_gpu, causal, window, dtype, cp_size):
    kept = BFLOAT16 if dtype == torch.bfloat16 else np.dtype(np.float16)
    documents = random_documents(kept)
    found = by_ranks(documents, dtype, causal, window, cp_size, torch_cuda)
    right = by_torch(documents, torch.float64, causal, window)
    tokens = thdattn.PackedBatch.from_lengths(LENGTHS)
    truth = oracle.truth(tokens, *map(np.concatenate, documents), dtype=kept, causal=causal, window=window)
    for field, x in found.items():
        np.testing.assert_allclose(getattr(truth.exact, field), right[field], rtol=1e-10, atol=1e-12)
        verdict = truth.judge(field, x.astype(kept))
        assert verdict.good, f"{field}: {verdict}"


@pytest.mark.gpu
def test_both_directions_run_on_torchs_stream(torch_cuda, cupy, monkeypatch):
    """On a stream of torch's own, and in autograd's own thread for the backward."""
    forward, backward = (
        spied(monkeypatch, name, lambda: (cupy.cuda.get_current_stream().ptr, threading.get_ident()))
        for name in ("forward", "backward"))
    before = cupy.cuda.get_current_stream().ptr
    stream = torch.cuda.Stream()
    attn = cp_attention(thdattn.comm.init("single"), torch.bfloat16, torch_cuda)
    documents = random_documents(BFLOAT16)
    with torch.cuda.stream(stream):
        with on_torch_stream(torch.device(torch_cuda)):
            plan = attn.plan(thdattn.PackedBatch.from_lengths(LENGTHS), "contiguous")
        q, k, v, dout = (torch.from_numpy(np.concatenate(x)).to(torch_cuda, torch.bfloat16) for x in documents)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, attn, plan)
        found = dict(zip(FIELDS, (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))
    stream.synchronize()
    assert stream.cuda_stream != before == cupy.cuda.get_current_stream().ptr
    assert {pointer for pointer, _ in (*forward, *backward)} == {stream.cuda_stream}
    assert forward[0][1] == threading.get_ident() != backward[0][1]
    # Not an accuracy test: results of a race would be anything.
    for field, right in by_torch(documents, torch.float64, True, (-1, -1)).items():
        difference = np.abs(found[field].double().cpu().numpy() - right).max()
        assert difference <= 2.0**-5 * np.abs(right).max(), field


# --- varlen_attention ---------------------------------------------------------------------------------------------


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
def test_on_a_gpu_a_torch_graph_is_refused(torch_cuda, cupy):
    packs = [np.concatenate(x) for x in random_documents(BFLOAT16)]
    q, k, v, _ = (torch.from_numpy(x).to(torch_cuda, torch.bfloat16) for x in packs)
    cu_seqlens = torch.from_numpy(offsets(LENGTHS))
    varlen_attention(q, k, v, cu_seqlens, cu_seqlens)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="captures a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        varlen_attention(q, k, v, cu_seqlens, cu_seqlens)
