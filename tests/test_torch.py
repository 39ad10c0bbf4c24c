"""thdattn.torch: packed attention inside torch's autograd, against torch's own attention one document at a time."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import numpy as np
import pytest
from cases import BFLOAT16, offsets

import thdattn
from thdattn import oracle, varlen

torch = pytest.importorskip("torch")
from thdattn.torch import (  # noqa: E402 - not before torch is known to be there
    ContextParallelAttention,
    as_tensor,
    attention,
    on_torch_stream,
    varlen_attention,
)

LENGTHS, KEY_LENGTHS = (37, 0, 130, 1, 64), (40, 3, 7, 0, 64)
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
FIELDS = ("out", "dq", "dk", "dv")
MASKS = [(True, (-1, -1)), (False, (-1, -1)), (True, (20, 0)), (False, (7, 30))]


@pytest.fixture(autouse=True)
def nothing_kept():
    """A plan that an earlier test left would have that test's memory."""
    varlen._kept.cache_clear()


def random_documents(dtype, key_lengths=LENGTHS):
    """q, k, v, dout of every document, float64 with values of the dtype."""
    rng = np.random.default_rng(0)
    return [
        [rng.standard_normal((n, heads, HEAD_DIM)).astype(dtype).astype(np.float64) for n in lengths]
        for lengths, heads in ((LENGTHS, HEADS), (key_lengths, KV_HEADS), (key_lengths, KV_HEADS), (LENGTHS, HEADS))
    ]


def by_torch(documents, dtype, causal, window):
    """out, dq, dk, dv of the pack in torch's attention on the CPU, in a torch dtype; float64, (total_tokens, ...)."""
    results = []
    for q, k, v, dout in zip(*documents, strict=True):
        leaves = [torch.from_numpy(x).to(dtype).requires_grad_() for x in (q, k, v)]
        q, k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1).transpose(0, 1) for x in leaves)
        queries, keys = len(dout), k.shape[1]
        position = torch.arange(queries)[:, None] + keys - queries
        ahead = torch.arange(keys) - position  # of a key before a query: negative
        sees = (ahead <= 0) if causal else (ahead <= window[1]) | (window[1] < 0)
        sees &= (ahead >= -window[0]) | (window[0] < 0)
        some = sees.any(dim=1)  # torch gives NaN for a query that sees no key, ours 0
        out = torch.zeros(HEADS, queries, HEAD_DIM, dtype=dtype)
        out[:, some] = torch.nn.functional.scaled_dot_product_attention(q[:, some], k, v, attn_mask=sees[some])
        out = out.transpose(0, 1) + sum(x.sum() for x in leaves) * 0  # a part of the graph even without a pair
        gradients = torch.autograd.grad(out, leaves, torch.from_numpy(dout).to(dtype))
        results.append([x.detach().double().numpy() for x in (out, *gradients)])
    return dict(zip(FIELDS, map(np.concatenate, zip(*results, strict=True)), strict=True))


def by_ranks(documents, dtype, causal, window, cp_size, device="cpu"):
    """out, dq, dk, dv of the pack in thdattn.torch, in a torch dtype; float64, padding is checked to be 0."""
    batch = thdattn.PackedBatch.from_lengths([len(x) for x in documents[0]], multiple=2 * cp_size)
    packs = [batch.pack(x, fill=np.nan) for x in documents]

    def program(comm):
        attn = cp_attention(comm, dtype, device, causal=causal, window=window)
        with on_torch_stream(torch.device(device)):
            plan = attn.plan(batch)
        q, k, v, dout = (torch.from_numpy(plan.sharding.shard(x, comm.rank)).to(device, dtype) for x in packs)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with torch.autograd.set_multithreading_enabled(False):
            out = attention(*leaves, attn, plan)
            out.backward(dout)
        made = (out.detach(), *(x.grad for x in leaves))
        assert all(x.dtype == dtype and x.device == leaves[0].device for x in made)
        return plan.sharding, [x.double().cpu().numpy() for x in made]

    ranks = thdattn.comm.run_local(cp_size, program)
    found = {}
    for number, field in enumerate(FIELDS):
        packed = ranks[0][0].unshard([made[number] for _, made in ranks])
        documents = batch.unpack(packed)
        np.testing.assert_array_equal(packed, batch.pack(documents), err_msg=f"{field} of padding is 0")
        found[field] = np.concatenate(documents)
    return found


def cp_attention(comm, dtype, device="cpu", **options):
    engine = "reference" if device == "cpu" else "cuda"
    name = str(dtype).removeprefix("torch.")
    return thdattn.CPAttention(comm, HEADS, HEAD_DIM, KV_HEADS, dtype=name, engine=engine, **options)


def one_layer(dtype=torch.float64, rows=8):
    """(attn, plan, q, k, v) of one rank on the CPU, with gradients asked for."""
    attn = cp_attention(thdattn.comm.init("single"), dtype)
    plan = attn.plan(thdattn.PackedBatch.from_lengths([rows]))
    torch.manual_seed(0)
    tensors = [torch.randn(rows, heads, HEAD_DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return attn, plan, *(x.requires_grad_() for x in tensors)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_float64_is_torchs_own_attention(causal, window, cp_size):
    documents = random_documents(np.float64)
    found = by_ranks(documents, torch.float64, causal, window, cp_size)
    for field, right in by_torch(documents, torch.float64, causal, window).items():
        np.testing.assert_allclose(found[field], right, rtol=1e-10, atol=1e-12, err_msg=field)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_float32_errs_at_most_twice_as_much_as_torchs_own_attention(causal, window, cp_size):
    documents = random_documents(np.float32)
    found = by_ranks(documents, torch.float32, causal, window, cp_size)
    right = by_torch(documents, torch.float64, causal, window)
    baseline = by_torch(documents, torch.float32, causal, window)
    for field, x in found.items():
        verdict = oracle.judge(x.astype(np.float32), right[field], baseline[field])
        assert verdict.good, f"{field}: {verdict}"


def test_gradients_are_finite_differences():
    attn = thdattn.CPAttention(thdattn.comm.init("single"), 2, 3, 1, dtype="float64", engine="reference")
    plan = attn.plan(thdattn.PackedBatch.from_lengths([3, 0, 4], multiple=2))
    torch.manual_seed(0)
    q, k, v = (torch.randn(8, heads, 3, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv, attn, plan), (q, k, v))


def spied(monkeypatch, name):
    """The (arguments, result) of every call of a method of CPAttention."""
    calls, right = [], getattr(thdattn.CPAttention, name)

    def spy(self, *args):
        result = right(self, *args)
        calls.append((args, result))
        return result

    monkeypatch.setattr(thdattn.CPAttention, name, spy)
    return calls


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


def test_bfloat16_on_the_host_is_what_numpy_gets():
    documents = [np.concatenate(x).astype(BFLOAT16) for x in random_documents(BFLOAT16)]
    attn = cp_attention(thdattn.comm.init("single"), torch.bfloat16)
    plan = attn.plan(thdattn.PackedBatch.from_lengths(LENGTHS), "contiguous")
    right, saved = attn.forward(*documents[:3], plan)
    leaves = [as_tensor(x).requires_grad_() for x in documents[:3]]
    out = attention(*leaves, attn, plan)
    gradients = torch.autograd.grad(out, leaves, as_tensor(documents[3]))
    for found, wanted in zip((out.detach(), *gradients), (right, *attn.backward(documents[3], saved)), strict=True):
        assert found.dtype == torch.bfloat16
        np.testing.assert_array_equal(found.view(torch.int16).numpy(), wanted.view(np.int16))


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


def test_anomaly_detection_finds_none():
    attn, plan, *leaves = one_layer()
    with torch.autograd.set_detect_anomaly(True):
        attention(*leaves, attn, plan).sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in leaves)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_torch_compile_compiles_around_it():
    attn, plan, *leaves = one_layer()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def layer(q, k, v):
        out = attention(q * 2, k, v, attn, plan)
        return (out + varlen_attention(q, k, v, offsets((8,)), offsets((8,)), causal=True)).square().sum()

    wanted = torch.autograd.grad(layer(*leaves), leaves)
    compiled = torch.compile(layer, backend=backend)
    for _ in range(2):
        for x, y in zip(torch.autograd.grad(compiled(*leaves), leaves), wanted, strict=True):
            torch.testing.assert_close(x, y)
    assert "square" in graphs[-1].code and not any("attention" in graph.code for graph in graphs)


def test_checkpointed_layers_compute_again():
    attn, plan, *leaves = one_layer()
    wanted = torch.autograd.grad(attention(*leaves, attn, plan).square().sum(), leaves)
    out = torch.utils.checkpoint.checkpoint(lambda *x: attention(*x, attn, plan), *leaves, use_reentrant=False)
    for x, y in zip(torch.autograd.grad(out.square().sum(), leaves), wanted, strict=True):
        assert torch.equal(x, y)


def test_what_is_no_tensor_is_refused():
    attn, plan, q, k, v = one_layer()
    with pytest.raises(TypeError, match=r"k is a ndarray, wanted a torch\.Tensor; use CPAttention\.forward for other"):
        attention(q, k.detach().numpy(), v, attn, plan)


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


def test_second_derivatives_are_refused():
    attn, plan, q, k, v = one_layer()
    out = attention(q, k, v, attn, plan)
    (dq,) = torch.autograd.grad((out**2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


# --- varlen_attention ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("causal", [True, False])
def test_varlen_gradients_are_finite_differences(causal):
    torch.manual_seed(0)
    q = torch.randn(7, 2, 3, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(8, 1, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    cu_seqlens = torch.tensor([[0, 3, 3, 7], [0, 5, 6, 8]], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda *qkv: varlen_attention(*qkv, *cu_seqlens, causal=causal), (q, k, v))


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
    with pytest.raises(TypeError, match="q is a list, wanted an array"):
        varlen_attention([1.0], k, v, cu_seqlens, cu_seqlens)
    with pytest.raises(TypeError, match="cu_seqlens_q of 8 rows is refused: cu_seqlens is int64"):
        varlen_attention(q, k, v, cu_seqlens.long(), cu_seqlens)
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


@pytest.fixture
def cuda(cupy):
    """torch with a GPU, and a CuPy that this process shares with it."""
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    return "cuda:0"


@pytest.mark.gpu
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_on_a_gpu_errors_are_at_most_twice_those_of_plain_attention(cuda, poisoned_gpu, causal, window, dtype, cp_size):
    kept = BFLOAT16 if dtype == torch.bfloat16 else np.dtype(np.float16)
    documents = random_documents(kept)
    found = by_ranks(documents, dtype, causal, window, cp_size, cuda)
    right = by_torch(documents, torch.float64, causal, window)
    tokens = thdattn.PackedBatch.from_lengths(LENGTHS)
    truth = oracle.truth(tokens, *map(np.concatenate, documents), dtype=kept, causal=causal, window=window)
    for field, x in found.items():
        np.testing.assert_allclose(getattr(truth.exact, field), right[field], rtol=1e-10, atol=1e-12)
        verdict = truth.judge(field, x.astype(kept))
        assert verdict.good, f"{field}: {verdict}"


@pytest.mark.gpu
def test_both_directions_run_on_torchs_stream(cuda, cupy, monkeypatch):
    """On a stream of torch's own, and in autograd's own thread for the backward."""
    seen = {}

    def spied(name):
        call = getattr(thdattn.CPAttention, name)

        def spy(*args):
            seen[name] = cupy.cuda.get_current_stream().ptr, threading.get_ident()
            return call(*args)

        monkeypatch.setattr(thdattn.CPAttention, name, spy)

    spied("forward")
    spied("backward")
    before = cupy.cuda.get_current_stream().ptr
    stream = torch.cuda.Stream()
    attn = cp_attention(thdattn.comm.init("single"), torch.bfloat16, cuda)
    documents = random_documents(BFLOAT16)
    with torch.cuda.stream(stream):
        with on_torch_stream(torch.device(cuda)):
            plan = attn.plan(thdattn.PackedBatch.from_lengths(LENGTHS), "contiguous")
        q, k, v, dout = (torch.from_numpy(np.concatenate(x)).to(cuda, torch.bfloat16) for x in documents)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, attn, plan)
        found = dict(zip(FIELDS, (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))
    stream.synchronize()
    assert stream.cuda_stream != before == cupy.cuda.get_current_stream().ptr
    assert {pointer for pointer, _ in seen.values()} == {stream.cuda_stream}
    assert seen["forward"][1] == threading.get_ident() != seen["backward"][1]
    # Not an accuracy test: results of a race would be anything.
    for field, right in by_torch(documents, torch.float64, True, (-1, -1)).items():
        difference = np.abs(found[field].double().cpu().numpy() - right).max()
        assert difference <= 2.0**-5 * np.abs(right).max(), field


@pytest.mark.gpu
@pytest.mark.parametrize("offsets_on", ["cpu", "cuda"])
@pytest.mark.parametrize("key_lengths", [LENGTHS, KEY_LENGTHS], ids=["self", "cross"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_varlen_attention_is_within_budget(cuda, poisoned_gpu, dtype, key_lengths, offsets_on):
    kept = BFLOAT16 if dtype == torch.bfloat16 else np.dtype(np.float16)
    documents = random_documents(kept, key_lengths)
    found = by_varlen(documents, dtype, True, (-1, -1), cuda, offsets_on)
    truth = oracle.truth(
        thdattn.PackedBatch.from_lengths(LENGTHS), *map(np.concatenate, documents), dtype=kept, causal=True,
        key_batch=thdattn.PackedBatch.from_lengths(key_lengths))
    for field, x in found.items():
        verdict = truth.judge(field, x.astype(kept))
        assert verdict.good, f"{field}: {verdict}"


@pytest.mark.gpu
def test_on_a_gpu_results_are_bitwise_those_of_cpattention(cuda, cupy):
    q, k, v, dout = (
        torch.from_numpy(np.concatenate(x)).to(cuda, torch.bfloat16) for x in random_documents(BFLOAT16))
    attn = cp_attention(thdattn.comm.init("single"), torch.bfloat16, cuda, deterministic=True)
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
def test_on_a_gpu_a_torch_graph_is_refused(cuda, cupy):
    q, k, v, _ = (torch.from_numpy(np.concatenate(x)).to(cuda, torch.bfloat16) for x in random_documents(BFLOAT16))
    cu_seqlens = torch.from_numpy(offsets(LENGTHS))
    varlen_attention(q, k, v, cu_seqlens, cu_seqlens)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="captures a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        varlen_attention(q, k, v, cu_seqlens, cu_seqlens)
