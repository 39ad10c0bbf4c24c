"""Communication while the model computes: it starts early, is waited for late, and changes no bit."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace

import layers
import numpy as np
import pytest
import runs
from model import Model
from sizes import SIZES
from texts import LENGTHS, SMALL

import thdattn
from thdattn.graphs import Graphs


def order_of_work(cp_size):
    """Return the names of each rank's work in a forward and backward, as far as it starts or overlaps communication."""
    fitted = thdattn.PackedBatch.from_lengths(LENGTHS, 2 * cp_size)

    def program(comm):
        done = []
        model = Model(SMALL, comm, engine="reference")

        def noted(name, function):
            def call(*args, **kwargs):
                done.append(name)
                return function(*args, **kwargs)

            return call

        def rope_forward(qkv, rotation, heads, kv_heads):
            done.append("q, k, v" if heads and kv_heads else "q" if heads else "k, v")
            return layers.rope_forward(qkv, rotation, heads, kv_heads)

        def start_backward(attention):
            start = attention.start_backward

            def call(*args):
                done.append("dq")
                dq, dk_dv = start(*args)
                return dq, noted("dk, dv", dk_dv)

            return call

        model.layers = SimpleNamespace(**vars(layers) | {"rope_forward": rope_forward})
        for name in ("linear_backward_weight", "swiglu_backward"):
            setattr(model.layers, name, noted(name, getattr(layers, name)))
        for attention in model.attentions:
            attention.gather, attention.forward = (noted(f.__name__, f) for f in (attention.gather, attention.forward))
            attention.start_backward = start_backward(attention)
        plan = model.plan(fitted)
        zeros = np.zeros(plan.local_rows, np.int32)
        model.loss_and_gradient(zeros, zeros, plan, 1)
        return done

    return thdattn.comm.run_local(cp_size, program)


@pytest.mark.parametrize(("cp_size", "forward", "again"), [
    (1, ["q, k, v", "forward"], []), (2, ["k, v", "gather", "q", "forward"], []),
    (4, ["k, v", "gather", "q", "forward"], ["gather"]),
])
def test_what_travels_is_started_early_and_asked_for_late(cp_size, forward, again):
    """On 4 ranks the keys of all ranks are too many to be kept: they come again, during the mlp's backward."""
    backward = [*again, "swiglu_backward", "dq", "linear_backward_weight", "dk, dv"]
    assert order_of_work(cp_size) == [SMALL.layers * forward + SMALL.layers * backward] * cp_size


@pytest.mark.parametrize(("modules", "num_gathers", "crossed"), [
    ((), 2, set()), (("attn",), 1, set()), (("mlp",), 2, {"mlp, backward"}), (("attn", "mlp"), 1, set()),
])
def test_keys_on_their_way_neither_leave_nor_enter_a_graph(documents, monkeypatch, modules, num_gathers, crossed):
    """A captured stream has to be joined, and cannot wait for what began before the capture."""
    started, beyond = defaultdict(list), set()  # by rank's thread; functions that ran while keys were on their way
    gather, captured = thdattn.CPAttention.gather, Graphs.captured

    def noted(attention, *args):
        keys = gather(attention, *args)
        started[threading.get_ident()].append(keys)
        return keys

    def on_their_way():
        return [keys for keys in started[threading.get_ident()] if not keys.used]

    def checked(graphs, function, name, part=None):
        def call(*args):
            before = on_their_way()
            result = function(*args)
            assert on_their_way() == before, name
            beyond.update([name.split(", ", 1)[1]] if before else [])
            return result

        return captured(graphs, call, name, part)

    monkeypatch.setattr(thdattn.CPAttention, "gather", noted)
    monkeypatch.setattr(Graphs, "captured", checked)
    batches = runs.batches(documents, 2, cp_size=4)
    graphs = {"impl": "local", "modules": modules}
    thdattn.comm.run_local(4, lambda comm: runs.trainer(comm, "reference", **graphs).step(batches, runs.LR))
    assert all(keys.used for rank in started.values() for keys in rank)
    assert [len(rank) for rank in started.values()] == [len(batches) * SIZES["tiny"].layers * num_gathers] * 4
    assert beyond == crossed, "what may run while keys are on their way is a graph that has nothing to do with them"
