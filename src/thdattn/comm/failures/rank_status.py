"""Status of the other ranks of a comm: which one has ended, is stopped or silent, and where a late one is."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from thdattn.comm.failures import heartbeat
from thdattn.comm.failures.heartbeat import Answer, Contact, SideProcess
from thdattn.comm.launcher import hostname

_SECONDS_TO_ANSWER = 0.1
_TIMES_TO_MEET = 10
_NAMED = 8  # most ranks that a message names
_STATES = {
    b"R": ", and its main thread runs",
    b"S": ", and its main thread sleeps",
    b"D": ", and its main thread waits for a disk or for memory that is swapped out",
    b"T": ", and it is stopped (SIGSTOP)",
    b"t": ", and a debugger has stopped it",
}


class Rank(NamedTuple):
    """A rank of a comm: its name in messages, and its side process; None: it has none."""

    name: str
    contact: Contact | None


class Ranks:
    """The other ranks of a comm, which this rank asks while one of its operations waits.

    A rank that was never heard, as behind a firewall, counts as unknown, not as missing.

    Args:
        comm: number of this comm, the same on all its ranks.
        timeout: seconds that an operation may take.

    Attributes:
        patience: seconds that an operation waits before this rank asks.
    """

    def __init__(self, comm: int, others: Sequence[Rank], side: SideProcess, timeout: float) -> None:
        self.comm = comm
        self.patience = min(5.0, timeout / 12)
        self._silence = max(1.0, min(10.0, timeout / 6))
        self._others = others
        self._side = side
        self._since = self._asked = float("-inf")  # times of the first question of this wait, and of the last one

    def meet(self) -> None:
        """Ask the ranks that were never heard and give them a moment to answer; repeat, as questions may get lost."""
        for _ in range(_TIMES_TO_MEET):
            if not (strangers := self._strangers()):
                return
            self._ask(strangers)
            limit = time.monotonic() + _SECONDS_TO_ANSWER
            while self._strangers() and time.monotonic() < limit:
                time.sleep(0.002)
                self._side.hear()

    def missing(self) -> str:
        """Say which ranks are missing, by their answers so far, and ask all again; "": none is.

        A pause between two calls starts the wait anew: no operation waited, or this process was itself stopped.
        """
        now = time.monotonic()
        self._side.hear()
        if now - self._asked > self._silence / 2:
            self._since = now
        found = [f"{other.name} {absence}" for other in self._others if (absence := self._absence(other, now))]
        if now - self._asked > self._silence / 12:
            self._asked = now
            self._ask(self._others)
        return _listed(found)

    def late(self, number: int, what: str) -> str:
        """Say where the ranks are that do not wait in this operation of this comm."""
        self._ask(self._others)
        time.sleep(_SECONDS_TO_ANSWER)
        self._side.hear()
        found = [f"{other.name} {place}" for other in self._others if (place := self._place(other, number, what))]
        if together := len(self._others) - len(found):
            found.append("another rank waits in it too" if together == 1 else f"{together} other ranks wait in it too")
        return _listed(found)

    def _strangers(self) -> list[Rank]:
        return [other for other in self._others if other.contact and not self._heard(other)]

    def _absence(self, other: Rank, now: float) -> str:
        if (heard := self._heard(other)) is None:
            return ""
        answer, last = heard.answer, self._operation(heard.answer)
        once = f"the last operation heard of was {last}, {now - heard.when:.0f} s ago"
        if heard.ended:
            return f"has ended; {once}"
        # A rank that was stopped together with this one, and continues a moment later, is not missing.
        stopped = answer.state == b"T" and answer.state_seconds >= self._silence and heard.when >= self._since
        if stopped and now - self._since >= self._silence / 2:
            return f"has been stopped (SIGSTOP) for {answer.state_seconds:.0f} s; its last operation was {last}"
        silent = now - max(heard.when, self._since)
        return f"has not answered for {silent:.0f} s; {once}" if silent >= self._silence else ""

    def _place(self, other: Rank, number: int, what: str) -> str:
        """Say where a rank is; "" if it waits in this operation."""
        if (heard := self._heard(other)) is None:
            return "was never heard of"
        answer = heard.answer
        operation, ago = self._operation(answer), f"{answer.seconds:.0f} s"
        who = "its GPU" if answer.phase in (heartbeat.GPU_WAITS, heartbeat.GPU_LEFT) else "it"
        if heard.ended:
            return f"has ended; the last operation heard of was {operation}"
        if answer.phase == heartbeat.ENDED:
            return f"is late: it came to the end of its program {ago} ago"
        if answer.phase in (heartbeat.LEFT, heartbeat.GPU_LEFT):
            verdict = "is ahead" if answer.comm == self.comm and answer.number >= number else "is late"
            return f"{verdict}: {who} has left {operation}, {ago} ago{_STATES.get(answer.state, '')}"
        together = (answer.comm, answer.number, _kind(answer.what)) == (self.comm, number, _kind(what))
        return "" if together else f"is elsewhere: {who} has waited in {operation}, for {ago}"

    def _operation(self, answer: Answer) -> str:
        if not answer.number:
            return "its start"
        return f"{answer.what}, number {answer.number} of {'this' if answer.comm == self.comm else 'another'} comm"

    def _heard(self, other: Rank) -> heartbeat.Heard | None:
        return self._side.heard.get(other.contact.token) if other.contact else None

    def _ask(self, ranks: Iterable[Rank]) -> None:
        for other in ranks:
            if other.contact:
                self._side.ask(other.contact)


def find(rank: int, timeout: float, gather: Callable[[Any], Sequence[Any]]) -> Ranks | None:
    """Start this rank's side process, and find those of the others; None where this rank has none.

    Every rank of the comm calls it.

    Args:
        timeout: seconds that an operation may take.
        gather: returns what every rank passed to it, in rank order.
    """
    machines = gather(hostname())
    side = heartbeat.side_process("127.0.0.1" if len(set(machines)) == 1 else "")
    everyone = gather((side.contact if side else None, secrets.randbits(63)))
    if side is None:
        return None
    ranks = [Rank(f"rank {number} of {len(everyone)} on {machine}", contact)
             for number, (machine, (contact, _)) in enumerate(zip(machines, everyone, strict=True))]
    made = Ranks(everyone[0][1], ranks[:rank] + ranks[rank + 1 :], side, timeout)
    made.meet()
    return made


def _kind(what: str) -> str:
    """Return an operation's name without its counts, which differ between ranks."""
    return what.partition(" (")[0]


def _listed(found: Sequence[str]) -> str:
    more = [f"and {len(found) - _NAMED} more"] if len(found) > _NAMED else []
    return "; ".join([*found[:_NAMED], *more])
