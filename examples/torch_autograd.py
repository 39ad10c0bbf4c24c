"""Packed attention in PyTorch: torch tensors in and out, and gradients by autograd, with thdattn.torch.

    python examples/torch_autograd.py                               one rank
    torchrun --nproc-per-node 2 examples/torch_autograd.py          two processes of torch.distributed
    mpiexec -n 2 python -m mpi4py examples/torch_autograd.py        two processes of MPI

On CUDA tensors in bfloat16, if every process has a GPU; else on CPU tensors in float32. No tensor is copied on its way
in or out. The program compares output and gradients with torch's own attention, document by document. Needs torch 2.10
or later.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; NumPy reads this once, when it is imported

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

import thdattn.torch

LENGTHS = (700, 30, 251, 1, 64)  # tokens of every document
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
# Of the largest value: two right results differ by less.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-5}


def by_torch(q: Any, k: Any, v: Any, dout: Any) -> Sequence[Any]:
    """out, dq, dk, dv of one document, (length, heads, HEAD_DIM), by torch's own causal attention."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    q, k, v = (x.transpose(0, 1)[None] for x in leaves)  # heads first
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def compare(comm: thdattn.comm.Comm) -> None:
    """One rank's whole program; every rank checks its own rows, rank 0 prints. ValueError for a wrong result."""
    cuda = torch.cuda.is_available() and "cuda" in comm.devices
    dtype, engine = (torch.bfloat16, "cuda") if cuda else (torch.float32, "reference")
    batch = thdattn.PackedBatch.from_lengths(LENGTHS, multiple=2 * comm.size)
    attention = thdattn.torch.ContextParallelAttention(
        comm, HEADS, HEAD_DIM, num_kv_heads=KV_HEADS, dtype=dtype, engine=engine)
    plan = attention.plan(batch)  # once per batch, used by every layer
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
    out = attention(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), plan)
    out.backward(dout)

    by_document = [by_torch(*(x.to(device, dtype) for x in document)) for document in zip(*inputs, strict=True)]
    wanted = [local([x.float().cpu() for x in documents]) for documents in zip(*by_document, strict=True)]
    if comm.rank == 0:
        print(f"{len(LENGTHS)} documents, {batch.total_tokens:,} tokens, {dtype}, ranks: {comm.size}, {device}")
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


def ranks() -> thdattn.comm.Comm:
    """The processes that torchrun or mpiexec started; this one alone without either."""
    if not torch.distributed.is_torchelastic_launched():
        return thdattn.comm.init()
    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if gpus else "gloo")
    return thdattn.comm.from_torch()


if __name__ == "__main__":
    with ranks() as comm:
        compare(comm)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
