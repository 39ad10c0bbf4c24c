"""The Mamba-2 mixer on real ranks, as a program under mpiexec.

mpiexec -n 2 python -m mpi4py mamba_ranks.py cases 2
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import thdattn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mixer_cases import BFLOAT16, CASES, FLOAT64, assembled, assert_equal, random_inputs, run, run_rank, truth
from ranks.comm_contract import join


def run_cases(comm: thdattn.comm.Comm) -> None:
    """What ranks make together is the oracle's in float64, and bit by bit what simulated ranks make in bfloat16."""
    from mpi4py import MPI

    for case in CASES.values():
        for dtype in (FLOAT64, BFLOAT16):
            ranks = MPI.COMM_WORLD.allgather(run_rank(case, comm, dtype, random_inputs(case, dtype)))
            if comm.rank > 0:
                continue
            made = assembled(case, ranks)
            if dtype == FLOAT64:
                assert_equal(made, truth(case, dtype), 1e-12)
            else:
                for field, x in run(case, comm.size, dtype).items():
                    assert x.tobytes() == made[field].tobytes(), field


def fail_on_one_rank(comm: thdattn.comm.Comm) -> None:
    """The last rank passes rows of the wrong shape, while the others wait for it in the first collective."""
    case = CASES["over-all-ranks"]
    mixer = case.mixer(comm, FLOAT64)
    plan = mixer.plan(case.batch)
    zxbcdt, weights, _ = random_inputs(case, FLOAT64)
    zxbcdt = plan.shard(zxbcdt)
    out, _ = mixer.forward(zxbcdt[1:] if comm.rank == comm.size - 1 else zxbcdt, weights, plan)
    print(np.shape(out))


def main(scenario: str, size: str) -> None:
    comm = join("mpi", int(size))
    {"cases": run_cases, "bad-input": fail_on_one_rank}[scenario](comm)
    comm.close()
    print(f"rank {comm.rank} of {comm.size}: {scenario} done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
