"""Tile sizes of the attention kernels per head dim: the table that a new head dim or a new measurement changes.

Numbers are compile-time constants of the kernels. Registers (no kernel may spill) and shared memory bound them.
tools/spills.py prints both for a candidate. The methods of Tiles are named after the kernels that they instantiate.
They compute the bytes of shared memory that the structs of the kernels (ForwardShared and so on) take. The kernel gets
that number as a constant, and the compiler compares it with the struct.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from thdattn.kernels.instances import PLAIN, Instance, Kind, instance

PAD = 8  # elements after every row of a portable tile, kPad of kernels/portable/common.cuh
RESERVED_BYTES = 1024  # of shared memory, for every thread block on a multiprocessor
STATIC_BYTES = 2304  # most static shared memory that a kernel declares beside its tiles
SLAB = 64  # columns of a slab of a Hopper tile, kSlab of kernels/hopper/common.cuh: 128 bytes, the widest swizzle
MAX_KV_SPLITS = 32  # of the keys of a query tile, kMaxKvSplits of kernels/split_kv.cuh
DQ_ROWS = 128  # query rows of thd_attn_bwd_dq_sm90, which are those of the forward beside it
TREE_GROUP, BEHIND_KEYS = 64, 256  # kTreeGroup and kBehindKeys of kernels/trees.cuh
STATS_ROWS = 128  # the backward pads its numbers per query row to a multiple of this and of tile_m


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


@dataclass(frozen=True, kw_only=True)
class BackwardDq:
    """Tile sizes of thd_attn_bwd_dq: tile_n keys at a time; each warp owns 16 query rows."""

    tile_n: int
    warps: int

    @property
    def tile_m(self) -> int:
        """Query rows of a thread block."""
        return 16 * self.warps


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

    def on(self, arch: str) -> Tiles:
        """Return the row of a GPU, by NVRTC's name of its architecture."""
        if not arch.startswith("sm_10"):
            return self
        return replace(self, forward=self.forward_sm100 or self.forward, backward=self.backward_sm100 or self.backward)

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
                    f"{b} of head dims {self._dims} leaves warps parts of fragments of {wrong}, wanted multiples of "
                    f"16 columns for each warp; choose another tile_m, tile_n or column_warps"
                )

    # ---------------------------------------------------------------------------------------- portable kernels

    def thd_attn_fwd(
        self, dtype: str, out_dtype: str, tiles: Forward, kind: Kind = PLAIN, split_kv: bool = False,
        trees: bool = False,
    ) -> Instance:
        """Return the forward for "float16" or "bfloat16". out_dtype "float32" merges its result with that in out.

        split_kv: the keys of a query tile may be divided among thread blocks; not with trees.
        trees: here and below, the instance for packs with prefix trees. It has one stage, as registers are short.
        """
        t, tile_n, stages = tiles, tiles.keys(kind), 1 if trees else tiles.stages
        rows = t.tile_m * (self.head_dim + PAD) + stages * tile_n * self._pair
        return instance("thd_attn_fwd", dtype, out_dtype, *kind, *self._dims, tile_n, t.warps, t.fragments, stages,
                        split_kv, shared_bytes=2 * rows, trees=trees)

    def thd_attn_split_kv(self, forward: Forward | ForwardSm90) -> Instance:
        """Return the kernel that chooses the KV splits of query tiles of `forward`, on every GPU."""
        return instance("thd_attn_split_kv", forward.tile_m, forward.tile_n)

    def partial_floats(self, forward: Forward | ForwardSm90) -> int:
        """Return the floats of the partial result of a KV split and one head, kPartialQuads of kernels/split_kv.cuh."""
        return forward.tile_m * (self.v_head_dim + 4)

    def thd_attn_delta(self, dtype: str) -> Instance:
        """Return the kernel of -lse and -delta of every query row, with which every backward begins."""
        return instance("thd_attn_delta", dtype, self.v_head_dim)

    def thd_attn_bwd(
        self, dtype: str, grad_dtype: str, with_dq: bool, tiles: Backward, caps: bool = False
    ) -> Instance:
        """Return the backward for dk and dv in grad_dtype, and with_dq also for dq's accumulators."""
        t = tiles
        stats = 4  # -lse and -delta of a query row, in 2-byte elements
        rows = t.tile_n * self._pair + t.stages * t.tile_m * (self._pair + stats)
        return instance("thd_attn_bwd", dtype, grad_dtype, caps, *self._dims, t.tile_m, t.tile_n, t.column_warps,
                        t.fragments, t.stages, with_dq,
                        shared_bytes=2 * (rows + (1 + t.stages) * t.tile_n * t.tile_m))

    def thd_attn_bwd_dq(self, dtype: str, dq_dtype: str, caps: bool = False, trees: bool = False) -> Instance:
        """Return the backward for dq alone, with the same bits on every run. dq_dtype "float32" adds to dq."""
        t = self.backward_dq
        return instance("thd_attn_bwd_dq", dtype, dq_dtype, caps, *self._dims, t.tile_n, t.warps,
                        shared_bytes=2 * (t.tile_m + t.tile_n) * self._pair, trees=trees)

    def thd_attn_round_dq(self, dq_dtype: str) -> Instance:
        """Return the kernel that rounds dq's accumulators."""
        return instance("thd_attn_round_dq", dq_dtype)

    def thd_attn_decode(self, dtype: str, kind: Kind = PLAIN) -> Instance:
        """Return the decode kernel for "float16" or "bfloat16"."""
        d = self.decode
        tiles = 2 * 16 * (self.head_dim + PAD + d.warps * d.stages * self._pair)
        partials = 4 * 16 * d.warps * (self.v_head_dim + PAD) + 8 * d.heads * d.max_splits
        return instance("thd_attn_decode", dtype, *kind, *self._dims, d.warps, d.stages,
                        shared_bytes=max(tiles, partials))

    def forward_for(self, shared_bytes: int) -> Forward:
        """Return the choice of the forward for a GPU with `shared_bytes` of shared memory per thread block.

        A multiprocessor has RESERVED_BYTES more, and reserves as many for every thread block.
        """
        *choices, last = self.forward
        for choice in choices:
            need = self.thd_attn_fwd("bfloat16", "bfloat16", choice).shared_bytes + STATIC_BYTES + RESERVED_BYTES
            if choice.per_multiprocessor * need <= shared_bytes + RESERVED_BYTES:
                return choice
        return last

    def backward_for(self, shared_bytes: int) -> Backward:
        """Return the first choice of the backward that fits `shared_bytes` of shared memory per thread block.

        Raises:
            ValueError: none fits.
        """
        needs = {b: self.thd_attn_bwd("bfloat16", "float32", True, b).shared_bytes + STATIC_BYTES
                 for b in self.backward}
        for choice, need in needs.items():
            if need <= shared_bytes:
                return choice
        raise ValueError(
            f"a thread block has {shared_bytes} bytes of shared memory, the backward of head dims {self._dims} needs "
            f"{min(needs.values())}; add a choice with smaller tiles"
        )

    def portable_kernels(self, shared_bytes: int) -> list[Instance]:
        """Return the portable kernels of this head dim for a GPU with `shared_bytes` per thread block."""
        forward, backward = self.forward_for(shared_bytes), self.backward_for(shared_bytes)
        of_splits = [self.thd_attn_split_kv(forward)] if forward.split_kv else []
        return of_splits + [
            kernel
            for dtype in ("float16", "bfloat16")
            for kernel in (
                *(self.thd_attn_fwd(dtype, out, forward, trees=trees)
                  for trees in (False, True) for out in (dtype, "float32")),
                *(self.thd_attn_fwd(dtype, dtype, forward, split_kv=True) for _ in of_splits),
                self.thd_attn_delta(dtype),
                *(self.thd_attn_bwd(dtype, grad, with_dq, backward)
                  for grad in (dtype, "float32") for with_dq in (True, False)),
                *(self.thd_attn_bwd_dq(dtype, dq, trees=trees) for trees in (False, True) for dq in (dtype, "float32")),
                self.thd_attn_round_dq(dtype),
            )
        ] + [self.thd_attn_round_dq("float32")]

    # ---------------------------------------------------------------------------------------- Hopper kernels

    def thd_attn_fwd_sm90(
        self, dtype: str, out_dtype: str, kind: Kind = PLAIN, split_kv: bool = False, trees: bool = False
    ) -> Instance:
        """Return the forward. out_dtype "float32" merges its result with that in out.

        split_kv: the keys of a query tile may be divided among thread blocks; not with trees. With trees, the producer
        needs registers that queries of wide heads would take.
        """
        f, tile_n = self.forward_sm90, self.forward_sm90.keys(kind)
        tiles = slabs(f.q_stages * f.tile_m, self.head_dim) + self._keys_and_values(f.kv_stages * tile_n)
        barriers = 8 * (2 * f.q_stages + 4 * f.kv_stages)
        told = 2 * 16 * f.q_stages + 8 * f.kv_stages  # QueryTile and KeyTile
        shared = tiles + barriers + told + 8 * 2 * f.q_stages * f.tile_m  # ranges
        if trees:
            shared = -(-shared // 16) * 16 + 4 * f.kv_stages * tile_n  # ends
        return instance(
            "thd_attn_fwd_sm90", dtype, out_dtype, *kind, *self._dims, tile_n, f.consumers, f.q_stages, f.kv_stages,
            f.q_in_registers and not (trees and self.head_dim > 128), f.lazy_row_max, split_kv,
            shared_bytes=shared, trees=trees)

    def thd_attn_count_partials_sm90(self) -> Instance:
        """Return the kernel that counts the partial sums of every query tile's dq."""
        b = self.backward_sm90
        return instance("thd_attn_count_partials_sm90", b.tile_n // 64, b.tile_m)

    def thd_attn_bwd_sm90(
        self, dtype: str, dq_dtype: str, grad_dtype: str, deterministic: bool, caps: bool = False, trees: bool = False
    ) -> Instance:
        """Return the backward. dq_dtype "float32" adds to dq; dk and dv are in grad_dtype. trees: if deterministic."""
        b = self.backward_sm90
        assert isinstance(b, BackwardSm90)
        tiles = self._keys_and_values(b.tile_n + b.stages * b.tile_m) + b.stages * slabs(b.tile_n, b.tile_m)
        panels, stats = b.dq_stages * 4 * 64 * b.panel_cols, 8 * b.stages * b.tile_m
        barriers = 8 * (8 + 4 * b.stages + 3 * b.dq_stages)
        told = -(-(2 * 12 + 4 * b.dq_stages + 2 * 16 * b.stages) // 8) * 8  # Claim, Partial and Step
        ranges = 8 * (b.tile_n + 8)
        adds = dq_dtype == "float32"
        registers = (adds and b.adding_registers) or b.query_registers
        in_registers = b.in_registers > 0 and not adds and not caps
        queries, dp_queries = b.at_once(caps, in_registers)
        return instance("thd_attn_bwd_sm90", dtype, dq_dtype, grad_dtype, caps, *self._dims, b.tile_m, b.stages,
                        queries, dp_queries, in_registers, b.panel_cols, b.dq_stages, registers, deterministic,
                        shared_bytes=tiles + panels + stats + barriers + told + ranges, trees=trees)

    def thd_attn_bwd_shared_dq_sm90(
        self, dtype: str, dq_dtype: str, grad_dtype: str, deterministic: bool, caps: bool = False, trees: bool = False
    ) -> Instance:
        """Return the backward, as thd_attn_bwd_sm90."""
        b = self.backward_sm90
        assert isinstance(b, BackwardSharedDqSm90)
        tiles = self._keys_and_values(b.tile_n + b.stages * b.tile_m) + slabs(b.tile_n, b.tile_m)
        dq_stages = self.head_dim // b.panel_cols
        panels, stats = 4 * 64 * self.head_dim, 8 * b.stages * b.tile_m
        barriers = 8 * (8 + 2 * b.stages + 2 + 3 * dq_stages)
        told = -(-(2 * 12 + 4 * dq_stages + 2 * 16 * b.stages) // 8) * 8  # Claim, Partial and Step
        ranges = 8 * (b.tile_n + 8)
        queries = b.capped_queries if caps else b.queries
        return instance("thd_attn_bwd_shared_dq_sm90", dtype, dq_dtype, grad_dtype, caps, *self._dims, b.stages,
                        queries, b.panel_cols, deterministic,
                        shared_bytes=tiles + panels + stats + barriers + told + ranges, trees=trees)

    def thd_attn_bwd_by_gradient_sm90(
        self, dtype: str, dq_dtype: str, grad_dtype: str, with_dq: bool, caps: bool = False
    ) -> Instance:
        """Return the backward for dk and dv in grad_dtype, and with_dq also for dq or its accumulators."""
        b = self.backward_sm90
        assert isinstance(b, BackwardByGradientSm90)
        cluster, loaded = with_dq and b.blocks == 2, b.q_stages + b.dout_stages
        keys = 4 * slabs(64, 64) if cluster else slabs(64, self.head_dim)
        tiles = (keys + slabs(64 * b.q_stages, self.head_dim) + slabs(64 * (1 + b.dout_stages), self.v_head_dim)
                 + b.ds_stages * (2 + cluster) * slabs(64, 64))
        stats, barriers, ranges = 4 * 64 * loaded, 8 * (2 + 2 * loaded + 3 * b.ds_stages), 8 * (2 * 64 + 8)
        steps, exchange = 16 * loaded + -(-20 * b.ds_stages // 8) * 8, 8 * (b.ds_stages + 3) if cluster else 0
        shift = b.capped_shift if caps else 0
        return instance("thd_attn_bwd_by_gradient_sm90", dtype, dq_dtype, grad_dtype, caps, *self._dims, b.q_stages,
                        b.dout_stages, b.ds_stages, with_dq, b.blocks, b.key_registers + shift,
                        b.value_registers - shift, b.query_registers,
                        shared_bytes=tiles + stats + barriers + steps + ranges + exchange)

    def thd_attn_bwd_dq_sm90(self, dtype: str, dq_dtype: str, caps: bool = False, trees: bool = False) -> Instance:
        """Return the backward for dq alone, as thd_attn_bwd_dq."""
        b = self.backward_sm90
        assert isinstance(b, BackwardByGradientSm90)
        return instance("thd_attn_bwd_dq_sm90", dtype, dq_dtype, caps, *self._dims, b.dq_keys, 2,
                        shared_bytes=self._keys_and_values(DQ_ROWS + 2 * b.dq_keys) + 8 * 6 + 16 * 2, trees=trees)

    def thd_attn_round_dq_sm90(self, dq_dtype: str) -> Instance:
        """Return the kernel that rounds dq's accumulators."""
        return instance("thd_attn_round_dq_sm90", dq_dtype, self.head_dim)

    def hopper_kernels(self) -> list[Instance]:
        """Return the Hopper kernels of this head dim."""
        kernels = [self.thd_attn_count_partials_sm90()]
        if self.forward_sm90.split_kv:
            kernels += [self.thd_attn_split_kv(self.forward_sm90),
                        *(self.thd_attn_fwd_sm90(dtype, dtype, split_kv=True) for dtype in ("float16", "bfloat16"))]
        for dtype in ("float16", "bfloat16"):
            kernels += [self.thd_attn_fwd_sm90(dtype, out, trees=trees)
                        for trees in (False, True) for out in (dtype, "float32")]
            grads = (dtype, dtype), (dtype, "float32"), ("float32", "float32")  # of dq, and of dk and dv
            if isinstance(self.backward_sm90, BackwardByGradientSm90):
                kernels += [self.thd_attn_bwd_by_gradient_sm90(dtype, *each, with_dq=True) for each in grads]
                kernels += [self.thd_attn_bwd_by_gradient_sm90(dtype, dtype, grad, with_dq=False)
                            for grad in (dtype, "float32")]
                kernels += [self.thd_attn_bwd_dq_sm90(dtype, dq, trees=trees)
                            for trees in (False, True) for dq in (dtype, "float32")]
                kernels.append(self.thd_attn_round_dq_sm90(dtype))
            else:
                pair = isinstance(self.backward_sm90, BackwardSharedDqSm90)
                backward = self.thd_attn_bwd_shared_dq_sm90 if pair else self.thd_attn_bwd_sm90
                kernels += [backward(dtype, *each, deterministic, trees=trees) for each in grads
                            for deterministic, trees in ((False, False), (True, False), (True, True))]
        if isinstance(self.backward_sm90, BackwardByGradientSm90):
            kernels.append(self.thd_attn_round_dq_sm90("float32"))
        return kernels

    @property
    def wgmma_columns(self) -> set[int]:
        """Columns of the accumulators of the Hopper kernels' wgmma instructions."""
        f, b = self.forward_sm90, self.backward_sm90
        if isinstance(b, BackwardSm90):
            queries = {n for caps in (False, True) for in_registers in {False, b.in_registers > 0}
                       for n in b.at_once(caps, in_registers)}
            backward = {*queries, b.panel_cols, *self._dims}
        elif isinstance(b, BackwardSharedDqSm90):
            backward = {b.queries, b.capped_queries, b.panel_cols, 32, *self._dims}
        else:  # 256 columns take two instructions, kMostCols of kernels/hopper/backward_common.cuh
            dims = (128 if dim == 256 else dim for dim in self._dims)
            backward = {64, b.dq_keys, self._by_gradient_panel_cols, *dims}
        return {f.tile_n, f.capped_tile_n or f.tile_n, self.v_head_dim, *backward}

    # ---------------------------------------------------------------------------------------- what they share

    @property
    def _dims(self) -> tuple[int, int]:
        return self.head_dim, self.v_head_dim

    @property
    def _by_gradient_panel_cols(self) -> int:
        """Columns of a panel of dq of thd_attn_bwd_by_gradient_sm90: each thread block of a cluster computes one."""
        return self.head_dim // 2 if self.backward_sm90.blocks == 2 else SLAB

    @property
    def _pair(self) -> int:
        """Elements of one row of keys and one of values in portable tiles."""
        return self.head_dim + self.v_head_dim + 2 * PAD

    def _keys_and_values(self, rows: int) -> int:
        """Return the bytes of Hopper tiles of so many rows of keys, and as many of values."""
        return slabs(rows, self.head_dim) + slabs(rows, self.v_head_dim)


def slab_of(columns: int) -> int:
    """Return the columns of a slab of a Hopper tile whose rows have so many: slab_of of kernels/hopper/common.cuh."""
    return SLAB // 2 if columns % SLAB else SLAB


def lanes_of(columns: int) -> int:
    """Return how many lanes divide a row, 16 bytes each: lanes_of of kernels/common.cuh."""
    return 8 if columns <= 64 else 16 if columns <= 128 else 32


def slabs(rows: int, width: int) -> int:
    """Return the bytes of a Hopper tile of rows of `width` 16-bit elements."""
    return 2 * rows * width


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
                dq_keys=64,
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
                dq_keys=48,  # 64 do not fit
            ),
        ),
    )
}
WGMMA_COLUMNS = sorted({columns for t in TILES.values() for columns in t.wgmma_columns})
