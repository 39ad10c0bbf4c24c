"""Queries with keys: the pairs that a mask leaves of their lengths, and which batches of keys queries can have."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thdattn.packing import PackedBatch


def check_key_batch(key_batch: PackedBatch, batch: PackedBatch, cp_size: int) -> None:
    """Raises for keys of their own that these queries cannot have; see CPAttention.plan."""
    if not isinstance(key_batch, PackedBatch):
        raise TypeError(
            f"key_batch is a {type(key_batch).__name__}, wanted a PackedBatch of the keys' lengths; make it with "
            f"PackedBatch(cu_seqlens), or leave it out for self-attention"
        )
    if cp_size > 1:
        raise ValueError(
            f"key_batch was passed for {cp_size} ranks, wanted one: keys of other lengths are not spread over ranks; "
            f"use thdattn.comm.init('single') on every rank, for sequences of its own"
        )
    if key_batch.num_seqs != batch.num_seqs:
        raise ValueError(
            f"key_batch has {key_batch.num_seqs} sequences, wanted {batch.num_seqs} as batch; pass one length of keys "
            f"per sequence of queries, 0 for none"
        )
    if key_batch.on_device != batch.on_device:
        here, there = ("a GPU", "the host") if batch.on_device else ("the host", "a GPU")
        raise ValueError(
            f"batch has its lengths on {here} but key_batch on {there}; wanted both on one side; "
            f"copy those of key_batch to {here}"
        )


def visible_pairs(batch: PackedBatch, key_batch: PackedBatch, window: tuple[int, int]) -> int:
    """Pairs (query, key) that a mask leaves of these lengths, which must lie on the host.

    Each side of the window hides a triangle of the rectangle of queries and keys, cut off at its far side.
    """
    for lengths in (batch, key_batch):
        lengths.require_host("counting visible pairs")
    queries, keys = (x.lengths.astype(np.int64) for x in (batch, key_batch))
    pairs = queries * keys
    for side, base, height in zip(window, (keys, queries), (queries, keys), strict=True):
        if side >= 0:
            whole = np.maximum(base - 1 - side, 0)
            pairs -= _triangle(whole) - _triangle(np.maximum(whole - height, 0))
    return int(pairs.sum())


def _triangle(n: NDArray[np.int64]) -> NDArray[np.int64]:
    return n * (n + 1) // 2
