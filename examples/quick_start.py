"""Packed attention over one rank or several, forward and backward, on GPUs (CuPy) or on CPUs (NumPy).

    python examples/quick_start.py                              one process
    mpiexec -n 2 python -m mpi4py examples/quick_start.py       two processes, each with a GPU if it has one
"""

import importlib

import numpy as np

import thdattn

with thdattn.comm.init() as comm:  # the ranks that mpiexec started, or this process alone
    attn = thdattn.CPAttention(comm, num_heads=8, head_dim=64, num_kv_heads=2, dtype="bfloat16")
    xp = importlib.import_module("cupy" if attn.engine == "cuda" else "numpy")

    # Four documents in one buffer of rows; every rank makes the same batch.
    batch = thdattn.PackedBatch.from_lengths([1000, 30, 251, 700], multiple=2 * comm.size)
    plan = attn.plan(batch)  # once per batch, for all layers

    rng = np.random.default_rng(comm.rank)
    shapes = [(plan.local_rows, heads, 64) for heads in (8, 2, 2, 8)]  # this rank's rows
    q, k, v, dout = (xp.asarray(rng.standard_normal(shape, np.float32).astype(attn.dtype)) for shape in shapes)
    out, saved = attn.forward(q, k, v, plan)
    dq, dk, dv = attn.backward(dout, saved)

    if comm.rank == 0:
        largest = float(out.astype(np.float32).max())
        print(f"engine {attn.engine!r}, ranks: {comm.size}, {xp.__name__} arrays; "
              f"rank 0: out {out.shape} {out.dtype}, dk {dk.shape}, largest out {largest:.2f}")
