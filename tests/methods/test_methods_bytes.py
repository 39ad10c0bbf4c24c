"""What every method and sharding brings from rank to rank: bytes, by the formulas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import BFLOAT16
from ways import BY_NAME, Way, attention, inputs_of

import thdattn


def received(way, case, keep_keys):
    """Bytes that every rank's comms bring, of a forward and of a backward, and the plan."""

    def program(comm):
        layer = attention(case, way, comm, BFLOAT16, engine="reference", keep_keys=keep_keys)
        plan = layer.plan(way.batch(case), way.sharding)
        comms = {id(each): each for each in (layer.comm, *(layer._selection.levels or ()))}.values()
        *qkv, dout = inputs_of(case, plan, BFLOAT16)
        counts = [sum(each.received_bytes for each in comms)]
        _, saved = layer.forward(*qkv, plan)
        counts.append(sum(each.received_bytes for each in comms))
        layer.backward(dout, saved)
        counts.append(sum(each.received_bytes for each in comms))
        return *np.diff(counts).tolist(), plan

    return thdattn.comm.run_local(way.cp_size, program)


QUERY, KEY = 2 * (12 + 8), 2 * (12 + 8)  # bytes of q and out, of k and v, of a row and head


@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_bytes_of_heads_are_those_of_the_formula(cp_size, keep_keys):
    for sharding in ("contiguous", "dual_chunk"):
        case = replace(BY_NAME["causal"], heads=(8, 2), dims=(12, 8))
        for forward, backward, plan in received(Way("a2a", sharding, cp_size), case, keep_keys):
            foreign = (cp_size - 1) * plan.local_rows
            heads, kv_heads = 8 // cp_size, max(1, 2 // cp_size)
            there, back = foreign * (heads * 2 * 12 + kv_heads * KEY), foreign * heads * (2 * 8 + 4)  # with lse
            assert forward == there + back
            again = 0 if keep_keys else foreign * (heads * (2 * 12 + 2 * 8 + 4) + kv_heads * KEY)
            shared = 2 if cp_size > 2 else 1  # in float32
            sums = foreign * max(2, cp_size) // cp_size * KEY * shared
            assert backward == foreign * heads * 2 * 8 + again + foreign * heads * 2 * 12 + sums


@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["causal", "window-left", "full", "slack"])
def test_bytes_of_needed_rows_are_those_of_the_routes(name, cp_size, keep_keys):
    case, way = replace(BY_NAME[name], heads=(8, 2), dims=(12, 8)), Way("all_gather", "balanced", cp_size)
    for forward, backward, plan in received(way, case, keep_keys):
        taken, given = (0, 0) if plan.routes is None else (plan.routes.num_received, plan.routes.num_sent)
        assert forward == taken * 2 * KEY
        assert backward == given * 2 * 2 * KEY + (0 if keep_keys else forward)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_bytes_of_a_ring_are_those_of_its_hops(cp_size):
    case = replace(BY_NAME["causal"], heads=(8, 2), dims=(12, 8))
    for forward, backward, plan in received(Way("p2p", "dual_chunk", cp_size), case, None):
        hops = (cp_size - 1) * plan.local_rows * 2 * KEY
        assert (forward, backward) == (hops, 3 * hops)


@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("sharding", ["dual_chunk", "balanced"])
def test_bytes_of_two_levels_are_those_of_both(sharding, keep_keys):
    case, way = replace(BY_NAME["causal"], heads=(8, 2), dims=(12, 8)), Way("a2a+all_gather", sharding, 4, inner=2)
    for forward, backward, plan in received(way, case, keep_keys):
        rows, core = plan.local_rows, plan.core
        taken = given = core.local_rows
        if sharding == "balanced":
            taken, given = core.routes.num_received, core.routes.num_sent
        inside = rows * (4 * (2 * 12 + 2 * 8 + 4) + KEY)
        assert forward == inside + taken * KEY
        again = 0 if keep_keys else inside + taken * KEY
        assert backward == rows * (4 * (2 * 8 + 2 * 12) + KEY) + again + given * 2 * KEY
