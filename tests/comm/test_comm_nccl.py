"""How NCCL ranks are started, without a GPU: MPI is threads here and NCCL a stand-in that notes its calls."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from fake_mpi import World

import thdattn.comm
from thdattn.comm import mpi
from thdattn.comm.failures import lanes
from thdattn.comm.failures.watchdog import Watch
from thdattn.comm.nccl import comm as backend
from thdattn.comm.nccl import gpus as nccl_gpus
from thdattn.comm.nccl.comm import NcclComm
from thdattn.comm.nccl.gpus import SHARE, Gpu, choose, survey

PEER_TRANSPORT, NCCL_TRANSPORT = backend._peer_transport, backend._nccl_transport  # before stand-ins take their place
FULL = b"\xff"  # uuid of a GPU without free memory


class Communicator:
    def __init__(self, size, unique_id, rank):
        self.made_with = (size, unique_id, rank)
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))


def peer_memory(**calls):
    """A stand-in for peer memory that has these calls."""
    nothing = dict.fromkeys(("enter", "close", "wait_within"), lambda *arguments: None)
    return SimpleNamespace(**nothing | {"carries": lambda sizes: True} | calls)


class Array:
    """What the backend reads of a CuPy array."""

    def __init__(self, shape, dtype, pointer=4096, device_id=0):
        host = np.zeros(shape, dtype)
        self.shape, self.dtype, self.ndim, self.size = host.shape, host.dtype, host.ndim, host.size
        self.nbytes, self.flags, self.strides = host.nbytes, host.flags, host.strides
        self.data = SimpleNamespace(ptr=pointer, device_id=device_id)


Array.__module__ = "cupy"


def make_cupy(uuids):
    """CuPy as a process sees it that has GPUs with these uuids."""
    runtime = SimpleNamespace(
        getDeviceCount=lambda: len(uuids), getDeviceProperties=lambda device: {"uuid": uuids[device]}
    )
    stream = SimpleNamespace(ptr=77, synchronize=lambda: None, is_capturing=lambda: False)

    class Device:
        def __init__(self, number):
            self.pci_bus_id = f"0000:{uuids[number].hex()}:00.0"

        def use(self):
            if uuids[0] == FULL:
                raise OSError("out of memory")

    return SimpleNamespace(
        cuda=SimpleNamespace(runtime=runtime, Device=Device, get_current_stream=lambda: stream,
                             alloc_pinned_memory=bytearray)
    )


def make_nccl(**overrides):
    dtypes = thdattn.comm.SingleComm.sum_dtypes
    constants = {f"NCCL_{name.upper()}": f"NCCL_{name.upper()}" for name in (*dtypes, "sum", "max")}
    return SimpleNamespace(
        **{**constants, "get_unique_id": lambda: b"id", "NcclCommunicator": Communicator, **overrides}
    )


@pytest.fixture
def start(monkeypatch):
    """start(gpus_of_rank, fn): NCCL on ranks that see the given GPUs; returns what fn(comm) made of each rank.

    peer: the ranks' peer memory, or None, and why.
    """
    found = [(None, "stand-ins have none")]
    monkeypatch.setattr(backend, "_peer_transport", lambda world, gpus, transport: found[-1])
    monkeypatch.setattr(backend, "_nccl_transport", lambda world, module, main: None)
    mine = threading.local()
    opened = []
    for module in (backend, nccl_gpus):
        monkeypatch.setattr(module, "load", lambda: (mine.cupy, mine.nccl))
    monkeypatch.setattr(mpi, "local_rank", lambda world: world.rank)
    monkeypatch.setattr(mpi, "free", lambda communicator: None)
    monkeypatch.setattr(mpi, "watch", lambda world, timeout: Watch(f"rank {world.rank}", timeout, None))
    monkeypatch.setattr(lanes, "_lanes", {})
    monkeypatch.setattr(lanes, "_stream_writes", lambda: lambda stream, address, number, flags: 0)
    monkeypatch.setattr(mpi, "find_ranks", lambda world, watched: None)
    monkeypatch.setenv("THDATTN_HOST", "node7")
    monkeypatch.delenv(SHARE, raising=False)

    def join(simulated, gpus, stand_in):
        mine.cupy, mine.nccl = make_cupy(gpus), stand_in
        world = World(simulated)
        comm = NcclComm(world, choose(survey(world, 10.0)), 10.0)
        opened.append(comm)
        return comm

    def start(gpus_of_rank, fn, stand_in=None, peer=None, why=""):
        stand_in = stand_in or make_nccl()
        found.append((peer, why))
        return thdattn.comm.run_local(
            len(gpus_of_rank),
            lambda simulated: fn(join(simulated, gpus_of_rank[simulated.rank], stand_in)),
            timeout=10,
        )

    def refusals(gpus_of_rank, stand_in=None, kind=RuntimeError):
        """The message that each rank raises."""

        def program(simulated):
            with pytest.raises(kind) as refusal:
                join(simulated, gpus_of_rank[simulated.rank], stand_in or make_nccl())
            return str(refusal.value)

        return thdattn.comm.run_local(len(gpus_of_rank), program, timeout=10)

    start.refusals = refusals
    yield start
    for comm in opened:
        comm.close()


FOUR_GPUS = [b"\x0a", b"\x0b", b"\x0c", b"\x0d"]


def test_every_rank_takes_the_gpu_of_its_number_and_the_id_of_rank_0(start):
    made = start([FOUR_GPUS] * 4, lambda comm: (comm._gpu, comm._nccl.made_with))
    assert made == [(rank, (4, b"id", rank)) for rank in range(4)]


def test_ranks_that_see_one_gpu_each_take_it(start):
    assert start([[b"\x0a"], [b"\x0b"]], lambda comm: comm._gpu) == [0, 0]


def test_ranks_share_gpus_where_nccl_is_told_to_let_them(start, monkeypatch):
    monkeypatch.setenv(SHARE, "1")
    assert start([FOUR_GPUS[:2]] * 4, lambda comm: comm._gpu) == [0, 1, 0, 1]
    monkeypatch.setenv(SHARE, "0")
    (refusal, *_) = start.refusals([FOUR_GPUS[:1]] * 2)
    assert refusal.startswith("ranks 0 and 1 have the same GPU")


def test_ranks_of_which_one_was_not_told_so_are_refused():
    answers = [(True, Gpu(0, "node7", "0000:0b:00.0", "aa", shareable)) for shareable in (True, False)]
    with pytest.raises(RuntimeError, match=f"ranks 0 and 1 have the same GPU.*set {SHARE}=1 on all ranks"):
        choose(answers)


def test_equal_gpus_of_two_nodes_are_two():
    # Both uuids were cut at a 0 byte; the nodes are built alike.
    gpus = [Gpu(0, host, "0000:0b:00.0", "") for host in ("node7", "node8")]
    assert choose([(True, gpu) for gpu in gpus]) == gpus
    with pytest.raises(RuntimeError, match=r"ranks 0 and 2 have the same GPU, PCI bus id 0000:0b:00.0 on node7"):
        choose([(True, gpu) for gpu in (*gpus, gpus[0])])


def no_id():
    raise OSError("no network interface")


def communicator_but_of_rank_1(size, unique_id, rank):
    if rank == 1:
        raise KeyError(7)  # what CuPy makes of NCCL errors it does not know
    return Communicator(size, unique_id, rank)


@pytest.mark.parametrize(("gpus", "refused", "message"), [
    ([[b"\x0a"], [b"\x0b"], [b"\x0b"]], {}, "ranks 1 and 2 have the same GPU, PCI bus id 0000:0b:00.0 on node7"),
    ([FOUR_GPUS[:2]] * 3, {}, "no usable GPU on rank 2: RuntimeError: rank number 2 of node7 sees 2 GPUs"),
    ([FOUR_GPUS] * 4, {"get_unique_id": no_id}, "NCCL made no unique id on rank 0: OSError: no network interface"),
    ([FOUR_GPUS] * 2, {"NcclCommunicator": communicator_but_of_rank_1}, "NCCL did not start on rank 1: KeyError: 7"),
    ([[b"\x0a"], [FULL]], {}, "no context on the GPU on rank 1: OSError: out of memory"),
], ids=["two on one GPU", "too few GPUs", "no id", "no communicator", "no memory"])
def test_start_that_fails_on_one_rank_raises_on_every_rank(start, gpus, refused, message):
    messages = start.refusals(gpus, make_nccl(**refused))
    assert len(messages) == len(gpus) and all(m.startswith(message) for m in messages)


def test_collectives_pass_pointers_counts_dtypes_and_the_current_stream(start):

    def program(comm):
        comm.all_gather(Array((3, 2), np.float16, 1000), Array((6, 2), np.float16, 2000))
        comm.reduce_scatter(Array((6, 2), ml_dtypes.bfloat16, 1000), Array((3, 2), ml_dtypes.bfloat16, 2000))
        comm.all_reduce(Array((5,), np.float32, 3000), "max")
        comm.all_reduce(Array((0, 4), np.float32, 0), "sum")
        return comm._nccl.calls

    calls = start([[b"\x0a"], [b"\x0b"]], program)[0]
    assert calls == [
        ("allGather", 1000, 2000, 12, "NCCL_UINT8", 77),
        ("reduceScatter", 1000, 2000, 6, "NCCL_BFLOAT16", "NCCL_SUM", 77),
        ("allReduce", 3000, 3000, 5, "NCCL_FLOAT32", "NCCL_MAX", 77),
    ]


def test_an_exchange_is_one_group_of_messages_in_the_order_of_its_slices(start):
    cupy = pytest.importorskip("cupy")

    def rows(pointer, shape):
        memory = cupy.cuda.UnownedMemory(pointer, 1 << 16, None, 0)
        return cupy.ndarray(shape, np.float16, cupy.cuda.MemoryPointer(memory, 0))

    def program(comm):
        x, y = rows(4096, (8, 2, 4)), rows(1 << 20, (8, 2, 4))
        if comm.rank == 1:  # the only one: ranks are threads here, with one stand-in for NCCL
            stand_in.groupStart = lambda: comm._nccl.calls.append("start")
            stand_in.groupEnd = lambda: comm._nccl.calls.append("end")
            wait = comm.exchange([(x[2:5], 0), (x[:0], 2), (x[7:], 2)], [(y[1:2], 2), (y[:1], 0)])
            assert wait is thdattn.comm.no_wait
        return comm._nccl.calls

    stand_in = make_nccl()
    assert start([[b"\x0a"], [b"\x0b"], [b"\x0c"]], program, stand_in)[1] == [
        "start",
        ("recv", (1 << 20) + 16, 16, "NCCL_UINT8", 2, 77),
        ("recv", 1 << 20, 16, "NCCL_UINT8", 0, 77),
        ("send", 4096 + 32, 48, "NCCL_UINT8", 0, 77),
        ("send", 4096 + 112, 16, "NCCL_UINT8", 2, 77),
        "end",
    ]


def test_bytes_that_come_through_peer_memory_are_counted(start, monkeypatch):
    peer = peer_memory(gather_heads=lambda sends, recvs, at_once: [],
                       reduce_partials=lambda *arguments: thdattn.comm.no_wait)
    monkeypatch.setattr(NcclComm, "watched", lambda *arguments: nullcontext())

    def program(comm):
        keys, result = (np.zeros((5, 2, 4), np.float32) for _ in range(2))
        counts = []
        for call, arguments in ((comm.gather_heads, ([keys, keys], [])), (comm.reduce_partials, (None, [result], True)),
                                (comm.reduce_partials, (None, [result], False))):
            call(*arguments)
            counts.append(comm.received_bytes)
        return counts

    assert start([[b"\x0a"], [b"\x0b"], [b"\x0c"]], program, peer=peer) == [[640, 960, 1280]] * 3


def test_peer_memory_waits_within_the_deadline_of_the_comm(start):
    made = threading.local()
    peer = peer_memory(wait_within=lambda waiting, _: setattr(made, "watch", waiting.__self__))
    assert start([FOUR_GPUS] * 2, lambda comm: made.watch is comm._watch, peer=peer) == [True, True]


def test_peer_memory_is_not_used_after_the_end(start):
    def program(comm):
        comm.close()
        for call in (lambda: comm.gather_heads([np.zeros(3)], []), lambda: comm.owner_partials([], [], True),
                     lambda: comm.reduce_partials(None, [np.zeros(3)], False)):
            with pytest.raises(RuntimeError, match="nccl comm is closed"):
                call()

    start([FOUR_GPUS] * 2, program, peer=peer_memory())


@pytest.mark.parametrize("has_peer_memory", [True, False])
def test_an_exchange_with_sizes_goes_through_peer_memory_where_there_is_some(start, has_peer_memory):
    said = []
    peer = peer_memory(exchange=lambda *arguments: said.append(arguments) or (lambda: said.append("waits")))

    def program(comm):
        if comm.rank == 0:
            comm.exchange([], [])()
            comm.exchange([], [], none)()

    none = np.zeros((2, 2), int)
    start([FOUR_GPUS] * 2, program, peer=peer if has_peer_memory else None)
    assert said == [([], [], none), "waits"] * has_peer_memory


def test_every_collective_is_between_two_numbers_that_the_stream_writes(start, monkeypatch):
    done = []

    def written(stream, address, number, flags):
        done.append((stream, address, number))

    monkeypatch.setattr(lanes, "_stream_writes", lambda: written)
    monkeypatch.setattr(Communicator, "allReduce", lambda self, *arguments: done.append("NCCL"), raising=False)

    def program(comm):
        for _ in range(2):
            comm.all_reduce(Array((5,), np.float32, 3000), "sum")
        comm.agree("plan", 7)
        with comm.watched("replay"):
            comm.all_reduce(Array((5,), np.float32, 3000), "sum")

    start([[b"\x0a"], [b"\x0b"]], lambda comm: program(comm) if comm.rank == 0 else comm.agree("plan", 7))
    (stream, begin, number), (_, end, _) = done[1], done[3]
    assert done.pop(0) == (stream, begin, 0), "what tells whether the driver can"
    assert (stream, number) == (77, 1) and end == begin + 4
    numbered = [((77, begin, n), "NCCL", (77, end, n)) for n in (1, 2, 3)]
    assert done == [x for operation in numbered for x in operation]


def test_driver_that_cannot_have_streams_write_is_said_to_have_no_deadline(start, monkeypatch, caplog):
    monkeypatch.setattr(lanes, "_stream_writes", lambda: lambda *arguments: 801)
    start([[b"\x0a"], [b"\x0b"]], lambda comm: comm.all_reduce(Array((5,), np.float32, 3000), "sum"))
    assert "(cuStreamWriteValue32: error 801), so no deadline holds for collectives on this GPU" in caplog.text


def test_nothing_is_written_into_a_stream_that_is_captured(start, monkeypatch):
    monkeypatch.setattr(lanes, "_stream_writes", lambda: pytest.fail)

    def program(comm):
        comm._cupy.cuda.get_current_stream().is_capturing = lambda: True
        comm.all_reduce(Array((5,), np.float32, 3000), "sum")
        return [call[0] for call in comm._nccl.calls]

    assert start([[b"\x0a"], [b"\x0b"]], program) == [["allReduce"]] * 2


def test_rank_that_is_alone_is_not_watched(start, monkeypatch):
    monkeypatch.setattr(lanes, "_stream_writes", lambda: pytest.fail)
    start([[b"\x0a"]], lambda comm: comm.all_reduce(Array((5,), np.float32, 3000), "sum"))


def test_group_takes_the_gpu_of_its_rank_and_is_closed_with_the_comm(start):
    def program(comm):
        group = comm.split(comm.rank)
        comm.close()
        return group._gpu, group._nccl.made_with, group._nccl.calls

    made = start([FOUR_GPUS] * 2, program)
    assert made == [(rank, (1, b"id", 0), [("destroy",)]) for rank in range(2)]


@pytest.mark.parametrize(("reason", "transport"), [
    ("", "'peer'"), ("the ranks are on 2 machines", "'nccl': the ranks are on 2 machines"),
])
def test_ranks_say_how_keys_travel_between_them_and_why(start, reason, transport):
    peer = None if reason else peer_memory()
    made = start([FOUR_GPUS] * 2, lambda comm: (repr(comm), comm.no_peer_memory, comm.overlaps), None, peer, reason)
    assert made == [(f"<NcclComm rank {rank} of 2, transport {transport}>", reason, not reason) for rank in range(2)]


@pytest.mark.parametrize("transport", ["auto", "peer", "nccl"])
def test_one_rank_has_no_peers_whatever_transport_its_group_was_split_from(transport):
    assert PEER_TRANSPORT(None, [FOUR_GPUS], transport) == (None, "there is one rank")


@pytest.mark.parametrize(("ranks", "wanted", "ctas"), [(1, "4", None), (2, None, 4), (2, "6", 6), (2, "0", None)])
def test_several_ranks_without_peer_memory_have_collectives_beside_kernels(monkeypatch, ranks, wanted, ctas):
    pytest.importorskip("cupy")
    monkeypatch.delenv("THDATTN_NCCL_CTAS", raising=False)
    if wanted is not None:
        monkeypatch.setenv("THDATTN_NCCL_CTAS", wanted)
    monkeypatch.setattr(backend, "NcclTransport", lambda world, module, main, number: (main, number))
    made = thdattn.comm.run_local(ranks, lambda comm: NCCL_TRANSPORT(World(comm), None, comm.rank))
    assert made == [ctas and (rank, ctas) for rank in range(ranks)]


def test_a_number_of_thread_blocks_that_is_none_is_refused_on_all_ranks(monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setenv("THDATTN_NCCL_CTAS", "many")

    def program(comm):
        with pytest.raises(RuntimeError, match="THDATTN_NCCL_CTAS is no number on rank 0: ValueError"):
            NCCL_TRANSPORT(World(comm), None, None)

    thdattn.comm.run_local(2, program)


def test_close_destroys_the_communicator_once(start):
    def program(comm):
        comm.close()
        comm.close()
        return comm._nccl.calls

    assert start([[b"\x0a"]], program) == [[("destroy",)]]


def test_array_on_another_gpu_is_named(start):
    def program(comm):
        comm.all_reduce(Array((5,), np.float32, device_id=3), "sum")

    with pytest.raises(ValueError, match="array is on GPU 3, but rank 0 works on GPU 0"):
        start([[b"\x0a"]], program)


def test_host_array_is_refused_with_the_remedy(start):
    with pytest.raises(TypeError, match=r"array is a numpy.ndarray, but the nccl backend takes CuPy arrays"):
        start([[b"\x0a"]], lambda comm: comm.all_reduce(np.zeros(3), "sum"))


def test_missing_cupy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"CuPy cannot be loaded .*pip install .*\[cuda13\]"):
        nccl_gpus.load()


def test_cupy_without_nccl_says_what_to_install(monkeypatch):
    without = SimpleNamespace(available=False)
    cuda = SimpleNamespace(nccl=without)
    for name, module in {
        "cupy": SimpleNamespace(cuda=cuda),
        "cupy.cuda": cuda,
        "cupy.cuda.nccl": without,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(RuntimeError, match="CuPy finds no NCCL library; pip install"):
        nccl_gpus.load()
