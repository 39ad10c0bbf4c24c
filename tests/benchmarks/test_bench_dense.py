"""What is said of packs beside dense batches, from rows; and the cases."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import dense_record

ABOUT = {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13", "kernel_sources": "abc", "total_tokens": "8192",
         "num_seqs": "4", "command": "python benchmarks/bench_dense.py"}  # fmt: skip


def rows(case, times):
    return [ABOUT | {"case": case, "peer": peer, "peer_version": "2", "direction": way, "timing": "graph", "ms": ms}
            for peer, both in times.items() for way, ms in zip(("forward", "backward"), both, strict=True)]


def test_ratios_are_over_the_dense_kernels_that_take_least_for_both_directions(tmp_path):
    times = {"ours": ("0.2", "0.6"), "cudnn": ("0.1", "0.6"), "fa4": ("0.2", "0.4"), "flash": ("", "0.1")}
    made = rows("4x2048", times)
    made += rows("8x1024", {"ours": ("0.2", "0.6"), "cudnn": ("", "")})  # of which no dense kernel was timed
    assert [*dense_record.lines(made)] == [
        ["8,192", "4", "0.200/0.600", "0.200/0.400", "fa4", "1.00", "1.50", "1.33"]]  # fmt: skip
    page = dense_record.summary(tmp_path / "dense_h200.csv", made)
    assert "| 8,192 | 4 | 0.200/0.600 | 0.200/0.400 | fa4 | 1.00 | 1.50 | 1.33 |" in page
    assert "cudnn 2, fa4 2, flash 2." in " ".join(page.split())


def test_segments_are_of_the_same_tokens_and_dense_layouts_take_them():
    pytest.importorskip("cupy")
    import bench_dense

    assert [case.name for case in bench_dense.CASES] == [
        "1x8192", "4x2048", "8x1024", "1x32768", "4x8192", "8x4096"]  # fmt: skip
    assert {case.total_tokens for case in bench_dense.CASES} == set(bench_dense.TOKENS)
