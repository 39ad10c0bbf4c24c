"""What CPAttention.memory says is what is allocated, and a batch without room for it is refused on all ranks."""

from __future__ import annotations

import threading
import weakref
from collections import Counter

import numpy as np
import pytest
from cases import BFLOAT16
from loopback import Mirror

import thdattn
from thdattn import PackedBatch
from thdattn.engines import reference
from thdattn.plan.workspace import FLOAT32, Buffer

BATCH = PackedBatch.from_lengths([13, 0, 30, 4], multiple=4)
RANKS, HEADS, KV_HEADS, DIM, V_DIM = 2, 8, 4, 24, 16


def attention(comm, **options):
    return thdattn.CPAttention(comm, HEADS, DIM, KV_HEADS, V_DIM, dtype="bfloat16", engine="reference", **options)


class Allocations:
    """The most bytes at a time in arrays that `empty` of the reference engine made, by shape and dtype, and of all.

    What NumPy's own functions make is not seen.
    """

    def __init__(self, monkeypatch):
        self.live, self.most, self.top = Counter(), Counter(), 0
        for module in (reference, reference.arrays):
            monkeypatch.setattr(module, "empty", self.empty)

    def empty(self, shape, dtype):
        made, key = np.empty(shape, dtype), (tuple(shape), np.dtype(dtype).name)
        self.live[key] += made.nbytes
        self.most[key] = max(self.most[key], self.live[key])
        self.top = max(self.top, self.live.total())
        weakref.finalize(made, self.live.subtract, {key: made.nbytes})
        return made


def rows_of(plan, *widths):
    return [np.ones((plan.local_rows, heads, width), BFLOAT16) for heads, width in widths]


def step(layer, plan):
    q, k, v, dout = rows_of(plan, (HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, V_DIM), (HEADS, V_DIM))
    _, saved = layer.forward(q, k, v, plan)
    return saved, layer.backward(dout, saved)


class Twin(Mirror):
    """Rank 0 of two that hold the same, on the host; what it receives in messages is 0."""

    devices = frozenset({"cpu"})

    def _send_receive(self, sends, recvs):
        for room, _ in recvs:
            room[...] = 0


METHODS = [("all_gather", "dual_chunk", 1), ("all_gather", "dual_chunk", 2), ("all_gather", "balanced", 1),
           *(("a2a", "contiguous", groups) for groups in (1, 2, 4)), ("a2a+all_gather", "dual_chunk", 1),
           ("a2a+all_gather", "dual_chunk", 2), ("a2a+all_gather", "balanced", 2)]
LARGER, WHOLE = (PackedBatch.from_lengths(lengths, multiple=4) for lengths in ([52, 0, 120, 16], [52, 52]))


@pytest.mark.parametrize("kv_heads", [KV_HEADS, HEADS, 1])
@pytest.mark.parametrize("keep_keys", [False, True])
@pytest.mark.parametrize("batch", [LARGER, WHOLE], ids=["cut", "whole"])
@pytest.mark.parametrize(("kind", "sharding", "groups"), METHODS)
def test_methods_allocate_what_is_said(monkeypatch, kind, sharding, groups, batch, keep_keys, kv_heads):
    if kv_heads == 1 and (groups > 1 or "+" in kind):
        pytest.skip("needs a kv head for every rank")
    comm = (Twin(), Twin()) if "+" in kind else Twin()
    layer = thdattn.CPAttention(comm, HEADS, DIM, kv_heads, V_DIM, engine="reference", keep_keys=keep_keys,
                                head_groups=groups, cp_comm_type=kind)
    plan = layer.plan(batch, sharding)
    memory, made, saved = layer.memory(batch, sharding), Allocations(monkeypatch), []
    elsewhere = {"plan", "q", "k", "v", "copies to send", "copies of slices", "sums"}  # by NumPy itself, or passed

    def said(*parts):
        return sum(size for part in parts for name, size in part.items() if name not in elsewhere)

    for number in range(2):
        q, k, v, dout = rows_of(plan, (HEADS, DIM), (kv_heads, DIM), (kv_heads, V_DIM), (HEADS, V_DIM))
        saved.append(layer.forward(q, k, v, plan)[1])
        assert number or made.top <= said(memory.forward, memory.saved)
        layer.backward(dout, saved[-1])
    assert made.top == said(memory, memory.saved)  # what the first layer saved is there when the second one's is made


def test_numbers_that_a_reader_can_follow():
    # 52 rows on two ranks; two groups of two kv heads; bfloat16 takes 2 bytes, sums float32.
    def program(comm):
        layer = attention(comm, head_groups=2, keep_keys=True)
        return layer.memory(BATCH), layer.plan(BATCH)

    (memory, plan), _ = thdattn.comm.run_local(RANKS, program)
    assert plan.key_rows == 52 and plan.local_rows == 26
    a_group = 52 * 2 * (DIM + V_DIM)
    assert memory["keys in rank order"] == 2 * a_group * 2  # two groups
    assert "keys in sequence order" not in memory  # as every layer keeps its own
    assert memory["kept keys"] == 2 * a_group * 2
    assert memory["partial sums"] == memory["partial sums of dk and dv"] == a_group * 4
    assert memory["lse"] == HEADS * 26 * 4
    arrays = {id(x): x for x in vars(plan.arrays).values() if x is not None}  # one may have two names
    assert memory["plan"] == sum(x.nbytes for x in arrays.values())
    assert memory.work == sum(memory.forward.values()) + sum(memory.backward.values())
    assert memory.per_layer == sum(memory[name] for name in ("q", "k", "v", "out", "lse", "kept keys"))
    assert memory["dq"] == memory["q"] and memory["dk"] + memory["dv"] == memory["k"] + memory["v"]


@pytest.mark.parametrize(("padded", "finite_padding", "copied"), [(True, False, True), (True, True, False),
                                                                  (False, False, False)])
def test_one_rank_copies_keys_around_padding_alone(padded, finite_padding, copied):
    batch = BATCH if padded else PackedBatch.from_lengths([8, 4])
    memory = attention(thdattn.comm.init("single")).memory(batch, finite_padding=finite_padding)
    assert ("keys in sequence order" in memory) == copied
    assert "kept keys" not in memory and "partial sums" not in memory


def test_memory_allocates_nothing_and_shows_its_numbers(monkeypatch):
    made = Allocations(monkeypatch)
    monkeypatch.setattr(reference, "plan_arrays", None)
    memory = attention(thdattn.comm.init("single")).memory(PackedBatch.from_lengths([1 << 24]))
    assert not made.most
    assert memory["out"] == 2 * (1 << 24) * HEADS * V_DIM
    assert repr(memory).startswith("<Memory work=") and "out 4.00 GiB" in repr(memory)
    with pytest.raises(KeyError):
        memory["windows"]
    assert len(memory) == len(dict(memory)) == len(set(memory))


# --- room ------------------------------------------------------------------------------------------------------------


def on_ranks(monkeypatch, short, left, program):
    """What program(comm) returns on each of three ranks, of which some have GPUs with so many bytes left."""
    numbers = {}

    def free_bytes(wanted):
        return left if numbers[threading.get_ident()] in short and left < wanted else None

    def one(comm):
        numbers[threading.get_ident()] = comm.rank
        return program(comm)

    monkeypatch.setattr(reference, "free_bytes", free_bytes)
    return thdattn.comm.run_local(3, one, timeout=20)


@pytest.mark.parametrize("short", [{1}, {0, 2}], ids=str)
def test_ranks_without_room_are_named_on_all_ranks(monkeypatch, short):
    def program(comm):
        with pytest.raises(ValueError, match="the batch needs") as refused:
            attention(comm).plan(PackedBatch.from_lengths([600], multiple=6))
        comm.barrier()
        return str(refused.value)

    (message,) = set(on_ranks(monkeypatch, short, 1 << 20, program))
    assert [f"rank {rank}: the batch needs" in message for rank in range(3)] == [rank in short for rank in range(3)]
    assert "wanted at most the 1.00 MiB that are free; pass fewer tokens, spread them over more ranks" in message


def test_room_for_the_batch_and_one_layer_is_enough(monkeypatch):
    batch = PackedBatch.from_lengths([600], multiple=6)
    def program(comm):
        layer = attention(comm)
        return layer.memory(batch).wanted(), layer.memory(batch).wanted(forward_only=True)

    whole, forward = thdattn.comm.run_local(3, program)[0]
    assert forward < whole

    def plan(comm, **options):
        return attention(comm).plan(batch, **options)

    on_ranks(monkeypatch, {0, 1, 2}, whole, plan)
    with pytest.raises(ValueError, match="the batch needs"):
        on_ranks(monkeypatch, {0, 1, 2}, whole - 1, plan)
    on_ranks(monkeypatch, {0, 1, 2}, forward, lambda comm: plan(comm, forward_only=True))
    with pytest.raises(ValueError, match="the batch needs"):
        on_ranks(monkeypatch, {0, 1, 2}, forward - 1, lambda comm: plan(comm, forward_only=True))


def test_buffers_of_the_plan_before_are_room_for_the_next(monkeypatch):
    batch = PackedBatch.from_lengths([600], multiple=6)

    def program(comm):
        layer = attention(comm, keep_keys=False)
        wanted = layer.memory(batch).wanted()
        plan = layer.plan(batch)
        step(layer, plan)
        held = plan.held_bytes()
        assert 0 < held == sum(layer.memory(batch)[name] for name in ("keys in rank order", "keys in sequence order"))
        comm.barrier()
        monkeypatch.setattr(reference, "free_bytes", lambda missing: None if missing == wanted - held else 0)
        comm.barrier()
        layer.plan(batch)  # while `plan` is still there
        comm.barrier()
        del plan

    thdattn.comm.run_local(3, program, timeout=20)


def test_one_rank_is_not_asked_for_room(monkeypatch):
    # Its own error says as much, and nobody waits for it.
    monkeypatch.setattr(reference, "free_bytes", lambda wanted: 0)
    attention(thdattn.comm.init("single")).plan(BATCH)


def test_batches_of_as_many_rows_are_each_asked_for_what_they_take(monkeypatch):
    """One long document is refused, and short documents of as many rows before and after it are not."""
    def declared(plan, *_):
        return [Buffer("accumulators", (64, plan.expected_pairs), FLOAT32)]

    monkeypatch.setattr(reference, "backward_buffers", declared)
    short, long = PackedBatch.from_lengths([6] * 100), PackedBatch.from_lengths([600])

    def wanted(comm):
        return [attention(comm).memory(batch).wanted() for batch in (short, long)]

    little, much = thdattn.comm.run_local(3, wanted)[0]
    assert little < much

    def program(comm):
        layer = attention(comm)
        for _ in range(2):
            layer.plan(short)
            with pytest.raises(ValueError, match=r"^rank 0: the batch needs .*; rank 1: .*; rank 2: the batch needs"):
                layer.plan(long)

    on_ranks(monkeypatch, {0, 1, 2}, much - 1, program)


def test_a_refusal_comes_before_numbers_that_differ():
    def program(comm):
        with pytest.raises(ValueError, match=r"^rank 1: it rains$"):
            comm.agree("the weather", comm.rank, "it rains" if comm.rank else "")
        comm.agree("the weather", 3)

    thdattn.comm.run_local(2, program)
