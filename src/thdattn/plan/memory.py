"""Bytes of every buffer of a batch on one rank, known before anything is allocated."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from thdattn.plan.workspace import Buffer, Bytes, pair_of

if TYPE_CHECKING:
    from thdattn.plan.plan import Plan


def group_heads(groups: Iterable[int], each: int) -> list[tuple[int, int]]:
    """Return (query heads, kv heads) of each size of group, ascending.

    Args:
        groups: kv heads of every group.
        each: query heads of a kv head.
    """
    return [(size * each, size) for size in sorted(set(groups))]


class Layer(NamedTuple):
    """Properties of a layer that its buffers depend on, besides the plan; heads are those of all groups.

    groups: kv heads of each group.
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

    @property
    def most_heads(self) -> tuple[int, int]:
        """(query heads, kv heads) of the largest group."""
        return self.group_heads[-1]

    def memory(self, plan: Plan, forward: Bytes, backward: Bytes, kept: Bytes | None = None) -> Memory:
        """Return the memory of a layer with this plan.

        Args:
            forward, backward: as Memory has them.
            kept: bytes of what the method keeps for the backward, by name.
        """
        lse = Buffer("lse", (self.num_heads, plan.local_rows), np.promote_types(self.dtype, np.float32))
        q, out = pair_of("q", (plan.local_rows, self.num_heads), plan.head_dims, self.dtype)
        k, v = pair_of("k", (plan.local_key_rows, self.num_kv_heads), plan.head_dims, self.dtype)
        saved = {"q": q.nbytes, "k": k.nbytes, "v": v.nbytes, "out": out.nbytes, "lse": lse.nbytes}
        grads = {"dq": q.nbytes, "dk": k.nbytes, "dv": v.nbytes}
        return Memory(forward, backward, saved | (kept or {}), grads)


@dataclass(frozen=True, repr=False)
class Memory(Mapping[str, int]):
    """Bytes of every buffer that a batch takes on this rank, by name, without the rounding of allocators.

    The numbers hold for forward and backward. start_backward also needs memory for the partial sums of the last group
    of heads. A gather, while another gather waits for its call, also needs the keys of all groups in rank order. A
    buffer that calls reuse counts as often as it exists at one time. Counters of 4 bytes, max_logit and temporaries of
    the reference engine are left out.

    Attributes:
        forward: work buffers of forward. All layers of a plan share them; all plans share windows of peer memory.
        backward: further work buffers of backward.
        saved: arrays that every layer keeps from forward to backward, and out. The caller owns q, k, v and zxbcdt.
        grads: gradients that a backward returns.
    """

    forward: Bytes
    backward: Bytes
    saved: Bytes
    grads: Bytes

    @property
    def work(self) -> int:
        """Bytes of all buffers that the layers of a plan share."""
        return sum(self.forward.values()) + sum(self.backward.values())

    @property
    def per_layer(self) -> int:
        """Bytes of the arrays that every layer keeps from forward to backward."""
        return sum(self.saved.values())

    def wanted(self, forward_only: bool = False) -> int:
        """Return the bytes that must be free for one layer, besides its q, k and v, or its zxbcdt.

        Args:
            forward_only: leave out the buffers of backward.
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


def in_units(size: int) -> str:
    """Return a number of bytes as text, in GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"
