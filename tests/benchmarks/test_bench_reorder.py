"""Benchmark of row moves without a GPU: columns, and calls of every way."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cupy")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import bench_reorder

import thdattn
import thdattn.engines.reference

TIMES = {"move": [1.0, 1.2, 0.8], "copy": [0.9] * 3, "select": [1.5] * 3}
SOURCES = [np.zeros((1_000, 8, 128), np.float32)] * 2


def row(without=()):
    times = {name: samples for name, samples in TIMES.items() if name not in without}
    return {"gpu": "NVIDIA H200"} | bench_reorder.row_of("1 sequence", 2, "to_rank_order", SOURCES, times)


def test_a_row_has_times_speeds_and_ratios_of_every_way():
    made = row()
    assert (made["ms"], made["ms_p10"], made["ms_p90"], made["select_ms"]) == (
        "1.0000", "0.8000", "1.2000", "1.5000")  # fmt: skip
    num_bytes = 2 * 2 * 4_096_000
    assert made["bytes"] == str(num_bytes) and made["select_gb_per_s"] == f"{num_bytes / 1.5e6:.0f}"
    assert (made["ratio"], made["over_select"]) == ("0.900", "1.500")


def test_columns_of_a_way_that_is_missing_are_empty():
    made = row(without=("select",))
    assert list(made) == list(row()) and made["select_ms"] == made["over_select"] == ""


def test_every_way_of_both_directions_is_called_and_has_a_row(monkeypatch):
    """On the host, by the NumPy engine."""
    called, rng = [], np.random.default_rng(0)
    monkeypatch.setattr(bench_reorder, "cupy", np)
    monkeypatch.setattr(bench_reorder, "cuda", thdattn.engines.reference)
    monkeypatch.setattr(bench_reorder, "ROWS", 64)
    monkeypatch.setattr(bench_reorder, "PACKS", {"two": (48, 16)})
    monkeypatch.setattr(bench_reorder, "normal", lambda shape, seed, dtype: rng.standard_normal(shape).astype(dtype))
    monkeypatch.setattr(bench_reorder, "copy", lambda sources, targets: called.append("copy"))
    monkeypatch.setattr(bench_reorder, "selecting", lambda sources, index: lambda: called.append("select"))
    monkeypatch.setattr(bench_reorder.timing, "called", lambda call, calls: [(call() and 2.0) or 2.0] * calls)
    monkeypatch.setattr(bench_reorder.timing, "REST", 0)
    found = [*bench_reorder.bench("two", 4)]
    assert [(made["direction"], made["dtype"], made["ratio"]) for made in found] == [
        ("to_sequence_order", "bfloat16", "1.000"), ("to_rank_order", "float32", "1.000")]
    torch_is_there = importlib.util.find_spec("torch") is not None
    assert {"copy", *["select"] * torch_is_there} == set(called)
    assert all(bool(made["select_ms"]) == torch_is_there for made in found)
