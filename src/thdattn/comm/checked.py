"""Collectives that first agree, on the host, on the call and on its arrays; see `check` of thdattn.comm.init.

They are a class of their own, so that ranks that do not check pay nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from thdattn.arguments import Array, as_bool, is_array, shown
from thdattn.comm.base import Comm
from thdattn.comm.overlap.collectives import Arrival
from thdattn.comm.slices import AllToAllSpec, Slices

AnyComm = TypeVar("AnyComm", bound=Comm)


class CheckedCollectives(Comm):
    """Comm whose ranks agree before every collective, also before one that a CUDA graph captures."""

    checks = True

    def all_gather(self, send: Array, recv: Array) -> None:
        self.agree("all_gather", {"send": _kind(send), "recv": _kind(recv)})
        super().all_gather(send, recv)

    def reduce_scatter(self, send: Array, recv: Array) -> None:
        self.agree("reduce_scatter", {"send": _kind(send), "recv": _kind(recv)})
        super().reduce_scatter(send, recv)

    def all_reduce(self, array: Array, op: str) -> None:
        self.agree("all_reduce", {"array": _kind(array), "op": op})
        super().all_reduce(array, op)

    def exchange(self, sends: Slices, recvs: Slices, sizes: Any = None) -> Callable[[], None]:
        self.agree("exchange", {"sizes": str(sizes)})
        self.agree("slices of an exchange", {}, self._unmatched(sends, recvs))
        return super().exchange(sends, recvs, sizes)

    def all_to_all(
        self, spec: AllToAllSpec, sends: Sequence[Array], recvs: Sequence[Array], at_once: bool = False
    ) -> Callable[[], None]:
        sizes = None if spec.sizes is None else spec.sizes.ravel()
        self.agree("exchange of slices", {"sizes": sizes, "at_once": at_once})
        return super().all_to_all(spec, sends, recvs, at_once)

    def gather_heads(
        self, sends: Sequence[Array], recvs: Sequence[Sequence[Array]], at_once: bool = False
    ) -> list[Arrival]:
        groups = [[_kind(part) for part in parts] for parts in recvs]
        self.agree("gather of keys", {"rows": list(map(_kind, sends)), "groups": groups, "at_once": at_once})
        return super().gather_heads(sends, recvs, at_once)

    def owner_partials(
        self, shapes: Sequence[tuple[int, ...]], largest: Sequence[tuple[int, ...]], at_once: bool
    ) -> Any:
        self.agree("memory for partial sums", {"shapes": list(shapes), "largest": list(largest), "at_once": at_once})
        return super().owner_partials(shapes, largest, at_once)

    def barrier(self) -> None:
        self.agree("barrier", {})
        super().barrier()

    def split(self, color: int, key: int = 0) -> Comm:
        self.agree("split", {})
        return super().split(color, key)

    def close(self) -> None:
        if not self._closed:
            self.agree("close", {})
        super().close()

    def _unmatched(self, sends: Slices, recvs: Slices) -> str:
        """Say why the slices that this rank expects are not those that others send; "": they are."""
        mine = [[(peer, getattr(array, "nbytes", 0)) for array, peer in slices] for slices in (sends, recvs)]
        everyone = self._gather_values(mine)
        for rank, theirs in enumerate(everyone):
            sent = [size for peer, size in theirs[0] if peer == self.rank and size]
            wanted = [size for peer, size in mine[1] if peer == rank and size]
            if sent != wanted:
                return (f"rank {rank} sends slices of {sent} bytes to it, but it receives {wanted}; make both from one "
                        f"plan")
        return ""


def wants_check(check: bool) -> bool:
    """Return whether collectives agree first: asked for here, or by THDATTN_CHECK=1."""
    return as_bool("check", check) or os.environ.get("THDATTN_CHECK", "0") not in ("", "0")


def kind_of(kind: type[AnyComm], check: bool) -> type[AnyComm]:
    """Return the class of a backend's comms; with check, one whose collectives agree first."""
    checked: type[AnyComm] = _checked(kind) if check else kind
    return checked


@functools.cache
def _checked(kind: type[Comm]) -> Any:
    return type(kind.__name__, (CheckedCollectives, kind), {})


def _kind(array: Array) -> str:
    return f"{array.dtype} {tuple(array.shape)}" if is_array(array) else shown(array)
