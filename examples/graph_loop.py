"""Train as training_loop.py does, with the plan and the attention as CUDA graphs.

    python examples/graph_loop.py                            one rank
    python examples/graph_loop.py 4                          four simulated ranks in this process
    mpiexec -n 2 python -m mpi4py examples/graph_loop.py     two processes, each with a GPU if it has one

On a GPU the plan, and the attention with its communication, are captured once and replayed for every batch: a static
pack hands the lengths of new batches to the graphs. Without a GPU, and on simulated ranks, the same calls run without
graphs. Only the lines that mention graphs or the pack differ from training_loop.py.
"""

import importlib
import sys

import numpy as np

import thdattn
from thdattn.graphs import CudaGraphConfig, Graphs, StaticPack

LENGTHS = (700, 30, 251, 1, 64)  # tokens of every document
WIDTH, HEADS, KV_HEADS, HEAD_DIM, STEPS, LEARNING_RATE = 32, 4, 2, 64, 20, 2.0


def train(comm: thdattn.comm.Comm) -> list[float]:
    """Train on one of the ranks; every rank calls this. Returns the loss of every step: the mean squared error."""
    rng = np.random.default_rng(0)  # the same documents and weights on every rank
    documents = [rng.standard_normal((n, WIDTH), np.float32) for n in LENGTHS]
    means = [x.cumsum(axis=0) / np.arange(1, len(x) + 1, dtype=np.float32)[:, None] for x in documents]
    batch = thdattn.PackedBatch.from_lengths(LENGTHS, multiple=2 * comm.size)
    attn = thdattn.CPAttention(comm, HEADS, HEAD_DIM, KV_HEADS)
    graphs = Graphs(comm, CudaGraphConfig("local", max_packed_seqs=8))  # must end before the comm
    pack = StaticPack(graphs, [attn], batch.total_rows)
    planned = graphs.captured(pack.plans, "plan")
    attention = graphs.pair(attn.forward, attn.backward, "attention", "attn")  # no graph if `modules` omit "attn"
    xp = importlib.import_module("cupy" if attn.engine == "cuda" else "numpy")
    x, target = (xp.asarray(pack.sharding(batch).shard(batch.pack(rows), comm.rank)) for rows in (documents, means))
    w_in = xp.asarray(rng.standard_normal((WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM), np.float32) * WIDTH**-0.5)
    w_out = xp.asarray(rng.standard_normal((HEADS * HEAD_DIM, WIDTH), np.float32) * (HEADS * HEAD_DIM) ** -0.5)
    losses = []
    for step in range(1, STEPS + 1):
        pack.load([batch])  # up to 8 documents; ask pack.fits([batch]) first if a batch may have more
        (plan,) = planned()  # once per batch, for all layers

        qkv = (x @ w_in).reshape(-1, HEADS + 2 * KV_HEADS, HEAD_DIM).astype(attn.dtype)
        q, k, v = xp.split(qkv, [HEADS, HEADS + KV_HEADS], axis=1)
        out, saved = attention.forward(q, k, v, plan)
        features = out.reshape(-1, HEADS * HEAD_DIM).astype(np.float32)
        error = xp.where(plan.valid[:, None], features @ w_out - target, 0)  # padding has no target
        loss = xp.asarray((error**2).sum() / (batch.total_tokens * WIDTH))

        derror = error * (2 / (batch.total_tokens * WIDTH))
        dw_out = features.T @ derror
        dout = (derror @ w_out.T).reshape(-1, HEADS, HEAD_DIM).astype(attn.dtype)
        dqkv = xp.concatenate(attention.backward(dout, saved), axis=1).reshape(len(x), -1)
        dw_in = x.T @ dqkv.astype(np.float32)
        for partial in (loss, dw_in, dw_out):  # each rank has summed over its own rows
            comm.all_reduce(partial, "sum")
        w_in, w_out = w_in - LEARNING_RATE * dw_in, w_out - LEARNING_RATE * dw_out
        losses.append(float(loss))
        if comm.rank == 0:
            print(f"step {step:2}   loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    if len(sys.argv) > 1:
        thdattn.comm.run_local(int(sys.argv[1]), train)
    else:
        with thdattn.comm.init() as comm:
            train(comm)
