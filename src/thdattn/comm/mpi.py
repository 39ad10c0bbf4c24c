"""MPI ranks: host arrays through mpi4py; the rest of the package reaches MPI through this module alone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from thdattn.arguments import Array, found
from thdattn.comm import Comm, launcher
from thdattn.comm.failures import watchdog
from thdattn.comm.launcher import ALONE, Launcher
from thdattn.comm.slices import Slices
from thdattn.install import remedy

SECONDS_TO_BE_HEARD = 0.5


class MpiComm(Comm):
    """One process of an MPI job, with NumPy arrays. MPI chooses the order of its sums.

    Args:
        world: the communicator of its ranks, for this comm alone, which frees it in the end.
        timeout: seconds that a collective may take.
        no_gpus: why init took no GPU arrays; "": this backend was asked for.
    """

    name = "mpi"
    devices = frozenset({"cpu"})

    def __init__(self, world: Any, timeout: float, no_gpus: str = "") -> None:
        from mpi4py import MPI

        super().__init__(world.rank, world.size)
        self.no_gpus = no_gpus
        self._in_place, self._wait_for_all = MPI.IN_PLACE, MPI.Request.Waitall
        self._ops = {"sum": MPI.SUM, "max": MPI.MAX}
        self._world = world
        self._watch = watch(world, timeout)
        find_ranks(world, self._watch)

    def _watched(self, what: str, array: Array = None) -> AbstractContextManager[object]:
        return self._watch.waiting(what, array)

    def _all_gather(self, send: Array, recv: Array) -> None:
        self._world.Allgather(_as_unsigned(send), _as_unsigned(recv))

    def _reduce_scatter(self, send: Array, recv: Array) -> None:
        self._world.Reduce_scatter_block(send, recv, op=self._ops["sum"])

    def _all_reduce(self, array: Array, op: str) -> None:
        self._world.Allreduce(self._in_place, array, op=self._ops[op])

    def _send_receive(self, sends: Slices, recvs: Slices) -> None:
        requests = [self._world.Irecv(room, peer) for room, peer in recvs]
        self._wait_for_all(requests + [self._world.Isend(part, peer) for part, peer in sends])

    def _barrier(self) -> None:
        with self._watched("barrier"):
            self._world.Barrier()

    def _gather_values(self, value: Any) -> Sequence[Any]:
        with self._watched("agree"):
            values: list[Any] = self._world.allgather(value)
        return values

    def _split(self, color: int, key: int) -> Comm:
        with self._watched("split"):
            world = self._world.Split(color, key)
        return type(self)(world, self._watch.timeout, self.no_gpus)

    def _close(self) -> None:
        with self._watched("close"):
            free(self._world)


def connect(started_by: Launcher | None, timeout: float) -> Any:
    """Return MPI's COMM_WORLD, checked against what the launcher said.

    From here on, an exception that no one catches in the main thread of one rank ends all ranks.

    Args:
        started_by: what started this process; None without a launcher.
        timeout: seconds that a collective may take, and the start of MPI five times that.

    Raises:
        RuntimeError: mpi4py or the MPI library is missing, or MPI sees another number of ranks than the launcher.
    """
    try:
        _load(started_by, timeout)
    except Exception as error:  # mpi4py without an MPI library raises RuntimeError, not ImportError
        needed_by = f" on a process that {started_by.name} started" if started_by else ""
        raise RuntimeError(
            f"MPI cannot be loaded{needed_by} ({type(error).__name__}: {error}); install mpi4py and an MPI library: "
            f"{remedy('mpich')} brings both, [mpi] in place of [mpich] uses the one on this machine; or {ALONE}"
        ) from error
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    _end_all_ranks_on_error()
    if started_by and not _is_whole(started_by, world.size):
        library = MPI.Get_library_version().split("\n")[0].strip("\0 ")
        raise RuntimeError(_mismatch(started_by, world.size, library))
    return world


def joined(world: Any) -> Any:
    """Check and return the communicator of mpi4py that init was given.

    Raises:
        TypeError: it is none, or one between two groups.
        ValueError: this process is not in it.
    """
    remedy = "pass mpi4py.MPI.COMM_WORLD or what its Split returned, or None for all ranks"
    if not hasattr(world, "Is_inter"):  # before MPI is loaded, as there may be none
        raise TypeError(f"world is {found(world)}; wanted a communicator of mpi4py; {remedy}")
    from mpi4py import MPI

    if world == MPI.COMM_NULL:
        raise ValueError(f"world is MPI.COMM_NULL; wanted a communicator that this process is in; {remedy}, and call "
                         f"init on its ranks only")
    if not isinstance(world, MPI.Intracomm):
        raise TypeError(f"world is {found(world)}; wanted a communicator of one group; {remedy}")
    _end_all_ranks_on_error()
    return world


def _load(started_by: Launcher | None, timeout: float) -> None:
    """Load and start MPI, which waits for all ranks."""
    alone = started_by is None or started_by.size == 1
    host = launcher.hostname()
    rank = "a rank" if launcher.rank() is None else f"rank {launcher.rank()}"
    with nullcontext() if alone or "mpi4py.MPI" in sys.modules else watchdog.start_of_mpi(f"{rank} on {host}", timeout):
        from mpi4py import MPI  # noqa: F401


def _is_whole(started_by: Launcher, size: int) -> bool:
    if started_by.size:
        return started_by.size == size
    return size > 1 or os.environ.get("PMIX_RANK", "0") == "0"


def _mismatch(started_by: Launcher, size: int, library: str) -> str:
    if started_by.name == "srun":
        return (
            f"srun started {started_by.size} processes but MPI sees {size}: srun and the MPI library ({library}) did "
            f"not find each other; start the program with mpiexec inside the job, or with srun --mpi=pmix or "
            f"srun --mpi=pmi2, whichever the library speaks (srun --mpi=list says what there is); or {ALONE}"
        )
    return (
        f"the launcher started {started_by.size or 'several'} ranks but MPI sees {size}: launcher and MPI library "
        f"({library}) are of different makes; use the launcher that came with the library, for an MPI "
        f"installed by pip that is {Path(sys.executable).parent / 'mpiexec'}"
    )


def watch(world: Any, timeout: float) -> watchdog.Watch:
    """Return the watch of a communicator's ranks, which ends the job if their operations do not complete in time."""
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD
    job = "" if world.size == everyone.size else f" of a group, {everyone.rank} of {everyone.size} in the job,"
    made = watchdog.Watch(f"rank {world.rank} of {world.size}{job} on {launcher.hostname()}", timeout, abort)
    if world.size > 1:
        made.start()
    return made


def find_ranks(world: Any, watched: watchdog.Watch) -> None:
    """Learn how to ask the other ranks of a communicator what they do; all of them call it."""
    if world.size > 1:
        watched.find_ranks(world.rank, world.allgather)


def local_rank(world: Any) -> int:
    """Return this rank's number among all ranks of its machine, also if world has only some of them."""
    from mpi4py import MPI

    said = launcher.local_rank()
    if said is not None and world.size < MPI.COMM_WORLD.size:  # the others are not here to be asked
        return said
    machine = world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
    rank = int(machine.rank)
    machine.Free()
    return rank


def free(communicator: Any) -> None:
    """Free a communicator, unless the program has finalised MPI."""
    from mpi4py import MPI

    if not MPI.Is_finalized():
        communicator.Free()


def abort() -> None:
    """End all ranks, after giving the launcher time to pass on this rank's output.

    NOTE: MPI_Abort kills the launcher's helpers too, and output that they have not forwarded is lost. Nothing tells
    when they have forwarded it.
    """
    from mpi4py import MPI

    watchdog.exit_soon()
    watchdog.flush()
    time.sleep(SECONDS_TO_BE_HEARD)
    MPI.COMM_WORLD.Abort(1)


def _end_all_ranks_on_error() -> None:
    """Turn an uncaught exception into MPI_Abort; MPI_Finalize would wait for ranks that wait for this one."""
    from mpi4py import MPI

    previous = sys.excepthook
    if MPI.COMM_WORLD.size == 1 or getattr(previous, "ends_all_ranks", False):
        return

    def report_and_abort(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        previous(kind, error, trace)
        abort()

    report_and_abort.ends_all_ranks = True  # type: ignore[attr-defined]
    sys.excepthook = report_and_abort


def _as_unsigned(array: np.ndarray) -> np.ndarray:
    """Return the same bytes as unsigned integers, since MPI has no bfloat16 and a copy needs no meaning."""
    width = array.itemsize if array.itemsize in (1, 2, 4, 8) else 1
    return array.reshape(-1).view(f"u{width}")
