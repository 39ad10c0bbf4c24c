"""Simulated scaling and times of plans: their tables in docs/several_gpus.md, and parts worked by hand."""

from __future__ import annotations

import bench_plans
import pytest
import record
import scale

from thdattn.costs.model import Rates, Shape
from thdattn.costs.scale import simulated

WRITE = "python benchmarks/scale.py writes the page"


def rows(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


def test_page_has_what_is_simulated():
    """One row of each table, of one machine and of many; all rows would take a minute."""
    parts = scale.PAGE.read_text().partition("<!-- scale -->\n")[2].partition("\n<!-- /scale -->")[0].split("\n\n")
    for (title, lengths), said, table, ranks in zip(
        scale.PACKS.items(), parts[::2], parts[1::2], (8, 1024), strict=True
    ):
        head, _, *lines = rows(table)
        made_head, _, made = rows(scale.scaling(title, simulated(lengths, [ranks], scale.SHAPE)))
        assert said == f"{title}:" and head == made_head, WRITE
        assert [line[0] for line in lines] == [f"{number:,}" for number in scale.RANKS] and made in lines, WRITE


def test_documents_of_one_rank_each_reach_all_but_their_tiles():
    # 16 documents on 16 ranks of 2 machines: balanced rows send nothing, and every tile on the diagonal is half used.
    rates = Rates(1e12, 1e12, link=1e9, between=1e9, memory=1e30, latency=0)
    (found,) = simulated([1024] * 16, [16], Shape(8, 8, per_node=8), rates)
    kind = "all_gather", "balanced"
    pairs = 1024 * 1025 // 2
    assert found.alone == pytest.approx(pairs * 8 * 256 * (2 + 5) / 1e12)
    tiles, whole = 8 * 9 // 2, 128 * 128
    starts = 8 * 3  # tiles of query rows in the backward, each as long as 3 tiles
    used = pairs * 7 / (tiles * whole * 2 + (tiles + starts) * whole * 5)
    assert found.share(kind) == pytest.approx(used)
    assert found.best == kind and found.costs[kind].received.total == 0
    assert found.overlapped == pytest.approx(used)
    assert ("a2a", "contiguous") not in found.costs and found.share(("a2a", "contiguous")) == 0


# --- times of plans ----------------------------------------------------------------------------------------------


def test_page_has_the_record():
    text = bench_plans.PAGE.read_text().partition("<!-- plans -->\n")[2].partition("\n<!-- /plans -->")[0]
    rows = record.load(record.RESULTS / "plans.csv")
    assert [int(row["ranks"]) for row in rows] == [*bench_plans.RANKS]
    assert text == bench_plans.plans(rows), "python benchmarks/bench_plans.py writes the page"


def test_a_row_has_cpu_time_and_bytes_of_one_rank():
    few, many = (bench_plans.measured([4096, 1000, 300, 2792], ranks, 1) for ranks in (2, 8))
    assert (few["tokens"], few["documents"]) == ("8188", "4")
    for name in bench_plans.COLUMNS:
        assert float(few[name]) >= 0
    assert 0 < float(few["kib"]) < float(many["kib"]) < 64


def test_seconds_are_those_of_this_process():
    assert bench_plans.seconds(lambda: None) < 0.01 < bench_plans.seconds(lambda: [sum(range(10**6)) for _ in range(9)])
