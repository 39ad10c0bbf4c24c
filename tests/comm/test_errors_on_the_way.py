"""An error while rows are on their way: no array that they are written to is let go before they are there."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from late_rows import hide_all
from test_memory import Twin

import thdattn
from thdattn import PackedBatch
from thdattn.comm import Arrival
from thdattn.engines import reference
from thdattn.mamba import reference as mixers

HEADS, DIM = 4, 8
BATCH = PackedBatch.from_lengths([36, 0, 44, 4], multiple=4)
METHODS = [("all_gather", "dual_chunk", 1), ("all_gather", "dual_chunk", 2), ("all_gather", "balanced", 1),
           ("a2a", "contiguous", 2), ("a2a", "dual_chunk", 2), ("p2p", "dual_chunk", 1),
           ("a2a+p2p", "dual_chunk", 1), ("a2a+all_gather", "balanced", 1)]
STEPS = {
    reference: ("empty", "attn_fwd", "attn_bwd", "to_sequence_order", "to_rank_order", "pack_rows", "place_rows",
                "add_partials"),
    mixers: ("mixer_conv_states", "mixer_scan", "mixer_enter", "mixer_start", "mixer_bwd", "mixer_add_halos"),
}


class LateTwin(Twin):
    """Rank 0 of two whose rows come when somebody waits for them.

    Attributes:
        under_way: how often something has been asked for that nobody has waited for so far.
        too_soon: how many arrays were let go in that time.
    """

    def __init__(self):
        super().__init__()
        self.under_way = self.too_soon = 0

    def _exchange(self, sends, recvs, sizes):
        super()._exchange(sends, recvs, sizes)()
        return self._late([array for array, _ in recvs])

    def gather_heads(self, sends, recvs, at_once=False):
        arrivals = super().gather_heads(sends, recvs, at_once)
        return [Arrival(parts, self._late([x for of in parts for x in of])) for parts, *_ in arrivals]

    def _late(self, arrays):
        self.under_way += 1
        dropped = [weakref.finalize(_owner(x), self._drop) for x in arrays]

        def wait():
            if dropped:
                self.under_way -= 1
            while dropped:
                dropped.pop().detach()

        return wait

    def _drop(self):
        self.too_soon += 1


def _owner(array):
    """The array whose memory this is."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Failing:
    """Steps of the engine, of which the one raises that is the last of those left.

    Attributes:
        left: steps until then; 0: none raises.
        seen: how often something was under way then.
    """

    def __init__(self, monkeypatch, comms):
        self.left, self.seen, self._comms = 0, 0, comms
        for module, names in STEPS.items():
            for name in names:
                monkeypatch.setattr(module, name, self._failing(getattr(module, name)))

    def _failing(self, step):
        def call(*args, **options):
            self.left -= 1
            if not self.left:
                self.seen += any(comm.under_way for comm in self._comms)
                raise MemoryError
            return step(*args, **options)

        return call


def raised_at_every_step(monkeypatch, make, comms):
    """A forward and backward over and over, another step of which raises each time, with a plan that is then dropped.

    Args:
        make: makes these calls of a new plan, as a function that returns nothing.
        comms: the comms that they travel over.

    Returns:
        How often one raised while something was under way.
    """
    failing, number, done = Failing(monkeypatch, comms), 0, False
    while not done:
        call, number = make(), number + 1
        failing.left = number
        try:
            call()
            done = True
        except MemoryError:
            failing.left = 0
        del call
        gc.collect()
        assert [comm.too_soon for comm in comms] == [0] * len(comms), f"step {number}"
        assert [comm.under_way for comm in comms] == [0] * len(comms), f"nobody waits after step {number}"
    return failing.seen


@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize(("kind", "sharding", "groups"), METHODS)
def test_an_attention_that_fails_lets_no_array_go_that_rows_are_written_to(
    monkeypatch, kind, sharding, groups, keep_keys
):
    hide_all(monkeypatch)
    comms = [LateTwin() for _ in range(2 if "+" in kind else 1)]
    batch = PackedBatch.from_lengths([36, 0, 44, 8], multiple=4 * len(comms))
    comm = tuple(comms) if len(comms) > 1 else comms[0]
    layer = thdattn.CPAttention(comm, HEADS, DIM, engine="reference", dtype="float32", cp_comm_type=kind,
                                head_groups=groups, keep_keys=keep_keys)

    def make():
        plan = layer.plan(batch, sharding)
        q, k, v, dout = (np.ones((plan.local_rows, HEADS, DIM), np.float32) for _ in range(4))

        def call():
            _, saved = layer.forward(q, k, v, plan)
            layer.start_backward(dout, saved)[1]()

        return call

    assert raised_at_every_step(monkeypatch, make, comms)


def test_a_mixer_that_fails_lets_no_array_go_that_states_are_written_to(monkeypatch):
    comm = LateTwin()
    mixer = thdattn.Mamba2Mixer(comm, 2, 3, 4, dtype="float32", engine="reference")
    shape = mixer._shape

    def make():
        plan = mixer.plan(BATCH)
        zxbcdt, dout = (np.ones((plan.local_rows, width), np.float32) for width in (shape.columns, shape.d_inner))
        weights = thdattn.Mamba2Weights(*(np.ones(of_one, np.float32) for of_one in shape.weights))
        return lambda: mixer.backward(dout, mixer.forward(zxbcdt, weights, plan)[1])

    assert raised_at_every_step(monkeypatch, make, [comm])
