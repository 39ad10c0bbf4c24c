"""What a mask leaves of a pack, row by row and pair by pair, written from the rules; and plans compared with it."""

from __future__ import annotations

import numpy as np
from cases import plan_with

from thdattn.engines import reference

WINDOWS = [(-1, 0), (-1, -1), (0, 0), (5, 0), (3, 40), (40, 3), (-1, 7), (7, -1), (100_000, 100_000)]


def places(batch):
    """(sequence, position) of every row of the pack; -1, -1 for padding."""
    sequence, position = np.full((2, batch.total_rows), -1)
    for number, (begin, length) in enumerate(zip(batch.cu_seqlens_padded, batch.lengths, strict=False)):
        sequence[begin : begin + length], position[begin : begin + length] = number, np.arange(length)
    return sequence, position


def visible(batch, rows, keys, window, key_batch=None):
    """Whether each of some rows, as a query, sees each of others, as a key; -1 sees nothing.

    key_batch: of keys with lengths of their own; the last query and the last key of a sequence are at one position.
    """
    sequence, position = (np.append(x, -1) for x in places(batch))
    key_sequence, key_position = (np.append(x, -1) for x in places(key_batch or batch))
    if key_batch is not None:
        position = position + np.append(key_batch.lengths - batch.lengths, 0)[sequence]
    i, j = np.asarray(rows, int)[:, None], np.asarray(keys, int)[None, :]
    seen = (sequence[i] >= 0) & (sequence[i] == key_sequence[j])
    left, right = window
    if left >= 0:
        seen &= key_position[j] >= position[i] - left
    if right >= 0:
        seen &= key_position[j] <= position[i] + right
    return seen


def ranges(seen):
    """[first, last + 1) of the True entries of every row, which have no gap; [0, 0] for none."""
    found = []
    for row in seen:
        columns = np.flatnonzero(row)
        found.append([int(columns[0]), int(columns[-1]) + 1] if len(columns) else [0, 0])
        assert found[-1][1] - found[-1][0] == len(columns), "what a row sees is one range"
    return found


def assert_tiles(orders, batch, rows, ranges_of_rows, tile, num_others):
    """Every tile once, in either order: tiles of the longest sequence first, sequence by sequence, and there by falling
    span; by falling span. In their own order where these are equal. Both by span alone, where that is on average an
    eighth of the other side."""
    starts, lengths = batch.cu_seqlens_padded.tolist(), batch.lengths.tolist()
    sequences, spans = [], []
    for first in range(0, len(ranges_of_rows), tile):
        seen = [r for r in ranges_of_rows[first : first + tile] if r[1] > r[0]]
        spans.append(max(end for _, end in seen) - min(begin for begin, _ in seen) if seen else 0)
        found = [(0, 0)]  # rows outside all sequences
        for row in rows[first : first + tile]:
            found += [(-lengths[b], starts[b]) for b in range(len(lengths)) if starts[b] <= row < starts[b + 1]]
        sequences.append(min(found))
    tiles = range(len(spans))
    few = 8 * sum(spans) >= len(spans) * num_others
    assert orders[0].tolist() == sorted(tiles, key=lambda t: (not few and sequences[t], -spans[t], t))
    assert orders[1].tolist() == sorted(tiles, key=lambda t: (-spans[t], t))


def assert_masked(arrays, batch, rows, keys, window, tiles):
    """The ranges and tiles of a plan whose queries are `rows` and whose key buffer has `keys`; return who sees whom."""
    seen = visible(batch, rows, keys, window)
    key_ranges, query_ranges = ranges(seen), ranges(seen.T)
    assert arrays.key_ranges.tolist() == key_ranges and arrays.key_ranges.shape == (len(rows), 2)
    assert arrays.query_ranges.tolist() == query_ranges and arrays.query_ranges.shape == (len(keys), 2)
    assert_tiles(arrays.query_tiles, batch, rows, key_ranges, tiles[0], len(keys))
    assert_tiles(arrays.key_tiles, batch, keys, query_ranges, tiles[1], len(rows))
    assert all(x.dtype == (bool if name == "valid" else np.int32) for name, x in vars(arrays).items() if x is not None)
    return seen


def plan_of(sharding, cp_rank, window, tiles=(16, 8), keys_of=None):
    """The plan of a rank, with arrays in NumPy."""
    return plan_with(reference, sharding, cp_rank, window, tiles, keys_of=keys_of)
