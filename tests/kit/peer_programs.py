"""Random programs of several ranks, for tests of peer memory and of NCCL beside kernels, over fake_gpus.py.

They run the real method, with the real windows or the real schedule of NCCL's collectives.

Forward and backward passes of a few packs, exchanges, and graphs of both, on streams that are delayed at random. Inputs
are random integers, so a row of another call, rank or layer gives another sum.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from types import SimpleNamespace
from unittest import mock

import fake_nccl
import numpy as np
from fake_exchange import Gathered, meet, take
from fake_gpus import CUDARuntimeError, Machine, Stream, addresses, at, installed

from thdattn.comm import Comm, no_wait, slices
from thdattn.comm.nccl import communicator
from thdattn.comm.nccl import transport as nccl_transport
from thdattn.comm.peer import exchange as exchange_launcher
from thdattn.comm.peer import transport
from thdattn.comm.slices import SliceSpec, copy
from thdattn.engines import AttentionOptions, BackwardInputs, ForwardInputs
from thdattn.jit.structs import RANK_FLAGS
from thdattn.methods import all_gather
from thdattn.methods.base import MethodOptions
from thdattn.plan.workspace import Workspace, pair_of

HEADS, WIDTH = 4, 2
GROUPS = (2, 2), (1, 1, 1, 1), (1, 3), (1, 1, 2)
WEIGHTS = np.arange(1, 1000, dtype=np.float32)[:, None, None]


def mix(x):
    """Return a sum that tells rows from each other."""
    return (WEIGHTS[: len(x)] * x).sum(0)


# --- an engine and a plan ----------------------------------------------------------------------------------------


class Engine:
    """Engine for the pipeline, with kernels on the current stream that compute simpler things.

    fails: the step that raises next, as where there is no memory left, on all ranks; "": none does.
    """

    fails = ""

    def __init__(self, machine):
        self.machine = machine

    def empty(self, shape, dtype):
        """Return an array; of integers one of its own, as plans compute theirs at once, not in stream order."""
        return np.empty(shape, dtype) if np.dtype(dtype).kind == "i" else self.machine.empty(shape, dtype)

    def poisoned(self, shape, dtype):
        """Return an array that the current stream fills with NaN, as earlier users may write there until now."""
        made = self.empty(shape, dtype)
        self.machine.stream.launch(lambda x: x.fill(np.nan), made)
        return made

    def capture(self):
        return None if self.machine.graph is None else 0

    def _may_fail(self, step):
        if self.fails == step:
            self.fails = ""
            raise MemoryError

    def to_sequence_order(self, sources, plan, into, own, peer_exchange):
        def move(outs, sources, own):
            for out, parts, mine in zip(outs, sources, own or (None, None), strict=True):
                rows = np.concatenate(parts)
                if mine is not None:
                    rows[first : first + len(mine)] = mine
                out[plan.rank_order] = rows

        first = plan.cp_rank * plan.local_key_rows
        if peer_exchange is None:
            self.machine.stream.launch(move, into, sources, own)
        else:
            rows = plan.local_key_rows
            whole = [at(x.data.ptr, (rows, HEADS, WIDTH), x.dtype) for x in own]
            arrays = addresses([into, sources, whole])
            meet(self.machine.stream, Gathered(plan.rank_order, rows, *arrays, peer_exchange.to), peer_exchange.flags)
            take(self.machine.stream, peer_exchange.flags)
        return into

    def attn_fwd(self, inputs, options, outputs):
        def attend(out, q, k, v):
            out[...] = q + mix(k) - mix(v)

        self._may_fail("attention")
        self.machine.stream.launch(attend, outputs.arrays[0], inputs.q, inputs.k, inputs.v)
        return *outputs.arrays, None

    def attn_bwd(self, inputs, options, outputs):
        def attend(dq, dk, dv, dout, k, v, out):
            dq[...], dk[...], dv[...] = out + dout, k + mix(dout), v * mix(dout)

        def send_to_owners(partials, places, *grads):
            for owners, x in zip(partials, grads, strict=True):
                for rank, address in enumerate(owners[: plan.cp_size]):
                    mine = places[:, 0] == rank
                    if mine.any():
                        there = at(int(address), (1 + places[mine, 1].max(), *x.shape[1:]), np.float32)
                        there[places[mine, 1]] = x[mine]

        self._may_fail("attention")
        dout, _, k, v, out, _, plan = inputs
        most = len(k), max(options.head_groups)
        dk, dv = (plan.workspace.array(x, k.shape) for x in pair_of("partials", most, plan.head_dims, outputs.kv_dtype))
        self.machine.stream.launch(attend, outputs.dq, dk, dv, dout, k, v, out)
        if outputs.owners is None:
            return outputs.dq, dk, dv
        partials, places = outputs.owners
        self.machine.stream.launch(send_to_owners, partials["of"].copy(), places.copy(), dk, dv)
        return outputs.dq, None, None

    def nan_if_invalid(self, plan, *results):
        """Do nothing: lengths are right."""


class Plan:
    head_dims = WIDTH, WIDTH

    def __init__(self, engine, rank, size, local_rows):
        self.engine, self._kept = engine, {}
        self.workspace = Workspace(SimpleNamespace(empty=engine.poisoned))
        self.cp_rank, self.cp_size, self.local_key_rows, self.key_rows = rank, size, local_rows, size * local_rows
        self.rank_order = np.random.default_rng(local_rows).permutation(self.key_rows)
        self.rows = engine.empty((local_rows,), np.int64)
        engine.machine.stream.launch(np.copyto, self.rows, self.rank_order[rank * local_rows :][:local_rows])

    def memoize(self, key, make):
        return self._kept[key] if key in self._kept else self._kept.setdefault(key, make())

    def make(self, launches):
        launches()



# --- a rank's program --------------------------------------------------------------------------------------------


class Layer:
    """Attention of a plan: inputs of all ranks, by number, and what must come out on this one."""

    def __init__(self, program, plan, number):
        self.program, self.plan = program, plan
        self.inputs = [program.engine.empty((plan.local_key_rows, HEADS, WIDTH), np.float32) for _ in range(4)]
        self.write(number)

    def write(self, number):
        """Write other inputs into the same arrays."""
        shape = self.plan.cp_size, 4, self.plan.local_key_rows, HEADS, WIDTH
        made = np.random.default_rng(number).integers(-4, 5, shape).astype(np.float32)
        for x, values in zip(self.inputs, made[self.plan.cp_rank], strict=True):
            self.program.machine.stream.launch(np.copyto, x, values)
        ks, vs = (np.empty((self.plan.key_rows, HEADS, WIDTH), np.float32) for _ in range(2))
        ks[self.plan.rank_order], vs[self.plan.rank_order] = (made[:, i].reshape(ks.shape) for i in (1, 2))
        q, k, v, dout = made[self.plan.cp_rank]
        douts = sum(mix(x) for x in made[:, 3])
        out = q + mix(ks) - mix(vs)
        self.wanted = {"out": out, "dq": out + dout, "dk": k * self.plan.cp_size + douts, "dv": v * douts}

    def gather(self, groups, at_once=False):
        program, (_, k, v, _) = self.program, self.inputs
        return all_gather.gather(program.comm, self.plan, k, v, groups, at_once)

    def forward(self, keys, keeps=False):
        options = MethodOptions(AttentionOptions(1.0, deterministic=True), keep_keys=keeps)
        inputs = ForwardInputs(*self.inputs[:3], self.plan)
        self.out, self.lse, _, self.kept = all_gather.forward(self.program.comm, inputs, options, False, keys)
        return {"out": self.out}

    def backward(self, keys, at_once):
        q, k, v, dout = self.inputs
        inputs = BackwardInputs(dout, q, k, v, self.out, self.lse, self.plan)
        options = MethodOptions(AttentionOptions(1.0, deterministic=True))
        dq, self.sums = all_gather.backward(self.program.comm, inputs, options, self.kept, at_once, keys)
        return {"dq": dq}

    def dk_dv(self):
        return dict(zip(("dk", "dv"), self.sums(), strict=True))

    def check(self, found):
        for name, x in found.items():
            self.program.machine.stream.launch(self.program.compare, x, self.wanted[name])


class Exchange:
    """Slices of heads that all ranks send each other; the same on all ranks, but for the numbers in them."""

    def __init__(self, program, draw):
        self.program, size = program, program.comm.size
        self.heads = [slice(first, draw.randint(first + 1, HEADS)) for first in draw.choices(range(HEADS), k=2)]
        width = min(heads.stop - heads.start for heads in self.heads)
        self.out_of, self.into = (slice(heads.start, heads.start + width) for heads in self.heads)
        self.slices = [(sender, receiver, draw.randint(1, 4)) for sender in range(size) for receiver in range(size)
                       if sender != receiver for _ in range(draw.choice([0, 1, 1, 2]))]
        self.sizes = np.zeros((size, size), int)
        for sender, receiver, rows in self.slices:
            self.sizes[sender, receiver] += rows * width * WIDTH * 4
        rank = program.comm.rank
        self.sources = [(self.empty(rows), receiver) for sender, receiver, rows in self.slices if sender == rank]
        self.wait = no_wait
        self.write(next(program.numbers))

    def empty(self, rows):
        return self.program.engine.empty((rows, HEADS, WIDTH), np.float32)

    def write(self, number):
        """Write other rows into the same arrays."""
        rank, rng, sources, self.wanted = self.program.comm.rank, np.random.default_rng(number), iter(self.sources), []
        for sender, receiver, rows in self.slices:
            made = rng.integers(-99, 99, (rows, HEADS, WIDTH)).astype(np.float32)
            if sender == rank:
                self.program.machine.stream.launch(np.copyto, next(sources)[0], made)
            elif receiver == rank:
                self.wanted.append(made[:, self.out_of])

    def start(self):
        memory, rank = self.program.memory, self.program.comm.rank
        places = [(self.empty(rows), sender) for sender, receiver, rows in self.slices if receiver == rank]
        self.found = [x[:, self.into] for x, _ in places]
        sends = [(x[:, self.out_of], receiver) for x, receiver in self.sources]
        recvs = [(x, sender) for x, (_, sender) in zip(self.found, places, strict=True)]
        self.wait = memory.exchange(sends, recvs, self.sizes)
        return self

    def arrive(self):
        self.wait()
        self.wait = no_wait

    __del__ = arrive

    def check(self):
        for x, wanted in zip(self.found, self.wanted, strict=True):
            self.program.machine.stream.launch(self.program.compare, x, wanted)


class Swap(Exchange):
    """Some rows of all heads of which all ranks make all rows of some, or the other way round, of an array or two."""

    def __init__(self, program, draw):
        self.program, self.back, self.at_once = program, draw.random() < 0.5, draw.random() < 0.7
        size = program.comm.size
        self.rows, self.shares = draw.choices([1, 3, 4, 40], k=size), draw.choices([1, 2], k=draw.choice([1, 2]))
        heads = [SliceSpec(1, *self.ends([share] * size)) for share in self.shares]
        rows = [SliceSpec(0, *self.ends(self.rows))]
        sizes = np.array(self.rows)[:, None] * sum(self.shares) * WIDTH * 4 * (1 - np.eye(size, dtype=int))
        cuts = heads, rows * len(heads)
        self.swap = slices.AllToAllSpec(cuts[self.back], cuts[not self.back], sizes.T if self.back else sizes)
        rank = program.comm.rank
        self.sources = [program.engine.empty(self.shapes(rank, x)[self.back], np.float32) for x in self.shares]
        self.wait = no_wait
        self.write(next(program.numbers))

    def shapes(self, rank, share):
        """Return the shapes of a rank's rows of all heads, and of all rows of some heads."""
        return (self.rows[rank], len(self.rows) * share, WIDTH), (sum(self.rows), share, WIDTH)

    def write(self, number):
        comm, rng, self.wanted = self.program.comm, np.random.default_rng(number), []
        for source, share, cut in zip(self.sources, self.shares, self.swap.outs, strict=True):
            shapes = [self.shapes(rank, share)[self.back] for rank in range(comm.size)]
            made = [rng.integers(-99, 99, shape).astype(np.float32) for shape in shapes]
            self.program.machine.stream.launch(np.copyto, source, made[comm.rank])
            self.wanted.append(np.concatenate([cut.of(x, comm.rank) for x in made], axis=int(self.back)))

    def start(self):
        memory = self.program.memory
        shapes = [self.shapes(self.program.comm.rank, share)[not self.back] for share in self.shares]
        self.found = [self.program.engine.empty(shape, np.float32) for shape in shapes]
        if memory.exchanges_by_kernel(self.swap, self.at_once):
            self.wait = memory.all_to_all(self.swap, self.sources, self.found)
        else:
            self.wait = Comm.all_to_all(self.program.comm, self.swap, self.sources, self.found)
        return self

    def ends(self, each):
        """Return the begins and the ends of the ranks' shares, of so many each."""
        return tuple(itertools.accumulate(each[:-1], initial=0)), tuple(itertools.accumulate(each))


class Pack:
    """A plan, the stream of its calls, and what is on its way: each call does something with one layer of it."""

    def __init__(self, program, stream, local_rows):
        self.program, self.stream, self.numbers = program, stream, program.numbers
        self.plan = Plan(program.engine, program.comm.rank, program.comm.size, local_rows)
        self.early, self.saved, self.summing, self.exchanging, self.graphs = [], [], [], [], []

    def layer(self):
        return Layer(self.program, self.plan, next(self.numbers))

    def gather(self, draw):
        if len(self.early) < all_gather.IN_FLIGHT:
            layer = self.layer()
            self.early.append((layer, layer.gather(draw.choice([(HEADS,), *GROUPS]))))

    def forward(self, draw):
        if self.early and (len(self.early) == all_gather.IN_FLIGHT or draw.random() < 0.5):
            layer, keys = self.early.pop(draw.randrange(len(self.early)))
        else:
            layer = self.layer()
            keys = layer.gather(draw.choice([(HEADS,), *GROUPS]), at_once=True)
        with self.program.failing(draw):
            layer.check(layer.forward(keys, keeps=draw.random() < 0.3))
            self.saved.append(layer)

    def backward(self, draw):
        if self.saved and len(self.early) < all_gather.IN_FLIGHT:
            layer, at_once = self.saved.pop(), draw.random() < 0.5
            keys = None if layer.kept else layer.gather(draw.choice([(HEADS,), *GROUPS]), at_once=draw.random() < 0.5)
            with self.program.failing(draw):
                layer.check(layer.backward(keys, at_once))
                self.summing.append(layer)
                if at_once:
                    self.dk_dv(draw)

    def dk_dv(self, draw):
        if self.summing:
            layer = self.summing.pop()
            layer.check(layer.dk_dv())

    def exchange(self, draw):
        """Start one or some, and forget what they sent; other arrays get its memory."""
        for _ in range(draw.choice([1, 1, 3])):
            self.exchanging.append(draw.choice([Exchange, Swap])(self.program, draw).start())
            self.exchanging[-1].sources.clear()

    def exchanged(self, draw):
        while self.exchanging and draw.random() < 0.8:
            exchange = self.exchanging.pop(draw.randrange(len(self.exchanging)))
            self.program.machine.stream = draw.choice([self.stream, self.stream, Stream(self.program.machine)])
            exchange.arrive()
            if draw.random() < 0.8:
                exchange.check()
            self.stream.wait_event(self.program.machine.stream.record())
            self.program.machine.stream = self.stream

    def drop(self, draw):
        """Forget what is under way; other arrays get its memory."""
        for under_way in (self.early, self.summing):
            if under_way and draw.random() < 0.5:
                under_way.pop(0)
                self.forward(draw)

    def capture(self, draw):
        """Capture two layers, forward and backward, the second one's keys asked for early."""
        if self.early:
            return
        layers, groups, at_once = [self.layer() for _ in range(2)], draw.choice(GROUPS), draw.random() < 0.5
        exchanges = [kind(self.program, draw) for kind in draw.choices([Exchange, Swap], k=2)]
        for exchange in (*exchanges, *exchanges):  # each at both turns of a window
            exchange.start().arrive()
        first = self.layer()  # makes windows, which a capture cannot
        first.forward(first.gather(groups, at_once=True))
        first.backward(first.gather(groups, at_once=True), at_once)
        self.summing.append(first)
        self.program.machine.graph = graph = {}
        for exchange in exchanges:
            exchange.start()
        ahead = layers[1].gather(groups)
        found = [layers[0].forward(layers[0].gather(groups, at_once=True)), layers[1].forward(ahead)]
        for layer, results in zip(layers[::-1], found[::-1], strict=True):
            results |= layer.backward(layer.gather(groups, at_once=True), at_once) | layer.dk_dv()
        for exchange in exchanges:
            exchange.arrive()
        self.program.machine.graph = None
        self.graphs.append((graph, list(zip(layers, found, strict=True)), exchanges))

    def replay(self, draw):
        if self.graphs:
            graph, found, exchanges = draw.choice(self.graphs)
            self.program.memory.enter()  # as comm.watched does
            for x in (*(layer for layer, _ in found), *exchanges):
                x.write(next(self.numbers))
            self.stream.replay(graph, self.stream)
            for exchange in exchanges:
                exchange.check()
            for layer, results in found:
                layer.check(results)


class Program:
    """One rank: a few packs at a time, and calls drawn at random, the same on all ranks.

    Args:
        cliques: those of NCCL's two communicators; empty: peer memory exchanges all.
    """

    def __init__(self, machine, rank, cliques=()):
        machine.become(rank)
        self.machine, self.engine, self.numbers = machine, Engine(machine), iter(range(1000))
        if cliques:
            main, second = (fake_nccl.Communicator(machine, clique, rank) for clique in cliques)
            with mock.patch.object(communicator, "start_with_few_blocks", lambda *_: second):
                self.memory = nccl_transport.NcclTransport(machine.world(rank), fake_nccl, main)
        else:
            self.memory = transport.PeerTransport(machine.world(rank))
        self.comm = SimpleNamespace(
            size=machine.size, rank=rank, overlaps=True, reads_peers=not cliques, gather_heads=self.memory.gather_heads,
            exchange=self.memory.exchange, owner_partials=self.memory.owner_partials,
            reduce_partials=self.memory.reduce_partials, drop_partials=self.memory.drop_partials)
        self.num_checked = self.num_wrong = 0

    def enqueue(self, draw, num_calls=40):
        streams, packs = [self.machine.stream, Stream(self.machine)], []
        for _ in range(num_calls):
            if not packs or draw.random() < 0.1:
                self.machine.stream = draw.choice(streams)
                packs = [Pack(self, self.machine.stream, draw.randint(1, 6)), *packs[:2]]
            pack = draw.choice(packs)
            self.machine.stream = pack.stream
            often = pack.gather, pack.forward, pack.backward, pack.replay
            seldom = pack.forward, pack.backward, pack.dk_dv, pack.exchange, pack.exchanged, pack.drop, pack.capture
            draw.choice([*often, *often, *seldom])(draw)

    def compare(self, found, wanted):
        self.num_checked += 1
        self.num_wrong += not np.array_equal(found, wanted)

    @contextlib.contextmanager
    def failing(self, draw):
        """Let an attention within raise, or a window that has to grow, on all ranks."""
        def is_full(step, about):
            if step == "allocate":
                raise CUDARuntimeError(2)

        self.engine.fails, full = draw.choice(["attention", *[""] * 9]), draw.random() < 0.1
        refuses = is_full if full else self.machine.gpu.refuses
        with contextlib.suppress(MemoryError), mock.patch.object(self.machine.gpu, "refuses", refuses):
            yield
        self.engine.fails = ""


@contextlib.contextmanager
def machine_of(size, seed):
    machine = Machine(size, seed)

    def enqueue_copy(place, source):
        machine.stream.launch(copy, place, source)

    with (installed(machine),
          mock.patch.object(transport, "copy", enqueue_copy), mock.patch.object(slices, "copy", enqueue_copy),
          mock.patch.object(nccl_transport, "copy", enqueue_copy),
          mock.patch.object(nccl_transport, "WORTH_OVERLAPPING", 0),
          mock.patch.object(transport, "WORTH_COPYING", 0),  # so that some swaps are of copies
          mock.patch.object(exchange_launcher, "_LEAST_BYTES", 64),  # several chunks each, some empty
          mock.patch.object(transport.PeerTransport, "_probe", lambda memory: None)):
        yield machine


def results(size, seed, enqueue=Program.enqueue, by_nccl=False):
    """Return (checked, wrong) of one random program, or of one that enqueues this, on one random order of steps."""
    with machine_of(size, seed) as machine:
        programs, cliques = [], [fake_nccl.Clique(size) for _ in range(2 * by_nccl)]
        for rank in range(size):
            programs.append(Program(machine, rank, cliques))
            enqueue(programs[-1], random.Random(seed))
        machine.run()
        for program in [] if by_nccl else programs:
            memory = program.memory._memory
            for window in (x for pair in (*memory._pairs.values(), *memory._outgrown) for x in pair.windows):
                flags = window.array(-window._header, (size,), RANK_FLAGS)
                assert not flags["ready"].any() and not flags["offered"].any() and flags["taken"][:, 0].all()
    return sum(x.num_checked for x in programs), sum(x.num_wrong for x in programs)
