"""Timelines on the host: bars of known programs, the share that is hidden, clocks of ranks, errors and the picture."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace

import mixer_cases
import numpy as np
import pytest
from cases import Case, inputs_of, step
from launch import run_ranks
from ways import TELLING, Way, attention

import thdattn
from thdattn import spans, timeline
from thdattn.__main__ import main
from thdattn.comm import Levels, base
from thdattn.timeline import Row, Timeline, common, length, merged

CASE = Case("documents", (70, 3, 33, 0, 50))


def recorded(way):
    """The timeline of a step, on every rank."""
    case = replace(CASE, heads=way.heads, dims=(12, 8))

    def program(comm):
        layer = attention(case, way, comm, "float32", engine="reference", keep_keys=False)
        plan = layer.plan(way.batch(case), way.sharding)
        with timeline.record(comm) as found:
            assert found.rows == []
            step(layer, plan, inputs_of(case, plan, "float32"))
        step(layer, plan, inputs_of(case, plan, "float32"))
        return found

    return thdattn.comm.run_local(way.cp_size, program)


def test_a_step_of_all_gather_has_the_bars_of_its_calls():
    found, *others = recorded(Way("all_gather", "dual_chunk", 3))
    gathers = [("exchange", "all_gather")] * 2 + [("compute", "to_sequence_order")]
    sums = [("compute", "to_rank_order"), *[("sum", "reduce_scatter")] * 2]
    wanted = [*gathers, ("compute", "attn_fwd"), ("sum", "all_reduce"), *gathers, ("compute", "attn_bwd"), *sums]
    for rank in range(3):
        assert [row[1:3] for row in found.rows if row.rank == rank] == wanted
    assert all(other.rows == found.rows for other in others)


@pytest.mark.parametrize("way", TELLING, ids=str)
def test_bars_of_a_rank_follow_each_other_and_a_collective_begins_everywhere_before_it_ends_anywhere(way):
    found = recorded(way)[0]
    assert min(row.begin for row in found.rows) == 0
    for rank in range(way.cp_size):
        rows = [row for row in found.rows if row.rank == rank]
        assert {row.lane for row in rows} >= {"compute", "exchange"}
        times = [moment for row in rows for moment in row[3:]]
        assert times == sorted(times)
    for same in zip(*([row for row in found.rows if (row.rank, row.name) == (rank, "all_gather")]
                      for rank in range(way.cp_size)), strict=True):
        if way.inner is None:
            assert max(row.begin for row in same) <= min(row.end for row in same) + found.error
    assert found.hidden == 0, "the host does one thing after another"


def test_the_functions_of_a_mixer_have_bars():
    case = mixer_cases.CASES["over-all-ranks"]

    def program(comm):
        inputs = mixer_cases.random_inputs(case, "float32")
        with timeline.record(comm) as found:
            mixer_cases.run_rank(case, comm, "float32", inputs)
        return found

    found = thdattn.comm.run_local(2, program)[0]
    for rank in range(2):
        names = {row.name for row in found.rows if (row.rank, row.lane) == (rank, "compute")}
        assert names >= {"mixer_conv_states", "mixer_fold", "mixer_scan", "mixer_bwd", "mixer_conv_bwd"}


def made(rows, ranks=1):
    """A timeline of these (rank, lane, begin, end)."""
    def program(comm):
        found = Timeline(comm)
        found.rows = [Row(rank, lane, "name", begin, end) for rank, lane, begin, end in rows]
        return found

    return thdattn.comm.run_local(ranks, program)[0]


@pytest.mark.parametrize(("rows", "hidden"), [
    ([(0, "exchange", 0, 4), (0, "compute", 1, 2), (0, "compute", 1.5, 3)], 2 / 4),
    ([(0, "exchange", 0, 2), (0, "sum", 1, 3), (0, "compute", 2, 9)], 1 / 3),
    ([(0, "sum", 5, 6), (0, "exchange", 0, 1), (0, "compute", 0, 6)], 1),
    ([(0, "exchange", 0, 1), (0, "compute", 1, 2)], 0),
    ([(0, "exchange", 0, 1), (1, "compute", 0, 1)], 0),
    ([(0, "exchange", 0, 3), (0, "compute", 0, 9), (1, "exchange", 0, 1)], 3 / 4),
    ([(0, "compute", 0, 1)], None),
    ([], None),
])
def test_hidden_is_the_share_of_communication_in_which_the_same_rank_computes(rows, hidden):
    found = made(rows, ranks=2)
    assert found.hidden == hidden
    assert ("no communication" if hidden is None else f"{100 * hidden:.0f} % of communication is hidden") in str(found)
    assert f" {max([end for *_, end in rows], default=0):.2f} ms" in str(found)


def test_sets_of_times_are_those_of_their_points():
    rng = np.random.default_rng(0)

    def points(some):
        return {x for begin, end in some for x in range(begin, end)}

    for _ in range(300):
        one, other = ([tuple(sorted(pair)) for pair in rng.integers(0, 30, (rng.integers(5), 2)).tolist()]
                      for _ in range(2))
        sets = [merged(some) for some in (one, other)]
        assert [points(some) for some in sets] == [points(one), points(other)]
        assert all(a[1] < b[0] for some in sets for a, b in itertools.pairwise(some))
        assert points(common(*sets)) == points(one) & points(other)
        assert length(common(*sets)) == len(points(one) & points(other))


def test_clocks_that_began_at_any_time_are_aligned_by_the_shortest_barrier():
    def of(zero, waits, *bars):
        meetings = [(zero + 10 * i - wait, zero + 10 * i) for i, wait in enumerate(waits)]
        return timeline._Recording(meetings, 0.001, [("compute", "name", zero + b, zero + e) for b, e in bars])

    found = made([])
    timeline._fill(found, [of(1000, (3, 0.25, 2), (50, 51), (52, 53)), of(-7, (0.125, 0.5, 4), (51, 54))])
    assert [(row.rank, row.begin, row.end) for row in found.rows] == [(0, 0, 1000), (0, 2000, 3000), (1, 1000, 4000)]
    assert found.error == 1000 * (0.5 + 2 * 0.001)


def test_nothing_is_recorded_outside_of_a_block(monkeypatch):
    def program(comm):
        with timeline.record(comm) as found:
            pass
        comm.all_reduce(np.ones(3), "sum")
        assert not spans.active and comm.watched("anything") is base._UNWATCHED
        return found.rows

    monkeypatch.setattr(spans.Recorder, "span", lambda *arguments: pytest.fail("a span"))
    assert thdattn.comm.run_local(1, program) == [[]]


def test_a_collective_of_two_levels_is_one_bar():
    def program(comm):
        levels = Levels(comm.split(comm.rank // 2), comm.split(comm.rank % 2))
        with timeline.record(levels) as found:
            levels.all_reduce(np.ones(3), "max")
        return [row[:3] for row in found.rows]

    assert thdattn.comm.run_local(4, program)[0] == [(rank, "sum", "all_reduce") for rank in range(4)]


def test_work_of_others_computes_in_a_block_of_its_own():
    def program(comm):
        with timeline.computing("nothing"), timeline.record(comm) as found, timeline.computing("projection"):
            time.sleep(0.002)
        return found.rows

    (row,) = thdattn.comm.run_local(1, program)[0]
    assert row[:3] == (0, "compute", "projection") and row.end - row.begin >= 2


def test_all_threads_of_a_process_that_is_one_rank_are_recorded():
    with thdattn.comm.init("single") as comm, timeline.record(comm) as found:
        worker = threading.Thread(target=lambda: comm.all_reduce(np.ones(1), "sum"))
        worker.start()
        worker.join()
    assert [row[:3] for row in found.rows] == [(0, "sum", "all_reduce")]


def test_a_rank_that_records_already_is_an_error_on_all_ranks():
    def program(comm):
        alone = comm.split(comm.rank)
        refused = pytest.raises(ValueError, match=r"^rank 0: it records already, wanted one .*; end the first one$")
        with timeline.record(alone) if comm.rank == 0 else nullcontext(), refused, timeline.record(comm):
            pytest.fail("it began")

    thdattn.comm.run_local(2, program)


def test_an_error_in_a_block_ends_the_recording_alone():
    def program(comm):
        with pytest.raises(KeyError), timeline.record(comm) as found:
            comm.all_reduce(np.ones(1), "sum")
            raise KeyError
        assert not spans.active.keys() & {threading.get_ident()}
        comm.barrier()
        return found.rows

    assert thdattn.comm.run_local(2, program) == [[], []]


def test_a_rank_that_left_the_block_by_an_error_is_noticed():
    def program(comm):
        try:
            with timeline.record(comm):
                if comm.rank:
                    raise KeyError
        except KeyError:
            comm.agree("something else", 0)

    with pytest.raises(ValueError, match="different calls: rank 0: the end of a timeline; rank 1: something"):
        thdattn.comm.run_local(2, program)


def test_a_clock_that_fails_on_one_rank_raises_on_all():
    def program(comm):
        failed = pytest.raises(RuntimeError, match="the recording of a timeline failed on rank 1: ZeroDivisionError")
        with failed, timeline.record(comm):
            if comm.rank == 1:
                spans.active[threading.get_ident()].spans = lambda: 1 / 0

    thdattn.comm.run_local(2, program)


# --- the picture ------------------------------------------------------------------------------------------------


def test_the_picture_names_ranks_and_wide_bars(tmp_path, monkeypatch):
    monkeypatch.setitem(pytest.importorskip("matplotlib").rcParams, "svg.fonttype", "none")
    from thdattn.timeline import picture

    rows = [(0, "compute", 0, 5), (0, "exchange", 1, 7), (1, "compute", 2, 2.001), (1, "sum", 0, 9)]

    def program(comm):
        found = Timeline(comm)
        found.rows = [Row(rank, lane, f"thd_{lane}_of_{rank}<x> (more)", *times) for rank, lane, *times in rows]
        found.save(tmp_path / "step.svg")
        return str(found)

    said, _ = thdattn.comm.run_local(2, program)
    text = (tmp_path / "step.svg").read_text()
    wanted = (said, "rank 0", "rank 1", "compute_of_0", "exchange_of_0", "sum_of_1", "exchange, hidden")
    assert all(f">{each}" in text for each in wanted)
    assert "compute_of_1" not in text and "more" not in text
    for colour in picture.PALE.values():
        assert text.count(f"fill: {colour}") == 2, "of the legend, and of the hidden part"


@pytest.mark.parametrize("name", ["nowhere/step.svg", "step.abc"])
def test_a_picture_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path, name):
    pytest.importorskip("matplotlib")

    def program(comm):
        with pytest.raises(ValueError, match=r"rank 0: path is .*, which cannot be written \(.*; pass one such as"):
            Timeline(comm).save(tmp_path / name)

    thdattn.comm.run_local(2, program)


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "thdattn.timeline.picture", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    def program(comm):
        with pytest.raises(ValueError, match=r"rank 0: a picture needs Matplotlib .*pip install .*\[examples\]"):
            Timeline(comm).save(tmp_path / "step.svg")

    thdattn.comm.run_local(2, program)
    assert not list(tmp_path.iterdir())


# --- the command ------------------------------------------------------------------------------------------------

SMALL = ("--lengths", "64,3x16", "--heads", "4", "--head-dim", "8", "--engine", "reference")


@pytest.mark.parametrize("method", ["all_gather", "p2p", "a2a", "a2a+all_gather", "a2a+p2p"])
def test_the_command_draws_simulated_ranks(tmp_path, capsys, method):
    pytest.importorskip("matplotlib")
    assert main(["timeline", *SMALL, "--method", method, "--output", str(tmp_path / "step.png")]) == 0
    said, wrote = capsys.readouterr().out.splitlines()
    assert said.startswith("4 ranks, ") and "of communication is hidden" in said
    assert wrote == f"wrote {tmp_path / 'step.png'}"
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("arguments", "message"), [
    (("--output", "nowhere/step.svg"), "rank 0: --output is nowhere/step.svg, wanted a file in a folder that exists"),
    (("--output", "step.abc"), "rank 0: --output is step.abc, wanted a name that ends in"),
    (("--lengths", "many"), "--lengths has 'many', wanted lengths"),
    (("--heads", "3", "--kv-heads", "2"), "num_heads is 3, not a multiple of num_kv_heads = 2"),
    (("--method", "a2a+p2p", "--gpus-per-node", "3"), "--gpus-per-node is 3, wanted a divisor of the 4 ranks"),
    (("--sharding", "balanced", "--method", "a2a"), "sharding"),
    (("--ranks", "0"), "--ranks is 0, wanted >= 1"),
])
def test_what_the_command_cannot_use_is_one_line(capsys, arguments, message):
    pytest.importorskip("matplotlib")
    assert main(["timeline", *SMALL, *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m thdattn timeline: error: ") and message in said and said.count("\n") == 1


def test_the_command_records_the_ranks_of_mpiexec(tmp_path):
    pytest.importorskip("matplotlib")
    run = run_ranks(2, "-m", "thdattn", "timeline", *SMALL, "--output", str(tmp_path / "step.svg"), python=())
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("2 ranks, ") and run.stdout.count("\n") == 2
    assert "rank 0" in (tmp_path / "step.svg").read_text()
