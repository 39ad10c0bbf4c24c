"""Bytes of every buffer of a batch on one rank, known before anything is allocated."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

Bytes = dict[str, int]  # by name of the buffer


def group_heads(groups: Iterable[int], each: int) -> list[tuple[int, int]]:
    """Return (query heads, kv heads) of each size of group, ascending.

    Args:
        groups: kv heads of every group.
        each: query heads of a kv head.
    """
    return [(size * each, size) for size in sorted(set(groups))]


class Layer(NamedTuple):
    """What the buffers of a layer depend on beside the plan; heads are those of all groups.

    groups: kv heads of each of them.
    """

    num_heads: int
    num_kv_heads: int
    dtype: np.dtype[Any]
    deterministic: bool
    groups: tuple[int, ...]
    keeps_keys: bool

    @property
    def group_heads(self) -> list[tuple[int, int]]:
        """(query heads, kv heads) of each size of group, ascending: one for each kind of launch."""
        return group_heads(self.groups, self.num_heads // self.num_kv_heads)


@dataclass(frozen=True, repr=False)
class Memory(Mapping[str, int]):
    """Bytes of every buffer that a batch takes on this rank, by name, without what allocators round up.

    Of calls of forward and backward; for start_backward, the sums of the last group of heads take room as the others
    do, and so do the keys of all groups in rank order for a gather while those of another one wait for their call.
    Buffers that some of the calls copy into, one after another, count as often as they are there at a time. Counters of
    4 bytes, max_logit and temporaries of the reference engine are left out.

    Attributes:
        forward: work buffers that forward needs; all layers of a plan share them, and windows of peer memory all plans.
        backward: those that backward needs besides.
        saved: what every layer keeps from forward to backward, and out. q, k, v and zxbcdt are the caller's.
        grads: what a backward returns.
    """

    forward: Bytes
    backward: Bytes
    saved: Bytes
    grads: Bytes

    @property
    def work(self) -> int:
        """Bytes of all that the layers of a plan share."""
        return sum(self.forward.values()) + sum(self.backward.values())

    @property
    def per_layer(self) -> int:
        """Bytes of what every layer keeps from forward to backward."""
        return sum(self.saved.values())

    def wanted(self, forward_only: bool = False) -> int:
        """Return the bytes that must be free for one layer, beside its q, k and v, or its zxbcdt.

        Args:
            forward_only: leave out what backward needs.
        """
        callers = "q", "k", "v", "zxbcdt"
        parts = [self.forward, {name: size for name, size in self.saved.items() if name not in callers}]
        if not forward_only:
            parts += [self.backward, self.grads]
        return sum(sum(part.values()) for part in parts)

    def __getitem__(self, name: str) -> int:
        return ChainMap(*self._parts())[name]

    def __iter__(self) -> Iterator[str]:
        return (name for part in self._parts() for name in part)

    def __len__(self) -> int:
        return sum(map(len, self._parts()))

    def __repr__(self) -> str:
        lines = [f"<Memory work={in_units(self.work)}, per_layer={in_units(self.per_layer)}"]
        for kind in ("forward", "backward", "saved", "grads"):
            part = getattr(self, kind)
            lines.append(f"  {kind}: " + ", ".join(f"{name} {in_units(size)}" for name, size in part.items()))
        return "\n".join(lines) + ">"

    def _parts(self) -> tuple[Bytes, ...]:
        return self.forward, self.backward, self.saved, self.grads


def num_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Of an array."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def in_units(size: int) -> str:
    """Bytes as people read them."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
