"""Provenance of records, and the record of GPU tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import gpu_record
import pytest
from launch import SOURCE

PACKAGE = SOURCE / "thdattn"


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """Copy the package that jit reads."""
    pytest.importorskip("cupy")
    from thdattn.jit import compiler

    shutil.copytree(PACKAGE, tmp_path / "thdattn", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(compiler, "FOLDER", tmp_path / "thdattn")
    return tmp_path / "thdattn"


def test_hash_follows_the_code_of_every_file_but_neither_comments_nor_names(copied):
    from thdattn.jit import compiler

    def hashed():
        compiler.forget_files()
        return compiler.source_hash()

    first, seen = hashed(), set()
    for file in compiler.device_files():
        path = copied / file
        text = path.read_text()
        path.write_text(f"// Another comment.\n\n{text}  // and one more\n")
        assert hashed() == first, file
        path.write_text(f"{text}constexpr int kMore = 1;\n")
        seen.add(hashed())
        path.write_text(text)
    assert hashed() == first and first not in seen and len(seen) > 1
    (copied / "kernels" / "elsewhere").mkdir()
    (copied / "kernels" / "peer" / "reduce.cu").rename(copied / "kernels" / "elsewhere" / "add.cu")
    assert hashed() == first


# --- tests on GPUs ---------------------------------------------------------------------------------------------

MACHINE = {"gpu": "NVIDIA H200", "num_gpus": 2, "driver": "580", "kernel_sources": "abc"}
TESTS = """
import pytest
@pytest.mark.parametrize("n", range(3))
def test_counts(n): assert n < 2
@pytest.mark.parametrize("n", range(2))
def test_skips(n): pytest.skip("needs 4 GPUs")
@pytest.mark.skip(reason="needs a GPU")
def test_marked(): pass
@pytest.fixture
def broken(): raise RuntimeError
def test_breaks(broken): pass
"""
PLUGIN = """
import json, gpu_record
def pytest_terminal_summary(terminalreporter):
    with open("run.json", "w") as file:
        json.dump(gpu_record.run("the command", terminalreporter.stats), file)
"""


def test_record_names_what_failed_and_why_others_were_skipped(tmp_path):
    (tmp_path / "test_one.py").write_text(TESTS)
    (tmp_path / "test_two.py").write_text("import time\ndef test_sleeps(): time.sleep(0.2)\n")
    (tmp_path / "conftest.py").write_text(PLUGIN)
    paths = os.pathsep.join([os.path.dirname(gpu_record.__file__), str(SOURCE)])
    environment = {**os.environ, "PYTHONPATH": paths, "THDATTN_COMMIT": "1234"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False)
    run = json.loads((tmp_path / "run.json").read_text())
    assert (run["command"], run["commit"]) == ("the command", "1234")
    assert (run["passed"], run["failed"], run["skipped"]) == (3, 2, 3)
    assert run["failed_tests"] == ["test_one.py::test_breaks", "test_one.py::test_counts[2]"]
    assert run["skipped_tests"] == {
        "needs 4 GPUs": {"test_one.py::test_skips": 2}, "needs a GPU": {"test_one.py::test_marked": 1},
    }
    assert run["files"]["test_one.py"] | {"seconds": 0} == {"passed": 2, "failed": 2, "skipped": 3, "seconds": 0}
    assert run["files"]["test_two.py"]["passed"] == 1
    assert 0.2 <= run["files"]["test_two.py"]["seconds"] < 5


def test_runs_on_the_same_sources_are_kept_together(tmp_path):
    path = tmp_path / "results" / "gpu_tests.json"

    def save(machine, command, passed):
        gpu_record.save(path, machine, {"command": command, "passed": passed})
        return [(run["command"], run["passed"]) for run in json.loads(path.read_text())["2x NVIDIA H200"]["runs"]]

    assert save(MACHINE, "a", 1) == [("a", 1)]
    assert save(MACHINE, "b", 2) == [("a", 1), ("b", 2)]
    assert save(MACHINE, "a", 3) == [("b", 2), ("a", 3)]
    gpu_record.save(path, MACHINE | {"num_gpus": 1}, {"command": "a", "passed": 9})
    assert save(MACHINE | {"kernel_sources": "def"}, "b", 4) == [("b", 4)]
    assert set(json.loads(path.read_text())) == {"1x NVIDIA H200", "2x NVIDIA H200"}
