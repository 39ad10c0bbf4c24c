"""NCCL between the ranks of fake_gpus.py: collectives begin when all ranks have come, and end when all have read.

Every operation is three steps of its stream. It is offered; it writes what it receives, once all ranks that it needs
have offered theirs; it ends when nobody reads from this rank any more. A communicator's operations follow each other in
the order of their launch, also those of graphs, as NCCL orders them.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict

import numpy as np
from fake_gpus import at

NCCL_UINT8, NCCL_FLOAT32, NCCL_SUM = 1, 7, 0
_open: list[list] = []  # calls of the group that is open


def groupStart():
    _open.append([])


def groupEnd():
    calls = _open.pop()
    assert len({(id(comm), stream) for comm, stream, *_ in calls}) <= 1, "one communicator and one stream in a group"
    if calls:
        comm, stream, *_ = calls[0]
        comm.launch(stream, [call for _, _, *call in calls])


class Operation:
    """Launch of a rank. parts: its collectives and messages."""

    def __init__(self, previous):
        self.previous, self.parts, self.offered, self.written, self.ended = previous, [], False, False, False


class Clique:
    """State that all ranks share: collectives by number, and messages by sender, receiver and number."""

    def __init__(self, size):
        self.size = size
        self.collectives, self.messages = defaultdict(dict), defaultdict(dict)


class Communicator:
    """Communicator of a rank, as CuPy has it."""

    def __init__(self, machine, clique, rank):
        self._machine, self._clique, self._rank = machine, clique, rank
        self._counts, self._last = defaultdict(int), None

    def allGather(self, send, recv, count, dtype, stream):
        _open[-1].append((self, stream, "gather", send, recv, count))

    def reduceScatter(self, send, recv, count, dtype, op, stream):
        assert (dtype, op) == (NCCL_FLOAT32, NCCL_SUM)
        _open[-1].append((self, stream, "reduce", send, recv, count))

    def send(self, send, count, dtype, peer, stream):
        _open[-1].append((self, stream, "send", send, peer, count))

    def recv(self, recv, count, dtype, peer, stream):
        _open[-1].append((self, stream, "recv", recv, peer, count))

    def destroy(self):
        self._clique = None

    def launch(self, stream, calls):
        self._machine.streams[stream].put_launched(lambda: self._steps(calls))

    def _steps(self, calls):
        operation = self._last = Operation(self._last)
        for kind, address, other, count in calls:
            operation.parts.append((kind, address, other, count, self._meeting(kind, other)))
            operation.parts[-1][-1][self._rank] = operation, kind, address, count
        return [
            (lambda reached: setattr(operation, "offered", True),
             lambda reached: operation.previous is None or operation.previous.ended),
            (lambda reached: self._write(operation), lambda reached: self._is_met(operation, "offered")),
            (lambda reached: setattr(operation, "ended", True), lambda reached: self._is_met(operation, "written")),
        ]

    def _meeting(self, kind, other):
        """Return the table in which the ranks of a collective, or the two of a message, find each other."""
        table, key = self._clique.collectives, ()
        if kind in ("send", "recv"):
            table = self._clique.messages
            key = (self._rank, other) if kind == "send" else (other, self._rank)
        number = self._counts[key]
        self._counts[key] += 1
        return table[(*key, number)]

    def _is_met(self, operation, state):
        """Return whether all ranks that it meets have come to a state."""
        for kind, *_, meeting in operation.parts:
            wanted = 2 if kind in ("send", "recv") else self._clique.size
            if len(meeting) < wanted or not all(getattr(theirs, state) for theirs, *_ in meeting.values()):
                return False
        return True

    def _write(self, operation):
        for kind, address, other, count, meeting in operation.parts:
            theirs = {rank: there for rank, (_, _, there, _) in meeting.items()}
            assert len({size for *_, size in meeting.values()}) == 1, "ranks have other sizes"
            if kind == "recv":
                ctypes.memmove(address, theirs[other], count)
            elif kind == "gather":
                for rank in theirs.keys() - {self._rank}:
                    ctypes.memmove(other + rank * count, theirs[rank], count)
                assert address == other + self._rank * count, "own rows are in place"
            elif kind == "reduce":
                parts = [at(there + 4 * self._rank * count, (count,), np.float32) for there in theirs.values()]
                at(other, (count,), np.float32)[...] = np.sum(parts, axis=0)
        operation.written = True
