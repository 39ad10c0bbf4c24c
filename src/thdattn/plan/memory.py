"""Bytes and operations of a layer, known before anything is allocated; and the check that its buffers fit."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from thdattn.arguments import in_units
from thdattn.plan.workspace import Buffer, Bytes, bytes_by_name, pair_of

if TYPE_CHECKING:
    from thdattn.comm import Comm
    from thdattn.engines import Engine
    from thdattn.plan.plan import Plan

# Plans that are still referenced.
_plans: WeakKeyDictionary[Comm, WeakSet[Plan]] = WeakKeyDictionary()


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
    def group_heads(self) -> list[int]:
        """Query heads of each size of group, ascending: one for each kind of launch."""
        return [size * (self.num_heads // self.num_kv_heads) for size in sorted(set(self.groups))]

    def memory(
        self, plan: Plan, forward: Iterable[Buffer], backward: Iterable[Buffer], kept: Iterable[Buffer] = (),
        comm: tuple[Bytes, Bytes] = ({}, {}),
    ) -> Memory:
        """Return the memory of a layer with this plan.

        Args:
            comm: bytes that the comm allocates in forward and in backward, by name.
        """
        lse = Buffer("lse", (self.num_heads, plan.local_rows), np.promote_types(self.dtype, np.float32))
        q, out = pair_of("q", (plan.local_rows, self.num_heads), plan.head_dims, self.dtype)
        k, v = pair_of("k", (plan.local_key_rows, self.num_kv_heads), plan.head_dims, self.dtype)
        saved = {"q": q.nbytes, "k": k.nbytes, "v": v.nbytes, "out": out.nbytes, "lse": lse.nbytes}
        return Memory(bytes_by_name(forward) | comm[0], bytes_by_name(backward) | comm[1],
                      saved | bytes_by_name(kept), {"dq": q.nbytes, "dk": k.nbytes, "dv": v.nbytes})


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


def largest_windows(exchanges: Sequence[Bytes]) -> Bytes:
    """Return the bytes of windows that several exchanges share, each as large as the largest of them needs."""
    return {name: max(sizes.get(name, 0) for sizes in exchanges) for sizes in exchanges for name in sizes}


def count_as_free(comm: Comm, plan: Plan) -> None:
    """Count the buffers of a plan as free when the next plans of this comm are checked."""
    _plans.setdefault(comm, WeakSet()).add(plan)


def shortage(engine: Engine, comm: Comm, memory: Memory, forward_only: bool) -> str:
    """Return why a plan's work buffers and one layer do not fit in free memory; "" if they do, or if it is unknown.

    Memory that this plan takes over counts as free: existing peer windows, and buffers of earlier plans. A training
    loop still holds its last plan while it makes the next. Other arrays of the caller count as in use.

    Args:
        memory: bytes of the buffers of the plan and the layer.
    """
    held = comm.held_bytes()
    there = sum(memory[name] for name, size in held.items() if name in memory and memory[name] <= size)
    there += sum(before.held_bytes() for before in _plans.get(comm, ()))
    wanted = memory.wanted(forward_only)
    free = engine.free_bytes(wanted - there)
    if free is None:
        return ""
    return (f"the batch needs {in_units(wanted)} of GPU memory for its work buffers and one layer, wanted at most "
            f"the {in_units(free + there)} that are free; pass fewer tokens, spread them over more ranks, or make "
            f"CPAttention with keep_keys=False or more head_groups (CPAttention.memory says what takes how much)")


class Flops(NamedTuple):
    """Floating-point operations of one attention layer, summed over all ranks; exact ints.

    Attributes:
        forward: operations of one forward.
        backward: operations of one backward.
    """

    forward: int
    backward: int


def attention_flops(pairs: int, num_heads: int, head_dims: tuple[int, int]) -> Flops:
    """Return the operations of attention over `pairs` visible pairs; see CPAttention.flops."""
    multiply_adds = pairs * num_heads * sum(head_dims)
    return Flops(forward=2 * multiply_adds, backward=5 * multiply_adds)
