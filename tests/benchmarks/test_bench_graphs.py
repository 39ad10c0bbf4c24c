"""The benchmark of CUDA graphs without a GPU: what it prints and keeps."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import thdattn

pytest.importorskip("cupy")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_graphs
import graphs_page
import record

ABOUT = {"gpu": "NVIDIA H200", "ranks": "1", "driver": "580", "cuda": "13", "kernel_sources": "abc",
         "command": "python benchmarks/bench_graphs.py"}  # fmt: skip


def rows():
    times = {"64x128": {"eager": 0.4, "local": 0.1, "full_iteration": 0.08},
             "1x16384": {"eager": 2.0, "eager_static": 2.1, "local": 2.5, "local_copied": 2.6}}
    made = [bench_graphs.row_of(case.columns, way, [ms] * 3, 1e9) for case in bench_graphs.cases(times)
            for way, ms in times[case.name].items()]  # fmt: skip
    slots = bench_graphs.Case("16x1024", (1_024,) * 16, 8, 8)
    made += [bench_graphs.row_of(slots.columns, way, [ms], 1e9)
             for way, ms in (("16_slots", 1.0), ("64_slots", 1.01), ("512_slots", 1.02), ("exact", 0.9))]  # fmt: skip
    mixer = {"case": "64x128", "heads": "64", "kv_heads": "mixer", "head_dim": "64", "total_tokens": "8192",
             "num_seqs": "64"}  # fmt: skip
    times = {"eager": 0.6, "eager_static": 0.7, "local": 0.2, "full_iteration": 0.1}
    made += [bench_graphs.row_of(mixer, way, [ms]) for way, ms in times.items()]
    return [*made, bench_graphs.row_of(slots.columns, "plans", [0.03])]


def test_the_table_sets_speeds_over_eager_beside_what_is_wanted():
    header, *lines = (line.split() for line in bench_graphs.table(rows()).splitlines())
    assert header == ["case", "heads", "way", "ms", "p10", "p90", "eager/this", "wanted"]
    found = {tuple(line[:3]): line[6:] for line in lines}
    assert found["64x128", "8/8", "local"] == ["4.00", ">=", "2.00"]
    assert found["64x128", "16/4", "full_iteration"] == ["5.00", ">=", "2.00"]
    assert found["1x16384", "16/4", "local"] == ["0.80", ">=", "0.98"]
    assert found["1x16384", "8/8", "local_copied"] == ["0.77"] and found["1x16384", "8/8", "eager"] == ["1.00"]
    assert found["64x128", "64/mixer", "full_iteration"] == ["6.00", ">=", "2.00"]
    assert found["16x1024", "8/8", "plans"] == found["16x1024", "8/8", "512_slots"] == []


def test_the_cost_of_unused_slots_is_said():
    text = bench_graphs.remarks(rows())
    assert "512 slots take 1.020 of the time in 16 slots (wanted <= 1.03)" in text and "1.133 of" in text
    assert "in 64 slots take 1.010 of" in text


def test_the_page_has_mixers_beside_attentions_and_says_what_slots_cost(tmp_path):
    made = [ABOUT | row for row in rows() if row["case"] != "1x16384"]
    made += [row | {"way": "eager_static"} for row in made if row["way"] == "eager" and row["kv_heads"] != "mixer"]
    page = graphs_page.layers(tmp_path / "graphs_h200.csv", made)
    assert "\n| 64x128 | 64 of a mixer | 1 | 0.700 | 0.200 | 0.100 | 7.00 |" in page
    assert "\n| 64x128 | 8/8 | 1 | 0.400 | 0.100 | 0.0800 | 5.00 |" in page
    said = "on 1 GPU, over the time of a plan of the exact size: 16 slots 1.11, 64 slots 1.12, 512 slots 1.13."
    assert said in " ".join(page.split())


def test_every_row_has_a_place_of_its_own_in_the_record(tmp_path):
    made = [{"gpu": "H200", "ranks": "1"} | row for row in rows()]
    assert record.save(tmp_path / "graphs.csv", made, bench_graphs.KEY) == made
    assert len(record.save(tmp_path / "graphs.csv", made, bench_graphs.KEY)) == len(made)
    assert len({tuple(row[column] for column in bench_graphs.KEY) for row in made}) == len(made)


def on_host(monkeypatch):
    """Everything in NumPy: nothing is captured then, and all ways are the calls themselves."""
    attention, mixer = bench_graphs.Case.attention, bench_graphs.MixerCase.mixer
    monkeypatch.setattr(bench_graphs.Case, "attention",
                        lambda case, _, comm=None: attention(case, "reference", comm=comm))
    monkeypatch.setattr(bench_graphs.MixerCase, "mixer", lambda case, comm, _: mixer(case, comm, "reference"))
    monkeypatch.setattr(bench_graphs, "cupy", np)
    monkeypatch.setattr(bench_graphs, "draw_inputs", draw_inputs)
    monkeypatch.setattr(bench_graphs.timing, "race", lambda comm, ways, rounds: {name: [1.0] for name in ways})
    return thdattn.comm.init("single")


def draw_inputs(case, num_rows):
    rng = np.random.default_rng(0)
    shapes = (case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.v_head_dim)
    return [rng.standard_normal((num_rows, *shape)).astype(ml_dtypes.bfloat16) for shape in (*shapes, shapes[0])]


def test_every_way_of_an_attention_and_of_a_mixer_runs_and_is_checked(monkeypatch):
    comm = on_host(monkeypatch)
    layers = [bench_graphs.Layer(comm, bench_graphs.Case("2x12", (12, 12), 2, 1, 16, 16)),
              bench_graphs.MixerLayer(comm, bench_graphs.MixerCase("2x12", (12, 12), 4, 8, 8))]  # fmt: skip
    for layer in layers:
        made = [*bench_graphs.layer_rows(comm, layer, 1)]
        assert [row["way"] for row in made] == ["eager", "eager_static", "local", "local_copied", "full_iteration"]
        assert made[0]["kv_heads"] == ("1" if layer is layers[0] else "mixer") and bool(made[0]["tflops"]) == (
            layer is layers[0])  # fmt: skip
        wanted = layer.both(layer.given, layer.dout, layer.exact)
        wrong = [wanted[0] * wanted[0].dtype.type(2), *wanted[1:]]
        with pytest.raises(RuntimeError, match=r"2x12 local: d.* is off by"):
            bench_graphs.check(layer, "local", wrong, wanted)


def test_slots_of_every_number_run(monkeypatch):
    comm = on_host(monkeypatch)
    case = bench_graphs.Case
    monkeypatch.setattr(bench_graphs, "Case", lambda name, lengths, *heads: case(name, (4,) * 16, 2, 2, 8, 8))
    assert [row["way"] for row in bench_graphs.slot_rows(comm, 1)] == ["16_slots", "64_slots", "512_slots", "exact"]
