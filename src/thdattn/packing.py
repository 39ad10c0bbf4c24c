"""The packed batch: the length of every sequence, and the rows of the packed buffer that it occupies.

This module defines sequence order: sequence b starts at row cu_seqlens_padded[b], with its valid rows first and its
padding after them.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thdattn.arguments import (
    INT32_MAX,
    as_count,
    as_fill,
    as_host_array,
    as_host_ints,
    as_int,
    check_arrays,
    check_rows,
    lies_on_device,
)
from thdattn.trees import Trees

T = TypeVar("T")


class PackedBatch:
    """Sequences of different lengths in one buffer of rows, without a batch dimension.

    The offsets are global: the same on every rank. Offsets on the host are copied, frozen and checked here, so that
    no later code has to check them again. Offsets on a GPU are not copied, and only their dtypes and shapes are
    checked: reading a value would make the host wait, and a CUDA graph may rewrite offsets between replays.

    Args:
        cu_seqlens: (num_seqs + 1,) int32, offsets of the valid tokens: starts at 0, never decreases. A NumPy
            array, a list of ints, or an array on a GPU.
        cu_seqlens_padded: (num_seqs + 1,) int32, row offsets of the sequences in the packed buffer, on the same side
            (host or GPU) as cu_seqlens. None means cu_seqlens: no padding anywhere.
        total_rows: rows of the packed buffer, at most 2**31 - 1; required for offsets on a GPU. None means
            cu_seqlens_padded[-1]. A larger number is a fixed capacity, whose last rows belong to no sequence.

    Attributes:
        cu_seqlens: (num_seqs + 1,) int32, read-only on the host.
        cu_seqlens_padded: (num_seqs + 1,) int32, read-only on the host.
        total_rows: rows of the packed buffer.
        on_device: True if the offsets are on a GPU.
        trees: the Trees of a batch that from_trees has made; None: its sequences are no trees.
        node_table: the nodes of trees whose offsets are on a GPU, as plan/node_table.py makes it; None elsewhere.

    Raises:
        TypeError: offsets that are not int32 or no array, or a total_rows that is no int.
        ValueError: offsets that are not 1-D, do not start at 0 or decrease; a sequence longer than its padded
            length; offsets of different shapes or on different sides; total_rows too small, too large or,
            for offsets on a GPU, missing.

    Source: the THD format of Transformer Engine (cu_seqlens, cu_seqlens_padded).
    """

    def __init__(
        self,
        cu_seqlens: ArrayLike,
        cu_seqlens_padded: ArrayLike | None = None,
        *,
        total_rows: int | None = None,
    ) -> None:
        self.trees: Trees | None = None
        self.node_table: Any = None
        self.on_device: bool = lies_on_device("cu_seqlens", cu_seqlens)
        beside = None if cu_seqlens_padded is None else lies_on_device("cu_seqlens_padded", cu_seqlens_padded)
        if beside not in (None, self.on_device):
            here, there = ("a GPU", "the host") if self.on_device else ("the host", "a GPU")
            raise ValueError(
                f"cu_seqlens lies on {here} but cu_seqlens_padded on {there}; wanted both on one side; "
                f"copy cu_seqlens_padded to {here}"
            )
        checked = _device_offsets if self.on_device else _host_offsets
        self.cu_seqlens: Any = checked("cu_seqlens", cu_seqlens)
        self.cu_seqlens_padded: Any = self.cu_seqlens
        if cu_seqlens_padded is not None:
            self.cu_seqlens_padded = checked("cu_seqlens_padded", cu_seqlens_padded)
            self._check_padding()
        self.total_rows: int = self._checked_total_rows(total_rows)

    @classmethod
    def from_lengths(cls, lengths: ArrayLike, multiple: int = 1) -> PackedBatch:
        """Make a batch of sequences with these lengths, each padded to a multiple.

        Args:
            lengths: (num_seqs,) integers >= 0, valid tokens of every sequence.
            multiple: >= 1; every padded length is the next multiple of it (2*cp_size for dual_chunk).

        Returns:
            A batch on the host; total_rows is the sum of the padded lengths.

        Raises:
            TypeError: lengths that are not integers, or a multiple that is no int.
            ValueError: lengths not 1-D, a negative length, multiple < 1 or >= 2**31, or 2**31 rows or more.
        """
        multiple = as_count("multiple", multiple, "pass 1 for no padding")
        valid = _checked_lengths(lengths, "sequence", "num_seqs")
        padded = -(-valid // multiple) * multiple
        if padded.sum() > INT32_MAX:
            raise ValueError(
                f"lengths padded to multiples of {multiple} take {padded.sum()} rows, wanted < 2**31 "
                "as rows are counted in int32; split the batch"
            )
        cu_seqlens, cu_seqlens_padded = np.zeros((2, valid.size + 1), np.int32)
        np.cumsum(valid, out=cu_seqlens[1:])
        np.cumsum(padded, out=cu_seqlens_padded[1:])
        return cls(cu_seqlens, cu_seqlens_padded)

    @classmethod
    def from_trees(cls, lengths: ArrayLike, parents: ArrayLike, multiple: int = 1) -> PackedBatch:
        """Make a batch of prefix trees, whose shared prefixes are stored and computed once.

        A token sees the earlier tokens of its node and all tokens of the node's ancestors. Each tree is a sequence of
        the batch; a plain document is a tree of one node. pack and unpack take and return one array per node.

        Args:
            lengths: (num_nodes,) integers >= 0, tokens of every node. Nodes are depth first: a node, then the whole
                subtree of each of its children; one tree after the other.
            parents: (num_nodes,) integers, index of every node's parent; -1 for the root of a tree.
            multiple: >= 1; every tree is padded to a multiple of it (2*cp_size for dual_chunk).

        Returns:
            A batch on the host, whose cu_seqlens are those of trees.

        Raises:
            TypeError: lengths or parents that are not integers, or a multiple that is no int.
            ValueError: as from_lengths; also a wrong number of parents, and nodes that are not depth first.
        """
        trees = Trees.of(_checked_lengths(lengths, "node", "num_nodes"), parents)
        batch = cls.from_lengths(trees.tree_lengths(), multiple)
        batch.trees = trees
        return batch

    @property
    def nodes(self) -> NDArray[np.int32] | None:
        """(num_nodes + 1,) int32, offsets of the tokens of nodes, as cu_seqlens are of trees; None without trees."""
        return None if self.trees is None else self.trees.nodes

    @property
    def parents(self) -> NDArray[np.int32] | None:
        """(num_nodes,) int32, index of every node's parent, -1 for the root of a tree; None without trees."""
        return None if self.trees is None else self.trees.parents

    def paths(self) -> list[NDArray[np.int32]]:
        """Return the sequences that the trees stand for: for every leaf, the rows of its ancestors and its own.

        Returns:
            One (path length,) int32 array of rows in sequence order per leaf; without trees one per sequence.

        Raises:
            ValueError: offsets on a GPU.
        """
        self.require_host("paths")
        begins, lengths = self._pieces()
        pieces = [np.arange(begin, begin + length, dtype=np.int32)
                  for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True)]
        if self.trees is None:
            return pieces
        return [np.concatenate([pieces[node] for node in path]) for path in self.trees.paths()]

    @property
    def has_trees(self) -> bool:
        """True if sequences are prefix trees."""
        return self.trees is not None or self.node_table is not None

    @property
    def num_seqs(self) -> int:
        """Number of sequences, zero-length ones included."""
        return int(self.cu_seqlens.shape[0]) - 1

    @property
    def lengths(self) -> NDArray[np.int32]:
        """(num_seqs,) int32, valid tokens of every sequence. ValueError if the offsets are on a GPU."""
        self.require_host("lengths")
        lengths: NDArray[np.int32] = np.diff(self.cu_seqlens)
        return lengths

    @property
    def total_tokens(self) -> int:
        """Valid tokens of all sequences together. ValueError if the offsets are on a GPU."""
        self.require_host("total_tokens")
        return int(self.cu_seqlens[-1])

    def padded_to(self, total_rows: int) -> PackedBatch:
        """Return this batch in a buffer of total_rows >= its own rows; the added rows belong to no sequence."""
        padded = copy.copy(self)
        padded.total_rows = self._checked_total_rows(total_rows)
        return padded

    def described(self) -> dict[str, Any]:
        """Return the fields, by name, that ranks compare; for offsets on a GPU the sizes alone."""
        fields = {"total_rows": self.total_rows, "num_seqs": self.num_seqs}
        offsets = {} if self.on_device else {"cu_seqlens": self.cu_seqlens, "cu_seqlens_padded": self.cu_seqlens_padded}
        trees = {} if self.trees is None else {"nodes": self.nodes, "parents": self.parents}
        table = {} if self.node_table is None else {"node_table": self.node_table.shape}
        return {**fields, **offsets, **trees, **table}

    def offsets(self, num_offsets: int) -> NDArray[np.int32]:
        """Return (2, num_offsets), cu_seqlens and cu_seqlens_padded with empty sequences at the end."""
        self.require_host("offsets")
        missing = (0, num_offsets - self.num_seqs - 1)
        return np.stack([np.pad(x, missing, mode="edge") for x in (self.cu_seqlens, self.cu_seqlens_padded)])

    def pack(self, arrays: Iterable[ArrayLike], fill: Any = 0) -> NDArray[Any]:
        """Pack one host array per sequence, or per node of trees, into one array in sequence order.

        Args:
            arrays: num_seqs arrays (lengths[b], ...), all of one trailing shape and one dtype; for trees one array per
                node.
            fill: value of the rows without a valid token; the arrays' dtype must hold it.

        Returns:
            (total_rows, ...), a new array of the same dtype.

        Raises:
            TypeError: arrays is no list of host arrays, or their dtypes differ.
            ValueError: a wrong number of arrays or of rows in one; different trailing shapes; no array at all, so that
                the trailing shape is unknown; a fill that the dtype cannot hold; or offsets on a GPU.
        """
        self.require_host("pack")
        begins, lengths = self._pieces()
        remedy = "pass one array per sequence, as long as batch.lengths"
        if self.trees is not None:
            remedy = "pass one array per node, as long as its difference of batch.nodes"
        pieces = check_arrays("arrays", arrays, lengths, remedy)
        if not pieces:
            raise ValueError(
                "arrays is empty, as the batch has no sequences: wanted at least one array to take the "
                "trailing shape and dtype from; make the buffer with np.full((batch.total_rows, ...), fill)"
            )
        rows = np.full((self.total_rows, *pieces[0].shape[1:]), as_fill(fill, pieces[0].dtype))
        rows[rows_of_runs(begins, lengths)] = np.concatenate(pieces)
        return rows

    def unpack(self, rows: ArrayLike) -> list[NDArray[Any]]:
        """Return the valid rows of every sequence, or of every node of trees, of a host array in sequence order.

        Args:
            rows: (total_rows, ...), any dtype.

        Returns:
            num_seqs arrays (lengths[b], ...), for trees one per node: views of rows, not copies.

        Raises:
            TypeError: rows is no array on the host.
            ValueError: a wrong number of rows, or offsets on a GPU.
        """
        self.require_host("unpack")
        remedy = "pass an array of batch.total_rows rows, as pack makes it"
        packed = check_rows("rows", rows, self.total_rows, remedy)
        begins, lengths = self._pieces()
        ends = begins + lengths
        return [packed[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Freeze the offsets of a copied or unpickled batch, because NumPy's copies are writable."""
        self.__dict__.update(state)
        for offsets in () if self.on_device else (self.cu_seqlens, self.cu_seqlens_padded):
            offsets.setflags(write=False)
        if self.trees is not None:
            self.trees.frozen()

    def __repr__(self) -> str:
        tokens = "lengths on a GPU" if self.on_device else f"total_tokens={self.total_tokens}"
        nodes = "" if self.trees is None else f"num_nodes={self.trees.num_nodes}, "
        return f"<PackedBatch num_seqs={self.num_seqs}, {nodes}{tokens}, total_rows={self.total_rows}>"

    def require_host(self, what: str) -> None:
        """Raise a ValueError if the offsets are on a GPU; its message says that `what` needs them on the host."""
        if self.on_device:
            raise ValueError(
                f"{what} needs the offsets on the host, but cu_seqlens lies on a GPU and reading it would "
                "make the host wait; build the PackedBatch from NumPy offsets (cu_seqlens.get())"
            )

    def _pieces(self) -> tuple[NDArray[np.integer[Any]], NDArray[np.int32]]:
        """Return the first rows and the lengths of all sequences, or of all nodes of trees."""
        if self.trees is None:
            return self.cu_seqlens_padded[:-1], self.lengths
        return self.trees.rows(self.cu_seqlens_padded)[0], self.trees.lengths

    def _check_padding(self) -> None:
        if tuple(self.cu_seqlens_padded.shape) != tuple(self.cu_seqlens.shape):
            raise ValueError(
                f"cu_seqlens_padded has shape {tuple(self.cu_seqlens_padded.shape)}, wanted "
                f"{tuple(self.cu_seqlens.shape)} as cu_seqlens; pass num_seqs + 1 offsets in both"
            )
        if self.on_device:
            return
        padded = np.diff(self.cu_seqlens_padded)
        too_long = self.lengths > padded
        if too_long.any():
            seq = int(too_long.argmax())
            raise ValueError(
                f"sequence {seq} has {self.lengths[seq]} tokens but cu_seqlens_padded leaves it "
                f"{padded[seq]} rows; wanted length <= padded length; pad it to {self.lengths[seq]} or more"
            )

    def _checked_total_rows(self, total_rows: int | None) -> int:
        if total_rows is None:
            if self.on_device:
                raise ValueError(
                    "total_rows is None, wanted an int, as cu_seqlens lies on a GPU and reading its last "
                    "value would make the host wait; pass total_rows, the rows of your packed buffer"
                )
            return int(self.cu_seqlens_padded[-1])
        total_rows = as_int("total_rows", total_rows)
        if not 0 <= total_rows <= INT32_MAX:
            raise ValueError(
                f"total_rows is {total_rows}, wanted 0 <= total_rows < 2**31 as rows are counted in int32; "
                "pass the rows of your packed buffer, or split the batch"
            )
        if not self.on_device and total_rows < self.cu_seqlens_padded[-1]:
            raise ValueError(
                f"total_rows is {total_rows} but cu_seqlens_padded ends at {self.cu_seqlens_padded[-1]}; "
                "wanted at least that; leave total_rows out, or pass the rows of a larger buffer"
            )
        return total_rows


def first_fit(
    items: Iterable[T], rows_of: Callable[[T], int], capacity: int, look_ahead: int = 64
) -> Iterator[list[T]]:
    """Yield the items of one pack after another: each pack takes the next item that still fits.

    Items keep their order, except those too long for the rest of a pack: they come first in the next pack.

    Args:
        items: in the order in which packs should hold them; read lazily, pack by pack.
        rows_of: returns the rows that an item takes, padding included.
        capacity: rows of a pack.
        look_ahead: number >= 1 of items too long for the rest of a pack after which the pack is closed.

    Raises:
        TypeError: a capacity or a look_ahead that is no int.
        ValueError: a capacity or a look_ahead below 1, or an item with more rows than a pack.
    """
    capacity, look_ahead = as_count("capacity", capacity), as_count("look_ahead", look_ahead)
    coming = iter(items)
    waiting: deque[T] = deque()
    while True:
        chosen: list[T] = []
        too_long: list[T] = []
        free = capacity
        while free > 0 and len(too_long) < look_ahead:
            item = waiting.popleft() if waiting else next(coming, None)
            if item is None:
                break
            rows = rows_of(item)
            if rows > capacity:
                raise ValueError(f"an item takes {rows} rows, wanted at most {capacity}, the rows of a pack; split it")
            (chosen if rows <= free else too_long).append(item)
            free -= rows if rows <= free else 0
        waiting.extendleft(reversed(too_long))
        if not chosen:
            return
        yield chosen


def schedule(
    lengths: ArrayLike, groups: int, tokens: int, micro_batches: int | None = None, work: ArrayLike | None = None,
    multiple: int = 1,
) -> list[list[list[int]]]:
    """Deal the documents of a global batch to groups of ranks, as micro-batches, with even work over the groups.

    Groups work beside each other until the end of a step, so only the sums of their micro-batches matter. Documents go
    one by one, those with most work first, to the group with the least work that has room. There they go to the
    emptiest micro-batch, or, if then not all documents fit, to the fullest with room. The result depends on the
    arguments alone, so every rank may compute it.

    Args:
        lengths: (num_docs,) integers >= 0, tokens of every document.
        groups: number of groups of ranks, >= 1.
        tokens: rows of a micro-batch, over all ranks of its group.
        micro_batches: of each group. None: the fewest with which the documents fit.
        work: (num_docs,) numbers >= 0, the time of every document in any unit. None: its causal pairs. With the rest of
            a transformer layer of some width it is about `pairs + 6 * width * lengths`.
        multiple: every document is padded to a multiple of this, as for PackedBatch.from_lengths.

    Returns:
        For each group, its micro-batches: lists of indices of documents, ascending. Some may be empty.

    Raises:
        TypeError: lengths or another argument are of the wrong type.
        ValueError: a document with more rows than a micro-batch, more documents than micro_batches hold, wrong numbers
            or shapes of lengths or work, or a number below 1.

    Source: the longest-processing-time rule, R. L. Graham, 1969, with capacities.
    """
    groups, tokens = as_count("groups", groups), as_count("tokens", tokens)
    batch = PackedBatch.from_lengths(lengths, multiple)
    rows = np.diff(batch.cu_seqlens_padded).astype(np.int64)
    if rows.max(initial=0) > tokens:
        index = int(rows.argmax())
        raise ValueError(f"lengths[{index}] takes {rows[index]} rows, wanted at most tokens = {tokens}; split the "
                         f"document, or pass more tokens")
    times = _checked_work(work, batch.lengths)
    fewest = max(1, -(-int(rows.sum()) // (groups * tokens)))
    if micro_batches is not None:
        dealt = _dealt(rows, times, groups, tokens, as_count("micro_batches", micro_batches))
        if dealt is None:
            raise ValueError(f"micro_batches is {micro_batches}, wanted enough of {tokens} rows for {groups} groups to "
                             f"hold documents of {rows.sum()} rows; pass {fewest + 1}, say, or None for the fewest")
        return dealt
    found = (_dealt(rows, times, groups, tokens, number) for number in itertools.count(fewest))
    return next(dealt for dealt in found if dealt is not None)


def _checked_work(work: ArrayLike | None, lengths: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the work of every document; see schedule."""
    if work is None:
        return lengths * (lengths + 1.0) / 2
    times = np.asarray(as_host_array("work", work))
    if times.dtype.kind not in "iuf":
        raise TypeError(f"work is {times.dtype}, wanted numbers; pass the time of every document, in any unit")
    if times.shape != lengths.shape or not (np.isfinite(times).all() and (times >= 0).all()):
        raise ValueError(f"work has shape {times.shape} and values from {times.min(initial=0)} to "
                         f"{times.max(initial=0)}, wanted {lengths.shape} finite numbers >= 0; pass one per document")
    return times.astype(np.float64)


def _dealt(
    rows: NDArray[np.int64], work: NDArray[np.float64], groups: int, tokens: int, micro_batches: int
) -> list[list[list[int]]] | None:
    """Deal documents as schedule does; None if they do not fit so many micro-batches."""
    ways = (_dealt_to(rows, work, np.full((groups, micro_batches), tokens), sign) for sign in (-1, 1))
    return next((dealt for dealt in ways if dealt is not None), None)


def _dealt_to(
    rows: NDArray[np.int64], work: NDArray[np.float64], free: NDArray[np.int64], sign: int
) -> list[list[list[int]]] | None:
    """Deal documents to micro-batches; None if they do not fit.

    Args:
        rows, work: (num_docs,) of every document.
        free: (groups, micro_batches), rows of every micro-batch; overwritten.
        sign: -1 takes the emptiest micro-batch of a group, 1 the fullest with room.
    """
    done = np.zeros(len(free))
    dealt: list[list[list[int]]] = [[[] for _ in each] for each in free]
    for document in np.lexsort((-rows, -work)).tolist():
        fits = free >= rows[document]
        if not fits.any():
            return None
        group = int(np.where(fits.any(axis=1), done, np.inf).argmin())
        chosen = int(np.where(fits[group], sign * free[group], INT32_MAX).argmin())
        dealt[group][chosen].append(document)
        free[group, chosen] -= rows[document]
        done[group] += work[document]
    return [[sorted(documents) for documents in each] for each in dealt]


_kept: weakref.WeakKeyDictionary[PackedBatch, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def once(batch: PackedBatch, key: Hashable, make: Callable[[], T]) -> T:
    """Return the value cached for this batch and key; call `make` on a miss."""
    kept = _kept.setdefault(batch, {})
    if key not in kept:
        kept[key] = make()
    made: T = kept[key]
    return made


def as_batch(batch: Any, name: str = "batch") -> PackedBatch:
    """Return the batch; raise a TypeError if it is no PackedBatch."""
    if not isinstance(batch, PackedBatch):
        raise TypeError(f"{name} is a {type(batch).__name__}, wanted a PackedBatch; make PackedBatch(cu_seqlens)")
    return batch


def as_like(like: Any) -> PackedBatch | None:
    """Return the batch passed as `like`, or None; raise a TypeError for anything else."""
    return None if like is None else as_batch(like, "like")


def rows_of_runs(begins: NDArray[np.integer[Any]], lengths: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
    """Return the rows of many runs of consecutive rows, one run after the other.

    Args:
        begins: (num_runs,) integers, first row of every run.
        lengths: (num_runs,) integers >= 0, rows of every run.

    Returns:
        (sum of lengths,) int32. Begins [5, 2] and lengths [2, 3] give [5, 6, 2, 3, 4].
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    shift = begins - (ends - lengths)
    rows = np.repeat(shift, lengths)
    rows += np.arange(rows.size)
    return rows.astype(np.int32)


def _checked_lengths(lengths: ArrayLike, of: str, number: str) -> NDArray[np.int64]:
    """Return lengths of sequences or nodes as int64; raise a TypeError or ValueError if they are none."""
    valid = as_host_ints("lengths", lengths)
    if valid.ndim != 1:
        raise ValueError(f"lengths has shape {valid.shape}, wanted ({number},); pass one length per {of}")
    bad = (valid < 0) | (valid > INT32_MAX)
    if bad.any():
        index = int(bad.argmax())
        raise ValueError(
            f"lengths[{index}] is {valid[index]}, wanted 0 <= length < 2**31; "
            f"pass the number of tokens of every {of}, 0 for an empty one"
        )
    return valid.astype(np.int64)


def _device_offsets(name: str, offsets: Any) -> Any:
    dtype = str(offsets.dtype).rpartition(".")[2]  # "int32" of CuPy and JAX, "torch.int32" of torch
    if dtype != "int32":
        raise TypeError(f"{name} is {dtype}, wanted int32; convert it with .astype('int32') where it is made")
    _check_offsets_shape(name, tuple(offsets.shape))
    return offsets


def _host_offsets(name: str, offsets: Any) -> NDArray[np.int32]:
    """Return a frozen, checked int32 copy: a caller who reuses the array cannot undo the checks."""
    is_typed = hasattr(offsets, "dtype")
    values = as_host_array(name, offsets) if is_typed else as_host_ints(name, offsets)
    _check_offsets_shape(name, values.shape)
    if is_typed and values.dtype != np.int32:
        raise TypeError(f"{name} is {values.dtype}, wanted int32; convert it with .astype('int32')")
    if values[0] != 0:
        raise ValueError(
            f"{name}[0] is {values[0]}, wanted 0; put a 0 in front of the cumulative sum of the lengths"
        )
    decreases = values[1:] < values[:-1]
    if decreases.any():
        seq = int(decreases.argmax())
        raise ValueError(
            f"{name} decreases from {values[seq]} at index {seq} to {values[seq + 1]} at index {seq + 1}; "
            "wanted offsets that never decrease; pass the cumulative sum of the lengths, starting at 0"
        )
    if values[-1] > INT32_MAX:
        raise ValueError(
            f"{name} ends at {values[-1]}, wanted < 2**31 as rows are counted in int32; split the batch"
        )
    frozen = values.astype(np.int32)
    frozen.setflags(write=False)
    return frozen


def _check_offsets_shape(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 1 or shape[0] < 1:
        raise ValueError(
            f"{name} has shape {shape}, wanted (num_seqs + 1,); pass the cumulative sum of the lengths, "
            "starting at 0 ([0] for no sequences)"
        )
