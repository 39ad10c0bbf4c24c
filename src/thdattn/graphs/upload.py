"""Upload: an array at a fixed address on the GPU that the host writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Upload:
    """Array at a fixed address on the GPU, for data of the host that a graph reads.

    It copies from pinned memory, as from other memory the host may wait for earlier work. Two pinned arrays take turns,
    so the host waits only if it is two uploads ahead.

    Args:
        size: int32 words, 0 at first.
        on_gpu: False makes a NumPy array instead, for programs that run without a GPU as well.

    Attributes:
        words: (size,) int32, always the same array.
    """

    def __init__(self, size: int, on_gpu: bool) -> None:
        self._pinned: list[tuple[NDArray[np.int32], Any]] = []
        if not on_gpu:
            self.words: Any = np.zeros(size, np.int32)
            return
        import cupy
        import cupyx

        self.words = cupy.zeros(size, np.int32)
        self._pinned = [(cupyx.zeros_pinned(size, np.int32), cupy.cuda.Event(disable_timing=True)) for _ in range(2)]

    def send(self, parts: Sequence[NDArray[np.int32]]) -> None:
        """Write the parts, one after another, for work that is enqueued later on the current stream.

        Args:
            parts: 1-D int32 arrays on the host, `size` words together.
        """
        with self.writing() as words:
            np.concatenate(parts, out=words)

    @contextmanager
    def writing(self) -> Iterator[NDArray[np.int32]]:
        """Yield (size,) int32 on the host, to write the words to, for work that is enqueued behind the block.

        That work is on the current stream. Words that the block does not write are those of an earlier block, or 0.
        """
        if not self._pinned:
            yield self.words
            return
        import cupy

        host, copied = self._pinned[0]
        self._pinned.reverse()
        copied.synchronize()
        yield host
        stream = cupy.cuda.get_current_stream()
        self.words.set(host, stream)
        copied.record(stream)
