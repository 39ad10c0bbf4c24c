"""torch.distributed ranks: host arrays through gloo, GPU arrays through torch's NCCL. Loads PyTorch when made."""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np

from thdattn.arguments import Array, found
from thdattn.comm import Comm, launcher
from thdattn.comm.failures.lanes import lane_of
from thdattn.comm.failures.watchdog import Watch, flush
from thdattn.comm.nccl import gpus
from thdattn.comm.slices import Slices


class TorchComm(Comm):
    """One process of a torch.distributed process group; see thdattn.comm.from_torch.

    Arrays become tensors without a copy. gloo's reduce_scatter is an all_reduce of a copy, of which each rank keeps its
    rows, and so moves twice the bytes. torch does the same, and refuses some versions and dtypes besides.

    On a GPU, collectives are ordered in CuPy's current stream and return at once.

    Args:
        group: the process group; None for all processes.

    Raises:
        RuntimeError, TypeError, ValueError: as thdattn.comm.from_torch says.
    """

    name = "torch"
    sum_dtypes = Comm.sum_dtypes - {"uint32", "uint64"}
    _connected = False

    def __init__(self, group: Any = None) -> None:
        self._torch, distributed = _load()
        if not distributed.is_available() or not distributed.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group(), in a program that "
                "torchrun started, before thdattn.comm.from_torch()"
            )
        group = distributed.group.WORLD if group is None else group
        if group == distributed.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "this process is not in group; call thdattn.comm.from_torch only on the ranks that new_group names"
            )
        if not isinstance(group, distributed.ProcessGroup):
            raise TypeError(
                f"group is {found(group)}; wanted a process group of torch.distributed; pass None for all processes"
            )
        super().__init__(distributed.get_rank(group), distributed.get_world_size(group))
        self.devices = _devices(distributed.get_backend_config(group), self._torch.cuda.is_available())
        self._distributed, self._group = distributed, group
        self._ops = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}
        # torch 2.13 renamed these and warns of the old names.
        self._gather = _either(distributed, "all_gather_single", "all_gather_into_tensor")
        self._scatter = _either(distributed, "reduce_scatter_single", "reduce_scatter_tensor")
        if "cuda" in self.devices:
            self._cupy = gpus.load_cupy()
            self._gpu = int(self._torch.cuda.current_device())
            self._cupy.cuda.Device(self._gpu).use()
        who = f"rank {self.rank} of {self.size} on {launcher.hostname()}"
        self._watch = Watch(who, _timeout(self._torch, group, self.devices), _end_this_process, limit=math.inf)
        if self.size > 1:
            self._watch.start()
            self._watch.find_ranks(self.rank, self._gather_values)

    def _watched(self, what: str, array: Array = None) -> AbstractContextManager[object]:
        if self._gpu is None or isinstance(array, np.ndarray):
            return self._on_host(what, array)
        stream = self._cupy.cuda.get_current_stream()
        if self.size == 1 or stream.is_capturing():
            return nullcontext()
        return self._watch.enqueued(lane_of(self._cupy, self._gpu, stream), what, array)

    @contextmanager
    def _on_host(self, what: str, array: Array = None) -> Iterator[None]:
        """Watch a block that waits for other ranks; where torch's timeout ends it, name the late ranks on stderr."""
        begun = time.monotonic()
        with self._watch.waiting(what, array):
            try:
                yield
            except RuntimeError:
                self._watch.say_who_is_late(what, time.monotonic() - begun)
                raise

    def _all_gather(self, send: Array, recv: Array) -> None:
        if send.size:
            with self._stream_of(send):
                self._gather(self._tensor(_as_bytes(recv)), self._tensor(_as_bytes(send)), group=self._group)

    def _reduce_scatter(self, send: Array, recv: Array) -> None:
        if isinstance(send, np.ndarray):
            total, rows = send.copy(), recv.shape[0]
            self._all_reduce(total, "sum")
            recv[...] = total[self.rank * rows : (self.rank + 1) * rows]
        elif send.size:
            with self._stream_of(send):
                self._scatter(self._tensor(recv), self._tensor(send), op=self._ops["sum"], group=self._group)

    def _all_reduce(self, array: Array, op: str) -> None:
        if array.size:
            with self._stream_of(array):
                self._distributed.all_reduce(self._tensor(array), op=self._ops[op], group=self._group)

    def _send_receive(self, sends: Slices, recvs: Slices) -> None:
        # torch connects ranks in a collective of all, and only some of them may have messages.
        if "cuda" in self.devices and not self._connected:
            self._gather_values(0)
            self._connected = True
        distributed = self._distributed
        messages = [(distributed.irecv, *pair) for pair in recvs] + [(distributed.isend, *pair) for pair in sends]
        if messages:
            with self._stream_of(messages[0][1]):
                for work in distributed.batch_isend_irecv([
                    distributed.P2POp(act, self._tensor(_as_bytes(part)), group=self._group, group_peer=peer)
                    for act, part, peer in messages
                ]):
                    work.wait()

    def _barrier(self) -> None:
        if self._gpu is not None:
            self._cupy.cuda.get_current_stream().synchronize()
        with self._on_host("barrier"):
            self._gather_values(0)  # torch's barrier must guess a GPU where a group has two backends

    def _gather_values(self, value: Any) -> Sequence[Any]:
        values: list[Any] = [None] * self.size
        self._distributed.all_gather_object(values, value, group=self._group)
        return values

    def _split(self, color: int, key: int) -> Comm:
        """Make a process group of torch for each color.

        NOTE: torch orders a group's ranks as in the world unless told otherwise, and older versions cannot be told. The
        group lives as long as torch.distributed: another group of the same ranks would use its stale addresses.
        """
        distributed = self._distributed
        everyone = self._gather_values((color, key, self.rank, distributed.get_rank()))
        of_color: dict[int, list[int]] = {}
        for other, _, _, process in sorted(everyone):
            of_color.setdefault(other, []).append(process)
        order = {}
        if any(processes != sorted(processes) for processes in of_color.values()):
            if "sort_ranks" not in inspect.signature(distributed.new_group).parameters:
                raise ValueError(
                    f"key puts processes in the order {list(of_color.values())}, but torch {self._torch.__version__} "
                    f"wanted that of their ranks in the world; pass keys in that order, or install torch 2.13"
                )
            order["sort_ranks"] = False
        backend = distributed.get_backend_config(self._group)
        group = distributed.new_group(of_color[color], backend=backend, use_local_synchronization=True, **order)
        return type(self)(group)

    def _close(self) -> None:
        """Let go of the group: torch ends its threads when nobody holds it, which must be before the program ends."""
        self._group = None

    def _tensor(self, array: Array) -> Any:
        """Return the array as a tensor over the same memory."""
        return self._torch.from_numpy(array) if isinstance(array, np.ndarray) else self._torch.from_dlpack(array)

    def _stream_of(self, array: Array) -> AbstractContextManager[Any]:
        """Make CuPy's current stream torch's, so that torch's work comes after and before the engine's."""
        if isinstance(array, np.ndarray):
            return nullcontext()
        cuda, pointer = self._torch.cuda, self._cupy.cuda.get_current_stream().ptr
        # NOTE: ExternalStream of the default stream, whose pointer is 0, would be a new stream from torch's pool.
        stream = cuda.ExternalStream(pointer, device=self._gpu) if pointer else cuda.default_stream(self._gpu)
        context: AbstractContextManager[Any] = cuda.stream(stream)
        return context


def _load() -> tuple[Any, Any]:
    try:
        import torch
        import torch.distributed
    except Exception as error:  # a PyTorch whose libraries do not load raises more than ImportError
        raise RuntimeError(
            f"PyTorch cannot be loaded ({type(error).__name__}: {error}); install it, or start the program with "
            f"mpiexec and use thdattn.comm.init()"
        ) from error
    return torch, torch.distributed


def _either(module: Any, name: str, older: str) -> Any:
    return getattr(module, name) if hasattr(module, name) else getattr(module, older)


def _timeout(torch: Any, group: Any, devices: frozenset[str]) -> float:
    """Return the seconds that torch waits in a collective of the group; infinity where this torch does not say."""
    with suppress(Exception):
        backend = group._get_backend(torch.device("cpu" if "cpu" in devices else "cuda"))
        return float(backend.options._timeout.total_seconds())
    return math.inf


def _end_this_process() -> None:
    """End with an error, upon which torchrun ends the other processes."""
    flush()
    os._exit(1)


def _devices(config: str, has_gpu: bool) -> frozenset[str]:
    """Return the arrays that a group moves, from its table of backends, such as "cpu:gloo,cuda:nccl"."""
    backends = config.split(",")
    cpu, cuda = "cpu:gloo" in backends, "cuda:nccl" in backends and has_gpu
    devices = frozenset(["cpu"] * cpu + ["cuda"] * cuda)
    if not devices:
        raise ValueError(
            f"group has the backends {config}; wanted gloo for host arrays or nccl for GPU arrays, "
            f"as in torch.distributed.init_process_group('nccl')"
        )
    return devices


def _as_bytes(array: Array) -> Any:
    """Return the array's bytes, since torch knows fewer dtypes; a copy of a read-only array, as torch would warn."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = array.copy()
    return array.reshape(-1).view("u1")
