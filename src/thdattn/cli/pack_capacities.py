"""Capacities of balanced rows in CUDA graphs, from the layouts of packs: a table of python -m thdattn pack-stats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thdattn.capacity import BalancedCapacity, Mask
from thdattn.packing import PackedBatch
from thdattn.plan.layout_tables import needed_capacity
from thdattn.sharding import Sharding

PERCENTILES = {"P50": 50, "P90": 90, "P95": 95, "P99": 99, "max": 100}
MOST_PACKS = 300  # whose layouts are found
TILES = 128, 128  # rows, of the kernels for most head dims
ROW_BYTES = 2 * 8 * 128 * 2  # of a key row: keys and values of 8 heads of 128, in 16 bits
EXPLANATION = """
The sizes are the fields of thdattn.capacity.BalancedCapacity, for a causal mask without a window.
message_rows   key rows that every rank sends to every other rank, whether or not a pack needs as many
key_rows       rows of a rank's key buffer
early_queries  query rows that the forward computes while keys arrive; more hide more, and fewer packs have as many
early_keys     key rows that the backward computes before it sends gradients back; fewer hide more
received       bytes from other ranks in a layer's forward, with 8 kv heads of 128 in 16 bits
key buffer     bytes of it, as many
eager packs    packs that exceed one of the sizes"""


class Candidate(NamedTuple):
    """Capacity that covers a share of the packs by each size, and the number of packs that exceed one of its sizes."""

    name: str
    capacity: BalancedCapacity
    num_eager: int


def needed_capacities(packs: Iterable[Sequence[int]], total_rows: int, cp_size: int) -> NDArray[np.int64]:
    """Return the least BalancedCapacity of every pack, (num_packs, 4) int64.

    Args:
        packs: rows of every document of each pack.
        cp_size: ranks that share a pack.
    """
    mask = Mask((-1, 0), TILES)
    batches = (PackedBatch.from_lengths(pack).padded_to(total_rows) for pack in packs)
    found = [needed_capacity(Sharding(batch, cp_size, "balanced"), [mask]) for batch in batches]
    return np.array(found, np.int64)


def candidates(needed: NDArray[np.int64]) -> list[Candidate]:
    """Return capacities to choose from: percentiles of each size.

    Args:
        needed: of needed_capacities, at least one.
    """
    signs, made = np.array([1, 1, -1, 1]), []  # early_queries is what a pack has at least
    for name, share in PERCENTILES.items():
        most = np.percentile(needed * signs, share, axis=0, method="inverted_cdf").astype(np.int64)
        eager = int((needed * signs > most).any(axis=1).sum())
        made.append(Candidate(name, BalancedCapacity(*(most * signs).tolist()), eager))
    return made


def show(found: Sequence[Candidate], num_packs: int, cp_size: int) -> None:
    """Print the candidates, and what each costs."""
    print(f"\nbalanced rows over {cp_size} ranks in CUDA graphs, from {num_packs:,} packs:\n")
    print(f"{'':<5}" + "".join(f"{name:>14}" for name in (*BalancedCapacity._fields, "received", "key buffer",
                                                          "eager packs")))
    for name, capacity, num_eager in found:
        sizes = (cp_size - 1) * capacity.message_rows, capacity.key_rows
        print(f"{name:<5}" + "".join(f"{number:>14,}" for number in capacity)
              + "".join(f"{rows * ROW_BYTES / 2**20:>10,.1f} MiB" for rows in sizes) + f"{num_eager:>14,}")
    print(EXPLANATION)
