"""The comm backends on GPUs: simulated ranks share one, NCCL ranks have one each."""

from __future__ import annotations

import pytest
from launch import RANKS, run_ranks, run_torchrun
from ranks.comm_contract import check_contract

import thdattn.comm

pytestmark = pytest.mark.gpu

PROGRAM = RANKS / "comm_contract.py"


@pytest.fixture(scope="module")
def cupy():
    cupy = pytest.importorskip("cupy")
    if not cupy.is_available():
        pytest.skip("needs a GPU")
    return cupy


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_simulated_ranks_on_one_gpu_keep_the_contract(cupy, cp_size):
    thdattn.comm.run_local(cp_size, lambda comm: check_contract(comm, cupy), timeout=60)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("backend", ["nccl", "auto"])
def test_nccl_ranks_keep_the_contract(cupy, backend, n):
    if n > cupy.cuda.runtime.getDeviceCount():
        pytest.skip(f"needs {n} GPUs")
    run = run_ranks(n, PROGRAM, "contract", backend, str(n), timeout=180)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(f"contract on {'single' if (backend, n) == ('auto', 1) else 'nccl'} done") == n


@pytest.mark.parametrize("n", [2, 4])
def test_groups_of_nccl_ranks_keep_the_contract(cupy, n):
    if cupy.cuda.runtime.getDeviceCount() < n:
        pytest.skip(f"needs {n} GPUs")
    run = run_ranks(n, PROGRAM.with_name("comm_groups.py"), "nccl", str(n), timeout=180)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("groups on nccl done") == n


def test_two_ranks_on_one_gpu_are_refused(cupy, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    run = run_ranks(2, PROGRAM, "contract", "nccl", "2", timeout=120)
    assert run.returncode != 0
    assert "ranks 0 and 1 have the same GPU" in run.stderr


@pytest.mark.parametrize("scenario", ["failing-rank", "failing-rank-leaves-by-exit"])
def test_failing_rank_ends_the_job(cupy, scenario):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs 2 GPUs")
    assert run_ranks(2, PROGRAM, scenario, "nccl", "2", timeout=120).returncode != 0


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_torch_nccl_ranks_keep_the_contract(cupy, n):
    if n > cupy.cuda.runtime.getDeviceCount():
        pytest.skip(f"needs {n} GPUs")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs PyTorch with CUDA")
    run = run_torchrun(n, PROGRAM, "contract", "torch-nccl", str(n), timeout=180)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("contract on torch done") == n


@pytest.mark.parametrize("scenario", ["cases", "methods"])
@pytest.mark.parametrize("n", [2, 4])
def test_attention_on_torch_nccl_ranks_is_the_oracle(cupy, n, scenario):
    if n > cupy.cuda.runtime.getDeviceCount():
        pytest.skip(f"needs {n} GPUs")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs PyTorch with CUDA")
    run = run_torchrun(n, PROGRAM.with_name("attention_ranks.py"), scenario, "torch-nccl", str(n), timeout=600)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(f"{scenario} on torch-nccl done") == n
