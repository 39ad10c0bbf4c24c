"""tools/sanitize.py: it counts the tools' reports, and its cases run and are right."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("cupy")


import sanitize

import thdattn
from thdattn.fuzz.cases import FuzzCase
from thdattn.fuzz.judge import judge
from thdattn.fuzz.runs import Ranks, run
from thdattn.jit import compiler
from thdattn.kernels.configs import TILES

RACES = """
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at thd_attn_bwd_sm90<bf16>(int)+0x3210 in kernel.cu:5
=========     and Read access at thd_attn_bwd_sm90<bf16>(int)+0x4560 [128 hazards]
=========     and Read access at thd_attn_bwd_sm90<bf16>(int)+0x4570 [64 hazards]
=========
========= Warning: Race reported between Read access at void thd_reorder<true>(int)+0x10
=========     and Write access at void thd_reorder<true>(int)+0x20 [2 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
READS = """
flow=plain
========= Invalid __global__ read of size 16 bytes
=========     at thd_attn_fwd<f16>(int)+0x1230
=========     by thread (3,0,0) in block (0,0,0)
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: thd_of_the_host [0x1]
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at cupy_add+0x40
=========     by thread (0,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""


def test_reports_count_once_by_kernel_and_kind():
    assert sanitize.found_in(RACES, "racecheck") == Counter({
        ("racecheck", "thd_attn_bwd_sm90", "Race reported between Write access"): 1,
        ("racecheck", "thd_reorder", "Race reported between Read access"): 1})
    assert sanitize.found_in(READS, "memcheck") == Counter({
        ("memcheck", "thd_attn_fwd", "Invalid __global__ read"): 1,
        ("memcheck", "?", "Uninitialized __global__ memory read"): 1})
    assert not sanitize.found_in("========= ERROR SUMMARY: 0 errors\n", "memcheck")


def test_only_unexplained_reports_and_programs_that_did_not_end_fail(capsys):
    program, known = sanitize.Program("any", ()), next(iter(sanitize.EXPLAINED))
    other = ("memcheck", "thd_attn_fwd", "Invalid __global__ read")

    def status(*outcomes):
        return sanitize._print_table([(program, "memcheck")] * len(outcomes), list(outcomes))

    ended = sanitize.Outcome(Counter({known: 3}), 0, 1.0)
    assert status(ended) == 0
    assert sanitize.EXPLAINED[known] in capsys.readouterr().out
    assert status(ended, sanitize.Outcome(Counter({other: 1}), 0, 1.0)) == 1
    assert "unexplained: 1 reports" in capsys.readouterr().out
    assert status(sanitize.Outcome(Counter({known: 1}), sanitize.NOT_ENDED, 1.0)) == 1


def test_explained_reports_are_of_kernels_that_exist():
    for tool, kernel, kind in sanitize.EXPLAINED:
        assert tool in sanitize.TOOLS
        assert compiler._file_of(kernel)
        assert sanitize.REPORT.match(f"========= Error: {kind} at {kernel}")[1] == kind


def test_racecheck_takes_fewer_cases():
    for group in ("hopper 64 64", "portable trees", "portable mixer"):
        assert 0 < len(list(sanitize.cases_of(group, few=True))) < len(list(sanitize.cases_of(group)))


def test_every_head_dim_and_family_has_a_program():
    names = {program.name for program in sanitize.programs()}
    assert names >= {f"{family} {head} {v_head}" for family in sanitize.FAMILIES for head, v_head in TILES}
    assert names >= {"hopper trees", "portable trees", "hopper mixer", "portable mixer", *sanitize.TESTS}


@pytest.mark.parametrize("group", ["hopper 64 64", "portable trees", "portable mixer"])
def test_cases_run_and_are_right(group):
    for case in sanitize.cases_of(group):
        slim = replace(case, dims=(8, 8)) if not case.mixer else replace(case, mixer=(2, 8, 4, 1, case.mixer[4]))
        assert FuzzCase.from_words(slim.words()) == slim
        ranks = thdattn.comm.run_local(slim.ranks, lambda comm, slim=slim: run(slim, Ranks(comm, "reference")))
        assert judge(slim, ranks).wrong == []


def test_kernels_that_no_program_loaded_are_listed(tmp_path):
    program = sanitize.Program("two words", ())
    (tmp_path / "compile_two_words.log").write_text(f"thd_attn_delta\n{sanitize.LOADED} thd_reorder thd_attn_fwd\n")
    never = sanitize.never_loaded(tmp_path, [program])
    assert "thd_attn_delta" in never and "thd_peer_exchange" in never and not {"thd_reorder", "thd_attn_fwd"} & {*never}


def test_programs_out_of_time_are_ended_or_not_begun(tmp_path):
    program = sanitize.Program("sleeps", ("sleep", "100"))
    begin = time.monotonic()
    assert sanitize.play(program, "compile", tmp_path, begin + 0.5).status == sanitize.NOT_ENDED
    assert sanitize.play(program, "compile", tmp_path, begin).status == sanitize.NOT_BEGUN
    assert time.monotonic() - begin < 20
