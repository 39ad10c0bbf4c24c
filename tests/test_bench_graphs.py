"""The benchmark of CUDA graphs without a GPU: what it prints and keeps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import bench_graphs
import record


def rows():
    times = {"64x128": {"eager": 0.4, "local": 0.1, "full_iteration": 0.08},
             "1x16384": {"eager": 2.0, "eager_static": 2.1, "local": 2.5, "local_copied": 2.6}}
    made = [bench_graphs.row_of(case, way, [ms] * 3, 1e9) for case in bench_graphs.cases(times)
            for way, ms in times[case.name].items()]  # fmt: skip
    slots = bench_graphs.Case("16x1024", (1_024,) * 16, 8, 8)
    made += [bench_graphs.row_of(slots, way, [ms], 1e9)
             for way, ms in (("16_slots", 1.0), ("512_slots", 1.02), ("exact", 0.9))]  # fmt: skip
    return [*made, bench_graphs.row_of(slots, "plans", [0.03])]


def test_the_table_sets_speeds_over_eager_beside_what_is_wanted():
    header, *lines = (line.split() for line in bench_graphs.table(rows()).splitlines())
    assert header == ["case", "heads", "way", "ms", "p10", "p90", "eager/this", "wanted"]
    found = {tuple(line[:3]): line[6:] for line in lines}
    assert found["64x128", "8/8", "local"] == ["4.00", ">=", "2.00"]
    assert found["64x128", "16/4", "full_iteration"] == ["5.00", ">=", "2.00"]
    assert found["1x16384", "16/4", "local"] == ["0.80", ">=", "0.98"]
    assert found["1x16384", "8/8", "local_copied"] == ["0.77"] and found["1x16384", "8/8", "eager"] == ["1.00"]
    assert found["16x1024", "8/8", "plans"] == found["16x1024", "8/8", "512_slots"] == []


def test_the_cost_of_unused_slots_is_said():
    text = bench_graphs.remarks(rows())
    assert "512 slots take 1.020 of the time in 16 slots (wanted <= 1.03)" in text and "1.133 of" in text


def test_every_row_has_a_place_of_its_own_in_the_record(tmp_path):
    made = [{"gpu": "H200", "ranks": "1"} | row for row in rows()]
    assert record.save(tmp_path / "graphs.csv", made, bench_graphs.KEY) == made
    assert len(record.save(tmp_path / "graphs.csv", made, bench_graphs.KEY)) == len(made)
    assert len({tuple(row[column] for column in bench_graphs.KEY) for row in made}) == len(made)
