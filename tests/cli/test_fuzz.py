"""python -m thdattn fuzz: right engines pass, planted defects are found and said as a line that repeats them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections import Counter
from itertools import islice

import ml_dtypes
import numpy as np
import pytest
from launch import mpiexec, need_gpus, run

from thdattn import fuzz
from thdattn.__main__ import main
from thdattn.engines import reference
from thdattn.fuzz import chaos
from thdattn.fuzz.cases import METHODS, SHARDINGS, FuzzCase
from thdattn.fuzz.chaos_ranks import Round
from thdattn.mamba import reference as mixers
from thdattn.plan import ranges

LINE = re.compile(r'^FAILED --case "([^"]*)": (.*)$', re.MULTILINE)
SUMMARY = re.compile(
    r"^fuzz: (\d+) packs in \d+ s, seed (\d+), engine reference, ranks (.*), largest error [\d.]+ of its "
    r"budget, (\d+) near(, more than chance explains)?, (\d+) failed$", re.MULTILINE)
LUCKY_BASELINES = {  # whose baselines err by less than those of packs like them
    "one large number of out": "flow=mixer ranks=4 sharding=contiguous lengths=1,8,4,1,6,3x0,4,9,7,3,6,8,6,8,6,3,6 "
        "padded=1,8,4,1,6,3x0,4,9,7,3,6,8,6,8,6,3,6 dtype=float16 mixer=4,1,5,2,4 seed=805470319",
    "float32 sums that cancel": "flow=mixer ranks=2 sharding=contiguous lengths=9,10,47,1 padded=9,10,47,1 "
        "dtype=float32 mixer=2,8,4,1,2 seed=54386245",
    "delta of one row": "flow=ahead ranks=4 lengths=2 padded=8 heads=2,2 window=31,0 head_groups=1 again=yes "
        "seed=675150710",
    "delta of one float16 row": "ranks=3 sharding=contiguous lengths=2,1 padded=2,1 heads=2,2 dtype=float16 scale=1.25 "
        "deterministic=yes max_logit=yes seed=506682363",
}
SEVERAL_KEYS = "lengths=70,33 padded=72,36 heads=4,2 dims=16,16 seed=5"


def cases(seed, count, engine="reference", ranks=None):
    rounds = islice(fuzz.rounds(seed, engine, ranks), -(-count // fuzz.PACKS_OF_A_ROUND))
    return [case for each in rounds for case in each]


def run_fuzz(capsys, *words):
    """(exit status, what it printed)."""
    status = main(["fuzz", "--engine", "reference", *words])
    return status, capsys.readouterr().out


# --- what is drawn -----------------------------------------------------------------------------------------------


def test_a_few_hundred_cases_cover_every_kind():
    drawn = cases(0, 320)
    seen = {name: Counter(getattr(case, name) for case in drawn)
            for name in ("flow", "ranks", "method", "dtype", "causal", "sinks", "deterministic", "keep_keys", "finite",
                         "max_logit", "again", "scale")}
    assert set(seen["flow"]) == {*fuzz.runs.FLOWS} and set(seen["ranks"]) == {1, 2, 3, 4}
    assert set(seen["method"]) == {*METHODS} and len(seen["dtype"]) == 4
    assert set(seen["keep_keys"]) == {"auto", "yes", "no"}
    assert all(len(seen[name]) == 2 for name in ("causal", "sinks", "deterministic", "finite", "max_logit", "again"))
    ways = {(case.method, case.sharding) for case in drawn if case.ranks > 1}
    assert ways == {(method, sharding) for method, each in SHARDINGS.items() for sharding in each}
    masks = {(case.causal, case.window[0] >= 0, case.window[1] > 0) for case in drawn}
    assert masks == {(True, False, False), (False, False, False), (True, True, False), (False, True, False),
                     (False, False, True), (False, True, True)}
    assert {"mha", "gqa", "mqa"} == {
        "mha" if case.heads[0] == case.heads[1] else "mqa" if case.heads[1] == 1 else "gqa" for case in drawn}
    attention = [case for case in drawn if not case.mixer]
    assert any(case.dims[0] != case.dims[1] for case in attention) and any(case.head_groups > 1 for case in drawn)
    assert any(case.softcap for case in drawn) and any(0 < case.inner < case.ranks for case in drawn)
    assert any(0 in case.lengths and any(case.lengths) for case in drawn), "empty documents"
    assert any(not any(case.lengths) for case in drawn), "packs of nothing"
    assert any(case.slack for case in drawn) and any(case.padded > case.lengths for case in drawn)
    trees = [case for case in drawn if case.parents]
    assert {way for way in ways if way[0] == "all_gather"} <= {(case.method, case.sharding) for case in trees}
    assert any(max(case.parents) > 1 and case.parents.count(-1) > 1 for case in trees), "forests with depth"
    rows = sorted(sum(case.padded) + case.slack for case in drawn)
    assert rows[len(rows) // 2] <= 300 < rows[-1]


def test_lines_are_read_as_they_were_written():
    for case in cases(1, 160):
        assert FuzzCase.from_words(case.words()) == case
        assert "\n" not in case.words()


@pytest.mark.parametrize(("line", "message"), [
    ("lenghts=3", "the word 'lenghts=3', wanted name=value"), ("lengths=3,x", "lengths=3,x, wanted whole numbers"),
    ("causal=1", "causal=1, wanted yes or no"), ("ranks=two", "ranks=two, wanted a whole number"),
])
def test_lines_that_are_no_case_are_refused(line, message, capsys):
    assert main(["fuzz", "--engine", "reference", "--case", line]) == 2
    assert message in capsys.readouterr().err


def test_a_gpu_compiles_for_few_configurations_and_sees_many_masks():
    drawn = cases(0, 128, "cuda", 2)
    trees = [case for case in cases(0, 320, "cuda") if case.parents]
    assert len({case.sharding for case in trees}) == 3
    assert not any(case.mixer for case in trees), "mixers have no trees on GPUs"
    assert len({(case.dims, case.dtype, case.softcap > 0, case.sinks, case.mixer) for case in drawn}) == 1
    assert len({(case.causal, case.window) for case in drawn}) > 40
    assert {case.ranks for case in drawn} == {2}


# --- what is found -----------------------------------------------------------------------------------------------


def test_some_dozen_packs_pass_on_simulated_ranks(capsys, tmp_path):
    record = tmp_path / "fuzz.json"
    for seed in (11, 12):
        words = "--packs", "40", "--seed", str(seed), "--seconds", "600", "--record", str(record)
        status, said = run_fuzz(capsys, *words)
        summary = SUMMARY.search(said)
        assert status == 0 and summary and summary[1] == "40" and summary[6] == "0", said
    ((key, entry),) = json.loads(record.read_text()).items()
    assert key.startswith("packs, reference on ") and "1 to 4 simulated" in key
    assert entry["packs"] == 80 and entry["seeds"] == [11, 12] and entry["failures"] == [] and entry["processes"] == 2
    assert set(entry["sources"]) == {"commit", "kernel_sources"}


def one_key_too_many(right):
    return lambda rows, window: right(rows, (window[0], window[1] + (window[1] > 0)))


def rows_change_places(right):
    def wrong(*arguments, **named):
        out, *others = right(*arguments, **named)
        if len(out) > 40:
            out[[7, 8]] = out[[8, 7]]
        return out, *others

    return wrong


def bits_change(right):
    calls = []

    def wrong(*arguments, **named):
        out, lse, max_logit = right(*arguments, **named)
        calls.append(out)
        lse[lse == lse.max(initial=-np.inf)] += np.float32(1e-6) * len(calls)
        return out, lse, max_logit

    return wrong


def padding_is_1(right):
    def wrong(*arguments, **named):
        dq, *others = right(*arguments, **named)
        dq[-1] += 1
        return dq, *others

    return wrong


def raises(right):
    def wrong(*arguments, **named):
        raise ValueError("a mistake")

    return wrong


@pytest.mark.parametrize(("place", "name", "defect", "line", "why"), [
    (ranges, "_rows_in_sight", one_key_too_many, None, "errs by"),
    (reference, "attn_fwd", rows_change_places, None, "out"),
    (reference, "attn_fwd", bits_change, f"{SEVERAL_KEYS} again=yes dtype=float32", "arrays differ in bits"),
    (reference, "attn_bwd", padding_is_1, f"{SEVERAL_KEYS} slack=3", "dq is not 0 on padding"),
    (reference, "attn_fwd", raises, SEVERAL_KEYS, "ValueError: a mistake"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_defect_is_found_and_its_line_repeats_it(capsys, monkeypatch, place, name, defect, line, why):
    """A soak finds those that have no line."""
    monkeypatch.setattr(place, name, defect(getattr(place, name)))
    words = ("--case", line) if line else ("--packs", "16", "--seconds", "600")
    status, said = run_fuzz(capsys, *words)
    failed = LINE.search(said)
    assert status == 1 and failed and why in failed[2], said
    again, what = run_fuzz(capsys, "--case", failed[1])
    assert again == 1 and LINE.search(what)[2] == failed[2]
    monkeypatch.undo()
    assert run_fuzz(capsys, "--case", failed[1])[0] == 0


def test_a_second_rounding_is_more_than_luck(capsys, monkeypatch):
    """It hides in the largest error of one pack, and in the RMS error of a small one, not in those of many."""
    right = reference.attn_bwd

    def wrong(dout, *arguments, **named):
        dq, *others = right(dout, *arguments, **named)
        if dq.dtype.itemsize == 2:
            error = 0.55 * np.random.default_rng(0).standard_normal(dq.shape) * float(ml_dtypes.finfo(dq.dtype).eps) / 2
            dq[...] = (dq.astype(np.float32) * (1 + error)).astype(dq.dtype)
        return dq, *others

    words = "--packs", "32", "--seconds", "600", "--seed", "3"
    assert run_fuzz(capsys, *words)[0] == 0
    monkeypatch.setattr(reference, "attn_bwd", wrong)
    status, said = run_fuzz(capsys, *words)
    summary = SUMMARY.search(said)
    assert status == 1 and summary and summary[5], said


@pytest.mark.parametrize("kind", LUCKY_BASELINES)
def test_a_baseline_that_is_right_by_luck_does_not_fail_a_pack(capsys, monkeypatch, kind):
    """The same packs fail without delta, or without the gradients of states that other ranks pass on."""
    line, right, right_start = LUCKY_BASELINES[kind], reference.attn_bwd, mixers.mixer_start
    assert run_fuzz(capsys, "--case", line)[0] == 0

    def without_delta(inputs, *arguments, **named):
        return right(inputs._replace(out=np.zeros_like(inputs.out)), *arguments, **named)

    def without_states(summaries, plan, shape, reverse=False):
        return right_start(summaries, plan, shape, reverse) * (not reverse)

    monkeypatch.setattr(reference, "attn_bwd", without_delta)
    monkeypatch.setattr(mixers, "mixer_start", without_states)
    status, said = run_fuzz(capsys, "--case", line)
    assert status == 1 and "errs by" in said


# --- real ranks --------------------------------------------------------------------------------------------------


def test_real_ranks_draw_the_same_cases_and_pass():
    command = [*mpiexec(2), sys.executable, "-m", "mpi4py", "-m", "thdattn", "fuzz", "--packs", "32", "--seed", "4"]
    finished = run(command, 120)
    summary = SUMMARY.search(finished.stdout)
    assert finished.returncode == 0 and summary, finished.stdout + finished.stderr
    assert summary[1] == "32" and summary[3] == "2 of mpi", "a rank that drew others would hang, or fail"


# --- chaos -------------------------------------------------------------------------------------------------------


def run_chaos(capsys, *words):
    """(exit status, the lines that it printed)."""
    status, said = run_fuzz(capsys, "--chaos", "--timeout", "5", *words)
    return status, said.splitlines()


def test_chaos_of_every_kind_ends_in_time(capsys, tmp_path):
    mpiexec(2)
    record = tmp_path / "fuzz.json"
    status, (*lines, summary) = run_chaos(capsys, "--rounds", "6", "--jobs", "2", "--record", str(record))
    assert status == 0, lines
    assert {line.split()[0] for line in lines} == {f"kind={kind}" for kind in chaos.KINDS["reference"]}
    assert summary.startswith("chaos: 6 rounds in ") and ", 0 failed;" in summary
    ((key, entry),) = json.loads(record.read_text()).items()
    assert key.startswith("chaos rounds, reference on ") and entry["rounds"] == 6 and entry["failures"] == []


def test_sigterm_ends_rounds_and_those_before_it_are_recorded(capsys, monkeypatch, tmp_path):
    played, record, before = [], tmp_path / "fuzz.json", signal.getsignal(signal.SIGTERM)

    def play(each, *_):
        played.append(each)
        if len(played) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not chaos._wait(lambda: False, 60.0)
        return chaos.Outcome(each, 1, 0.0, 0, [])

    monkeypatch.setattr(chaos, "play", play)
    status, (*lines, summary) = run_chaos(capsys, "--seconds", "60", "--record", str(record))
    assert status == 0 and len(played) == 4 and len(lines) == 3 and summary.startswith("chaos: 3 rounds in ")
    ((_, entry),) = json.loads(record.read_text()).items()
    assert entry["rounds"] == 3 and signal.getsignal(signal.SIGTERM) == before


def test_a_line_of_chaos_repeats_its_round(capsys):
    mpiexec(2)
    line = "kind=raise ranks=2 rank=0 at=30 seed=9"
    first, second = (run_chaos(capsys, "--case", line) for _ in range(2))
    assert first[0] == second[0] == 0
    assert first[1][0].startswith(f"{line}: status ")
    results = [re.search(r"(\d+) results right", lines[0])[1] for _, lines in (first, second)]
    assert results[0] == results[1]


def test_a_job_that_does_not_end_in_time_is_found_told_and_ended(capsys, monkeypatch):
    mpiexec(2)
    monkeypatch.setattr(chaos, "SECONDS_TO_END", -18.0)
    monkeypatch.setattr(chaos, "SECONDS_TO_VANISH", 0.5)
    started = []
    start = chaos.Job.start
    monkeypatch.setattr(chaos.Job, "start", lambda *words: started.append(start(*words)) or started[0])
    outcome = chaos.play(Round("absent", 2, 1, 5, 0), "reference", 20.0)
    assert outcome.wrong[0] == "it still runs 2 s after the fault"
    assert outcome.wrong[1].startswith("processes [") and not started[0].running()
    stacks = capsys.readouterr().out.split("\nprocess ")[1:]
    assert len(stacks) == 2 and sum("chaos_ranks.py\", line" in text and " in _fail" in text for text in stacks) == 1
    assert str(outcome).startswith('FAILED --chaos --case "kind=absent ranks=2 rank=1 at=5 seed=0": it still runs')


@pytest.mark.parametrize(("kind", "status", "said", "wrong"), [
    ("stop", 0, "fails; ends well; ends well", "it ends well after stop"),
    ("late", 1, "fails", "it ends with status 1: "),
    ("raise", 0, "fails; ends well", "1 of 2 ranks end well and the status is 0"),
    ("window", 0, "fails; caught x; ends well; ends well", "1 of 2 ranks caught the error and it ends well"),
    ("kill", 9, "FAILED --case 'ranks=2': out errs", "FAILED --case 'ranks=2': out errs"),
    ("window", 0, "fails; caught x; caught x; ends well; ends well", None), ("window", 1, "fails; caught x", None),
    ("kill", 9, "fails", None), ("late", 0, "fails; ends well; ends well", None),
    ("stop", 0, "ends well; ends well", None),
])
def test_what_a_round_may_not_do(kind, status, said, wrong):
    job = chaos.Job(None, "", [f"process 5 {words}\n" for words in said.split("; ")])
    found = chaos._mistakes(Round(kind), job, status)
    assert any(wrong in text for text in found) if wrong else found == []


@pytest.mark.parametrize("line", ["kind=stop at=x", "knid=stop"])
def test_lines_that_are_no_round_are_refused(line, capsys):
    mpiexec(2)
    assert main(["fuzz", "--chaos", "--engine", "reference", "--case", line]) == 2
    assert "pass a line that fuzz printed" in capsys.readouterr().err


# --- on GPUs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(cupy):
    """Skips the test where there are fewer."""
    need_gpus(cupy, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [2, 7, 13])  # deterministic attention with replays, softcap and sinks, the mixer
def test_random_packs_pass_on_one_gpu(cupy, capsys, seed):
    status = main(["fuzz", "--engine", "cuda", "--packs", "64", "--seconds", "600", "--seed", str(seed)])
    said = capsys.readouterr().out
    assert status == 0 and "64 packs" in said and " 0 failed" in said, said


@pytest.mark.gpu
def test_random_packs_pass_on_two_gpus(two_gpus):
    words = "-m", "mpi4py", "-m", "thdattn", "fuzz", "--engine", "cuda", "--packs", "64", "--seed", "2"
    finished = run([*mpiexec(2), sys.executable, *words, "--seconds", "600"], 280)
    assert finished.returncode == 0 and "ranks 2 of nccl" in finished.stdout, finished.stdout + finished.stderr


@pytest.mark.gpu
def test_chaos_of_every_kind_ends_in_time_on_two_gpus(two_gpus, capsys):
    mpiexec(2)
    kinds = chaos.KINDS["cuda"]
    words = "--engine", "cuda", "--rounds", str(len(kinds)), "--jobs", "4", "--timeout", "20"
    status = main(["fuzz", "--chaos", *words])
    *lines, summary = capsys.readouterr().out.splitlines()
    assert status == 0 and ", 0 failed;" in summary, "\n".join([line for line in lines if "FAILED" in line])
    assert {line.split()[0] for line in lines} == {"kind=nothing", *(f"kind={kind}" for kind in kinds)}
