"""The ring over simulated ranks against the oracle; what it merges, sends and keeps."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import (
    BFLOAT16,
    CASES,
    DIMS,
    FIELDS,
    SMALL,
    assemble,
    check,
    gpu_only,
    local_rows,
    offsets,
    on_engines,
    random_inputs,
    run,
    to_host,
)

import thdattn
from thdattn import oracle
from thdattn.engines import AttentionOptions, BackwardInputs, BackwardOutputs, ForwardInputs, ForwardOutputs, reference
from thdattn.kernels.configs import TILES
from thdattn.methods import p2p
from thdattn.methods.base import MethodOptions
from thdattn.plan.memory import Layer

FLOAT64, FLOAT32, FLOAT16 = map(np.dtype, ("float64", "float32", "float16"))
RING_SIZES = (1, 2, 3, 4, 8)


def ring_forward(comm, plan, q, k, v, scale, max_logit):
    return p2p.forward(comm, ForwardInputs(q, k, v, plan), MethodOptions(AttentionOptions(scale)), max_logit)[:3]


def ring_backward(comm, inputs, scale, deterministic):
    options = MethodOptions(AttentionOptions(scale, deterministic=deterministic))
    dq, dk_dv = p2p.backward(comm, inputs, options, None, True)
    return dq, *dk_dv()


@on_engines(SMALL, reference=[FLOAT64, BFLOAT16], cuda=[FLOAT16, BFLOAT16], portable=[BFLOAT16], cp_sizes=(2, 8),
            seldom=(8,))
def test_every_pack_and_mask_is_the_oracle(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype, cp_comm_type="p2p")


@on_engines(SMALL, reference=[FLOAT64, FLOAT32], cp_sizes=(4,))
def test_other_dtypes_and_ranks_err_no_more_than_plain_attention(engine, case, dtype, cp_size):
    engine.check(case, cp_size, dtype, cp_comm_type="p2p")


def test_values_wider_than_keys():
    case = replace(CASES["window-causal"], dims=(6, 10), heads=(6, 2))
    check(case, FLOAT64, run(case, 4, FLOAT64, engine="reference", cp_comm_type="p2p"))


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32], ids=str)
@pytest.mark.parametrize("cp_size", [2, 8])
def test_logits_of_80_of_both_signs(cp_size, dtype):
    """Slices of a row differ by up to e**160, more than float32 holds."""
    case = replace(CASES["full"].slim(), heads=(1, 1))
    batch, (q, k, v, dout) = case.batch(cp_size), random_inputs(case, dtype)
    # Every key is all +1 or all -1, sequence after sequence in runs: whole slices are at -80.
    signs = np.where(np.arange(len(k)) // 50 % 2, 1, -1).astype(dtype)
    q[...], k[...] = 1, signs[:, None, None]
    scale = 80 / q.shape[2]

    def program(comm):
        attention = case.attention(comm, dtype, engine="reference", softmax_scale=scale, cp_comm_type="p2p")
        plan = attention.plan(batch)
        *qkv, its_dout = (local_rows(batch, plan.rows, x, np.nan) for x in (q, k, v, dout))
        out, saved = attention.forward(*qkv, plan, return_max_logit=True)
        arrays = out, saved.lse, saved.max_logit, *attention.backward(its_dout, saved)
        return dict(zip(FIELDS, arrays, strict=True))

    wanted = oracle.packed_attention(
        thdattn.PackedBatch(offsets(case.lengths)), *(x.astype(FLOAT64) for x in (q, k, v, dout)), causal=False,
        softmax_scale=scale)
    outcome = assemble(thdattn.Sharding(batch, cp_size), thdattn.comm.run_local(cp_size, program))
    assert {wanted.max_logit[0], wanted.lse.min() < -70} == {80.0, True}
    error = 1e-10 if dtype == FLOAT64 else 1e-4
    for field in FIELDS:
        np.testing.assert_allclose(
            outcome.tokens[field], getattr(wanted, field), rtol=error, atol=error, err_msg=field)


# --- merging ---------------------------------------------------------------------------------------------------


def merged(ranges: list[list[tuple[int, int]]]) -> tuple[Any, Any]:
    """out and lse of two rows over ranges of 8 keys, given to the engine one list after another."""
    draw = np.random.default_rng(3)
    q, k, v = (draw.standard_normal((rows, 2, 4)) for rows in (2, 8, 8))
    out, lse = np.zeros((2, 2, 4)), np.full((2, 2), -np.inf)
    for each in ranges:
        plan = type("Ranges", (), {"key_ranges": np.array(each, np.int32), "has_trees": False})
        reference.attn_fwd(
            ForwardInputs(q, k, v, plan), AttentionOptions(0.7), ForwardOutputs((out, lse), accumulate=True))
    return out, lse


def test_keys_in_two_parts_are_the_keys_at_once():
    whole, parts = merged([[(0, 8), (2, 6)]]), merged([[(0, 3), (2, 5)], [(3, 8), (5, 6)]])
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-13)


def test_rows_that_see_nothing_stay_as_they_are():
    out, lse = merged([[(0, 3), (0, 0)], [(0, 0), (0, 0)]])
    first, first_lse = merged([[(0, 3), (0, 0)]])
    assert out.tobytes() == first.tobytes() and lse.tobytes() == first_lse.tobytes()
    assert not out[1].any() and (lse[:, 1] == -np.inf).all()


# --- what travels ----------------------------------------------------------------------------------------------


class Recorder:
    """An engine or a comm whose calls are written down, in the order in which they are made."""

    def __init__(self, target: Any, names: dict[str, str], record: list[str]) -> None:
        self._target, self._names, self._record = target, names, record

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            self._record.append(self._names[name])
        return getattr(self._target, name)


def test_what_an_attention_hides_is_sent_before_it():
    case = CASES["causal"].slim()
    batch = case.batch(3)

    def program(comm):
        plan = case.attention(comm, FLOAT32, engine="reference").plan(batch)
        q, k, v, dout = (local_rows(batch, plan.rows, x, 0) for x in random_inputs(case, FLOAT32))
        record = []
        plan = replace(plan, engine=Recorder(reference, {"attn_fwd": "attention", "attn_bwd": "attention"}, record))
        ring = Recorder(comm, {"exchange": "send"}, record)
        out, lse, _ = ring_forward(ring, plan, q, k, v, 1.0, False)
        forward, record[:] = list(record), []
        ring_backward(ring, BackwardInputs(dout, q, k, v, out, lse, plan), 1.0, False)
        return forward, record

    for forward, backward in thdattn.comm.run_local(3, program):
        assert forward == ["send", "attention", "send", "attention", "attention"]
        # The first hop of keys hides behind nothing; the last of the sums behind the attention over the own slice.
        assert backward == ["send", "send", "attention", "send", "attention", "send", "attention"]


# --- memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two-of-eight", "edge-lengths"])
@pytest.mark.parametrize("cp_size", RING_SIZES)
def test_memory_says_what_calls_make(name, cp_size):
    case = replace(CASES[name], heads=(6, 2), dims=(4, 8))
    batch = case.batch(cp_size)

    def program(comm):
        attention = case.attention(comm, BFLOAT16, engine="reference")
        plan = attention.plan(batch)
        layer = Layer(*case.heads, BFLOAT16, False, (2,), False)
        said = p2p.memory(comm, replace(plan, arrays=thdattn.plan.plan.NO_ARRAYS), layer)
        q, k, v, dout = (local_rows(batch, plan.rows, x, 0) for x in random_inputs(case, BFLOAT16))
        out, lse, _ = ring_forward(comm, plan, q, k, v, 1.0, False)
        forward = plan.held_bytes()
        gradients = ring_backward(comm, BackwardInputs(dout, q, k, v, out, lse, plan), 1.0, False)
        made = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
        assert said.saved == {name: x.nbytes for name, x in made.items()}
        assert said.grads == {name: x.nbytes for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)}
        assert sum(said.forward.values()) - said.forward["plan"] == forward
        assert sum(said.backward.values()) == plan.held_bytes() - forward

    thdattn.comm.run_local(cp_size, program)


def test_a_ring_of_eight_takes_a_third_of_the_all_gather():
    batch = thdattn.PackedBatch([0, 65536])

    def program(comm):
        attention = thdattn.CPAttention(comm, 32, 128, 8, engine="reference", head_groups=1)
        plan = replace(attention.plan(batch), arrays=thdattn.plan.plan.NO_ARRAYS)
        ring = p2p.memory(comm, plan, Layer(32, 8, BFLOAT16, False, (8,), False))
        return attention.memory(batch), ring

    for gathered, ring in thdattn.comm.run_local(8, program):
        assert ring.work < gathered.work / 3


# --- on a GPU alone --------------------------------------------------------------------------------------------


@gpu_only
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", TILES, ids=str)
def test_engine_merges_with_what_is_there(cupy, dims, deterministic):
    """Other keys gave each row something known: what these keys give is what the call alone gives, by their shares."""
    cuda = importlib.import_module("thdattn.engines.cuda")
    case = replace(DIMS[0], dims=dims)
    attention = case.attention(thdattn.comm.init("single"), BFLOAT16, engine="cuda")
    plan = attention.plan(case.batch(1))
    rows, heads, kv_heads = plan.local_rows, *case.heads
    draw = np.random.default_rng(5)

    def random(*shape):
        return cupy.asarray(draw.standard_normal(shape).astype(BFLOAT16))

    q, k, v, dout = (random(rows, n, width) for n, width in zip(
        (heads, kv_heads, kv_heads, heads), (*dims[:1] * 2, *dims[1:] * 2), strict=True))
    options = AttentionOptions(0.1, deterministic=deterministic)
    alone, lse, _ = cuda.attn_fwd(ForwardInputs(q, k, v, plan), options)
    others, others_lse = draw.standard_normal(alone.shape), 3 * draw.standard_normal(lse.shape)
    others[::3], others_lse[:, ::3] = 0, -np.inf  # those that have seen nothing yet
    into = cupy.asarray(others.astype(np.float32)), cupy.asarray(others_lse.astype(np.float32))
    cuda.attn_fwd(ForwardInputs(q, k, v, plan), options, ForwardOutputs(into, accumulate=True))
    mine, mine_lse = to_host(alone).astype(np.float64), to_host(lse).astype(np.float64)
    both = np.logaddexp(mine_lse, others_lse)
    with np.errstate(invalid="ignore"):
        parts = [np.nan_to_num(np.exp(x_lse - both)).T[..., None] * x
                 for x_lse, x in ((mine_lse, mine), (others_lse, others))]
    np.testing.assert_allclose(to_host(into[1]), both, rtol=1e-5, atol=1e-5)
    rounded = 2**-8 * np.abs(parts[0])  # alone was, to bfloat16
    assert (np.abs(to_host(into[0]) - sum(parts)) <= rounded + 1e-5 * (1 + np.abs(others))).all()
    assert (np.isneginf(both).any(), (~np.isneginf(mine_lse) & np.isneginf(others_lse)).any()) == (True, True)

    inputs = BackwardInputs(dout, q, k, v, alone, lse, plan)
    dq = cuda.attn_bwd(inputs, options, BackwardOutputs(FLOAT32))[0].copy()
    start = cupy.asarray(draw.standard_normal(q.shape).astype(np.float32))
    added = start.copy()
    partials = [cupy.empty(x.shape, np.float32) for x in (k, v)]
    cuda.attn_bwd(inputs, options, BackwardOutputs(FLOAT32, added, partials, accumulate=True))
    dq = to_host(dq).astype(np.float64)
    np.testing.assert_allclose(to_host(added), to_host(start) + dq, rtol=0, atol=2**-8 * np.abs(dq).max() + 1e-6)
    unseen = (to_host(plan.key_ranges)[:, 0] >= to_host(plan.key_ranges)[:, 1])
    assert unseen.any() and to_host(added)[unseen].tobytes() == to_host(start)[unseen].tobytes()


@gpu_only
def test_rounding_is_that_of_numpy(cupy):
    cuda = importlib.import_module("thdattn.engines.cuda")
    x = np.random.default_rng(0).standard_normal((37, 3, 8)).astype(np.float32)
    for dtype in (FLOAT16, BFLOAT16):
        assert to_host(cuda.rounded(cupy.asarray(x), dtype)).tobytes() == x.astype(dtype).tobytes()
