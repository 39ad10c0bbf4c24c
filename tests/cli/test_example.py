"""The example as a newcomer starts it."""

from __future__ import annotations

import sys

import pytest
from launch import SOURCE, run, run_ranks

import thdattn

sys.path.append(str(SOURCE.parent / "examples"))

import packed_documents

EXAMPLE = SOURCE.parent / "examples" / "packed_documents.py"
SMALL = ("--tokens", "1500", "--repeats", "1")


def run_here(monkeypatch, capsys, *words):
    """Run it in this process: (status, what it printed)."""
    monkeypatch.setattr(sys, "argv", ["packed_documents.py", *SMALL, *words])
    return packed_documents.main(), capsys.readouterr().out


def test_two_simulated_ranks_pass_and_plot_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "picture.png"
    done = run([sys.executable, str(EXAMPLE), *SMALL, "--ranks", "2", "--plot", str(plot)], 300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks (simulated in this process)" in done.stdout and "NaN on purpose" in done.stdout
    assert done.stdout.count("PASS") == 5  # out, dq, dk, dv, padding
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 20_000


def test_two_processes_print_one_report():
    done = run_ranks(2, EXAMPLE, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks (processes, backend" in done.stdout and done.stdout.count("PASS") == 5


@pytest.mark.parametrize(
    "options", ["--window 100 --seed 3", "--full --window 50 --sharding contiguous", "--full --sharding balanced"])
def test_every_mask_and_sharding_passes(monkeypatch, capsys, options):
    status, said = run_here(monkeypatch, capsys, "--ranks", "3", *options.split())
    assert status == 0 and said.count("PASS") == 5, said


@pytest.mark.parametrize("culprit", ["dq", "dv", "padding"])
def test_a_wrong_result_fails_and_is_named(monkeypatch, capsys, culprit):
    right = thdattn.CPAttention.backward

    def backward(*arguments):
        dq, dk, dv = right(*arguments)
        if culprit == "dq":
            dq = dq * 2
        elif culprit == "dv":
            dv[:] = float("nan")
        else:
            dk[:] = 1
        return dq, dk, dv

    monkeypatch.setattr(thdattn.CPAttention, "backward", backward)
    status, said = run_here(monkeypatch, capsys, "--ranks", "2")
    assert status == 1
    assert [line for line in said.splitlines() if line.split()[:1] == [culprit] and line.endswith("FAIL")], said
