"""Benchmark of context parallelism without a GPU: packs, and comms by which two ranks play many."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import launch
import numpy as np
import pytest
import record
import tables
from cp_methods import BESIDE, EXCHANGE, METHODS
from rank_of import as_rank_of
from workloads import Case, cp_cases

import thdattn.engines.reference
from thdattn.comm import no_wait, run_local
from thdattn.comm.overlap.collectives import OverlappedCollectives


@pytest.fixture
def bench_cp():
    pytest.importorskip("cupy")
    return importlib.import_module("bench_cp")


# --- comms that stand in for others ------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "size"), [(1, 8), (3, 8), (2, 1), (2, 8)])
def test_other_than_two_ranks_with_peer_memory_cannot_play(ranks, size):
    def fn(real):
        with pytest.raises(ValueError, match=f"{ranks} real ranks without .* ranks of {size}, wanted 2 with it"):
            as_rank_of(real, size)

    run_local(ranks, fn)


# --- the program -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "--repeats: found 0, wanted >= 1"),
        (["--as-rank-of", "1"], "--as-rank-of is 1, wanted >= 2"),
        (["--as-rank-of", "8", "--peer"], "leave it or --as-rank-of out"),
        (["--as-rank-of", "8", "--exchange"], "leave it or --as-rank-of out"),
        (["--methods", "a2a", "--peer"], "compared with all_gather, which --methods lacks"),
        (["--head-groups", "2", "3"], "--head-groups has 3, wanted divisors of 8 and 16 kv heads"),
        (["--head-groups", "0"], "--head-groups has 0, wanted divisors of 8 and 16 kv heads"),
    ],
)
def test_wrong_arguments_are_named(bench_cp, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_cp.py", *arguments])
    with pytest.raises(SystemExit):
        bench_cp.parse_arguments()
    assert message in capsys.readouterr().err


def test_speeds_are_per_rank_and_host_times_have_none(bench_cp):
    case = cp_cases(4)["1x8192"]
    found = bench_cp.timed(case, 4, ("ours", "both", "called"), [2.0, 1.0, 4.0])
    pairs = 8_192 * 8_193 // 2  # 7 products of 2 operations per pair, head and channel
    assert float(found["tflops"]) == pytest.approx(pairs * 32 * 128 * 14 / 4 / 2e-3 / 1e12, abs=0.01)
    assert found["ms"] == "2.00000"
    for key in (("ours", "both", "host"), (EXCHANGE, "both", "called")):
        assert bench_cp.timed(case, 4, key, [2.0])["tflops"] == ""


def test_attention_is_computed_between_start_and_end_of_an_exchange():
    cp_ways, log = pytest.importorskip("cp_ways"), Mock()
    beside = cp_ways.Beside(log.alone, log.exchange)
    for call in (beside.forward, beside.backward):
        call()
    assert [name for name, *_ in log.mock_calls] == [
        "exchange.start_forward", "alone.forward", "exchange.start_forward()", "exchange.start_backward",
        "alone.backward"]


def sum_rows(comm, rows, grads, *_):
    """Sum zeros of all ranks for a comm on the host, which has no partial sums of kernels."""
    comm.sum_rows([np.zeros((comm.size * len(rows), *x.shape[1:]), np.float32) for x in grads], grads)
    return no_wait


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_measure_every_way(bench_cp, on_host, monkeypatch, size):
    import cp_ways

    gpu = Mock()
    gpu.cuda.runtime.memGetInfo.return_value = 3 << 30, 4 << 30
    for module in (bench_cp, cp_ways):
        monkeypatch.setattr(module, "cupy", gpu)
    monkeypatch.setattr(cp_ways, "cuda", thdattn.engines.reference)
    monkeypatch.setattr(OverlappedCollectives, "owner_partials", lambda *_: None)
    monkeypatch.setattr(OverlappedCollectives, "reduce_partials", sum_rows)
    monkeypatch.setattr(bench_cp.timing, "returned", lambda call, calls: [(call() and 0.5) or 0.5])
    monkeypatch.setattr(bench_cp, "cp_cases", lambda size: {"two": Case("two", (70, 37, 20), 8, 4, 16, 16)})
    monkeypatch.setattr(bench_cp, "ERROR_CASE", Case("small", (16,) * 4, 8, 4, 16, 16))
    args = Namespace(methods=METHODS.values(), head_groups=[2], peer=False, exchange=True, repeats=2, cases=["two"])

    def program(comm):
        work = bench_cp.work(cp_ways.Ranks.of(comm, comm.size), args)
        return [row for case, measure in work for row in record.rows_of(case.columns, measure(case))]

    times = record.Times(run_local(size, program)[0])
    methods = [method.way for method in METHODS.values() if size == 4 or not method.two_levels]
    ways = {way for way in ("ours", *times.peers) if times.text("memory_gib", "two", way, "both", "called")}
    assert ways == {*methods, "ours, 2 groups"}
    for way in methods:
        assert 0 < times.value("rms", "small", way, "dk", record.ERRORS) < 1e-2
        assert times.value("ms", "two", way, "both", "called") == 3e-3
        assert times.value("ms", "two", way, "both", "graph") == 1e-3
        assert times.value("received_bytes", "two", way, "both", "called") > 0
        assert times.value("ms", "two", way, "plan", "host") == times.value("ms", "two", way, "forward", "host") == 0.5
    speeds = [times.value("tflops", "two", way, "backward", "called") for way in ("ours", "alone", "one GPU")]
    assert size * speeds[0] == size * speeds[1] == pytest.approx(speeds[2], abs=0.02)
    assert times.text("head_groups", "two", "ours, 2 groups", "both", "called") == "2"
    groups = times.text("head_groups", "two", "ours", "both", "called")
    assert tables.overlaps(times) == [["two", number, *["0.00300"] * 3, *["1.00"] * 3] for number in (groups, "2")]
    assert not times.text("tflops", "two", EXCHANGE, "both", "called")


@pytest.mark.gpu
@pytest.mark.parametrize(("arguments", "transport"), [
    ([], "peer"), ([], "nccl"), (["--as-rank-of", "8"], "peer"),  # two ranks play eight by peer memory alone
])
def test_two_gpus_are_measured_with_every_way_and_errors_of_real_ranks(cupy, tmp_path, arguments, transport):
    launch.need_gpus(cupy, 2)
    path = tmp_path / "cp.csv"
    program = Path(tables.__file__).with_name("bench_cp.py")
    command = ["--cases", "8x1024", "--repeats", "1", "--out", str(path), "--transport", transport, *arguments]
    command += ["--head-groups", "1", "4", "--methods", "all", *["--exchange"] * (not arguments)]
    run = launch.run_ranks(2, program, *command, timeout=240)
    assert run.returncode == 0, run.stderr
    assert "Error" not in run.stderr
    ((ranks, times),) = tables.runs(record.load(path)).items()
    assert ranks == (8 if arguments else 2, 2, transport)
    for way in ("ours", "ours, 1 group", "ours, 4 groups"):
        for timing in ("called", "graph"):
            assert np.isfinite(times.value("tflops", "8x1024", way, "both", timing))
    assert times.text("head_groups", "8x1024", "ours, 4 groups", "both", "called") == "4"
    methods = [method.way for name, method in METHODS.items() if not method.two_levels]
    assert tables.methods(times) == methods
    for way in methods:
        assert np.isfinite(tables.speed(times, "8x1024", way))
        assert np.isfinite(times.value("received_bytes", "8x1024", way, "both", "called"))
        if not arguments:  # of bfloat16 results: half a unit of the last place, and what products add
            assert 0 < times.value("rms", "4x1024", way, "dk", record.ERRORS) < 1e-2
            assert np.isfinite(times.value("tflops", "8x1024", way, "both", "graph"))
    for way in () if arguments else (EXCHANGE, BESIDE):
        assert 0 < times.value("ms", "8x1024", way, "both", "called") < 100
