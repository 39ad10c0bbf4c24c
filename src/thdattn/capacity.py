"""Fixed sizes of balanced layouts, so that one captured CUDA graph serves every layout within them.

A layout changes with the lengths: owner ranks of rows, and rows that ranks exchange. The host finds it, as a few arrays
in pieces. Tables in GPU memory hold these pieces at fixed addresses, and each replay expands them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Window = tuple[int, int]

_PIECES_OF_A_RUN = 12  # at most, in the five arrays of a KeySide together, and one of -1 before each array


class BalancedCapacity(NamedTuple):
    """Fixed sizes of what ranks exchange under the sharding "balanced".

    Attributes:
        message_rows: most key rows that one rank sends to another.
        key_rows: most rows of a rank's key buffer, which has the rows that its queries see.
    """

    message_rows: int
    key_rows: int


class LayoutTables(NamedTuple):
    """Tables of one rank.

    Attributes:
        words: (num_words,) int32, in which `pack` of a layout writes; in GPU memory.
        capacity: sizes that a layout must fit.
        max_runs: most runs of rows of a layout, of owners and of key buffers of all ranks together.
        windows: windows of the masks, each once.
    """

    words: Any
    capacity: BalancedCapacity
    max_runs: int
    windows: tuple[Window, ...]

    @staticmethod
    def num_words(max_runs: int, windows: Sequence[Window]) -> int:
        """Return the size of `words`."""
        return 2 * (most_pieces(1, max_runs) + len(windows) * most_pieces(5, max_runs))

    @property
    def rows(self) -> tuple[Any, np.int32]:
        """Pieces of all ranks' rows, as kernels read them: an array, and the number of its pieces."""
        count = most_pieces(1, self.max_runs)
        return self.words[: 2 * count], np.int32(count)

    def key_side(self, window: Window) -> tuple[Any, np.int32]:
        """Return the pieces of this rank's KeySide for a mask, one array after another, as `rows`."""
        count = most_pieces(5, self.max_runs)
        first = 2 * (most_pieces(1, self.max_runs) + self.windows.index(window) * count)
        return self.words[first : first + 2 * count], np.int32(count)


def most_pieces(num_arrays: int, max_runs: int) -> int:
    """Return a bound for the pieces of so many arrays of a layout together."""
    return num_arrays + _PIECES_OF_A_RUN * max_runs
