"""Methods that the benchmark of context parallelism times: names, predictions, and two ranks that play two of many."""

from __future__ import annotations

import cp_methods
import numpy as np
import pytest
import record
import tables
from cp_methods import METHODS, Method
from rank_of import Exchanging
from workloads import Case, cp_cases

from thdattn.comm import run_local
from thdattn.costs import model


def layer_of(comm, case, method):
    """Run a rank of a case by a method; return attention, plan, results, and received bytes of forward and backward."""
    inner = cp_methods.INNER
    groups = (comm.split(comm.rank // inner), comm.split(comm.rank % inner)) if method.two_levels else (comm,)
    attention = case.attention("reference", comm=groups if method.two_levels else comm,
                               cp_comm_type=method.cp_comm_type)
    plan = attention.plan(method.padded(case, comm.size), method.sharding)
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((plan.local_rows, heads, width), np.float32).astype(attention.dtype)
                     for heads, width in ((case.heads, case.head_dim), (case.kv_heads, case.head_dim),
                                          (case.kv_heads, case.v_head_dim), (case.heads, case.v_head_dim)))
    counts = [sum(group.received_bytes for group in groups)]
    out, saved = attention.forward(q, k, v, plan)
    counts.append(sum(group.received_bytes for group in groups))
    grads = attention.backward(dout, saved)
    counts.append(sum(group.received_bytes for group in groups))
    return attention, plan, [out, *grads], tuple(np.diff(counts).tolist())


def test_methods_that_cannot_work_say_why():
    mqa, odd = Case("mqa", (8,), 4, 1), Case("odd", (8,), 6, 3)
    assert not METHODS["a2a"].refusal(mqa, 4) and "1 kv heads" in METHODS["a2a+p2p"].refusal(mqa, 4)
    assert "works for 1, 3, 6 ranks" in METHODS["a2a"].refusal(odd, 2)
    assert all("no two levels" in METHODS["a2a+p2p"].refusal(Case("x", (8,)), size) for size in (2, 3, 5))


@pytest.mark.parametrize("name", ["all_gather:balanced", "a2a", "a2a:dual_chunk", "p2p"])
def test_two_ranks_get_by_exchange_what_two_of_many_get(name):
    method, case = METHODS[name], Case("two", (70, 37, 20, 5, 100), 8, 8, 16, 16)

    def wanted(comm):
        return layer_of(comm, case, method)[3]

    def fn(real):
        comm = Exchanging(real, 8, (2, 7))
        assert (comm.rank, comm.size) == ((2, 7)[real.rank], 8)
        before = real.received_bytes
        _, plan, results, counted = layer_of(comm, case, method)
        assert real.received_bytes - before == sum(counted), "what is counted has been there"
        assert all(np.isfinite(x.astype(np.float32)).all() for x in results)
        assert plan.rows.tolist() == plan.sharding.rows((2, 7)[real.rank]).tolist()
        return counted

    many = run_local(8, wanted)
    assert run_local(2, fn) == [many[2], many[7]]


# ------------------------------------------------------------------------------------------------ recommendations

LONGER_MS = 2.0  # of forward and backward: in shorter ones it is the host that tells


def measured():
    """Return [(ranks, case, {method: ms of forward and backward})] of all cases with several methods on H200."""
    found = []
    for ranks, times in tables.runs(record.load(record.results_file("cp", "NVIDIA H200"))).items():
        for case in times.cases:
            each = {way: times.value("ms", case, way, "both", "called") for way in tables.methods(times)}
            ms = {tables.method(times, case, way): x for way, x in each.items() if x > 0}
            if len(ms) > 1 and min(ms.values()) > LONGER_MS:
                found.append(pytest.param(ranks.played, case, ms, id=f"{case}, {ranks.played} ranks"))
    return found


@pytest.mark.parametrize(("size", "name", "ms"), measured())
def test_what_is_recommended_takes_hardly_longer_than_the_fastest_that_was_measured(size, name, ms):
    case = cp_cases(size)[name]
    shape = model.Shape(case.heads, case.kv_heads, case.head_dim)
    found = [model.cost(method.padded(case, size), size, shape, model.Way(*method, 1 + method.two_levels))
             for method in ms]
    way = model.recommended(sorted(found, key=lambda cost: cost.seconds.total)).way
    assert ms[Method(*way[:2])] < 1.05 * min(ms.values())
