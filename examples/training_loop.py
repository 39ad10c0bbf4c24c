"""Train a tiny model around packed attention: forward, loss, backward, and a step of plain gradient descent.

    python examples/training_loop.py                            one rank
    python examples/training_loop.py 4                          four simulated ranks in this process
    mpiexec -n 2 python -m mpi4py examples/training_loop.py     two processes, each with a GPU if it has one

Attention between two weight matrices learns to give every token the mean of its document so far. The loop runs on
NumPy, or on a GPU with CuPy, whose matrix products need cuBLAS (extra cublas13 or cublas12). graph_loop.py is the same
with CUDA graphs.
"""

import importlib
import sys

import numpy as np

import thdattn

LENGTHS = (700, 30, 251, 1, 64)  # tokens of every document
WIDTH, HEADS, KV_HEADS, HEAD_DIM, STEPS, LEARNING_RATE = 32, 4, 2, 64, 20, 2.0


def train(comm: thdattn.comm.Comm) -> list[float]:
    """Train on one of the ranks; every rank calls this. Returns the loss of every step: the mean squared error."""
    rng = np.random.default_rng(0)  # the same documents and weights on every rank
    documents = [rng.standard_normal((n, WIDTH), np.float32) for n in LENGTHS]
    means = [x.cumsum(axis=0) / np.arange(1, len(x) + 1, dtype=np.float32)[:, None] for x in documents]
    attn = thdattn.CPAttention(comm, HEADS, HEAD_DIM, KV_HEADS)
    xp = importlib.import_module("cupy" if attn.engine == "cuda" else "numpy")
    w_in = xp.asarray(rng.standard_normal((WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM), np.float32) * WIDTH**-0.5)
    w_out = xp.asarray(rng.standard_normal((HEADS * HEAD_DIM, WIDTH), np.float32) * (HEADS * HEAD_DIM) ** -0.5)
    losses = []
    for step in range(1, STEPS + 1):
        # A batch: here always the same documents. Plan it once; all layers use the plan.
        batch = thdattn.PackedBatch.from_lengths(LENGTHS, multiple=2 * comm.size)
        plan = attn.plan(batch)
        x, target = (plan.shard(xp.asarray(batch.pack(rows))) for rows in (documents, means))  # this rank's rows

        # The model: x @ w_in makes q, k, v; attention sees the keys of all ranks; w_out makes the prediction.
        qkv = (x @ w_in).reshape(-1, HEADS + 2 * KV_HEADS, HEAD_DIM).astype(attn.dtype)
        q, k, v = xp.split(qkv, [HEADS, HEADS + KV_HEADS], axis=1)
        out, saved = attn.forward(q, k, v, plan)
        features = out.reshape(-1, HEADS * HEAD_DIM).astype(np.float32)

        # The loss is a mean over the tokens of all ranks; padding has no target.
        error = xp.where(plan.valid[:, None], features @ w_out - target, 0)
        loss = xp.asarray((error**2).sum() / (batch.total_tokens * WIDTH))

        # The gradients, from the loss back to the weights.
        derror = error * (2 / (batch.total_tokens * WIDTH))
        dw_out = features.T @ derror
        dout = (derror @ w_out.T).reshape(-1, HEADS, HEAD_DIM).astype(attn.dtype)
        dqkv = xp.concatenate(attn.backward(dout, saved), axis=1).reshape(len(x), -1)
        dw_in = x.T @ dqkv.astype(np.float32)

        # Each rank has summed over its own rows: add the sums of all ranks, then step.
        for partial in (loss, dw_in, dw_out):
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
