"""The functions of the NumPy engine that a Mamba-2 mixer is made of, each by its contract."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from mixer_cases import CASES, FLOAT32, FLOAT64, SIZES, Case, random_inputs

import thdattn
from thdattn.mamba import context_parallel, reference
from thdattn.mamba.shape import Inputs, MixerShape

SINGLE = thdattn.comm.init("single")
SHAPE = MixerShape(*SIZES, 4, FLOAT64)
SMALL = MixerShape(1, 1, 1, 1, 4, FLOAT64)  # columns z, x, B, C, dt


def plans(lengths, cp_size, shape=SMALL):
    batch = thdattn.PackedBatch.from_lengths(lengths)
    return thdattn.comm.run_local(
        cp_size, lambda comm: thdattn.Mamba2Mixer(comm, *shape[:5], shape.dtype, engine="reference").plan(batch))


def test_halo_is_the_rows_in_front_even_of_ranks_with_fewer_rows():
    rows = np.arange(8.0)[:, None] + np.array([0, 100, 200, 300, 0])
    made = plans([8], 4)
    tails = np.concatenate([reference.mixer_tail(rows[2 * r : 2 * r + 2], plan, SMALL) for r, plan in enumerate(made)])
    assert tails[:, 0].tolist() == [0, 100, 101, 0, 102, 103, 0, 104, 105, 0, 106, 107]
    halos = [reference.mixer_halo(tails, plan, SMALL).tolist() for plan in made]
    assert halos[1][1:] == [[100, 200, 300], [101, 201, 301]]
    assert halos[2] == [[x + 100, x + 200, x + 300] for x in (1, 2, 3)]
    assert halos[3] == [[x + 100, x + 200, x + 300] for x in (3, 4, 5)]


def test_gradients_of_halos_go_to_their_rows():
    # Ranks of 2 rows: rank 1 has the rows 1 and 2 of rank 2's halo, and row 0 of rank 3's.
    halos = np.arange(12.0)[:, None] * np.ones(3)
    tail = np.array([[0.0], [1000], [2000]]) * np.ones(3)
    dzxbcdt = np.full((2, 5), np.nan)
    reference.mixer_add_halos(halos, tail, plans([8], 4)[1], SMALL, dzxbcdt)
    assert dzxbcdt[:, 1].tolist() == [1000 + 7, 2000 + 8 + 9]
    assert np.isnan(dzxbcdt[:, [0, 4]]).all(), "z and dt are left"


def test_activations_are_0_on_padding():
    case = CASES["empty-between"]
    plan = case.mixer(SINGLE, FLOAT64).plan(case.batch)
    zxbcdt, weights, _ = random_inputs(case, FLOAT64)
    zxbcdt[~case.valid] = np.nan
    act = reference.mixer_conv(Inputs(zxbcdt, weights, plan, SHAPE, reference.mixer_tail(zxbcdt, plan, SHAPE)))
    for x in act[:3]:  # NumPy has no `leave`
        assert not x[~case.valid].any() and x[case.valid].all()


def act_of(case, dtype=FLOAT64):
    plan = case.mixer(SINGLE, dtype).plan(case.batch)
    zxbcdt, weights, _ = random_inputs(case, dtype)
    return reference.mixer_conv(Inputs(zxbcdt, weights, plan, SHAPE, zxbcdt[:3, 12:44])), plan


def test_a_summary_says_what_is_behind_all_rows_and_what_is_left_of_what_was_in_front():
    """150 rows that continue a sequence have three segments, the last one not full."""
    batch = thdattn.PackedBatch.from_lengths([300])
    plan = thdattn.comm.run_local(2, lambda comm: Case("", ()).mixer(comm, FLOAT64).plan(batch))[1]
    zxbcdt, weights, _ = random_inputs(Case("summary", (150,)), FLOAT64)
    act = reference.mixer_conv(Inputs(zxbcdt, weights, plan, SHAPE, zxbcdt[:3, 12:44]))
    x, b, _ = SHAPE.split(act.channels)
    a = -np.exp(weights.A_log) * act.dt
    behind = a[::-1].cumsum(axis=0)[::-1] - a
    wanted = np.einsum("th,thp,thn->hpn", np.exp(behind) * act.dt, x, np.repeat(b, 2, axis=1))
    summary = reference.mixer_fold(*reference.mixer_states(act, plan, SHAPE), plan, SHAPE)
    assert summary.shape == (1, SHAPE.summary)
    np.testing.assert_allclose(summary[0, :-4], wanted.ravel(), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(summary[0, -4:], np.exp(a.sum(axis=0)), rtol=1e-12)


@pytest.mark.parametrize("reverse", [False, True])
def test_entering_later_is_folding_from_there(reverse):
    rng = np.random.default_rng(0)
    own, decays, start = (rng.standard_normal(x) for x in ((5, *SHAPE.state), (5, 4), SHAPE.state))
    folded, (plan,) = own.copy(), plans([8], 1)
    reference.mixer_fold(folded, decays, plan, SHAPE, reverse=reverse)
    reference.mixer_enter(folded, decays, start, slice(0, 5), reverse=reverse)
    state = start
    for segment in reversed(range(5)) if reverse else range(5):
        np.testing.assert_allclose(folded[segment], state, rtol=1e-12, atol=1e-14)
        state = decays[segment][:, None, None] * state + own[segment]


def test_a_rank_adds_up_the_ranks_in_front_of_it_or_behind():
    summaries = np.array([[1.0, 0.5], [10.0, 0.25], [100.0, 0.0], [1000.0, 2.0]])
    made = plans([8], 4)
    starts = [reference.mixer_start(summaries, plan, SMALL).item() for plan in made]
    assert starts == [0, 1, 0.25 + 10, 100]
    starts = [reference.mixer_start(summaries, plan, SMALL, reverse=True).item() for plan in made]
    assert starts == [10 + 0.25 * 100, 100, 1000, 0]


def test_a_sequence_that_begins_leaves_nothing_of_the_state_in_front():
    act, plan = act_of(Case("begin", (100, 30, 60)))
    _, decays = reference.mixer_states(act, plan, SHAPE)
    assert not decays.any(), "sequences begin in rows 0, 100 and 130, and segments in rows 0, 64 and 128"
    act, plan = act_of(Case("begin", (100, 150)))
    _, decays = reference.mixer_states(act, plan, SHAPE)
    assert not decays[:2].any() and decays[2:].all()


def test_all_segments_wait_where_lengths_lie_on_a_gpu():
    plan = SimpleNamespace(local_rows=130, cp_rank=1, cp_size=3, batch=SimpleNamespace(on_device=True))
    assert context_parallel._waiting(reference, plan) == (slice(0, 3), slice(0, 3))


def test_sums_start_anew_with_chunks_and_sequences():
    act, _ = act_of(Case("sums", (100, 30)), FLOAT32)
    weights = random_inputs(Case("sums", (100, 30)), FLOAT32)[1]
    a = -np.exp(weights.A_log) * act.dt
    for begin, end in ((0, 64), (64, 100), (100, 128), (128, 130)):
        np.testing.assert_allclose(act.sums[begin:end], a[begin:end].cumsum(axis=0), rtol=1e-6)
