"""NCCL ranks: GPU arrays through CuPy's NCCL, one process and one GPU per rank, found through MPI.

Keys, values and their gradients go through peer memory (peer/transport.py) where every rank can have that. Elsewhere a
second communicator of NCCL carries them (nccl/transport.py).

Such programs hang when NCCL starts: a rank that fails alone leaves the others in a call without a timeout. So every
rank tries each step of the start. The outcomes (ok, result or error) are exchanged over MPI, and either all ranks go on
or all raise.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from thdattn.arguments import Array
from thdattn.comm import Arrival, Comm, mpi, no_wait
from thdattn.comm.failures.lanes import lane_of
from thdattn.comm.failures.outcomes import attempt, results
from thdattn.comm.failures.watchdog import PATIENCE_AT_START, Lane
from thdattn.comm.nccl import communicator
from thdattn.comm.nccl.gpus import Gpu, load
from thdattn.comm.nccl.transport import CTAS, NcclTransport
from thdattn.comm.overlap.transport import Transport
from thdattn.comm.peer.transport import PeerTransport, obstacle
from thdattn.comm.slices import AllToAllSpec, Slices, slices_to_exchange

logger = logging.getLogger("thdattn")


class NcclComm(Comm):
    """One process with one GPU, with CuPy arrays on that GPU.

    Collectives go to the stream that is current in the calling thread and return at once; a CUDA graph may capture
    them. A stream waits for the stream of the previous call that kernels may overlap. NCCL checks nothing across ranks:
    different shapes on two ranks wait for the deadline or corrupt results, see Comm.agree.

    NOTE: make an exchange once before it is captured. NCCL connects two ranks when they exchange for the first time.

    NOTE: drop captured graphs that hold a collective before close(), also on errors. Destroying the communicator first
    leaves every rank hanging at exit.

    Args:
        world: the MPI communicator of its ranks, for this comm alone, which frees it in the end.
        gpus: every rank's GPU, in rank order, from choose(). This rank's becomes CuPy's current device.
        timeout: seconds that a collective may take once the GPU has come to it, and its start five times that.
        transport: of keys, values and their gradients: "peer", "nccl" or "auto", see thdattn.comm.init.

    Attributes:
        no_peer_memory: why keys, values and their gradients go through NCCL; "" if they go through peer memory.

    Raises:
        RuntimeError: on every rank, if the GPU or NCCL could not start on one, or if transport is "peer" and one cannot
            have it.
    """

    name = "nccl"
    devices = frozenset({"cuda"})
    sum_dtypes = Comm.sum_dtypes | {"float16", "bfloat16"}
    capturable = True

    def __init__(self, world: Any, gpus: Sequence[Gpu], timeout: float, transport: str = "auto") -> None:
        super().__init__(world.rank, world.size)
        cupy, nccl = load()
        self._cupy = cupy
        self._gpus = gpus
        self._gpu = gpus[world.rank].device
        self._bytes = nccl.NCCL_UINT8
        self._module = nccl
        self._dtypes = {dtype: getattr(nccl, f"NCCL_{dtype.upper()}") for dtype in self.sum_dtypes}
        self._ops = {"sum": nccl.NCCL_SUM, "max": nccl.NCCL_MAX}
        self._watch = mpi.watch(world, timeout)
        mpi.find_ranks(world, self._watch)
        with self._watch.waiting("the start of NCCL", patience=PATIENCE_AT_START):
            results("no context on the GPU", world.allgather(attempt(cupy.cuda.Device(self._gpu).use)))
            self._nccl = communicator.start(
                world, nccl, "NCCL did not start", nccl.NcclCommunicator, self._watch.waiting)
            peer, self.no_peer_memory = _peer_transport(world, gpus, transport)
            self._transport = _nccl_transport(world, nccl, self._nccl) if peer is None else peer
        if self._transport is not None:
            self._transport.wait_within(self._watch.waiting, self._watched_stream)
        self._world = world
        self._wanted_transport = transport
        self.overlaps, self.reads_peers = self._transport is not None, peer is not None
        self.spans_machines = len({gpu.hostname for gpu in gpus}) > 1
        atexit.register(self.close)  # runs before mpi4py's MPI_Finalize

    def __repr__(self) -> str:
        taken = f"'nccl': {self.no_peer_memory}" if self.no_peer_memory else "'peer'"
        return f"<NcclComm rank {self.rank} of {self.size}, transport {taken}>"

    def _watched(self, what: str, array: Array = None) -> AbstractContextManager[object]:
        lane = self._lane()
        return nullcontext() if lane is None else self._watch.enqueued(lane, what, array)

    def _lane(self) -> Lane | None:
        """Return the lane of the current stream; None: nothing on it waits, or it is being captured."""
        stream = self._cupy.cuda.get_current_stream()
        if self.size == 1 or stream.is_capturing():
            return None
        if self._transport is not None:
            self._transport.enter()
        return lane_of(self._cupy, self._gpu, stream)

    def _watched_stream(self, stream: Any) -> AbstractContextManager[object]:
        """Watch a block that enqueues waits for other ranks beside kernels, on another stream than the current one."""
        if stream.is_capturing():
            return nullcontext()
        return self._watch.enqueued(lane_of(self._cupy, self._gpu, stream), "exchange beside kernels")

    def _all_gather(self, send: Array, recv: Array) -> None:
        if send.size:
            self._nccl.allGather(send.data.ptr, recv.data.ptr, send.nbytes, self._bytes, self._stream())

    def _reduce_scatter(self, send: Array, recv: Array) -> None:
        if recv.size:
            dtype = self._dtypes[send.dtype.name]
            self._nccl.reduceScatter(
                send.data.ptr, recv.data.ptr, recv.size, dtype, self._ops["sum"], self._stream()
            )

    def _all_reduce(self, array: Array, op: str) -> None:
        if array.size:
            dtype, pointer = self._dtypes[array.dtype.name], array.data.ptr
            self._nccl.allReduce(pointer, pointer, array.size, dtype, self._ops[op], self._stream())

    def _exchange(self, sends: Slices, recvs: Slices, sizes: Any) -> Callable[[], None]:
        if self._transport is None or sizes is None or not self._transport.carries(sizes):
            return super()._exchange(sends, recvs, sizes)
        return self._watched_wait("exchange", self._transport.exchange(sends, recvs, sizes))

    def _send_receive(self, sends: Slices, recvs: Slices) -> None:
        if not sends and not recvs:
            return
        stream = self._stream()
        self._module.groupStart()
        try:
            for room, peer in recvs:
                self._nccl.recv(room.data.ptr, room.nbytes, self._bytes, peer, stream)
            for part, peer in sends:
                self._nccl.send(part.data.ptr, part.nbytes, self._bytes, peer, stream)
        finally:  # an open group would swallow every later call
            self._module.groupEnd()

    def gather_heads(
        self, sends: Sequence[Array], recvs: Sequence[Sequence[Array]], at_once: bool = False
    ) -> list[Arrival]:
        if self._transport is None:
            return super().gather_heads(sends, recvs)
        self._check_open()
        self.received_bytes += (self.size - 1) * sum(send.nbytes for send in sends)
        what, by_kernel = "gather of keys", at_once and self.reads_peers
        marks = self._watched_kernel(what, sends[0]) if by_kernel else (0, 0)
        with nullcontext() if by_kernel else self.watched(what, sends[0]):
            arrivals = self._transport.gather_heads(sends, recvs, at_once)
        return [self._watched_arrival(what, marks, arrival) for arrival in arrivals]

    def all_to_all(
        self, spec: AllToAllSpec, sends: Sequence[Array], recvs: Sequence[Array], at_once: bool = False
    ) -> Callable[[], None]:
        if self._transport is not None and self._transport.exchanges_by_kernel(spec, at_once):
            self.received_bytes += spec.received[self.rank]
            marks = self._watched_kernel("exchange of slices", recvs[0])
            return self._transport.all_to_all(spec, sends, recvs, marks)
        sizes = spec.sizes if self.reads_peers or not at_once else None  # None: NCCL takes all thread blocks
        return self.exchange(*slices_to_exchange(self.rank, self.size, spec, sends, recvs), sizes)

    def drop_partials(self) -> None:
        if self._transport is not None:
            self._transport.drop_partials()

    def owner_partials(
        self, shapes: Sequence[tuple[int, ...]], largest: Sequence[tuple[int, ...]], at_once: bool
    ) -> Any:
        if self._transport is None:
            return super().owner_partials(shapes, largest, at_once)
        self._check_open()
        with self._watched("memory for partial sums"):
            return self._transport.owner_partials(shapes, largest, at_once)

    def reduce_partials(
        self, rows: Array, results: Sequence[Array], at_once: bool, in_rank_order: bool = True
    ) -> Callable[[], None]:
        if self._transport is None:
            return super().reduce_partials(rows, results, at_once, in_rank_order)
        self._check_open()
        self.received_bytes += (self.size - 1) * sum(4 * x.size for x in results)  # float32
        if self.reads_peers and not at_once:  # the host waits for nobody
            return self._watched_wait("sum of gradients", self._transport.reduce_partials(rows, results, False))
        with self.watched("sum of gradients", results[0]):
            wait = self._transport.reduce_partials(rows, results, at_once, in_rank_order)
        return wait if wait is no_wait else self._watched_wait("sum of gradients", wait)

    def gather_bytes(self, sends: Sequence[int], num_groups: int) -> dict[str, int]:
        if self._transport is None:
            return super().gather_bytes(sends, num_groups)
        return self._transport.gather_bytes(sends, num_groups)

    def sum_bytes(self, groups: Sequence[Sequence[int]], in_rank_order: bool) -> dict[str, int]:
        if self._transport is None:
            return super().sum_bytes(groups, in_rank_order)
        return self._transport.sum_bytes(groups, in_rank_order)

    def held_bytes(self) -> dict[str, int]:
        return {} if self._transport is None else self._transport.held_bytes()

    def exchange_bytes(self, sizes: Any, strided: int) -> dict[str, int]:
        if self._transport is None or not self._transport.carries(sizes):
            return super().exchange_bytes(sizes, strided)
        return self._transport.exchange_bytes(sizes, strided)

    def _watched_kernel(self, what: str, array: Array) -> tuple[int, int]:
        """Return the address and number that the next kernel on the current stream marks its begin and end with.

        That kernel waits for other ranks by itself.
        """
        self._check_open()
        lane = self._lane()
        return (0, 0) if lane is None else self._watch.by_kernel(lane, what, array)

    def _watched_arrival(self, what: str, marks: tuple[int, int], arrival: Arrival) -> Arrival:
        """Return an arrival whose wait is watched, or whose kernel writes the marks."""
        kernel = arrival.peer_exchange
        if kernel is not None:
            return arrival._replace(peer_exchange=kernel._replace(marks=marks[0], number=marks[1]))
        return arrival if arrival.wait is no_wait else arrival._replace(wait=self._watched_wait(what, arrival.wait))

    def _watched_wait(self, what: str, wait: Callable[[], None]) -> Callable[[], None]:
        """Return a watched wait: the current stream waits for another one, which waits for other ranks."""

        def watched() -> None:
            with self._watched(what):
                wait()

        return watched

    def _barrier(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()  # computing may take long, and its waits are watched
        with self._watch.waiting("barrier"):
            self._world.Barrier()

    def _gather_values(self, value: Any) -> Sequence[Any]:
        with self._watch.waiting("agree"):
            values: list[Any] = self._world.allgather(value)
        return values

    def _split(self, color: int, key: int) -> Comm:
        with self._watch.waiting("split"):
            world = self._world.Split(color, key)
            gpus = world.allgather(self._gpus[self.rank])
        group = type(self)(world, gpus, self._watch.timeout, self._wanted_transport)
        atexit.unregister(group.close)  # this comm closes its groups, after all graphs
        return group

    def _close(self) -> None:
        atexit.unregister(self.close)
        with self._watch.waiting("close"):
            if self._transport is not None:
                self._transport.close()
            self._nccl.destroy()
            mpi.free(self._world)

    def _stream(self) -> int:
        stream: int = self._cupy.cuda.get_current_stream().ptr
        return stream


def _peer_transport(world: Any, gpus: Sequence[Gpu], transport: str) -> tuple[Transport | None, str]:
    """Return (the ranks' peer memory, "") if every rank can have it, else (None, why not); the same on every rank.

    Raises:
        RuntimeError: transport is "peer", but they cannot.
    """
    if len(gpus) == 1:  # a group of one, whatever transport it was split from
        return None, "there is one rank"
    reason = "transport='nccl' was asked for" if transport == "nccl" else obstacle([gpu.hostname for gpu in gpus])
    if reason is None:
        try:
            return PeerTransport(world), ""
        except (MemoryError, RuntimeError) as error:  # on every rank alike
            reason = str(error)
    if transport == "peer":
        raise RuntimeError(f"transport is 'peer', but {reason}; use transport='auto' or 'nccl'")
    return None, reason


def _nccl_transport(world: Any, nccl: Any, main: Any) -> Transport | None:
    """Return NCCL's transport for overlapped collectives, or None where there is none; the same on every rank."""
    if world.size == 1:
        return None
    (ctas,) = results("THDATTN_NCCL_CTAS is no number", [world.bcast(attempt(_wanted_ctas), root=0)])
    if not ctas:
        return None
    try:
        return NcclTransport(world, nccl, main, ctas)
    except RuntimeError as error:  # on every rank alike
        logger.warning("no communication overlaps kernels: %s", error)
        return None


def _wanted_ctas() -> int:
    """Return the thread blocks of an overlapped collective, which THDATTN_NCCL_CTAS sets; 0: none overlaps kernels."""
    return int(os.environ.get("THDATTN_NCCL_CTAS") or CTAS)
