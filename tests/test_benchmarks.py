"""The benchmarks without a GPU: how much work a case is, what the packs are, and the record of measurements."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import record
from workloads import CASES, PACK_TOKENS, Case, document_pack, lognormal_pack

import thdattn

BENCHMARKS = Path(record.__file__).parent
KEY = ("gpu", "case", "peer", "direction", "timing")


def row(case, peer, direction, timing, ms, tflops, gpu="H100"):
    key = dict(zip(KEY, (gpu, case, peer, direction, timing), strict=True))
    return key | {"ms": ms, "tflops": tflops}


def test_flops_are_those_of_the_visible_pairs():
    # Causal, one back: 1 + 2 + 2 pairs; 2*(4 + 8) operations per pair and head; two heads.
    case = Case("by hand", (3,), heads=2, kv_heads=1, head_dim=4, v_head_dim=8, window=(1, 0))
    assert case.flops == thdattn.Flops(forward=5 * 2 * (4 + 8) * 2, backward=5 * 5 * (4 + 8) * 2)


@pytest.mark.parametrize("name", CASES)
def test_every_case_packs_into_its_tokens(name):
    case = CASES[name]
    assert case.name == name
    assert case.batch().total_rows == case.batch().total_tokens == case.total_tokens == sum(case.lengths)
    assert min(case.lengths) > 0 and case.heads % case.kv_heads == 0
    assert case.flops.forward > 0


@pytest.mark.parametrize(("draw", "shortest", "longest"), [(lognormal_pack, 16, 8192), (document_pack, 1, 16_384)])
def test_drawn_packs_are_the_same_every_time_and_nearly_full(draw, shortest, longest):
    lengths = draw(0)
    assert lengths == draw(0) != draw(1)
    assert shortest <= min(lengths) and max(lengths) <= longest
    assert PACK_TOKENS - longest < sum(lengths) <= PACK_TOKENS


def test_document_shares_sum_to_what_their_source_says():
    assert BENCHMARKS.joinpath("doc_lengths.csv").read_text().startswith("# Real document lengths")
    bins = np.loadtxt(BENCHMARKS / "doc_lengths.csv", delimiter=",", skiprows=2)
    assert bins[:, 2].sum() == pytest.approx(100.02)
    np.testing.assert_array_equal(bins[1:, 0], bins[:-1, 1] + 1)


def test_rows_round_trip_and_replace_only_their_own_measurement(tmp_path):
    path = tmp_path / "results" / "attention.csv"
    first = [row("a, b", "ours", "forward", "called", "1.5", "300"), row("a, b", "fa4", "forward", "called", "", "")]
    assert record.save(path, first, KEY) == first == record.load(path)
    other_gpu = [row("a, b", "ours", "forward", "called", "9", "50", gpu="A100")]
    record.save(path, other_gpu, KEY)
    again = [row("a, b", "ours", "forward", "called", "1.0", "450")]
    assert record.save(path, again, KEY) == [first[1], *other_gpu, *again] == record.load(path)


def test_results_file_names_the_gpu():
    assert record.results_file("attention", "NVIDIA H100 80GB HBM3").name == "attention_nvidia-h100-80gb-hbm3.csv"


def fake_rows():
    return [
        row("one", "ours", "forward", "called", "2", "300"),
        row("one", "ours", "backward", "called", "5", "250.4"),
        row("one", "ours", "forward", "graph", "2", "310"),
        row("one", "fa4", "forward", "called", "1", "600"),
        row("one", "fa4", "backward", "called", "", ""),
        row("one", "varlen", "forward", "graph", "4", "155"),
        row("one", "ours", "plan", "host_lengths", "1.234", ""),
        row("one", "ours", "plan", "device_lengths", "0.05", ""),
        row("one", "ours", "forward", "host", "0.0423", ""),
        row("two", "ours", "forward", "called", "0.1", "3.456"),
    ]


def test_table_shows_speeds_ratios_and_blanks():
    header, one, two = record.table(fake_rows()).splitlines()
    assert header.split()[:5] == ["case", "ours", "called", "ours", "graph"]
    assert one.split() == [
        "one", "300/250", "310/-", "0.50/-", "-/-", "-/-", "2.0/-", "1.2/0.050", "42.3",
    ]  # fmt: skip
    assert two.split()[:3] == ["two", "3.46/-", "-/-"]


def test_host_time_is_that_of_a_usual_call_and_not_the_mean(monkeypatch):
    pytest.importorskip("cupy")
    import timing

    now = [0.0]
    lengths = iter([1e-3, 9.0, 2e-3, 1.0, 3e-3, 2e-3])

    def call():
        now[0] += next(lengths)

    def rest(seconds):
        now[0] += seconds

    monkeypatch.setattr(timing, "HOST_CALLS", 3)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.time, "sleep", rest)
    monkeypatch.setattr(timing.cupy.cuda, "get_current_stream", Mock())
    assert timing.host(call, 2) == pytest.approx(2.5)


@pytest.mark.parametrize("name", ["ours", "deterministic"])
def test_only_the_deterministic_peer_asks_for_it(name, monkeypatch):
    pytest.importorskip("cupy")
    import peers

    monkeypatch.setattr(peers.cupy, "asarray", lambda x: x)
    case = Mock(batch=CASES["64x256"].batch)
    peers.PEERS[name](case, None)
    case.attention.assert_called_once_with("cuda", name == "deterministic")


def test_best_peer_ignores_blanks_and_our_own_other_ways():
    others = [row("one", peer, "forward", "graph", "1", "999") for peer in record.OWN]
    times = record.Times([*fake_rows(), *others])
    assert times.best_peer("one", "forward", "graph") == 155
    assert np.isnan(times.best_peer("two", "forward", "graph"))


def test_plot_is_written_for_whatever_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    record.plot(fake_rows(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_numbers_of_the_readme_are_those_of_the_results():
    page = (Path(record.__file__).parents[1] / "README.md").read_text()
    shown = page.split("<!-- numbers:begin -->\n")[1].split("\n<!-- numbers:end -->")[0]
    rows = record.load(record.results_file("attention", "NVIDIA H100 80GB HBM3"))
    assert len(rows) > 100
    assert shown == record.summary(rows)


def test_ratios_of_the_readme_are_those_of_the_reorder_results():
    rows = record.load(record.results_file("reorder", "NVIDIA H100 80GB HBM3"))
    ratios = [float(row["ratio"]) for row in rows]
    page = (Path(record.__file__).parents[1] / "README.md").read_text()
    assert f"at {min(ratios):.2f} to {max(ratios):.2f} of a plain" in " ".join(page.split())
