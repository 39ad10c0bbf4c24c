"""Ranks and the collectives between them: one contract, five backends.

| backend  | what a rank is                                     | arrays                  |
|----------|----------------------------------------------------|-------------------------|
| "single" | this process, alone                                | NumPy, CuPy             |
| local    | one thread of this process, from `run_local`       | NumPy, CuPy             |
| "mpi"    | one process, found through MPI                     | NumPy                   |
| "nccl"   | one process with its own GPU, found through MPI    | CuPy                    |
| torch    | one process of torch.distributed, see `from_torch` | gloo: NumPy, nccl: CuPy |

A program looks the same on all of them:

    import thdattn

    with thdattn.comm.init() as comm:
        ...

and is started as `mpiexec -n 4 python -m mpi4py program.py`. No rank of such a job waits in vain for ever:

* An exception that nobody catches in the main thread ends all ranks at once, after its traceback, from the moment at
  which `init` has started MPI; `-m mpi4py` adds sys.exit with an error to that. Where a signal kills a rank, the
  launcher ends the others.
* Whatever else makes the others wait meets the deadline: a rank that was stopped (SIGSTOP), hangs, has ended without an
  error, failed in another thread, or left out a call or made a different one. What has not completed within init's
  `timeout`, 60 s unless another is passed, ends every rank of the job with an error and one line on stderr that names
  rank, host, operation, shape and dtype, its number among the operations of this comm, and how long it took.
* On GPUs the clock runs from when the GPU has come to the operation: it may be enqueued long before, and behind long
  work. A graph that `thdattn.graphs` replays is one operation; launch one of your own within `comm.watched`. Time for
  which this process is stopped does not count.
* A rank that is late on purpose is late all the same: where one writes a checkpoint for minutes while the others wait
  in the next collective, pass a longer `timeout`.
* `init` starts MPI, finds the GPUs and starts NCCL, and gives each of these steps five times the `timeout`. Its clock
  is that of the ranks that have come to it, so call it first. Where the program has imported mpi4py.MPI before, the
  start of MPI has no deadline; nor has anything after close(), such as MPI_Finalize, which waits for all ranks.
* The end is MPI_Abort; a process that is still there 5 s later says where its threads are, and exits.
* Simulated ranks have the timeout of `run_local`, and those of `from_torch` the one of their process group.
* Ctrl-C, with MPICH: the launcher sends SIGINT to every rank, and Python raises KeyboardInterrupt on those that
  compute; one that waits in a collective or for its GPU handles the signal when that ends, which may be at the
  deadline. A second Ctrl-C kills all ranks at once, whatever they do.
* Ctrl-C, with Open MPI: the launcher sends SIGTERM, no SIGINT, and kills the ranks a quarter of a second (version 5)
  or a second (version 4) later. There is no time for a checkpoint, and a second Ctrl-C is not needed.

Groups: `comm.split(color)` makes comms of some of the ranks each, say one per row and one per column of a grid, and
`comm.init(world=...)` takes any communicator of mpi4py. Ranks of one comm make the same calls on it in the same order,
and nothing else is asked of groups that share no rank. Where they share ranks, each rank may mix the calls of its comms
as it likes, provided that all calls of all ranks can be put in one sequence that keeps every rank's own order; a
program in which all ranks do "first the row, then the column" has one. If rank 0 is first in its row, rank 1 of that
row first in its column, and so on round the grid, each waits for the next. GPU ranks use one stream for the comms that
they share, or order the streams by events in the same way on all ranks. Closing a comm closes its groups.

Importing this package needs neither MPI nor a GPU: mpi4py, CuPy and PyTorch are loaded when a backend is made.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from thdattn.arguments import INT32_MAX, as_choice, as_count, as_int
from thdattn.comm.checks import Checks
from thdattn.comm.heads import Arrival as Arrival
from thdattn.comm.heads import Heads
from thdattn.comm.heads import nothing as nothing
from thdattn.comm.slices import Slices, packed, put, room

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Comm", "SingleComm", "from_torch", "init", "run_local"]

Result = TypeVar("Result")

_UNWATCHED = nullcontext()
_INTEGERS = frozenset({"int8", "uint8", "int32", "uint32", "int64", "uint64"})


class Comm(Checks, Heads):
    """What the rest of the package asks of a group of ranks.

    Every rank calls the same collectives in the same order with the same shapes and dtypes. Arrays are C-contiguous
    and ``send`` and ``recv`` do not overlap; what the other ranks read is free again when the call returns (on a GPU:
    for work later on the same stream). Arrays of size 0 are legal everywhere. Checks look at this rank's arguments
    only and cost no communication.

    Attributes:
        name: which backend this is.
        rank: this rank, 0 <= rank < size.
        size: number of ranks.
        devices: which arrays it takes, "cpu" for NumPy and "cuda" for CuPy.
        sum_dtypes: names of the dtypes that reduce_scatter and all_reduce take.
        capturable: whether collectives of CuPy arrays may be captured in a CUDA graph.
        overlaps: whether gather_heads and sum_rows, and exchange where it is given sizes, go on while kernels run.
        received_bytes: what collectives of arrays have brought from other ranks so far, by the shapes; those that a
            graph has captured count once.
    """

    sum_dtypes = _INTEGERS | {"float32", "float64"}
    capturable = False
    overlaps = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.received_bytes = 0
        self._groups: list[Comm] = []
        self._before_close: list[Callable[[], None]] = []

    def all_gather(self, send: Any, recv: Any) -> None:
        """Put every rank's rows into one array, rank 0's first.

        Args:
            send: (rows, ...), any dtype.
            recv: (size * rows, ...), same dtype; overwritten.

        Raises:
            TypeError: an array is of the wrong kind or not C-contiguous, or the dtypes differ.
            ValueError: recv has the wrong shape, is read-only, or shares memory with send.
        """
        self._check_buffers(send, recv)
        self._check_shape(recv, (self.size * send.shape[0], *send.shape[1:]), "size * rows of send")
        self.received_bytes += (self.size - 1) * send.nbytes
        with self.watched("all_gather", send):
            self._all_gather(send, recv)

    def reduce_scatter(self, send: Any, recv: Any) -> None:
        """Add all ranks' arrays and keep this rank's share of the rows.

        Args:
            send: (size * rows, ...), a dtype of sum_dtypes.
            recv: (rows, ...), same dtype; overwritten with rows [rank * rows, (rank + 1) * rows) of the sum.

        Raises:
            TypeError: an array is of the wrong kind or not C-contiguous, the dtypes differ, or cannot be summed here.
            ValueError: rows of send not divisible by size, recv has the wrong shape, is read-only, or shares memory
                with send.
        """
        self._check_buffers(send, recv)
        self._check_sum_dtype("send", send)
        rows, rest = divmod(send.shape[0], self.size)
        if rest:
            raise ValueError(
                f"send has {send.shape[0]} rows, not a multiple of the {self.size} ranks; "
                f"pad it to {(rows + 1) * self.size} rows"
            )
        self._check_shape(recv, (rows, *send.shape[1:]), "rows of send / size")
        self.received_bytes += (self.size - 1) * recv.nbytes
        with self.watched("reduce_scatter", send):
            self._reduce_scatter(send, recv)

    def all_reduce(self, array: Any, op: str) -> None:
        """Replace the array by its element-wise sum or maximum over all ranks.

        Args:
            array: any shape, a dtype of sum_dtypes; overwritten.
            op: "sum" or "max". The maximum of numbers and NaN is unspecified.

        Raises:
            TypeError: the array is of the wrong kind, not C-contiguous, or of a dtype that cannot be summed here; or op
                is no str.
            ValueError: op is unknown, or the array is read-only.
        """
        self._check_array("array", array)
        self._check_writable("array", array)
        self._check_sum_dtype("array", array)
        op = as_choice("op", op, ("sum", "max"))
        self.received_bytes += 2 * (self.size - 1) * array.nbytes // self.size
        with self.watched("all_reduce", array):
            self._all_reduce(array, op)

    def exchange(self, sends: Slices, recvs: Slices, sizes: Any = None) -> Callable[[], None]:
        """Start to send slices of arrays to some of the other ranks, and to receive theirs.

        Both sides know from their plan what travels. Every rank makes the call, also one that has nothing to send or
        to receive.

        Args:
            sends: pairs (slice, rank that it goes to). Its rows need not follow each other, but the elements of a row
                do: x[a:b], and x[:, a:b] of a C-contiguous x. Several may go to one rank, and empty ones are left out.
            recvs: pairs (slice, rank that it comes from): for each rank as many as it sends here, in the same order
                and of equally many bytes; shapes and dtypes are the receiver's. Overwritten; they and sends do not
                overlap.
            sizes: (size, size) integers in host memory, the bytes that each rank (row) sends to each other one
                (column), the same on all ranks: so they can travel through peer memory, beside kernels, in exchanges
                that all ranks give sizes to.

        Returns:
            What waits for recvs, to be called before these are read and before they are dropped; on a GPU it is the
            current stream that waits. What was sent is free when exchange returns, as in all_gather.

        Raises:
            TypeError: an array is of the wrong kind or the elements of its rows are not contiguous, host arrays and GPU
                arrays are mixed, or a rank is no integer.
            ValueError: a rank is this one or none of the others, an array to receive is read-only, sizes are not those
                of the slices, or (on simulated ranks) what one sends is not what the other one receives.
        """
        self._check_slices(sends, recvs, sizes)
        sends, recvs = ([(array, peer) for array, peer in slices if array.size] for slices in (sends, recvs))
        self.received_bytes += sum(array.nbytes for array, _ in recvs)
        first = next((array for array, _ in (*sends, *recvs)), None)
        with self.watched(f"exchange ({len(sends)} slices out, {len(recvs)} in)", first):
            return self._exchange(sends, recvs, sizes)

    def barrier(self) -> None:
        """Return when every rank has come here; on GPU ranks also wait for the current stream."""
        self._check_open()
        self._barrier()

    def agree(self, name: str, value: int, refusal: str = "") -> None:
        """Check that every rank holds the same number, such as the hash of a plan.

        Costs a message over the host, so it is meant for once per plan, not once per layer.

        Args:
            name: what the number is, for the message.
            value: any int; a flag is 0 or 1.
            refusal: why this rank cannot go on, with the remedy, whatever the numbers are; "": it can.

        Raises:
            TypeError: value is not an integer.
            ValueError: on every rank, with the refusals of all ranks, or naming the ranks that differ from rank 0.
        """
        self._check_open()
        number = int(value) if isinstance(value, (bool, np.bool_)) else as_int("value", value)
        values, refusals = zip(*self._gather_values((number, refusal)), strict=True)
        if any(refusals):
            raise ValueError("; ".join(f"rank {rank}: {why}" for rank, why in enumerate(refusals) if why))
        differing = [rank for rank, other in enumerate(values) if other != values[0]]
        if differing:
            found = ", ".join(f"rank {rank} has {values[rank]}" for rank in differing)
            raise ValueError(
                f"{name} is not the same on all ranks: rank 0 has {values[0]}, but {found}; "
                f"give every rank the same global input"
            )

    def split(self, color: int, key: int = 0) -> Comm:
        """Form groups: the ranks that pass one color become a comm of their own.

        Every rank of this comm calls it and gets its group's comm, of the same backend. Groups may be split again.

        Args:
            color: which group this rank is in, >= 0.
            key: the ranks of a group are numbered by it, and where it is equal in the order that they have here.

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
        """Give the backend's resources back; a second call does nothing.

        Every rank must call it. Groups that were split off are closed first, the last one first, and before any of them
        what before_close was asked for. Collectives raise RuntimeError afterwards.
        """
        if not self._closed:
            self._act_before_close()
            for group in reversed(self._groups):
                group.close()
            self._closed = True
            self._close()

    def watched(self, what: str, array: Any = None) -> AbstractContextManager[object]:
        """A block that waits for other ranks, or enqueues what does on the current stream, under the deadline of init.

        Collectives are watched already, and so is what a block contains, as one with it. While the stream is captured
        nothing is, as nothing runs: have the graph's launch watched. Where init's deadline does not apply, this does
        nothing.

        Args:
            what: the operation, for the message.
            array: one whose shape and dtype are for the message.
        """
        return _UNWATCHED

    def before_close(self, action: Callable[[], None]) -> None:
        """Have an action done first when the comm is closed, such as destroying graphs that hold its collectives.

        Graphs that hold collectives of several groups belong to the comm that these were split from.
        """
        self._check_open()
        self._before_close.append(action)

    def forget(self, action: Callable[[], None]) -> None:
        """Take back the action that before_close was asked for."""
        if action in self._before_close:
            self._before_close.remove(action)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # NOTE: not on errors. Closing waits for the other ranks, and they may be stuck in a collective for this one.
        if error is None:
            self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size}>"

    @abstractmethod
    def _all_gather(self, send: Any, recv: Any) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, send: Any, recv: Any) -> None: ...

    @abstractmethod
    def _all_reduce(self, array: Any, op: str) -> None: ...

    def _exchange(self, sends: Slices, recvs: Slices, sizes: Any) -> Callable[[], None]:
        rooms = [(room(array), peer) for array, peer in recvs]
        self._send_receive([(packed(array), peer) for array, peer in sends], rooms)
        for (array, _), (made, _) in zip(recvs, rooms, strict=True):
            put(array, made)
        return nothing

    def _send_receive(self, sends: Slices, recvs: Slices) -> None:
        """Messages to and from other ranks, each (bytes,) uint8; those from one rank in its order."""
        raise NotImplementedError(f"a comm of backend {self.name!r} exchanges nothing")

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _gather_values(self, value: Any) -> Sequence[Any]:
        """What every rank passed, in rank order: small things of Python's own."""

    @abstractmethod
    def _split(self, color: int, key: int) -> Comm: ...

    def _close(self) -> None:
        """Release what the backend holds; called once."""

    def _act_before_close(self) -> None:
        for group in self._groups:
            group._act_before_close()
        while self._before_close:
            self._before_close.pop()()


class SingleComm(Comm):
    """One rank alone: collectives are copies."""

    name = "single"
    devices = frozenset({"cpu", "cuda"})
    sum_dtypes = Comm.sum_dtypes | {"float16", "bfloat16"}
    capturable = True

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _all_gather(self, send: Any, recv: Any) -> None:
        recv[...] = send

    def _reduce_scatter(self, send: Any, recv: Any) -> None:
        recv[...] = send

    def _all_reduce(self, array: Any, op: str) -> None:
        pass

    def _send_receive(self, sends: Slices, recvs: Slices) -> None:
        pass

    def _barrier(self) -> None:
        pass

    def _gather_values(self, value: Any) -> Sequence[Any]:
        return [value]

    def _split(self, color: int, key: int) -> Comm:
        return SingleComm()


def init(backend: str = "auto", world: Any = None, timeout: float = 60.0, transport: str = "auto") -> Comm:
    """Join this process's ranks.

    "auto" is "single" unless an MPI launcher started several ranks; then "nccl" if every rank has a GPU of its own,
    else "mpi". All ranks choose the same, and a choice against GPUs that exist is logged as a warning.

    Args:
        backend: "auto", "single", "mpi" or "nccl".
        world: the ranks, a communicator of mpi4py whose processes all call this; COMM_WORLD if it is None. What else is
            sent on it does no harm. What the launcher says is checked against COMM_WORLD only.
        timeout: seconds after which a collective that has not completed ends all ranks of the job, at most
            threading.TIMEOUT_MAX (centuries); groups inherit it. "single" waits for nobody.
        transport: of keys, values and their gradients between GPUs: "peer", copies between the GPUs of one machine,
            which go on beside kernels; "nccl"; or "auto": peer where it works on all ranks. The comm's repr says which
            it is, and why not peer. Other backends take no notice of it.

    Returns:
        A comm whose rank and size are those of world ("single": 0 and 1).

    Raises:
        TypeError: backend or transport is no str, timeout no number, or world no communicator of mpi4py or one between
            two groups.
        ValueError: unknown backend or transport; timeout is not positive and finite; world is MPI.COMM_NULL; or
            "single" with a world of several ranks.
        RuntimeError: MPI, CuPy, NCCL or a GPU is missing; two ranks share a GPU; transport is "peer", but a rank does
            not see the others' memory; or MPI sees another number of ranks than the launcher started, as below torchrun
            (see from_torch) and below srun without --mpi. Errors of GPUs and NCCL are raised on every rank.
    """
    from thdattn.comm import start

    return start.join(backend, world, timeout, transport)


def from_torch(group: Any = None) -> Comm:
    """The ranks of a torch.distributed process group, for programs that torchrun started.

    Collectives are torch's, on the group's own communicator: they and the program's other collectives on this group
    must come in the same order on every rank, and its timeouts hold. gloo moves NumPy arrays and nccl CuPy arrays; a
    group of both ("cpu:gloo,cuda:nccl") moves both. With nccl, torch's current GPU becomes CuPy's, so call
    torch.cuda.set_device before. A failing rank ends the others as torchrun does it; close() leaves the group alone,
    and groups of split live as long as torch.distributed does, with torch's own timeouts.

    Args:
        group: a process group that this process is in; None for all processes.

    Returns:
        A comm whose rank and size are those of the group. It does not sum uint32 and uint64, which torch cannot.

    Raises:
        RuntimeError: PyTorch, or with nccl CuPy, is missing, or torch.distributed is not initialised.
        TypeError: group is no process group.
        ValueError: this process is not in the group, or its backend is neither gloo nor nccl.
    """
    from thdattn.comm import torch

    return torch.TorchComm(group)


def run_local(cp_size: int, fn: Callable[[Comm], Result], timeout: float = 60.0) -> list[Result]:
    """Run a program on simulated ranks: threads of this process, for tests and for learning.

    Simulated ranks may share one GPU. Each thread starts with CuPy's device 0 and the legacy default stream as
    current; that stream orders the ranks' work, so fn must not switch to another one.

    Args:
        cp_size: number of ranks.
        fn: called as fn(comm) on every rank.
        timeout: seconds that a rank waits in a collective for the others, at most threading.TIMEOUT_MAX (centuries);
            computing takes as long as it takes.

    Returns:
        What fn returned, in rank order.

    Raises:
        TypeError: cp_size is not an integer, timeout not a number, or fn not callable.
        ValueError: cp_size < 1, or timeout is not positive and finite.
        TimeoutError: a rank did not come to a collective in time; names those that did.
        RuntimeError: a rank returned while others wait for it, or ranks are in different collectives.
        Exception: whatever the first rank to fail raised; from Python 3.11 a note says which rank it was.
    """
    from thdattn.comm import local

    return local.run(cp_size, fn, timeout)
