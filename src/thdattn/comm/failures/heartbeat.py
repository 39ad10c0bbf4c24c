"""Heartbeat: a side process that tells other ranks what this rank does, while Python's lock here is held or not.

Run as a program, this file is the side process. It owns a UDP socket and answers whoever knows its token: with the
state of the rank's process, and with the operation that the rank noted last in memory that both have. It ends with the
rank. Messages have one size and are never unpickled; what lacks the token is ignored.

The other half of the file is the rank's: it starts that process, notes operations and asks other ranks' processes.
"""

from __future__ import annotations

import atexit
import errno
import hmac
import logging
import mmap
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import NamedTuple

WAITS, LEFT, GPU_WAITS, GPU_LEFT, ENDED = b"w", b"l", b"W", b"L", b"e"
_TOKEN = 16  # bytes
_NOTE = struct.Struct("<qqdc48s")  # comm, number, since when, one of the above, what; behind the token
_SINCE = struct.Struct("<dc")  # the middle of a note
_MESSAGE = struct.Struct(f"<{_TOKEN}s{_NOTE.format[1:]}cd")  # a question is its token and zeros
_SINCE_AT = _TOKEN + 16
_ERROR = struct.Struct("=I")  # what an entry of the error queue begins with
_TICK = 1.0
_IP_RECVERR, _ERROR_QUEUE = 11, 0x2000  # of Linux: says which datagrams found no socket

logger = logging.getLogger("thdattn")


class Contact(NamedTuple):
    """Where the side process of a rank listens, and the token that it answers to, which no other process has."""

    address: str
    port: int
    token: bytes


class Answer(NamedTuple):
    """What a side process says of its rank.

    Attributes:
        state: of the process, as /proc has it: b"R" runs, b"S" sleeps, b"D" waits for a disk, b"T" is stopped.
        state_seconds: for how long that has been so.
        comm: the comm of the last operation, and its number there.
        phase: WAITS, LEFT, GPU_WAITS, GPU_LEFT or ENDED.
        seconds: since when the rank is in that phase.
    """

    comm: int
    number: int
    seconds: float
    phase: bytes
    what: str
    state: bytes
    state_seconds: float


class Heard(NamedTuple):
    """When a rank's side process answered last, its answer, and whether both have ended since."""

    when: float
    answer: Answer
    ended: bool


# --- the rank --------------------------------------------------------------------------------------------------

_memory: mmap.mmap | None = None  # token and note; None: nobody reads them


def note(comm: int, number: int, what: str, phase: bytes = WAITS) -> None:
    """Note an operation, in about 0.2 us."""
    if _memory is not None:
        _NOTE.pack_into(_memory, _TOKEN, comm, number, time.monotonic(), phase, what.encode())


def note_phase(phase: bytes) -> None:
    """Note another phase of the same operation."""
    if _memory is not None:
        _SINCE.pack_into(_memory, _SINCE_AT, time.monotonic(), phase)


class SideProcess:
    """Side process of this rank, which ends with it, and the socket by which this rank asks others'.

    Args:
        address: the one of this machine that both sockets are bound to.

    Attributes:
        heard: by token, what was last heard of ranks; of those that never answered there is nothing.
    """

    def __init__(self, address: str) -> None:
        self.heard: dict[bytes, Heard] = {}
        self._asked: set[bytes] = set()
        token, memory = _shared_memory()
        self._questions, self._answers = _bound(address), _bound(address)
        self._questions.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        self.contact = Contact(address, self._answers.getsockname()[1], token)
        # NOTE: this process keeps the socket that it never reads: the system refuses datagrams once both have ended.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(memory), str(os.getpid())],
            stdin=self._answers.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[memory])
        process.returncode = 0  # it outlives this object, of which Popen would warn

    def ask(self, contact: Contact) -> None:
        """Ask a rank's side process; `hear` takes in what it says."""
        self._asked.add(contact.token)
        for _ in range(2):  # the first call may raise what became of an earlier datagram
            with suppress(OSError):
                self._questions.sendto(contact.token.ljust(_MESSAGE.size, b"\0"), contact[:2])
                return

    def hear(self) -> None:
        """Take in what has come since the last call."""
        for text, _ in self._received(0):
            self.heard[text[:_TOKEN]] = Heard(time.monotonic(), _answer(text), False)
        for text, errors in self._received(_ERROR_QUEUE):
            before = self.heard.get(text[:_TOKEN])
            if before and any(_ERROR.unpack_from(error)[0] == errno.ECONNREFUSED for _, _, error in errors):
                self.heard[text[:_TOKEN]] = before._replace(ended=True)

    def _received(self, flags: int) -> Iterator[tuple[bytes, list[tuple[int, int, bytes]]]]:
        """Yield answers to what was asked, or (from the error queue) questions that found no socket and why."""
        while True:
            try:
                text, errors, _, _ = self._questions.recvmsg(_MESSAGE.size + 1, 512, flags)
            except BlockingIOError:
                return
            except OSError:  # raised once, and explained by the error queue
                continue
            if len(text) == _MESSAGE.size and text[:_TOKEN] in self._asked:
                yield text, errors


@cache
def side_process(address: str) -> SideProcess | None:
    """This rank's side process at an address; None, with a warning, where there can be none.

    Args:
        address: "127.0.0.1", or "" for the address by which other machines reach this one.
    """
    try:
        return SideProcess(address or _own_address())
    except (OSError, AttributeError) as error:
        logger.warning("this process has no heartbeat (%s: %s), so the deadline will not say what it does",
                       type(error).__name__, error)
        return None


def _bound(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((address, 0))
    made.setblocking(False)
    return made


def _own_address() -> str:
    """The address of the default route, by which nothing is sent here; else the one that the machine's name has."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


@cache
def _shared_memory() -> tuple[bytes, int]:
    """The token of this process and the descriptor of the memory that holds it, and then the note."""
    global _memory
    token, descriptor = secrets.token_bytes(_TOKEN), os.memfd_create("thdattn")
    os.ftruncate(descriptor, _TOKEN + _NOTE.size)
    _memory = mmap.mmap(descriptor, _TOKEN + _NOTE.size)
    _memory[:_TOKEN] = token
    note(0, 0, "", LEFT)
    atexit.register(note_phase, ENDED)  # before MPI_Finalize, which may wait
    return token, descriptor


def _answer(text: bytes) -> Answer:
    _, comm, number, seconds, phase, what, state, state_seconds = _MESSAGE.unpack(text)
    return Answer(comm, number, seconds, phase, what.rstrip(b"\0").decode(errors="replace"), state, state_seconds)


def _forget() -> None:
    """Have a process that the user forked be none of this rank: it notes nothing and has no side process."""
    global _memory
    _memory = None
    _shared_memory.cache_clear()
    side_process.cache_clear()


os.register_at_fork(after_in_child=_forget)


# --- the side process ------------------------------------------------------------------------------------------


def main(memory: int, rank: int) -> None:
    """Answer questions about a process until it ends; the socket is the standard input.

    Args:
        memory: descriptor of the token and the note.
        rank: the number of the process.
    """
    # Signals that are sent to all of a job are for the rank; but Ctrl-Z stops both, and so the clock below.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGTSTP})
    noted = mmap.mmap(memory, _TOKEN + _NOTE.size, prot=mmap.PROT_READ)
    questions, waiting = socket.socket(fileno=0), select.poll()
    waiting.register(questions, select.POLLIN)
    with suppress(OSError, AttributeError):  # an old kernel: the tick finds the end
        waiting.register(os.pidfd_open(rank), select.POLLIN)
    state, seconds, before = b"?", 0.0, time.monotonic()
    while os.getppid() == rank:
        ready = waiting.poll(1000 * _TICK)
        if any(descriptor != questions.fileno() for descriptor, _ in ready):
            return
        now, found = time.monotonic(), _state(rank)
        seconds = seconds + min(now - before, 2 * _TICK) if found == state else 0.0
        state, before = found, now
        _reply(questions, noted[:], state, seconds)


def _reply(questions: socket.socket, noted: bytes, state: bytes, state_seconds: float) -> None:
    token = noted[:_TOKEN]
    comm, number, since, phase, what = _NOTE.unpack_from(noted, _TOKEN)
    reply = _MESSAGE.pack(token, comm, number, time.monotonic() - since, phase, what, state, state_seconds)
    with suppress(OSError):  # BlockingIOError: no more questions
        while True:
            text, asker = questions.recvfrom(_MESSAGE.size + 1)
            if len(text) == _MESSAGE.size and hmac.compare_digest(text[:_TOKEN], token):
                questions.sendto(reply, asker)


def _state(process: int) -> bytes:
    """The letter that /proc has for its state; b"?" where there is no /proc."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return b"?"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
