"""NCCL beside kernels: what goes by which communicator, and its memory, which is what is said."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import fake_nccl
import numpy as np
import pytest

pytest.importorskip("cupy")

from fake_gpus import Stream
from fake_mpi import World
from peer_programs import Program, machine_of

import thdattn.comm
from thdattn.comm.nccl import communicator, transport

# --- what goes where ---------------------------------------------------------------------------------------------


@pytest.fixture
def rank():
    """Rank 0 of two, whose collectives are only noted: (communicator, kind, stream) of each."""
    with machine_of(2, 0) as machine:
        calls = []

        class Noted:
            def __init__(self, name):
                self.name = name

            def __getattr__(self, kind):
                return lambda *args: calls.append((self.name, kind, args[-1]))

        program = Program(machine, 0, (fake_nccl.Clique(2),) * 2)
        program.memory._main, program.memory._few_blocks = Noted("main"), Noted("few")
        program.memory._nccl = SimpleNamespace(**dict.fromkeys(("NCCL_UINT8", "NCCL_FLOAT32", "NCCL_SUM")),
                                               groupStart=list, groupEnd=list)
        yield SimpleNamespace(calls=calls, memory=program.memory, engine=program.engine)


def gather(rank, at_once, heads=(1, 1, 2), rows=5):
    keys = [rank.engine.empty((rows, 4, 2), np.float32) for _ in range(2)]
    groups = [[rank.engine.empty((2 * rows, number, 2), np.float32) for _ in keys] for number in heads]
    return rank.memory.gather_heads(keys, groups, at_once)


def test_the_first_group_takes_all_thread_blocks_where_nothing_overlaps_it(rank):
    arrivals = gather(rank, at_once=True)
    assert [name for name, *_ in rank.calls] == ["main"] * 2 + ["few"] * 4
    assert [arrival.wait is thdattn.comm.no_wait for arrival in arrivals] == [True, False, False]


def test_keys_that_are_asked_for_early_come_beside_kernels(rank):
    gather(rank, at_once=False)
    assert [name for name, *_ in rank.calls] == ["few"] * 6


def test_few_keys_come_on_the_stream_itself(rank, monkeypatch):
    monkeypatch.setattr(transport, "WORTH_OVERLAPPING", 641)  # the other rank's rows of both arrays have 320 bytes
    assert all(arrival.wait is thdattn.comm.no_wait for arrival in gather(rank, at_once=False))
    assert {name for name, *_ in rank.calls} == {"main"}
    monkeypatch.setattr(transport, "WORTH_OVERLAPPING", 320)
    gather(rank, at_once=False)
    assert rank.calls[-1][0] == "few"


@pytest.mark.parametrize(("in_rank_order", "kinds"), [(True, ["recv", "send"] * 2), (False, ["reduceScatter"] * 2)])
@pytest.mark.parametrize("at_once", [True, False])
def test_sums_are_exchanged_or_made_by_nccl(rank, at_once, in_rank_order, kinds):
    results = [rank.engine.empty((5, 2, 2), np.float32) for _ in range(2)]
    rank.memory.owner_partials([x.shape for x in results], [x.shape for x in results], at_once)
    rank.memory.reduce_partials(None, results, at_once, in_rank_order)
    assert [kind for _, kind, _ in rank.calls] == kinds
    assert {name for name, *_ in rank.calls} == {"main" if at_once else "few"}


def test_more_ranks_than_addresses_leave_the_order_to_nccl(rank):
    assert rank.memory._adds_in_rank_order(True)
    rank.memory.size = 17
    assert not rank.memory._adds_in_rank_order(True)


def test_memory_of_sums_is_what_is_said(rank):
    shapes = [(5, 2, 2), (5, 2, 3)]
    said = rank.memory.sum_bytes([[2 * 4 * np.prod(shape) for shape in shapes]] * 3, True)
    for _ in range(3):
        rank.memory.owner_partials(shapes, shapes, False)
        rank.memory.reduce_partials(None, [rank.engine.empty(shape, np.float32) for shape in shapes], False, True)
    assert rank.memory.held_bytes() == said


def test_memory_of_slices_is_what_is_said(rank):
    sizes = np.array([[0, 96], [64, 0]])
    for _ in range(3):
        source, place = (rank.engine.empty((rows, 3, 2), np.float32) for rows in (4, 4))
        rank.memory.exchange([(source, 1)], [(place[:, :2], 1)], sizes)()
    assert rank.memory.held_bytes() == rank.memory.exchange_bytes(sizes, 64) == {"slices to send": 192,
                                                                                   "copies of slices": 64}


@pytest.mark.parametrize("strided", [True, False])
def test_an_exchange_leaves_the_stream_current_that_was_selected_within_a_block(rank, strided):
    """So a capture ends on the stream that it began on."""
    machine = rank.engine.machine
    with Stream(machine):
        (selected := Stream(machine)).use()
        source, place = (rank.engine.empty((4, 3, 2), np.float32) for _ in range(2))
        received = place[:, :2] if strided else place
        rank.memory.exchange([(source, 1)], [(received, 1)], np.array([[0, 96], [received.nbytes, 0]]))
        assert machine.stream is selected


# --- the second communicator -------------------------------------------------------------------------------------


def test_the_configuration_is_that_of_nccl_2_17():
    config = communicator.Config.of(4)
    fields = {name: getattr(communicator.Config, name).offset for name, _ in communicator.Config._fields_}
    assert fields == {"size": 0, "magic": 8, "version": 12, "blocking": 16, "cga_cluster_size": 20, "min_ctas": 24,
                      "max_ctas": 28, "net_name": 32}
    assert (config.size, config.magic, config.version, config.min_ctas, config.max_ctas) == (
        40, 0xCAFEBEEF, 21700, 1, 4)
    assert config.blocking == config.cga_cluster_size == -(2**31) and config.net_name is None


class Library:
    """NCCL as the second communicator calls it: it notes the calls."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, [getattr(x, "value", x) for x in args]))
            return 0

        return call


def test_calls_reach_the_library_with_pointers_counts_and_the_communicator(monkeypatch):
    nccl = Library()
    monkeypatch.setattr(communicator, "library", lambda: nccl)
    comm = communicator.FewBlocks(2, bytes(range(128)), 1, 3)
    (_, (_, size, name, rank, _)), = nccl.calls
    assert (size, rank, bytes(name)) == (2, 1, bytes(range(128)))
    comm._comm = ctypes.c_void_p(99)
    nccl.calls.clear()
    comm.allGather(2**40, 2**41, 2**35, 1, 7)
    comm.reduceScatter(10, 20, 30, 7, 0, 5)
    comm.send(10, 20, 1, 3, 5)
    comm.recv(11, 21, 1, 3, 5)
    comm.destroy()
    assert nccl.calls == [
        ("ncclAllGather", [2**40, 2**41, 2**35, 1, 99, 7]), ("ncclReduceScatter", [10, 20, 30, 7, 0, 99, 5]),
        ("ncclSend", [10, 20, 1, 3, 99, 5]), ("ncclRecv", [11, 21, 1, 3, 99, 5]), ("ncclCommDestroy", [99]),
    ]


def started(monkeypatch, refuses):
    """What start() makes on two ranks; refuses(rank, step) raises."""
    mine = threading.local()
    monkeypatch.setattr(communicator, "library", lambda: refuses(mine.rank, "library"))
    nccl = SimpleNamespace(get_unique_id=lambda: b"id", NcclCommunicator=lambda size, name, rank: ("ordinary", name))

    def few(size, name, rank, ctas):
        refuses(rank, "start")
        return "few", name, ctas

    monkeypatch.setattr(communicator, "FewBlocks", few)

    def program(comm):
        mine.rank = comm.rank
        return communicator.start_with_few_blocks(World(comm), nccl, 4)

    return thdattn.comm.run_local(2, program)


def test_a_rank_whose_nccl_takes_no_configuration_gives_all_an_ordinary_communicator(monkeypatch):
    def at(wanted):
        def refuses(rank, step):
            if step == wanted and rank == 1:
                raise OSError("refused")

        return refuses

    assert started(monkeypatch, at("nowhere")) == [("few", b"id", 4)] * 2
    for step in ("library", "start"):
        assert started(monkeypatch, at(step)) == [("ordinary", b"id")] * 2


def test_few_thread_blocks_are_asked_of_the_library_that_cupy_has_loaded():
    from cupy.cuda import nccl

    if not nccl.available:
        pytest.skip("CuPy finds no NCCL")
    version = ctypes.c_int()
    assert communicator.library().ncclGetVersion(ctypes.byref(version)) == 0
    assert version.value == nccl.get_version()
