"""Benchmark of row moves without a GPU: columns, and calls of every way."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

pytest.importorskip("cupy")

import bench_reorder

import thdattn
import thdattn.engines.reference


def test_a_row_has_the_time_and_the_rate_of_a_way():
    sources = [np.zeros((1_000, 8, 128), np.float32)] * 2
    made = bench_reorder.row_of("1 sequence", 2, "to_rank_order", sources, "copy", [1.0, 1.2, 0.8])
    assert (made["peer"], made["ms"], made["ms_p10"], made["ms_p90"]) == ("copy", "1.00000", "0.80000", "1.20000")
    num_bytes = 2 * 2 * 4_096_000
    assert made["bytes"] == str(num_bytes) and made["gb_per_s"] == f"{num_bytes / 1e6:.0f}"


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
    torch_is_there = importlib.util.find_spec("torch") is not None
    ways = ["ours", "copy", *["select"] * torch_is_there]
    assert [(made["direction"], made["dtype"], made["peer"]) for made in found] == [
        (*move, way) for move in (("to_sequence_order", "bfloat16"), ("to_rank_order", "float32")) for way in ways]
    assert {"copy", *["select"] * torch_is_there} == set(called)
