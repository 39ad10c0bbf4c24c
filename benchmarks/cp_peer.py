"""Context parallelism in Transformer Engine's schedule, in torch.distributed, with the kernels of flash-attn-4.

Forward: gather k, then v, and move both to sequence order. Compute a rank's two chunks of every sequence by two
attention calls on two streams, each over the keys up to its chunk's end. Backward: gather again, and compute two calls.
Add their dk and dv, move them to rank order and sum them over ranks, all in bfloat16. Nothing overlaps communication.

Source: Transformer Engine's all-gather path for packed sequences (version 2.20); its own kernels are cuDNN's or
FlashAttention-3's.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import cupy
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from peers import Inputs, tensor

import thdattn

TIMEOUT = timedelta(seconds=120)  # of a collective of torch, which then ends its process


@contextmanager
def process_group() -> Iterator[None]:
    """Start torch.distributed over the ranks of MPI, on CuPy's current GPU.

    NOTE: it does not destroy the group on errors: that waits for ranks that may wait for this one.
    """
    import torch
    from mpi4py import MPI
    from torch import distributed

    world = MPI.COMM_WORLD
    device = torch.device("cuda", cupy.cuda.runtime.getDevice())
    torch.cuda.set_device(device)
    hosts = world.allgather(socket.gethostname())
    address = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    port = world.bcast(_free_port() if world.rank == 0 else None)
    distributed.init_process_group("nccl", init_method=f"tcp://{address}:{port}", rank=world.rank,
                                   world_size=world.size, timeout=TIMEOUT, device_id=device)
    yield
    distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


class Step(NamedTuple):
    """Queries and keys of one of a rank's two chunks of every sequence; int32 arrays, by sequence.

    query_begins: (num_seqs + 1,) first local row of the chunk. num_queries: (num_seqs,) rows of it that hold tokens.
    key_begins: (num_seqs + 1,) first row of the sequence in sequence order. num_keys: (num_seqs,) keys up to the end
        of the chunk, without padding.
    """

    query_begins: NDArray[np.int32]
    num_queries: NDArray[np.int32]
    key_begins: NDArray[np.int32]
    num_keys: NDArray[np.int32]


def steps(batch: thdattn.PackedBatch, cp_size: int, cp_rank: int) -> list[Step]:
    """Return the steps of chunks cp_rank and 2*cp_size-1-cp_rank; the last query of a chunk sees its last key."""
    begins, lengths = batch.cu_seqlens_padded, batch.lengths
    size = np.diff(begins) // (2 * cp_size)
    made = []
    for half, chunk in enumerate((cp_rank, 2 * cp_size - 1 - cp_rank)):
        query_begins = begins // cp_size
        query_begins[:-1] += half * size
        arrays = query_begins, np.clip(lengths - chunk * size, 0, size), begins, np.minimum(lengths, (chunk + 1) * size)
        made.append(Step(*(x.astype(np.int32) for x in arrays)))
    return made


class Kernels:
    """Attention of one step by flash-attn-4, on torch's current stream, without copies of rows.

    q, k, v and results are tensors (rows, heads, width).
    """

    def __init__(self, step: Step) -> None:
        from flash_attn.cute import interface

        query_begins, num_queries, key_begins, num_keys = map(_on_gpu, step)
        layout = {
            "cu_seqlens_q": query_begins, "seqused_q": num_queries, "max_seqlen_q": int(step.num_queries.max()),
            "cu_seqlens_k": key_begins, "seqused_k": num_keys, "max_seqlen_k": int(step.num_keys.max()),
            "causal": True,
        }
        self._forward = partial(interface._flash_attn_fwd, return_lse=True, **layout)
        self._backward = partial(interface._flash_attn_bwd, **layout)

    def forward(self, q: Any, k: Any, v: Any, out: Any) -> None:
        """Write the step's rows of out, and keep lse for the backward."""
        _, self.lse, *_ = self._forward(q, k, v, out=out)

    def backward(self, dout: Any, q: Any, k: Any, v: Any, out: Any, dq: Any) -> tuple[Any, Any]:
        """Write the step's rows of dq; return dk and dv, which are 0 for keys that the step does not see."""
        dk, dv = (x.new_zeros(x.shape) for x in (k, v))
        self._backward(q, k, v, out, dout, self.lse, dq=dq, dk=dk, dv=dv)
        return dk, dv


class TransformerEngine:
    """Attention layer on this rank's rows of a case; backward follows the last forward.

    Args:
        plan: plan of this package for the same batch and sharding.
        inputs: this rank's rows.
    """

    def __init__(self, plan: thdattn.Plan, inputs: Inputs) -> None:
        import torch
        from torch import distributed

        self._torch, self._distributed, self._size = torch, distributed, plan.cp_size
        torch.cuda.set_stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr))
        self._second_stream = torch.cuda.Stream()
        self.q, self.k, self.v, self.dout = map(tensor, inputs)
        order = np.concatenate([plan.sharding.rows(rank) for rank in range(plan.cp_size)])
        self._rank_order, self._sequence_order = map(_on_gpu, (order, np.argsort(order)))
        self._steps = [Kernels(step) for step in steps(plan.batch, plan.cp_size, plan.cp_rank)]

    def forward(self) -> None:
        keys, values = self._gathered()
        self.out = self.dout.new_zeros(self.dout.shape)
        self._on_two_streams([partial(step.forward, self.q, keys, values, self.out) for step in self._steps])

    def backward(self) -> None:
        keys, values = self._gathered()
        dq = self.q.new_zeros(self.q.shape)
        first, second = self._on_two_streams(
            [partial(step.backward, self.dout, self.q, keys, values, self.out, dq) for step in self._steps]
        )
        self.grads = dq, *(self._reduced(x.add_(y)) for x, y in zip(first, second, strict=True))

    def results(self) -> Sequence[Any]:
        """Return out, dq, dk and dv: tensors of this rank's rows."""
        return self.out, *self.grads

    def on_gpu(self) -> list[Any]:
        """Return the results as CuPy arrays."""
        return [cupy.from_dlpack(x.view(self._torch.int16)).view(ml_dtypes.bfloat16) for x in self.results()]

    def _gathered(self) -> list[Any]:
        ranks = []
        for x in (self.k, self.v):
            ranks.append(x.new_empty((self._size * len(x), *x.shape[1:])))
            self._distributed.all_gather_into_tensor(ranks[-1], x)
        return [x.index_select(0, self._sequence_order) for x in ranks]

    def _reduced(self, x: Any) -> Any:
        total = x.new_empty((len(x) // self._size, *x.shape[1:]))
        self._distributed.reduce_scatter_tensor(total, x.index_select(0, self._rank_order))
        return total

    def _on_two_streams(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        main = self._torch.cuda.current_stream()
        self._second_stream.wait_stream(main)
        results = [calls[0]()]
        with self._torch.cuda.stream(self._second_stream):
            results.append(calls[1]())
        main.wait_stream(self._second_stream)
        return results


def _on_gpu(x: NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(x)).cuda()
