"""Communication between the ranks of a Mamba-2 mixer, its order, and the plans and arrays that a mixer takes."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cases import Exported
from mixer_cases import (
    BFLOAT16,
    CASES,
    FLOAT32,
    FLOAT64,
    SIZES,
    Case,
    assembled,
    assert_equal,
    on_rank,
    random_inputs,
    step,
    truth,
)

import thdattn
from thdattn.mamba import context_parallel, reference
from thdattn.mamba.oracle import Sizes
from thdattn.packing import PackedBatch

SINGLE = thdattn.comm.init("single")
MIXER = Case("mixer", (100, 3, 150), padded=(101, 3, 152))


def steps(comm, case=MIXER, dtype=FLOAT32, plan=None, wrap=lambda x: x):
    """Return mixer, plan, (out, dzxbcdt, *dweights), saved of one rank."""
    mixer = case.mixer(comm, dtype)
    plan = plan or mixer.plan(case.batch)
    zxbcdt, weights, dout = on_rank(plan, random_inputs(case, dtype))
    return mixer, plan, *step(mixer, plan, (wrap(zxbcdt), thdattn.Mamba2Weights(*map(wrap, weights)), wrap(dout)))


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT64], ids=str)
@pytest.mark.parametrize("cp_size", [2, 8])
@pytest.mark.parametrize("lengths", [(40,), (700, 1, 0, 300)], ids=str)
def test_one_state_and_the_rows_that_a_convolution_sees_travel_whatever_the_lengths(cp_size, dtype, lengths):
    heads, head_dim, state_dim, groups = SIZES
    channels = heads * head_dim + 2 * groups * state_dim
    number = np.promote_types(dtype, np.float32).itemsize
    summary = (heads * head_dim * state_dim + heads) * number

    def program(comm):
        case = Case("bytes", lengths)
        mixer = case.mixer(comm, dtype)
        plan = mixer.plan(case.batch)
        zxbcdt, weights, dout = on_rank(plan, random_inputs(case, dtype))
        _, saved = mixer.forward(zxbcdt, weights, plan)
        forward = comm.received_bytes
        mixer.backward(dout, saved)
        return forward, comm.received_bytes - forward

    for forward, backward in thdattn.comm.run_local(cp_size, program):
        assert forward == (cp_size - 1) * (3 * channels * dtype.itemsize + summary)
        assert backward == (cp_size - 1) * (3 * channels * number + summary)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_without_a_convolution_no_rows_travel_and_one_rank_sends_nothing(cp_size):
    def program(comm):
        steps(comm, CASES["no-convolution"], FLOAT64)
        return comm.received_bytes

    summary = (np.prod(SIZES[:3]) + SIZES[0]) * 8
    assert thdattn.comm.run_local(cp_size, program) == [2 * (cp_size - 1) * summary] * cp_size


# --- order -----------------------------------------------------------------------------------------------------------


def test_rows_of_own_sequences_go_while_states_travel(monkeypatch):
    """Ranks have 4 segments of 64 rows: sequences begin in rows 0; 20 and 80 of the next rank; 124 of the last."""
    case = Case("crossing", (256 + 20, 60, 176 + 124, 132))
    done: dict[int, list] = {}
    gather = context_parallel.gather
    monkeypatch.setattr(context_parallel, "AHEAD", 1)

    def note(*what):
        done.setdefault(threading.get_ident(), []).append(what)

    def noted_gather(comm, plan, name, send):
        note("gather", name)
        recv, wait = gather(comm, plan, name, send)
        return recv, lambda: (note("wait", name), wait())

    def noted(name, function):
        def run(*args):
            note(name, range(4)[next(x for x in args if isinstance(x, slice))])
            return function(*args)
        return run

    monkeypatch.setattr(context_parallel, "gather", noted_gather)
    for name in ("mixer_scan", "mixer_bwd"):
        monkeypatch.setattr(reference, name, noted(name, getattr(reference, name)))

    def program(comm):
        steps(comm, case, FLOAT64)
        return done[threading.get_ident()]

    def wanted(before, after, backward_before, backward_after):
        states, of_states, of_rows = "states", "gradients of states", "gradients of rows"
        return [("gather", "rows"), ("wait", "rows"),
                ("gather", states), ("mixer_scan", before), ("wait", states), ("mixer_scan", after),
                ("gather", of_states), ("mixer_bwd", backward_before), ("wait", of_states),
                ("mixer_bwd", backward_after), ("gather", of_rows), ("wait", of_rows)]

    first, second, third = thdattn.comm.run_local(3, program)
    assert first == wanted(range(4), range(0), range(0), range(4))
    assert second == wanted(range(3, 4), range(3), range(1), range(1, 4))
    assert third == wanted(range(3, 4), range(3), range(4), range(4, 4))


def test_nothing_waits_where_sequences_end_with_ranks():
    def program(comm):
        plan = MIXER.mixer(comm, FLOAT64).plan(PackedBatch.from_lengths([128, 70, 58, 128]))
        return tuple(context_parallel._turns(reference, plan, reverse)[1] for reverse in (False, True))

    assert thdattn.comm.run_local(3, program) == [(slice(0, 0), slice(2, 2))] * 3


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp_comm_type", ["all_gather", "a2a", "p2p"])
def test_layers_of_a_hybrid_model_share_the_plan_of_an_attention(cp_comm_type):
    def program(comm):
        attention = thdattn.CPAttention(comm, 4, 8, dtype="float64", cp_comm_type=cp_comm_type)
        plan = attention.plan(MIXER.batch, sharding="contiguous")
        x = np.ones((plan.local_rows, 4, 8))
        out, saved = attention.forward(x, x, x, plan)
        made = steps(comm, dtype=FLOAT64, plan=plan)[2]
        attention.backward(out, saved)
        return made

    assert_equal(assembled(MIXER, thdattn.comm.run_local(4, program)), truth(MIXER, FLOAT64), 1e-12)


def test_an_attention_takes_the_plan_of_a_mixer_with_its_head_dim():
    mixer = thdattn.Mamba2Mixer(SINGLE, 2, 8, 4, dtype="float32", engine="reference")
    attention = thdattn.CPAttention(SINGLE, 2, 8, dtype="float32")
    x = np.random.default_rng(0).standard_normal((9, 2, 8), np.float32)
    batch = PackedBatch([0, 4, 9])
    one, other = (attention.forward(x, x, x, maker.plan(batch))[0] for maker in (mixer, attention))
    np.testing.assert_array_equal(one, other)


def test_mixers_of_other_sizes_share_a_plan_and_keep_their_own_results():
    """All forwards before all backwards, as in a model."""
    cases = [Case(f"layer-{i}", MIXER.lengths, MIXER.padded, sizes=sizes, conv_width=width) for i, (sizes, width) in
             enumerate([(SIZES, 4), (SIZES, 4), (Sizes(2, 5, 3, 1), 2), (SIZES, 4)])]

    def program(comm):
        mixers = [case.mixer(comm, FLOAT64) for case in cases]
        plan = mixers[0].plan(MIXER.batch)
        forwards = []
        for case, mixer in zip(cases, mixers, strict=True):
            zxbcdt, weights, dout = on_rank(plan, random_inputs(case, FLOAT64))
            forwards.append((dout, *mixer.forward(zxbcdt, weights, plan)))
        made = []
        for mixer, (dout, out, saved) in zip(mixers, forwards, strict=True):
            dzxbcdt, dweights = mixer.backward(dout, saved)
            made.append((out, dzxbcdt, *dweights))
        return made

    ranks = thdattn.comm.run_local(3, program)
    for i, case in enumerate(cases):
        assert_equal(assembled(case, [made[i] for made in ranks]), truth(case, FLOAT64), 1e-12)


# --- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [Exported, np.asfortranarray], ids=["dlpack", "not-contiguous"])
def test_arrays_of_other_libraries_and_orders_are_read(wrap):
    _, _, made, _ = steps(SINGLE, dtype=FLOAT64, wrap=wrap)
    assert_equal(assembled(MIXER, [made]), truth(MIXER, FLOAT64), 1e-12)


def test_inputs_are_left_as_they_were_and_results_are_new():
    mixer = MIXER.mixer(SINGLE, FLOAT32)
    plan = mixer.plan(MIXER.batch)
    zxbcdt, weights, dout = random_inputs(MIXER, FLOAT32)
    inputs = [zxbcdt, *weights, dout]
    copies = [x.copy() for x in inputs]
    for x in inputs:
        x.setflags(write=False)
    made = []
    for _ in range(2):
        results, saved = step(mixer, plan, (zxbcdt, weights, dout))
        made += [*results, saved.kept.y, saved.kept.states]
    for x, copy in zip(inputs, copies, strict=True):
        assert x.tobytes() == copy.tobytes()
    for i, x in enumerate(made):
        assert not any(np.shares_memory(x, other) for other in [*made[:i], *inputs])
        np.testing.assert_array_equal(np.from_dlpack(x), x)


def test_backward_may_be_called_twice():
    mixer, plan, made, saved = steps(SINGLE)
    dout = plan.shard(random_inputs(MIXER, FLOAT32)[2])
    again = mixer.backward(dout, saved)
    for x, y in zip(made[1:], (again[0], *again[1]), strict=True):
        np.testing.assert_array_equal(x, y)
