"""Packed attention inside torch's autograd against torch's own attention, one document at a time."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
from cases import BFLOAT16
from launch import SOURCE, run_ranks

import thdattn
from thdattn import oracle

torch = pytest.importorskip("torch")
sys.path.append(str(SOURCE.parent / "examples"))
torch_autograd = importlib.import_module("torch_autograd")  # not before torch is known to be there
PackedAttention, torch_stream = torch_autograd.PackedAttention, torch_autograd.torch_stream

EXAMPLE = SOURCE.parent / "examples" / "torch_autograd.py"
LENGTHS = (37, 0, 130, 1, 64)
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
FIELDS = ("out", "dq", "dk", "dv")
MASKS = [(True, (-1, -1)), (False, (-1, -1)), (True, (20, 0)), (False, (7, 30))]


def random_documents(dtype, lengths=LENGTHS, head_dim=HEAD_DIM):
    """q, k, v, dout of every document, float64 with values of the dtype."""
    rng = np.random.default_rng(0)
    return [
        [rng.standard_normal((n, heads, head_dim)).astype(dtype).astype(np.float64) for n in lengths]
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def by_torch(documents, dtype, causal, window):
    """out, dq, dk, dv of the pack in torch's attention on the CPU, in a torch dtype; float64, (total_tokens, ...)."""
    results = []
    for q, k, v, dout in zip(*documents, strict=True):
        leaves = [torch.from_numpy(x).to(dtype).requires_grad_() for x in (q, k, v)]
        q, k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1).transpose(0, 1) for x in leaves)
        ahead = torch.arange(len(dout)) - torch.arange(len(dout))[:, None]  # of a key before a query: negative
        sees = (ahead <= 0) if causal else (ahead <= window[1]) | (window[1] < 0)
        sees &= (ahead >= -window[0]) | (window[0] < 0)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees).transpose(0, 1)
        gradients = torch.autograd.grad(out, leaves, torch.from_numpy(dout).to(dtype))
        results.append([x.detach().double().numpy() for x in (out, *gradients)])
    return dict(zip(FIELDS, map(np.concatenate, zip(*results, strict=True)), strict=True))


def by_ranks(documents, dtype, causal, window, cp_size, device="cpu"):
    """out, dq, dk, dv of the pack in PackedAttention, in a torch dtype; float64, padding is checked to be 0."""
    batch = thdattn.PackedBatch.from_lengths([len(x) for x in documents[0]], multiple=2 * cp_size)
    packs = [batch.pack(x, fill=np.nan) for x in documents]

    def program(comm):
        attn = attention(comm, dtype, device, causal=causal, window=window)
        with torch_stream(torch.device(device)):
            plan = attn.plan(batch)
        q, k, v, dout = (torch.from_numpy(plan.sharding.shard(x, comm.rank)).to(device, dtype) for x in packs)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with torch.autograd.set_multithreading_enabled(False):
            out = PackedAttention.apply(*leaves, attn, plan)
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


def attention(comm, dtype, device="cpu", **options):
    engine = "reference" if device == "cpu" else "cuda"
    name = str(dtype).removeprefix("torch.")
    return thdattn.CPAttention(comm, HEADS, HEAD_DIM, KV_HEADS, dtype=name, engine=engine, **options)


def one_layer(dtype=torch.float64, rows=8):
    """(attn, plan, q, k, v) of one rank on the CPU, with gradients asked for."""
    attn = attention(thdattn.comm.init("single"), dtype)
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
    assert torch.autograd.gradcheck(lambda *qkv: PackedAttention.apply(*qkv, attn, plan), (q, k, v))


def test_nothing_is_copied_on_the_way_in_or_out():
    attn, plan, q, k, v = one_layer()
    out = PackedAttention.apply(q, k, v, attn, plan)
    saved = out.grad_fn.saved
    for tensor, array in ((q, saved.q), (k, saved.k), (v, saved.v), (out, saved.out)):
        assert tensor.data_ptr() == array.__array_interface__["data"][0]


def test_gradients_that_are_not_contiguous_are_accepted():
    attn, plan, q, k, v = one_layer()
    weights = torch.randn(8, HEADS, HEAD_DIM, dtype=torch.float64)
    expanded, transposed = torch.ones(()).double(), weights.permute(2, 1, 0)
    for loss in (lambda out: out.sum() * expanded, lambda out: (out.permute(2, 1, 0) * transposed).sum()):
        leaves = (q, k, v)
        found = torch.autograd.grad(loss(PackedAttention.apply(*leaves, attn, plan)), leaves)
        plain = [x.repeat_interleave(HEADS // x.shape[1], dim=1).transpose(0, 1) for x in leaves]
        own = torch.nn.functional.scaled_dot_product_attention(*plain, is_causal=True).transpose(0, 1)
        for x, y in zip(found, torch.autograd.grad(loss(own), leaves), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", ["k", "out"])
def test_backward_refuses_what_was_changed_in_place(name):
    attn, plan, q, k, v = one_layer()
    k = k * 1
    out = PackedAttention.apply(q, k, v, attn, plan)
    loss = out.sum()
    with torch.no_grad():
        {"k": k, "out": out}[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_second_derivatives_are_refused():
    attn, plan, q, k, v = one_layer()
    out = PackedAttention.apply(q, k, v, attn, plan)
    (dq,) = torch.autograd.grad((out**2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


# --------------------------------------------------------------------------------------------- the program


def judged(run):
    """The names of the results that the program printed."""
    assert run.returncode == 0, run.stdout + run.stderr
    return re.findall(r"^ +(\w+) +[\d.]+ +[\d.]+e[-+]\d+$", run.stdout, re.MULTILINE)


def test_the_program_alone_finds_no_difference():
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, str(EXAMPLE)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert judged(run) == list(FIELDS)


def test_two_processes_find_no_difference():
    run = run_ranks(2, EXAMPLE, timeout=240)
    assert judged(run) == list(FIELDS)
    assert "ranks: 2" in run.stdout


@pytest.mark.parametrize("culprit", ["dq", "dk", "dv"])
def test_a_wrong_result_is_named(monkeypatch, culprit):
    right = thdattn.CPAttention.backward

    def wrong(self, dout, saved):
        gradients = dict(zip(FIELDS[1:], right(self, dout, saved), strict=True))
        gradients[culprit] = gradients[culprit] * 2
        return tuple(gradients.values())

    monkeypatch.setattr(thdattn.CPAttention, "backward", wrong)
    with pytest.raises(ValueError, match=f"{culprit} of rank 0 differs from torch's attention by"):
        torch_autograd.compare(thdattn.comm.init("single"))


# --------------------------------------------------------------------------------------------- on a GPU


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
    attn = attention(thdattn.comm.init("single"), torch.bfloat16, cuda)
    documents = random_documents(BFLOAT16)
    with torch.cuda.stream(stream):
        with torch_stream(torch.device(cuda)):
            plan = attn.plan(thdattn.PackedBatch.from_lengths(LENGTHS), "contiguous")
        q, k, v, dout = (torch.from_numpy(np.concatenate(x)).to(cuda, torch.bfloat16) for x in documents)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = PackedAttention.apply(*leaves, attn, plan)
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
def test_two_gpus_find_no_difference(cuda, cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs 2 GPUs")
    run = run_ranks(2, EXAMPLE, timeout=240)
    assert judged(run) == list(FIELDS)
    assert "ranks: 2, cuda:0" in run.stdout
