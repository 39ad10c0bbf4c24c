"""Heartbeat: a side process tells other ranks what this rank does, whether or not the rank's Python holds the GIL.

Run as a program, this file is the side process. It owns a UDP socket and answers whoever knows its token. An answer has
the state of the rank's process, and the operation that the rank noted last in shared memory. The side process ends with
the rank. Messages have one size and are never unpickled; messages without the token are ignored.

The other half of the file belongs to the rank: it starts that process, notes operations and asks other ranks' side
processes.
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
_NOTE = struct.Struct("<qqdc48s")  # comm, number, since when, phase, what; behind the token
_SINCE = struct.Struct("<dc")  # the middle of a note
_MESSAGE = struct.Struct(f"<{_TOKEN}s{_NOTE.format[1:]}cd")  # a question is its token and zeros
_SINCE_AT = _TOKEN + 16
_ERROR = struct.Struct("=I")  # first field of an entry of the error queue
_TICK = 1.0
_IP_RECVERR, _ERROR_QUEUE = 11, 0x2000  # Linux: tells which datagrams found no socket

logger = logging.getLogger("thdattn")


class Contact(NamedTuple):
    """Address of a rank's side process, and the token that it answers to, which no other process has."""

    address: str
    port: int
    token: bytes


class Answer(NamedTuple):
    """Answer of a side process about its rank.

    Attributes:
        comm: the comm of the last operation.
        seconds: how long the rank has been in the phase.
        phase: WAITS, LEFT, GPU_WAITS, GPU_LEFT or ENDED.
        state: state of the process in /proc: b"R" runs, b"S" sleeps, b"D" waits for a disk, b"T" is stopped.
        state_seconds: for how long that has been so.
    """

    comm: int
    number: int
    seconds: float
    phase: bytes
    what: str
    state: bytes
    state_seconds: float


class Heard(NamedTuple):
    """Last answer of a rank's side process, when it came, and whether both processes have ended since."""

    when: float
    answer: Answer
    ended: bool


# --- the rank --------------------------------------------------------------------------------------------------

_memory: mmap.mmap | None = None  # token and note; None: no side process reads them


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
        address: address of this machine that both sockets are bound to.

    Attributes:
        heard: by token, the last answer of each rank; ranks that never answered are missing in it.
    """

    def __init__(self, address: str) -> None:
        self.heard: dict[bytes, Heard] = {}
        self._asked: set[bytes] = set()
        token, memory = _shared_memory()
        self._questions, self._answers = _bound(address), _bound(address)
        self._questions.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        self.contact = Contact(address, self._answers.getsockname()[1], token)
        # NOTE: this process keeps the socket, unread: the system refuses datagrams once both processes have ended.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(memory), str(os.getpid())],
            stdin=self._answers.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[memory])
        process.returncode = 0  # Popen would warn that it outlives this object

    def ask(self, contact: Contact) -> None:
        """Ask a rank's side process; `hear` takes in its answer."""
        self._asked.add(contact.token)
        for _ in range(2):  # the first call may raise the error of an earlier datagram
            with suppress(OSError):
                self._questions.sendto(contact.token.ljust(_MESSAGE.size, b"\0"), contact[:2])
                return

    def hear(self) -> None:
        """Take in all answers since the last call."""
        for text, _ in self._received(0):
            self.heard[text[:_TOKEN]] = Heard(time.monotonic(), _answer(text), False)
        for text, errors in self._received(_ERROR_QUEUE):
            before = self.heard.get(text[:_TOKEN])
            if before and any(_ERROR.unpack_from(error)[0] == errno.ECONNREFUSED for _, _, error in errors):
                self.heard[text[:_TOKEN]] = before._replace(ended=True)

    def _received(self, flags: int) -> Iterator[tuple[bytes, list[tuple[int, int, bytes]]]]:
        """Yield answers with their flags; from the error queue, questions that found no socket, and why."""
        while True:
            try:
                text, errors, _, _ = self._questions.recvmsg(_MESSAGE.size + 1, 512, flags)
            except BlockingIOError:
                return
            except OSError:  # raised once; the error queue has the reason
                continue
            if len(text) == _MESSAGE.size and text[:_TOKEN] in self._asked:
                yield text, errors


@cache
def side_process(address: str) -> SideProcess | None:
    """Return this rank's side process at an address; None, with a warning, where none can be started.

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
    """Return the address of the default route, without sending anything; else that of the machine's name."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


@cache
def _shared_memory() -> tuple[bytes, int]:
    """Return this process's token, and the descriptor of the memory that holds the token and the note."""
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
    """Clear the state in a process that the user forked: it is no rank, notes nothing and has no side process."""
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
    """
    # Signals to all processes of a job are meant for the rank. Ctrl-Z stops both, and so the clock below.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGTSTP})
    noted = mmap.mmap(memory, _TOKEN + _NOTE.size, prot=mmap.PROT_READ)
    questions, waiting = socket.socket(fileno=0), select.poll()
    waiting.register(questions, select.POLLIN)
    with suppress(OSError, AttributeError):  # on an old kernel the tick finds the end
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
    """Return the letter that /proc has for a process's state; b"?" without /proc."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return b"?"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
