"""Pages and charts of measurements against the records that `python benchmarks/pages.py` makes them of."""

from __future__ import annotations

import pages
import pytest
import record
import tables
from workloads import CASES, cp_cases

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
             if line.startswith("|")]  # fmt: skip
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
    } | columns | more  # fmt: skip


def both(case, peer, forward, backward, timing="graph"):
    return [row(case, peer, "forward", timing, forward), row(case, peer, "backward", timing, backward)]


def test_attention_has_speeds_with_the_largest_error_and_the_best_peer_of_each_direction():
    rows = both("1x16384", "ours", 700, 600) + both("1x16384", "fa4", 500, 800) + both("1x16384", "cudnn", 1000, 100)
    rows += [row("1x16384", "ours", result, record.ERRORS, rms=f"{n}e-3") for n, result in enumerate(tables.RESULTS, 1)]
    rows[0] |= {"ms_p10": str(0.9 * float(rows[0]["ms"])), "ms_p90": str(1.1 * float(rows[0]["ms"]))}
    (line,) = cells(tables.attention(rows), "1x16384")
    assert line == ["16/16 x 128", "700 / 600 (4.00)", "500 / 800", "1,000 / 100", "0.70 / 0.75", "±10.0 %"]
    assert tables.versus(record.Times(rows), "1x16384", "graph")[1] == "cuDNN / FlashAttention-4"


def test_a_result_with_a_nan_is_no_missing_result():
    rows = both("64x256", "ours", 700, 600)
    rows += [row("64x256", "ours", result, record.ERRORS, rms=rms) for result, rms in
             zip(tables.RESULTS, ("1e-3", "nan", "2e-3", "1e-3"), strict=True)]  # fmt: skip
    assert cells(tables.attention(rows), "64x256")[0][1] == "700 / 600 (nan)"


def test_options_host_times_and_speeds_without_rest_have_tables_of_their_own():
    rows = both("64x256", "ours", 200, 100) + both("64x256", "deterministic", 200, 50)
    rows += [*both("64x256", "ours", 180, 90, "called"), row("64x256", "ours", "both", "sustained", 80)]
    rows += [row("64x256", "ours", what, "host", ms=ms) for what, ms in (("forward", "0.03"), ("plan", "0.2"))]
    forward, backward = CASES["64x256"].flops
    rested = (forward + backward) / (forward / 200 + backward / 100)
    assert cells(tables.attention(rows), "64x256")[1:] == [
        ["180 / 90.0", "-", "30.0", "-", "200"], ["200 / 100", "200 / 50.0"], [f"80.0 / {rested:.0f}"]]  # fmt: skip


def test_the_portable_kernels_are_beside_flashattention_2_alone_and_have_their_own_options():
    rows = both("64x256", "ours", 400, 300) + both("64x256", "portable", 200, 100) + both("64x256", "varlen", 250, 80)
    rows += both("64x256", "portable-deterministic", 200, 50)
    rows += [row("64x256", "portable", "dq", record.ERRORS, rms="3e-3")]
    assert cells(tables.attention(rows), "64x256") == [
        ["16/16 x 128", "400 / 300", "250 / 80.0", "1.60 / 3.75", "-"],
        ["200 / 100 (3.00)", "250 / 80.0", "0.800 / 1.25"], ["200 / 100", "200 / 50.0"]]  # fmt: skip


def test_a_pack_is_compared_with_the_dense_kernels_that_take_least_for_both_directions():
    times = {"ours": ("0.2", "0.6"), "cudnn": ("0.1", "0.6"), "fa4": ("0.2", "0.4"), "flash": ("", "0.1")}
    rows = [{"case": "4x2048", "total_tokens": "8192", "num_seqs": "4", "peer": peer, "direction": way,
             "timing": "graph", "ms": ms} for peer, found in times.items()
            for way, ms in zip(record.DIRECTIONS, found, strict=True)]  # fmt: skip
    rows += [rows[0] | {"case": "8x1024"}]  # of which no dense kernel was timed
    assert cells(tables.dense(rows), "8,192") == [
        ["4", "0.200 / 0.600", "0.200 / 0.400", "FlashAttention-4", "1.00 / 1.50 / 1.33"]]  # fmt: skip


def test_logits_are_compared_with_attention_without_sinks_and_softcap():
    times = {"ours": (1.0, 2.0), "low": (1.4, 2.5)}
    rows = [{"case": "x", "peer": peer, "direction": way, "timing": "called", "ms": str(ms)}
            for peer, found in times.items() for way, ms in zip(record.DIRECTIONS, found, strict=True)]  # fmt: skip
    rows += [{"case": "x", "peer": peer, "direction": name, "timing": record.ERRORS, "rms": "2e-3"}
             for peer in times for name in tables.RESULTS]  # fmt: skip
    assert cells(tables.logits(rows), "x") == [
        ["1.40 / 1.25"], ["neither", *["2.00"] * 4], ["softcap 5", *["2.00"] * 4]]  # fmt: skip
    names = {"ours": "portable", "low": "portable-softcap"}
    others = [row | {"peer": names[row["peer"]]} for row in rows]
    assert cells(tables.logits(rows + others), "x")[3:] == [
        ["1.40 / 1.25"], ["neither", *["2.00"] * 4], ["softcap 50", *["2.00"] * 4]]  # fmt: skip


def cp_rows():
    def of(peer, ms, tflops, case="bucket32k", **more):
        known = {"ranks": "2", "as_rank_of": "2", "transport": "peer", "case": case, "peer": peer, "timing": "called"}
        return [known | {"direction": way, "ms": str(part * ms), "tflops": str(tflops)} | more
                for way, part in (("forward", 0.25), ("backward", 0.75), ("both", 1))]  # fmt: skip

    a2a = {"method": "a2a", "sharding": "contiguous", "received_bytes": str(2**21), "memory_gib": "3.25"}
    rows = [*of("ours", 10, 450), *of("ours, a2a", 8, 562, **a2a), *of("ours, 4 groups", 11, 400)]
    rows += [*of("te+fa4", 12.5, 360), *of("alone", 9, 500), *of("one GPU", 16, 600)]
    return rows + of("ours", 2, 90, case="8x1024", as_rank_of="8") + of("ours", 20, 225, transport="nccl")


def test_numbers_of_ranks_and_transports_are_told_apart():
    found = tables.runs(cp_rows())
    assert [str(ranks) for ranks in found] == ["2 GPUs, nccl", "2 GPUs, peer", "2 GPUs as ranks of 8, peer"]
    times = found[2, 2, "peer"]
    assert tables.methods(times) == ["ours", "ours, a2a"] and tables.cp_peers(times) == ["te+fa4"]
    assert "4 groups" in tables.own(times)[2]


def test_methods_stand_side_by_side_and_each_way_has_its_costs():
    parts = tables.context_parallel([one for one in cp_rows() if one["transport"] == "peer"])
    beside, ours, a2a, groups, peer = cells(parts, "bucket32k")
    assert beside == ["450", "**562**", "360", "600", "500"]
    assert ours == ["all_gather", "450 / 450", "0.75", "1.0", "-", "-", "-", "-", "-"]
    assert a2a == ["a2a", "562 / 562", "0.94", "-", "-", "-", "-", "2.00", "3.25"], "it has other rows than `alone`"
    assert groups[0] == "4 groups" and peer[0].startswith("Transformer Engine") and peer[3] == "3.5"


def test_a_layer_is_compared_with_its_attention_and_its_exchange_alone():
    rows = [{"ranks": "2", "as_rank_of": "2", "transport": "nccl", "case": "bucket32k", "peer": peer, "date": "",
             "timing": "called", "direction": "both", "ms": str(ms), "tflops": "1", "head_groups": "4"}
            for peer, ms in (("ours", 12), ("alone", 9), ("exchange", 10), ("alone, beside the exchange", 9.9))]
    *_, parts = cells(tables.context_parallel(rows), "bucket32k")
    assert parts == ["4", "12.0", "9.00", "10.0", "0.75", "1.20", "1.10"]
    assert not tables.cp_peers(record.Times(rows)) and "exchange" not in tables.software(rows)


def tree_rows(peer, ms, ranks="1", pairs=100, tiles=10, **more):
    known = {"case": "t", "peer": peer, "ranks": ranks, "transport": "peer" if ranks == "2" else "single",
             "pairs": str(pairs), "tiles": str(tiles), "total_tokens": str(pairs // 2)}  # fmt: skip
    times = [known | {"direction": way, "timing": "called", "ms": str(x), "tflops": str(pairs / x)} | more
             for way, x in zip(record.WAYS, (*ms, sum(ms)), strict=True)]  # fmt: skip
    return [*times, *(known | {"direction": name, "timing": record.ERRORS, "rms": "2e-3"} for name in tables.RESULTS
                      if peer == "ours")]  # fmt: skip


def test_trees_are_beside_packs_by_pairs_and_tiles_and_as_many_times_as_fast_as_others():
    rows = [*tree_rows("ours", (1, 4)), *tree_rows("causal", (1, 5), pairs=125, tiles=11),
            *tree_rows("unrolled", (3, 10), pairs=300, tiles=30), *tree_rows("flex", (2, 12))]  # fmt: skip
    assert cells(tables.trees(rows), "t") == [[
        "3.00", "3.00", "100 / 25.0 (2.00)", "125 / 25.0", "0.800 / 1.00", "0.909 / 1.14", "3.00 / 2.50",
        "2.00 / 3.00"]]  # fmt: skip
    assert cells(tables.trees([row for row in rows if row["peer"] == "ours"]), "t")[0][2:] == [
        "100 / 25.0 (2.00)", *["-"] * 5]  # fmt: skip


def test_trees_over_two_gpus_have_their_share_of_one_gpus_speed():
    rows = tree_rows("ours", (2, 3), "2", work="1.020", tflops="18") + tree_rows("one GPU", (4, 4), "2", tflops="20")
    assert cells(tables.trees(rows), "2 GPUs, peer") == [
        ["t", "18.0 / 18.0 (2.00)", "18.0", "20.0", "0.90", "1.020"]]  # fmt: skip


def test_mixers_have_their_floor_and_how_many_times_as_long_others_take():
    times = {"ours": ("0.25", "0.5"), "mamba_ssm": ("0.75", "2.0")}
    rows = [{"part": "mixer", "ranks": "1", "case": "1x16384", "peer": peer, "direction": way, "timing": "graph",
             "ms": ms, "floor_ms": "0.086"} for peer, found in times.items()
            for way, ms in zip(record.DIRECTIONS, found, strict=True)]  # fmt: skip
    rows += [rows[0] | {"direction": name, "timing": record.ERRORS, "rms": "2e-3", "ms": ""} for name in ("out", "dz")]
    speeds, errors = cells(tables.mixers(rows), "1x16384")
    assert speeds == ["0.250 / 0.500", "0.750 / 2.00", "0.086 / 0.086", "3.00 / 4.00"]
    assert errors == ["thdattn", "2.00", "2.00"]
    rows += [row | {"peer": "portable"} for row in rows if row["peer"] == "ours"]
    found = cells(tables.mixers(rows), "1x16384")
    assert found == [speeds, ["0.250 / 0.500", "0.750 / 2.00", "3.00 / 4.00"], errors, ["portable", *errors[1:]]]


def test_graphs_are_compared_with_calls_in_packs_of_unknown_lengths_and_slots_with_an_exact_plan():
    ways = {"eager": 0.5, "eager_static": 0.6, "local": 0.2, "full_iteration": 0.1, "16_slots": 1.1, "exact": 1.0}
    rows = [{"case": "64x128", "heads": "64", "kv_heads": "mixer", "ranks": "1", "way": way, "ms": str(ms)}
            for way, ms in ways.items()]  # fmt: skip
    parts = tables.graphs(rows)
    assert cells(parts, "64x128") == [["64 of a mixer", "1", "0.600", "0.200", "0.100", "6.00"]]
    assert cells(parts, "1")[0] == ["16", "1.10", "1.10"]


def test_moves_of_rows_are_compared_with_a_copy():
    known = {"case": "two", "cp_size": "2", "direction": "to_rank_order", "dtype": "float32"}
    rows = [known | {"peer": peer, "gb_per_s": rate} for peer, rate in (("ours", "900"), ("copy", "1000"))]
    assert cells(tables.reorder(rows), "two") == [["2", "to rank order, float32", "900", "1,000", "-", "0.90"]]


STEP = {
    "size": "1b", "weights": "993126400", "ranks": "2", "tokens": "65536", "accumulate": "2", "cuda_graph_impl": "none",
    "ms_per_step": "12.6", "tokens_per_s": "5201", "mfu": "0.4219", "attention_tflops": "301.4", "padding": "0.0123",
    "ms_p10": "11.4", "ms_p90": "1234.5", "maximum": "", "date": "2026-01-02T03:04",
}  # fmt: skip


def test_training_steps_stand_by_size_and_beside_those_of_one_gpu():
    rows = [STEP, STEP | {"ranks": "1", "mfu": ""}, STEP | {"size": "small", "weights": "23872000"},
            STEP | {"cuda_graph_impl": "local", "attention_tflops": ""}]  # fmt: skip
    parts = tables.training(rows)
    assert cells(parts, "small, 24 million")[0][0] == "2"
    one, two, graph = cells(parts, "1b, 993 million")
    assert one[:8] == ["1", "131,072", "none", "12.6", "11.4 to 1,234", "5,201", "-", "-"]
    assert two[6:] == ["42 %", "0.50", "301", "1.2 %", "2026-01-02"]
    assert graph[2] == "local" and graph[8] == "-"


def test_groups_methods_and_shardings_are_named_where_they_are_not_usual():
    usual = STEP | {"ranks": "4", "cp": "", "sharding": "dual_chunk"}
    others = [
        usual | {"sharding": "balanced"}, usual | {"cp_comm_type": "a2a", "sharding": "contiguous"},
        usual | {"cp_comm_type": "p2p"}, usual | {"cp_comm_type": "a2a+all_gather of 2", "cp": "2"},
    ]  # fmt: skip
    assert [tables.gpus(one) for one in (STEP, usual, *others)] == [
        "2", "4", "4, balanced", "4, a2a", "4, p2p", "2 x 2, a2a+all_gather of 2"]
    assert tables.tokens_per_step(STEP | {"ranks": "4", "cp": "2"}) == 262_144


def test_maxima_stand_beside_the_same_steps_without_graphs():
    local = STEP | {"cuda_graph_impl": "local"}
    rows = [STEP | {"ms_mean": "13.0"}, STEP | {"size": "small", "ms_mean": "1"},
            local | {"ms_mean": "5.2", "maximum": "P90", "slots": "3", "eager_packs": "0.0962"},
            local | {"ms_mean": "4.0", "maximum": "16", "slots": "16", "eager_packs": "0.0000"}]  # fmt: skip
    assert [line[3:] for line in tables.maxima(rows)] == [
        ["none", "exact", "-", "13.0", "11.4 to 1,234", "3.25"],
        ["local", "3 (P90)", "9.6 %", "5.2", "11.4 to 1,234", "1.30"],
        ["local", "16", "0.0 %", "4.0", "11.4 to 1,234", "1.00"]]  # fmt: skip


def test_packs_are_described_by_lengths_and_heads():
    assert pages.documents(CASES["1x16384-d192v128"]) == "1 document of 16,384 tokens, 16 heads of 192/128"
    said = "4 documents of 24,576 to 32,768 tokens, 32/8 heads of 128"
    assert pages.documents(cp_cases(2)["bucket32k"]) == said
    assert pages.label(cp_cases(2)["bucket32k"]).splitlines()[1:] == ["24,576 to 32,768 tokens", "32/8 heads of 128"]
