"""The smallest training loop around packed attention: pack, shard, forward, backward, step.

    python examples/minimal_loop.py                              one rank
    python examples/minimal_loop.py 4                            four simulated ranks in this process
    mpiexec -n 2 python -m mpi4py examples/minimal_loop.py       two processes, each with a GPU if it has one

Attention between two weight matrices learns to give every token the mean of its document so far. On a GPU the plan and
the attention, its communication included, are CUDA graphs, which lengths reach through a static pack.
"""

import importlib
import sys

import numpy as np

import thdattn
from thdattn.graphs import CudaGraphConfig, Graphs, StaticPack

LENGTHS = (700, 30, 251, 1, 64)  # tokens of every document
WIDTH, HEADS, KV_HEADS, HEAD_DIM, STEPS, LEARNING_RATE = 32, 4, 2, 64, 20, 2.0


def train(comm: thdattn.comm.Comm) -> list[float]:
    """One rank's whole program; every rank runs it. Returns the loss of every step."""
    batch = thdattn.PackedBatch.from_lengths(LENGTHS, multiple=2 * comm.size)  # the same on every rank
    rng = np.random.default_rng(0)
    documents = [rng.standard_normal((n, WIDTH), np.float32) for n in LENGTHS]
    means = [x.cumsum(axis=0) / np.arange(1, len(x) + 1, dtype=np.float32)[:, None] for x in documents]
    attn = thdattn.CPAttention(comm, HEADS, HEAD_DIM, KV_HEADS)
    graphs = Graphs(comm, CudaGraphConfig("local", max_packed_seqs=8))  # they end before the comm
    pack = StaticPack(graphs, [attn], batch.total_rows)
    planned = graphs.captured(pack.plans, "plan")
    attention = graphs.pair(attn.forward, attn.backward, "attention", "attn")  # eager where modules leave "attn" out
    xp = importlib.import_module("cupy" if attn.engine == "cuda" else "numpy")
    x, wanted = (xp.asarray(pack.sharding(batch).shard(batch.pack(rows), comm.rank)) for rows in (documents, means))
    w_in = xp.asarray(rng.standard_normal((WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM), np.float32) * WIDTH**-0.5)
    w_out = xp.asarray(rng.standard_normal((HEADS * HEAD_DIM, WIDTH), np.float32) * (HEADS * HEAD_DIM) ** -0.5)
    losses = []
    for _ in range(STEPS):
        pack.load([batch])  # a batch of up to 8 documents; where one may have more: if pack.fits([batch])
        (plan,) = planned()  # once per batch, for every layer; plan.positions are for position embeddings
        qkv = (x @ w_in).reshape(-1, HEADS + 2 * KV_HEADS, HEAD_DIM).astype(attn.dtype)
        q, k, v = xp.split(qkv, [HEADS, HEADS + KV_HEADS], axis=1)
        out, saved = attention.forward(q, k, v, plan)  # sees the keys of all ranks
        features = out.reshape(-1, HEADS * HEAD_DIM).astype(np.float32)
        error = xp.where(plan.valid[:, None], features @ w_out - wanted, 0)  # padding is no target
        loss = xp.asarray((error**2).sum() / (batch.total_tokens * WIDTH))  # this rank's share
        derror = error * (2 / (batch.total_tokens * WIDTH))
        dw_out = features.T @ derror
        dout = (derror @ w_out.T).reshape(-1, HEADS, HEAD_DIM).astype(attn.dtype)
        dqkv = xp.concatenate(attention.backward(dout, saved), axis=1).reshape(len(x), -1)
        dw_in = x.T @ dqkv.astype(np.float32)
        for share in (loss, dw_in, dw_out):  # every rank has all weights, and needs the gradients of all rows
            comm.all_reduce(share, "sum")
        w_in, w_out = w_in - LEARNING_RATE * dw_in, w_out - LEARNING_RATE * dw_out
        losses.append(float(loss))
        if comm.rank == 0:
            print(f"step {len(losses):2}   loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    if len(sys.argv) > 1:
        thdattn.comm.run_local(int(sys.argv[1]), train)
    else:
        with thdattn.comm.init() as comm:
            train(comm)
