"""Tile sizes of the Mamba-2 mixer's kernels, as kernels/configs.py has those of attention.

`dtype` is "float16" or "bfloat16" everywhere. Shared memory is that of the kernels' structs, which the compiler checks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from thdattn.kernels.configs import PAD
from thdattn.kernels.instances import Instance, instance
from thdattn.mamba.shape import CHUNK

SEGMENT_CHUNKS = 32  # chunks of a segment; fewer give more thread blocks, and more states to write and read
BEGIN_CHUNKS = 2  # time in chunks that a thread block of a scan needs before it begins
BOX_BYTES = 2 * 64 * CHUNK  # kBox of kernels/mamba/hopper.cuh
ROWS_BEFORE = 8  # kBefore of kernels/mamba/conv_states_sm90.cu
CONV_COLUMNS, CONV_ROWS = 128, 256  # kConvColumns and kConvTile of kernels/mamba/conv.cu
RATES_HEADS = 16  # heads whose dt a thread block of conv.cu computes
CONV_BACK_COLUMNS, CONV_BACK_HEADS = 256, 128  # kConvBackColumns and kConvBackThreads of kernels/mamba/conv_backward.cu
WALK_SLICE = 128  # columns of a state in the registers of a thread block of Walk
SUM_COLUMNS = 32  # columns that a thread block of thd_mixer_sum adds up
DECODE_THREADS = 128  # per thread block of the kernels in decode.cu that have states
DECODE_CHANNELS = 512  # columns of x, B and C per thread block of those that have rows
DECODE_ROWS = 16  # of a head's state per thread block of thd_mixer_decode
FILL_COLUMNS = 64  # columns of x per thread block of thd_mixer_fill; kFillColumns
FOLD_THREADS = 256  # kFoldThreads of kernels/mamba/scan.cu
MIXER_KERNELS = ("thd_ssd_fold", "thd_ssd_start", "thd_ssd_enter", "thd_ssd_fold_trees")

# Sizes that have kernels. Rows of zxbcdt are read 16 bytes at a time, hence the multiple of 8 heads.
MIXER_SIZES = {"head_dim": (64, 128), "state_dim": (64, 128, 256), "conv_width": range(1, 9),
               "num_heads": range(8, 2**20, 8),
               "d_inner // norm_groups": range(1, 8 * 1024 + 1)}


def _tile(rows: int, columns: int) -> int:
    """Return the bytes of a padded tile of 16-bit elements."""
    return 2 * rows * (columns + PAD)


# ----------------------------------------------------------------------------- forward: states of segments, and y


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
        return self.width * self.subs

    @property
    def scan_threads(self) -> int:
        return 256 * self.subs

    @property
    def states_threads(self) -> int:
        return 128 * self.subs

    def states_kernel(self, dtype: str) -> Instance:
        stage = self._tiles + 4 * (CHUNK + 4) * self.subs
        return self._instance("thd_ssd_states", dtype, self.states_stages, self.states_stages * stage)

    def scan_kernel(self, dtype: str, gates: bool = True) -> Instance:
        """Return the kernel of y; gates: it also writes out, which a norm does otherwise."""
        stage = 2 * self._tiles + 3 * 4 * CHUNK * self.subs + 8 * CHUNK
        shared_bytes = self.scan_stages * stage + _tile(self.columns, self.state_dim) + 3 * 4 * 4
        return self._instance("thd_ssd_scan" if gates else "thd_ssd_scan_ungated", dtype, self.scan_stages,
                              shared_bytes)

    @property
    def _tiles(self) -> int:
        """Bytes of a chunk of x, and of one of B or C."""
        return _tile(CHUNK, self.columns) + _tile(CHUNK, self.state_dim)

    def _instance(self, kernel: str, dtype: str, stages: int, shared_bytes: int) -> Instance:
        return instance(kernel, dtype, self.width, self.subs, self.state_dim, stages, shared_bytes=shared_bytes)


@dataclass(frozen=True)
class SlabSm90:
    """Columns of x per thread block on Hopper: `warpgroups` times 64, each of one head. The rest is as for Slab."""

    warpgroups: int
    state_dim: int
    scan_stages: int
    states_stages: int

    by_boxes = True

    @property
    def columns(self) -> int:
        return 64 * self.warpgroups

    @property
    def scan_threads(self) -> int:
        return 256 * self.warpgroups + 128

    @property
    def states_threads(self) -> int:
        return 128 * self.warpgroups

    def states_kernel(self, dtype: str) -> Instance:
        stage = BOX_BYTES * (self.warpgroups + self.state_dim // 64) + 2 * 4 * CHUNK * self.warpgroups
        return self._instance("thd_ssd_states_sm90", dtype, stages=self.states_stages, stage_bytes=stage)

    def convolves(self, conv_width: int) -> bool:
        """Return whether conv_states_kernel exists: wider convolutions leave no registers for states."""
        return conv_width <= 4

    def conv_states_kernel(self, dtype: str, conv_width: int) -> Instance:
        """Return states_kernel that convolves x itself."""
        raw = 2 * 64 * (CHUNK + ROWS_BEFORE)
        stage = BOX_BYTES * (self.state_dim // 64) + (raw + 2 * 4 * CHUNK) * self.warpgroups
        return self._instance("thd_ssd_conv_states_sm90", dtype, conv_width, stages=3, stage_bytes=stage)

    def scan_kernel(self, dtype: str, gates: bool = True) -> Instance:
        stage = 2 * BOX_BYTES * (self.warpgroups + self.state_dim // 64) + 3 * 4 * CHUNK * self.warpgroups
        front = BOX_BYTES * self.state_dim // 64 + 4 * 4 + 2 * 8  # a state in front of a chunk
        weights = BOX_BYTES + 2 * 8
        made = 4 * 8 * 2 * 64  # rows that are stored to global memory
        return self._instance("thd_ssd_scan_sm90" if gates else "thd_ssd_scan_ungated_sm90", dtype,
                              stages=self.scan_stages, stage_bytes=stage,
                              more_bytes=(2 * front + weights + made) * self.warpgroups)

    def _instance(self, kernel: str, *kind: str | int, stages: int, stage_bytes: int, more_bytes: int = 0) -> Instance:
        return instance(kernel, *kind, self.warpgroups, self.state_dim, stages,
                        shared_bytes=stages * (stage_bytes + 2 * 8) + more_bytes)  # two barriers a stage


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
        shared_bytes: of a thread block of this GPU.
    """
    slabs: tuple[Slab | SlabSm90, ...] = (*SLABS_SM90, *SLABS) if sm90 else SLABS
    return next(
        slab for slab in slabs
        if slab.state_dim == state_dim and group_columns % slab.columns == 0
        and max(slab.states_kernel("bfloat16").shared_bytes, slab.scan_kernel("bfloat16").shared_bytes) <= shared_bytes
    )


def segments_of_block(segments: int, slabs: int, multiprocessors: int) -> int:
    """Return how many segments a thread block of a scan walks over, with one block at a time on a multiprocessor.

    The number minimises the time, if a block takes as long as BEGIN_CHUNKS chunks to begin.
    """

    def chunks(of_block: int) -> int:
        blocks = slabs * -(-segments // of_block)
        return -(-blocks // multiprocessors) * (of_block * SEGMENT_CHUNKS + BEGIN_CHUNKS)

    return min(range(1, segments + 1), key=chunks)


# ----------------------------------------------------------------------------- backward: states at chunks, gradients


@dataclass(frozen=True)
class ChunkTile:
    """Tile of thd_ssd_bwd: `slice` columns of the states at a time; `blocks` thread blocks share a multiprocessor."""

    head_dim: int
    state_dim: int
    slice: int
    blocks: int = 1

    threads = 256
    by_boxes = False

    def thd_ssd_bwd(self, dtype: str) -> Instance:
        rows = _tile(CHUNK, self.state_dim) + _tile(CHUNK, self.head_dim) + _tile(self.head_dim, self.slice)
        pairs, products, numbers = _tile(CHUNK, CHUNK), 20 * 512, 4 * (4 + 1 + 11 + 1) * CHUNK + 32
        return instance("thd_ssd_bwd", dtype, self.head_dim, self.state_dim, self.slice, self.blocks,
                        shared_bytes=2 * rows + pairs + products + numbers)


@dataclass(frozen=True)
class ChunkTileSm90:
    """Tile of thd_ssd_bwd_sm90 for heads of 64: `stages` heads in shared memory at a time."""

    state_dim: int
    stages: int

    head_dim, blocks, threads, by_boxes = 64, 1, 512, True

    def thd_ssd_bwd(self, dtype: str) -> Instance:
        parts = self.state_dim // 64
        stage = (2 + 2 * parts) * BOX_BYTES + 4 * (2 + 8) * CHUNK + 16 + 3 * 8
        of_chunk = (2 * parts + 5) * BOX_BYTES + 2 * 4 * CHUNK + 5 * 8
        return instance("thd_ssd_bwd_sm90", dtype, self.state_dim, self.stages,
                        shared_bytes=of_chunk + self.stages * stage)


# The first tile that fits is taken: later ones are for GPUs with less shared memory.
CHUNK_TILES = (
    ChunkTile(64, 64, 64, blocks=2),
    ChunkTile(64, 128, 128, blocks=2),
    ChunkTile(64, 128, 64),
    ChunkTile(64, 256, 128),
    ChunkTile(128, 64, 64),
    ChunkTile(128, 64, 32),
    ChunkTile(128, 128, 128),
    ChunkTile(128, 256, 128),
    ChunkTile(128, 256, 64),
)
CHUNK_TILES_SM90 = (ChunkTileSm90(64, stages=4), ChunkTileSm90(128, stages=3))


@functools.cache
def chunk_tile_for(
    head_dim: int, state_dim: int, shared_bytes: int, sm90: bool = False
) -> ChunkTile | ChunkTileSm90:
    """Return the first tile that fits `shared_bytes` of shared memory per block; sm90: also consider Hopper's.

    Raises:
        ValueError: none fits.
    """
    tiles: tuple[ChunkTile | ChunkTileSm90, ...] = (*CHUNK_TILES_SM90, *CHUNK_TILES) if sm90 else CHUNK_TILES
    of_sizes = [tile for tile in tiles if (tile.head_dim, tile.state_dim) == (head_dim, state_dim)]
    needs = [tile.thd_ssd_bwd("bfloat16").shared_bytes for tile in of_sizes]
    fitting = (tile for tile, need in zip(of_sizes, needs, strict=True) if need <= shared_bytes)
    chosen = next(fitting, None)
    if chosen is None:
        raise ValueError(
            f"the GPU has {shared_bytes} bytes of shared memory per thread block, wanted {min(needs)} for the backward "
            f"of a Mamba-2 mixer of head_dim {head_dim} and state_dim {state_dim}; use smaller ones, or a GPU like A100"
        )
    return chosen


@dataclass(frozen=True)
class Walk:
    """Tile of thd_ssd_dstates and thd_ssd_chunk_states: `columns` of x per thread block, of one head or of two."""

    head_dim: int
    state_dim: int
    columns: int
    stages: int

    by_boxes = False

    @property
    def threads(self) -> int:
        return 4 * self.columns

    @property
    def shared_bytes(self) -> int:
        numbers = self.columns // self.head_dim * (CHUNK + 4) + self.columns // 8
        return self.stages * (_tile(CHUNK, self.columns) + _tile(CHUNK, self._slice)) + 8 * numbers

    def thd_ssd_dstates(self, dtype: str) -> Instance:
        return self._instance("thd_ssd_dstates", dtype)

    def thd_ssd_chunk_states(self, dtype: str, back: bool) -> Instance:
        """Return the kernel of the states, or, back, of their gradients."""
        return self._instance("thd_ssd_chunk_states", dtype, back)

    @property
    def _slice(self) -> int:
        """Columns of the state per thread block."""
        return min(self.state_dim, WALK_SLICE)

    def _instance(self, kernel: str, *kind: str | bool) -> Instance:
        return instance(kernel, *kind, self.head_dim, self.state_dim, self._slice, self.columns, self.stages,
                        shared_bytes=self.shared_bytes)


@dataclass(frozen=True)
class WalkSm90:
    """Tile of thd_ssd_chunk_states_sm90 for heads of 64: `heads` of a group per thread block."""

    heads: int
    state_dim: int
    stages: int

    by_boxes = True

    @property
    def columns(self) -> int:
        return 64 * self.heads

    @property
    def threads(self) -> int:
        return 128 * self.heads

    @property
    def gate_threads(self) -> int:
        """Threads per block of gate_kernel, which has one more warp for loads."""
        return self.threads + 32

    def gate_kernel(self, dtype: str) -> Instance:
        """Return thd_ssd_gate_states_sm90, which computes the rows that it walks over."""
        stage = (4 * self.heads + self.state_dim // 64) * BOX_BYTES + 2 * 8
        of_heads = 2 * 4 * (CHUNK + 2) + 2 * 4 * (CHUNK // 32) + 2 * 4 * 4
        return instance("thd_ssd_gate_states_sm90", dtype, self.heads, self.state_dim,
                        shared_bytes=2 * stage + self.heads * of_heads)

    def thd_ssd_chunk_states(self, dtype: str, back: bool) -> Instance:
        parts = self.state_dim // 64
        stage, of_heads = (self.heads + parts) * BOX_BYTES + 2 * 8, parts * BOX_BYTES + 2 * 4 * (CHUNK + 2) + 2 * 4 * 4
        return instance("thd_ssd_chunk_states_sm90", dtype, back, self.heads, self.state_dim, self.stages,
                        shared_bytes=self.stages * stage + self.heads * of_heads)


WALKS_SM90 = tuple(WalkSm90(heads, state_dim, stages=2) for state_dim in (64, 128) for heads in (2, 1))


def walk_for(tile: ChunkTile | ChunkTileSm90, group_columns: int, shared_bytes: int) -> Walk | WalkSm90:
    """Return the tile of the kernel that computes the states for a chunk tile, on a GPU with so much shared memory per
    block.

    Args:
        tile: from chunk_tile_for. Hopper's tiles read the layout that Hopper's walks alone write.
        group_columns: columns of x that read one group of B and C.
    """
    if isinstance(tile, ChunkTileSm90):
        return next(walk for walk in WALKS_SM90
                    if walk.state_dim == tile.state_dim and group_columns % walk.columns == 0)
    return portable_walk(tile.head_dim, tile.state_dim, group_columns, shared_bytes)


def portable_walk(head_dim: int, state_dim: int, group_columns: int, shared_bytes: int) -> Walk:
    """Return the walk for every GPU, whose dstates Hopper's kernels read too."""
    columns = 128 if group_columns % 128 == 0 else head_dim
    most = Walk(head_dim, state_dim, columns, 3)
    return most if most.shared_bytes <= shared_bytes else replace(most, stages=2)


# ------------------------------------------------------------------------------------------------- norm, decode


@dataclass(frozen=True)
class NormTile:
    """Kernels of kernels/mamba/norm.cu for groups of `columns` columns, 8 per thread."""

    columns: int
    after_gate: bool

    rows = 2  # per thread block of the forward; one of the backward has a chunk

    @property
    def threads(self) -> int:
        return 32 * -(-self.columns // 256)

    def thd_mixer_norm(self, dtype: str) -> Instance:
        return instance("thd_mixer_norm", dtype, self.after_gate, self.threads, self.rows)

    def thd_mixer_decode_norm(self, dtype: str) -> Instance:
        return instance("thd_mixer_decode_norm", dtype, self.after_gate, self.threads, self.rows)

    def thd_mixer_norm_bwd(self, dtype: str) -> Instance:
        return instance("thd_mixer_norm_bwd", dtype, self.after_gate, self.threads)


def thd_mixer_decode(dtype: str, state_dim: int, gates: bool = True) -> Instance:
    """Return the kernel of one row of every sequence; gates: it also writes out, which a norm does otherwise."""
    return instance("thd_mixer_decode" if gates else "thd_mixer_decode_ungated", dtype, state_dim, DECODE_ROWS)


def thd_mixer_fill(dtype: str, state_dim: int) -> Instance:
    """Return the kernel that writes the states after sequences."""
    stage = 2 * CHUNK * (FILL_COLUMNS + state_dim + 2 * PAD) + 4 * CHUNK
    return instance("thd_mixer_fill", dtype, state_dim, shared_bytes=2 * stage)
