"""Tile sizes of the attention kernels per head dim: the table that a new head dim or a new measurement changes.

Numbers are compile-time constants of the kernels. Registers (no kernel may spill) and shared memory bound them.
tools/spills.py prints both for a candidate. Each class of tile sizes has a method `kernel`, which returns the kernel
with these sizes. It computes the bytes of shared memory that the structs of the kernel (ForwardShared and so on) take.
The kernel gets that number as a constant, and the compiler compares it with the struct.

Arguments of these methods:
    dims: (head_dim, v_head_dim).
    dtype: of the inputs, "float16" or "bfloat16".
    out_dtype, dq_dtype: dtype, or "float32", with which the result is merged with out or added to dq.
    grad_dtype: dtype of dk and dv.
    caps: logits are capped.
    trees: the instance for packs with prefix trees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from thdattn.kernels.instances import PLAIN, Instance, Kind, instance

PAD = 8  # elements after every row of a portable tile, kPad of kernels/portable/common.cuh
RESERVED_BYTES = 1024  # of shared memory, for every thread block on a multiprocessor
STATIC_BYTES = 2304  # most static shared memory that a kernel declares beside its tiles
SLAB = 64  # columns of a slab of a Hopper tile, kSlab of kernels/hopper/common.cuh: 128 bytes, the widest swizzle
MAX_KV_SPLITS = 32  # of the keys of a query tile, kMaxKvSplits of kernels/split_kv.cuh
TREE_GROUP, BEHIND_KEYS = 64, 256  # kTreeGroup and kBehindKeys of kernels/trees.cuh
STATS_ROWS = 128  # the backward pads its numbers per query row to a multiple of this and of tile_m

Dims = tuple[int, int]


def slab_of(columns: int) -> int:
    """Return the columns of a slab of a Hopper tile whose rows have so many: slab_of of kernels/hopper/common.cuh."""
    return SLAB // 2 if columns % SLAB else SLAB


def lanes_of(columns: int) -> int:
    """Return how many lanes divide a row, 16 bytes each: lanes_of of kernels/common.cuh."""
    return 8 if columns <= 64 else 16 if columns <= 128 else 32


def _slabs(rows: int, *widths: int) -> int:
    """Return the bytes of Hopper tiles of so many rows of 16-bit elements, one tile for each width."""
    return 2 * rows * sum(widths)


def _pair(dims: Dims) -> int:
    """Return the elements of one row of keys and one of values in portable tiles."""
    return sum(dims) + 2 * PAD


# ------------------------------------------------------------------------------------------------ portable kernels


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Keys that a forward reads at a time: tile_n, or capped_tile_n if logits are capped; 0: tile_n."""

    tile_n: int
    capped_tile_n: int = 0

    def keys(self, kind: Kind) -> int:
        """Return the keys at a time for a variant of the softmax."""
        return (kind.caps and self.capped_tile_n) or self.tile_n


@dataclass(frozen=True, kw_only=True)
class Forward(Keys):
    """Tile sizes of thd_attn_fwd; each warp owns `fragments` (1 or 2) times 16 query rows.

    `stages` (1 or 2) tiles of keys and of values are in shared memory. split_kv: as for ForwardSm90.
    """

    warps: int
    fragments: int
    stages: int = 1
    split_kv: bool = True

    @property
    def tile_m(self) -> int:
        """Query rows of a thread block."""
        return 16 * self.warps * self.fragments

    @property
    def per_multiprocessor(self) -> int:
        """Thread blocks that share a multiprocessor, for which the kernel limits its registers."""
        return 8 // self.warps

    def kernel(
        self, dims: Dims, dtype: str, out_dtype: str, kind: Kind = PLAIN, split_kv: bool = False, trees: bool = False
    ) -> Instance:
        """Return the forward. With trees it has one stage, as registers are short.

        split_kv: the keys of a query tile may be divided among thread blocks; not with trees.
        """
        tile_n, stages = self.keys(kind), 1 if trees else self.stages
        rows = self.tile_m * (dims[0] + PAD) + stages * tile_n * _pair(dims)
        return instance("thd_attn_fwd", dtype, out_dtype, *kind, *dims, tile_n, self.warps, self.fragments, stages,
                        split_kv, shared_bytes=2 * rows, trees=trees)


@dataclass(frozen=True, kw_only=True)
class Backward:
    """Tile sizes of thd_attn_bwd: tile_n keys per thread block, tile_m query rows at a time.

    `stages` (1 or 2) query tiles, with their score gradients, are in shared memory. `column_warps` warps share
    `fragments` (1 or 2) times 16 keys: they divide the queries of the scores, and the columns of dk and dv.
    """

    tile_m: int
    tile_n: int
    column_warps: int
    stages: int
    fragments: int

    @property
    def warps(self) -> int:
        """Warps of a thread block."""
        return self.tile_n // (16 * self.fragments) * self.column_warps

    def kernel(self, dims: Dims, dtype: str, grad_dtype: str, with_dq: bool, caps: bool = False) -> Instance:
        """Return the backward for dk and dv, and with_dq also for dq's accumulators."""
        stats = 4  # -lse and -delta of a query row, in 2-byte elements
        rows = self.tile_n * _pair(dims) + self.stages * self.tile_m * (_pair(dims) + stats)
        return instance("thd_attn_bwd", dtype, grad_dtype, caps, *dims, self.tile_m, self.tile_n, self.column_warps,
                        self.fragments, self.stages, with_dq,
                        shared_bytes=2 * (rows + (1 + self.stages) * self.tile_n * self.tile_m))


@dataclass(frozen=True, kw_only=True)
class BackwardDq:
    """Tile sizes of thd_attn_bwd_dq: tile_n keys at a time; each warp owns 16 query rows."""

    tile_n: int
    warps: int

    @property
    def tile_m(self) -> int:
        """Query rows of a thread block."""
        return 16 * self.warps

    def kernel(self, dims: Dims, dtype: str, dq_dtype: str, caps: bool = False, trees: bool = False) -> Instance:
        """Return the backward for dq alone, with the same bits on every run."""
        return instance("thd_attn_bwd_dq", dtype, dq_dtype, caps, *dims, self.tile_n, self.warps,
                        shared_bytes=2 * (self.tile_m + self.tile_n) * _pair(dims), trees=trees)


@dataclass(frozen=True, kw_only=True)
class Decode:
    """Tile sizes of thd_attn_decode: each of `warps` loads 16 keys and values at a time, `stages` deep.

    per_multiprocessor: thread blocks per multiprocessor into which a long cache is split.
    """

    warps: int
    stages: int
    per_multiprocessor: int

    max_splits = 128  # kMaxSplits of kernels/portable/decode.cu: KV splits of a range, which one thread block merges
    heads = 16  # query heads of a thread block

    @property
    def step(self) -> int:
        """Keys that a thread block processes at a time."""
        return 16 * self.warps

    def splits(self, multiprocessors: int, blocks: int, longest_range: int) -> int:
        """Return the number of KV splits with which `blocks` thread blocks per split occupy the GPU."""
        wanted = self.per_multiprocessor * multiprocessors // blocks
        return max(1, min(wanted, -(-longest_range // self.step), self.max_splits))

    def kernel(self, dims: Dims, dtype: str, kind: Kind = PLAIN) -> Instance:
        """Return the decode kernel."""
        tiles = 2 * 16 * (dims[0] + PAD + self.warps * self.stages * _pair(dims))
        partials = 4 * 16 * self.warps * (dims[1] + PAD) + 8 * self.heads * self.max_splits
        return instance("thd_attn_decode", dtype, *kind, *dims, self.warps, self.stages,
                        shared_bytes=max(tiles, partials))


# ------------------------------------------------------------------------------------------------ Hopper kernels


@dataclass(frozen=True, kw_only=True)
class ForwardSm90(Keys):
    """Tile sizes of thd_attn_fwd_sm90; each of `consumers` warpgroups owns 64 query rows.

    q_stages query tiles and kv_stages tiles of keys and of values are loaded ahead.

    q_in_registers: queries are read from registers, if enough are left.
    lazy_row_max: the threads of a row compare their largest scores only if these are far above earlier ones.
    together: heads that are computed one after another at each tile.
    split_kv: the keys of a query tile may be divided among thread blocks.
    """

    consumers: int
    q_stages: int
    kv_stages: int
    q_in_registers: bool = False
    lazy_row_max: bool = False
    together: int = 4
    split_kv: bool = True

    per_multiprocessor = 1

    @property
    def tile_m(self) -> int:
        """Query rows of a thread block."""
        return 64 * self.consumers

    @property
    def warps(self) -> int:
        """Consumer warps."""
        return 4 * self.consumers

    def kernel(
        self, dims: Dims, dtype: str, out_dtype: str, kind: Kind = PLAIN, split_kv: bool = False, trees: bool = False
    ) -> Instance:
        """Return the forward. With trees, the producer needs registers that queries of wide heads would take.

        split_kv: the keys of a query tile may be divided among thread blocks; not with trees.
        """
        tile_n, q_stages, kv_stages = self.keys(kind), self.q_stages, self.kv_stages
        tiles = _slabs(q_stages * self.tile_m, dims[0]) + _slabs(kv_stages * tile_n, *dims)
        barriers = 8 * (2 * q_stages + 4 * kv_stages)
        told = 2 * 16 * q_stages + 8 * kv_stages  # QueryTile and KeyTile
        shared = tiles + barriers + told + 8 * 2 * q_stages * self.tile_m  # ranges
        if trees:
            shared = -(-shared // 16) * 16 + 4 * kv_stages * tile_n  # ends
        return instance(
            "thd_attn_fwd_sm90", dtype, out_dtype, *kind, *dims, tile_n, self.consumers, q_stages, kv_stages,
            self.q_in_registers and not (trees and dims[0] > 128), self.lazy_row_max, split_kv,
            shared_bytes=shared, trees=trees)

    def wgmma_columns(self, dims: Dims) -> set[int]:
        """Return the columns of accumulators of wgmma instructions."""
        return {self.tile_n, self.capped_tile_n or self.tile_n, dims[1]}


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
    dq: ClassVar[None] = None  # deterministic, thread blocks add to dq in order

    def kernel(
        self, dims: Dims, dtype: str, dq_dtype: str, grad_dtype: str, deterministic: bool, caps: bool = False,
        trees: bool = False,
    ) -> Instance:
        """Return the backward. trees: if deterministic."""
        adds = dq_dtype == "float32"
        registers = (adds and self.adding_registers) or self.query_registers
        in_registers = self.in_registers > 0 and not adds and not caps
        queries, dp_queries = self._at_once(caps, in_registers)
        shared = (_bytes_beside_dq(self, dims, self.dq_stages) + self.stages * _slabs(self.tile_n, self.tile_m)
                  + 8 * 4 * self.stages)  # barriers
        return instance("thd_attn_bwd_sm90", dtype, dq_dtype, grad_dtype, caps, *dims, self.tile_m, self.stages,
                        queries, dp_queries, in_registers, self.panel_cols, self.dq_stages, registers, deterministic,
                        shared_bytes=shared, trees=trees)

    def _at_once(self, caps: bool, in_registers: bool) -> tuple[int, int]:
        """Return (queries, dp_queries) of a variant: rows of which the key side computes scores, and dP, at once."""
        if in_registers:
            return self.in_registers, self.in_registers
        return (caps and self.capped_at_once) or (self.queries, self.dp_queries)

    def wgmma_columns(self, dims: Dims) -> set[int]:
        """Return the columns of accumulators of wgmma instructions."""
        queries = {n for caps in (False, True) for in_registers in {False, self.in_registers > 0}
                   for n in self._at_once(caps, in_registers)}
        return {*queries, self.panel_cols, *dims}


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
    dq: ClassVar[None] = None

    def kernel(
        self, dims: Dims, dtype: str, dq_dtype: str, grad_dtype: str, deterministic: bool, caps: bool = False,
        trees: bool = False,
    ) -> Instance:
        """Return the backward. trees: if deterministic."""
        shared = (_bytes_beside_dq(self, dims, dims[0] // self.panel_cols) + _slabs(self.tile_n, self.tile_m)
                  + 8 * (2 * self.stages + 2))  # barriers
        return instance("thd_attn_bwd_shared_dq_sm90", dtype, dq_dtype, grad_dtype, caps, *dims, self.stages,
                        self.capped_queries if caps else self.queries, self.panel_cols, deterministic,
                        shared_bytes=shared, trees=trees)

    def wgmma_columns(self, dims: Dims) -> set[int]:
        """Return the columns of accumulators of wgmma instructions."""
        return {self.queries, self.capped_queries, self.panel_cols, 32, *dims}


def _bytes_beside_dq(b: BackwardSm90 | BackwardSharedDqSm90, dims: Dims, dq_stages: int) -> int:
    """Return the bytes of shared memory that both kernels have, with so many panels of dq."""
    tiles, stats = _slabs(b.tile_n + b.stages * b.tile_m, *dims), 8 * b.stages * b.tile_m
    panels, barriers = dq_stages * 4 * 64 * b.panel_cols, 8 * (8 + 3 * dq_stages)
    told = -(-(2 * 12 + 4 * dq_stages + 2 * 16 * b.stages) // 8) * 8  # Claim, Partial and Step
    return tiles + panels + stats + barriers + told + 8 * (b.tile_n + 8)  # ranges


@dataclass(frozen=True, kw_only=True)
class BackwardDqSm90:
    """Tile sizes of thd_attn_bwd_dq_sm90: tile_n keys at a time, and the query rows of the forward beside it."""

    tile_n: int

    tile_m, threads = 128, 384

    def kernel(self, dims: Dims, dtype: str, dq_dtype: str, caps: bool = False, trees: bool = False) -> Instance:
        """Return the backward for dq alone, with the same bits on every run."""
        return instance("thd_attn_bwd_dq_sm90", dtype, dq_dtype, caps, *dims, self.tile_n, 2,
                        shared_bytes=_slabs(self.tile_m + 2 * self.tile_n, *dims) + 8 * 6 + 16 * 2, trees=trees)


@dataclass(frozen=True, kw_only=True)
class BackwardByGradientSm90:
    """Tile sizes of thd_attn_bwd_by_gradient_sm90: 64 keys per thread block, 64 query rows at a time.

    Shared memory holds q_stages tiles of queries, dout_stages tiles of their gradients and ds_stages tiles of score
    gradients. Partial sums of dq are added in any order. For the same bits on every run, thd_attn_bwd_dq_sm90 computes
    dq instead, with the sizes `dq`, and blocks form no cluster.

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
    dq: BackwardDqSm90
    query_registers: int = 64
    capped_shift: int = 0
    blocks: int = 1

    tile_m, threads, together = 64, 512, 2

    @property
    def tile_n(self) -> int:
        """Keys of all thread blocks of a cluster."""
        return 64 * self.blocks

    def kernel(
        self, dims: Dims, dtype: str, dq_dtype: str, grad_dtype: str, deterministic: bool, caps: bool = False,
        trees: bool = False,
    ) -> Instance:
        """Return the backward for dk and dv, and unless deterministic for dq or its accumulators; for trees too."""
        cluster, loaded = self.blocks == 2 and not deterministic, self.q_stages + self.dout_stages
        keys = 4 * _slabs(64, 64) if cluster else _slabs(64, dims[0])
        tiles = (keys + _slabs(64 * self.q_stages, dims[0]) + _slabs(64 * (1 + self.dout_stages), dims[1])
                 + self.ds_stages * (2 + cluster) * _slabs(64, 64))
        stats, barriers, ranges = 4 * 64 * loaded, 8 * (2 + 2 * loaded + 3 * self.ds_stages), 8 * (2 * 64 + 8)
        steps, exchange = 16 * loaded + -(-20 * self.ds_stages // 8) * 8, 8 * (self.ds_stages + 3) if cluster else 0
        shift = self.capped_shift if caps else 0
        return instance("thd_attn_bwd_by_gradient_sm90", dtype, dtype if deterministic else dq_dtype, grad_dtype, caps,
                        *dims, self.q_stages, self.dout_stages, self.ds_stages, not deterministic, self.blocks,
                        self.key_registers + shift, self.value_registers - shift, self.query_registers,
                        shared_bytes=tiles + stats + barriers + steps + ranges + exchange)

    def wgmma_columns(self, dims: Dims) -> set[int]:
        """Return the columns of accumulators of wgmma instructions: 256 take two, see kMostCols of backward_common.cuh.
        """
        panel_cols = dims[0] // 2 if self.blocks == 2 else SLAB  # each thread block of a cluster computes one panel
        return {64, self.dq.tile_n, panel_cols, *(128 if dim == 256 else dim for dim in dims)}


# ------------------------------------------------------------------------------------------------ the table


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """All tile sizes of one head dim. Of `backward`, the first choice that fits the GPU's shared memory is used. Of
    `forward` it is the first with which as many thread blocks share a multiprocessor as its registers allow, or else
    the last. On GPUs of compute capability 10.x, forward_sm100 and backward_sm100 replace those of other GPUs, if there
    are any.
    """

    head_dim: int
    v_head_dim: int
    forward: tuple[Forward, ...]
    backward: tuple[Backward, ...]
    backward_dq: BackwardDq
    decode: Decode
    forward_sm90: ForwardSm90
    backward_sm90: BackwardSm90 | BackwardSharedDqSm90 | BackwardByGradientSm90
    forward_sm100: tuple[Forward, ...] = ()
    backward_sm100: tuple[Backward, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError if warps of the portable backward would not have whole fragments of 16 columns."""
        for b in self.backward:
            of_dq = self.head_dim * b.tile_m // (16 * b.warps)  # columns of dq of a warp, of 16 rows
            columns = 16 * b.column_warps
            left = {"head_dim": self.head_dim % columns, "v_head_dim": self.v_head_dim % columns,
                    "queries": b.tile_m % columns,
                    "dq": of_dq % 16 or 16 * b.warps * of_dq != self.head_dim * b.tile_m}
            wrong = ", ".join(name for name, columns in left.items() if columns)
            if wrong:
                raise ValueError(
                    f"{b} of head dims {self.dims} leaves warps parts of fragments of {wrong}, wanted multiples of "
                    f"16 columns for each warp; choose another tile_m, tile_n or column_warps"
                )

    @property
    def dims(self) -> Dims:
        """Return (head_dim, v_head_dim)."""
        return self.head_dim, self.v_head_dim

    def on(self, arch: str) -> Tiles:
        """Return the row of a GPU, by NVRTC's name of its architecture."""
        if not arch.startswith("sm_10"):
            return self
        return replace(self, forward=self.forward_sm100 or self.forward, backward=self.backward_sm100 or self.backward)

    def forward_for(self, shared_bytes: int) -> Forward:
        """Return the choice of the forward for a GPU with `shared_bytes` of shared memory per thread block.

        A multiprocessor has RESERVED_BYTES more, and reserves as many for every thread block.
        """
        *choices, last = self.forward
        for choice in choices:
            need = choice.kernel(self.dims, "bfloat16", "bfloat16").shared_bytes + STATIC_BYTES + RESERVED_BYTES
            if choice.per_multiprocessor * need <= shared_bytes + RESERVED_BYTES:
                return choice
        return last

    def backward_for(self, shared_bytes: int) -> Backward:
        """Return the first choice of the backward that fits `shared_bytes` of shared memory per thread block.

        Raises:
            ValueError: none fits.
        """
        needs = {b: b.kernel(self.dims, "bfloat16", "float32", True).shared_bytes + STATIC_BYTES
                 for b in self.backward}
        for choice, need in needs.items():
            if need <= shared_bytes:
                return choice
        raise ValueError(
            f"a thread block has {shared_bytes} bytes of shared memory, the backward of head dims {self.dims} needs "
            f"{min(needs.values())}; add a choice with smaller tiles"
        )

    @property
    def wgmma_columns(self) -> set[int]:
        """Columns of the accumulators of the Hopper kernels' wgmma instructions."""
        return self.forward_sm90.wgmma_columns(self.dims) | self.backward_sm90.wgmma_columns(self.dims)


_BACKWARD_OF_192 = (Backward(tile_m=64, tile_n=96, column_warps=4, fragments=2, stages=2),
                    Backward(tile_m=64, tile_n=64, column_warps=4, fragments=2, stages=2),
                    Backward(tile_m=64, tile_n=64, column_warps=4, fragments=2, stages=1),
                    Backward(tile_m=32, tile_n=64, column_warps=2, fragments=1, stages=1))

# A comment says what bounds a number: more would spill (as ptxas reports) or not fit the 227 KB of shared memory of
# Hopper. Numbers without a bound were chosen by timing on Hopper. Portable forwards and backwards have choices for GPUs
# with 227, 163 and 99 KB. Those for the last two are not timed: they follow from registers and shared memory.
TILES = {
    (t.head_dim, t.v_head_dim): t
    for t in (
        Tiles(
            head_dim=64, v_head_dim=64,
            forward=(Forward(tile_n=96, warps=4, fragments=2, stages=2),
                     Forward(tile_n=96, warps=4, fragments=2)),  # 112 keys leave one thread block per 99 KB
            backward=(Backward(tile_m=128, tile_n=128, column_warps=2, fragments=2, stages=2),
                      Backward(tile_m=64, tile_n=128, column_warps=2, fragments=2, stages=2),
                      Backward(tile_m=64, tile_n=128, column_warps=2, fragments=2, stages=1)),
            backward_sm100=(Backward(tile_m=32, tile_n=128, column_warps=1, fragments=2, stages=2),),  # 128 rows spill
            backward_dq=BackwardDq(tile_n=64, warps=8),
            decode=Decode(warps=4, stages=3, per_multiprocessor=4),
            forward_sm90=ForwardSm90(
                tile_n=128, consumers=3,  # 144 keys spill
                q_stages=2, kv_stages=3, lazy_row_max=True,
            ),
            backward_sm90=BackwardSm90(
                tile_m=128, stages=2, queries=128, dp_queries=64,  # a third stage does not fit
                panel_cols=64, dq_stages=2,
                query_registers=64,  # 48 spill
                capped_at_once=(64, 64),  # 128 spill
                in_registers=64,  # 128 spill
            ),
        ),
        Tiles(
            head_dim=96, v_head_dim=96,
            forward=(Forward(tile_n=64, warps=4, fragments=2, stages=2),
                     Forward(tile_n=48, warps=4, fragments=2)),  # 64 keys leave one thread block per 99 KB
            backward=(Backward(tile_m=64, tile_n=128, column_warps=2, fragments=2, stages=2),
                      Backward(tile_m=64, tile_n=64, column_warps=2, fragments=2, stages=1)),
            backward_dq=BackwardDq(tile_n=32, warps=8),
            decode=Decode(warps=4, stages=2, per_multiprocessor=4),
            forward_sm90=ForwardSm90(
                tile_n=112, consumers=3, q_stages=1, kv_stages=3,  # 128 keys spill
                capped_tile_n=96,  # 112 spill
            ),
            backward_sm90=BackwardSm90(
                tile_m=64, stages=2, queries=64, dp_queries=64,  # 128 queries do not fit
                panel_cols=96, dq_stages=2,
                query_registers=80, adding_registers=96,  # 64 spill, and 80 if dq is added
                capped_at_once=(64, 32),  # dP of 64 spills
                in_registers=32,  # 64 spill
                together=4,
            ),
        ),
        Tiles(
            head_dim=128, v_head_dim=128,
            forward=(Forward(tile_n=64, warps=4, fragments=2, capped_tile_n=32),),
            forward_sm100=(Forward(tile_n=48, warps=4, fragments=2, capped_tile_n=32),),  # 64 keys spill
            backward=(Backward(tile_m=64, tile_n=128, column_warps=2, fragments=2, stages=2),
                      Backward(tile_m=64, tile_n=128, column_warps=2, fragments=2, stages=1),
                      Backward(tile_m=64, tile_n=64, column_warps=4, fragments=2, stages=1)),
            backward_dq=BackwardDq(tile_n=16, warps=8),
            decode=Decode(warps=4, stages=2, per_multiprocessor=3),
            forward_sm90=ForwardSm90(
                tile_n=128, consumers=2, q_stages=1, kv_stages=2,  # 3 consumers spill
                q_in_registers=True, together=1,
            ),
            backward_sm90=BackwardSm90(
                tile_m=64, stages=2, queries=64, dp_queries=64,  # 128 queries, or a third stage, do not fit
                panel_cols=64, dq_stages=2,  # 128 columns spill
                query_registers=64,  # 48 spill, and 80 leave too few to the key side, whose products then wait
                capped_at_once=(64, 32),  # dP of 64 spills
            ),
        ),
        Tiles(
            head_dim=192, v_head_dim=128,
            forward=(Forward(tile_n=96, warps=4, fragments=1),  # two fragments spill
                     Forward(tile_n=64, warps=4, fragments=1)),
            backward=_BACKWARD_OF_192, backward_sm100=_BACKWARD_OF_192[1:],  # 96 keys spill
            backward_dq=BackwardDq(tile_n=16, warps=4),
            decode=Decode(warps=4, stages=2, per_multiprocessor=2),
            forward_sm90=ForwardSm90(
                tile_n=128, consumers=2, q_stages=1, kv_stages=2,  # 144 keys, or another stage, do not fit
                q_in_registers=True,
            ),
            backward_sm90=BackwardSharedDqSm90(
                stages=2, queries=64, panel_cols=64,  # another stage does not fit
                capped_queries=32,  # 64 spill
                together=3,
            ),
        ),
        Tiles(
            head_dim=192, v_head_dim=192,
            forward=(Forward(tile_n=96, warps=4, fragments=1),  # two fragments spill
                     Forward(tile_n=64, warps=4, fragments=1)),
            backward=_BACKWARD_OF_192, backward_sm100=_BACKWARD_OF_192[1:],  # 96 keys spill
            backward_dq=BackwardDq(tile_n=16, warps=4),
            decode=Decode(warps=2, stages=3, per_multiprocessor=2),
            forward_sm90=ForwardSm90(
                tile_n=112, consumers=2, q_stages=1, kv_stages=2,  # 128 keys, or another stage, do not fit
            ),
            backward_sm90=BackwardByGradientSm90(
                q_stages=3, dout_stages=2, ds_stages=2, blocks=2,
                key_registers=208, value_registers=192, query_registers=80,  # 8 fewer of any spill
                dq=BackwardDqSm90(tile_n=64),
            ),
        ),
        Tiles(
            head_dim=256, v_head_dim=256,
            forward=(Forward(tile_n=64, warps=4, fragments=1,  # two fragments spill
                             split_kv=False),  # merging the splits spills
                     Forward(tile_n=64, warps=8, fragments=1),
                     Forward(tile_n=32, warps=4, fragments=1)),
            backward=(Backward(tile_m=64, tile_n=64, column_warps=4, fragments=2, stages=2),
                      Backward(tile_m=64, tile_n=64, column_warps=4, fragments=2, stages=1),
                      Backward(tile_m=32, tile_n=32, column_warps=2, fragments=1, stages=1)),
            backward_dq=BackwardDq(tile_n=16, warps=4),
            decode=Decode(warps=2, stages=2, per_multiprocessor=3),
            forward_sm90=ForwardSm90(
                tile_n=80, consumers=2, q_stages=1, kv_stages=2,  # 96 keys, or another stage, do not fit
                capped_tile_n=64,  # 80 spill
                split_kv=False,  # merging the splits spills
            ),
            backward_sm90=BackwardByGradientSm90(
                q_stages=2, dout_stages=2, ds_stages=2,  # another stage, or a cluster, does not fit
                key_registers=192, value_registers=232,  # 176 for keys spill, and 224 for values
                capped_shift=8,  # 0 spills
                dq=BackwardDqSm90(tile_n=48),  # 64 do not fit
            ),
        ),
    )
}
WGMMA_COLUMNS = sorted({columns for t in TILES.values() for columns in t.wgmma_columns})
