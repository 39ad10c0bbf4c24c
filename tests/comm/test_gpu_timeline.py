"""Timelines of GPUs: kernels of one GPU, replayed graphs, and what two GPUs exchange beside their kernels."""

from __future__ import annotations

import numpy as np
import pytest
from launch import RANKS, need_gpus, run_ranks

import thdattn
from thdattn import timeline
from thdattn.graphs import CudaGraphConfig, Graphs

pytestmark = pytest.mark.gpu


def step_of(cupy, comm, tokens=4096):
    """A function that computes forward and backward of one layer."""
    attn = thdattn.CPAttention(comm, 8, 128, 2, deterministic=True, engine="cuda")
    plan = attn.plan(thdattn.PackedBatch.from_lengths([tokens], multiple=2 * comm.size))
    rng = np.random.default_rng(comm.rank)
    q, k, v = (cupy.asarray(rng.standard_normal((plan.local_rows, heads, 128), np.float32).astype(attn.dtype))
               for heads in (8, 2, 2))

    def step():
        out, saved = attn.forward(q, k, v, plan)
        return out, *attn.backward(out, saved)

    return step


def test_kernels_of_a_step_follow_each_other_and_results_are_the_same(cupy):
    with thdattn.comm.init("single") as comm:
        step = step_of(cupy, comm)
        wanted = step()
        for _ in range(5):  # other tests may delay the host where it compares the clocks
            with timeline.record(comm) as found:
                results = step()
            if found.error < 1:
                break
    assert [x.tobytes() for x in results] == [x.tobytes() for x in wanted]
    assert {row[:2] for row in found.rows} == {(0, "compute")}
    names = [row.name for row in found.rows]
    assert all(name.startswith("thd_") and "<" not in name for name in names)
    forward, backward = (next(i for i, name in enumerate(names) if name.startswith(f"thd_attn_{way}"))
                         for way in ("fwd", "bwd"))
    assert forward < backward
    times = [time for row in found.rows for time in row[3:]]
    assert times == sorted(times) and found.rows[forward].end - found.rows[forward].begin > 0.01
    assert found.hidden is None and found.error < 1


def test_bars_take_as_long_as_the_step(cupy):
    with thdattn.comm.init("single") as comm:
        step = step_of(cupy, comm, 16384)
        step()
        with timeline.record(comm) as found:
            begin = cupy.cuda.get_current_stream().record()
            step()
            end = cupy.cuda.get_current_stream().record()
    whole = cupy.cuda.get_elapsed_time(begin, end)
    bars = sum(row.end - row.begin for row in found.rows)
    assert 0.8 * whole < bars <= 1.01 * whole


def test_simulated_ranks_on_one_gpu_have_bars_of_their_own(cupy):
    def program(comm):
        step = step_of(cupy, comm)
        step()
        with timeline.record(comm) as found:
            step()
        return found

    found, other = thdattn.comm.run_local(2, program)
    assert found.rows == other.rows
    names = [[row.name for row in found.rows if row.rank == rank] for rank in range(2)]
    assert names[0] == names[1] and {row.lane for row in found.rows} == {"compute", "exchange", "sum"}


def test_a_graph_has_one_bar_for_each_replay_and_none_for_its_capture(cupy):
    with thdattn.comm.init("single") as comm, Graphs(comm, CudaGraphConfig("full_iteration", warmup_steps=1)) as graphs:
        captured = graphs.captured(step_of(cupy, comm), "step")
        captured()
        with timeline.record(comm) as found:
            captured()  # captures and replays
            captured()
    assert [row[:3] for row in found.rows] == [(0, "compute", "replay of step")] * 2
    assert all(row.end - row.begin > 0.01 for row in found.rows)


def test_a_recording_cannot_begin_in_a_capture(cupy):
    stream = cupy.cuda.Stream(non_blocking=True)
    with thdattn.comm.init("single") as comm, stream:
        stream.begin_capture()
        try:
            with pytest.raises(ValueError, match="it captures a CUDA graph"), timeline.record(comm):
                pytest.fail("it began")
        finally:
            stream.end_capture()


@pytest.mark.parametrize("transport", ["peer", "nccl"])
def test_two_gpus_show_what_hides(cupy, tmp_path, transport):
    pytest.importorskip("matplotlib")
    need_gpus(cupy, 2)
    run = run_ranks(2, RANKS / "timeline_ranks.py", transport, str(tmp_path / "step.svg"), timeout=240)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(f"recorded on {transport}: 2 ranks, ") == 2
    assert (tmp_path / "step.svg").stat().st_size > 10_000
