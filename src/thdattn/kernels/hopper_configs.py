"""What a tile size of the Hopper attention kernels is; kernels/configs.py has the sizes of every head dim."""

from __future__ import annotations

from dataclasses import dataclass

from thdattn.kernels.instances import Kind


@dataclass(frozen=True, kw_only=True)
class ForwardSm90:
    """thd_attn_fwd_sm90: tile_n keys at a time; each of `consumers` warpgroups owns 64 query rows.

    q_stages query tiles and kv_stages tiles of keys and of values are loaded ahead. q_in_registers: queries are read
    from registers, where there are some left. lazy_row_max: the threads of a row compare their largest scores only
    where these are far above what came before. together: heads that are done one after another at each tile.
    capped_tile_n: as for Forward.
    split_kv: keys of a tile may be divided among thread blocks.
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
        """Keys at a time."""
        return (kind.caps and self.capped_tile_n) or self.tile_n

    @property
    def tile_m(self) -> int:
        """Query rows of a thread block."""
        return 64 * self.consumers

    @property
    def warps(self) -> int:
        """Warps that compute."""
        return 4 * self.consumers


@dataclass(frozen=True, kw_only=True)
class BackwardSm90:
    """thd_attn_bwd_sm90: 128 keys per thread block, tile_m query rows at a time, `stages` query tiles loaded ahead.

    The key side takes scores of `queries` of them at once, and dP of `dp_queries`; of capped_at_once where logits are
    capped, if these differ. in_registers: so many of both instead, where logits are not capped and dq is not added to
    what is there; that leaves registers for keys and values, and products then read shared memory for one operand.

    dq has pieces of panel_cols columns, and dq_stages buffers for pieces on their way; the warpgroup that computes them
    has query_registers registers per thread, the others share the rest. adding_registers: those where it adds dq to
    what is there, if they differ. together: as for ForwardSm90.
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
        """Queries whose scores, and queries whose dP, the key side takes at once."""
        if in_registers:
            return self.in_registers, self.in_registers
        return (caps and self.capped_at_once) or (self.queries, self.dp_queries)


@dataclass(frozen=True, kw_only=True)
class BackwardSharedDqSm90:
    """thd_attn_bwd_shared_dq_sm90: 128 keys per thread block, 64 query rows at a time.

    `stages` query tiles are loaded ahead, and scores are taken of `queries` rows at once. The rest as for BackwardSm90.
    """

    stages: int
    queries: int
    panel_cols: int
    capped_queries: int
    together: int = 2

    tile_m, tile_n, threads, blocks = 64, 128, 384, 1


@dataclass(frozen=True, kw_only=True)
class BackwardByGradientSm90:
    """thd_attn_bwd_by_gradient_sm90: 64 keys per thread block, 64 query rows at a time, dq added up in any order.

    q_stages tiles of queries, dout_stages tiles of their gradients and ds_stages of score gradients are in memory.
    blocks: 2, if two thread blocks are a cluster, which shares what it loads and brings shares of dq of 128 keys; then
    keys are read from registers. The warpgroups of keys, values and queries have so many registers per thread, and that
    of keys capped_shift more, which that of values lacks, where logits are capped. For the same bits on every run
    blocks are alone and dq has thd_attn_bwd_dq_sm90, dq_keys keys at a time, two tiles of which are loaded.
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
        """Keys of all blocks of a cluster."""
        return 64 * self.blocks
