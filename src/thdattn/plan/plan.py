"""The plan of one rank: which keys every query row sees, as ranges of rows, and the maps between the two row orders.

Made once per batch and used by every layer, forward and backward. Masks (mask.py), shardings, chunks and padding become
ranges of rows: the engines see nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from thdattn.comm import Comm
from thdattn.engines import Engine
from thdattn.packing import PackedBatch
from thdattn.plan import rank_rows
from thdattn.plan.buffers import Buffers, Kept
from thdattn.plan.generations import Generation, renew
from thdattn.plan.handles import give_handle
from thdattn.plan.key_transfers import NeededRows, Routes, foreign_tiles, needed_rows
from thdattn.plan.mask import hides_tokens, transposed, visible_pairs
from thdattn.sharding import Sharding

T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)  # comparing or printing arrays would make the host wait for a GPU
class PlanArrays:
    """The arrays of a plan, int32 but for `valid`, in the engine's own array type.

    rows, positions: (local_rows,), sequence-order row (-1: filler) and position in its sequence of every local row.
    valid: (local_rows,) bool, whether a local row holds a token.
    key_ranges: (local_rows, 2), [begin, end) rows of the key buffer, in sequence order, that a query row sees;
        (0, 0) for none and for padding; all (-1, -1) where lengths on a GPU are wrong, which makes out and lse NaN.
    query_ranges: (key_rows, 2), its transpose: [begin, end) local query rows that see a key row; (0, 0) for none.
    rank_order: the row of the key buffer of every row of keys that a rank gets or has, -1 for none. Gathered keys:
        (cp_size * local_key_rows,), rank after rank. Needed rows: (num_received + local_rows,), those it gets, rank
        after rank, and then its own. None: for the rows of one rank.
    query_tiles, key_tiles: (2, ceil(rows / tile)), tiles of query rows and of key rows in two orders: if sequences are
        not few, the longest first, so that tiles that share keys or queries are near; the longest tile first.
    all_rows: (cp_size * local_rows,), `rows` of all ranks, one rank after another.
    rows_of_keys: (key_rows,), sequence-order row of every row of the key buffer, ascending, then -1 for fillers; None:
        it has all rows of the pack.
    sends: (num_sent,), local rows that go to other ranks, rank after rank, ascending; None: they are not needed rows.
    returns: (cp_size, local_rows), where each rank's share of the gradient of a local row is: in what comes back, of
        which row i is a share of row sends[i], or, of this rank itself, in its key buffer; -1: it has none.
    places: (key_rows,), the local row of every row of the key buffer that no other rank gets, whose gradients are this
        rank's alone; -1: of others. None: they are not needed rows.
    lengths: the ops.plan.DeviceLengths of lengths on a GPU, which knows whether they are wrong; None: on the host.
    offsets: (1 or 2, 2, num_seqs + 1), cu_seqlens and cu_seqlens_padded of the queries, and of other keys, as kernels
        read them; None: NumPy's.
    stream: of CUDA, on which the arrays were made; None: NumPy's.
    """

    rows: Any
    positions: Any
    valid: Any
    key_ranges: Any
    query_ranges: Any
    rank_order: Any
    query_tiles: Any
    key_tiles: Any
    all_rows: Any
    rows_of_keys: Any = None
    sends: Any = None
    returns: Any = None
    places: Any = None
    lengths: Any = None
    offsets: Any = None
    stream: Any = None


NO_ARRAYS = PlanArrays(*[None] * 9)  # of a plan that is asked for sizes alone


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """What one rank needs to know of a batch; made by CPAttention.plan.

    The work buffers of a plan are reused by every call: calls with one plan belong on one stream, which need not be the
    one that it was made on. Where a CUDA graph makes the plan, calls anywhere find that of its last replay.

    Attributes:
        sharding, cp_rank: whose plan it is.
        window: (left, right), -1 = unlimited; a causal mask is right = 0.
        head_dims: (head_dim, v_head_dim) of the attentions that can use it; their numbers of heads may differ.
        tiles: (rows per query tile, rows per key tile) that query_tiles and key_tiles are made for.
        arrays: the PlanArrays.
        engine: engines.reference or engines.cuda.
        keys_of: the rank whose rows, as it has them, are the key buffer; None: the buffer has the rows of all ranks in
            sequence order, or, where the sharding is by_runs, those that this rank needs.
        core: where heads are exchanged, the plan of the attention over all rows of the group; key_ranges are its.
    """

    sharding: Sharding
    cp_rank: int
    window: tuple[int, int]
    head_dims: tuple[int, int]
    tiles: tuple[int, int]
    arrays: PlanArrays
    engine: Engine
    _key_batch: PackedBatch | None = None
    _like: PackedBatch | None = None
    _finite_padding: bool = False
    keys_of: int | None = None
    core: Plan | None = None
    _handle: Any = field(init=False)  # by which thdattn.torch finds it again in code that torch.compile made
    _kept: Kept = field(default_factory=Kept)
    _buffers: Buffers = field(default_factory=Buffers)  # shared by the plan of all keys and those of slices

    def __post_init__(self) -> None:
        give_handle(self)
        # A graph of refresh may be captured before the first backward, which is of the core if there is one.
        if self.arrays.lengths is not None and self.core is None:
            self.engine.plan_backward(self)

    def __repr__(self) -> str:
        keys = "" if self._key_batch is None else f"keys={self._key_batch!r}, "
        return (f"<Plan cp_rank={self.cp_rank}, {self.sharding!r}, {self.batch!r}, {keys}window={self.window}, "
                f"head_dims={self.head_dims}, engine={self.engine_name!r}>")

    @cached_property
    def made_for(self) -> dict[str, Any]:
        """What must agree with the attention that uses the plan."""
        return {
            "cp_size": self.cp_size, "cp_rank": self.cp_rank, "window": self.window, "engine": self.engine_name,
            "head_dims": self.head_dims, "tiles": self.tiles, "head_ranks": self.head_ranks,
        }

    @property
    def engine_name(self) -> str:
        """Of the engine whose arrays it has: "cuda" or "reference"."""
        return str(self.engine.name)

    @property
    def batch(self) -> PackedBatch:
        """The batch the plan is about: that of the queries."""
        return self.sharding.batch

    @property
    def key_batch(self) -> PackedBatch:
        """The batch of the keys: `batch` itself, but for cross-attention."""
        return self._key_batch or self.batch

    @property
    def cp_size(self) -> int:
        """Number of context-parallel ranks."""
        return self.sharding.cp_size

    @property
    def head_ranks(self) -> int:
        """Number of ranks among which heads are exchanged: 1 where none are."""
        return 1 if self.core is None else self.cp_size // self.core.cp_size

    @property
    def local_rows(self) -> int:
        """Rows of q that every rank stores, fillers included."""
        return self.sharding.local_rows

    @property
    def local_key_rows(self) -> int:
        """Rows of k and v that every rank stores, fillers included: local_rows, but for cross-attention."""
        return self.local_rows if self._key_batch is None else -(-self._key_batch.total_rows // self.cp_size)

    @property
    def key_rows(self) -> int:
        """Rows of the key buffer: all rows of the packed keys, in sequence order; or fewer, see keys_of."""
        if self.keys_of is not None:
            return self.local_rows
        if self.sharding.by_runs:
            return int(self._needed_rows.sizes[self.cp_rank])
        return self.key_batch.total_rows

    @property
    def _needed_rows(self) -> NeededRows:
        return needed_rows(self.batch, self.cp_size, self.window, self.local_rows)

    @cached_property
    def routes(self) -> Routes | None:
        """How many rows of keys go from rank to rank; None: not needed rows alone, but all."""
        return Routes(self._needed_rows.table(), self.cp_rank) if self.sharding.by_runs else None

    @property
    def slices(self) -> list[Plan]:
        """For every rank the plan whose key buffer has that rank's rows, for a ring; they share work buffers."""
        return self.memoize("slices", lambda: [self.slice_of(rank) for rank in range(self.cp_size)])

    def slice_of(self, rank: int) -> Plan:
        """One of the slices; without arrays if this plan has none."""
        arrays, of = self.arrays, (self.sharding, self.cp_rank, self.window, self.tiles)
        if arrays is not NO_ARRAYS:
            arrays = self.engine.plan_arrays(*of, keys_of=rank, lengths=arrays.lengths)
        return replace(self, arrays=arrays, keys_of=rank, _kept=Kept())

    @cached_property
    def needs_own_rows(self) -> bool:
        """Whether the needed rows are all of this rank's and no others."""
        return self.routes is not None and self.key_rows == self.local_rows and not self.routes.num_received

    @property
    def is_apart(self) -> bool:
        """Whether, beside that, no other rank needs one of them."""
        return self.needs_own_rows and self.routes is not None and not self.routes.num_sent

    @property
    def first_own(self) -> int:
        """Where this rank's rows begin in what rank_order is about."""
        return self.cp_rank * self.local_key_rows if self.routes is None else self.routes.num_received

    @property
    def num_tiles(self) -> tuple[int, int]:
        """Tiles of local query rows and of key rows."""
        rows = self.local_rows, self.key_rows
        return -(-rows[0] // self.tiles[0]), -(-rows[1] // self.tiles[1])

    @cached_property
    def foreign_tiles(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Of needed rows: which tiles of queries see a row of another rank, and which tiles of keys have one."""
        return foreign_tiles(self.batch, self.cp_size, self.window, self.local_rows, self.cp_rank, self.tiles)

    @cached_property
    def has_unseen_keys(self) -> bool:
        """Whether some row of the key buffer, that no query sees, may hold NaN; True where only the GPU knows.

        Such are padding and, in cross-attention, keys of no query or before the window of the first; of the keys of
        another rank those that only queries of others see.
        """
        if self.keys_of is not None and self.cp_size > 1:
            return not self._finite_padding
        if self.sharding.by_runs:
            return False
        return self._hides(self.key_rows, self.key_batch, self.batch, transposed(self.window))

    @cached_property
    def has_masked_out_queries(self) -> bool:
        """Whether some local row of some rank, that sees no key, may hold NaN; True where only the GPU knows.

        Such are padding, fillers and, in cross-attention, queries that have no key or stand before the first.
        """
        return self._hides(self.cp_size * self.local_rows, self.batch, self.key_batch, self.window)

    @cached_property
    def leading_tokens(self) -> int | None:
        """How many of the first local rows hold tokens, where none of the others does; None: nobody knows, or not so.

        In cross-attention it is None, as there are tokens that see no key.
        """
        return None if self._key_batch is not None else self.sharding.leading_tokens(self.cp_rank)

    def _hides(self, num_rows: int, batch: PackedBatch, other: PackedBatch, window: tuple[int, int]) -> bool:
        """Return whether some of the rows holds no token of batch, or one that sees none of other."""
        if self._finite_padding:
            return False
        if batch.on_device or batch.total_tokens < num_rows:
            return True
        return hides_tokens(batch, other, window)

    @property
    def rows(self) -> Any:
        """(local_rows,) int32, sequence-order row of every local row; -1 for fillers."""
        return self.arrays.rows

    @property
    def positions(self) -> Any:
        """(local_rows,) int32, position of every local row in its sequence (counting on over padding), for RoPE."""
        return self.arrays.positions

    @property
    def key_ranges(self) -> Any:
        """(local_rows, 2) int32, the keys that every local query row sees."""
        return self.arrays.key_ranges

    @property
    def valid(self) -> Any:
        """(local_rows,) bool: whether a local row holds a token, for a loss; else it is padding or a filler."""
        return self.arrays.valid

    @property
    def visible_pairs(self) -> int:
        """Pairs (query, key) that the mask leaves, of all ranks together. ValueError if the offsets lie on a GPU."""
        return visible_pairs(self.batch, self.key_batch, self.window)

    @cached_property
    def expected_pairs(self) -> int | None:
        """The same, or that of a batch that is said to be like this one; None where nothing is known.

        Of the keys of one rank their part, as if all had the same.
        """
        batch = self._like if self.batch.on_device else self.batch
        if batch is None:
            return None
        pairs = visible_pairs(batch, self.key_batch if batch is self.batch else batch, self.window)
        return pairs if self.keys_of is None else pairs // self.cp_size

    @property
    def query_ranges(self) -> Any:
        """(key_rows, 2) int32, the local query rows that see every key row."""
        return self.arrays.query_ranges

    @property
    def rank_order(self) -> Any:
        """(cp_size * local_key_rows,) int32, sequence-order row of every gathered row of keys; -1 for fillers.

        Of needed rows, the row of the key buffer of every row that this rank gets, and of its own; see PlanArrays.
        """
        return self.arrays.rank_order

    def memoize(self, key: Any, make: Callable[[], T]) -> T:
        """What `make` returned when it was first called for this key: what a plan's calls have in common; see Kept."""
        return self._kept.memoize(key, make, self._capture)

    def _capture(self) -> int | None:
        """The number of the capture that the current stream is in, but for that which makes the plan; None: in none."""
        number: int | None = self.engine.capture()
        return None if self.arrays.lengths is not None and number == self.arrays.lengths.made_in else number

    def buffer(self, name: str, shape: tuple[int, ...], dtype: DTypeLike, room: tuple[int, ...] | None = None) -> Any:
        """A work buffer of a name, shape and dtype, made on first use and kept: CUDA graphs find it where it was.

        room: the shape of the largest of some that are in use one after another, and so lie in one memory, which is
            made for that one at once, as it can neither grow nor move later; None: it shares none.
        """
        return self._buffers.get(self.engine.empty, name, shape, dtype, room)

    def held_bytes(self) -> int:
        """Bytes of its work buffers that have been made."""
        made: int = sum(x.nbytes for x in [*self._kept.values(), *self._buffers.arrays()] if hasattr(x, "nbytes"))
        return made + (0 if self.core is None else self.core.held_bytes())

    def make(self, launches: Callable[[], None]) -> None:
        """Calls launches, which make something that follows from the plan's arrays, now and after every refresh."""
        if self.arrays.lengths is None:
            launches()
        else:
            self.arrays.lengths.make(launches)

    def refresh(self) -> None:
        """Plans anew, in the same arrays, for the lengths that lie on the GPU now; a CUDA graph may capture it.

        What forward and gather made with the lengths before is refused afterwards.

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
        """Raises if the lengths that the plan was made from lie on a GPU and are wrong; results are NaN then.

        Lengths on the host were checked when they were passed. A plan that a CUDA graph makes is asked for the lengths
        of the last replay.

        Args:
            wait: for the GPU. False: as far as it has told the host, which costs nothing. The attention's next plan
                asks so, and raises on all ranks; on one rank so do forward and backward. While a CUDA graph is
                captured there is no answer.

        Raises:
            ValueError: offsets that do not start at 0, decrease or end beyond total_rows, a sequence longer than its
                padded length, or a padded length that the sharding cannot split; says which sequence and the remedy.
        """
        if self.arrays.lengths is not None:
            if wait:
                self._come()
            self.arrays.lengths.check(wait)

    @property
    def generation(self) -> Generation | None:
        """The lengths on a GPU that it has now, for what is made with them; None: they lie on the host."""
        lengths = self.arrays.lengths
        return None if lengths is None else Generation(lengths, self.engine.capture)

    def enter(self) -> None:
        """Has the current stream, which is about to be given work, find the plan made, and up to date."""
        self._come()
        if self.arrays.lengths is not None:
            self.arrays.lengths.follow()

    def _come(self) -> None:
        """Orders the current stream and the one that the plan was made on."""
        if self.arrays.stream is not None:
            self.engine.enter(self)

    def shard(self, x: Any) -> Any:
        """This rank's rows of a whole packed array of queries, on the device where it lies.

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
        """The whole packed array of which every rank has its rows, such as out or dq, on every rank. Collective.

        Args:
            x: (local_rows, ...) in the order of plan.rows, an array as forward takes it; the same shape behind the rows
                and the same dtype on every rank.
            comm: the ranks of the plan.

        Returns:
            (total_rows, ...) in sequence order, a new array of the same dtype. What fillers held is dropped.

        Raises:
            TypeError: no array of this engine, or no comm.
            ValueError: a wrong number of rows, a comm of other ranks, or (on every rank) arrays that differ in shape or
                dtype.
        """
        return rank_rows.unshard(self, x, comm)

    def shift(self, x: Any, n: int = 1, fill: Any = -1, comm: Comm | None = None) -> Any:
        """Return the value n tokens later in the same sequence: labels, and those of multi-token prediction.

        Collective over several ranks: every rank is sent the whole x, which for token numbers is little.

        Args:
            x: (local_rows, ...) in the order of plan.rows, an array as forward takes it, of any dtype; the same shape
                and dtype on every rank. What padding and fillers hold is never read, NaN included.
            n: tokens later; negative: earlier.
            fill: what rows get whose sequence ends, or begins, before that, and padding and fillers, and all rows where
                lengths on a GPU are wrong; a number that the dtype of x can hold.
            comm: the ranks of the plan; None: there is one.

        Returns:
            (local_rows, ...), a new array of the dtype of x.

        Raises:
            TypeError: no array of this engine, n no int, fill no number, or no comm of a plan for several ranks.
            ValueError: a wrong number of rows, a fill that x cannot hold, n beyond int32, a comm of other ranks; or,
                given a comm, on every rank, all that is wrong on one of them, and x, n or fill that differ.
        """
        return rank_rows.shift(self, x, n, fill, comm)


def key_side_ints(plan: Plan) -> int:
    """Of rank_order, rows_of_keys, sends, returns and places, as far as they are arrays of their own."""
    if plan.keys_of is not None or plan.routes is None:
        return 0
    routes = plan.routes
    return 2 * plan.key_rows + routes.num_received + routes.num_sent + (1 + plan.cp_size) * plan.local_rows
