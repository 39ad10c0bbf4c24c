"""Ranks with a GPU each, and simulated ranks that share one; every run of several is one mpiexec or torchrun."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from launch import RANKS, all_done, run_gpu_ranks, run_ranks, run_torchrun
from ranks.comm_contract import check_contract

import thdattn.comm
from thdattn.cli import info
from thdattn.comm.nccl.gpus import SHARE

pytestmark = pytest.mark.gpu

ATTENTION, CONTRACT, DELAYS, GROUPS, PEER = (
    RANKS / f"{name}.py" for name in ("attention_ranks", "comm_contract", "delay_ranks", "comm_groups", "peer_ranks"))


# --- collectives -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_simulated_ranks_on_one_gpu_keep_the_contract(cupy, cp_size):
    thdattn.comm.run_local(cp_size, lambda comm: check_contract(comm, cupy), timeout=60)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("backend", ["nccl", "auto"])
def test_nccl_ranks_keep_the_contract(cupy, backend, n):
    run = run_gpu_ranks(cupy, n, CONTRACT, "contract", backend, str(n))
    all_done(run, n, f"contract on {'single' if (backend, n) == ('auto', 1) else 'nccl'}")


@pytest.mark.parametrize("n", [2, 4])
def test_groups_of_nccl_ranks_keep_the_contract(cupy, n):
    all_done(run_gpu_ranks(cupy, n, GROUPS, "nccl", str(n)), n, "groups on nccl")


def test_two_ranks_on_one_gpu_are_refused(cupy, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv(SHARE, raising=False)
    run = run_ranks(2, CONTRACT, "contract", "nccl", "2", timeout=120)
    assert run.returncode != 0
    assert "ranks 0 and 1 have the same GPU" in run.stderr


@pytest.mark.parametrize("scenario", ["failing-rank", "failing-rank-leaves-by-exit"])
def test_failing_rank_ends_the_job(cupy, scenario):
    assert run_gpu_ranks(cupy, 2, CONTRACT, scenario, "nccl", "2").returncode != 0


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_torch_nccl_ranks_keep_the_contract(cupy, torch_cuda, n):
    run = run_gpu_ranks(cupy, n, CONTRACT, "contract", "torch-nccl", str(n), by=run_torchrun)
    all_done(run, n, "contract on torch")


# --- attention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scenario", "transport", "n"), [
    *(("cases", "auto", n) for n in (2, 4, 8)),  # ranks together are the oracle, and so is every method
    *(("methods", transport, n) for transport in ("peer", "nccl") for n in (2, 4)),
    *(("hidden", "peer", n) for n in (2, 4)),  # exchanges behind kernels change no result
    *(("bits", "peer", n) for n in (2, 4)),  # NCCL beside kernels gives the bits of peer memory
])
def test_attention_on_nccl_ranks_is_right_however_keys_travel(cupy, scenario, transport, n):
    run = run_gpu_ranks(cupy, n, ATTENTION, scenario, "nccl", str(n), transport, timeout=600)
    all_done(run, n, f"{scenario} on nccl")


@pytest.mark.parametrize("scenario", ["cases", "methods"])
@pytest.mark.parametrize("n", [2, 4])
def test_attention_on_torch_nccl_ranks_is_the_oracle(cupy, torch_cuda, n, scenario):
    run = run_gpu_ranks(cupy, n, ATTENTION, scenario, "torch-nccl", str(n), timeout=600, by=run_torchrun)
    all_done(run, n, f"{scenario} on torch-nccl")


@pytest.mark.parametrize(("n", "each", "checks"), [(2, 1, False), (2, 1, True), (4, 2, False)])
def test_every_method_between_machines_is_the_oracle(cupy, monkeypatch, n, each, checks):
    monkeypatch.setenv("RANKS_PER_MACHINE", str(each))
    monkeypatch.setenv("THDATTN_CHECK", str(int(checks)))
    run = run_gpu_ranks(cupy, n, ATTENTION, "methods,hidden", "nccl", str(n), "auto", timeout=600)
    all_done(run, n, "hidden on nccl")


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("transport", ["peer", "nccl", "machines"])
def test_whoever_is_late_the_bits_are_the_same(cupy, monkeypatch, transport, n):
    if transport == "machines":
        monkeypatch.setenv("RANKS_PER_MACHINE", str(n // 2))
        transport = "auto"
    all_done(run_gpu_ranks(cupy, n, DELAYS, transport, str(n), timeout=400), n, f"delays on {transport}")


@pytest.mark.parametrize("n", [2, 4])
def test_bad_input_on_one_rank_ends_all_ranks_with_its_message(cupy, n):
    began = time.perf_counter()
    run = run_gpu_ranks(cupy, n, ATTENTION, "bad-input", "nccl", str(n))
    assert run.returncode != 0
    assert "ValueError: q has shape" in run.stderr
    assert "done" not in run.stdout
    assert time.perf_counter() - began < 150


def test_batch_that_differs_on_one_rank_raises_on_every_rank(cupy):
    run = run_gpu_ranks(cupy, 2, ATTENTION, "disagree", "nccl", "2")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("the plan is not the same on all ranks") == 2


# --- transports --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("scenario", ["short", "pool", "sizes", "close", "start-auto", "start-peer"])
def test_ranks_go_on_together_where_a_step_of_peer_memory_fails_on_one(cupy, scenario, n):
    all_done(run_gpu_ranks(cupy, n, PEER, scenario, str(n)), n, scenario)


def test_a_rank_that_does_not_come_to_grow_a_window_ends_the_job(cupy):
    run = run_gpu_ranks(cupy, 2, PEER, "absent", "2")
    assert run.returncode != 0 and "done" not in run.stdout
    assert "making 2 windows of keys of " in run.stderr


def test_one_process_foresees_how_keys_travel_between_ranks(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs 2 GPUs: one process does not see that ranks will share one")
    foreseen = info._transport(thdattn.comm.SingleComm())
    run = run_gpu_ranks(cupy, 2, Path("-m"), "thdattn", "info")
    (said,) = [line.split(maxsplit=1)[1] for line in run.stdout.splitlines() if line.startswith("transport ")]
    taken = said.split(":")[0]
    assert run.returncode == 0 and foreseen.startswith(f"{taken} between ranks: "), f"{said}, but {foreseen}"


@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_the_log_of_rank_0_says_which_transport_was_taken(cupy, tmp_path, transport):
    program = tmp_path / "program.py"
    program.write_text(f"""
import logging
logging.basicConfig(level=logging.INFO)
import thdattn
with thdattn.comm.init(transport={transport!r}) as comm:
    assert comm.overlaps and comm.reads_peers == (not comm.no_peer_memory) == ({transport!r} == "peer")
    comm.split(0)
""")
    run = run_gpu_ranks(cupy, 2, program)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count(f"made <NcclComm rank 0 of 2, transport {transport!r}") == 1
    assert run.stderr.count("made <NcclComm") == 1
