"""Lengths on the GPU: their check there, and the launches that plan anew whenever they change."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import cupy
import cupyx
import numpy as np

from thdattn.engines.cuda import launch
from thdattn.engines.cuda.launch import Array
from thdattn.jit import compiler
from thdattn.packing import PackedBatch
from thdattn.plan.generations import renew
from thdattn.sharding import Sharding


class DeviceLengths:
    """Lengths on the GPU, checked there by thd_plan_check.

    Wrong lengths are planned as sequences without rows, and nan_if_invalid makes all results NaN. The host learns of
    them at once if it waits. Otherwise it reads memory that the kernel writes, whenever it checks next.

    Attributes:
        sharding, key_batch: those of the plan.
        checked: (2, 2, num_seqs + 1) int32, cu_seqlens and cu_seqlens_padded of queries and keys, all 0 if wrong.
        wrong: (1,) int32, 1 if wrong.
        generation: changes with every refresh of the lengths; see thdattn.plan.generations.
        made_in: number of the capture of the CUDA graph that makes the plan; None: made outside of captures.
    """

    def __init__(self, sharding: Sharding, key_batch: PackedBatch) -> None:
        self.sharding, self.key_batch = sharding, key_batch
        batch, keys = sharding.batch, key_batch
        self._made: list[Callable[[], None]] = []  # launches of every graph that makes the plan
        self._late: dict[Callable[[], None], int | None] = {}  # other launches, with the capture that ran them last
        self._of_graphs: dict[int | None, list[Callable[[], None]]] = {}  # by capture, launches of that graph alone
        self.made_in, self._was_captured = launch.capture(), False
        # A replayed graph reads the offsets and writes the arrays below, so this object keeps them all.
        self._offsets = [self._followed(name, x) for lengths in (batch, keys) for name, x in (
            ("cu_seqlens", lengths.cu_seqlens), ("cu_seqlens_padded", lengths.cu_seqlens_padded))]
        made = launch.empty((4 * (batch.num_seqs + 1) + 1,), np.int32)
        self.wrong = made[-1:]
        self.generation: Any = None
        renew(self)
        self.checked = made[:-1].reshape(2, 2, -1)
        self._notice = notice = _Notice()
        sizes = map(np.int32, (batch.num_seqs, batch.total_rows, keys.total_rows, sharding.multiple))
        args = made, self.wrong, np.uint64(notice.place.ctypes.data), *self._offsets, *sizes
        self.make(lambda: compiler.kernel("thd_plan_check")((1,), 1024, (*args, notice.of_next_check())))

    def _followed(self, name: str, x: Any) -> Array:
        """Return offsets that the kernel can read: of strided ones a copy, which every refresh repeats."""
        x = launch.in_place(name, x)
        if x.flags.c_contiguous:
            return x
        copied = launch.empty(x.shape, x.dtype)
        self.make(lambda: cupy.copyto(copied, x))
        return copied

    def make(self, launches: Callable[[], None]) -> None:
        """Run `launches`, which derive a part of the plan from the lengths, now and at every make_again or replay.

        In the capture of another graph than the one that makes the plan, they serve that graph alone; see Plan.memoize.
        """
        launches()
        now = launch.capture()
        if now not in (None, self.made_in):
            self._of_graphs.setdefault(now, []).append(launches)
        elif not self._was_captured and now == self.made_in:
            self._made.append(launches)
        else:
            self._late[launches] = now

    def make_again(self) -> None:
        """Make the whole plan again, in the same arrays, from the lengths that the GPU has now."""
        now = launch.capture()
        self._was_captured |= now is not None
        for launches in [*self._made, *self._of_graphs.get(now, ())]:
            launches()
        self._late = dict.fromkeys(self._late)
        self.follow()

    def follow(self) -> None:
        """Repeat the launches that a graph lacks although it makes the plan, for the lengths of its last replay.

        A capture runs them once, because only make_again changes the plan in between.
        """
        if not self._late:
            return
        now = launch.capture()
        for launches, made_in in self._late.items():
            if now is None or made_in != now:
                launches()
                self._late[launches] = now

    def are_right(self) -> bool:
        """Return whether the host knows that the next launch finds right lengths; False while a graph is captured."""
        return self._notice.says_right() and not cupy.cuda.get_current_stream().is_capturing()

    def check(self, wait: bool) -> None:
        """Raise a ValueError if the lengths are wrong. wait: wait for the GPU, else use the host's last notice."""
        if wait:
            wrong = bool(self.wrong.get()[0])
        else:
            wrong = self._notice.says_wrong() and not cupy.cuda.get_current_stream().is_capturing()
        if not wrong:
            return
        remedy = "results of the plan are NaN; make a plan from right lengths"
        try:  # host checks of copied offsets name the sequence, the requirement and the remedy
            offsets, sharding = [x.get() for x in self._offsets], self.sharding
            batch = PackedBatch(*offsets[:2], total_rows=sharding.batch.total_rows)
            Sharding(batch, sharding.cp_size, sharding.strategy)
            PackedBatch(*offsets[2:], total_rows=self.key_batch.total_rows)
        except ValueError as error:
            raise ValueError(f"lengths on the GPU were planned that are wrong: {error}; {remedy}") from None
        raise ValueError(f"lengths on the GPU were wrong when they were planned, and have changed since; {remedy}")


class _Notice:
    """Result of the last check of lengths, which the GPU writes to host memory.

    place: (1,) uint64 of _notices. It becomes the check's number for wrong lengths, its complement for right ones.
    in_graph: a CUDA graph checks the lengths, and the host does not know of its replays.
    """

    def __init__(self) -> None:
        notices, self.serial, self.in_graph = _notices(), next(_serials), False
        self.place = notices[self.serial % len(notices) :][:1]

    def of_next_check(self) -> np.uint64:
        """Return the number of the next check; after a captured check it stays the same, as replays repeat it."""
        if not self.in_graph:
            self.serial = next(_serials)
        self.in_graph |= cupy.cuda.get_current_stream().is_capturing()
        return np.uint64(self.serial)

    def says_wrong(self) -> bool:
        return int(self.place[0]) == self.serial

    def says_right(self) -> bool:
        return not self.in_graph and int(self.place[0]) == 2**64 - 1 - self.serial


_serials = itertools.count(1)
_allocating = threading.Lock()


def _notices() -> Any:
    """Return host memory that GPUs write to, 512 places that plans use in turn.

    The memory is never freed, because a kernel may write to it after its plan is freed.
    """
    with _allocating:  # simulated ranks are threads
        return _pinned()


@functools.cache
def _pinned() -> Any:
    return cupyx.zeros_pinned((512,), np.uint64)
