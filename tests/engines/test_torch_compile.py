"""thdattn.torch within torch.compile(fullgraph=True): custom operators, forward and backward, for any plan."""

from __future__ import annotations

import gc
import shutil
import time
import weakref

import numpy as np
import pytest
from cases import BFLOAT16, offsets
from torch_cases import HEAD_DIM, HEADS, KV_HEADS, LENGTHS, cp_attention, one_layer, random_documents, spied, torch

import thdattn
from thdattn.torch import ContextParallelAttention, attention, on_torch_stream, varlen_attention

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.compile's own
OPERATORS = {"thdattn.attention.default", "thdattn.attention_backward.default"}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(layer, graphs=None):
    """The layer in one graph, run by eager kernels; graphs: gets the operators of every graph, forward and backward."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph, _):
        if graphs is not None:
            graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    return torch.compile(layer, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)


def same(found, wanted):
    return all(map(torch.equal, found, wanted))


def gradients(layer, leaves, *others):
    """Output and gradients."""
    out = layer(*leaves, *others)
    return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_one_graph_has_the_results_of_none(dtype):
    attn, plan, *leaves = one_layer(dtype)
    graphs = []

    def layer(q, k, v, plan):
        return attention(q * 2, k, v, attn, plan) + 1

    wanted = gradients(layer, leaves, plan)
    compiled_layer = compiled(layer, graphs)
    for _ in range(2):
        assert same(gradients(compiled_layer, leaves, plan), wanted)
    assert [OPERATORS & set(names) for names in graphs] == [{name} for name in sorted(OPERATORS)]
    with torch.no_grad():
        assert torch.equal(compiled_layer(*leaves, plan), wanted[0])


@pytest.mark.parametrize("as_given", [torch.from_numpy, np.asarray], ids=["tensor", "array"])
def test_varlen_attention_with_all_options_in_one_graph(as_given):
    _, _, *leaves = one_layer()
    sinks = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)

    def layer(q, k, v, sinks, ends, key_ends, *longest):
        return varlen_attention(q, k, v, ends, key_ends, *longest, softmax_scale=0.1, window_size=(3, 1), softcap=2.0,
                                deterministic=True, sinks=sinks)

    graphs = []
    whole = compiled(layer, graphs)
    for lengths, key_lengths in (((5, 3), (6, 2)), ((6, 2), (1, 7)), ((1, 7), (4, 4))):
        options = *(as_given(offsets(x)) for x in (lengths, key_lengths)), max(lengths), max(key_lengths)
        assert same(gradients(whole, [*leaves, sinks], *options), gradients(layer, [*leaves, sinks], *options))
    assert len(graphs) == 4  # once more for lengths that are any number


def test_one_tensor_of_offsets_is_planned_as_one(monkeypatch):
    """As attention to itself, which lengths on a GPU show by that alone."""
    _, _, *leaves = one_layer()
    plans, right = [], thdattn.torch._planned
    monkeypatch.setattr(thdattn.torch, "_planned", lambda *x: plans.append(x[3] is x[4]) or right(*x))
    whole = compiled(varlen_attention)
    ends = [torch.from_numpy(offsets((8,))) for _ in range(2)]
    whole(*leaves, ends[0], ends[0])
    whole(*leaves, *ends)
    assert plans == [True, False]


def test_sinks_of_16_bits_get_their_gradient():
    attn = cp_attention(thdattn.comm.init("single"), torch.float64, sinks=True)
    _, _, *leaves = one_layer()
    leaves.append(torch.randn(HEADS, dtype=torch.bfloat16, requires_grad=True))
    plan = attn.plan(thdattn.PackedBatch.from_lengths([8]))

    def layer(q, k, v, sinks, plan):
        return attention(q, k, v, attn, plan, sinks)

    assert same(gradients(compiled(layer), leaves, plan), gradients(layer, leaves, plan))


def test_plans_and_layers_compile_nothing_again():
    """But once for another number of rows, which is any number then."""
    graphs = []

    def layer(q, k, v, attn, plan):
        return attention(q, k, v, attn, plan)

    whole = compiled(layer, graphs)
    for count, lengths in ((2, [5, 3]), (2, [3, 5]), (2, [8]), (4, [7, 9]), (4, [20, 3]), (4, [30])):
        attn, _, *leaves = one_layer(rows=sum(lengths))
        plan = attn.plan(thdattn.PackedBatch.from_lengths(lengths))
        assert same(gradients(whole, leaves, attn, plan), gradients(layer, leaves, attn, plan))
        assert len(graphs) == count, lengths


def test_modules_of_ranks_compile():
    """Collective calls of all layers meet; what forward keeps of other ranks' keys gets to the backward."""
    batch = thdattn.PackedBatch.from_lengths(LENGTHS, multiple=4)
    packs = [batch.pack(x) for x in random_documents(np.float64)]

    def program(comm):
        layers = torch.nn.ModuleList(
            ContextParallelAttention(comm, HEADS, HEAD_DIM, num_kv_heads=KV_HEADS, dtype=torch.float64,
                                     engine="reference", keep_keys=keep) for keep in (True, False))
        plan = layers[0].plan(batch)
        leaves = [torch.from_numpy(plan.sharding.shard(x, comm.rank)).requires_grad_() for x in packs[:3]]

        def model(q, k, v, plan):
            for layer in layers:
                q = layer(q, k, v, plan)
            return q

        with torch.autograd.set_multithreading_enabled(False):
            return gradients(compiled(model), leaves, plan), gradients(model, leaves, plan)

    for found, wanted in thdattn.comm.run_local(2, program):
        assert same(found, wanted)


def test_inputs_that_are_views_keep_their_values():
    """Not contiguous, or with a sign that torch keeps for later."""
    attn, plan, *leaves = one_layer()

    def layer(q, k, v, plan):
        q, k = torch._neg_view(q), k.transpose(0, 2).contiguous().transpose(0, 2)
        return -attention(q, k, v, attn, plan).transpose(0, 1)

    assert same(gradients(compiled(layer), leaves, plan), gradients(layer, leaves, plan))


def test_what_forward_keeps_is_freed_by_the_backward_or_with_the_graph():
    attn, _, *leaves = one_layer()
    whole = compiled(lambda q, k, v, plan: attention(q, k, v, attn, plan))

    def run(with_backward):
        plan = attn.plan(thdattn.PackedBatch.from_lengths([8]))
        out = whole(*leaves, plan)
        kept = weakref.ref(plan)
        del plan
        assert kept() is not None
        if with_backward:
            out.sum().backward()
        return out if with_backward else None, kept

    run(True)
    gc.disable()
    try:
        for with_backward in (True, False):
            out, kept = run(with_backward)
            assert kept() is None, with_backward
            del out
    finally:
        gc.enable()


def test_a_graph_without_gradients_keeps_nothing():
    attn, plan, *leaves = one_layer()
    alive = weakref.ref(plan)
    with torch.inference_mode():
        out = compiled(lambda q, k, v, plan: attention(q, k, v, attn, plan))(*leaves, plan)
    del plan
    gc.collect()
    assert alive() is None and not out.requires_grad


@pytest.mark.parametrize("inside", [True, False])
def test_checkpointed_layers_compute_again(inside, monkeypatch):
    attn, plan, *leaves = one_layer()

    def layer(q, k, v, plan):
        return attention(q.sin(), k, v, attn, plan).sin()

    def again(*args):
        return torch.utils.checkpoint.checkpoint(part, *args, use_reentrant=False)

    part = layer if inside else compiled(layer)
    wanted = gradients(layer, leaves, plan)
    forwards = spied(monkeypatch, "forward")
    assert same(gradients(compiled(again) if inside else again, leaves, plan), wanted)
    assert len(forwards) == 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_inductor_runs_a_layer_with_projections():
    attn, plan, q, k, v = one_layer(torch.float32)
    weights = [torch.randn(HEAD_DIM, HEAD_DIM, requires_grad=True) for _ in range(2)]

    def layer(q, k, v, first, last, plan):
        return attention(q @ first, k, v, attn, plan) @ last

    whole = torch.compile(layer, fullgraph=True)
    for found, wanted in zip(*(gradients(x, [q, k, v, *weights], plan) for x in (whole, layer)), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", ["attention", "attention_backward"])
def test_operators_do_as_they_promise(name):
    attn, plan, *leaves = one_layer()
    inputs = [*leaves, None]
    out, lse, token = torch.ops.thdattn.attention(*inputs, attn._handle, plan._handle)
    args = {"attention": (*inputs, attn._handle, plan._handle),
            "attention_backward": (out.detach(), *(x.detach() for x in leaves), out.detach(), lse, None, token)}
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(getattr(torch.ops.thdattn, name), args[name], test_utils=checks)


# --- what is refused -------------------------------------------------------------------------------------------


def test_errors_of_an_attention_come_out_of_a_graph():
    attn, plan, q, k, v = one_layer()
    whole = compiled(lambda *qkv: attention(*qkv, attn, plan))
    with pytest.raises(ValueError, match=r"k has shape \(8, 4, 64\), wanted \(8, 2, 64\)"):
        whole(q.detach(), q.detach(), v)
    with pytest.raises(TypeError, match="k is float32, wanted float64"):
        whole(q, k.float(), v)


def test_second_derivatives_are_refused():
    attn, plan, *leaves = one_layer()
    out = compiled(lambda *qkv: attention(*qkv, attn, plan))(*leaves)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(out.square().sum(), leaves, create_graph=True)[0].sum().backward()
    handles = attn._handle, plan._handle
    out, *_ = torch.ops.thdattn.attention(*leaves, None, *handles)
    (dq,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="asked for derivatives of second order, wanted first ones"):
        dq.sum().backward()


def test_a_plan_that_lives_no_longer_is_named():
    attn, plan, *leaves = one_layer()

    def layer(q, k, v, plan):
        return torch.utils.checkpoint.checkpoint(attention, q, k, v, attn, plan, use_reentrant=False)

    out = compiled(layer)(*leaves, plan)
    del plan
    gc.collect()
    with pytest.raises(RuntimeError, match=r"the plan of a compiled attention lives no longer, .* hold the plan until"):
        out.sum().backward()


def test_a_copy_of_what_forward_keeps_is_refused():
    attn, plan, *leaves = one_layer()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        out = compiled(lambda *qkv: attention(*qkv, attn, plan))(*leaves)
    with pytest.raises(RuntimeError, match=r"what forward kept of a compiled attention lives no longer, .*_hooks"):
        out.sum().backward()


def test_what_is_seen_while_tracing_is_named():
    attn, plan, q, k, v = one_layer()
    for plans, seen in ((attn, "CPAttention; wanted a Plan"), (None, "plan is None")):
        with pytest.raises((RuntimeError, TypeError), match=seen):
            compiled(attention)(q, k, v, attn, plans)
    for transformed in (torch.func.grad, torch.func.vmap):
        with pytest.raises(RuntimeError, match=r"asked for derivatives by a transform of torch\.func"):
            compiled(transformed(lambda q: attention(q, k, v, attn, plan).sum()))(q.detach())


# --- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{"backend": "aot_eager"}, {}, {"mode": "reduce-overhead"}], ids=str)
def test_on_a_gpu_plans_follow_each_other_in_one_graph(torch_cuda, cupy, poisoned_gpu, monkeypatch, how):
    """Bitwise the results without a graph, on a stream of torch's own; no plan's launches are replayed for another."""
    forward, backward = (spied(monkeypatch, name, lambda: cupy.cuda.get_current_stream().ptr)
                         for name in ("forward", "backward"))
    attn = cp_attention(thdattn.comm.init("single"), torch.bfloat16, torch_cuda, deterministic=True)

    def layer(q, k, v, plan, ends):
        out = attention(q, k, v, attn, plan)
        return out + varlen_attention(q, k, v, ends, ends, causal=True, deterministic=True)

    whole, stream = torch.compile(layer, fullgraph=True, **how), torch.cuda.Stream()
    packs = [np.concatenate(x) for x in random_documents(BFLOAT16)[:3]]
    with torch.cuda.stream(stream):
        leaves = [torch.from_numpy(x).to(torch_cuda, torch.bfloat16).requires_grad_() for x in packs]
        for lengths in (LENGTHS, LENGTHS[::-1], (100, 132), LENGTHS):
            batch = thdattn.PackedBatch.from_lengths(lengths)
            with on_torch_stream(torch.device(torch_cuda)):
                plan = attn.plan(batch, "contiguous")
            for ends in (torch.from_numpy(batch.cu_seqlens), torch.from_numpy(batch.cu_seqlens).to(torch_cuda)):
                wanted = gradients(layer, leaves, plan, ends)
                assert same(gradients(whole, leaves, plan, ends), wanted), lengths
        stream.synchronize()
    assert {*forward, *backward} == {stream.cuda_stream}


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_kept_when_the_graph_is_gone(torch_cuda, cupy):
    """Neither by the graph nor by torch."""
    attn = cp_attention(thdattn.comm.init("single"), torch.bfloat16, torch_cuda)
    whole = torch.compile(lambda q, k, v, plan: attention(q, k, v, attn, plan), backend="aot_eager", fullgraph=True)
    leaves = [torch.randn(4096, heads, HEAD_DIM, device=torch_cuda, dtype=torch.bfloat16, requires_grad=True)
              for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def step():
        with on_torch_stream(torch.device(torch_cuda)):
            plan = attn.plan(thdattn.PackedBatch.from_lengths([4096]), "contiguous")
        torch.autograd.grad(whole(*leaves, plan).square().sum(), leaves)

    used, deadline = cupy.get_default_memory_pool().used_bytes, time.monotonic() + 30
    step()
    gc.collect()  # what earlier tests left
    first = used()
    for _ in range(3):
        step()
    while used() > first and time.monotonic() < deadline:  # torch returns before its own thread drops the graph
        time.sleep(0.01)
    assert used() <= first
