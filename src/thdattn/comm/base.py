"""Contract of a comm: what each collective does, the checks of its arguments, and what a backend implements."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

from thdattn import spans
from thdattn.arguments import INT32_MAX, Array, as_choice, as_count
from thdattn.comm.agreement import Fields, settle
from thdattn.comm.checks import check_array, check_buffers, check_shape, check_slices, check_sum_dtype, check_writable
from thdattn.comm.overlap.collectives import CollectivesInTurn, Pending, no_wait
from thdattn.comm.slices import Slices, buffer_for, packed, unpack

if TYPE_CHECKING:
    from typing_extensions import Self

_UNWATCHED = nullcontext()
_INTEGERS = frozenset({"int8", "uint8", "int32", "uint32", "int64", "uint64"})


class Comm(CollectivesInTurn):
    """Group of ranks with its collectives, as the rest of the package uses them.

    Every rank calls the same collectives in the same order with the same shapes and dtypes. Arrays are C-contiguous,
    and ``send`` and ``recv`` do not overlap. An array that other ranks read is free again when the call returns; on a
    GPU, for later work on the same stream. Arrays of size 0 are legal everywhere. Checks look at this rank's arguments
    only and cost no communication. Collectives of attention alone are in overlap/collectives.py.

    Attributes:
        name: name of the backend.
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
        devices: which arrays it takes, "cpu" for NumPy and "cuda" for CuPy.
        sum_dtypes: names of the dtypes that reduce_scatter and all_reduce take.
        capturable: whether collectives of CuPy arrays may be captured in a CUDA graph.
        overlaps: whether kernels overlap gather_heads, reduce_partials, and exchange where it is given sizes.
        reads_peers: whether they do so by peer memory, in which kernels read and write the memory of other ranks.
        spans_machines: whether the ranks are on several machines, as far as the backend knows.
        checks: whether ranks agree on every call before it is made, see `check` of thdattn.comm.init.
        no_gpus: why init, which was to choose, took host arrays; "": it took GPUs, or the backend was asked for.
        received_bytes: bytes that collectives of arrays have received from other ranks so far, by the shapes.
            Collectives that a graph has captured count once.
    """

    name: str
    devices: frozenset[str]
    sum_dtypes = _INTEGERS | {"float32", "float64"}
    capturable = False
    overlaps = False
    reads_peers = False
    spans_machines = False
    checks = False
    no_gpus = ""
    _gpu: int | None = None  # number of the only GPU whose arrays this rank takes, where that matters
    _closed = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.received_bytes = 0
        self._groups: list[Comm] = []
        self._before_close: list[Callable[[], None]] = []

    def all_gather(self, send: Array, recv: Array) -> None:
        """Put every rank's rows into one array, rank 0's first.

        Args:
            send: (rows, ...), any dtype.
            recv: (size * rows, ...), same dtype; overwritten.

        Raises:
            TypeError: an array is of the wrong kind or not C-contiguous, or the dtypes differ.
            ValueError: recv has the wrong shape, is read-only, or shares memory with send.
        """
        self._check_open()
        check_buffers(self, send, recv)
        check_shape(self, recv, (self.size * send.shape[0], *send.shape[1:]), "size * rows of send")
        self.received_bytes += (self.size - 1) * send.nbytes
        with self.watched("all_gather", send):
            self._all_gather(send, recv)

    def reduce_scatter(self, send: Array, recv: Array) -> None:
        """Add all ranks' arrays and keep this rank's share of the rows.

        Args:
            send: (size * rows, ...), a dtype of sum_dtypes.
            recv: (rows, ...), same dtype; overwritten with rows [rank * rows, (rank + 1) * rows) of the sum.

        Raises:
            TypeError: an array is of the wrong kind or not C-contiguous, the dtypes differ, or cannot be summed here.
            ValueError: rows of send not divisible by size, recv has the wrong shape, is read-only, or shares memory
                with send.
        """
        self._check_open()
        check_buffers(self, send, recv)
        check_sum_dtype(self, "send", send)
        rows, rest = divmod(send.shape[0], self.size)
        if rest:
            raise ValueError(
                f"send has {send.shape[0]} rows, not a multiple of the {self.size} ranks; "
                f"pad it to {(rows + 1) * self.size} rows"
            )
        check_shape(self, recv, (rows, *send.shape[1:]), "rows of send / size")
        self.received_bytes += (self.size - 1) * recv.nbytes
        with self.watched("reduce_scatter", send):
            self._reduce_scatter(send, recv)

    def all_reduce(self, array: Array, op: str) -> None:
        """Replace the array by its element-wise sum or maximum over all ranks.

        Args:
            array: any shape, a dtype of sum_dtypes; overwritten.
            op: "sum" or "max". The maximum of numbers and NaN is unspecified.

        Raises:
            TypeError: the array is of the wrong kind, not C-contiguous, or of a dtype that cannot be summed here; or op
                is no str.
            ValueError: op is unknown, or the array is read-only.
        """
        self._check_open()
        check_array(self, "array", array)
        check_writable("array", array)
        check_sum_dtype(self, "array", array)
        op = as_choice("op", op, ("sum", "max"))
        self.received_bytes += 2 * (self.size - 1) * array.nbytes // self.size
        with self.watched("all_reduce", array):
            self._all_reduce(array, op)

    def exchange(self, sends: Slices, recvs: Slices, sizes: Any = None) -> Callable[[], None]:
        """Start to send slices of arrays to some of the other ranks, and to receive slices from them.

        Both sides know the sizes from their plan. Every rank makes the call, even with nothing to send or to receive.

        Args:
            sends: pairs (slice, rank that it goes to). The elements of a row are contiguous, but rows need not follow
                each other: x[a:b], and x[:, a:b] of a C-contiguous x. Several may go to one rank. Empty ones are left
                out.
            recvs: pairs (slice, rank that it comes from). From each rank they are as many as it sends here, in the same
                order and of equally many bytes. Shapes and dtypes are the receiver's. Overwritten; they overlap no
                sends.
            sizes: (size, size) integers in host memory, the bytes that each rank (row) sends to each other one
                (column). They are the same on all ranks, and all ranks pass them or none does. With them, slices may go
                through peer memory, beside kernels.

        Returns:
            A function that waits for recvs, called before they are read; on a GPU the current stream waits. It holds
            recvs until then, and waits when it is dropped. Sent slices are free when exchange returns, as in
            all_gather.

        Raises:
            TypeError: an array is of the wrong kind or the elements of its rows are not contiguous, host arrays and GPU
                arrays are mixed, or a rank is no integer.
            ValueError: a rank is this one or none of the others, an array to receive is read-only, sizes are not those
                of the slices, or (on simulated ranks) the sender's slices are not those that the receiver expects.
        """
        self._check_open()
        check_slices(self, sends, recvs, sizes)
        sends, recvs = ([(array, peer) for array, peer in slices if array.size] for slices in (sends, recvs))
        self.received_bytes += sum(array.nbytes for array, _ in recvs)
        first = next((array for array, _ in (*sends, *recvs)), None)
        with self.watched(f"exchange ({len(sends)} slices out, {len(recvs)} in)", first):
            wait = self._exchange(sends, recvs, sizes)
        return wait if wait is no_wait else Pending(wait, recvs)

    def barrier(self) -> None:
        """Return when every rank has come here; on GPU ranks also wait for the current stream."""
        self._check_open()
        self._barrier()

    def agree(
        self, name: str, value: int | Fields, refusal: str = "", remedy: str = "give every rank the same global input"
    ) -> None:
        """Check that every rank holds the same number or fields, such as the lengths of a plan's batch.

        It costs a message over the host: call it once per plan, not once per layer.

        Args:
            name: the question, for the message; the same on every rank.
            value: any int, a flag is 0 or 1; or by name numbers, texts, tuples and NumPy arrays.
            refusal: why this rank cannot go on, with the remedy, whatever the values are; "": it can.
            remedy: how to make the values equal, for the message.

        Raises:
            TypeError: value is neither an integer nor a mapping.
            ValueError: on every rank. It has the refusals of all ranks; or the fields that differ, with each rank's
                value; or the calls that ranks make instead.
        """
        self._check_open()
        settle(self._gather_values, name, value, refusal, remedy)

    def checked(self, name: str, describe: Callable[[Any], Fields], subject: Any) -> AbstractContextManager[object]:
        """Return a block in which all ranks check their arguments of a call; see `check` of thdattn.comm.init.

        With `checks`, ranks agree at its end on the fields of describe(subject). An error that the block raises on one
        rank is then raised on all. Without, the block costs nothing, and each rank raises alone.
        """
        return self._agreeing(name, describe, subject) if self.checks else _UNWATCHED

    @contextmanager
    def _agreeing(self, name: str, describe: Callable[[Any], Fields], subject: Any) -> Iterator[None]:
        fields: Fields = {}
        failure: Exception | None = None
        try:
            yield
            fields = describe(subject)
        except (TypeError, ValueError) as error:
            failure = error
        try:
            self.agree(name, fields, "" if failure is None else str(failure))
        except ValueError as error:
            raise error from failure

    def split(self, color: int, key: int = 0) -> Comm:
        """Form groups: the ranks that pass one color become a comm of their own.

        Every rank of this comm calls it and gets its group's comm, of the same backend. Groups may be split again.

        Args:
            color: number of this rank's group, >= 0.
            key: order of the ranks in a group; ranks with the same key keep the order that they have here.

        Raises:
            TypeError: color or key is not an integer.
            ValueError: color is negative, or one of them has more than 32 bits; or, on torch before 2.13, on every
                rank: keys put ranks in another order than the world's.
            RuntimeError: on every rank of the group, if NCCL could not start on one.
        """
        self._check_open()
        color = as_count("color", color, "number the groups from 0", at_least=0)
        key = as_count("key", key, "number the ranks of a group from 0", at_least=-INT32_MAX)
        group = self._split(color, key)
        self._groups = [*(other for other in self._groups if not other._closed), group]
        return group

    def close(self) -> None:
        """Release the backend's resources; a second call does nothing.

        Every rank must call it. Actions of before_close come first, then groups are closed, the last one first, and
        then this comm. Collectives raise RuntimeError afterwards.
        """
        if not self._closed:
            self._act_before_close()
            for group in reversed(self._groups):
                group.close()
            self._closed = True
            self._close()

    def watched(self, what: str, array: Array = None) -> AbstractContextManager[object]:
        """Return a block, with init's deadline, for work that waits for other ranks on the host or the current stream.

        Collectives are watched already; inside the block they count as one operation. Nothing is watched while the
        stream is captured, as nothing runs: have the graph's launch watched. Without a deadline of init, the block does
        nothing.

        Args:
            what: the operation, for the message and for timelines; one that begins with "replay" computes there.
            array: an array whose shape and dtype are for the message.
        """
        watch = self._watched(what, array)
        return spans.watched(watch, what, array) if spans.active else watch

    def before_close(self, action: Callable[[], None]) -> None:
        """Register an action that runs first when the comm is closed, such as destroying graphs of its collectives.

        Register graphs that hold collectives of several groups with the comm that these were split from.
        """
        self._check_open()
        self._before_close.append(action)

    def forget(self, action: Callable[[], None]) -> None:
        """Undo before_close for an action."""
        if action in self._before_close:
            self._before_close.remove(action)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # NOTE: not after errors: closing waits for the other ranks, which may wait for this one in a collective.
        if error is None:
            self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size}>"

    def _watched(self, what: str, array: Array = None) -> AbstractContextManager[object]:
        """Return the block of `watched`; timelines do not show it."""
        return _UNWATCHED

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"this {self.name} comm is closed; call thdattn.comm.init() for a new one")

    @abstractmethod
    def _all_gather(self, send: Array, recv: Array) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, send: Array, recv: Array) -> None: ...

    @abstractmethod
    def _all_reduce(self, array: Array, op: str) -> None: ...

    def _exchange(self, sends: Slices, recvs: Slices, sizes: Any) -> Callable[[], None]:
        buffers = [(buffer_for(array), peer) for array, peer in recvs]
        self._send_receive([(packed(array), peer) for array, peer in sends], buffers)
        for (array, _), (made, _) in zip(recvs, buffers, strict=True):
            unpack(array, made)
        return no_wait

    def _send_receive(self, sends: Slices, recvs: Slices) -> None:
        """Send and receive messages, each (bytes,) uint8; those from one rank arrive in its order."""
        raise NotImplementedError(f"a comm of backend {self.name!r} exchanges nothing")

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _gather_values(self, value: Any) -> Sequence[Any]:
        """Return the values that all ranks passed, in rank order: small Python objects."""

    @abstractmethod
    def _split(self, color: int, key: int) -> Comm: ...

    def _close(self) -> None:
        """Release the backend's resources; called once."""

    def _act_before_close(self) -> None:
        for group in self._groups:
            group._act_before_close()
        while self._before_close:
            self._before_close.pop()()
