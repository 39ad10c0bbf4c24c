"""Communicators of NCCL, which start on all ranks or on none.

FewBlocks is one with few thread blocks, so that kernels keep most multiprocessors while a collective runs. CuPy's
communicator has no such setting. FewBlocks makes the same calls on the library that CuPy has loaded.

Source: nccl.h, ncclCommInitRankConfig and ncclConfig_t.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from thdattn.comm.failures.outcomes import Waiting, attempt, results

_MAGIC, _VERSION, _UNSET = 0xCAFEBEEF, 21700, -(2**31)  # NCCL_API_MAGIC, 2.17.0, NCCL_CONFIG_UNDEF_INT


def start(
    world: Any, nccl: Any, failure: str, make: Callable[[int, bytes, int], Any], waiting: Waiting = nullcontext
) -> Any:
    """Make a communicator on all ranks, or raise on all ranks.

    Args:
        failure: what to say if a rank does not make it.
        make: makes it from the number of ranks, an id, and the rank.
        waiting: makes a context in which a rank that failed waits for the others, given its failure. They may be in
            `make` still, which has no timeout.
    """
    # NOTE: the outcome is sent, not the id: a rank 0 that raised here would leave the others in bcast.
    made = world.bcast(attempt(nccl.get_unique_id) if world.rank == 0 else None, root=0)
    (unique_id,) = results("NCCL made no unique id", [made])
    ok, result = attempt(lambda: make(world.size, unique_id, world.rank))
    with nullcontext() if ok else waiting(f"{failure} here ({result})"):
        outcomes = world.allgather((ok, None if ok else result))
    results(failure, outcomes)
    return result


def start_with_few_blocks(world: Any, nccl: Any, ctas: int) -> Any:
    """Make a communicator on all ranks, an ordinary one where NCCL takes no number of thread blocks on one rank.

    Raises:
        RuntimeError: on every rank, if one cannot start it.
    """
    failure = "NCCL's second communicator did not start"
    able, _ = attempt(library)
    if all(world.allgather(able)):
        try:
            return start(world, nccl, failure, lambda size, name, rank: FewBlocks(size, name, rank, ctas))
        except RuntimeError:  # on all ranks alike
            pass
    return start(world, nccl, failure, nccl.NcclCommunicator)


class Config(ctypes.Structure):
    """Fields that ncclConfig_t has had since NCCL 2.17; the library takes as many bytes as `size` says."""

    _fields_ = (
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int), ("min_ctas", ctypes.c_int), ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
    )

    @classmethod
    def of(cls, ctas: int) -> Config:
        """Return the configuration of a communicator with at most so many thread blocks."""
        return cls(ctypes.sizeof(cls), _MAGIC, _VERSION, _UNSET, _UNSET, 1, ctas, None)


class UniqueId(ctypes.Structure):
    """Struct ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class FewBlocks:
    """Communicator of a rank, with those methods of CuPy's NcclCommunicator that the transport calls.

    Args:
        ctas: thread blocks of a collective at most.

    Raises:
        RuntimeError: NCCL refuses a call.
    """

    def __init__(self, size: int, unique_id: bytes, rank: int, ctas: int) -> None:
        self._library = library()
        self._comm = ctypes.c_void_p()
        name, config = UniqueId.from_buffer_copy(unique_id), Config.of(ctas)
        self._check(self._library.ncclCommInitRankConfig(
            ctypes.byref(self._comm), ctypes.c_int(size), name, ctypes.c_int(rank), ctypes.byref(config)))

    def allGather(self, send: int, recv: int, count: int, dtype: int, stream: int) -> None:
        self._check(self._library.ncclAllGather(*_pointers(send, recv), _count(count), dtype, *self._on(stream)))

    def reduceScatter(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
        self._check(self._library.ncclReduceScatter(
            *_pointers(send, recv), _count(count), dtype, op, *self._on(stream)))

    def send(self, send: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._check(self._library.ncclSend(*_pointers(send), _count(count), dtype, peer, *self._on(stream)))

    def recv(self, recv: int, count: int, dtype: int, peer: int, stream: int) -> None:
        self._check(self._library.ncclRecv(*_pointers(recv), _count(count), dtype, peer, *self._on(stream)))

    def destroy(self) -> None:
        self._check(self._library.ncclCommDestroy(self._comm))

    def _on(self, stream: int) -> tuple[Any, Any]:
        return self._comm, ctypes.c_void_p(stream)

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"NCCL: {self._library.ncclGetErrorString(status).decode()}")


@functools.cache
def library() -> Any:
    """Return the NCCL library that CuPy has loaded.

    Raises:
        OSError: it is not loaded under its usual name.
        AttributeError: it has no ncclCommInitRankConfig.
        RuntimeError: it reads another ncclConfig_t.
    """
    found = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    found.ncclGetErrorString.restype = ctypes.c_char_p
    assert found.ncclCommInitRankConfig
    version = ctypes.c_int()
    found.ncclGetVersion(ctypes.byref(version))
    if version.value < _VERSION:
        raise RuntimeError(f"NCCL is {version.value}, wanted {_VERSION} or newer")
    return found


def _pointers(*addresses: int) -> list[Any]:
    return [ctypes.c_void_p(address) for address in addresses]


def _count(count: int) -> Any:
    return ctypes.c_size_t(count)
