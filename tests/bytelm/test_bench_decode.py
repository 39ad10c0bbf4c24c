"""The benchmark of decode without a GPU."""

from __future__ import annotations

import bench_decode
import pytest


@pytest.mark.parametrize("size", ["tiny", "tiny-hybrid"])
@pytest.mark.parametrize("way", bench_decode.WAYS)
def test_every_way_makes_a_row(way, size):
    row = bench_decode.sampling(size, 2, 20, way, "reference", steps=2)
    assert (row["what"], row["texts"], row["bytes"], row["way"]) == (size, "2", "20", way)
    assert float(row["bytes_per_s"]) == pytest.approx(2e3 / float(row["ms"]), rel=0.01)
    assert int(row["samples"]) == bench_decode.ROUNDS
