"""Times of plans on the host: the record, its table in docs/several_gpus.md, and what a row has."""

from __future__ import annotations

import bench_plans
import record


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
