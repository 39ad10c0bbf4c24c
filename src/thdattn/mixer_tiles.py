"""Slabs of columns of the Mamba-2 mixer's kernels per state_dim, as tiles.py has the tiles of attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

from thdattn.tiles import ELEMENT_TYPES, PAD, Instance

CHUNK = 64  # rows, kChunk of kernels/mamba/common.cuh
SEGMENT_CHUNKS = 16  # of a segment; fewer give more thread blocks, and more states to write and read
CONV_COLUMNS, CONV_ROWS = 128, 256  # kConvColumns and kConvTile of kernels/mamba/conv.cu
RATES_HEADS = 16  # heads whose dt a thread block of it makes
FOLD_THREADS = 256  # kFoldThreads of kernels/mamba/scan.cu
MIXER_KERNELS = ("thd_ssd_fold", "thd_ssd_start", "thd_ssd_enter")

# What the kernels are there for. Rows of zxbcdt are read 16 bytes at a time, hence the multiple.
MIXER_SIZES = {"head_dim": (64, 128), "state_dim": (64, 128, 256), "conv_width": range(1, 9), "num_heads": range(8, 2**20, 8)}


@dataclass(frozen=True)
class Slab:
    """What a thread block has of x: `subs` times `width` columns, each of one head, with states of state_dim columns.

    scan_stages, states_stages: chunks in shared memory at a time, of thd_ssd_scan and thd_ssd_states.
    """

    width: int
    subs: int
    state_dim: int
    scan_stages: int
    states_stages: int

    @property
    def columns(self) -> int:
        """Of x."""
        return self.width * self.subs

    @property
    def threads(self) -> int:
        """Of thd_ssd_states; thd_ssd_scan has twice as many."""
        return 128 * self.subs

    def _tile(self, rows: int, columns: int) -> int:
        return 2 * rows * (columns + PAD)

    @property
    def of_states(self) -> Slab:
        """What a thread block of thd_ssd_states has: half as much where a state takes too many registers."""
        return replace(self, width=32) if self.state_dim == 256 else self

    def thd_ssd_states(self, dtype: str) -> Instance:
        """The kernel of of_states, for "float16" or "bfloat16"."""
        slab = self.of_states
        stage = slab._tile(CHUNK, slab.columns) + slab._tile(CHUNK, slab.state_dim) + 4 * CHUNK * slab.subs
        return slab._instance("thd_ssd_states", dtype, slab.states_stages, slab.states_stages * stage)

    def thd_ssd_scan(self, dtype: str) -> Instance:
        """The kernel, for "float16" or "bfloat16"."""
        tiles = 2 * (self._tile(CHUNK, self.columns) + self._tile(CHUNK, self.state_dim))
        stage = tiles + 3 * 4 * CHUNK * self.subs + 8 * CHUNK
        return self._instance("thd_ssd_scan", dtype, self.scan_stages,
                              self.scan_stages * stage + self._tile(self.columns, self.state_dim))

    def kernels(self, dtype: str) -> list[Instance]:
        """Both."""
        return [self.thd_ssd_states(dtype), self.thd_ssd_scan(dtype)]

    def _instance(self, kernel: str, dtype: str, stages: int, shared_bytes: int) -> Instance:
        constants = ELEMENT_TYPES[dtype], self.width, self.subs, self.state_dim, stages, shared_bytes
        return Instance(f"{kernel}<{', '.join(map(str, constants))}>", shared_bytes)


# From the first choice on: two heads share what they read of B and C; GPUs with less shared memory take later ones.
SLABS = (
    Slab(64, 2, 64, scan_stages=2, states_stages=3),
    Slab(64, 1, 64, scan_stages=2, states_stages=3),
    Slab(64, 2, 128, scan_stages=2, states_stages=3),
    Slab(64, 1, 128, scan_stages=2, states_stages=3),
    Slab(64, 1, 128, scan_stages=1, states_stages=3),
    Slab(64, 1, 256, scan_stages=2, states_stages=2),  # two subs spill
    Slab(64, 1, 256, scan_stages=1, states_stages=2),
    Slab(32, 1, 256, scan_stages=1, states_stages=2),
)


def slab_for(state_dim: int, group_columns: int, shared_bytes: int) -> Slab:
    """The first choice that fits.

    Args:
        group_columns: columns of x that read one group of B and C.
        shared_bytes: that a thread block may have.
    """
    return next(
        slab for slab in SLABS
        if slab.state_dim == state_dim and group_columns % slab.columns == 0
        and max(kernel.shared_bytes for kernel in slab.kernels("bfloat16")) <= shared_bytes
    )  # fmt: skip


def thd_mixer_conv(dtype: str, conv_width: int) -> Instance:
    """The kernel, for "float16" or "bfloat16"."""
    return Instance(f"thd_mixer_conv<{ELEMENT_TYPES[dtype]}, {conv_width}>")
