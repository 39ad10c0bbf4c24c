"""Context parallelism in Transformer Engine's schedule, in torch.distributed, with the kernels of other packages.

Forward: k and v are gathered one after the other and moved to sequence order; a rank's two chunks of every sequence are
two attention calls on two streams, each over the keys up to its chunk's end. Backward: the same gathers again, two
calls, their dk and dv added, moved to rank order and summed over ranks, all in bfloat16. Nothing runs beside
communication.

Source: Transformer Engine's all-gather path for packed sequences (version 2.20), whose own kernels are cuDNN's or
FlashAttention-3's.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import cupy
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from peers import FlashAttention4, Inputs, TorchVarlen, tensor

import thdattn
from thdattn.packing import rows_of_runs

TIMEOUT = timedelta(seconds=120)  # after which a collective of torch ends its process


@contextmanager
def process_group() -> Iterator[None]:
    """torch.distributed over the ranks of MPI, on CuPy's current GPU.

    NOTE: not destroyed on errors, as that waits for ranks that may wait for this one.
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
                                   world_size=world.size, timeout=TIMEOUT, device_id=device)  # fmt: skip
    yield
    distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


class Step(NamedTuple):
    """What one of a rank's two chunks of every sequence needs; int32 arrays, by sequence.

    query_begins: (num_seqs + 1,) first local row of the chunk; num_queries: (num_seqs,) of its rows hold tokens.
    key_begins: (num_seqs + 1,) first row of the sequence in sequence order; num_keys: (num_seqs,) keys up to the
        chunk's end, padding left out.
    """

    query_begins: NDArray[np.int32]
    num_queries: NDArray[np.int32]
    key_begins: NDArray[np.int32]
    num_keys: NDArray[np.int32]


def steps(batch: thdattn.PackedBatch, cp_size: int, cp_rank: int) -> list[Step]:
    """Chunks cp_rank and 2*cp_size-1-cp_rank. The last query of a chunk stands at the last of its keys."""
    begins, lengths = batch.cu_seqlens_padded, batch.lengths
    size = np.diff(begins) // (2 * cp_size)
    made = []
    for half, chunk in enumerate((cp_rank, 2 * cp_size - 1 - cp_rank)):
        query_begins = begins // cp_size
        query_begins[:-1] += half * size
        arrays = query_begins, np.clip(lengths - chunk * size, 0, size), begins, np.minimum(lengths, (chunk + 1) * size)
        made.append(Step(*(x.astype(np.int32) for x in arrays)))
    return made


class Kernels(ABC):
    """The attention of one step, on torch's current stream. q, k, v and results are tensors (rows, heads, width).

    name: of the kernels. version: of the package; raises where it cannot be imported.
    """

    name: str
    version: Callable[[], str]

    @abstractmethod
    def __init__(self, step: Step) -> None: ...

    @abstractmethod
    def forward(self, q: Any, k: Any, v: Any, out: Any) -> None:
        """Writes the step's rows of out and keeps what the backward needs."""

    @abstractmethod
    def backward(self, dout: Any, q: Any, k: Any, v: Any, out: Any, dq: Any) -> tuple[Any, Any]:
        """Writes the step's rows of dq; returns dk and dv, 0 for keys that it does not see."""


class Fa4Kernels(Kernels):
    """flash-attn-4, which takes begins and lengths of sequences, so that nothing is copied."""

    name, version = "fa4", FlashAttention4.version

    def __init__(self, step: Step) -> None:
        from flash_attn.cute import interface

        query_begins, num_queries, key_begins, num_keys = map(_on_gpu, step)
        layout = {
            "cu_seqlens_q": query_begins, "seqused_q": num_queries, "max_seqlen_q": int(step.num_queries.max()),
            "cu_seqlens_k": key_begins, "seqused_k": num_keys, "max_seqlen_k": int(step.num_keys.max()),
            "causal": True,
        }  # fmt: skip
        self._forward = partial(interface._flash_attn_fwd, return_lse=True, **layout)
        self._backward = partial(interface._flash_attn_bwd, **layout)

    def forward(self, q: Any, k: Any, v: Any, out: Any) -> None:
        _, self.lse, *_ = self._forward(q, k, v, out=out)

    def backward(self, dout: Any, q: Any, k: Any, v: Any, out: Any, dq: Any) -> tuple[Any, Any]:
        dk, dv = (x.new_zeros(x.shape) for x in (k, v))
        self._backward(q, k, v, out, dout, self.lse, dq=dq, dk=dk, dv=dv)
        return dk, dv


class TorchKernels(Kernels):
    """torch's own FlashAttention-2, whose backward takes sequences without gaps: rows are copied together."""

    name, version = "varlen", TorchVarlen.version

    def __init__(self, step: Step) -> None:
        import torch

        self._ops = torch.ops.aten
        self._queries, self._keys = (
            _on_gpu(rows_of_runs(begins[:-1], counts).astype(np.int64))
            for begins, counts in ((step.query_begins, step.num_queries), (step.key_begins, step.num_keys))
        )
        counts = step.num_queries, step.num_keys
        self._layout = (*(_on_gpu(np.cumsum([0, *x], dtype=np.int32)) for x in counts), *(int(x.max()) for x in counts),
                        0.0, True)  # fmt: skip

    def forward(self, q: Any, k: Any, v: Any, out: Any) -> None:
        part, *kept = self._ops._flash_attention_forward(*self._rows(q, k, v), *self._layout, False)
        out.index_copy_(0, self._queries, part)
        self._lse, *self._random = kept[:3]

    def backward(self, dout: Any, q: Any, k: Any, v: Any, out: Any, dq: Any) -> tuple[Any, Any]:
        dout, out = (x.index_select(0, self._queries) for x in (dout, out))
        q_part, *others = self._ops._flash_attention_backward(
            dout, *self._rows(q, k, v), out, self._lse, *self._layout, *self._random
        )
        dq.index_copy_(0, self._queries, q_part)
        dk, dv = (x.new_zeros(x.shape).index_copy_(0, self._keys, part)
                  for x, part in zip((k, v), others, strict=True))  # fmt: skip
        return dk, dv

    def _rows(self, q: Any, k: Any, v: Any) -> list[Any]:
        return [q.index_select(0, self._queries), *(x.index_select(0, self._keys) for x in (k, v))]


def kernels() -> type[Kernels]:
    """The best that every rank can import; collective."""
    from mpi4py import MPI

    found = set.intersection(*MPI.COMM_WORLD.allgather(set(_importable())))
    if not found:
        raise RuntimeError("--peer needs flash-attn-4 or torch.nn.attention.varlen on every rank; install one of them")
    return next(made for made in KERNELS if made.name in found)


def _importable() -> Iterator[str]:
    for made in KERNELS:
        try:
            made.version()
        except Exception:  # a package whose libraries do not load raises more than ImportError
            continue
        yield made.name


KERNELS: tuple[type[Kernels], ...] = (Fa4Kernels, TorchKernels)


class TransformerEngine:
    """One attention layer on this rank's rows of a case; backward follows the last forward.

    Args:
        plan: of ours, for the batch and its sharding, which are the same.
        inputs: this rank's rows.
    """

    def __init__(self, plan: thdattn.Plan, inputs: Inputs, made_of: type[Kernels]) -> None:
        import torch
        from torch import distributed

        self._torch, self._distributed, self._size = torch, distributed, plan.cp_size
        torch.cuda.set_stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr))
        self._second_stream = torch.cuda.Stream()
        self.q, self.k, self.v, self.dout = map(tensor, inputs)
        order = np.concatenate([plan.sharding.rows(rank) for rank in range(plan.cp_size)])
        self._rank_order, self._sequence_order = map(_on_gpu, (order, np.argsort(order)))
        self._steps = [made_of(step) for step in steps(plan.batch, plan.cp_size, plan.cp_rank)]

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
        """out, dq, dk, dv: tensors of this rank's rows."""
        return self.out, *self.grads

    def on_gpu(self) -> list[Any]:
        """The same as CuPy arrays."""
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
