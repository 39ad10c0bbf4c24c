"""Benchmarks without a GPU: operations of a case, packs, records, and a run on a fake GPU."""

from __future__ import annotations

from unittest.mock import Mock

import accuracy
import numpy as np
import pytest
import record
from workloads import CASES, PACK_TOKENS, Case, document_pack, lognormal_pack

import thdattn

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


def test_rows_round_trip_and_replace_only_their_own_measurement(tmp_path):
    path = tmp_path / "results" / "attention.csv"
    first = [row("a, b", "ours", "forward", "called", "1.5", "300"), row("a, b", "fa4", "forward", "called", "", "")]
    assert record.save(path, first, KEY) == first == record.load(path)
    others = [row("a, b", "ours", "forward", "called", "9", "50", gpu="A100")]
    record.save(path, others, KEY)
    again = [row("a, b", "ours", "forward", "called", "1.0", "450")]
    assert record.save(path, again, KEY) == [first[1], *others, *again] == record.load(path)
    newer = row("two", "ours", "forward", "called", "3", "4") | {"ms_p10": "2.5"}
    rows = record.save(path, [newer], KEY)
    assert rows == record.load(path) == [*(older | {"ms_p10": ""} for older in (first[1], *others, *again)), newer]
    assert np.isnan(record.Times(rows).value("ms_p10", "a, b", "ours", "forward", "called"))


def test_a_program_adds_rows_with_what_they_were_measured_on_and_shows_all(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(record, "provenance", lambda ranks: {"gpu": "H100", "ranks": str(ranks)})
    made = record.Recorder("attention", tmp_path / "a.csv", ("gpu", "case"), 2, {"transport": "peer"})
    made.add([{"case": "one"}])
    made.add([{"case": "two"}], writes=False)
    one, two = ({"gpu": "H100", "ranks": "2", "transport": "peer", "case": case} for case in ("one", "two"))
    assert record.load(tmp_path / "a.csv") == [one] and made.rows == [one, two]
    made.show(lambda rows: [f"{len(rows)} rows"])
    assert capsys.readouterr().out.startswith(f"2 rows\n\nwrote {tmp_path / 'a.csv'}; ")


def test_spread_of_few_samples_is_their_range():
    assert record.spread([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert record.spread([float(n) for n in range(100)]) == pytest.approx((9.1, 89.9))
    timed = record.timed([2.0, 1.0, 4.0], flops=4e9)
    assert timed == {"ms": "2.00000", "ms_p10": "1.00000", "ms_p90": "4.00000", "samples": "3", "tflops": "2.00"}


# --- errors ----------------------------------------------------------------------------------------------------


def test_errors_worked_by_hand():
    zeros = np.zeros(2)
    found = [np.array([3.0, 4.5]), np.array([np.nan, 1.0]), zeros, zeros]
    errors = accuracy.errors(found, [np.array([3.0, 4.0]), np.ones(2), zeros + 1, zeros + 2])
    assert errors["out"] == pytest.approx((0.1, 0.5))
    assert np.isnan(errors["dq"]).all()
    assert errors["dv"] == pytest.approx((1.0, 2.0))


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_small_versions_keep_widths_mask_and_group(case):
    small = accuracy.small(case)
    assert 1 <= small.total_tokens <= small.total_keys <= accuracy.ROWS and small.heads <= accuracy.HEADS
    assert small.heads * case.kv_heads == case.heads * small.kv_heads
    kept = "head_dim", "v_head_dim", "causal", "window"
    assert all(getattr(small, name) == getattr(case, name) for name in kept)
    assert small.total_keys > accuracy.ROWS // 2 or len(small.lengths) > 8
    assert isinstance(small.batch(), thdattn.PackedBatch)

# --- a run of bench_attention on a machine whose GPU is faked ----------------------------------------------------


class Clock:
    """Events of a GPU on which every replay takes `ms`."""

    def __init__(self, ms):
        self.ms, self.now = ms, 0.0

    def replay(self):
        self.now += self.ms

    def event(self):
        mark = Mock()
        mark.record = lambda stream: setattr(mark, "at", self.now)
        return mark


@pytest.fixture
def clock(monkeypatch):
    pytest.importorskip("cupy")
    import timing

    clock = Clock(20.0)
    monkeypatch.setattr(timing.cupy.cuda, "get_current_stream", Mock())
    monkeypatch.setattr(timing.cupy.cuda, "Event", clock.event)
    monkeypatch.setattr(timing.cupy.cuda, "get_elapsed_time", lambda start, stop: stop.at - start.at)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now / 1e3)
    monkeypatch.setattr(timing, "REST", 0.0)
    return clock


def test_times_of_a_graph_are_those_of_its_calls(clock):
    import timing

    assert timing.replayed(clock.replay, 4) == [5.0] * timing.REPLAYS
    assert clock.now == 20.0 * (1 + timing.REPLAYS), "the first replay is not timed"
    clock.now = 0.0
    assert timing.sustained(clock.replay, 4) == [5.0] * 75, "2 seconds of 20 ms, without the first quarter"
    assert clock.now == 2000.0


class FakePeer:
    """Peer with float64 results; a `clumsy` one cannot capture its backward alone."""

    factor, clumsy, logits = 1.0, False, ()

    def __init__(self, case, inputs):
        self.case, self.inputs, self.done = case, inputs, []

    @staticmethod
    def release():
        assert not FakePeer.graphs, "the memory of a captured graph may be among what is released"

    def forward(self):
        self.done.append("forward")

    def backward(self):
        self.done.append("backward")

    def capture(self, call, calls):
        FakePeer.graphs.append(self)
        self.done = []
        call()
        if self.clumsy and self.done == ["backward"]:
            raise RuntimeError("cannot be captured")
        return FakePeer.clock.replay

    def on_host(self):
        return [self.factor * x for x in accuracy.exact(self.case, self.inputs)]


class Inexact(FakePeer):
    factor, clumsy = 1.01, True


@pytest.fixture
def bench(clock, monkeypatch):
    import bench_attention

    def draw_inputs(case):
        rng = np.random.default_rng(0)
        widths = ((case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.v_head_dim),
                  (case.heads, case.v_head_dim))
        return [rng.standard_normal((case.total_tokens, *width)) for width in widths]

    FakePeer.clock, FakePeer.graphs = clock, []
    monkeypatch.setattr(bench_attention, "draw_inputs", draw_inputs)
    monkeypatch.setattr(bench_attention, "release_memory", FakePeer.release)
    monkeypatch.setattr(bench_attention, "cupy", np)
    monkeypatch.setattr(bench_attention.timing, "called", lambda call, calls: [call() or 3.0] * calls)
    return bench_attention


SMALL = Case("small", (5, 3), heads=2, kv_heads=1, head_dim=4, v_head_dim=4)


def test_a_run_has_a_row_for_all_that_was_asked_with_spread_and_errors(bench, capsys, monkeypatch):
    kinds = {"ours": FakePeer, "fa4": Inexact}
    interleaved = bench.timing.interleaved
    monkeypatch.setattr(bench.timing, "interleaved", lambda *args: (interleaved(*args), FakePeer.graphs.clear())[0])
    measured = bench.bench(SMALL, kinds, 2)
    rows = list(record.rows_of(SMALL.columns, measured, dict.fromkeys(kinds, "1")))
    times = record.Times(rows)
    assert times.value("samples", "small", "ours", "forward", "graph") == 4
    assert times.value("ms", "small", "fa4", "backward", "called") == 3.0
    assert times.value("tflops", "small", "ours", "backward", "called") == round(SMALL.flops.backward / 3.0 / 1e9, 2)
    for result in ("out", "dq", "dk", "dv"):
        assert times.value("rms", "small", "ours", result, record.ERRORS) == 0
        assert times.value("rms", "small", "fa4", result, record.ERRORS) == pytest.approx(0.01)
        assert times.value("largest", "small", "fa4", result, record.ERRORS) > 0.01
    assert "small fa4 backward graph: RuntimeError: cannot be captured" in capsys.readouterr().err
    blank = next(made for made in rows if tuple(made[x] for x in KEY[2:]) == ("fa4", "backward", "graph"))
    assert not {"ms", "tflops"} & set(blank), "it replaces what an older run measured"
