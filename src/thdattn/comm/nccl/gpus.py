"""GPUs of NCCL's ranks: each rank finds its own, and all ranks learn of all.

NCCL 2.31 lets ranks share a GPU, for trying programs, where NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from thdattn.comm import launcher, mpi
from thdattn.comm.failures.outcomes import Outcome, attempt, results
from thdattn.comm.failures.watchdog import PATIENCE_AT_START
from thdattn.install import remedy

_INSTALL = f"{remedy('cuda13')} (or [cuda12], after the driver's CUDA version)"
SHARE = "NCCL_MULTI_RANK_GPU_ENABLE"  # NCCL's own variable


class Gpu(NamedTuple):
    """GPU of one rank: its number here, what distinguishes it from other GPUs, and whether ranks may share it."""

    device: int
    hostname: str
    pci_bus_id: str
    uuid: str
    shareable: bool = False


def survey(world: Any, timeout: float) -> list[Outcome]:
    """Return every rank's GPU, or why it has none, in rank order; the same list on every rank."""
    with mpi.watch(world, timeout).waiting("the search for GPUs", patience=PATIENCE_AT_START):
        local_rank = mpi.local_rank(world)
        found: list[Outcome] = world.allgather(attempt(lambda: _find_gpu(local_rank)))
    return found


def choose(answers: Sequence[Outcome]) -> list[Gpu]:
    """Return every rank's GPU, if each rank has one to itself or all ranks allow to share them.

    Args:
        answers: what survey() returned; equal on all ranks, so all ranks return or all raise.

    Raises:
        RuntimeError: a rank has no usable GPU, or two ranks have the same one.
    """
    gpus: list[Gpu] = results("no usable GPU", answers)
    if all(gpu.shareable for gpu in gpus):
        return gpus
    owner: dict[tuple[str, str, str], int] = {}
    for rank, gpu in enumerate(gpus):
        # Slices of one GPU differ in uuid only; but CuPy may cut a uuid at a 0 byte, so that two nodes show the same.
        first = owner.setdefault((gpu.hostname, gpu.pci_bus_id, gpu.uuid), rank)
        if first != rank:
            raise RuntimeError(
                f"ranks {first} and {rank} have the same GPU, PCI bus id {gpu.pci_bus_id} on {gpu.hostname}, which "
                f"NCCL refuses; start at most one rank per GPU, each with another CUDA_VISIBLE_DEVICES or all with the "
                f"same list of GPUs; or, to try a program slowly, set {SHARE}=1 on all ranks (NCCL 2.31 or newer)"
            )
    return gpus


def load() -> tuple[Any, Any]:
    """Load CuPy and its NCCL module.

    Raises:
        RuntimeError: one of them is missing; says what to install.
    """
    cupy = load_cupy()
    from cupy.cuda import nccl

    if not nccl.available:
        raise RuntimeError(f"CuPy finds no NCCL library; {_INSTALL}")
    return cupy, nccl


def load_cupy() -> Any:
    """Load CuPy.

    Raises:
        RuntimeError: it is missing; says what to install.
    """
    try:
        import cupy
    except Exception as error:
        raise RuntimeError(f"CuPy cannot be loaded ({type(error).__name__}: {error}); {_INSTALL}") from error
    return cupy


def _find_gpu(local_rank: int) -> Gpu:
    """Return this rank's GPU: the only one that it sees, else the one whose number is its rank on this machine.

    Where ranks may share GPUs, they take them in turn.
    """
    cupy, _ = load()
    hostname = launcher.hostname()
    count = cupy.cuda.runtime.getDeviceCount()
    shareable = os.environ.get(SHARE) == "1"
    device = local_rank % max(1, count) if shareable or count == 1 else local_rank
    if device >= count:
        raise RuntimeError(
            f"rank number {local_rank} of {hostname} sees {count} GPUs; start at most {count} ranks there, or give "
            f"each rank one GPU of its own in CUDA_VISIBLE_DEVICES"
        )
    uuid = bytes(cupy.cuda.runtime.getDeviceProperties(device)["uuid"]).hex()
    return Gpu(device, hostname, cupy.cuda.Device(device).pci_bus_id, uuid, shareable)
