"""The packs of the comparison with dense batches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))


def test_segments_are_of_the_same_tokens_and_dense_layouts_take_them():
    pytest.importorskip("cupy")
    import bench_dense

    assert [case.name for case in bench_dense.CASES] == [
        "1x8192", "4x2048", "8x1024", "1x32768", "4x8192", "8x4096"]  # fmt: skip
    assert {case.total_tokens for case in bench_dense.CASES} == set(bench_dense.TOKENS)
