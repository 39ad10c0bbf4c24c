"""Pages and charts of measurements against the records that `python benchmarks/pages.py` makes them of."""

from __future__ import annotations

import pages
import pytest
import record
import tables
from workloads import CASES

RECORDS = pages.records()
WRITE = "a record was changed: python benchmarks/pages.py writes the pages"


@pytest.mark.parametrize("gpu", RECORDS)
def test_the_page_of_a_gpu_is_made_of_its_records(gpu):
    page = (record.RESULTS / f"{gpu}.md").read_text()
    assert page == pages.page(gpu, RECORDS[gpu]), WRITE
    assert "nan" not in page


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: path.parent.name)
def test_blocks_of_a_page_are_made_of_the_records(path):
    page = path.read_text()
    for name, made in pages.blocks(path, RECORDS).items():
        assert pages.with_block(page, name, made) == page, WRITE


@pytest.mark.parametrize("gpu", RECORDS)
def test_charts_show_the_records_in_at_most_eight_bars(gpu):
    image = pytest.importorskip("PIL.Image")
    for chart in pages.charts(gpu, RECORDS[gpu]):
        assert image.open(chart.path).info["Description"] == pages.numbers(chart), WRITE
        assert 0 < 2 * len(chart.bars) <= 8


def test_a_block_is_replaced_alone():
    page = "a\n<!-- x -->\nold\nlines\n<!-- /x -->\nb\n"
    assert pages.with_block(page, "x", "new") == "a\n<!-- x -->\nnew\n<!-- /x -->\nb\n"
    with pytest.raises(ValueError, match=r"lacks <!-- y --> or"):
        pages.with_block(page, "y", "new")


def test_a_chart_is_drawn_with_its_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    chart = pages.Chart(tmp_path / "x_long.png", "title", ("a", "b"), {"one": (1.0, 2.0), "two": (3.0, 4.0)})
    pages.draw(chart)
    assert image.open(chart.path).info["Description"] == '{"one": ["1.00", "2.00"], "two": ["3.00", "4.00"]}'
    assert chart.question == "long"


# --- tables, from rows worked by hand ----------------------------------------------------------------------------


def cells(parts, first):
    """Return the cells of the lines that begin with a cell, over all tables."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for part in parts for line in part.splitlines()
             if line.startswith("|")]
    return [line[1:] for line in lines if line[0] == first]


def row(case, peer, direction, timing, tflops="", **more):
    known, columns = CASES[case], {}
    if tflops:
        flops = sum(known.flops) if direction == "both" else getattr(known.flops, direction)
        columns = {"tflops": str(tflops), "ms": str(flops / tflops / 1e9)}
    return {
        "date": "2026-01-02T03:04", "gpu": "NVIDIA H200", "driver": "580", "kernel_sources": "abc",
        "heads": str(known.heads), "kv_heads": str(known.kv_heads), "head_dim": str(known.head_dim),
        "v_head_dim": str(known.v_head_dim), "total_tokens": str(known.total_tokens), "peer_version": "1.0",
        "case": case, "peer": peer, "direction": direction, "timing": timing,
    } | columns | more


def both(case, peer, forward, backward, timing="graph"):
    return [row(case, peer, "forward", timing, forward), row(case, peer, "backward", timing, backward)]


def test_the_portable_kernels_are_beside_flashattention_2_alone_and_have_their_own_options():
    rows = both("64x256", "ours", 400, 300) + both("64x256", "portable", 200, 100) + both("64x256", "varlen", 250, 80)
    rows += both("64x256", "portable-deterministic", 200, 50)
    rows += [row("64x256", "portable", "dq", record.ERRORS, rms="3e-3")]
    assert cells(tables.attention(rows), "64x256") == [
        ["16/16 x 128", "400 / 300", "250 / 80.0", "1.60 / 3.75", "-"],
        ["200 / 100 (3.00)", "250 / 80.0", "0.800 / 1.25"], ["200 / 100", "200 / 50.0"]]


def test_logits_are_compared_with_attention_without_sinks_and_softcap():
    times = {"ours": (1.0, 2.0), "low": (1.4, 2.5)}
    rows = [{"case": "x", "peer": peer, "direction": way, "timing": "called", "ms": str(ms)}
            for peer, found in times.items() for way, ms in zip(record.DIRECTIONS, found, strict=True)]
    rows += [{"case": "x", "peer": peer, "direction": name, "timing": record.ERRORS, "rms": "2e-3"}
             for peer in times for name in tables.RESULTS]
    assert cells(tables.logits(rows), "x") == [
        ["1.40 / 1.25"], ["neither", *["2.00"] * 4], ["softcap 5", *["2.00"] * 4]]
    names = {"ours": "portable", "low": "portable-softcap"}
    others = [*(row | {"peer": names[row["peer"]]} for row in rows), *(row | {"case": "y"} for row in rows)]
    assert cells(tables.logits(rows + others), "x")[3:] == [
        ["1.40 / 1.25"], ["neither", *["2.00"] * 4], ["softcap 50", *["2.00"] * 4]]
    assert len(cells(tables.logits(rows + others), "y")) == 3, "the portable kernels were not timed on it"


def test_groups_methods_and_shardings_are_named_where_they_are_not_usual():
    two = {"ranks": "2", "tokens": "65536", "accumulate": "2"}
    usual = two | {"ranks": "4", "cp": "", "sharding": "dual_chunk"}
    others = [
        usual | {"sharding": "balanced"}, usual | {"cp_comm_type": "a2a", "sharding": "contiguous"},
        usual | {"cp_comm_type": "p2p"}, usual | {"cp_comm_type": "a2a+all_gather of 2", "cp": "2"},
    ]
    assert [tables.gpus(one) for one in (two, usual, *others)] == [
        "2", "4", "4, balanced", "4, a2a", "4, p2p", "2 x 2, a2a+all_gather of 2"]
    assert tables.tokens_per_step(two | {"ranks": "4", "cp": "2"}) == 262_144
