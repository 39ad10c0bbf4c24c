"""Checks of a rank's own arguments of collectives; they cost no communication.

Errors name the argument, what was found, what was wanted, and the remedy.
"""

from __future__ import annotations

import numbers
import threading
from typing import Any, Protocol

import numpy as np

from thdattn.arguments import Array, as_int, found
from thdattn.comm.slices import Slices, address

_ARRAY_KINDS = {"cpu": "NumPy", "cuda": "CuPy"}


class Limits(Protocol):
    """Properties of a comm that decide which arguments it takes; see Comm."""

    name: str
    rank: int
    size: int
    devices: frozenset[str]
    sum_dtypes: frozenset[str]
    _gpu: int | None


def check_array(comm: Limits, name: str, array: Array) -> None:
    _check_kind(comm, name, array)
    if not array.flags.c_contiguous:
        raise TypeError(
            f"{name} is not C-contiguous (shape {array.shape}, strides {array.strides}); copy it first"
        )


def _check_kind(comm: Limits, name: str, array: Array) -> None:
    if _device(array) not in comm.devices:
        kind = type(array)
        wanted = " or ".join(_ARRAY_KINDS[device] for device in sorted(comm.devices))
        raise TypeError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, but the {comm.name} backend takes {wanted} "
            f"arrays; convert it, or choose the backend that fits in thdattn.comm.init"
        )
    if array.dtype.hasobject or not array.dtype.isnative:
        raise TypeError(
            f"{name} is of dtype {array.dtype.str}; wanted numbers in this machine's byte order, convert it first"
        )
    on_gpu = comm._gpu is not None and array.size and not isinstance(array, np.ndarray)
    if on_gpu and array.data.device_id != comm._gpu:
        raise ValueError(
            f"{name} is on GPU {array.data.device_id}, but rank {comm.rank} works on GPU {comm._gpu}; make arrays "
            f"under cupy.cuda.Device({comm._gpu}), which was current when this comm was made"
        )


def check_writable(name: str, array: Array) -> None:
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{name} is read-only, but is to be overwritten; copy it first")


def check_buffers(comm: Limits, send: Array, recv: Array) -> None:
    check_array(comm, "send", send)
    check_array(comm, "recv", recv)
    check_writable("recv", recv)
    if send.ndim == 0:
        raise ValueError("send has no dimensions; its first dimension is the rows, reshape it to (1,)")
    if isinstance(send, np.ndarray) != isinstance(recv, np.ndarray):
        raise TypeError(
            f"send is a {type(send).__name__} and recv a {type(recv).__name__}; use one device for both"
        )
    if send.dtype != recv.dtype:
        raise TypeError(f"send is {send.dtype} but recv is {recv.dtype}; make recv {send.dtype}")
    begin, other = address(send), address(recv)
    if begin < other + recv.nbytes and other < begin + send.nbytes:
        raise ValueError("send and recv share memory; give recv memory of its own")


def check_slices(comm: Limits, sends: Slices, recvs: Slices, sizes: Any) -> None:
    kinds = {_check_slice(comm, f"sends[{i}]", *pair) for i, pair in enumerate(sends)}
    kinds |= {_check_slice(comm, f"recvs[{i}]", *pair) for i, pair in enumerate(recvs)}
    if len(kinds) > 1:
        raise TypeError("sends and recvs have NumPy arrays and CuPy arrays; use one device for all")
    for i, (array, _) in enumerate(recvs):
        check_writable(f"recvs[{i}]", array)
    if sizes is not None:
        _check_sizes(comm, sends, recvs, np.asarray(sizes))


def _check_slice(comm: Limits, name: str, array: Array, peer: int) -> str | None:
    """Check one slice and return its device."""
    _check_kind(comm, name, array)
    if array.ndim == 0:
        raise ValueError(f"{name} has no dimensions; its first dimension is the rows, reshape it to (1,)")
    if not array.flags.c_contiguous and not _has_whole_rows(array):
        raise TypeError(
            f"{name} has rows that are not contiguous or that overlap (shape {array.shape}, strides "
            f"{array.strides}); wanted a slice x[a:b] or x[:, a:b] of a C-contiguous array, copy it first"
        )
    if not 0 <= as_int(f"the rank of {name}", peer) < comm.size or peer == comm.rank:
        raise ValueError(
            f"the rank of {name} is {peer}; wanted one of the {comm.size} ranks that is not this one, "
            f"{comm.rank}; copy what stays here"
        )
    return _device(array)


def _check_sizes(comm: Limits, sends: Slices, recvs: Slices, sizes: np.ndarray) -> None:
    if sizes.shape != (comm.size, comm.size) or sizes.dtype.kind not in "iu":
        raise ValueError(
            f"sizes has shape {sizes.shape} and dtype {sizes.dtype}; wanted the bytes that each of the "
            f"{comm.size} ranks sends to each other one, ({comm.size}, {comm.size}) integers"
        )
    for name, slices, said in (("sends", sends, sizes[comm.rank]), ("recvs", recvs, sizes[:, comm.rank])):
        there = [0] * comm.size
        for array, peer in slices:
            there[peer] += array.nbytes
        if there != said.tolist():
            raise ValueError(
                f"{name} has {there} bytes for ranks 0 to {comm.size - 1}, but sizes says {said.tolist()}; make "
                f"both from one plan"
            )


def check_shape(comm: Limits, recv: Array, wanted: tuple[int, ...], rule: str) -> None:
    if recv.shape != wanted:
        raise ValueError(
            f"recv has shape {recv.shape}; with {comm.size} ranks it must be {wanted} ({rule}, "
            f"other dimensions as send)"
        )


def check_sum_dtype(comm: Limits, name: str, array: Array) -> None:
    if array.dtype.name not in comm.sum_dtypes:
        raise TypeError(
            f"{name} is {array.dtype}; the {comm.name} backend sums {', '.join(sorted(comm.sum_dtypes))}; "
            f"convert it to float32"
        )


def _has_whole_rows(array: Array) -> bool:
    """Return whether the elements of each row are contiguous, and rows do not overlap."""
    row = array[:1]
    return bool(row.flags.c_contiguous and array.strides[0] >= row.nbytes)


def as_timeout(timeout: Any) -> float:
    """Return a timeout as seconds.

    Raises:
        TypeError: timeout is no number.
        ValueError: it is not positive, or not finite.
    """
    if not isinstance(timeout, numbers.Real) or isinstance(timeout, bool):
        raise TypeError(f"timeout is {found(timeout)}; wanted a number of seconds; convert it with float()")
    seconds = float(timeout)
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        most = f"{threading.TIMEOUT_MAX:g}"
        raise ValueError(f"timeout is {timeout}, wanted seconds > 0 and <= {most}; pass {most} to wait for ever")
    return seconds


def _device(array: Array) -> str | None:
    if isinstance(array, np.ndarray):
        return "cpu"
    # The module's name tells, so that installations without CuPy need not import it.
    return "cuda" if type(array).__module__.split(".")[0] == "cupy" else None
