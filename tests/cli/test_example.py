"""The example as a newcomer starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import SOURCE, run_ranks

EXAMPLE = SOURCE.parent / "examples" / "packed_documents.py"
SMALL = ("--tokens", "3000", "--repeats", "1")


def run_alone(*arguments: str, program: Path | str = EXAMPLE) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(EXAMPLE.parent)])}
    command = [sys.executable, str(program), *SMALL, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_two_simulated_ranks_pass():
    run = run_alone("--ranks", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 ranks (simulated in this process)" in run.stdout
    assert run.stdout.count("PASS") == 5  # out, dq, dk, dv, padding
    assert "NaN on purpose" in run.stdout


@pytest.mark.parametrize(
    "options",
    ["--full", "--window 100 --seed 3", "--full --window 50 --sharding contiguous", "--window 100 --sharding balanced"],
)
def test_every_mask_and_sharding_passes(options):
    run = run_alone("--ranks", "3", *options.split())
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("PASS") == 5


def test_two_processes_print_one_report():
    run = run_ranks(2, EXAMPLE, *SMALL)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 ranks (processes, backend" in run.stdout
    assert run.stdout.count("PASS") == 5


def test_plot_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    run = run_alone("--ranks", "2", "--plot", str(tmp_path / "picture.png"))
    assert run.returncode == 0, run.stdout + run.stderr
    picture = (tmp_path / "picture.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


@pytest.mark.parametrize(
    ("spoil", "culprit"), [("dq = dq * 2", "dq"), ("dv[:] = float('nan')", "dv"), ("dk[:] = 1", "padding")]
)
def test_a_wrong_result_fails_and_is_named(spoil, culprit, tmp_path):
    program = tmp_path / "spoiled.py"
    program.write_text(f"""
import sys, packed_documents, thdattn
right = thdattn.CPAttention.backward
def backward(*arguments):
    dq, dk, dv = right(*arguments)
    {spoil}
    return dq, dk, dv
thdattn.CPAttention.backward = backward
sys.exit(packed_documents.main())
""")
    run = run_alone("--ranks", "2", program=program)
    assert run.returncode == 1, run.stdout + run.stderr
    assert [line for line in run.stdout.splitlines() if line.split()[:1] == [culprit] and line.endswith("FAIL")]
