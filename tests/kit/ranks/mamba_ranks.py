"""The Mamba-2 mixer on real ranks, as a program under mpiexec.

mpiexec -n 2 python -m mpi4py mamba_ranks.py cases 2
mpiexec -n 2 python -m mpi4py mamba_ranks.py gpu-cases 2 peer
"""

from __future__ import annotations

import sys

import numpy as np
from mixer_cases import (
    BFLOAT16,
    CASES,
    FLOAT64,
    GPU_SIZES,
    ON_GPUS,
    Case,
    assembled,
    assert_equal,
    assert_same_bits,
    random_inputs,
    run,
    run_rank,
    truth,
)
from ranks.comm_contract import join
from tree_cases import LONG, MIXED

import thdattn
from thdattn import oracle
from thdattn.fuzz.runs import poisoned

CROSSING_GPUS = (
    *ON_GPUS,
    Case("over-all-ranks", (2500,), sizes=GPU_SIZES),
    Case("own-and-crossing", (1024, 600, 2000, 300), padded=(1024, 600, 2004, 300), sizes=GPU_SIZES),
    *(Case(trees.name, (), trees=trees, sizes=GPU_SIZES) for trees in (MIXED, LONG)),
)


def run_cases(comm: thdattn.comm.Comm) -> None:
    """Compare the ranks' results with the oracle in float64, and with the bits of simulated ranks in bfloat16."""
    from mpi4py import MPI

    for case in (*CASES.values(), Case(MIXED.name, (), trees=MIXED)):
        for dtype in (FLOAT64, BFLOAT16):
            ranks = MPI.COMM_WORLD.allgather(run_rank(case, comm, dtype, random_inputs(case, dtype)))
            if comm.rank > 0:
                continue
            made = assembled(case, ranks)
            if dtype == FLOAT64:
                assert_equal(made, truth(case, dtype), 1e-12)
            else:
                assert_same_bits(run(case, comm.size, dtype), made)


def run_gpu_cases(comm: thdattn.comm.Comm) -> None:
    """Compare ranks with a GPU each with the bits of simulated ranks on one, and with the errors of one rank.

    Three times, as windows of peer memory take turns; every allocation begins as NaN.
    """
    import cupy
    from mpi4py import MPI

    with poisoned("cuda"), cupy.cuda.Stream(non_blocking=True):
        for case in CROSSING_GPUS:
            inputs = random_inputs(case, BFLOAT16)
            runs = [MPI.COMM_WORLD.allgather(run_rank(case, comm, BFLOAT16, inputs, xp=cupy)) for _ in range(3)]
            if comm.rank == 0:
                simulated, one = (run(case, size, BFLOAT16, inputs, xp=cupy) for size in (comm.size, 1))
                for ranks in runs:
                    assert_same_bits(assembled(case, ranks), simulated)
                check_as_one_rank(case, simulated, one)


def check_as_one_rank(case: Case, made: dict[str, np.ndarray], one: dict[str, np.ndarray]) -> None:
    """Check that rows err by no more than twice what those of one rank do."""
    exact = truth(case, BFLOAT16)
    for field in ("out", "zxbcdt"):
        verdict = oracle.judge(made[field], getattr(exact, field), one[field].astype(np.float64))
        assert verdict.rms <= verdict.rms_budget, f"{field} of {case}: {verdict}"


def fail_on_one_rank(comm: thdattn.comm.Comm) -> None:
    """Pass rows of the wrong shape on the last rank, while the others wait for it in the first collective."""
    case = CASES["over-all-ranks"]
    mixer = case.mixer(comm, FLOAT64)
    plan = mixer.plan(case.batch)
    zxbcdt, weights, _ = random_inputs(case, FLOAT64)
    zxbcdt = plan.shard(zxbcdt)
    out, _ = mixer.forward(zxbcdt[1:] if comm.rank == comm.size - 1 else zxbcdt, weights, plan)
    print(np.shape(out))


SCENARIOS = {
    "cases": run_cases, "gpu-cases": run_gpu_cases, "bad-input": fail_on_one_rank,
}


def main(scenario: str, size: str, transport: str = "") -> None:
    comm = join("nccl" if transport else "mpi", int(size), transport or "auto")
    SCENARIOS[scenario](comm)
    comm.close()
    print(f"rank {comm.rank} of {comm.size}: {scenario} done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
