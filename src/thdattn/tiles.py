"""Tile sizes of the attention kernels per head dim: the one table a new head dim or a new measurement touches.

Numbers are compile-time constants of the kernels, bounded by registers (no kernel may spill) and shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

PAD = 8  # elements after every row of a tile in shared memory, kPad of kernels/portable/common.cuh
STATIC_BYTES = 2304  # at most what the kernels declare beside their tiles
SLAB, SLAB_BYTES = 64, 128  # columns of a slab of a Hopper tile, bytes of its rows
STATS_ROWS = 128  # the backward pads its numbers per query row to a multiple of this and of tile_m
SM90_BARRIER_BYTES = 256  # behind the tiles of a Hopper kernel, at most
SM90_RANGE_BYTES = 1536  # behind those of a Hopper backward: for the ranges of keys and the like

ELEMENT_TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "float"}


def slabs(rows: int, width: int) -> int:
    """Bytes of a Hopper tile of rows of `width` 16-bit elements."""
    return rows * SLAB_BYTES * -(-width // SLAB)


@dataclass(frozen=True)
class Forward:
    """thd_attn_fwd: tile_n keys at a time; each warp owns `fragments` times 16 query rows."""

    tile_n: int
    warps: int
    fragments: int

    @property
    def tile_m(self) -> int:
        """Query rows of a thread block."""
        return 16 * self.warps * self.fragments


@dataclass(frozen=True)
class ForwardSm90:
    """thd_attn_fwd_sm90: tile_n keys at a time; each of `consumers` warpgroups owns 64 query rows.

    q_stages query tiles and kv_stages tiles of keys and of values are loaded ahead. q_in_registers: queries are read
    from registers, where there are some left. together: heads that take turns at a tile of long sequences.
    """

    tile_n: int
    consumers: int
    q_stages: int
    kv_stages: int
    q_in_registers: bool = False
    together: int = 4

    @property
    def tile_m(self) -> int:
        """Query rows of a thread block."""
        return 64 * self.consumers

    @property
    def warps(self) -> int:
        """Warps that compute."""
        return 4 * self.consumers


@dataclass(frozen=True)
class Backward:
    """thd_attn_bwd: tile_n keys per thread block, tile_m query rows at a time, loaded `stages` deep.

    `split` warps share 16 keys and divide the columns of dk and dv.
    """

    tile_m: int
    tile_n: int
    split: int
    stages: int


@dataclass(frozen=True)
class BackwardSm90:
    """thd_attn_bwd_sm90: 128 keys per thread block, tile_m query rows at a time, `stages` query tiles loaded ahead.

    The key side takes `queries` of them at once. dq has pieces of piece_cols columns, `places` of which are on their
    way; the warpgroup that computes them has query_registers registers per thread, the others share the rest.
    together: as for ForwardSm90.
    """

    tile_m: int
    stages: int
    queries: int
    piece_cols: int
    places: int
    query_registers: int
    together: int = 2

    tile_n = 128
    has_order = True

    @property
    def shares_kernel(self) -> str:
        """thd_attn_shares_sm90 for these tiles."""
        return f"thd_attn_shares_sm90<2, {self.tile_m}>"

    def kernel(self, head_dim: int, v_head_dim: int, ordered: bool) -> tuple[str, tuple[str | int, ...], int]:
        """(name, constants in it beside types and head dims, bytes of its tiles in shared memory)."""
        rows = self.tile_n + self.stages * self.tile_m
        inputs = slabs(rows, head_dim) + slabs(rows, v_head_dim)
        dscore, stats = self.stages * slabs(self.tile_n, self.tile_m), 8 * self.stages * self.tile_m
        pieces = self.places * 4 * 64 * self.piece_cols
        constants = (self.tile_m, self.stages, self.queries, self.piece_cols, self.places, self.query_registers)
        return "thd_attn_bwd_sm90", (*constants, str(ordered).lower()), inputs + dscore + pieces + stats


@dataclass(frozen=True)
class BackwardWideSm90:
    """thd_attn_bwd_wide_sm90: 64 keys per thread block, 64 query rows at a time, dq summed in any order.

    q_stages tiles of queries and dout_stages tiles of their gradients are loaded ahead.
    """

    q_stages: int
    dout_stages: int

    tile_m = tile_n = 64
    together = 2
    has_order = False
    shares_kernel = "thd_attn_shares_sm90<1, 64>"

    def kernel(self, head_dim: int, v_head_dim: int, ordered: bool) -> tuple[str, tuple[str | int, ...], int]:
        """(name, constants in it beside types and head dims, bytes of its tiles in shared memory)."""
        assert not ordered
        inputs = slabs(64 * (1 + self.q_stages), head_dim) + slabs(64 * (1 + self.dout_stages), v_head_dim)
        stats = 4 * 64 * (self.q_stages + self.dout_stages)
        return "thd_attn_bwd_wide_sm90", (self.q_stages, self.dout_stages), inputs + 2 * slabs(64, 64) + stats


@dataclass(frozen=True)
class Tiles:
    """All tile sizes of one head dim. `backward` is a choice: the first that fits the GPU's shared memory."""

    head_dim: int
    v_head_dim: int
    forward: Forward
    forward_sm90: ForwardSm90
    backward: tuple[Backward, ...]
    backward_sm90: BackwardSm90 | BackwardWideSm90
    dq_tile_n: int
    dq_warps: int

    def forward_kernel(self, dtype: str) -> tuple[str, int]:
        """(name, bytes of shared memory) of thd_attn_fwd for "float16" or "bfloat16"."""
        f = self.forward
        name = self._name("thd_attn_fwd", ELEMENT_TYPES[dtype], self.head_dim, self.v_head_dim, f.tile_n, f.warps,
                          f.fragments)
        return name, 2 * (f.tile_m * (self.head_dim + PAD) + f.tile_n * self._pair)

    def forward_sm90_kernel(self, dtype: str) -> tuple[str, int]:
        """(name, bytes of shared memory) of thd_attn_fwd_sm90."""
        f = self.forward_sm90
        name = self._name("thd_attn_fwd_sm90", ELEMENT_TYPES[dtype], self.head_dim, self.v_head_dim, f.tile_n,
                          f.consumers, f.q_stages, f.kv_stages, str(f.q_in_registers).lower())
        q = slabs(f.q_stages * f.tile_m, self.head_dim)
        k, v = (slabs(f.kv_stages * f.tile_n, width) for width in (self.head_dim, self.v_head_dim))
        ranges = 2 * f.q_stages * f.tile_m * 8
        return name, q + k + v + SM90_BARRIER_BYTES + ranges

    def round_wide_kernel(self, dtype: str) -> tuple[str, int]:
        """(name, no shared memory) of thd_attn_round_wide_sm90."""
        return self._name("thd_attn_round_wide_sm90", ELEMENT_TYPES[dtype], self.head_dim), 0

    def backward_sm90_kernel(self, dtype: str, grad_dtype: str, ordered: bool) -> tuple[str, int]:
        """(name, bytes of shared memory) of the Hopper backward; grad_dtype is that of dk and dv."""
        kernel, constants, tile_bytes = self.backward_sm90.kernel(self.head_dim, self.v_head_dim, ordered)
        name = self._name(kernel, ELEMENT_TYPES[dtype], ELEMENT_TYPES[grad_dtype], self.head_dim, self.v_head_dim,
                          *constants)
        return name, tile_bytes + SM90_BARRIER_BYTES + SM90_RANGE_BYTES

    def round_kernel(self, dtype: str) -> tuple[str, int]:
        """(name, no shared memory) of thd_attn_round."""
        return self._name("thd_attn_round", ELEMENT_TYPES[dtype]), 0

    def delta_kernel(self, dtype: str) -> tuple[str, int]:
        """(name, no shared memory) of thd_attn_delta."""
        return self._name("thd_attn_delta", ELEMENT_TYPES[dtype], self.v_head_dim), 0

    def backward_kernel(self, dtype: str, grad_dtype: str, with_dq: bool, tiles: Backward) -> tuple[str, int]:
        """(name, bytes of shared memory) of thd_attn_bwd; grad_dtype is that of dk and dv."""
        name = self._name("thd_attn_bwd", ELEMENT_TYPES[dtype], ELEMENT_TYPES[grad_dtype], self.head_dim,
                          self.v_head_dim, tiles.tile_m, tiles.tile_n, tiles.split, tiles.stages,
                          str(with_dq).lower())
        stats = 4  # lse and delta of a query row, in 2-byte elements
        rows = tiles.tile_n * self._pair + tiles.stages * tiles.tile_m * (self._pair + stats)
        return name, 2 * (rows + tiles.tile_n * (tiles.tile_m + PAD))

    def dq_kernel(self, dtype: str) -> tuple[str, int]:
        """(name, bytes of shared memory) of thd_attn_bwd_dq."""
        name = self._name("thd_attn_bwd_dq", ELEMENT_TYPES[dtype], self.head_dim, self.v_head_dim, self.dq_tile_n,
                          self.dq_warps)
        return name, 2 * (16 * self.dq_warps + self.dq_tile_n) * self._pair

    def backward_for(self, shared_bytes: int) -> Backward:
        """The first choice of the backward that fits `shared_bytes` of shared memory per block."""
        return next(b for b in self.backward
                    if self.backward_kernel("bfloat16", "float32", True, b)[1] + STATIC_BYTES <= shared_bytes)

    def kernels(self, shared_bytes: int) -> list[tuple[str, int]]:
        """Every portable kernel of this head dim on a GPU with so much shared memory per block."""
        backward = self.backward_for(shared_bytes)
        return [
            kernel
            for dtype in ("float16", "bfloat16")
            for kernel in (
                self.forward_kernel(dtype),
                self.delta_kernel(dtype),
                self.round_kernel(dtype),
                self.dq_kernel(dtype),
                *(self.backward_kernel(dtype, grad, with_dq, backward)
                  for grad in (dtype, "float32") for with_dq in (True, False)),
            )
        ]

    def kernels_sm90(self) -> list[tuple[str, int]]:
        """Every Hopper kernel of this head dim."""
        orders = (False, True) if self.backward_sm90.has_order else (False,)
        rounds = not self.backward_sm90.has_order
        return [
            kernel
            for dtype in ("float16", "bfloat16")
            for kernel in (
                self.forward_sm90_kernel(dtype),
                (self.backward_sm90.shares_kernel, 0),
                *([self.round_wide_kernel(dtype)] if rounds else []),
                *(self.backward_sm90_kernel(dtype, grad, ordered) for grad in (dtype, "float32") for ordered in orders),
            )
        ]

    @property
    def _pair(self) -> int:
        """Elements of one row of keys and one of values."""
        return self.head_dim + self.v_head_dim + 2 * PAD

    @staticmethod
    def _name(kernel: str, *constants: str | int) -> str:
        return f"{kernel}<{', '.join(map(str, constants))}>"


TILES = {
    (t.head_dim, t.v_head_dim): t
    for t in (
        Tiles(64, 64, Forward(64, 4, 2), ForwardSm90(128, 3, 2, 3), (Backward(64, 128, 1, 2),),
              BackwardSm90(128, 2, 128, 64, 2, 64), 64, 8),
        Tiles(96, 96, Forward(48, 4, 2), ForwardSm90(112, 3, 1, 3),
              (Backward(64, 128, 1, 2), Backward(64, 128, 1, 1)),
              BackwardSm90(64, 2, 64, 96, 2, 80, together=4), 32, 8),
        Tiles(128, 128, Forward(48, 4, 2), ForwardSm90(128, 2, 1, 2, q_in_registers=True, together=1),
              (Backward(64, 128, 1, 2), Backward(64, 64, 1, 1)), BackwardSm90(64, 2, 64, 64, 2, 64), 16, 8),
        Tiles(192, 128, Forward(64, 4, 1), ForwardSm90(128, 2, 1, 2),
              (Backward(64, 64, 2, 2), Backward(32, 64, 2, 1)), BackwardSm90(64, 2, 32, 32, 4, 48, together=3), 16, 4),
        Tiles(192, 192, Forward(64, 4, 1), ForwardSm90(112, 2, 1, 2),
              (Backward(64, 64, 2, 2), Backward(32, 64, 2, 1)), BackwardWideSm90(3, 2), 16, 4),
        Tiles(256, 256, Forward(32, 4, 1), ForwardSm90(80, 2, 1, 2),
              (Backward(32, 64, 2, 2), Backward(32, 32, 2, 1)), BackwardWideSm90(2, 2), 16, 4),
    )
}

REORDER_KERNELS = {to_rank_order: f"thd_reorder<{str(to_rank_order).lower()}>" for to_rank_order in (False, True)}
PLAN_KERNELS = ("thd_plan_check", "thd_plan_dual_chunk", "thd_plan_queries", "thd_plan_keys", "thd_plan_tile_cost",
                "thd_plan_tile_order", "thd_plan_poison")
