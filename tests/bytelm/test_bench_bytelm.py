"""The benchmark of training steps without a GPU, and the numbers of its page."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import bench_bytelm
import data
import numpy as np
import pytest
import record
from grid import Grid
from launch import SOURCE
from sizes import SIZES
from trainer import Trainer

import thdattn


def test_every_maximum_of_every_graph_is_run(monkeypatch):
    options = ["--size", "tiny", "tiny-hybrid", "--every-graph", "--maxima", "P90", "16"]
    monkeypatch.setattr(sys, "argv", ["bench_bytelm.py", *options])
    runs = [*bench_bytelm.configurations(bench_bytelm.parse_arguments())]
    graphs = [(impl, maximum) for impl in ("local", "full_iteration") for maximum in ("P90", "16")]
    assert [(one.size, one.graphs.impl, one.maximum) for one in runs] == [
        (size, *way) for size in ("tiny", "tiny-hybrid") for way in [("none", ""), *graphs]]
    assert {one.sharding for one in runs if one.size == "tiny-hybrid"} == {"contiguous"}


@pytest.mark.parametrize("options", [["--maxima", "16"], ["--maxima", "P0", "--every-graph"],
                                     ["--maxima", "0", "--every-graph"], ["--maxima", "many", "--every-graph"]])
def test_maxima_that_mean_nothing_are_refused(options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_bytelm.py", *options])
    with pytest.raises(SystemExit):
        bench_bytelm.parse_arguments()
    assert "--maxima" in capsys.readouterr().err


def test_a_percentile_is_as_many_slots_as_so_many_packs_need(monkeypatch):
    monkeypatch.setattr(bench_bytelm, "PACKS", 20)
    documents, packing = data.find_documents()[:40], data.Packing.of(16_384, 1, "dual_chunk")
    graphs = bench_bytelm.CudaGraphConfig(impl="local", max_packed_seqs=7)
    batches = data.micro_batches(documents, packing, 0, data.Position(0, 0))
    counts = [next(batches).batch.num_seqs for _ in range(bench_bytelm.PACKS)]
    slots = {name: bench_bytelm.with_maximum(graphs, name, documents, packing).max_packed_seqs
             for name in ("", "3", "P50", "P100")}
    assert (slots[""], slots["3"], slots["P100"]) == (7, 3, max(counts))
    assert sum(n > slots["P50"] for n in counts) <= 10 < sum(n >= slots["P50"] for n in counts) + 1


@pytest.mark.parametrize("size", ["tiny", "tiny-hybrid"])
def test_medians_of_measured_steps_are_those_of_their_marks(size):
    trainer = Trainer(Grid.of(thdattn.comm.init("single")), SIZES[size], "reference", "dual_chunk", 0)
    packing = data.Packing.of(96, 1, "dual_chunk")
    batches = data.micro_batches(data.find_documents()[:20], packing, 0, data.Position(0, 0))
    results = [trainer.step([next(batches)], 1e-3) for _ in range(5)]
    row = bench_bytelm.measured(trainer, results, peak=1e9)
    steps = sorted(end - begin for begin, end in (result.span for result in results))
    assert float(row["ms_per_step"]) == pytest.approx(1e3 * steps[2], abs=0.006)
    assert float(row["ms_mean"]) == pytest.approx(200 * sum(steps), abs=0.006)
    assert float(row["padding"]) == pytest.approx(
        np.mean([result.batches[0].targets == data.NOT_COUNTED for result in results]), abs=1e-4)
    assert float(row["mfu"]) > 0
    assert float(row["last_loss"]) == pytest.approx(results[-1].numbers()[0], abs=1e-3)
    assert row["overflows"] == "0" and float(row["attention_tflops"]) >= 0
    without_peak = bench_bytelm.measured(trainer, [replace(x, attention_spans=[]) for x in results], peak=None)
    assert without_peak["mfu"] == without_peak["attention_tflops"] == ""


@pytest.mark.parametrize("options", [
    ["--size", "tiny-hybrid", "--every-graph"],
    ["--size", "tiny", "--cuda-graph-impl", "local", "--accumulate", "2", "--maxima", "1", "P100"],
])
def test_every_configuration_has_a_row_with_its_columns(options, monkeypatch):
    """On the host, where nothing is captured."""
    program = ["bench_bytelm.py", *options, "--tokens", "64", "--warm-up", "1", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", program)
    monkeypatch.setattr(bench_bytelm, "Trainer", lambda *args, **options: Trainer(args[0], args[1], "reference",
                                                                                 *args[3:], **options))
    pool, documents = SimpleNamespace(total_bytes=lambda: 2**30), data.find_documents()[:40]
    monkeypatch.setattr(np, "get_default_memory_pool", lambda: pool, raising=False)
    monkeypatch.setattr(bench_bytelm.data, "find_documents", lambda: documents)
    monkeypatch.setattr(bench_bytelm, "PACKS", 50)
    runs = [*bench_bytelm.configurations(bench_bytelm.parse_arguments())]
    rows = [bench_bytelm.bench(thdattn.comm.init("single"), one) for one in runs]
    assert len({tuple(row) for row in rows}) == 1 and {row["memory_gib"] for row in rows} == {"1.0"}
    assert len({tuple(row.get(name) for name in bench_bytelm.KEY) for row in rows}) == len(rows)
    if "--maxima" in options:
        assert [row["maximum"] for row in rows] == ["1", "P100"] and rows[0]["slots"] == "1"
        assert [row["eager_packs"] for row in rows][1] == "0.0000"
    else:
        assert [row["cuda_graph_impl"] for row in rows] == ["none", "local", "full_iteration"]
        assert {row["last_loss"] for row in rows} == {rows[0]["last_loss"]}


def test_curves_of_the_page_are_the_recorded_ones():
    page = " ".join((SOURCE.parent / "docs" / "bytelm.md").read_text().split())
    rows = record.load(record.RESULTS / "curves.csv")
    for size in ("tiny", "tiny-hybrid"):
        bits = [float(row["validation_bits_per_byte"]) for row in rows if row["size"] == size]
        assert f"from {bits[0]:.2f} to {bits[-1]:.2f} bits per byte" in page
