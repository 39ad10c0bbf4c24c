"""Benchmark of prefix trees without a GPU: packs, float64 results, FlexAttention's mask, and a run on the host."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import accuracy
import launch
import numpy as np
import pytest
import record
import tables
from tree_cases import MIXED, TREES, random_case, sees
from workloads import TREES as DRAWN
from workloads import TreeCase

import thdattn
from thdattn.comm import run_local

TINY = TreeCase("tiny", (70, 30, 50, 20, 64, 150), 4, 2, 32, 32, parents=(-1, 0, 1, 1, 0, -1))
PACKS = [MIXED, *TREES, *map(random_case, range(4))]


# --- packs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_trees_fill_tiles_and_are_beside_a_pack_of_as_many(name):
    case = DRAWN[name]
    batch = case.batch()
    assert batch.total_rows == case.total_tokens >= 40_000 and case.total_tokens % 128 == 0 < min(case.lengths)
    assert case.columns["num_seqs"] == str(batch.num_seqs) == str(case.parents.count(-1))
    assert case.unrolled.lengths == tuple(map(len, batch.paths()))
    assert sum(case.alike.lengths) == case.total_tokens and len(set(case.alike.lengths[:-1])) == 1
    assert case.alike.tiles == pytest.approx(case.tiles, rel=0.01)
    assert (case.unrolled.heads, case.alike.head_dim) == (16, 128)


@pytest.mark.parametrize("case", [case for case in PACKS if sum(case.lengths)], ids=str)
def test_tiles_are_those_with_a_visible_pair(case, monkeypatch):
    monkeypatch.setattr("workloads.TILE", 16)
    seen = sees(case.lengths, case.parents)
    seen = np.pad(seen, (0, -len(seen) % 16)).reshape(-(-len(seen) // 16), 16, -1, 16)
    assert TreeCase("x", case.lengths, parents=case.parents).tiles == seen.any((1, 3)).sum()


# --- a run -------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(on_host):
    return importlib.import_module("bench_trees")


@pytest.fixture
def torch_on_host(monkeypatch):
    """PyTorch without a GPU, which does not compile FlexAttention, and gives its plain form a backward."""
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(torch.cuda, "ExternalStream", Mock())
    monkeypatch.setattr(torch.cuda, "set_stream", Mock())
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, dynamic=None, **options:
                        compiled(function, **options) if options else function)  # the plain form has options
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_trees_are_beside_other_packs_and_flexattention_on_one_rank(bench, torch_on_host):
    comm = thdattn.comm.init("single")
    rows = [*bench.errors(comm, TINY), *bench.speeds(comm, TINY, bench.PEERS, 2)]
    times = record.Times(rows)
    assert times.cases == ["tiny"] and set(times.peers) == {"causal", "unrolled", "flex"}
    for result in accuracy.RESULTS:
        assert 0 < times.value("rms", "tiny", "ours", result, record.ERRORS) < 5e-3
    for peer, pack in (("ours", TINY), ("causal", TINY.alike), ("unrolled", TINY.unrolled), ("flex", TINY)):
        key = "tiny", peer, "both", "called"
        assert times.value("tflops", *key) == pytest.approx(sum(pack.flops) / 3e6, abs=0.01), peer
        assert times.text("pairs", *key) == str(pack.plan.visible_pairs)
        assert times.text("total_tokens", *key) == str(pack.total_tokens)
    assert times.text("work", "tiny", "ours", "both", "called") == "1.000"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flexattention_with_another_mask_is_named_and_blank(bench, torch_on_host, monkeypatch, capsys):
    chain = TreeCase("tiny", TINY.lengths, 4, 2, 32, 32, parents=(-1, 0, 1, 2, 3, -1))
    started = bench.started
    monkeypatch.setattr(bench, "started", lambda name, pack, ours: started(name, chain, ours))
    rows = [*bench.speeds(thdattn.comm.init("single"), TINY, ["flex"], 1)]
    assert [row.get("ms") for row in rows if row["peer"] == "flex"] == [None] * 3
    assert "tiny flex, rank 0: ValueError: out differs from ours" in capsys.readouterr().err


def test_two_ranks_share_the_trees_and_are_beside_one(bench):
    def fn(comm):
        rows = [*bench.errors(comm, TINY), *bench.speeds(comm, TINY, [bench.ONE], 1)]
        times = record.Times(rows)
        for result in accuracy.RESULTS:
            assert 0 < times.value("rms", "tiny", "ours", result, record.ERRORS) < 5e-3
        ours, one = (times.value("tflops", "tiny", peer, "backward", "called") for peer in ("ours", "one GPU"))
        assert 2 * ours == pytest.approx(one, abs=0.02)
        return times.value("work", "tiny", "ours", "both", "called")

    first, second = run_local(2, fn)
    assert 1 <= first == second < 1.1


# --- on GPUs -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_gpus_measure_trees_beside_all_others(cupy, tmp_path, ranks):
    path, case = tmp_path / "trees.csv", "prompt1k-1x1k"
    program = Path(tables.__file__).with_name("bench_trees.py")
    command = "--cases", case, "--repeats", "1", "--out", str(path)
    run = launch.run_gpu_ranks(cupy, ranks, program, *command)
    assert run.returncode == 0, run.stderr
    rows = record.load(path)
    times = record.Times(rows)
    others = ["one GPU"] if ranks > 1 else ["causal", "unrolled", *["flex"] * (find_spec("torch") is not None)]
    assert set(times.peers) == set(others)
    for peer in ("ours", *others):
        for way in record.PASSES:
            assert times.value("tflops", case, peer, way, "called") > 0, run.stderr
    for result in accuracy.RESULTS:  # half a unit of the last place of bfloat16, and what products add
        assert 0 < times.value("rms", case, "ours", result, record.ERRORS) < 1e-2
    assert 1 <= times.value("work", case, "ours", "both", "called") <= 1.1
    assert rows[0]["driver"] and rows[0]["kernel_sources"] and rows[0]["command"].endswith("--repeats 1")
    assert tables.trees(rows)[1] in run.stdout
