"""Start of a comm: find the launcher, choose the backend on all ranks alike, and join the ranks' world."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from thdattn.arguments import as_choice
from thdattn.comm import Comm, SingleComm, launcher, mpi
from thdattn.comm.checked import kind_of, wants_check
from thdattn.comm.checks import as_timeout
from thdattn.comm.failures.outcomes import Outcome
from thdattn.comm.failures.watchdog import PATIENCE_AT_START
from thdattn.comm.nccl import gpus as nccl_gpus
from thdattn.comm.nccl.comm import NcclComm
from thdattn.install import expects_gpu

logger = logging.getLogger("thdattn")


def join(backend: str, world: Any, timeout: float, transport: str, check: bool) -> Comm:
    """Join the ranks of this process; see thdattn.comm.init."""
    as_choice("backend", backend, ("auto", "single", "mpi", "nccl"))
    as_choice("transport", transport, ("auto", "nccl", "peer"))
    timeout, check = as_timeout(timeout), wants_check(check)
    started_by = launcher.find() if world is None else None
    alone = started_by is None or started_by.size == 1
    if world is None and (backend == "single" or (backend == "auto" and alone)):
        return SingleComm()
    if started_by and started_by.name == "torchrun" and started_by.size > 1:
        raise RuntimeError(
            f"torchrun (RANK and WORLD_SIZE are set) started {started_by.size} processes, which are no ranks of MPI: "
            f"each would do all the work alone; use thdattn.comm.from_torch() after "
            f"torch.distributed.init_process_group(), or start the program with mpiexec; or {launcher.ALONE}"
        )
    world = mpi.connect(started_by, timeout) if world is None else mpi.joined(world)
    if backend == "single" and world.size > 1:
        raise ValueError(f"world has {world.size} ranks, but backend 'single' is one rank alone; wanted world of one "
                         f"rank or none; leave it out")
    if backend == "single" or (backend == "auto" and world.size == 1):
        return SingleComm()
    with mpi.watch(world, timeout).waiting("init", patience=PATIENCE_AT_START):
        world = world.Dup()
        check = any(world.allgather(check))  # ranks that check and ranks that do not would wait for each other
    if backend == "mpi":
        return kind_of(mpi.MpiComm, check)(world, timeout)
    return _with_gpus(backend, world, timeout, transport, check)


def _with_gpus(backend: str, world: Any, timeout: float, transport: str, check: bool) -> Comm:
    """Return NCCL's comm; for "auto", MPI's where a rank has no GPU of its own."""
    answers = nccl_gpus.survey(world, timeout)
    try:
        gpus = nccl_gpus.choose(answers)
    except RuntimeError as error:
        if backend == "nccl":
            raise
        why = _why_no_gpus(answers) or str(error)
        if world.rank == 0:  # a warning goes to stderr unless the program configures its log otherwise
            level = logging.WARNING if expects_gpu() or any(found for found, _ in answers) else logging.INFO
            logger.log(level, "thdattn.comm.init uses MPI and host arrays (NumPy), not NCCL: %s", why)
        return kind_of(mpi.MpiComm, check)(world, timeout, why)
    comm = kind_of(NcclComm, check)(world, gpus, timeout, transport)
    if world.rank == 0:
        logger.info("thdattn.comm.init made %r", comm)
    return comm


def _why_no_gpus(answers: Sequence[Outcome]) -> str:
    """Say in one line why ranks have no GPU, naming the first of them; "": all have one."""
    failed = [(rank, why) for rank, (found, why) in enumerate(answers) if not found]
    if not failed:
        return ""
    rank, why = failed[0]
    return f"no usable GPU on rank {rank}{f' and {len(failed) - 1} more' if failed[1:] else ''}: {why}"
