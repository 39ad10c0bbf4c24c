"""The Mamba-2 mixer over NCCL ranks, one GPU each, every rank ending by itself; and through peer memory on one GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("cupy")  # which peer memory loads
from cases import to_host
from launch import RANKS, all_done, run_gpu_ranks
from loopback import Loopback, Mirror
from mixer_cases import BFLOAT16, GPU_SIZES, Case, random_inputs
from tree_cases import LONG

import thdattn

pytestmark = pytest.mark.gpu

PROGRAM = RANKS / "mamba_ranks.py"
PACKS = [
    *(Case(name, lengths, sizes=GPU_SIZES) for name, lengths in (
        ("over-all-ranks", (3000,)), ("own-and-crossing", (700, 1400, 3, 897)), ("own", (1500, 1500)))),
    Case(LONG.name, (), trees=LONG, sizes=GPU_SIZES),
]  # fmt: skip


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_ranks_together_are_one_rank(cupy, transport, n):
    all_done(run_gpu_ranks(cupy, n, PROGRAM, "gpu-cases", str(n), transport, timeout=200), n, "gpu-cases")


@pytest.mark.usefixtures("poisoned_gpu")
@pytest.mark.parametrize("case", PACKS, ids=str)
def test_peer_memory_gives_the_bits_of_collectives(cupy, monkeypatch, case):
    zxbcdt, weights, dout = random_inputs(case, BFLOAT16)
    with cupy.cuda.Stream(non_blocking=True):
        comm = Loopback(monkeypatch)
        layers = [(mixer, mixer.plan(case.batch)) for mixer in (
            case.mixer(each, BFLOAT16, engine="cuda") for each in (comm, Mirror()))]  # fmt: skip
        for seed in range(4):
            results = []
            for mixer, plan in layers:
                local, gradient = (plan.shard(cupy.asarray((seed + 1) * x)) for x in (zxbcdt, dout))
                out, saved = mixer.forward(local, thdattn.Mamba2Weights(*map(cupy.asarray, weights)), plan)
                dzxbcdt, dweights = mixer.backward(gradient, saved)
                results.append([to_host(x).tobytes() for x in (out, dzxbcdt, *dweights)])
            assert results[0] == results[1]
        comm.peer.close()
