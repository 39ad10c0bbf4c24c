"""What README.md says was measured is what the records say, and what the tool makes of records."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import attention_page
import headlines
import readme
import record
from workloads import CASES

ABOUT = {"date": "2026-01-02", "gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0", "kernel_sources": "abc",
         "command": "python benchmarks/bench_attention.py"}  # fmt: skip
KEY = ("case", "peer", "direction", "timing")


BLOCKS = [pytest.param(path, name, id=f"{path.parent.name}-{name}") for path in readme.PAGES
          for name in readme.PAGES[path]]  # fmt: skip


@pytest.mark.parametrize(("path", "name"), BLOCKS)
def test_blocks_of_the_pages_are_those_of_the_records(path, name):
    page = path.read_text()
    made = readme.PAGES[path][name]()
    text = "a record was changed: python benchmarks/readme.py writes the pages anew"
    assert readme.with_block(page, name, made) == page, text
    assert not re.search(r"\bnan\b", made)


@pytest.mark.parametrize("path", readme.PAGES, ids=lambda path: path.parent.name)
def test_every_block_of_a_page_is_made(path):
    assert set(re.findall(r"^<!-- (.*):begin -->$", path.read_text(), re.MULTILINE)) == set(readme.PAGES[path])


def test_a_block_is_replaced_alone():
    page = "a\n<!-- x:begin -->\nold\nlines\n<!-- x:end -->\nb\n"
    assert readme.with_block(page, "x", "new") == "a\n<!-- x:begin -->\nnew\n<!-- x:end -->\nb\n"
    with pytest.raises(ValueError, match=r"lacks <!-- y:begin -->"):
        readme.with_block(page, "y", "new")


def row(case, peer, direction, timing, tflops="", **more):
    known = CASES[case]
    columns = dict(zip(KEY, (case, peer, direction, timing), strict=True))
    if tflops:
        flops = sum(known.flops) if direction == "both" else getattr(known.flops, direction)
        columns |= {"tflops": str(tflops), "ms": str(flops / tflops / 1e9)}
    return ABOUT | {
        "heads": str(known.heads), "kv_heads": str(known.kv_heads), "head_dim": str(known.head_dim),
        "v_head_dim": str(known.v_head_dim), "total_tokens": str(known.total_tokens), "peer_version": "1.0",
    } | columns | more  # fmt: skip


def rows_of(case, peer, forward, backward, **more):
    both = ("forward", forward), ("backward", backward)
    return [row(case, peer, direction, "graph", tflops, **more) for direction, tflops in both]


def page_of(rows):
    reorder = record.RESULTS / "reorder.csv", [{"ratio": "0.5", "gpu": "NVIDIA H100"}, {"ratio": "0.75"}]
    return attention_page.numbers(record.RESULTS / "attention_none.csv", rows, reorder)


def test_table_shows_speeds_wide_spreads_and_the_largest_rms():
    forward, backward = rows_of("1x16384", "ours", 700, 600)
    ms = float(backward["ms"])
    backward |= {"ms_p10": str(0.9 * ms), "ms_p90": str(1.1 * ms)}
    forward |= {"ms_p10": forward["ms"], "ms_p90": forward["ms"]}
    errors = [row("1x16384", "ours", result, record.ERRORS, rms=f"{n}e-3", largest="0.016")
              for n, result in enumerate(("out", "dk", "dq", "dv"), 1)]  # fmt: skip
    others = rows_of("64x256", "ours", 180, 170) + rows_of("64x256", "fa4", 90, 85)
    page = page_of([forward, backward, *errors, *others])
    assert "\n| 1x16384 | 700/600 ±10 % (4.00) | -/- |\n" in page
    assert "\n| 64x256 | 180/170 | 90.0/85.0 |\n" in page
    assert "\n| ours | 1.00, 1.6e-02 | 3.00, 1.6e-02 | 2.00, 1.6e-02 | 4.00, 1.6e-02 |\n" in page
    assert "driver 580, CUDA 13.0, sources abc, `benchmarks/bench_attention.py`." in page
    assert "runs at 0.50 to 0.75 of a plain copy" in page


def test_a_result_with_a_nan_is_no_missing_result():
    rms = {"out": "1e-3", "dk": "nan", "dq": "2e-3", "dv": "1e-3"}
    errors = [row("64x256", "ours", result, record.ERRORS, rms=rms[result], largest="1") for result in rms]
    assert "\n| 64x256 | 700/600 (nan) |" in page_of([*rows_of("64x256", "ours", 700, 600), *errors])


def test_ratios_name_their_extremes_and_who_is_ahead():
    speeds = {"1x16384": 600, "bucket32k": 500, "64x256": 85, "doc64k": 410}
    rows = [made for case, backward in speeds.items() for made in rows_of(case, "fa4", 400, backward)]
    rows += [made for case in speeds for made in rows_of(case, "ours", 400, 400)]
    page = page_of(rows)
    assert "fa4 backward in `1x16384`, `bucket32k` and `doc64k`." in " ".join(page.split())
    cells = next(line for line in page.splitlines() if line.startswith("| fa4 |")).split(" | ")
    assert cells[2] == "0.67 (`1x16384`) to 0.80 (`bucket32k`)"
    assert cells[4] == "0.98 (`doc64k`) to 4.71 (`64x256`) |"


def test_what_the_same_bits_and_unknown_lengths_cost_is_said_by_the_length_of_sequences():
    rows = rows_of("1x16384", "ours", 700, 600) + rows_of("1x16384", "deterministic", 700, 500)
    rows += rows_of("64x256", "ours", 700, 150) + rows_of("64x256", "deterministic", 700, 100)
    rows += rows_of("64x256", "gpu_lengths", 350, 120)
    page = " ".join(page_of(rows).split())
    assert "takes 1.20 (`1x16384`) times as long where" in page
    assert "and 1.50 (`64x256`) times as long where an average query sees fewer keys." in page
    assert "knows the lengths, forward takes 2.00 (`64x256`) and backward takes 1.25 (`64x256`) times as long." in page
    assert "| gpu_lengths" not in page


def test_how_long_the_host_is_busy_is_said_of_the_newest_kernels():
    rows = [made for case in ("1x16384", "64x256", "doc64k") for made in rows_of(case, "ours", 700, 600)]
    times = {"1x16384": (0.03, 0.2), "64x256": (0.05, 0.1), "doc64k": (9.0, 9.0)}
    rows += [row(case, "ours", what, "host", ms=str(ms)) for case, both in times.items()
             for what, ms in zip(("forward", "plan"), both, strict=True)]  # fmt: skip
    rows = [made | ({"kernel_sources": "xyz", "date": "2000-01-01"} if made["case"] == "doc64k" else {})
            for made in rows]  # fmt: skip
    page = " ".join(page_of(rows).split())
    assert "the host is busy with a forward for 30 to 50 µs and with a new plan for 100 to 200 µs." in page


def test_cases_of_older_kernels_have_a_star():
    old = [row | {"kernel_sources": "xyz", "date": "2000-01-01"} for row in rows_of("64x256", "ours", 180, 170)]
    page = page_of(rows_of("1x16384", "ours", 700, 600) + old)
    assert "\n| 64x256 \\* | 180/170" in page and "\n| 1x16384 | 700/600" in page
    assert "older kernels than the others." in page


def test_sustained_speeds_stand_beside_those_of_a_rested_gpu():
    rows = rows_of("1x16384", "ours", 700, 600) + rows_of("1x16384", "fa4", 600, 600)
    rows.append(row("1x16384", "ours", *record.SUSTAINED, 550))
    page = page_of(rows)
    forward, backward = CASES["1x16384"].flops
    together = (forward + backward) / (forward / 700 + backward / 600)
    assert f"\n| 1x16384 | 550/{together:.0f} | -/600 |" in page
    assert "without rest" not in page_of(rows[:-1])


def test_older_rows_without_the_columns_of_today_are_shown():
    path = record.results_file("attention", "NVIDIA H100 80GB HBM3")
    page = attention_page.numbers(path, record.load(path), record.newest("reorder"))
    assert "spread was not recorded" in page and "\n| 8192x34 | 26.5/25.6 | " in page and "nan" not in page


def test_newest_file_is_that_of_the_newest_row(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    for gpu, date in (("a", "2026-11-21T02:08:59+00:00"), ("b", "2026-11-22T01:00:00+00:00"), ("c", "2025-12-31")):
        rows = [{"date": "2024", "case": "x"}, {"date": date, "case": "y"}]
        record.save(tmp_path / f"attention_{gpu}.csv", rows, ("case",))
    path, rows = record.newest("attention")
    assert path.name == "attention_b.csv" and [made["case"] for made in rows] == ["x", "y"]


def test_statement_of_what_was_tested_names_every_gpu_and_cuda():
    entry = {"gpu": "NVIDIA H200", "driver": "580.1", "cuda_runtime": 13020}
    text = readme.tested({"1x": entry, "4x": entry, "other": entry | {"gpu": "NVIDIA A100", "cuda_runtime": 12080}})
    assert "A100 and H200 alone, with CUDA 12 and 13 and driver 580.1:" in text
    assert json.loads((record.RESULTS / "gpu_tests.json").read_text())


def test_spread_of_few_samples_is_their_range():
    assert record.spread([3.0, 1.0, 2.0]) == (1.0, 3.0)
    low, high = record.spread([float(n) for n in range(100)])
    assert math.isclose(low, 9.1) and math.isclose(high, 89.9)
    timed = record.timed([2.0, 1.0, 4.0], flops=4e9)
    assert timed == {"ms": "2.00000", "ms_p10": "1.00000", "ms_p90": "4.00000", "samples": "3", "tflops": "2.00"}


def test_headlines_say_the_pack_and_ours_over_others():
    rows = [made for case in headlines.PACKS for made in rows_of(case, "ours", 600, 600)]
    rows += rows_of("1x65536-w1024", "fa4", 500, 800) + rows_of("1x65536-w1024", "cudnn", 400, 900)
    page = headlines.attention(rows)
    windowed = "1x65536-w1024 | 1 x 65,536, window of 1,024 | 16/16 of 128"
    assert f"\n| {windowed} | -/- | -/- | -/- | 600/600 | 1.20/0.750 | 1.50/0.667 |" in page
    ahead = "as called: none of them; in graphs: fa4 backward in `1x65536-w1024`; cudnn backward in `1x65536-w1024`."
    assert ahead in " ".join(page.split())


def test_headlines_of_packs_say_lengths_mask_and_heads():
    assert headlines.described(CASES["bucket32k"]) == ["4, of 24,576 to 32,768", "16/16 of 128"]
    assert headlines.described(CASES["1x16384-full"]) == ["1 x 16,384, not causal", "16/16 of 128"]
    assert headlines.described(CASES["1x16384-d192v128"]) == ["1 x 16,384", "16/16 of 192 and 128"]


def test_headlines_of_the_model_are_the_steps_that_use_the_gpus_best():
    known = {"gpu": "NVIDIA H200", "accumulate": "1", "cp": "", "cuda_graph_impl": "none"}
    rows = [known | {"size": "1b", "ranks": ranks, "tokens": tokens, "tokens_per_s": "49653", "mfu": mfu}
            for ranks, tokens, mfu in (("1", "32768", "0.57"), ("1", "131072", "0.55"), ("2", "65536", "0.53"),
                                       ("4", "32768", "0.44"), ("4", "131072", "0.54"))]  # fmt: skip
    rows.append(rows[1] | {"tokens": "65536", "accumulate": "2", "tokens_per_s": "12800", "mfu": "0.5"})
    lines = headlines.bytelm(rows).splitlines()[2:]
    assert lines == ["| 1b | 1 | 32,768 | none | 49,653 | 57 % | - |", "| 1b | 2 | 65,536 | none | 49,653 | 53 % | - |",
                     "| 1b | 4 | 131,072 | none | 49,653 | 54 % | 0.25 |"]
