"""The script that measures everything on several GPUs, without one: its steps, their time limits, and what it keeps."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import measure_all
import record
from measure_all import Step


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_steps_train_the_same_tokens_and_name_files_that_there_are(gpus):
    steps = {step.name: step for step in measure_all.steps(gpus, ["mpiexec", "--flag"])}
    assert list(steps)[:4] == ["cp", "bytelm-all", "bytelm-one", "tests"]
    assert list(steps)[4:] == [f"bytelm-{gpus // cp}x{cp}" for cp in (1, 2, 4) if cp < gpus]
    for name, (_, command, seconds) in steps.items():
        assert 0 < seconds <= 260
        assert all((measure_all.ROOT / word).exists() for word in command if word.endswith(".py") and "/" in word)
        if name not in ("tests", "bytelm-one"):
            assert command[:4] == ["mpiexec", "--flag", "-n", str(gpus)]
        if name.startswith("bytelm"):
            options = dict(zip(command[-8:-1], command[-7:], strict=True))
            groups = gpus // int(options.get("--cp", gpus)) if name != "bytelm-one" else 1
            assert int(options["--tokens"]) * groups * int(options.get("--accumulate", 1)) == measure_all.TOKENS


NUMBERED = """
import pytest
@pytest.mark.parametrize("n", [2, 4, 24])
@pytest.mark.parametrize("transport", ["peer"])
def test_pair(n, transport): pass
@pytest.mark.parametrize("n", [2, 4, 24])
def test_alone(n): pass
def test_neither(): pass
"""


@pytest.mark.parametrize(("gpus", "wanted"), [
    (2, {"test_gpu_faults.py::test_it", "test_other.py::test_alone[2]", "test_other.py::test_pair[peer-2]"}),
    (4, {"test_other.py::test_alone[4]", "test_other.py::test_pair[peer-4]"}),
])  # fmt: skip
def test_tests_are_chosen_by_their_number_of_ranks(tmp_path, gpus, wanted):
    (tmp_path / "test_gpu_faults.py").write_text("def test_it(): pass")
    (tmp_path / "test_other.py").write_text(NUMBERED)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", "--rootdir", "."]
    run = subprocess.run([*command, "-k", measure_all.of_ranks(gpus)], cwd=tmp_path, capture_output=True, text=True,
                         timeout=60, check=True)  # fmt: skip
    assert {line for line in run.stdout.splitlines() if "::" in line} == wanted


def test_a_step_that_hangs_is_ended_and_one_that_fails_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(measure_all, "GRACE", 0.1)
    output, python = tmp_path / "step.txt", sys.executable
    hangs = ("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); "
             "time.sleep(60)")  # fmt: skip
    began = time.monotonic()
    assert measure_all.run(Step("hangs", [python, "-c", hangs], 9), output, 5.0) == "not within 5 s"
    assert time.monotonic() - began < 30 and measure_all.last_line(output) == "on"
    assert measure_all.run(Step("fails", [python, "-c", "raise SystemExit(3)"], 9), output, 30) == "with 3"
    assert measure_all.last_line(output) == ""
    works = Step("works", [python, "-c", "import thdattn; print('a'); print('b'); print()"], 9)
    assert measure_all.run(works, output, 30) == "well" and measure_all.last_line(output) == "b"
    assert measure_all.run(works, output, 0.05) == "no time left" and not output.read_text()


def test_results_and_no_other_files_are_kept(tmp_path):
    results, out = tmp_path / "results", tmp_path / "out"
    for folder in (results, out):
        folder.mkdir()
    for name in ("cp_a.csv", "cp_a.png", "bytelm_a.csv", "attention_a.csv", "gpu_tests.json"):
        (results / name).write_text(name)
    measure_all.keep(results, out)
    assert sorted(path.name for path in out.iterdir()) == ["bytelm_a.csv", "cp_a.csv", "cp_a.png", "gpu_tests.json"]


def test_the_summary_sets_tokens_beside_those_of_one_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    row = {"date": "2026-02", "gpu": "g", "size": "1b", "cp": "", "tokens": "8", "accumulate": "1"}
    made = [row | {"ranks": "1", "tokens_per_s": "100"}, row | {"ranks": "4", "tokens_per_s": "360"},
            row | {"ranks": "4", "tokens_per_s": "7", "date": "2026-01"}]  # fmt: skip
    record.save(tmp_path / "bytelm_g.csv", made, ("date", "ranks"))
    assert measure_all.summary(4, "2026-02").split("\n\n") == [
        "bytelm 1b on 1: 100 tokens/s", "bytelm 1b on 4: 360 tokens/s, 0.90 of 4 times one GPU"]  # fmt: skip
