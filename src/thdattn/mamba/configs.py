"""Tile sizes of the Mamba-2 mixer's forward and decode kernels, as kernels/configs.py has those of attention."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from thdattn.kernels.configs import PAD
from thdattn.kernels.instances import ELEMENT_TYPES, Instance
from thdattn.mamba.shape import CHUNK

SEGMENT_CHUNKS = 32  # chunks of a segment; fewer give more thread blocks, and more states to write and read
BEGIN_CHUNKS = 2  # time in chunks that a thread block of a scan needs before it begins
BOX_BYTES = 2 * 64 * CHUNK  # kBox of kernels/mamba/hopper.cuh
ROWS_BEFORE = 8  # kBefore of kernels/mamba/conv_states_sm90.cu
CONV_COLUMNS, CONV_ROWS = 128, 256  # kConvColumns and kConvTile of kernels/mamba/conv.cu
RATES_HEADS = 16  # heads whose dt a thread block of conv.cu computes
DECODE_THREADS = 128  # per thread block of the kernels in decode.cu that have states
DECODE_CHANNELS = 512  # columns of x, B and C per thread block of those that have rows
FOLD_THREADS = 256  # kFoldThreads of kernels/mamba/scan.cu
MIXER_KERNELS = ("thd_ssd_fold", "thd_ssd_start", "thd_ssd_enter")

# Sizes that have kernels. Rows of zxbcdt are read 16 bytes at a time, hence the multiple of 8 heads.
MIXER_SIZES = {"head_dim": (64, 128), "state_dim": (64, 128, 256), "conv_width": range(1, 9),
               "num_heads": range(8, 2**20, 8),
               "d_inner // norm_groups": range(1, 8 * 1024 + 1)}  # fmt: skip


@dataclass(frozen=True)
class Slab:
    """Columns of x per thread block: `subs` times `width`, each of one head, with states of state_dim columns.

    scan_stages, states_stages: chunks in shared memory at a time, of thd_ssd_scan and thd_ssd_states.
    """

    width: int
    subs: int
    state_dim: int
    scan_stages: int
    states_stages: int

    by_boxes = False  # kernels load rows by pointers, not by tensor maps

    @property
    def columns(self) -> int:
        """Columns of x per thread block."""
        return self.width * self.subs

    @property
    def scan_threads(self) -> int:
        """Threads per block of thd_ssd_scan."""
        return 256 * self.subs

    @property
    def states_threads(self) -> int:
        """Threads per block of thd_ssd_states."""
        return 128 * self.subs

    def states_kernel(self, dtype: str) -> Instance:
        """Return thd_ssd_states for "float16" or "bfloat16"."""
        stage = _tile(CHUNK, self.columns) + _tile(CHUNK, self.state_dim) + 4 * (CHUNK + 4) * self.subs
        return self._instance("thd_ssd_states", dtype, self.states_stages, self.states_stages * stage)

    def scan_kernel(self, dtype: str, gates: bool = True) -> Instance:
        """Return thd_ssd_scan for "float16" or "bfloat16"; gates: True if it writes out, which a norm does otherwise.
        """
        tiles = 2 * (_tile(CHUNK, self.columns) + _tile(CHUNK, self.state_dim))
        stage = tiles + 3 * 4 * CHUNK * self.subs + 8 * CHUNK
        shared_bytes = self.scan_stages * stage + _tile(self.columns, self.state_dim) + 3 * 4 * 4
        kernel = "thd_ssd_scan" if gates else "thd_ssd_scan_ungated"
        return self._instance(kernel, dtype, self.scan_stages, shared_bytes)

    def _instance(self, kernel: str, dtype: str, stages: int, shared_bytes: int) -> Instance:
        constants = ELEMENT_TYPES[dtype], self.width, self.subs, self.state_dim, stages, shared_bytes
        return Instance(f"{kernel}<{', '.join(map(str, constants))}>", shared_bytes)


def _tile(rows: int, columns: int) -> int:
    return 2 * rows * (columns + PAD)


@dataclass(frozen=True)
class SlabSm90:
    """Columns of x per thread block on Hopper: `warpgroups` times 64, each of one head."""

    warpgroups: int
    state_dim: int
    scan_stages: int
    states_stages: int

    by_boxes = True

    @property
    def columns(self) -> int:
        """Columns of x per thread block."""
        return 64 * self.warpgroups

    @property
    def scan_threads(self) -> int:
        """Threads per block of thd_ssd_scan_sm90."""
        return 256 * self.warpgroups + 128

    @property
    def states_threads(self) -> int:
        """Threads per block of thd_ssd_states_sm90."""
        return 128 * self.warpgroups

    def states_kernel(self, dtype: str) -> Instance:
        """Return thd_ssd_states_sm90 for "float16" or "bfloat16"."""
        stage = BOX_BYTES * (self.warpgroups + self.state_dim // 64) + 2 * 4 * CHUNK * self.warpgroups
        return self._instance("thd_ssd_states_sm90", (ELEMENT_TYPES[dtype],), self.states_stages, stage)

    def convolves(self, conv_width: int) -> bool:
        """Return whether conv_states_kernel exists: wider convolutions leave no registers for states."""
        return conv_width <= 4

    def conv_states_kernel(self, dtype: str, conv_width: int) -> Instance:
        """Return thd_ssd_conv_states_sm90 for "float16" or "bfloat16"."""
        raw = 2 * 64 * (CHUNK + ROWS_BEFORE)
        stage = BOX_BYTES * (self.state_dim // 64) + (raw + 2 * 4 * CHUNK) * self.warpgroups
        return self._instance("thd_ssd_conv_states_sm90", (ELEMENT_TYPES[dtype], conv_width), 3, stage)

    def scan_kernel(self, dtype: str, gates: bool = True) -> Instance:
        """Return thd_ssd_scan_sm90 for "float16" or "bfloat16"; gates: see Slab."""
        stage = 2 * BOX_BYTES * (self.warpgroups + self.state_dim // 64) + 3 * 4 * CHUNK * self.warpgroups
        front = BOX_BYTES * self.state_dim // 64 + 4 * 4 + 2 * 8  # a state in front of a chunk
        weights = BOX_BYTES + 2 * 8
        made = 4 * 8 * 2 * 64  # rows that are stored to global memory
        of_warpgroups = (2 * front + weights + made) * self.warpgroups
        kernel = "thd_ssd_scan_sm90" if gates else "thd_ssd_scan_ungated_sm90"
        return self._instance(kernel, (ELEMENT_TYPES[dtype],), self.scan_stages, stage, of_warpgroups)

    def _instance(
        self, kernel: str, kind: tuple[str | int, ...], stages: int, stage_bytes: int, more_bytes: int = 0
    ) -> Instance:
        shared_bytes = stages * (stage_bytes + 2 * 8) + more_bytes  # two barriers a stage
        constants = *kind, self.warpgroups, self.state_dim, stages, shared_bytes
        return Instance(f"{kernel}<{', '.join(map(str, constants))}>", shared_bytes)


# The first slab that fits is taken: two heads of a thread block share the loads of B and C. Later slabs are for GPUs
# with less shared memory.
SLABS = (
    Slab(64, 2, 64, scan_stages=2, states_stages=3),
    Slab(64, 1, 64, scan_stages=2, states_stages=3),
    Slab(64, 2, 128, scan_stages=2, states_stages=3),
    Slab(64, 1, 128, scan_stages=2, states_stages=3),
    Slab(64, 1, 128, scan_stages=1, states_stages=3),
    Slab(32, 1, 256, scan_stages=2, states_stages=2),  # 64 columns spill
    Slab(32, 1, 256, scan_stages=1, states_stages=2),
)
SLABS_SM90 = (  # states of 256 columns take too many registers
    SlabSm90(2, 64, scan_stages=2, states_stages=4),
    SlabSm90(1, 64, scan_stages=2, states_stages=4),
    SlabSm90(2, 128, scan_stages=2, states_stages=3),
    SlabSm90(1, 128, scan_stages=2, states_stages=3),
)


@functools.cache
def slab_for(state_dim: int, group_columns: int, shared_bytes: int, sm90: bool) -> Slab | SlabSm90:
    """Return the first slab whose kernels fit.

    Args:
        group_columns: columns of x that read one group of B and C.
        shared_bytes: that a thread block may have.
    """
    slabs: tuple[Slab | SlabSm90, ...] = (*SLABS_SM90, *SLABS) if sm90 else SLABS
    return next(
        slab for slab in slabs
        if slab.state_dim == state_dim and group_columns % slab.columns == 0
        and max(slab.states_kernel("bfloat16").shared_bytes, slab.scan_kernel("bfloat16").shared_bytes) <= shared_bytes
    )  # fmt: skip


def segments_of_block(segments: int, slabs: int, multiprocessors: int) -> int:
    """Return how many segments a thread block of a scan walks over, with one block at a time on a multiprocessor.

    The number minimises the time, if a block takes as long as BEGIN_CHUNKS chunks to begin.
    """

    def chunks(of_block: int) -> int:
        blocks = slabs * -(-segments // of_block)
        return -(-blocks // multiprocessors) * (of_block * SEGMENT_CHUNKS + BEGIN_CHUNKS)

    return min(range(1, segments + 1), key=chunks)


def thd_mixer_conv(dtype: str, conv_width: int) -> Instance:
    """Return the kernel for "float16" or "bfloat16"."""
    return Instance(f"thd_mixer_conv<{ELEMENT_TYPES[dtype]}, {conv_width}>")


@dataclass(frozen=True)
class NormTile:
    """Kernels of kernels/mamba/norm.cu for groups of `columns` columns, 8 per thread."""

    columns: int
    after_gate: bool

    rows = 2  # per thread block of the forward; one of the backward has a chunk

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * -(-self.columns // 256)

    def thd_mixer_norm(self, dtype: str) -> Instance:
        """Return the kernel for rows of a pack, for "float16" or "bfloat16"."""
        return self._instance("thd_mixer_norm", dtype, self.rows)

    def thd_mixer_decode_norm(self, dtype: str) -> Instance:
        """Return the kernel for decoded rows."""
        return self._instance("thd_mixer_decode_norm", dtype, self.rows)

    def thd_mixer_norm_bwd(self, dtype: str) -> Instance:
        """Return the kernel of the gradients."""
        return self._instance("thd_mixer_norm_bwd", dtype)

    def _instance(self, kernel: str, dtype: str, *more: int) -> Instance:
        constants = ELEMENT_TYPES[dtype], str(self.after_gate).lower(), self.threads, *more
        return Instance(f"{kernel}<{', '.join(map(str, constants))}>")


@dataclass(frozen=True)
class MixerDecode:
    """Kernels of kernels/mamba/decode.cu for "float16" or "bfloat16" and a width of the states."""

    dtype: str
    state_dim: int

    rows = 16  # of a head's state per thread block of thd_mixer_decode
    fill_columns = 64  # columns of x per thread block of thd_mixer_fill; kFillColumns

    def thd_mixer_decode_conv(self, conv_width: int) -> Instance:
        """Return the convolution, which runs before thd_mixer_decode."""
        return self._instance("thd_mixer_decode_conv", conv_width)

    @property
    def thd_mixer_decode(self) -> Instance:
        """Kernel of one row of every sequence."""
        return self._instance("thd_mixer_decode", self.state_dim, self.rows)

    @property
    def thd_mixer_decode_ungated(self) -> Instance:
        """Kernel of one row of every sequence, for a norm, which gates."""
        return self._instance("thd_mixer_decode_ungated", self.state_dim, self.rows)

    @property
    def thd_mixer_fill_rows(self) -> Instance:
        """Kernel that writes the last rows of sequences."""
        return self._instance("thd_mixer_fill_rows")

    @property
    def thd_mixer_fill(self) -> Instance:
        """Kernel that writes the states after sequences."""
        stage = 2 * CHUNK * (self.fill_columns + self.state_dim + 2 * PAD) + 4 * CHUNK
        return self._instance("thd_mixer_fill", self.state_dim, 2 * stage, shared_bytes=2 * stage)

    def _instance(self, name: str, *constants: int, shared_bytes: int = 0) -> Instance:
        return Instance(f"{name}<{', '.join(map(str, (ELEMENT_TYPES[self.dtype], *constants)))}>", shared_bytes)
