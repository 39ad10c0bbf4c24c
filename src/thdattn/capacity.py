"""Fixed sizes of balanced layouts, so that one captured CUDA graph serves every layout within them.

A layout changes with the lengths: owner ranks of rows, and rows that ranks exchange. The host finds it, as a few arrays
in pieces. Tables in GPU memory hold these pieces at fixed addresses, and each replay expands them again.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Window = tuple[int, int]
Flags = tuple[NDArray[np.bool_], NDArray[np.bool_]]  # of tiles of queries, and of tiles of keys

_PIECES_OF_A_RUN = 14  # in the arrays of a KeySide together
_ARRAYS = 6  # of a KeySide
# For each rank, of a layout with as much to exchange as random packs have at most, and half as much again.
_REACHES = 4  # of a window, in a message
_SHARED_ROWS = 768  # of keys, beside rows of other ranks in tiles of up to 128 rows


class BalancedCapacity(NamedTuple):
    """Fixed sizes of what ranks exchange under the sharding "balanced", and of what they compute meanwhile.

    Tiles of rows are those of the kernels, so the last two count rows in whole tiles. With two levels, a rank here is a
    group of neighbours. A ring sends all rows anyway; the sizes then only say which packs a captured graph serves.

    Attributes:
        message_rows: most key rows that one rank sends to another.
        key_rows: most rows of a rank's key buffer, which has the rows that its queries see.
        early_queries: fewest rows of a rank's queries that see no row of another rank. The forward computes so many
            while keys arrive.
        early_keys: most rows of a rank's keys in tiles with a row of another rank; None: all. The backward computes so
            many before it sends gradients back, and the others meanwhile.
    """

    message_rows: int
    key_rows: int
    early_queries: int = 0
    early_keys: int | None = None

    def first_tiles(self, tiles: tuple[int, int]) -> tuple[int, int]:
        """Return how many tiles of queries come before rows arrive, and of keys before gradients are sent back.

        Args:
            tiles: rows per tile of queries and of keys.
        """
        early_keys = self.key_rows if self.early_keys is None else min(self.early_keys, self.key_rows)
        return self.early_queries // tiles[0], -(-early_keys // tiles[1])

    def excess_tiles(self, foreign: Flags, tiles: tuple[int, int]) -> str:
        """Describe by how much tiles, of one rank or of all, exceed the capacity; return "" if they fit.

        Args:
            foreign: of foreign_tiles.
            tiles: as for first_tiles.
        """
        queries, keys = self.first_tiles(tiles)
        if (found := int((~foreign[0]).sum(-1).min())) < queries:
            return (f"{found * tiles[0]} rows of queries that need no other rank, wanted at least early_queries = "
                    f"{self.early_queries}")
        if (found := int(foreign[1].sum(-1).max())) > keys:
            return (f"{found * tiles[1]} rows of keys in tiles of other ranks, wanted at most early_keys = "
                    f"{self.early_keys}")
        return ""

    def first_of(self, foreign: Flags, tiles: tuple[int, int]) -> Flags:
        """Return which tiles come first, of a layout that fits: always as many."""
        near, (queries, keys) = ~foreign[0], self.first_tiles(tiles)
        others = np.cumsum(~foreign[1]) <= keys - foreign[1].sum()
        return near & (np.cumsum(near) <= queries), foreign[1] | others

    @classmethod
    def of_any_layout(cls, total_rows: int, cp_size: int, window: Window) -> BalancedCapacity:
        """Return the capacity of all layouts but rare ones, in which ranks share many documents."""
        local_rows = -(-total_rows // cp_size)
        reach = sum(window) if min(window) >= 0 else local_rows
        message_rows = min(local_rows, _REACHES * cp_size * reach)
        received = (cp_size - 1) * message_rows
        key_rows = min(total_rows, local_rows + received)
        return cls(message_rows, key_rows, early_keys=min(key_rows, received + _SHARED_ROWS * cp_size))


class Mask(NamedTuple):
    """Mask of attentions that can share a plan: a window, and rows per tile of queries and of keys."""

    window: Window
    tiles: tuple[int, int]


class LayoutSizes(NamedTuple):
    """Sizes of the tables of a rank.

    Attributes:
        local_rows: rows that every rank stores.
        max_runs: most runs of rows of a layout, of owners and of key buffers of all ranks together.
        capacities: masks, each with the sizes that a layout must fit.
    """

    local_rows: int
    max_runs: int
    capacities: dict[Mask, BalancedCapacity]

    @property
    def lengths(self) -> list[int]:
        """Words of each table: pieces of rows, and for each mask pieces of a KeySide, tiles of queries and of keys."""
        pieces = _PIECES_OF_A_RUN * self.max_runs  # at most, and one of -1 before each array
        of_masks = ((2 * (_ARRAYS + pieces), *self.num_tiles(mask)) for mask in self.capacities)
        return [2 * (1 + pieces), *chain(*of_masks)]

    @property
    def num_words(self) -> int:
        """Size of all tables, int32 words."""
        return sum(self.lengths)

    def num_tiles(self, mask: Mask) -> tuple[int, int]:
        """Return the number of tiles of queries and of keys."""
        rows = self.local_rows, self.capacities[mask].key_rows
        return -(-rows[0] // mask.tiles[0]), -(-rows[1] // mask.tiles[1])


class LayoutTables(NamedTuple):
    """Tables of one rank.

    Attributes:
        words: (num_words,) int32 in GPU memory, a copy of those on the host that layout_tables.write writes.
        sizes: where each table is.
    """

    words: Any
    sizes: LayoutSizes

    @property
    def rows(self) -> tuple[Any, np.int32]:
        """Pieces of all ranks' rows, as kernels read them: an array, and the number of its pieces."""
        return self._pieces(0)

    def key_side(self, mask: Mask) -> tuple[Any, np.int32]:
        """Return the pieces of this rank's KeySide for a mask, one array after another, as `rows`."""
        return self._pieces(self._first(mask))

    def second_tiles(self, mask: Mask) -> tuple[Any, Any]:
        """Return 1 for tiles of queries, and for tiles of keys, that do not come first; see Plan.first_tiles."""
        return self._table(self._first(mask) + 1), self._table(self._first(mask) + 2)

    def _first(self, mask: Mask) -> int:
        """Return the number of a mask's first table."""
        return 1 + 3 * [*self.sizes.capacities].index(mask)

    def _table(self, number: int) -> Any:
        begin = sum(self.sizes.lengths[:number])
        return self.words[begin : begin + self.sizes.lengths[number]]

    def _pieces(self, number: int) -> tuple[Any, np.int32]:
        table = self._table(number)
        return table, np.int32(len(table) // 2)
