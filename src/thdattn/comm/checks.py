"""Checks of a rank's own arguments of collectives; they cost no communication."""

from __future__ import annotations

import numbers
import threading
from typing import Any

import numpy as np

from thdattn.arguments import Array, as_int, found
from thdattn.comm.slices import Slices, address

_ARRAY_KINDS = {"cpu": "NumPy", "cuda": "CuPy"}


class ArgumentChecks:
    """Argument checks of a comm: errors name the argument, what was found, what was wanted, and the remedy."""

    name: str
    rank: int
    size: int
    devices: frozenset[str]
    sum_dtypes: frozenset[str]
    _gpu: int | None = None  # the number of the only GPU whose arrays this rank takes, where that matters
    _closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"this {self.name} comm is closed; call thdattn.comm.init() for a new one")

    def _check_array(self, name: str, array: Array) -> None:
        self._check_kind(name, array)
        if not array.flags.c_contiguous:
            raise TypeError(
                f"{name} is not C-contiguous (shape {array.shape}, strides {array.strides}); copy it first"
            )

    def _check_kind(self, name: str, array: Array) -> None:
        self._check_open()
        if _device(array) not in self.devices:
            kind = type(array)
            wanted = " or ".join(_ARRAY_KINDS[device] for device in sorted(self.devices))
            raise TypeError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}, but the {self.name} backend takes {wanted} "
                f"arrays; convert it, or choose the backend that fits in thdattn.comm.init"
            )
        if array.dtype.hasobject or not array.dtype.isnative:
            raise TypeError(
                f"{name} is of dtype {array.dtype.str}; wanted numbers in this machine's byte order, convert it first"
            )
        on_gpu = self._gpu is not None and array.size and not isinstance(array, np.ndarray)
        if on_gpu and array.data.device_id != self._gpu:
            raise ValueError(
                f"{name} is on GPU {array.data.device_id}, but rank {self.rank} works on GPU {self._gpu}; make arrays "
                f"under cupy.cuda.Device({self._gpu}), which was current when this comm was made"
            )

    def _check_writable(self, name: str, array: Array) -> None:
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise ValueError(f"{name} is read-only, but is to be overwritten; copy it first")

    def _check_buffers(self, send: Array, recv: Array) -> None:
        self._check_array("send", send)
        self._check_array("recv", recv)
        self._check_writable("recv", recv)
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

    def _check_slices(self, sends: Slices, recvs: Slices, sizes: Any) -> None:
        self._check_open()
        kinds = {self._check_slice(f"sends[{i}]", *pair) for i, pair in enumerate(sends)}
        kinds |= {self._check_slice(f"recvs[{i}]", *pair) for i, pair in enumerate(recvs)}
        if len(kinds) > 1:
            raise TypeError("sends and recvs have NumPy arrays and CuPy arrays; use one device for all")
        for i, (array, _) in enumerate(recvs):
            self._check_writable(f"recvs[{i}]", array)
        if sizes is not None:
            self._check_sizes(sends, recvs, np.asarray(sizes))

    def _check_slice(self, name: str, array: Array, peer: int) -> str | None:
        """Check one slice and return its device."""
        self._check_kind(name, array)
        if array.ndim == 0:
            raise ValueError(f"{name} has no dimensions; its first dimension is the rows, reshape it to (1,)")
        if not array.flags.c_contiguous and not _has_whole_rows(array):
            raise TypeError(
                f"{name} has rows that are not contiguous or that overlap (shape {array.shape}, strides "
                f"{array.strides}); wanted a slice x[a:b] or x[:, a:b] of a C-contiguous array, copy it first"
            )
        if not 0 <= as_int(f"the rank of {name}", peer) < self.size or peer == self.rank:
            raise ValueError(
                f"the rank of {name} is {peer}; wanted one of the {self.size} ranks that is not this one, "
                f"{self.rank}; copy what stays here"
            )
        return _device(array)

    def _check_sizes(self, sends: Slices, recvs: Slices, sizes: np.ndarray) -> None:
        if sizes.shape != (self.size, self.size) or sizes.dtype.kind not in "iu":
            raise ValueError(
                f"sizes has shape {sizes.shape} and dtype {sizes.dtype}; wanted the bytes that each of the "
                f"{self.size} ranks sends to each other one, ({self.size}, {self.size}) integers"
            )
        for name, slices, said in (("sends", sends, sizes[self.rank]), ("recvs", recvs, sizes[:, self.rank])):
            there = [0] * self.size
            for array, peer in slices:
                there[peer] += array.nbytes
            if there != said.tolist():
                raise ValueError(
                    f"{name} has {there} bytes for ranks 0 to {self.size - 1}, but sizes says {said.tolist()}; make "
                    f"both from one plan"
                )

    def _check_shape(self, recv: Array, wanted: tuple[int, ...], rule: str) -> None:
        if recv.shape != wanted:
            raise ValueError(
                f"recv has shape {recv.shape}; with {self.size} ranks it must be {wanted} ({rule}, "
                f"other dimensions as send)"
            )

    def _check_sum_dtype(self, name: str, array: Array) -> None:
        if array.dtype.name not in self.sum_dtypes:
            raise TypeError(
                f"{name} is {array.dtype}; the {self.name} backend sums {', '.join(sorted(self.sum_dtypes))}; "
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
