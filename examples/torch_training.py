"""Train a tiny model in PyTorch with data parallelism times context parallelism (DP x CP).

    python examples/torch_training.py                                one rank
    torchrun --nproc-per-node 4 examples/torch_training.py 2         four ranks in groups of two
    mpiexec -n 4 python -m mpi4py examples/torch_training.py 2       the same, started by MPI

The number says how many ranks share a batch (CP); by default all do. Each such group of ranks has a batch of its own
(DP), and gradients are added over all ranks. Attention between two weight matrices learns to give every token the mean
of its document so far. The program runs in bfloat16 on GPUs (nccl) if every process has one, else in float32 on CPUs
(gloo or MPI). It needs torch 2.10 or later.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; NumPy reads this once, when it is imported

import numpy as np
import torch

import thdattn.torch

LENGTHS = ((700, 30, 251, 1, 64), (480, 501, 17))  # tokens of every document, in the batches that groups take in turn
WIDTH, HEADS, KV_HEADS, HEAD_DIM, STEPS, LEARNING_RATE = 32, 4, 2, 64, 20, 0.01


class Model(torch.nn.Module):  # type: ignore[misc]
    """Attention between two matrices of weights; its ranks are those of `comm`."""

    def __init__(self, comm: thdattn.comm.Comm, dtype: torch.dtype, engine: str) -> None:
        super().__init__()
        self.project_in = torch.nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.attention = thdattn.torch.ContextParallelAttention(
            comm, HEADS, HEAD_DIM, num_kv_heads=KV_HEADS, dtype=dtype, engine=engine)
        self.project_out = torch.nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.dtype = dtype

    def forward(self, x: torch.Tensor, plan: thdattn.Plan) -> torch.Tensor:
        """Return (local_rows, WIDTH) for this rank's rows x of the same shape."""
        qkv = self.project_in(x).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM).to(self.dtype)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        out = self.attention(q, k, v, plan)  # sees the keys of all ranks of the group
        return self.project_out(out.flatten(1).to(x.dtype))


def train(world: thdattn.comm.Comm, cp_size: int) -> list[float]:
    """Train on one of the ranks; every rank calls this. Returns the loss of every step, the mean over all groups."""
    if world.size % cp_size:
        raise ValueError(f"the number of ranks is {world.size}, wanted a multiple of the group size {cp_size}")
    group = world.rank // cp_size
    comm = world.split(group)  # the ranks that share a batch
    cuda = torch.cuda.is_available() and "cuda" in world.devices
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    torch.manual_seed(0)  # the same weights on every rank
    model = Model(comm, *((torch.bfloat16, "cuda") if cuda else (torch.float32, "reference"))).to(device)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)

    rng = np.random.default_rng(group)  # the same documents on every rank of a group
    lengths = LENGTHS[group % len(LENGTHS)]
    documents = [rng.standard_normal((n, WIDTH), np.float32) for n in lengths]
    means = [x.cumsum(axis=0) / np.arange(1, len(x) + 1, dtype=np.float32)[:, None] for x in documents]
    losses = []
    for step in range(1, STEPS + 1):
        # A batch: here always the same documents. Plan it once; all layers use the plan.
        batch = thdattn.PackedBatch.from_lengths(lengths, multiple=2 * comm.size)
        plan = model.attention.plan(batch)
        x, target = (local(batch.pack(rows), plan, comm, device) for rows in (documents, means))
        valid = torch.from_dlpack(plan.valid)[:, None]

        # The loss is a mean over the tokens of the group and over the groups; padding has no target.
        squares = (model(x, plan) - target).square().where(valid, 0.0)
        loss = squares.sum() / (batch.total_tokens * WIDTH * (world.size // cp_size))
        optimizer.zero_grad()
        loss.backward()

        # Each rank has only its rows' part of the loss and of the gradients: add the parts of all ranks of all groups.
        total = loss.detach()
        for part in (total, *(weights.grad for weights in model.parameters())):
            world_sum(world, part)
        optimizer.step()
        losses.append(float(total))
        if world.rank == 0:
            print(f"step {step:2}   loss {losses[-1]:.4f}")
    return losses


def local(rows: np.ndarray[Any, Any], plan: thdattn.Plan, comm: thdattn.comm.Comm, device: torch.device) -> Any:
    """Return this rank's rows of a packed array as a tensor."""
    return torch.from_numpy(plan.sharding.shard(rows, comm.rank)).to(device)


def world_sum(world: thdattn.comm.Comm, x: torch.Tensor) -> None:
    """Replace a tensor by its sum over all ranks."""
    with thdattn.torch.on_torch_stream(x.device):
        if x.device.type == "cuda":
            import cupy

            world.all_reduce(cupy.from_dlpack(x), "sum")
        else:
            world.all_reduce(x.numpy(), "sum")


def ranks() -> thdattn.comm.Comm:
    """Join the processes that torchrun or mpiexec started; without either, this process is the only rank."""
    if not torch.distributed.is_torchelastic_launched():
        return thdattn.comm.init()
    gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.distributed.init_process_group("nccl" if gpus else "gloo")
    return thdattn.comm.from_torch()


if __name__ == "__main__":
    with ranks() as comm:
        train(comm, int(sys.argv[1]) if len(sys.argv) > 1 else comm.size)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
