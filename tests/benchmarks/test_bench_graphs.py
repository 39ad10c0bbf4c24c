"""Benchmark of CUDA graphs without a GPU: every way runs and is checked."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import thdattn

pytest.importorskip("cupy")

import bench_graphs


def on_host(monkeypatch):
    """Everything in NumPy: nothing is captured then, and all ways are the calls themselves."""
    attention, mixer = bench_graphs.Case.attention, bench_graphs.MixerCase.mixer
    monkeypatch.setattr(bench_graphs.Case, "attention",
                        lambda case, _, comm=None: attention(case, "reference", comm=comm))
    monkeypatch.setattr(bench_graphs.MixerCase, "mixer", lambda case, comm, _: mixer(case, comm, "reference"))
    monkeypatch.setattr(bench_graphs, "cupy", np)
    monkeypatch.setattr(bench_graphs, "draw_inputs", draw_inputs)
    monkeypatch.setattr(bench_graphs.timing, "race", lambda comm, ways, rounds: {name: [[1.0], [1.0]] for name in ways})
    return thdattn.comm.init("single")


def draw_inputs(case, num_rows):
    rng = np.random.default_rng(0)
    shapes = (case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.v_head_dim)
    return [rng.standard_normal((num_rows, *shape)).astype(ml_dtypes.bfloat16) for shape in (*shapes, shapes[0])]


def test_every_way_of_an_attention_and_of_a_mixer_runs_and_is_checked(monkeypatch):
    comm = on_host(monkeypatch)
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


def test_slots_of_every_number_run(monkeypatch):
    comm = on_host(monkeypatch)
    case = bench_graphs.Case
    monkeypatch.setattr(bench_graphs, "Case", lambda name, lengths, *heads: case(name, (4,) * 16, 2, 2, 8, 8))
    assert [row["way"] for row in bench_graphs.slot_rows(comm, 1)] == ["16_slots", "64_slots", "512_slots", "exact"]
