"""Meaning of the tile sizes of the Hopper attention kernels. kernels/configs.py has the sizes for every head dim."""

from __future__ import annotations

from dataclasses import dataclass

from thdattn.kernels.instances import Kind


@dataclass(frozen=True, kw_only=True)
class ForwardSm90:
    """Tile sizes of thd_attn_fwd_sm90: tile_n keys at a time; each of `consumers` warpgroups owns 64 query rows.

    q_stages query tiles and kv_stages tiles of keys and of values are loaded ahead.

    q_in_registers: queries are read from registers, if enough are left.
    lazy_row_max: the threads of a row compare their largest scores only if these are far above earlier ones.
    together: heads that are computed one after another at each tile.
    capped_tile_n: keys at a time if logits are capped; 0: tile_n.
    split_kv: the keys of a query tile may be divided among thread blocks.
    """

    tile_n: int
    consumers: int
    q_stages: int
    kv_stages: int
    q_in_registers: bool = False
    lazy_row_max: bool = False
    together: int = 4
    capped_tile_n: int = 0
    split_kv: bool = True

    def keys(self, kind: Kind) -> int:
        """Return the keys at a time for a variant of the softmax."""
        return (kind.caps and self.capped_tile_n) or self.tile_n

    @property
    def tile_m(self) -> int:
        """Query rows of a thread block."""
        return 64 * self.consumers

    @property
    def warps(self) -> int:
        """Consumer warps."""
        return 4 * self.consumers


@dataclass(frozen=True, kw_only=True)
class BackwardSm90:
    """Tile sizes of thd_attn_bwd_sm90: 128 keys per thread block, tile_m query rows at a time.

    `stages` query tiles are loaded ahead; the kernel counts two. The key side computes scores of `queries` rows at
    once, and dP of `dp_queries`. All must divide tile_m into whole fragments.

    panel_cols: columns of a panel of dq, which must divide head_dim.
    dq_stages: buffers for panels on their way.
    query_registers: registers per thread of the warpgroup that computes dq; the others share the rest.
    adding_registers: query_registers if dq is added to a float32 array; 0: the same.
    capped_at_once: (queries, dp_queries) if logits are capped; None: the same.
    in_registers: queries and dp_queries if keys and values are read from registers, so that products read one operand
        from shared memory; 0: they are not. Not with capped logits, nor if dq is added to a float32 array.
    together: as for ForwardSm90.
    """

    tile_m: int
    stages: int
    queries: int
    dp_queries: int
    panel_cols: int
    dq_stages: int
    query_registers: int
    adding_registers: int = 0
    capped_at_once: tuple[int, int] | None = None
    in_registers: int = 0
    together: int = 2

    tile_n, threads, blocks = 128, 512, 1

    def at_once(self, caps: bool, in_registers: bool) -> tuple[int, int]:
        """Return (queries, dp_queries) of a variant: rows of which the key side computes scores, and dP, at once."""
        if in_registers:
            return self.in_registers, self.in_registers
        return (caps and self.capped_at_once) or (self.queries, self.dp_queries)


@dataclass(frozen=True, kw_only=True)
class BackwardSharedDqSm90:
    """Tile sizes of thd_attn_bwd_shared_dq_sm90: 128 keys per thread block, 64 query rows at a time.

    `stages` query tiles are loaded ahead; the kernel counts two. Scores are computed of `queries` rows at once, or of
    capped_queries if logits are capped. The rest is as for BackwardSm90.
    """

    stages: int
    queries: int
    panel_cols: int
    capped_queries: int
    together: int = 2

    tile_m, tile_n, threads, blocks = 64, 128, 384, 1


@dataclass(frozen=True, kw_only=True)
class BackwardByGradientSm90:
    """Tile sizes of thd_attn_bwd_by_gradient_sm90: 64 keys per thread block, 64 query rows at a time.

    Shared memory holds q_stages tiles of queries, dout_stages tiles of their gradients and ds_stages tiles of score
    gradients. Partial sums of dq are added in any order. For the same bits on every run, thd_attn_bwd_dq_sm90 computes
    dq instead, with dq_keys keys at a time, and blocks form no cluster.

    key_registers, value_registers, query_registers: registers per thread of the three warpgroups.
    capped_shift: registers that the value warpgroup gives to the key warpgroup if logits are capped.
    blocks: 2 if two thread blocks form a cluster, which shares loads and adds partial sums of dq of 128 keys. Keys are
        then read from registers.
    """

    q_stages: int
    dout_stages: int
    ds_stages: int
    key_registers: int
    value_registers: int
    dq_keys: int
    query_registers: int = 64
    capped_shift: int = 0
    blocks: int = 1

    tile_m, threads, together = 64, 512, 2

    @property
    def tile_n(self) -> int:
        """Keys of all thread blocks of a cluster."""
        return 64 * self.blocks
