"""Benchmark of CUDA graphs without a GPU: every way runs and is checked."""

from __future__ import annotations

import numpy as np
import pytest

import thdattn

pytest.importorskip("cupy")

import bench_graphs


@pytest.fixture
def comm(on_host, monkeypatch):
    """Nothing is captured: all ways are the calls themselves."""
    monkeypatch.setattr(bench_graphs, "cupy", np)
    return thdattn.comm.init("single")


def test_every_way_of_an_attention_and_of_a_mixer_runs_and_is_checked(comm):
    layers = [bench_graphs.Layer(comm, bench_graphs.Case("2x12", (12, 12), 2, 1, 16, 16)),
              bench_graphs.MixerLayer(comm, bench_graphs.MixerCase("2x12", (12, 12), 4, 8, 8))]
    for layer in layers:
        made = [*bench_graphs.layer_rows(comm, layer, 1)]
        assert [row["way"] for row in made] == ["eager", "eager_static", "local", "full_iteration"]
        assert made[0]["kv_heads"] == ("1" if layer is layers[0] else "mixer") and bool(made[0]["tflops"]) == (
            layer is layers[0])
        wanted = layer.both(layer.given, layer.dout, layer.exact)
        wrong = [wanted[0] * wanted[0].dtype.type(2), *wanted[1:]]
        with pytest.raises(RuntimeError, match=r"2x12 local: d.* is off by"):
            bench_graphs.check(layer, "local", wrong, wanted)


def test_slots_of_every_number_run(comm, monkeypatch):
    case = bench_graphs.Case
    monkeypatch.setattr(bench_graphs, "Case", lambda name, lengths, *heads: case(name, (4,) * 16, 2, 2, 8, 8))
    assert [row["way"] for row in bench_graphs.slot_rows(comm, 1)] == ["16_slots", "64_slots", "512_slots", "exact"]


def test_balanced_packs_are_loaded_new_and_prepared(comm, monkeypatch):
    monkeypatch.setattr(bench_graphs.timing, "returned", lambda call, calls: [call() or 0.5 for _ in range(calls)])
    monkeypatch.setitem(bench_graphs.SHORT, "8x1024", (12, 40, 30))

    def program(comm):
        return [(row["way"], row["samples"]) for row in bench_graphs.layout_rows(comm, "8x1024", 1)]

    ways = [("load_host_balanced", "10"), ("load_host_balanced_prepared", "10"), ("plans_balanced", "50"),
            ("plans_graph_balanced", "50")]
    assert thdattn.comm.run_local(2, program) == [ways] * 2
