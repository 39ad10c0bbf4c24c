"""The benchmark of training steps without a GPU, and the numbers of the README."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from launch import SOURCE

sys.path.append(str(SOURCE.parent / "benchmarks"))

import bench_bytelm
import data
from grid import Grid
from programs import validations
from sizes import SIZES, weight_shapes
from trainer import Trainer

import thdattn

ROW = {
    "gpu": "NVIDIA H100 80GB HBM3", "size": "1b", "weights": "1234567", "ranks": "2", "tokens": "65536",
    "accumulate": "2", "cuda_graph_impl": "none", "ms_per_step": "12.6", "tokens_per_s": "5201", "mfu": "0.4219",
    "attention_tflops": "301.4", "padding": "0.0123", "ms_p10": "11.4", "ms_p90": "1234.5", "steps": "30",
    "driver": "580", "kernel_sources": "abc", "example_sources": "def",
}  # fmt: skip


def test_table_worked_by_hand():
    first = ROW | {"ranks": "1", "mfu": ""}
    smaller = ROW | {"size": "small"}
    header, rule, *lines, _, sources = bench_bytelm.summary([ROW, first, smaller]).splitlines()
    assert header.count("|") == rule.count("|") == 13
    cells = "2 | 131,072 | none | 12.6 | 11.4 to 1,234 | 5,201 | 42 % | 0.50 | 301 | 1.2 % |"
    assert lines[2] == f"| H100 80GB HBM3 | 1b, 1,234,567 weights | {cells}"
    assert [line.split(" | ")[1].split(",")[0] for line in lines] == ["small", "1b", "1b"]
    assert " | 1 | 131,072 | none | 12.6 | 11.4 to 1,234 | 5,201 | - | - | 301" in lines[1]
    assert sources == "All: 30 steps, driver 580, sources abc, of the example def."


def test_rows_of_different_sources_are_told_apart():
    *_, older, _, newer = bench_bytelm.summary([ROW, ROW | {"ranks": "4", "kernel_sources": "fed"}]).splitlines()
    assert older.startswith("1b on 2 with 131,072: ") and "sources abc," in older
    assert newer.startswith("1b on 4 with 131,072: ") and "sources fed," in newer


def test_rows_with_graphs_stand_behind_those_without_and_have_no_time_of_the_attention():
    graphs = {"cuda_graph_impl": "full_iteration", "attention_tflops": "", "ms_per_step": "6.3"}
    *_, without, replayed, _, sources = bench_bytelm.summary([ROW | graphs, ROW]).splitlines()
    assert " | 131,072 | none | 12.6 | " in without
    assert " | 131,072 | full_iteration | 6.3 | " in replayed and " | 42 % | - | - | 1.2 % |" in replayed
    assert sources.startswith("All: 30 steps")


def test_groups_of_ranks_are_counted_and_stand_behind_all_ranks_together():
    grouped = ROW | {"ranks": "4", "cp": "2"}
    *_, together, apart, _, sources = bench_bytelm.summary([grouped, ROW | {"ranks": "4", "cp": ""}]).splitlines()
    assert " weights | 4 | 131,072 | none" in together
    assert " weights | 2 x 2 | 262,144 | none" in apart
    assert sources.startswith("All: 30 steps")


def test_methods_are_told_where_they_are_not_the_usual_one_and_its_rows_stay_what_they_are(tmp_path):
    usual = ROW | {"ranks": "4", "cp": "", "sharding": "dual_chunk"}  # as it was before there were others
    others = [
        usual | {"cp_comm_type": "", "sharding": "balanced"}, usual | {"cp_comm_type": "a2a", "sharding": "contiguous"},
        usual | {"cp_comm_type": "p2p"}, usual | {"cp_comm_type": "a2a+all_gather of 2", "cp": "2"},
    ]  # fmt: skip
    assert [bench_bytelm.gpus(row) for row in (ROW, usual, *others)] == [
        "2", "4", "4, balanced", "4, a2a", "4, p2p", "2 x 2, a2a+all_gather of 2"]
    file = tmp_path / "bytelm.csv"
    bench_bytelm.record.save(file, [usual], [name for name in bench_bytelm.KEY if name != "cp_comm_type"])
    bench_bytelm.record.save(file, others, bench_bytelm.KEY)
    assert len(bench_bytelm.record.load(file)) == 5
    bench_bytelm.record.save(file, [usual | {"cp_comm_type": "", "mfu": "0.6"}], bench_bytelm.KEY)
    rows = bench_bytelm.record.load(file)
    assert len(rows) == 5 and sum(row["mfu"] == "0.6" for row in rows) == 1


def test_the_method_of_a_row_names_the_neighbours_of_two_levels():
    def named(comm):
        one, two = Grid.of(comm), Grid.of(comm, inner=2)
        return [bench_bytelm.method_of(*pair) for pair in (("all_gather", one), ("a2a", one), ("a2a+p2p", two))]

    assert thdattn.comm.run_local(2, named) == [["", "a2a", "a2a+p2p of 2"]] * 2


def test_rows_from_before_there_were_groups_are_of_all_ranks_and_make_room_for_newer_ones(tmp_path):
    file = tmp_path / "bytelm.csv"
    older = ROW | {"sharding": "dual_chunk"}
    bench_bytelm.record.save(file, [older], [name for name in bench_bytelm.KEY if name not in ("cp", "cp_comm_type")])
    grouped = older | {"cp": "1", "cp_comm_type": "", "mfu": "0.5"}
    bench_bytelm.record.save(file, [grouped], bench_bytelm.KEY)
    assert len(bench_bytelm.record.load(file)) == 2
    bench_bytelm.record.save(file, [older | {"cp": "", "cp_comm_type": "", "mfu": "0.6"}], bench_bytelm.KEY)
    assert [row["mfu"] for row in bench_bytelm.record.load(file)] == ["0.5", "0.6"]


def test_a_gpu_is_idle_between_the_spans_of_its_work():
    assert bench_bytelm.gaps([(5, 6), (0, 2), (1, 3), (1, 2)]) == pytest.approx(2 / 6)
    assert bench_bytelm.gaps([(7, 9)]) == 0


def test_medians_of_measured_steps_are_those_of_their_marks():
    trainer = Trainer(Grid.of(thdattn.comm.init("single")), SIZES["tiny"], "reference", "dual_chunk", 0)
    packing = data.Packing.of(96, 1, "dual_chunk")
    batches = data.micro_batches(data.find_documents()[:20], packing, 0, data.Position(0, 0))
    results = [trainer.step([next(batches)], 1e-3) for _ in range(5)]
    row = bench_bytelm.measured(trainer, results, peak=1e9)
    steps = sorted(end - begin for begin, end in (result.span for result in results))
    assert float(row["ms_per_step"]) == pytest.approx(1e3 * steps[2], abs=0.006)
    assert float(row["padding"]) == pytest.approx(
        np.mean([result.batches[0].targets == data.NOT_COUNTED for result in results]), abs=1e-4)
    assert float(row["mfu"]) > 0
    assert float(row["last_loss"]) == pytest.approx(results[-1].numbers()[0], abs=1e-3)
    assert row["overflows"] == "0" and float(row["attention_tflops"]) >= 0
    without_peak = bench_bytelm.measured(trainer, [replace(x, attention_spans=[]) for x in results], peak=None)
    assert without_peak["mfu"] == without_peak["attention_tflops"] == ""


def test_example_hash_is_of_the_sources():
    assert len(bench_bytelm.example_hash()) == 16
    assert bench_bytelm.EXAMPLE.joinpath("train.py").exists()


def test_curves_of_the_readme_are_the_recorded_ones():
    page = " ".join((SOURCE.parent / "README.md").read_text().split())
    for name in ("bytelm_tiny", "bytelm_tiny_hybrid"):
        bits = validations(SOURCE.parent / "benchmarks" / "results" / f"{name}.jsonl")
        assert f"from {bits[0]:.2f} to {bits[-1]:.2f} bits per byte" in page
        assert name == "bytelm_tiny_hybrid" or f"validation {bits[-1]:.3f} bits per byte" in page


def test_sizes_of_the_readme_are_those_of_the_models():
    page = " ".join((SOURCE.parent / "README.md").read_text().split())
    shown = {"tiny": "0.4 million weights", "tiny-hybrid": "0.4 million", "small": "24 million", "base": "142 million",
             "1b": "a billion", "1b-hybrid": "a billion"}  # fmt: skip
    for name, config in SIZES.items():
        weights = sum(math.prod(shape) for shape in weight_shapes(config).values())
        millions = f"{weights / 1e6:.1f}" if weights < 1e7 else f"{weights / 1e6:.0f}"
        assert f"`{name}` ({shown[name]})" in page
        assert shown[name].startswith(millions) or (shown[name] == "a billion" and 0.95e9 < weights < 1.05e9)
