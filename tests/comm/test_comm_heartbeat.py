"""Side processes that say what their ranks do, and what is made of their answers; real processes, no launcher."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from faults import is_running, side_processes
from launch import SOURCE

from thdattn.comm.failures import heartbeat, rank_status
from thdattn.comm.failures.heartbeat import Contact, Heard
from thdattn.comm.failures.rank_status import Rank, Ranks

HOME = "127.0.0.1"
RANK = """
import os, sys, time
from thdattn.comm.failures import heartbeat
side = heartbeat.side_process("127.0.0.1")
heartbeat.note(7, 16, "all_gather")
{then}
(child,) = open(f"/proc/self/task/{{os.getpid()}}/children").read().split()[:1]
print(side.contact.port, side.contact.token.hex(), child, flush=True)
sys.stdin.read()
"""


class Process:
    """A process with a heartbeat, that ends when the test is over."""

    def __init__(self, then=""):
        self.popen = subprocess.Popen(
            [sys.executable, "-c", RANK.format(then=then)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE)})
        port, token, side = self.popen.stdout.readline().split()
        self.contact, self.side = Contact(HOME, int(port), bytes.fromhex(token)), int(side)

    def end(self):
        for process in (self.side, self.popen.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.popen.communicate()


@pytest.fixture
def other():
    made = []

    def other(then=""):
        made.append(Process(then))
        return made[-1]

    yield other
    for process in made:
        process.end()


@pytest.fixture
def mine():
    """The side process of pytest's own process."""
    return heartbeat.side_process(HOME)


def until(condition, seconds=10):
    limit = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < limit, "did not come"
        time.sleep(0.02)
    return found


def asked(mine, contact):
    """What the side process says now."""
    mine.heard.pop(contact.token, None)
    mine.ask(contact)
    return until(lambda: mine.hear() or mine.heard.get(contact.token)).answer


def ranks(mine, contact, timeout=6.0, comm=7):
    return Ranks(comm, [Rank("rank 1 of 2 on node7", contact)], mine, timeout)


def test_side_process_says_what_its_rank_noted_last_and_that_it_lives(mine, other):
    answer = asked(mine, other().contact)
    assert (answer.comm, answer.number, answer.what, answer.phase) == (7, 16, "all_gather", heartbeat.WAITS)
    assert 0 <= answer.seconds < 10 and answer.state in (b"S", b"R")


def test_long_names_and_phases_are_noted(mine, other):
    answer = asked(mine, other(f"heartbeat.note(8, 17, {'ä' * 100!r}); heartbeat.note_phase(heartbeat.LEFT)").contact)
    assert (answer.comm, answer.number, answer.phase) == (8, 17, heartbeat.LEFT)
    assert answer.what == "ä" * 24


def test_strangers_are_ignored(mine, other):
    """Those who lack the token get no answer, and what they send is no answer."""
    contact, size = other().contact, heartbeat._MESSAGE.size
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.bind((HOME, 0))
        stranger.settimeout(0.5)
        for text in (b"", bytes(size), contact.token, contact.token + bytes(size), bytes([*contact.token[:-1], 77])):
            stranger.sendto(text, contact[:2])
            if len(text) != size:
                stranger.sendto(text[:15].ljust(size, b"\0"), contact[:2])
        with pytest.raises(TimeoutError):
            stranger.recv(1000)
        stranger.sendto(contact.token.ljust(size, b"\0"), contact[:2])
        assert len(stranger.recv(1000)) == size, "the token alone decides"
        known = dict(mine.heard)
        for text in (b"", bytes(size), bytes(size + 1), os.urandom(size)):
            stranger.sendto(text, mine._questions.getsockname())
        time.sleep(0.1)
        mine.hear()
        assert mine.heard == known


def test_each_process_has_a_token_of_its_own(other):
    assert other().contact.token != other().contact.token


def test_side_process_ends_with_its_rank_also_where_that_has_forked(other):
    """A forked child has copies of all descriptors, and lives on."""
    process = other("if os.fork() == 0: os.close(1); time.sleep(20); os._exit(0)")
    number = process.popen.pid
    (forked,) = {*map(int, Path(f"/proc/{number}/task/{number}/children").read_text().split())} - {process.side}
    process.popen.kill()
    process.popen.wait()
    until(lambda: not is_running(process.side), 5)
    assert is_running(forked)
    os.kill(forked, signal.SIGKILL)


def test_signals_to_a_whole_job_leave_the_side_process(mine, other):
    process = other()
    asked(mine, process.contact)
    assert side_processes(str(process.popen.pid)) == [str(process.side)]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(process.side, number)
    asked(mine, process.contact)


def test_forked_child_notes_nothing_for_its_parent(mine, other):
    process = other("if os.fork() == 0: heartbeat.note(1, 1, 'child'); os._exit(0)\nos.wait()")
    assert asked(mine, process.contact).what == "all_gather"


@pytest.mark.parametrize("error", [OSError("no sockets"), AttributeError("memfd_create")])
def test_process_without_a_side_process_says_so_once_and_goes_on(monkeypatch, caplog, error):
    def refuse(*words, **options):
        raise error

    heartbeat.side_process.cache_clear()
    monkeypatch.setattr(heartbeat.subprocess, "Popen", refuse)
    try:
        found = [rank_status.find(0, 60.0, lambda mine: [mine, mine]) for _ in range(2)]
    finally:
        heartbeat.side_process.cache_clear()
    assert found == [None, None]
    assert [record.levelname for record in caplog.records] == ["WARNING"] and str(error) in caplog.text


# --- what is made of answers -----------------------------------------------------------------------------------


def test_rank_that_ends_is_missing_at_once(mine, other):
    process = other()
    asked(mine, process.contact)
    watched = ranks(mine, process.contact, timeout=60.0)
    process.end()
    said = until(watched.missing, 5)
    assert said.startswith("rank 1 of 2 on node7 has ended; the last operation heard of was all_gather, number 16 of "
                           "this comm, ")


def test_rank_that_is_stopped_is_missing_after_a_while(mine, other):
    process = other()
    watched = ranks(mine, process.contact)
    watched.meet()
    os.kill(process.popen.pid, signal.SIGSTOP)
    begun = time.monotonic()
    said = until(lambda: time.sleep(0.2) or watched.missing())
    assert said.startswith("rank 1 of 2 on node7 has been stopped (SIGSTOP) for ") and "all_gather, number 16" in said
    assert time.monotonic() - begun >= 1


def test_rank_that_stops_for_a_moment_is_not_missing(mine, other):
    process = other()
    watched = ranks(mine, process.contact, timeout=60.0)
    watched.meet()
    os.kill(process.popen.pid, signal.SIGSTOP)
    assert not any(time.sleep(0.2) or watched.missing() for _ in range(10))
    os.kill(process.popen.pid, signal.SIGCONT)


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves, and answers that it makes up: clock.now, clock.heard(state="S", ...)."""

    class Side:
        def __init__(self):
            self.heard, self.questions = {}, 0

        def hear(self):
            pass

        def ask(self, contact):
            self.questions += 1

    class Clock:
        now, side = 1000.0, Side()
        contact = Contact(HOME, 1, b"token")

        def says(self, state=b"S", seconds=0.0, comm=7, number=16, phase=heartbeat.LEFT, what="all_gather"):
            answer = heartbeat.Answer(comm, number, 30.6, phase, what, state, seconds)
            self.side.heard[self.contact.token] = Heard(self.now, answer, False)

        def passes(self, watched, seconds):
            """What is said of so many seconds, each of them asked."""
            said = ""
            for _ in range(seconds):
                self.now += 1
                said = said or watched.missing()
            return said

    made = Clock()
    monkeypatch.setattr(rank_status, "time", made)
    made.monotonic, made.sleep = lambda: made.now, lambda seconds: None
    return made


def test_rank_that_does_not_answer_for_10_seconds_is_missing(clock):
    watched = ranks(clock.side, clock.contact, 60.0)
    assert watched.patience == 5
    clock.says()
    clock.now += 100  # nobody asked meanwhile
    assert clock.passes(watched, 10) == ""
    assert clock.passes(watched, 1).startswith("rank 1 of 2 on node7 has not answered for 10 s; the last operation")
    assert clock.side.questions == 11, "once a second"


def test_rank_that_was_never_heard_is_not_missing(clock):
    assert clock.passes(ranks(clock.side, clock.contact, 60.0), 1000) == ""
    assert clock.passes(ranks(clock.side, None, 60.0), 1000) == ""


def test_question_that_was_lost_long_ago_does_not_count(clock):
    watched = ranks(clock.side, clock.contact, 60.0)
    clock.says()
    assert clock.passes(watched, 6) == ""
    clock.now += 50
    assert clock.passes(watched, 10) == ""


def test_rank_that_was_stopped_with_this_one_and_goes_on_later_is_not_missing(clock):
    watched = ranks(clock.side, clock.contact, 60.0)
    clock.says()
    assert clock.passes(watched, 3) == ""
    clock.now += 3600
    clock.says(b"T", 3600.0)
    assert clock.passes(watched, 3) == ""
    clock.says(b"T", 3603.0)
    assert "has been stopped (SIGSTOP) for 3603 s" in clock.passes(watched, 5)


@pytest.mark.parametrize(("answer", "said"), [
    ({"state": b"R"}, "is late: it has left all_gather, number 16 of this comm, 31 s ago, and its main thread runs"),
    ({"phase": heartbeat.GPU_LEFT}, "is late: its GPU has left all_gather, number 16 of this comm, 31 s ago, and its "
                                    "main thread sleeps"),
    ({"phase": heartbeat.WAITS, "what": "barrier", "number": 12},
     "is elsewhere: it has waited in barrier, number 12 of this comm, for 31 s"),
    ({"phase": heartbeat.GPU_WAITS, "comm": 8, "number": 17},
     "is elsewhere: its GPU has waited in all_gather, number 17 of another comm, for 31 s"),
    ({"phase": heartbeat.WAITS, "what": "barrier", "number": 17},
     "is elsewhere: it has waited in barrier, number 17 of this comm, for 31 s"),
    ({"number": 17, "state": b"D"}, "is ahead: it has left all_gather, number 17 of this comm, 31 s ago, and its main "
                                    "thread waits for a disk or for memory that is swapped out"),
    ({"what": "", "comm": 0, "number": 0}, "is late: it has left its start, 31 s ago, and its main thread sleeps"),
    ({"phase": heartbeat.ENDED}, "is late: it came to the end of its program 31 s ago"),
])
def test_late_ranks_are_named_with_where_they_are(clock, answer, said):
    clock.says(**answer)
    assert ranks(clock.side, clock.contact).late(17, "all_gather") == f"rank 1 of 2 on node7 {said}"


def test_ranks_that_wait_in_the_same_operation_are_counted_and_many_are_cut_short(clock):
    clock.says(phase=heartbeat.WAITS, number=17, what="exchange (3 slices out, 2 in)")
    everyone = [Rank(f"rank {number}", clock.contact if number < 4 else None) for number in range(1, 20)]
    said = Ranks(7, everyone, clock.side, 6.0).late(17, "exchange (1 slices out, 1 in)")
    assert said.startswith("rank 4 was never heard of; rank 5 was") and said.endswith("; rank 11 was never heard of; "
                                                                                     "and 9 more")
    assert Ranks(7, everyone[:3], clock.side, 6.0).late(17, "exchange (1 slices)") == "3 other ranks wait in it too"
