"""python -m thdattn fuzz on GPUs: some packs on one and on two, and chaos of every kind on two."""

from __future__ import annotations

import sys

import pytest
from launch import mpiexec, run

from thdattn.__main__ import main
from thdattn.fuzz import chaos

pytestmark = pytest.mark.gpu


@pytest.fixture
def two_gpus(cupy):
    """Skips the test where there are fewer."""
    if (found := cupy.cuda.runtime.getDeviceCount()) < 2:
        pytest.skip(f"needs 2 GPUs, found {found}")


@pytest.mark.parametrize("seed", [2, 7, 13])  # deterministic attention with replays, softcap and sinks, the mixer
def test_random_packs_pass_on_one_gpu(cupy, capsys, seed):
    status = main(["fuzz", "--engine", "cuda", "--packs", "64", "--seconds", "600", "--seed", str(seed)])
    said = capsys.readouterr().out
    assert status == 0 and "64 packs" in said and " 0 failed" in said, said


def test_random_packs_pass_on_two_gpus(two_gpus):
    words = "-m", "mpi4py", "-m", "thdattn", "fuzz", "--engine", "cuda", "--packs", "64", "--seed", "2"
    finished = run([*mpiexec(2), sys.executable, *words, "--seconds", "600"], 280)
    assert finished.returncode == 0 and "ranks 2 of nccl" in finished.stdout, finished.stdout + finished.stderr


def test_chaos_of_every_kind_ends_in_time_on_two_gpus(two_gpus, capsys):
    mpiexec(2)
    kinds = chaos.KINDS["cuda"]
    words = "--engine", "cuda", "--rounds", str(len(kinds)), "--jobs", "4", "--timeout", "20"
    status = main(["fuzz", "--chaos", *words])
    *lines, summary = capsys.readouterr().out.splitlines()
    assert status == 0 and ", 0 failed;" in summary, "\n".join([line for line in lines if "FAILED" in line])
    assert {line.split()[0] for line in lines} == {"kind=nothing", *(f"kind={kind}" for kind in kinds)}
