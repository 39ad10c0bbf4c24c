"""Documents for tests of thdattn.torch, their attention by torch itself, and by ranks of thdattn.

A file of tests that imports this one is skipped where torch is missing.
"""

from __future__ import annotations

import numpy as np
import pytest

import thdattn

torch = pytest.importorskip("torch")
from thdattn.torch import attention, on_torch_stream  # noqa: E402 - not before torch is known to be there

LENGTHS, KEY_LENGTHS = (37, 0, 130, 1, 64), (40, 3, 7, 0, 64)
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
FIELDS = ("out", "dq", "dk", "dv")
MASKS = [(True, (-1, -1)), (False, (-1, -1)), (True, (20, 0)), (False, (7, 30))]


def random_documents(dtype, key_lengths=LENGTHS):
    """Draw q, k, v, dout of every document, float64 with values of the dtype."""
    rng = np.random.default_rng(0)
    return [
        [rng.standard_normal((n, heads, HEAD_DIM)).astype(dtype).astype(np.float64) for n in lengths]
        for lengths, heads in ((LENGTHS, HEADS), (key_lengths, KV_HEADS), (key_lengths, KV_HEADS), (LENGTHS, HEADS))
    ]


def by_torch(documents, dtype, causal, window):
    """Compute out, dq, dk, dv of the pack by torch on the CPU, in a torch dtype; float64, (total_tokens, ...)."""
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


def by_ranks(documents, dtype, causal, window, cp_size, device="cpu", way=None):
    """Compute out, dq, dk, dv of the pack by thdattn.torch, in a torch dtype; float64, and check that padding is 0.

    way: of ways.py, how ranks work together; None: as they do by default.
    """
    batch = thdattn.PackedBatch.from_lengths([len(x) for x in documents[0]], multiple=2 * cp_size)
    packs = [batch.pack(x, fill=np.nan) for x in documents]

    def program(comm):
        spread = {"cp_comm_type": way.cp_comm_type} if way else {}
        attn = cp_attention(way.comm(comm) if way else comm, dtype, device, causal=causal, window=window, **spread)
        with on_torch_stream(torch.device(device)):
            plan = attn.plan(batch, way and way.sharding)
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


def spied(monkeypatch, name, seen=None):
    """Return a list that gets (arguments, result) of every call of a method of CPAttention, or the result of `seen`."""
    calls, right = [], getattr(thdattn.CPAttention, name)

    def spy(self, *args, **options):
        result = right(self, *args, **options)
        calls.append(seen() if seen else (args, result))
        return result

    monkeypatch.setattr(thdattn.CPAttention, name, spy)
    return calls


def one_layer(dtype=torch.float64, rows=8):
    """Return (attn, plan, q, k, v) of one rank on the CPU, with gradients asked for."""
    attn = cp_attention(thdattn.comm.init("single"), dtype)
    plan = attn.plan(thdattn.PackedBatch.from_lengths([rows]))
    torch.manual_seed(0)
    tensors = [torch.randn(rows, heads, HEAD_DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return attn, plan, *(x.requires_grad_() for x in tensors)
