"""Tiles of the Mamba-2 mixer's backward kernels, as configs.py has those of the forward."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from thdattn.kernels.configs import PAD
from thdattn.kernels.instances import ELEMENT_TYPES, Instance
from thdattn.mamba.configs import BOX_BYTES
from thdattn.mamba.shape import CHUNK

WALK_SLICE = 128  # columns of a state in the registers of a thread block of Walk
CONV_BACK_COLUMNS, CONV_BACK_HEADS = 256, 128  # kConvBackColumns and kConvBackThreads of kernels/mamba/conv_backward.cu
SUM_COLUMNS = 32


@dataclass(frozen=True)
class ChunkTile:
    """Tile of thd_ssd_bwd: `slice` columns of the states at a time; `blocks` thread blocks share a multiprocessor."""

    head_dim: int
    state_dim: int
    slice: int
    blocks: int = 1

    threads = 256
    by_boxes = False  # kernels load rows and states by pointers, not by tensor maps

    def thd_ssd_bwd(self, dtype: str) -> Instance:
        """Return the kernel for "float16" or "bfloat16"."""
        rows = _tile(CHUNK, self.state_dim) + _tile(CHUNK, self.head_dim) + _tile(self.head_dim, self.slice)
        pairs, products, numbers = _tile(CHUNK, CHUNK), 20 * 512, 4 * (4 + 1 + 11 + 1) * CHUNK + 32
        return _instance("thd_ssd_bwd", dtype, self.head_dim, self.state_dim, self.slice, self.blocks,
                         shared_bytes=2 * rows + pairs + products + numbers)


@dataclass(frozen=True)
class ChunkTileSm90:
    """Tile of thd_ssd_bwd_sm90 for heads of 64: `stages` heads in shared memory at a time."""

    state_dim: int
    stages: int

    head_dim, blocks, threads, by_boxes = 64, 1, 512, True

    def thd_ssd_bwd(self, dtype: str) -> Instance:
        """Return the kernel for "float16" or "bfloat16"."""
        parts = self.state_dim // 64
        stage = (2 + 2 * parts) * BOX_BYTES + 4 * (2 + 8) * CHUNK + 16 + 3 * 8
        of_chunk = (2 * parts + 5) * BOX_BYTES + 2 * 4 * CHUNK + 5 * 8
        return _instance("thd_ssd_bwd_sm90", dtype, self.state_dim, self.stages,
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

    by_boxes = False  # kernels load rows by pointers, not by tensor maps

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 4 * self.columns

    @property
    def part(self) -> int:
        """Columns of the state per thread block."""
        return min(self.state_dim, WALK_SLICE)

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block."""
        numbers = self.columns // self.head_dim * (CHUNK + 4) + self.columns // 8
        return self.stages * (_tile(CHUNK, self.columns) + _tile(CHUNK, self.part)) + 8 * numbers

    def thd_ssd_dstates(self, dtype: str) -> Instance:
        """Return the kernel for "float16" or "bfloat16"."""
        return self._instance("thd_ssd_dstates", dtype)

    def thd_ssd_chunk_states(self, dtype: str, back: bool) -> Instance:
        """Return the kernel for "float16" or "bfloat16"; back: the one of the gradients."""
        return self._instance("thd_ssd_chunk_states", dtype, back)

    def _instance(self, kernel: str, dtype: str, *how: bool) -> Instance:
        sizes = self.head_dim, self.state_dim, self.part, self.columns, self.stages
        return _instance(kernel, dtype, *how, *sizes, shared_bytes=self.shared_bytes)


@dataclass(frozen=True)
class WalkSm90:
    """Tile of thd_ssd_chunk_states_sm90 for heads of 64: `heads` of a group per thread block."""

    heads: int
    state_dim: int
    stages: int

    by_boxes = True

    @property
    def columns(self) -> int:
        """Columns of x per thread block."""
        return 64 * self.heads

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 128 * self.heads

    @property
    def gate_threads(self) -> int:
        """Threads per block of gate_kernel, which has one more warp for loads."""
        return self.threads + 32

    def gate_kernel(self, dtype: str) -> Instance:
        """Return thd_ssd_gate_states_sm90, which computes the rows that it walks over, for "float16" or "bfloat16"."""
        stage = (4 * self.heads + self.state_dim // 64) * BOX_BYTES + 2 * 8
        of_heads = 2 * 4 * (CHUNK + 2) + 2 * 4 * (CHUNK // 32) + 2 * 4 * 4
        return _instance("thd_ssd_gate_states_sm90", dtype, self.heads, self.state_dim,
                         shared_bytes=2 * stage + self.heads * of_heads)

    def thd_ssd_chunk_states(self, dtype: str, back: bool) -> Instance:
        """Return the kernel for "float16" or "bfloat16"; back: the one of the gradients."""
        return self._instance("thd_ssd_chunk_states_sm90", dtype, back)

    def _instance(self, kernel: str, dtype: str, *how: bool) -> Instance:
        parts = self.state_dim // 64
        stage, of_heads = (self.heads + parts) * BOX_BYTES + 2 * 8, parts * BOX_BYTES + 2 * 4 * (CHUNK + 2) + 2 * 4 * 4
        return _instance(kernel, dtype, *how, self.heads, self.state_dim, self.stages,
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
                    if walk.state_dim == tile.state_dim and group_columns % walk.columns == 0)  # fmt: skip
    return portable_walk(tile.head_dim, tile.state_dim, group_columns, shared_bytes)


def portable_walk(head_dim: int, state_dim: int, group_columns: int, shared_bytes: int) -> Walk:
    """Return the walk for every GPU, whose dstates Hopper's kernels read too."""
    columns = 128 if group_columns % 128 == 0 else head_dim
    most = Walk(head_dim, state_dim, columns, 3)
    return most if most.shared_bytes <= shared_bytes else replace(most, stages=2)


def thd_mixer_gate_bwd(dtype: str) -> Instance:
    """Return the kernel for "float16" or "bfloat16"."""
    return Instance(f"thd_mixer_gate_bwd<{ELEMENT_TYPES[dtype]}>")


def thd_mixer_conv_bwd(dtype: str, conv_width: int) -> Instance:
    """Return the kernel for "float16" or "bfloat16"."""
    return Instance(f"thd_mixer_conv_bwd<{ELEMENT_TYPES[dtype]}, {conv_width}>")


def thd_mixer_add_halos(dtype: str) -> Instance:
    """Return the kernel for "float16" or "bfloat16"."""
    return Instance(f"thd_mixer_add_halos<{ELEMENT_TYPES[dtype]}>")


def _tile(rows: int, columns: int) -> int:
    return 2 * rows * (columns + PAD)


def _instance(kernel: str, dtype: str | int, *constants: str | int, shared_bytes: int) -> Instance:
    written = ELEMENT_TYPES[str(dtype)], *(str(c).lower() for c in constants), str(shared_bytes)
    return Instance(f"{kernel}<{', '.join(written)}>", shared_bytes)
