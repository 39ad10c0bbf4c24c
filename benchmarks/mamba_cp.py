"""Mamba-2 mixers over several GPUs: ours, which passes on states, beside one GPU and an all-to-all of heads.

All-to-all of heads, as Megatron does it: every rank sends the columns of the others' heads, and computes its own heads
over all rows. out comes back in the same way, and so do gradients. Ranks that share a group get its B and C each, and
the gradients are added up. The exchange is torch.distributed's, the kernels are mamba_ssm's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import cupy
import peers
import record
import timing
from bench_attention import forward_and_backward
from cp_methods import ONE, OURS
from cp_peer import process_group
from cp_ways import steps
from mamba_cases import MixerCase, MixerInputs, draw
from mamba_exact import OF_ROWS
from mamba_peers import MambaSsmMixer, OurMixer, columns
from record import Measured

from thdattn.comm import Comm, SingleComm
from thdattn.mamba.shape import Mamba2Weights

A2A = "all-to-all of heads"
Range = tuple[int, int]


def measure(
    comm: Comm, cases: Sequence[MixerCase], with_peer: bool, rounds: int
) -> Iterator[tuple[MixerCase, str, Mapping[str, str], Measured]]:
    """Yield case, part, versions and measurements; collective."""
    versions = {A2A: MambaSsmMixer.version()} if with_peer else {}
    if with_peer:
        group = process_group()
        group.__enter__()  # never left: leaving waits for ranks that may have failed
    for case in cases:
        inputs = draw(case, cupy)
        own = slice(comm.rank * case.total_tokens // comm.size, (comm.rank + 1) * case.total_tokens // comm.size)
        local = inputs._replace(zxbcdt=inputs.zxbcdt[own], dout=inputs.dout[own])
        ways: dict[str, Any] = {OURS: OurMixer(case, local, comm), ONE: OurMixer(case, inputs, SingleComm())}
        forward_and_backward(ways[OURS])
        if with_peer:
            ways[A2A] = AllToAll(case, local, comm.size, comm.rank)
            forward_and_backward(ways[A2A])
            peers.check(ways[A2A].results(), ways[OURS].results()[: len(OF_ROWS)], OF_ROWS)
        peers.release_memory()
        times = timing.race(comm, {name: steps(way) for name, way in ways.items()}, rounds)
        measured = {(*key, "called"): record.timed(samples) for key, samples in times.items()}
        yield case, "mixer", versions, measured


def share(case: MixerCase, size: int) -> MixerCase:
    """Return the case that one of `size` ranks computes: its heads over all rows."""
    if case.heads % size or (case.groups % size and size % case.groups):
        raise ValueError(f"{case.heads} heads in {case.groups} groups cannot be dealt to {size} ranks")
    return replace(case, heads=case.heads // size, groups=max(1, case.groups // size))


def columns_of(case: MixerCase, size: int, rank: int) -> list[Range]:
    """Return the columns of zxbcdt that the rank needs: z, x, B, C, dt."""
    shape, part = case.shape, share(case, size)
    width, heads = part.groups * case.state_dim, part.heads
    first_group = rank * case.groups // size
    begins = [0, shape.d_inner, 2 * shape.d_inner, 2 * shape.d_inner + case.groups * case.state_dim,
              shape.d_inner + shape.channels]
    own = [(rank * heads * case.head_dim, heads * case.head_dim)] * 2
    own += [(first_group * case.state_dim, width)] * 2 + [(rank * heads, heads)]
    return [(begin + at, begin + at + count) for begin, (at, count) in zip(begins, own, strict=True)]


def weights_of(case: MixerCase, weights: Mamba2Weights, size: int, rank: int, concatenate: Any) -> Mamba2Weights:
    """Return the rank's share of the weights."""
    inner = case.shape.d_inner
    _, *channels, (begin, end) = columns_of(case, size, rank)
    heads = slice(begin - inner - case.shape.channels, end - inner - case.shape.channels)
    of_conv = (concatenate([x[first - inner : last - inner] for first, last in channels]) for x in weights[:2])
    return Mamba2Weights(*of_conv, *(x[heads] for x in weights[2:]))


def put_together(case: MixerCase, parts: Sequence[Any], into: Any) -> None:
    """Assemble the gradients of all columns from those of every rank; add up columns that several ranks had."""
    filled: set[Range] = set()
    for rank, part in enumerate(parts):
        at = 0
        for begin, end in columns_of(case, len(parts), rank):
            found = part[:, at : at + end - begin]
            into[:, begin:end] = into[:, begin:end] + found if (begin, end) in filled else found
            filled.add((begin, end))
            at += end - begin


class AllToAll:
    """Layer on this rank's rows; backward follows the last forward.

    Args:
        inputs: this rank's rows, and all weights.
    """

    def __init__(self, case: MixerCase, inputs: MixerInputs, size: int, rank: int) -> None:
        import torch
        from torch import distributed

        self.case, self._size, self._torch, self._distributed = case, size, torch, distributed
        part = share(case, size)
        rows, dtype = case.total_tokens, part.shape.dtype
        weights = weights_of(case, inputs.weights, size, rank, cupy.concatenate)
        empty = (cupy.empty((rows, width), dtype) for width in (part.shape.columns, part.shape.d_inner))
        self._heads = MambaSsmMixer(part, MixerInputs(next(empty), weights, next(empty), None))
        self._zxbcdt, self._dout = map(peers.tensor, (inputs.zxbcdt, inputs.dout))

    def forward(self) -> None:
        cat = self._torch.cat
        send = cat([cat([self._zxbcdt[:, begin:end] for begin, end in columns_of(self.case, self._size, rank)], dim=1)
                    for rank in range(self._size)])
        self._exchange(self._heads.leaves[0].data[0], send)
        self._heads.forward()
        self.out = self._by_row(self._heads.out.detach()[0])

    def backward(self) -> None:
        by_head = self._dout.unflatten(1, (self._size, -1)).transpose(0, 1).contiguous()
        self._exchange(self._heads.dout[0], by_head.flatten(0, 1))
        self._heads.backward()
        parts = self._torch.empty_like(self._heads.grads[0][0])
        self._exchange(parts, self._heads.grads[0][0])
        self.dzxbcdt = self._torch.empty_like(self._zxbcdt)
        put_together(self.case, parts.chunk(self._size), self.dzxbcdt)

    def results(self) -> list[Any]:
        """Return tensors of this rank's rows, as named by OF_ROWS."""
        return [self.out, *columns(self.case, self.dzxbcdt)]

    def _exchange(self, into: Any, send: Any) -> None:
        self._distributed.all_to_all_single(into, send)

    def _by_row(self, of_heads: Any) -> Any:
        """Exchange (all rows, this rank's heads) for (this rank's rows, all heads)."""
        found = self._torch.empty_like(of_heads)
        self._exchange(found, of_heads)
        return found.unflatten(0, (self._size, -1)).transpose(0, 1).flatten(1)
