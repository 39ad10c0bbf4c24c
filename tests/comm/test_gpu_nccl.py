"""Attention over NCCL ranks, one GPU each; every test is one mpiexec and every rank ends by itself."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from launch import RANKS, run_ranks

import thdattn
from thdattn.cli import info

pytestmark = pytest.mark.gpu

PROGRAM = RANKS / "attention_ranks.py"


def need_gpus(cupy, n):
    found = cupy.cuda.runtime.getDeviceCount()
    if found < n:
        pytest.skip(f"needs {n} GPUs, found {found}")


@pytest.mark.parametrize("n", [2, 4, 8])
def test_ranks_together_are_the_oracle(cupy, n):
    need_gpus(cupy, n)
    run = run_ranks(n, PROGRAM, "cases", "nccl", str(n), timeout=240)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("cases on nccl done") == n


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_every_method_is_the_oracle(cupy, transport, n):
    need_gpus(cupy, n)
    run = run_ranks(n, PROGRAM, "methods", "nccl", str(n), transport, timeout=600)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("methods on nccl done") == n


@pytest.mark.parametrize("n", [2, 4])
def test_exchanges_behind_kernels_change_no_result(cupy, n):
    need_gpus(cupy, n)
    run = run_ranks(n, PROGRAM, "hidden", "nccl", str(n), "peer", timeout=400)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("hidden on nccl done") == n


@pytest.mark.parametrize("n", [2, 4])
def test_nccl_beside_kernels_gives_the_bits_of_peer_memory(cupy, n):
    need_gpus(cupy, n)
    run = run_ranks(n, PROGRAM, "bits", "nccl", str(n), "peer", timeout=400)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("bits on nccl done") == n


@pytest.mark.parametrize(("n", "each", "checks"), [(2, 1, False), (2, 1, True), (4, 2, False)])
def test_every_method_between_machines_is_the_oracle(cupy, monkeypatch, n, each, checks):
    need_gpus(cupy, n)
    monkeypatch.setenv("RANKS_PER_MACHINE", str(each))
    monkeypatch.setenv("THDATTN_CHECK", str(int(checks)))
    run = run_ranks(n, PROGRAM, "methods,hidden", "nccl", str(n), "auto", timeout=600)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("hidden on nccl done") == n


@pytest.mark.parametrize("n", [2, 4])
def test_bad_input_on_one_rank_ends_all_ranks_with_its_message(cupy, n):
    need_gpus(cupy, n)
    began = time.perf_counter()
    run = run_ranks(n, PROGRAM, "bad-input", "nccl", str(n), timeout=180)
    assert run.returncode != 0
    assert "ValueError: q has shape" in run.stderr
    assert "done" not in run.stdout
    assert time.perf_counter() - began < 150


def test_batch_that_differs_on_one_rank_raises_on_every_rank(cupy):
    need_gpus(cupy, 2)
    run = run_ranks(2, PROGRAM, "disagree", "nccl", "2", timeout=180)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("the plan is not the same on all ranks") == 2


def test_one_process_foresees_how_keys_travel_between_ranks(cupy):
    need_gpus(cupy, 2)
    foreseen = info._transport(thdattn.comm.SingleComm())
    run = run_ranks(2, Path("-m"), "thdattn", "info", timeout=180)
    (said,) = [line.split(maxsplit=1)[1] for line in run.stdout.splitlines() if line.startswith("transport ")]
    taken = said.split(":")[0]
    assert run.returncode == 0 and foreseen.startswith(f"{taken} between ranks: "), f"{said}, but {foreseen}"


@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_the_log_of_rank_0_says_which_transport_was_taken(cupy, tmp_path, transport):
    need_gpus(cupy, 2)
    program = tmp_path / "program.py"
    program.write_text(f"""
import logging
logging.basicConfig(level=logging.INFO)
import thdattn
with thdattn.comm.init(transport={transport!r}) as comm:
    assert comm.overlaps and comm.reads_peers == (not comm.no_peer_memory) == ({transport!r} == "peer")
    comm.split(0)
""")
    run = run_ranks(2, program, timeout=180)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count(f"made <NcclComm rank 0 of 2, transport {transport!r}") == 1
    assert run.stderr.count("made <NcclComm") == 1
