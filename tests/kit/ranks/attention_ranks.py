"""Attention on real ranks, as a program under mpiexec or torchrun.

mpiexec -n 4 python -m mpi4py attention_ranks.py cases mpi 4
mpiexec -n 4 python -m mpi4py attention_ranks.py cases,methods nccl 4 peer
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import machines
import numpy as np
from cases import BFLOAT16, CASES, FIELDS, Case, assemble, check, inputs_of, on_host, step, to_host
from ranks.comm_contract import arrays_of, join
from ways import Way, ways

import thdattn
from thdattn.comm.nccl import transport as nccl_transport
from thdattn.comm.peer import transport as peer
from thdattn.methods import group_cast

NAMES = ("worked-example", "edge-lengths", "all-empty", "no-sequences-slack", "gqa-12-2", "causal", "window-two-sided",
         "window-causal-contiguous", "capacity-contiguous", "fewer-tokens-than-ranks", "ranks-of-padding")


def run_cases(comm: thdattn.comm.Comm, xp: Any) -> None:
    """Compute each rank's rows; rank 0 compares them all with the oracle."""
    on_gpu = "cuda" in comm.devices
    for case in map(CASES.get, NAMES):
        case = case if on_gpu else case.slim()
        for dtype in (BFLOAT16,) if on_gpu else (BFLOAT16, np.dtype("float64")):
            ranks = gather(comm, attend(comm, xp, case, dtype))
            if comm.rank == 0:
                sharding = thdattn.Sharding(case.batch(comm.size), comm.size, case.sharding)
                check(case, dtype, assemble(sharding, ranks))


METHODS = (
    Case("documents", (257, 3, 64, 0, 100, 17, 190), slack=9),
    Case("window", (257, 3, 64, 0, 100, 17, 190), causal=False, window=(40, 16)),
    Case("padded-between", (40, 0, 9, 65), padded=(48, 48, 48, 96), causal=False),
    Case("one-document", (530,)),
    Case("fewer-tokens-than-ranks", (1, 0, 2)),
    Case("nothing-slack", (), slack=19),
)


def run_methods(comm: thdattn.comm.Comm, xp: Any) -> None:
    """Compare every method with the oracle, its groups made by split; one pack also with groups of heads.

    On the host less of it: simulated ranks have computed the rest, and only what travels is another.
    """
    n, on_gpu = comm.size, "cuda" in comm.devices
    grids = [(inner, n // inner) for inner in range(1, n + 1) if n % inner == 0]
    grouped = {"keep_keys": False, "head_groups": 2}, {"keep_keys": True, "head_groups": 2}
    of_grid: dict[int | None, Any] = {}
    for case in METHODS if on_gpu else [case.slim() for case in METHODS[::4]]:  # truth keeps few of them
        for way in ways(*grids, sizes=(n,), heads=(n,)):
            comms = of_grid[way.inner] = of_grid.get(way.inner) or way.comm(comm)
            run_method(comm, comms, xp, replace(case, heads=way.heads), way, {})
            for options in grouped[: 2 if on_gpu else 1] if case.name == "documents" else ():
                run_method(comm, comms, xp, replace(case, heads=(8, 8)), way, options)


def run_method(comm: thdattn.comm.Comm, comms: Any, xp: Any, case: Case, way: Way, options: dict[str, Any]) -> None:
    """Run a case by a method, and again with another plan of the same batch; on GPUs also in the same buffers."""
    layer = case.attention(comms, BFLOAT16, deterministic=True, cp_comm_type=way.cp_comm_type, **options)
    plans = [layer.plan(way.batch(case), way.sharding) for _ in range(2)]
    first, *others = (
        on_host(step(layer, plan, inputs_of(case, plan, BFLOAT16, xp)))
        for plan in (plans if xp is np else (plans[0], *plans)))
    for other in others:
        assert all(other[field].tobytes() == x.tobytes() for field, x in first.items()), f"{case} by {way}"
    ranks = gather(comm, first)
    if comm.rank == 0:
        check(case, BFLOAT16, assemble(plans[0].sharding, ranks))


def run_hidden(comm: thdattn.comm.Comm, xp: Any) -> None:
    """Exchange needed rows while others are computed: several layers one after another, each against the oracle.

    Forward and deterministic gradients have the bits that they have if nothing is hidden.
    """
    assert comm.overlaps
    packs = {"documents": (1500, 300, 300, 900, 40, 128, 700), "one-document": (2100,), "whole-documents": (256,) * 8}
    way = Way("all_gather", "balanced", comm.size)
    for name, lengths in packs.items():
        case = Case(name, lengths, heads=(8, 2), dims=(128, 128), slack=9)
        for options in ({"deterministic": deterministic, "keep_keys": keep}
                        for deterministic in (True, False) for keep in (True, False)):
            layer = case.attention(comm, BFLOAT16, **options)
            plan = layer.plan(way.batch(case), way.sharding)
            results = []
            for group_cast.WORTH_OVERLAPPING in (2**40, 0, 0, 0):
                peer.WORTH_COPYING = group_cast.WORTH_OVERLAPPING  # by a kernel, and by copies
                results.append(on_host(step(layer, plan, inputs_of(case, plan, BFLOAT16, xp))))
            same = FIELDS if options["deterministic"] else ("out", "lse", "max_logit")
            assert all(other[field].tobytes() == results[0][field].tobytes() for other in results for field in same)
            for each in results:
                ranks = gather(comm, each)
                if comm.rank == 0:
                    check(case, BFLOAT16, assemble(plan.sharding, ranks))


def run_bits(comm: thdattn.comm.Comm, xp: Any) -> None:
    """Check that deterministic results by NCCL beside kernels have the bits of those by peer memory."""
    assert comm.reads_peers
    other = thdattn.comm.init(comm.name, transport="nccl")
    assert other.overlaps and not other.reads_peers
    case = Case("documents", (1500, 300, 31, 900, 40, 128, 700), heads=(8, 4), dims=(128, 128), slack=9)
    for cp_comm_type, sharding in (("all_gather", "dual_chunk"), ("all_gather", "contiguous"),
                                   ("all_gather", "balanced"), ("p2p", "dual_chunk"), ("a2a", "contiguous")):
        for head_groups in (1, 2) if cp_comm_type == "a2a" else (1, 2, 4):
            for keep_keys in (True, False):
                found = []
                for ranks in (comm, other, other):
                    layer = case.attention(ranks, BFLOAT16, deterministic=True, cp_comm_type=cp_comm_type,
                                           head_groups=head_groups, keep_keys=keep_keys)
                    plan = layer.plan(Way(cp_comm_type, sharding, comm.size).batch(case), sharding)
                    inputs = [inputs_of(case, plan, BFLOAT16, xp) for _ in range(2)]
                    found.append([on_host(step(layer, plan, one)) for one in inputs])
                same = all(x.tobytes() == each[field].tobytes() for steps in found[1:]
                           for wanted, each in zip(found[0], steps, strict=True) for field, x in wanted.items())
                assert same, f"{cp_comm_type} {sharding}, {head_groups} groups, {keep_keys=}"
    other.close()


def gather(comm: thdattn.comm.Comm, result: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return every rank's result, by other means than the comm itself."""
    if comm.name == "torch":
        import torch

        ranks: list[Any] = [None] * comm.size
        torch.distributed.all_gather_object(ranks, result)
        return ranks
    from mpi4py import MPI

    return MPI.COMM_WORLD.allgather(result)


def attend(comm: thdattn.comm.Comm, xp: Any, case: Any, dtype: Any) -> dict[str, np.ndarray]:
    """Run forward and backward of this rank's rows; rows without a token are NaN."""
    attention = case.attention(comm, dtype)
    assert attention.engine == ("cuda" if "cuda" in comm.devices else "reference")
    plan = attention.plan(case.batch(comm.size), case.sharding)
    return on_host(step(attention, plan, inputs_of(case, plan, dtype, xp)))


def fail_on_one_rank(comm: thdattn.comm.Comm, xp: Any) -> None:
    """Pass q of the wrong shape on the last rank, while the others wait for it in the first collective."""
    case = CASES["causal"]
    attention = case.attention(comm, BFLOAT16)
    plan = attention.plan(case.batch(comm.size))
    rows = plan.local_rows - (comm.rank == comm.size - 1)
    q, k, v, _ = (xp.zeros((rows, *shape), BFLOAT16) for shape in case.shapes().values())
    out, _ = attention.forward(q, k, v, plan)
    print(to_host(out).shape)


def disagree(comm: thdattn.comm.Comm, xp: Any) -> None:
    """Plan a batch of its own on the last rank."""
    batch = thdattn.PackedBatch.from_lengths([64, 32 if comm.rank < comm.size - 1 else 64], 2 * comm.size)
    try:
        thdattn.CPAttention(comm, 2, 64).plan(batch)
    except ValueError as error:
        print(f"rank {comm.rank}: {error}")


SCENARIOS = {
    "cases": run_cases, "methods": run_methods, "hidden": run_hidden, "bits": run_bits, "bad-input": fail_on_one_rank,
    "disagree": disagree,
}


def main(scenarios: str, backend: str, size: str, transport: str = "auto") -> None:
    machines.play_by_launcher()
    nccl_transport.WORTH_OVERLAPPING = 0
    comm = join(backend, int(size), transport)
    xp = arrays_of(comm)
    for scenario in scenarios.split(","):
        SCENARIOS[scenario](comm, xp)
        print(f"rank {comm.rank} of {comm.size}: {scenario} on {backend} done", flush=True)
    comm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
