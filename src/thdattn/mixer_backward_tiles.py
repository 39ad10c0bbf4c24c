"""Tiles of the Mamba-2 mixer's backward kernels, as mixer_tiles.py has those of the forward."""

from __future__ import annotations

from dataclasses import dataclass

from thdattn.instances import ELEMENT_TYPES, Instance
from thdattn.mixer_tiles import CHUNK
from thdattn.tiles import PAD

WALK_SLICE = 128  # columns of a state in the registers of a thread block that walks down or up the rows
CHUNK_THREADS = 256
CONV_BACK_COLUMNS, CONV_BACK_HEADS = 256, 128  # kConvBackColumns and kConvBackThreads of kernels/mamba/conv_backward.cu
SUM_COLUMNS = 32


@dataclass(frozen=True)
class ChunkTile:
    """thd_ssd_bwd: `slice` columns of the states at a time; `blocks` thread blocks share a multiprocessor."""

    head_dim: int
    state_dim: int
    slice: int
    blocks: int = 1

    def thd_ssd_bwd(self, dtype: str) -> Instance:
        """The kernel, for "float16" or "bfloat16"."""
        rows = _tile(CHUNK, self.state_dim) + _tile(CHUNK, self.head_dim) + _tile(self.head_dim, self.slice)
        pairs, products, numbers = _tile(CHUNK, CHUNK), 20 * 512, 4 * (4 + 1 + 12) * CHUNK + 2 * 32
        return _instance("thd_ssd_bwd", dtype, self.head_dim, self.state_dim, self.slice, self.blocks,
                         shared_bytes=2 * rows + pairs + products + numbers)


# From the first choice on; GPUs with less shared memory take later ones.
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


def chunk_tile_for(head_dim: int, state_dim: int, shared_bytes: int) -> ChunkTile:
    """The first choice that fits `shared_bytes` of shared memory per block.

    Raises:
        ValueError: none does.
    """
    of_sizes = [tile for tile in CHUNK_TILES if (tile.head_dim, tile.state_dim) == (head_dim, state_dim)]
    needs = [tile.thd_ssd_bwd("bfloat16").shared_bytes for tile in of_sizes]
    fitting = (tile for tile, need in zip(of_sizes, needs, strict=True) if need <= shared_bytes)
    chosen = next(fitting, None)
    if chosen is None:
        raise ValueError(
            f"the GPU has {shared_bytes} bytes of shared memory per thread block, wanted {min(needs)} for the backward "
            f"of a Mamba-2 mixer of head_dim {head_dim} and state_dim {state_dim}; use smaller ones, or a GPU like A100"
        )
    return chosen


def walk_columns(head_dim: int, group_columns: int) -> int:
    """Columns of x that a thread block of the walks has: of one head, or of two if a group has an even number."""
    return 128 if group_columns % 128 == 0 else head_dim


def thd_ssd_dstates(dtype: str, head_dim: int, state_dim: int, columns: int, shared_bytes: int) -> Instance:
    """The kernel, for "float16" or "bfloat16", on a GPU with so much shared memory per block."""
    return _walk("thd_ssd_dstates", (dtype, head_dim, state_dim), columns, shared_bytes)


def thd_ssd_chunk_states(
    dtype: str, back: bool, head_dim: int, state_dim: int, columns: int, shared_bytes: int
) -> Instance:
    """The kernel, for "float16" or "bfloat16", on a GPU with so much shared memory per block; back: of gradients."""
    return _walk("thd_ssd_chunk_states", (dtype, back, head_dim, state_dim), columns, shared_bytes)


def thd_mixer_gate_bwd(dtype: str) -> Instance:
    """The kernel, for "float16" or "bfloat16"."""
    return Instance(f"thd_mixer_gate_bwd<{ELEMENT_TYPES[dtype]}>")


def thd_mixer_conv_bwd(dtype: str, conv_width: int) -> Instance:
    """The kernel, for "float16" or "bfloat16"."""
    return Instance(f"thd_mixer_conv_bwd<{ELEMENT_TYPES[dtype]}, {conv_width}>")


def thd_mixer_add_halos(dtype: str) -> Instance:
    """The kernel, for "float16" or "bfloat16"."""
    return Instance(f"thd_mixer_add_halos<{ELEMENT_TYPES[dtype]}>")


def _walk(kernel: str, what: tuple[str | int, ...], columns: int, most_bytes: int) -> Instance:
    head_dim, state_dim = map(int, what[-2:])
    part = min(state_dim, WALK_SLICE)
    stage, numbers = _tile(CHUNK, columns) + _tile(CHUNK, part), columns // head_dim * (CHUNK + 4) + columns // 8
    stages = 3 if 3 * stage + 8 * numbers <= most_bytes else 2
    return _instance(kernel, *what, part, columns, stages, shared_bytes=stages * stage + 8 * numbers)


def _tile(rows: int, columns: int) -> int:
    return 2 * rows * (columns + PAD)


def _instance(kernel: str, dtype: str | int, *constants: str | int, shared_bytes: int) -> Instance:
    written = ELEMENT_TYPES[str(dtype)], *(str(c).lower() for c in constants), str(shared_bytes)
    return Instance(f"{kernel}<{', '.join(written)}>", shared_bytes)
