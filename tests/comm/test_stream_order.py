"""The order of streams beside kernels: whichever streams and ranks are late, all read the right rows.

So say the random programs of peer_programs.py, through peer memory and NCCL. They show what is wrong where a step of
the protocol, or an order of streams, is left out.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

pytest.importorskip("cupy")

import fake_exchange
from fake_gpus import Stream
from peer_programs import Pack, Program, machine_of, results

from thdattn.comm import no_wait
from thdattn.comm.nccl.transport import NcclTransport
from thdattn.comm.overlap.blocks import RECEIVED, Blocks
from thdattn.comm.overlap.transport import Transport
from thdattn.comm.peer import transport, windows
from thdattn.comm.peer.transport import PeerTransport
from thdattn.methods import all_gather

SEEDS = 48  # most of the faults below are seen by many of so few
PEER, NCCL = False, True


@pytest.mark.parametrize(("by_nccl", "size", "num_seeds"), [
    (PEER, 2, 24), (PEER, 3, 12), (PEER, 4, 6), pytest.param(PEER, 3, 192, marks=pytest.mark.exhaustive),
    (NCCL, 2, 32), (NCCL, 3, 16), (NCCL, 4, 8),
])
def test_every_call_reads_the_rows_of_its_own(by_nccl, size, num_seeds):
    found = [results(size, seed, by_nccl=by_nccl) for seed in range(num_seeds)]
    assert sum(checked for checked, _ in found) > (10 if by_nccl else 16) * size * len(found)
    assert [seed for seed, (_, wrong) in enumerate(found) if wrong] == []


def test_sums_of_nccl_are_those_in_rank_order():
    """Inputs are integers, whose sums do not depend on the order."""
    with mock.patch.object(NcclTransport, "_adds_in_rank_order", lambda nccl, wanted: False):
        assert not any(results(3, seed, by_nccl=True)[1] for seed in range(16))


# --- what the tests see if a step is left out -------------------------------------------------------------------


def nothing(*args):
    """Enqueues nothing."""


def without(*steps):
    """Windows whose streams leave out some steps."""
    opened = windows.Window.open

    def open_and_change(window, handles):
        opened(window, handles)
        for step in steps:
            setattr(window, step, nothing)
        if "arrive" in steps:
            window.meet = window.publish

    return windows.Window, "open", open_and_change


def take_as_soon_as_it_arrives():
    opened = windows.Window.open

    def open_and_change(window, handles):
        opened(window, handles)
        arrive, meet, take = window.arrive, window.meet, window.take
        window.arrive, window.meet = (lambda stream, step=step: (step(stream), take(stream)) for step in (arrive, meet))
        window.take = nothing

    return windows.Window, "open", open_and_change


def unless(flag, of_others=(True, False)):
    """The kernel in which ranks meet does not wait for one of its kinds of flags, of these ranks."""
    awaited = fake_exchange.await_flag

    def await_flag(stream, mine, name, rank, other, chunk):
        if name != flag or (rank != other) not in of_others:
            awaited(stream, mine, name, rank, other, chunk)

    return fake_exchange, "await_flag", await_flag


def current_stream(transport):
    """It comes after nothing."""
    return transport._cupy.cuda.get_current_stream()


def arrival_for_the_current_stream(transport, stream):
    """The stream that asked does not wait where another one is current."""
    event = transport._recorded(transport._stream)
    return lambda: current_stream(transport).wait_event(event)


def next_at_once(nccl, use, num_bytes, stream):
    """The block is written while a collective may still read it."""
    return nccl._blocks.next(use, num_bytes, stream.is_capturing())


def next_sums_at_once(nccl, use, num_bytes, stream):
    """The same of sums that another stream of a graph has received and may still add."""
    return (next_at_once if use == RECEIVED else next_of_nccl)(nccl, use, num_bytes, stream)


def blocks_of_graphs(blocks, use, num_bytes, capturing):
    """Eager calls use the blocks of graphs."""
    return next_block(blocks, use, num_bytes, True)


def sums_beside_replays(program, draw):
    pack = Pack(program, program.machine.stream, 5)
    pack.capture(draw)
    for _ in range(6):
        layer = start_backward(pack)
        pack.replay(draw)
        layer.check(layer.dk_dv())


def gathers_beside_replays(program, draw):
    pack = Pack(program, program.machine.stream, 5)
    pack.capture(draw)
    for _ in range(6):
        pack.gather(draw)
        pack.replay(draw)
        pack.forward(draw)


def drops_on_another_stream(program, draw):
    pack, other = Pack(program, program.machine.stream, 5), Stream(program.machine)
    for _ in range(6):
        layer = start_backward(pack)
        program.machine.stream = other
        del layer
        program.machine.stream = pack.stream
        pack.forward(draw)


def sums_of_three_layers(program, draw):
    pack = Pack(program, program.machine.stream, 5)
    for _ in range(6):
        layers = [start_backward(pack) for _ in range(3)]
        for layer in layers:
            layer.check(layer.dk_dv())


def drops_at_work(program, draw):
    """Plans whose keys and sums nobody asks for, on a stream that others follow."""
    stream, other = program.machine.stream, Stream(program.machine)
    for _ in range(6):
        pack = Pack(program, stream, 5)
        pack.gather(draw)
        layer = start_backward(pack)
        program.machine.stream = other
        del layer, pack
        program.machine.stream = stream
        Pack(program, stream, 5).forward(draw)


def sums_of_two_streams_of_a_graph(program, draw):
    """In a capture, one stream follows another only where the program says so."""
    machine, graph = program.machine, {}
    packs = [Pack(program, stream, 5) for stream in (machine.stream, Stream(machine))]
    layers, found = [pack.layer() for pack in packs], []
    machine.graph = graph
    packs[1].stream.wait_event(packs[0].stream.record())
    for pack, layer in zip(packs, layers, strict=True):
        machine.stream = pack.stream
        out = layer.forward(layer.gather((4,), at_once=True))
        found.append(out | layer.backward(layer.gather((4,), at_once=True), True) | layer.dk_dv())
    packs[0].stream.wait_event(packs[1].stream.record())
    machine.graph, machine.stream = None, packs[0].stream
    packs[0].graphs.append((graph, list(zip(layers, found, strict=True)), []))
    for _ in range(4):
        packs[0].replay(draw)


def exchanges(program, draw):
    packs = [Pack(program, stream, 2) for stream in (program.machine.stream, Stream(program.machine))]
    packs[0].capture(draw)
    for _ in range(30):
        pack = draw.choice(packs)
        program.machine.stream = pack.stream
        draw.choice([pack.exchange, pack.exchanged, pack.exchanged, pack.replay])(draw)


def start_backward(pack):
    layer = pack.layer()
    layer.forward(layer.gather((1, 3), at_once=True))
    layer.check(layer.backward(layer.gather((1, 3), at_once=True), False))
    return layer


def all_turns(turns, captured, at_once):
    """A gather has the first free buffers, those of a graph too."""
    return next_turn(turns, captured, True)


next_turn, next_block, next_of_nccl = all_gather._Turns.next, Blocks.next, NcclTransport._next
PROGRAMS = {
    PEER: (Program.enqueue, sums_beside_replays, gathers_beside_replays, drops_on_another_stream, exchanges),
    NCCL: (Program.enqueue, sums_of_three_layers, drops_at_work, sums_of_two_streams_of_a_graph),
}
OF_BOTH = {
    "reads or sends before rows are written": (Transport, "_follow", nothing),
    "reads before rows arrive": (Transport, "_arrival", lambda transport, stream: nothing),
    "calls of two streams in any order": (Transport, "enter", current_stream),
    "drops what is on its way on another stream": (Transport, "_arrival", arrival_for_the_current_stream),
    "drops sums that are on their way": (all_gather.PendingGrads, "__del__", nothing),
    "gathers for later into the buffers of a graph": (all_gather._Turns, "next", all_turns),
}
OF_WINDOWS = {
    "writes before the last part was taken": without("free"),
    "reads before it arrives": without("arrive"),
    "says that it has taken what it has yet to take": take_as_soon_as_it_arrives(),
    "never says that it has taken it": without("take"),
}
FAULTS = {
    PEER: OF_BOTH | OF_WINDOWS | {
        "drops what is on its way": (all_gather.GatheredKV, "__del__", nothing),
        "keeps what it has nothing to show in": (PeerTransport, "drop_partials", nothing),
    },
    NCCL: OF_BOTH | {
        "writes what a collective still reads": (NcclTransport, "_next", next_at_once),
        "receives sums while others are added": (NcclTransport, "_next", next_sums_at_once),
        "has one set of blocks for graphs and calls": (Blocks, "next", blocks_of_graphs),
        "waits for the collective of another capture": (Blocks, "forget_events", nothing),
    },
}
OF_EXCHANGES = OF_WINDOWS | {name: OF_BOTH[name] for name in list(OF_BOTH)[:3]} | {
    "reads elsewhere before the kernel is done": (PeerTransport, "_behind", lambda memory, stream: nothing),
    "a kernel that writes before the last part was taken": unless("taken"),
    "a kernel that writes what its own rank has yet to read there": unless("taken", of_others=(False,)),
    "a kernel that writes what others have yet to read": unless("taken", of_others=(True,)),
    "a kernel that reads before it is offered": unless("offered"),
}


@pytest.mark.parametrize(("by_nccl", "program"), [(kind, each) for kind in PROGRAMS for each in PROGRAMS[kind][1:]])
def test_what_hurts_those_is_right(by_nccl, program):
    assert not any(results(2, seed, program, by_nccl)[1] for seed in range(32 if by_nccl else 12))


def shows(size, programs, by_nccl=False):
    """Whether one of many seeds shows what is wrong."""
    for seed in range(8 * SEEDS):
        try:
            if results(size, seed, programs[seed % len(programs)], by_nccl)[1]:
                return True
        except AssertionError:  # streams wait for ever, or flags are not as they were
            return True
    return False


@pytest.mark.parametrize(("by_nccl", "fault"), [(kind, fault) for kind in FAULTS for fault in FAULTS[kind]])
def test_a_step_or_an_order_that_is_left_out_is_found(by_nccl, fault):
    with mock.patch.object(*FAULTS[by_nccl][fault]):
        assert shows(2, PROGRAMS[by_nccl], by_nccl)


@pytest.mark.parametrize("fault", OF_EXCHANGES)
def test_an_exchange_with_a_step_left_out_is_found(fault):
    with mock.patch.object(*OF_EXCHANGES[fault]):
        assert shows(2, [exchanges])


def test_slices_for_two_ranks_in_one_place_are_found():
    with mock.patch.object(transport, "slots_of", lambda sizes: [[0] * len(sizes) + [1 << 14] for _ in sizes]):
        assert shows(3, [exchanges])


def test_ranks_that_exchange_nothing_do_not_meet():
    with machine_of(2, 0) as machine:
        memory = Program(machine, 0).memory
        assert memory.exchange([], [], np.zeros((2, 2), int)) is no_wait
        assert not memory.held_bytes() and not any(stream.queue for stream in machine.streams)


def test_arrays_of_another_dtype_are_copied_whole():
    with machine_of(2, 0) as machine:
        programs = []
        for rank in range(2):
            program = Program(machine, rank)
            programs.append((program, []))
            for dtype in (np.float32, np.float64):  # of one shape
                send, recv = (machine.empty((rows, 2, 4), dtype) for rows in (3, 6))
                machine.stream.launch(np.copyto, send, 1 + rank)
                arrival, = program.memory.gather_heads([send], [[recv]], at_once=False)
                arrival.wait()
                other = recv[3 * (1 - rank) :][:3]  # the place of what is here already stays as it is
                machine.stream.launch(program.compare, other, np.full((3, 2, 4), 2 - rank))
                programs[-1][1].append((send, recv))
        machine.run()
        assert [(program.num_checked, program.num_wrong) for program, _ in programs] == [(2, 0), (2, 0)]
