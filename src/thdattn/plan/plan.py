"""The plan of one rank: which keys every query row sees, as ranges of rows, and the maps between the two row orders.

A plan is made once per batch and used by every layer, forward and backward. It turns masks (mask.py), shardings, chunks
and padding into ranges of rows: the engines see nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from thdattn.arguments import Array
from thdattn.capacity import Flags, Mask
from thdattn.comm import Comm
from thdattn.engines import Engine
from thdattn.packing import PackedBatch
from thdattn.plan import rank_rows
from thdattn.plan.generations import Generation, renew
from thdattn.plan.handles import give_handle
from thdattn.plan.key_transfers import Routes, foreign_tiles, needed_rows
from thdattn.plan.mask import hides_tokens, transposed, visible_pairs
from thdattn.plan.workspace import Kept, Workspace
from thdattn.sharding import Sharding

T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)  # comparing or printing arrays would make the host wait for a GPU
class PlanArrays:
    """Arrays of a plan, int32 except `valid`, in the engine's own array type.

    "Needed rows" are the key rows that this rank's queries see, where the sharding is by_runs: the key buffer then has
    these alone.

    Attributes:
        rows, positions, valid: as Plan has them.
        key_ranges: (local_rows, 2), [begin, end) rows of the key buffer, in sequence order, that a query row sees;
            (0, 0) for none and for padding. All are (-1, -1) where lengths on a GPU are wrong: out and lse become NaN.
        query_ranges: (key_rows, 2), the transpose: [begin, end) local query rows that see a key row; (0, 0) for none.
            In prefix trees a pair counts only if both ranges have it; see mask.py.
        rank_order: row in the key buffer of every key row that this rank receives or owns; -1 for none.
            Gathered keys: (cp_size * local_key_rows,), rank after rank. Needed rows: (num_received + local_rows,),
            received rows, rank after rank, then own rows. None: the key buffer has the rows of one rank (keys_of).
        query_tiles, key_tiles: (2, ceil(rows / tile)), tiles of query rows and of key rows in two orders. The first
            order puts the longest sequences first, so that tiles with common keys or queries are near each other. Few
            sequences use the second order here too. Tiles of a prefix tree come as they are (keys) or backwards
            (queries) there. The second order puts the longest tiles first.
        all_rows: (cp_size * local_rows,), `rows` of all ranks, rank after rank.
        rows_of_keys: (key_rows,), sequence-order row of every key buffer row, ascending, then -1 for fillers; None:
            the key buffer has all rows of the pack.
        sends: (num_sent,), local rows that this rank sends, by receiving rank, ascending; None without needed rows.
        returns: (cp_size, local_rows), where each rank's partial sum of the gradient of a local row is found; -1: that
            rank has none. Other ranks' are rows of the returned gradients, where row i belongs to local row sends[i];
            this rank's own are rows of its key buffer.
        places: (key_rows,), the local row of every key buffer row that no other rank receives, so that this rank alone
            has its gradient; -1 for other rows. None without needed rows.
        own_keys: (key_rows,), the local row of every key buffer row that this rank owns; -1 for others. None without
            needed rows.
        lengths: the engines.cuda.lengths.DeviceLengths of lengths on a GPU, which checks them; None: on the host.
        offsets: (1 or 2, 2, num_seqs + 1), cu_seqlens and cu_seqlens_padded of the queries, and of keys with lengths of
            their own, as kernels read them; None for NumPy arrays.
        stream: CUDA stream on which the arrays were made; None for NumPy arrays.
        nodes: (5, columns), the node_table of prefix trees; None without them, and for NumPy arrays.
        query_ends, group_ends, group_begins: as in struct Trees of kernels/trees.cuh; None as `nodes`.
    """

    rows: Array
    positions: Array
    valid: Array
    key_ranges: Array
    query_ranges: Array
    rank_order: Array
    query_tiles: Array
    key_tiles: Array
    all_rows: Array
    rows_of_keys: Array = None
    sends: Array = None
    returns: Array = None
    places: Array = None
    own_keys: Array = None
    lengths: Any = None
    offsets: Array = None
    stream: Any = None
    nodes: Array = None
    query_ends: Array = None
    group_ends: Array = None
    group_begins: Array = None


NO_ARRAYS = PlanArrays(*[None] * 9)  # for a plan that only answers sizes


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Plan of one batch for one rank, made by CPAttention.plan.

    Every call reuses the plan's work buffers, so all calls with one plan belong on one stream. It may be another stream
    than the one that the plan was made on. If a CUDA graph makes the plan, every call uses the plan of its last replay.

    Attributes:
        sharding: how the rows of the batch are spread over ranks.
        cp_rank: the rank that the plan is for.
        window: (left, right), -1 = unlimited; a causal mask is right = 0.
        head_dims: (head_dim, v_head_dim) of the attentions that can use the plan; their numbers of heads may differ.
        tiles: (rows per query tile, rows per key tile) that query_tiles and key_tiles are made for.
        arrays: the PlanArrays.
        engine: engines.reference or engines.cuda.
        key_batch: the batch of the keys: `batch` itself, except in cross-attention.
        like, finite_padding: as CPAttention.plan got them.
        keys_of: the rank whose local rows, in local order, are the key buffer. None: the key buffer has the rows of all
            ranks in sequence order, or, where the sharding is by_runs, the rows that this rank's queries see.
        core: the plan of the attention over all rows of the group, where ranks exchange heads; None elsewhere. The
            key_ranges of this plan are rows of the core's key buffer.
        workspace: work buffers of all calls; the plans of a ring's slices share one.
    """

    sharding: Sharding
    cp_rank: int
    window: tuple[int, int]
    head_dims: tuple[int, int]
    tiles: tuple[int, int]
    arrays: PlanArrays
    engine: Engine
    key_batch: PackedBatch
    like: PackedBatch | None = None
    finite_padding: bool = False
    keys_of: int | None = None
    core: Plan | None = None
    _handle: Any = field(init=False)  # thdattn.torch finds the plan by it in code that torch.compile made
    _kept: Kept = field(init=False, default_factory=Kept)
    workspace: Workspace = field(init=False)

    def __post_init__(self) -> None:
        give_handle(self)
        object.__setattr__(self, "workspace", Workspace(self.engine))
        # A graph of refresh may be captured before the first backward, which is of the core if there is one.
        if self.arrays.lengths is not None and self.core is None:
            self.engine.plan_backward(self)

    def __repr__(self) -> str:
        keys = f"keys={self.key_batch!r}, " if self.is_cross else ""
        return (f"<Plan cp_rank={self.cp_rank}, {self.sharding!r}, {self.batch!r}, {keys}window={self.window}, "
                f"head_dims={self.head_dims}, engine={self.engine_name!r}>")

    @cached_property
    def made_for(self) -> dict[str, Any]:
        """Fields that must agree with the attention that uses the plan."""
        return {
            "cp_size": self.cp_size, "cp_rank": self.cp_rank, "window": self.window, "engine": self.engine_name,
            "head_dims": self.head_dims, "tiles": self.tiles, "head_ranks": self.head_ranks,
        }

    @property
    def engine_name(self) -> str:
        """Name of the engine that made the arrays: "cuda" or "reference"."""
        return str(self.engine.name)

    @cached_property
    def batch(self) -> PackedBatch:
        """Batch of the queries."""
        return self.sharding.batch

    @property
    def mask(self) -> Mask:
        """Mask, with the tiles that the arrays are made for."""
        return Mask(self.window, self.tiles)

    @cached_property
    def is_cross(self) -> bool:
        """True for cross-attention: keys have lengths of their own."""
        return self.key_batch is not self.batch

    @property
    def has_trees(self) -> bool:
        """True if sequences are prefix trees: a pair then counts only if key_ranges and query_ranges both have it."""
        return self.batch.has_trees

    @cached_property
    def cp_size(self) -> int:
        """Number of context-parallel ranks."""
        return self.sharding.cp_size

    @property
    def head_ranks(self) -> int:
        """Number of ranks that exchange heads with each other; 1 where no heads are exchanged."""
        return 1 if self.core is None else self.cp_size // self.core.cp_size

    @cached_property
    def local_rows(self) -> int:
        """Rows of q that every rank stores, fillers included."""
        return self.sharding.local_rows

    @cached_property
    def local_key_rows(self) -> int:
        """Rows of k and v that every rank stores, fillers included: local_rows, except in cross-attention."""
        return -(-self.key_batch.total_rows // self.cp_size) if self.is_cross else self.local_rows

    @cached_property
    def key_rows(self) -> int:
        """Rows of the key buffer: all rows of the packed keys in sequence order, or fewer, see keys_of."""
        if self.keys_of is not None:
            return self.local_rows
        if self.sharding.capacity is not None:
            return self.sharding.capacity.key_rows
        if self.sharding.by_runs:
            return int(needed_rows(self.sharding, self.window).sizes[self.cp_rank])
        return self.key_batch.total_rows

    @property
    def key_side_sizes(self) -> list[int]:
        """Sizes of the arrays of a KeySide, with needed rows; else empty."""
        if self.keys_of is not None or self.routes is None:
            return []
        received, sent = self.routes.num_received, self.routes.num_sent
        return [self.key_rows, received + self.local_rows, sent, self.cp_size * self.local_rows,
                *[self.key_rows] * 2]

    @cached_property
    def routes(self) -> Routes | None:
        """Numbers of key rows that ranks send to each other; None where ranks exchange all rows."""
        if self.sharding.capacity is not None:
            return Routes.fixed(self.sharding.capacity, self.cp_size, self.cp_rank)
        return Routes.of(needed_rows(self.sharding, self.window), self.cp_rank) if self.sharding.by_runs else None

    @property
    def slices(self) -> list[Plan]:
        """Plans for a ring, one for each rank, whose key buffer has that rank's rows; they share work buffers."""
        return self.memoize("slices", lambda: [self.slice_of(rank) for rank in range(self.cp_size)])

    def slice_of(self, rank: int) -> Plan:
        """Return the plan whose key buffer has the rows of one rank; without arrays if this plan has none."""
        part = replace(self, arrays=NO_ARRAYS, keys_of=rank)
        if self.arrays is not NO_ARRAYS:
            part = replace(part, arrays=self.engine.plan_arrays(part, self.arrays.lengths))
        object.__setattr__(part, "workspace", self.workspace)
        return part

    @cached_property
    def needs_own_rows(self) -> bool:
        """True if this rank's queries see all of its own key rows and no others, in every layout of a capacity."""
        if self.routes is None or self.sharding.capacity is not None:
            return False
        return self.key_rows == self.local_rows and not self.routes.num_received

    @property
    def is_apart(self) -> bool:
        """True if, besides, no other rank's queries see a key row of this rank."""
        return self.needs_own_rows and self.routes is not None and not self.routes.num_sent

    @property
    def first_own(self) -> int:
        """Index in rank_order of this rank's first row."""
        return self.cp_rank * self.local_key_rows if self.routes is None else self.routes.num_received

    @property
    def num_tiles(self) -> tuple[int, int]:
        """Number of tiles of local query rows, and of key rows."""
        rows = self.local_rows, self.key_rows
        return -(-rows[0] // self.tiles[0]), -(-rows[1] // self.tiles[1])

    @cached_property
    def foreign_tiles(self) -> Flags:
        """Flags, with needed rows: query tiles that see a row of another rank, and key tiles that have one."""
        return foreign_tiles(self.sharding, self.mask, self.cp_rank, self.sharding.capacity)

    @cached_property
    def first_tiles(self) -> Flags:
        """Flags, with needed rows: query tiles that come before rows arrive, and key tiles before gradients are sent.

        These see no row of another rank, or are all that have one. Within a capacity they are of a fixed number.
        """
        capacity, foreign = self.sharding.capacity, self.foreign_tiles
        if capacity is None:
            return ~foreign[0], foreign[1]
        return capacity.first_of(foreign, self.tiles)

    @cached_property
    def has_parts(self) -> tuple[bool, bool]:
        """True for a side whose tiles can be computed in two parts: within a capacity, if neither part is empty."""
        if self.sharding.capacity is None:
            return True, True
        queries, keys = ((0 < first < count)
                         for first, count in zip(self.num_first_tiles, self.num_tiles, strict=True))
        return queries, keys

    @property
    def num_first_tiles(self) -> tuple[int, int]:
        """Number of first_tiles of each side."""
        if self.sharding.capacity is not None:
            return self.sharding.capacity.first_tiles(self.tiles)
        queries, keys = self.first_tiles
        return int(queries.sum()), int(keys.sum())

    @cached_property
    def has_unseen_keys(self) -> bool:
        """True if a key buffer row that no query sees may hold NaN, or if only the GPU knows.

        Such rows are padding. In cross-attention they also are keys without a query, or before the first query's
        window. In another rank's rows (keys_of) they also are keys that only other ranks' queries see.
        """
        if self.keys_of is not None and self.cp_size > 1:
            return not self.finite_padding
        if self.sharding.by_runs:
            return False
        return self._hides(self.key_rows, self.key_batch, self.batch, transposed(self.window))

    @cached_property
    def has_masked_out_queries(self) -> bool:
        """True if a local row of any rank that sees no key may hold NaN, or if only the GPU knows.

        Such rows are padding and fillers. In cross-attention they also are queries without a key, or before the first.
        """
        return self._hides(self.cp_size * self.local_rows, self.batch, self.key_batch, self.window)

    @cached_property
    def leading_tokens(self) -> int | None:
        """Number of local rows with tokens, if they precede all other local rows; None if not, or if unknown.

        In cross-attention it is None, because some tokens may see no key.
        """
        return None if self.is_cross else self.sharding.leading_tokens(self.cp_rank)

    def _hides(self, num_rows: int, batch: PackedBatch, other: PackedBatch, window: tuple[int, int]) -> bool:
        """Return whether any of the rows holds no token of batch, or a token that sees no token of other."""
        if self.finite_padding:
            return False
        if batch.on_device or batch.total_tokens < num_rows:
            return True
        return hides_tokens(batch, other, window)

    @property
    def rows(self) -> Array:
        """(local_rows,) int32, sequence-order row of every local row; -1 for fillers."""
        return self.arrays.rows

    @property
    def positions(self) -> Array:
        """(local_rows,) int32, position of every local row in its sequence, for RoPE.

        Positions count on over padding. In prefix trees they count tokens of the path from the root.
        """
        return self.arrays.positions

    @property
    def key_ranges(self) -> Array:
        """(local_rows, 2) int32, the keys that every local query row sees."""
        return self.arrays.key_ranges

    @property
    def valid(self) -> Array:
        """(local_rows,) bool, True where a local row holds a token, for a loss; False for padding and fillers."""
        return self.arrays.valid

    @property
    def visible_pairs(self) -> int:
        """Number of (query, key) pairs that the mask leaves, over all ranks. ValueError for offsets on a GPU."""
        return visible_pairs(self.batch, self.key_batch, self.window)

    @cached_property
    def expected_pairs(self) -> int | None:
        """Expected visible_pairs: with lengths on a GPU, those of the batch passed as `like`; None without one.

        With keys_of it is an equal share of the pairs, as if all ranks' keys had as many.
        """
        batch = self.like if self.batch.on_device else self.batch
        if batch is None:
            return None
        pairs = visible_pairs(batch, self.key_batch if batch is self.batch else batch, self.window)
        return pairs if self.keys_of is None else pairs // self.cp_size

    @property
    def query_ranges(self) -> Array:
        """(key_rows, 2) int32, the local query rows that see every key row."""
        return self.arrays.query_ranges

    @property
    def rank_order(self) -> Array:
        """(cp_size * local_key_rows,) int32, sequence-order row of every gathered key row; -1 for fillers.

        With needed rows: the key buffer row of every row that this rank receives, then of its own; see PlanArrays.
        """
        return self.arrays.rank_order

    def memoize(self, key: Any, make: Callable[[], T]) -> T:
        """Return the value that this plan's calls cache for `key`; call `make` on a miss. See Kept."""
        return self._kept.memoize(key, make, self._capture)

    def _capture(self) -> int | None:
        """Return the number of the current stream's graph capture; None without one, or if it makes this plan."""
        number: int | None = self.engine.capture()
        return None if self.arrays.lengths is not None and number == self.arrays.lengths.made_in else number

    def held_bytes(self) -> int:
        """Return the bytes of the plan's work buffers that have been allocated."""
        made: int = sum(x.nbytes for x in [*self._kept.values(), *self.workspace.arrays()] if hasattr(x, "nbytes"))
        return made + (0 if self.core is None else self.core.held_bytes())

    def make(self, launches: Callable[[], None]) -> None:
        """Call `launches`, which derive something from the plan's arrays, now and after every refresh."""
        if self.arrays.lengths is None:
            launches()
        else:
            self.arrays.lengths.make(launches)

    def refresh(self) -> None:
        """Plan again, in the same arrays, for the lengths that the GPU has now; a CUDA graph may capture it.

        Later calls refuse results of forward and gather that were computed with the previous lengths.

        Raises:
            ValueError: the lengths were on the host.
        """
        if self.arrays.lengths is None:
            raise ValueError("plan was made from lengths on the host, wanted lengths on a GPU to plan anew for; "
                             "make another plan, or use thdattn.graphs.StaticPack")
        self._come()
        self.arrays.lengths.make_again()
        renew(self.arrays.lengths)

    def check(self, wait: bool = True) -> None:
        """Raise if the plan was made from wrong lengths on a GPU, which make its results NaN.

        Lengths on the host were checked when they were passed. If a CUDA graph makes the plan, check judges the lengths
        of its last replay.

        Args:
            wait: wait for the GPU. False: use what the GPU has reported so far, which costs nothing. The attention's
                next plan checks this way and raises on all ranks; on one rank forward and backward do so too. No check
                raises while a CUDA graph is captured.

        Raises:
            ValueError: offsets that do not start at 0, decrease or end beyond total_rows; a sequence longer than its
                padded length; or a padded length that the sharding cannot split. It names the sequence and the remedy.
        """
        if self.arrays.lengths is not None:
            if wait:
                self._come()
            self.arrays.lengths.check(wait)

    @property
    def generation(self) -> Generation | None:
        """Generation of the plan's present lengths on a GPU, to mark results with; None for lengths on the host."""
        lengths = self.arrays.lengths
        return None if lengths is None else Generation(lengths, self.engine.capture)

    def enter(self) -> None:
        """Make the current stream wait until the plan's arrays are ready and up to date."""
        self._come()
        if self.arrays.lengths is not None:
            self.arrays.lengths.follow()

    def enter_call(self) -> None:
        """Enter the plan; on one rank, raise for lengths that the GPU has already found wrong.

        Of several ranks one may be told before the others, who would wait for it: their next plan raises on all.
        """
        if self.cp_size == 1:
            self.check(wait=False)
        self.enter()

    def _come(self) -> None:
        """Order the current stream after the stream that the plan was made on."""
        if self.arrays.stream is not None:
            self.engine.enter(self)

    def shard(self, x: Any) -> Any:
        """Return this rank's rows of a whole packed array of queries, on the array's device.

        Args:
            x: (total_rows, ...) in sequence order, any dtype, an array as forward takes it.

        Returns:
            (local_rows, ...), a new array of the same dtype in the order of plan.rows; filler rows are 0.

        Raises:
            TypeError: no array of this engine.
            ValueError: a wrong number of rows.
        """
        return rank_rows.shard(self, x)

    def unshard(self, x: Any, comm: Comm) -> Any:
        """Gather the whole packed array, such as out or dq, from every rank's rows, on every rank. Collective.

        Args:
            x: (local_rows, ...) in the order of plan.rows, an array as forward takes it; the same trailing shape and
                dtype on every rank.
            comm: the ranks of the plan.

        Returns:
            (total_rows, ...) in sequence order, a new array of the same dtype. Filler rows are dropped.

        Raises:
            TypeError: no array of this engine, or no comm.
            ValueError: a wrong number of rows, a comm of other ranks, or (on every rank) arrays that differ in shape or
                dtype.
        """
        return rank_rows.unshard(self, x, comm)

    def shift(self, x: Any, n: int = 1, fill: Any = -1, comm: Comm | None = None) -> Any:
        """Return for every row the value n tokens later in its sequence, such as labels of (multi-)token prediction.

        Collective over several ranks: every rank receives the whole x, which is small for token ids.

        Args:
            x: (local_rows, ...) in the order of plan.rows, an array as forward takes it, of any dtype; the same shape
                and dtype on every rank. Values of padding and fillers, NaN included, never reach the result.
            n: number of tokens later; negative: earlier. In prefix trees only earlier ones, on the path from the root.
            fill: value of rows whose sequence has no such token, of padding and fillers, and of all rows where lengths
                on a GPU are wrong; a number that the dtype of x can hold.
            comm: the ranks of the plan; None for a plan of one rank.

        Returns:
            (local_rows, ...), a new array of the dtype of x.

        Raises:
            TypeError: no array of this engine, n no int, fill no number, or no comm of a plan for several ranks.
            ValueError: a wrong number of rows, a fill that x cannot hold, n beyond int32, or a comm of other ranks.
                With a comm every rank raises if one does, or if x's shape or dtype, n or fill differ between ranks.
        """
        return rank_rows.shift(self, x, n, fill, comm)
