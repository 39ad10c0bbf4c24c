"""Ranks and the collectives between them: one contract, five backends.

| backend  | what a rank is                                     | arrays                  |
|----------|----------------------------------------------------|-------------------------|
| "single" | this process, alone                                | NumPy, CuPy             |
| local    | one thread of this process, from `run_local`       | NumPy, CuPy             |
| "mpi"    | one process, found through MPI                     | NumPy                   |
| "nccl"   | one process with its own GPU, found through MPI    | CuPy                    |
| torch    | one process of torch.distributed, see `from_torch` | gloo: NumPy, nccl: CuPy |

A program looks the same on all of them:

```python
import thdattn

with thdattn.comm.init() as comm:
    ...
```

and is started as `mpiexec -n 4 python -m mpi4py program.py`. No rank of such a job waits for ever. Where one rank
fails, hangs, ends or makes other calls than the others, all ranks end, with a message that names it. docs/failures.md
says when.

`comm.split(color)` makes groups: comms of some of the ranks each, say one per row and one per column of a grid.
`comm.init(world=...)` takes any communicator of mpi4py. Ranks of one comm make the same calls on it in the same order.
Groups that share no rank need no order between them. Where they share ranks, all calls of all ranks must fit one
sequence that keeps every rank's own order. A program in which all ranks do "first the row, then the column" has one.
Calls may also wait in a circle. Rank 0 is first in its row, rank 1 of that row is first in its column, and so on round
the grid. GPU ranks use one stream for the comms that they share, or order the streams by events in the same way on all
ranks. Closing a comm closes its groups.

Importing this package needs neither MPI nor a GPU: mpi4py, CuPy and PyTorch are loaded when a backend is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from thdattn.comm.base import Comm
from thdattn.comm.levels import Levels
from thdattn.comm.overlap.collectives import Arrival as Arrival
from thdattn.comm.overlap.collectives import PeerExchange as PeerExchange
from thdattn.comm.overlap.collectives import Pending as Pending
from thdattn.comm.overlap.collectives import no_wait as no_wait
from thdattn.comm.single import SingleComm

__all__ = ["Comm", "Levels", "SingleComm", "from_torch", "init", "run_local"]

Result = TypeVar("Result")


def init(
    backend: str = "auto", world: Any = None, timeout: float = 60.0, transport: str = "auto", check: bool = False
) -> Comm:
    """Join this process's ranks.

    "auto" is "single" unless an MPI launcher started several ranks; then "nccl" if every rank has a GPU of its own,
    else "mpi". All ranks choose the same, and a choice against GPUs that exist is logged as a warning.

    Args:
        backend: "auto", "single", "mpi" or "nccl".
        world: the ranks, a communicator of mpi4py whose processes all call this; COMM_WORLD if it is None. Other
            messages on it do no harm. The launcher's size is checked against COMM_WORLD only.
        timeout: seconds after which a collective that has not completed ends all ranks of the job, at most
            threading.TIMEOUT_MAX (centuries); groups inherit it. "single" waits for nobody.
        transport: carries keys, values and gradients between GPUs. "peer": copies between the GPUs of one machine.
            "nccl": NCCL on a stream of its own. "auto": peer where it works on all ranks. The comm's repr says which it
            is, and why not peer. Both overlap kernels; THDATTN_NCCL_CTAS sets the thread blocks of NCCL's collectives
            that do, 0: none does. Other backends ignore it.
        check: every collective first agrees, on the host, on operation, plan, shapes and dtype. A difference raises a
            ValueError on all ranks, which names the field and the ranks. One rank that asks for it decides for all, and
            THDATTN_CHECK=1 asks, too. Switch it on while a program is new, or when its ranks hang or differ; it makes
            the host wait in every call. Captured collectives agree when they are captured.

    Returns:
        A comm whose rank and size are those of world ("single": 0 and 1).

    Raises:
        TypeError: backend or transport is no str, timeout no number, check no bool, or world no communicator of mpi4py
            or one between two groups.
        ValueError: unknown backend or transport; timeout is not positive and finite; world is MPI.COMM_NULL; or
            "single" with a world of several ranks.
        RuntimeError: MPI, CuPy, NCCL or a GPU is missing; two ranks share a GPU; transport is "peer", but a rank does
            not see the others' memory; or MPI sees another number of ranks than the launcher started, as below torchrun
            (see from_torch) and below srun without --mpi. Errors of GPUs and NCCL are raised on every rank.
    """
    from thdattn.comm import bootstrap

    return bootstrap.join(backend, world, timeout, transport, check)


def from_torch(group: Any = None, check: bool = False) -> Comm:
    """Join the ranks of a torch.distributed process group, for programs that torchrun started.

    Collectives are torch's, on the group's own communicator, and its timeouts hold. They and the program's other
    collectives on this group must come in the same order on every rank. All ranks of the group call this, as it
    exchanges their addresses. gloo moves NumPy arrays and nccl CuPy arrays; a group of both ("cpu:gloo,cuda:nccl")
    moves both. With nccl, torch's current GPU becomes CuPy's, so call torch.cuda.set_device before. A failing rank ends
    the others as torchrun does it. close() leaves the group alone, and groups of split live as long as
    torch.distributed does, with torch's own timeouts.

    Args:
        group: a process group that this process is in; None for all processes.
        check: as for init; the same on all ranks.

    Returns:
        A comm whose rank and size are those of the group. It does not sum uint32 and uint64, which torch cannot.

    Raises:
        RuntimeError: PyTorch, or with nccl CuPy, is missing, or torch.distributed is not initialised.
        TypeError: group is no process group.
        ValueError: this process is not in the group, or its backend is neither gloo nor nccl.
    """
    from thdattn.comm import checked, torch

    return checked.kind_of(torch.TorchComm, checked.wants_check(check))(group)


def run_local(
    cp_size: int, fn: Callable[[Comm], Result], timeout: float = 60.0, check: bool = False
) -> list[Result]:
    """Run a program on simulated ranks: threads of this process, for tests and for learning.

    Simulated ranks may share one GPU. Each thread starts with CuPy's device 0 and the legacy default stream as current.
    A rank may switch to a stream of its own: collectives order the ranks' streams.

    Args:
        cp_size: number of ranks.
        fn: called as fn(comm) on every rank.
        timeout: seconds that a rank waits in a collective for the others, at most threading.TIMEOUT_MAX (centuries);
            computing takes as long as it takes.
        check: as for init.

    Returns:
        What fn returned, in rank order.

    Raises:
        TypeError: cp_size is not an integer, timeout not a number, or fn not callable.
        ValueError: cp_size < 1, or timeout is not positive and finite.
        TimeoutError: a rank did not come to a collective in time; names those that did.
        RuntimeError: a rank returned while others wait for it, or ranks are in different collectives.
        Exception: whatever the first rank to fail raised; from Python 3.11 a note says which rank it was.
    """
    from thdattn.comm import checked, local

    return local.run(cp_size, fn, timeout, checked.wants_check(check))
