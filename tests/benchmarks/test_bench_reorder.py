"""Benchmark of row moves without a GPU: columns, and calls of every way."""

from __future__ import annotations

import importlib.util
from functools import partial

import numpy as np
import pytest

pytest.importorskip("cupy")

import bench_reorder

import thdattn
import thdattn.engines.reference


def test_every_way_of_both_directions_is_called_and_has_a_row(on_host, monkeypatch):
    """On the host, by the NumPy engine."""
    called = []
    monkeypatch.setattr(bench_reorder, "cupy", np)
    monkeypatch.setattr(bench_reorder, "cuda", thdattn.engines.reference)
    monkeypatch.setattr(bench_reorder, "ROWS", 64)
    monkeypatch.setattr(bench_reorder, "PACKS", {"two": (48, 16)})
    monkeypatch.setattr(bench_reorder, "normal", partial(bench_reorder.normal, xp=np))
    monkeypatch.setattr(bench_reorder, "copy", lambda sources, targets: called.append("copy"))
    monkeypatch.setattr(bench_reorder, "selecting", lambda sources, index: lambda: called.append("select"))
    found = [*bench_reorder.bench("two", 4)]
    torch_is_there = importlib.util.find_spec("torch") is not None
    ways = ["ours", "copy", *["select"] * torch_is_there]
    assert [(made["direction"], made["dtype"], made["peer"]) for made in found] == [
        (*move, way) for move in (("to_sequence_order", "bfloat16"), ("to_rank_order", "float32")) for way in ways]
    assert {"copy", *["select"] * torch_is_there} == set(called)
