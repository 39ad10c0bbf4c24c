"""python -m thdattn: info on machines that lack things, check on engines that are wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launch import SOURCE, run_ranks

from thdattn import __version__, cli, reference

# Runs at the start of every Python process that finds it on its path, so of those that `info` starts, too.
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise {error}("blocked by the test: " + name)
sys.meta_path.insert(0, Blocker())
"""


def info_without(blocked: tuple[str, ...], error: str, folder: Path) -> str:
    (folder / "sitecustomize.py").write_text(BLOCKER.format(blocked=blocked, error=error))
    run = subprocess.run(
        [sys.executable, "-m", "thdattn", "info"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(SOURCE)])},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


def rows(output: str, label: str) -> list[str]:
    return [line[len(label) :].strip() for line in output.splitlines() if line.startswith(f"{label} ")]


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError", "OSError"])
def test_info_needs_only_numpy_and_ml_dtypes(error, tmp_path):
    output = info_without(("cupy", "mpi4py"), error, tmp_path)
    assert rows(output, "numpy")[0].split() == [np.__version__, np.__file__]
    assert rows(output, "CuPy") == [f"-           {error}: blocked by the test: cupy"]
    assert rows(output, "mpi4py")[0].startswith("-")
    (engine,) = rows(output, "engine")
    assert engine.startswith("reference: CuPy finds no usable GPU")
    remedies = rows(output, "missing")
    assert any("CuPy, CUDA runtime, NVRTC, NCCL: pip install 'thdattn[cuda1" in remedy for remedy in remedies)
    assert any("mpi4py, MPI" in remedy and "pip install 'thdattn[mpich]'" in remedy for remedy in remedies)


def test_info_says_that_the_mpi_library_is_missing_where_only_mpi4py_is_there(tmp_path):
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '4.1.2'\nclass rc: pass\n")
    (package / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    output = info_without(("cupy",), "ImportError", tmp_path)
    assert rows(output, "mpi4py")[0].split() == ["4.1.2", str(package / "__init__.py")]
    assert rows(output, "MPI") == ["-           RuntimeError: cannot load MPI library"]


def test_info_names_the_file_of_every_library(capsys):
    cupy = pytest.importorskip("cupy")
    assert cli.main(["info"]) == 0
    output = capsys.readouterr().out
    assert rows(output, "thdattn")[0].split() == [__version__, str(Path(cli.__file__).parent)]
    assert rows(output, "CuPy")[0].split() == [cupy.__version__, cupy.__file__]
    assert "libnvrtc.so" in rows(output, "NVRTC")[0]
    assert rows(output, "kernel cache")


def test_info_shows_the_driver_version_that_decides_the_extra():
    assert any("thdattn[cuda12]" in remedy for remedy in cli._remedies(["CuPy"], "12.9"))
    assert any("thdattn[cuda13]" in remedy for remedy in cli._remedies(["NCCL"], "13.0"))
    assert list(cli._remedies([], "13.0")) == []


def test_check_passes_on_the_reference_engine(capsys):
    assert cli.main(["check", "--engine", "reference"]) == 0
    output = capsys.readouterr().out
    assert output.endswith("all PASS\n")
    assert output.count(" PASS\n") == 2 * len(cli.CASES) + 1
    assert "FAIL" not in output


def test_check_fails_on_an_engine_that_is_a_little_wrong(monkeypatch, capsys):
    right = reference.attn_bwd

    def wrong(*arguments):
        dq, dk, dv = right(*arguments)
        return dq, dk * np.asarray(1.5, dk.dtype), dv

    monkeypatch.setattr(reference, "attn_bwd", wrong)
    assert cli.main(["check", "--engine", "reference"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_check_fails_on_padding_that_is_not_exactly_zero(monkeypatch, capsys):
    right = reference.attn_fwd

    def wrong(q, k, v, plan, *arguments):
        out, lse, max_logit = right(q, k, v, plan, *arguments)
        out[plan.key_ranges[:, 0] == plan.key_ranges[:, 1]] = 1e-6  # far below every budget in bfloat16
        return out, lse, max_logit

    monkeypatch.setattr(reference, "attn_fwd", wrong)
    monkeypatch.setattr(cli, "CASES", [case for case in cli.CASES if case.name == "ragged lengths"])
    assert cli.main(["check", "--engine", "reference"]) == 1
    assert "2 of 2 FAILED" in capsys.readouterr().out


def test_check_runs_on_the_real_ranks_and_prints_once(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two ranks with a BLAS thread per core each take 20 times as long
    run = run_ranks(2, Path("-m"), "thdattn", "check", "--engine", "reference")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("all PASS") == 1
    assert "ranks   2, backend 'mpi'" in run.stdout


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"thdattn {__version__}\n"
