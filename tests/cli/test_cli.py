"""python -m thdattn: info on machines that lack things, check on engines that are wrong; and remedies that work."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from launch import SOURCE, run, run_ranks

import thdattn
from thdattn import __version__, install
from thdattn.__main__ import main
from thdattn.cli import info
from thdattn.comm.nccl.comm import NcclComm
from thdattn.engines import reference, select
from thdattn.fuzz import check
from thdattn.install import remedy
from thdattn.jit import cache

# Runs at the start of every Python process that finds it on its path, so of those that `info` starts, too.
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise {error}("blocked by the test: " + name)
sys.meta_path.insert(0, Blocker())
"""


def info_without(blocked: tuple[str, ...], error: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / "sitecustomize.py").write_text(BLOCKER.format(blocked=blocked, error=error))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    done = run([sys.executable, "-m", "thdattn", "info"], 120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(output: str, label: str) -> list[str]:
    return [line[len(label) :].strip() for line in output.splitlines() if line.startswith(f"{label} ")]


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_info_needs_only_numpy_and_ml_dtypes(error, tmp_path, monkeypatch):
    output = info_without(("cupy", "mpi4py"), error, tmp_path, monkeypatch)
    assert rows(output, "numpy")[0].split() == [np.__version__, np.__file__]
    assert rows(output, "CuPy") == [f"-           {error}: blocked by the test: cupy"]
    assert rows(output, "mpi4py")[0].startswith("-")
    (engine,) = rows(output, "engine")
    assert engine.startswith("reference: CuPy finds no usable GPU")
    assert rows(output, "transport") == ["host arrays: there is no GPU"]
    remedies = rows(output, "missing")
    assert any(f"CuPy, CUDA runtime, NVRTC, NCCL: {remedy('cuda1')[:-2]}" in text for text in remedies)
    assert any("mpi4py, MPI" in text and remedy("mpich") in text for text in remedies)


def test_info_says_that_the_mpi_library_is_missing_where_only_mpi4py_is_there(tmp_path, monkeypatch):
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '4.1.2'\nclass rc: pass\n")
    (package / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    output = info_without(("cupy",), "ImportError", tmp_path, monkeypatch)
    assert rows(output, "mpi4py")[0].split() == ["4.1.2", str(package / "__init__.py")]
    assert rows(output, "MPI") == ["-           RuntimeError: cannot load MPI library"]


def test_info_names_the_file_of_every_library(capsys):
    cupy = pytest.importorskip("cupy")
    assert main(["info"]) == 0
    output = capsys.readouterr().out
    assert rows(output, "thdattn")[0].split() == [__version__, str(Path(info.__file__).parents[1])]
    assert rows(output, "CuPy")[0].split() == [cupy.__version__, cupy.__file__]
    assert "libnvrtc.so" in rows(output, "NVRTC")[0]
    assert "libnccl.so" in rows(output, "NCCL")[0] or not importlib.import_module("cupy.cuda.nccl").available
    assert rows(output, "kernel cache")


def machine(count, blind=()):
    """Return CuPy of a process with so many GPUs, of which some cannot read another's memory."""
    runtime = SimpleNamespace(getDeviceCount=lambda: count, deviceCanAccessPeer=lambda *pair: pair not in blind)
    cuda = SimpleNamespace(runtime=runtime)
    return {"cupy": SimpleNamespace(cuda=cuda), "cupy.cuda": cuda}


@pytest.mark.parametrize(("cupy", "said"), [
    (machine(4), "peer between ranks: GPUs 0 to 3 read each other's memory"),
    (machine(2, [(1, 0)]), "nccl between ranks: GPU 1 cannot read the memory of GPU 0"),
    (machine(4, [(0, 3), (3, 0)]),
     "nccl between ranks: GPU 0 cannot read the memory of GPU 3 (pairs like this: 2)"),
    (machine(1), "peer or nccl: start several ranks with mpiexec to find out"),
    (machine(0), "host arrays: there is no GPU"),
    ({"cupy": None}, "host arrays: there is no GPU"),
], ids=["see-each-other", "one-way", "far-apart", "one", "no-gpu", "no-cupy"])
def test_info_says_how_keys_would_travel_between_the_gpus_of_this_machine(cupy, said, monkeypatch):
    for name, module in cupy.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert info._transport(thdattn.comm.SingleComm()) == said


@pytest.mark.parametrize(("overlaps", "spans_machines", "reason", "said"), [
    (True, False, "", "peer: the GPUs read each other's memory"),
    (True, True, "the ranks are on 2 machines", "nccl, beside kernels: the ranks are on 2 machines; groups of "
     "comm.split within a machine try peer memory"),
    (False, False, "why not", "nccl, before and after kernels: why not"),
])
def test_info_of_several_ranks_says_how_keys_travel_between_them(overlaps, spans_machines, reason, said):
    comm = object.__new__(NcclComm)
    comm.size, comm.no_peer_memory, comm.reads_peers = 2, reason, not reason
    comm.overlaps, comm.spans_machines = overlaps, spans_machines
    assert info._transport(comm) == said


@pytest.mark.parametrize(("hosts", "said"), [
    (["a"], "1: a (rank 0)"), (["a", "a", "b", "b"], "2: a (ranks 0-1), b (ranks 2-3)"),
    (["a", "b", "a", "a"], "2: a (ranks 0, 2-3), b (rank 1)"),
])
def test_info_lists_machines_and_their_ranks(hosts, said):
    assert info._machines(hosts) == said


def test_info_of_ranks_without_gpus_says_that_nothing_travels_between_gpus():
    said = thdattn.comm.run_local(2, info._transport)
    assert said == ["host arrays: a comm of backend 'local' moves no others"] * 2


def test_info_of_ranks_that_found_no_gpus_says_why(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.format(blocked=("cupy",), error="ImportError"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    done = run_ranks(2, Path("-m"), "thdattn", "info", python=())
    assert done.returncode == 0, done.stderr
    reason = ("no usable GPU on rank 0 and 1 more: RuntimeError: CuPy cannot be loaded (ImportError: blocked by the "
              "test: cupy)")
    assert rows(done.stdout, "engine")[0].startswith(f"reference: {reason}")
    assert rows(done.stdout, "transport")[0].startswith(f"host arrays: {reason}")
    (said,) = [line for line in done.stderr.splitlines() if "cupy" in line]
    assert said.startswith(f"thdattn.comm.init uses MPI and host arrays (NumPy), not NCCL: {reason}")


@pytest.mark.parametrize(("visible", "lines"), [("0", 1), ("", 0)])
def test_one_process_says_once_that_it_takes_numpy_where_a_gpu_is_expected(visible, lines, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(install, "DRIVER", "/nowhere")
    monkeypatch.setattr(install, "DEVICE", "/nowhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    select._warn_once.cache_clear()
    for _ in range(2):
        assert select.choose_engine("auto", thdattn.comm.SingleComm())[0] is reference
        assert select.choose_engine("reference", thdattn.comm.SingleComm())[0] is reference
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == lines
    beginning = "thdattn computes with NumPy (engine 'reference'), not on a GPU: CuPy finds no usable GPU"
    assert all(text.startswith(beginning) for text in said)


@pytest.mark.parametrize("bits", [0o022, 0])
def test_info_says_how_large_the_kernel_cache_is_or_why_it_cannot_be_used(bits, tmp_path, monkeypatch):
    monkeypatch.setenv("THDATTN_CACHE_DIR", str(tmp_path / "cache"))
    cache.write("a.cubin", bytes(10**6))
    (tmp_path / "cache").chmod(0o700 | bits)
    said = info._kernel_cache()
    assert said.startswith(f"{tmp_path / 'cache'} cannot be used: its mode 0722" if bits else
                           f"{tmp_path / 'cache'} (1 kernels, 1.0 MB;")


def test_check_passes_on_the_reference_engine(capsys):
    assert main(["check", "--engine", "reference"]) == 0
    output = capsys.readouterr().out
    assert output.endswith("all PASS\n")
    assert output.count(" PASS\n") == 2 * len(check.CASES) + 1
    assert "FAIL" not in output


def wrong_dk(right):
    def backward(*arguments, **how):
        dq, dk, dv = right(*arguments, **how)
        return dq, dk * np.asarray(1.5, dk.dtype), dv

    return backward


def padding_is_not_0(right):
    def forward(inputs, *arguments, **how):
        out, lse, max_logit = right(inputs, *arguments, **how)
        ranges = inputs.plan.key_ranges
        out[ranges[:, 0] == ranges[:, 1]] = 1e-6  # far below every budget in bfloat16
        return out, lse, max_logit

    return forward


@pytest.mark.parametrize(("function", "defect"), [("attn_bwd", wrong_dk), ("attn_fwd", padding_is_not_0)])
def test_check_fails_on_an_engine_that_is_a_little_wrong(monkeypatch, capsys, function, defect):
    monkeypatch.setattr(reference, function, defect(getattr(reference, function)))
    monkeypatch.setattr(check, "CASES", {"ragged": check.CASES["ragged lengths"]})
    assert main(["check", "--engine", "reference"]) == 1
    output = capsys.readouterr().out
    assert "2 of 2 FAILED" in output
    lines = re.findall(r'python -m thdattn (fuzz) (--case) "(.*)"', output)
    assert len(lines) == 2 and all(main([*line, "--engine", "reference"]) == 1 for line in map(list, lines))


@pytest.mark.exhaustive
def test_check_runs_on_the_real_ranks_and_prints_once():
    done = run_ranks(2, Path("-m"), "thdattn", "check", "--engine", "reference")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all PASS") == 1
    assert all(name in done.stdout for name in check.CASES)
    assert "ranks   2, backend 'mpi'" in done.stdout


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"thdattn {__version__}\n"


# --- remedies ----------------------------------------------------------------------------------------------------


ROOT = SOURCE.parent


def test_a_clone_is_installed_with_the_extra_from_any_directory(monkeypatch):
    monkeypatch.setattr(install, "FOLDER", SOURCE / "thdattn")
    assert install.remedy("cuda13") == f'pip install -e "{ROOT}[cuda13]"'


ORIGINS = {
    "a-folder": ({"url": "file:///home/me/clone", "dir_info": {}}, "thdattn[mpich] @ file:///home/me/clone"),
    "git": ({"url": "https://host/thdattn.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "thdattn[mpich] @ git+https://host/thdattn.git@abc"),
    "an-index": (None, "thdattn[mpich]"),
}


@pytest.mark.parametrize(("kept", "wanted"), ORIGINS.values(), ids=ORIGINS)
def test_elsewhere_it_comes_from_where_the_package_came_from(kept, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(install, "FOLDER", tmp_path / "site-packages" / "thdattn")
    distribution = SimpleNamespace(read_text=lambda name: kept and json.dumps(kept))
    monkeypatch.setattr(metadata, "distribution", lambda name: distribution)
    assert install.remedy("mpich") == f'pip install "{wanted}"'


def test_a_copy_that_pip_knows_nothing_of_has_a_remedy_too(tmp_path, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(install, "FOLDER", tmp_path / "thdattn")
    monkeypatch.setattr(metadata, "distribution", missing)
    assert install.remedy("mpi") == 'pip install "thdattn[mpi]"'
