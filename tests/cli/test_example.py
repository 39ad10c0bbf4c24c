"""The tutorial as a newcomer starts it, and errors of the examples' command lines."""

from __future__ import annotations

import sys

import command_line
import packed_documents
import pytest
from launch import SOURCE, run, run_ranks

import thdattn

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


# --- errors ------------------------------------------------------------------------------------------------------

EXAMPLES = SOURCE.parent / "examples"


def outcomes(problems):
    """Return, by rank, how ranks with these problems end."""

    def program(comm):
        try:
            with command_line.together(comm):
                if problem := problems[comm.rank]:
                    raise problem
        except command_line.Failure as failure:
            return str(failure), failure.alone
        return None

    return thdattn.comm.run_local(len(problems), program, timeout=60)


SILENT = "", False
X = ValueError("x is 3")


@pytest.mark.parametrize(("problems", "ends"), [
    ([None, None], [None, None]), ([X, X], [("x is 3", False)] * 2), ([X, None], [("x is 3", True), SILENT]),
    ([None, OSError("disk\n is full"), None], [SILENT, ("rank 1: disk is full", True), SILENT]),
    ([None, MemoryError("cannot allocate 8 TB"), MemoryError()], [
        SILENT, ("rank 1: cannot allocate 8 TB", True),
        ("rank 2: MemoryError: options ask for more than this machine has; pass smaller ones", True)]),
], ids=["none", "all alike", "the first", "another", "memory"])
def test_all_ranks_fail_if_one_does_and_those_speak_whose_problem_is_their_own(problems, ends):
    assert outcomes(problems) == ends


@pytest.mark.parametrize("bug", [TypeError, IndexError])
def test_bugs_pass_as_they_are(bug):
    with pytest.raises(bug):
        outcomes([bug("a mistake of the program")] * 2)


def test_a_bug_of_one_rank_keeps_its_traceback_and_ends_all_ranks(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"""
import sys
sys.path.append({str(EXAMPLES)!r})
import command_line

def program(comm):
    with command_line.together(comm):
        if comm.rank == 1:
            [][0]
    comm.barrier()

sys.exit(command_line.run(program))
""")
    run = run_ranks(2, program, timeout=60)
    assert run.returncode != 0
    assert "Traceback" in run.stderr and "IndexError" in run.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokens 3", "--tokens is 3, wanted room for a document"),
        ("--ranks 0", "argument --ranks: 0 is no whole number of at least 1"),
    ],
)
def test_wrong_options_of_the_tutorial_are_one_line(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["packed_documents.py", *words.split()])
    assert packed_documents.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"packed_documents.py: error: {message}")


def test_wrong_options_of_the_tutorial_are_one_line_of_one_process(tmp_path):
    run = run_ranks(2, EXAMPLES / "packed_documents.py", "--plot", str(tmp_path / "picture.gif"))
    assert run.returncode == 2
    assert run.stderr.count("error: --plot is") == 1 and "Traceback" not in run.stderr
