"""Packed attention in PyTorch: torch tensors in and out through DLPack, inside a torch.autograd.Function.

    python examples/torch_autograd.py                              one rank
    mpiexec -n 2 python -m mpi4py examples/torch_autograd.py       two processes, each with a GPU if it has one

On CUDA tensors in bfloat16; without CUDA on CPU tensors in float32. No tensor is copied on its way in or out. The
program compares output and gradients with torch's own attention, document by document. Needs torch 2.10 or later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; NumPy reads this once, when it is imported

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

import thdattn

LENGTHS = (700, 30, 251, 1, 64)  # tokens of every document
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
# Of the largest value: two right results differ by less.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-5}


class PackedAttention(torch.autograd.Function):  # type: ignore[misc]
    """out = PackedAttention.apply(q, k, v, attn, plan): CPAttention of this rank's rows, for torch's autograd.

    q, k, v, out: torch tensors as CPAttention.forward describes, on the device of the plan.
    plan: made while the same stream was current, see torch_stream.

    Forward and backward are collective. NOTE: autograd has one thread per GPU, where simulated ranks would wait for
    each other for ever; torch.autograd.set_multithreading_enabled(False) lets each rank run its own backward.
    """

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, attn: thdattn.CPAttention, plan: thdattn.Plan) -> Any:
        with torch_stream(q.device):
            result, ctx.saved = attn.forward(q.detach(), k.detach(), v.detach(), plan)
            out = torch.from_dlpack(result)
        ctx.attn = attn
        ctx.save_for_backward(q, k, v, out)  # ctx.saved shares their memory: torch has to watch for changes in place
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dout: Any) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # raises if one of them was changed in place since
        with torch_stream(dout.device):
            dq, dk, dv = map(torch.from_dlpack, ctx.attn.backward(dout.detach(), ctx.saved))
        return dq, dk, dv, None, None


@contextmanager
def torch_stream(device: torch.device) -> Iterator[None]:
    """Makes torch's current stream and device CuPy's too, which thdattn runs on; nothing to do for the CPU.

    Without it the libraries share a stream only as long as both stay on the default one, in one thread: autograd has
    threads of its own, and what is current is so per thread. On two streams each library could hand out memory again
    that the other still reads.
    """
    if device.type == "cpu":
        yield
        return
    import cupy

    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
    with cupy.cuda.Device(device.index), stream:
        yield


def by_torch(q: Any, k: Any, v: Any, dout: Any) -> Sequence[Any]:
    """out, dq, dk, dv of one document, (length, heads, HEAD_DIM), by torch's own causal attention."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    heads_first = (x.transpose(0, 1)[None] for x in leaves)
    out = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def compare(comm: thdattn.comm.Comm) -> None:
    """One rank's whole program; every rank checks its own rows, rank 0 prints. ValueError for a wrong result."""
    cuda = torch.cuda.is_available() and "cuda" in comm.devices
    dtype, engine = (torch.bfloat16, "cuda") if cuda else (torch.float32, "reference")
    batch = thdattn.PackedBatch.from_lengths(LENGTHS, multiple=2 * comm.size)
    name_of_dtype = str(dtype).removeprefix("torch.")
    attn = thdattn.CPAttention(comm, HEADS, HEAD_DIM, KV_HEADS, dtype=name_of_dtype, engine=engine)
    plan = attn.plan(batch)
    device = torch.from_dlpack(plan.valid).device

    def local(documents: Sequence[Any]) -> Any:
        """This rank's rows of documents on the host."""
        return torch.from_numpy(plan.sharding.shard(batch.pack(documents), comm.rank)).to(device)

    rng = np.random.default_rng(0)
    inputs = [
        [torch.from_numpy(rng.standard_normal((n, heads, HEAD_DIM), np.float32)) for n in LENGTHS]
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    q, k, v, dout = (local(documents).to(dtype) for documents in inputs)
    out = PackedAttention.apply(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), attn, plan)
    out.backward(dout)

    by_document = [by_torch(*(x.to(device, dtype) for x in document)) for document in zip(*inputs, strict=True)]
    wanted = [local([x.float().cpu() for x in documents]) for documents in zip(*by_document, strict=True)]
    if comm.rank == 0:
        print(f"{len(LENGTHS)} documents, {batch.total_tokens:,} tokens, {name_of_dtype}, ranks: {comm.size}, {device}")
        print("       largest value   largest difference from torch")
    for name, found, right in zip(("out", "dq", "dk", "dv"), (out, q.grad, k.grad, v.grad), wanted, strict=True):
        largest, difference = (float(x.abs().max()) for x in (right, found.detach().float() - right))
        if comm.rank == 0:
            print(f"  {name:<4} {largest:>13.4f}   {difference:>29.2e}")
        if not difference <= TOLERANCE[dtype] * largest:  # NaN fails too
            raise ValueError(
                f"{name} of rank {comm.rank} differs from torch's attention by {difference:.1e}, wanted at most "
                f"{TOLERANCE[dtype]:.1e} of the largest value, {largest:.1e}; run python -m thdattn check"
            )


if __name__ == "__main__":
    with thdattn.comm.init() as comm:
        compare(comm)
