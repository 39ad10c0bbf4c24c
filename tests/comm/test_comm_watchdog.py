"""The watchdog's clock, without a job to end: what is late, since when, and what a message says of it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from thdattn.comm.failures import heartbeat, watchdog
from thdattn.comm.failures.watchdog import Lane, Watch


@pytest.fixture
def dog(monkeypatch):
    """A watchdog whose clock only the test moves."""
    made = watchdog._Watchdog()
    monkeypatch.setattr(watchdog, "_watchdog", made)
    return made


class Stream:
    """A stream of which the test decides how far it comes."""

    def __init__(self):
        self.numbers = np.full(2, 77, np.uint32)
        self.enqueued = []
        self.lane = Lane(self.numbers, lambda address, number, flags: self.enqueued.append((address, number)))

    def advance(self, steps=1):
        for _ in range(steps):
            address, number = self.enqueued.pop(0)
            self.numbers[(address - self.numbers.ctypes.data) // 4] = number


def late(dog, seconds):
    """What is late after so many seconds, watched twice a second."""
    found = None
    for _ in range(int(2 * seconds)):
        dog.clock += 0.5
        found = next((each for each in dog.waits() if each[1] > each[0].limit), found)
    return found and (str(found[0]), found[1])


def watch(timeout=3.0):
    return Watch("rank 1 of 2 on node7", timeout, None)


def enqueue(waiting, stream, *names):
    for name in names:
        with waiting.enqueued(stream.lane, name):
            pass


def test_host_that_waits_longer_than_the_timeout_is_late(dog):
    array = np.zeros((5, 2), np.float32)
    waiting = watch()
    with waiting.waiting("barrier"):
        assert late(dog, 3) is None
    with waiting.waiting("all_gather", array):
        assert late(dog, 3) is None
        assert late(dog, 0.5) == ("all_gather of (5, 2) float32, number 2 of this comm,", 3.5)
    assert late(dog, 100) is None


def test_wait_that_ends_with_an_error_is_over(dog):
    with pytest.raises(KeyError), watch().waiting("barrier"):
        raise KeyError
    assert late(dog, 100) is None


def test_steps_of_a_start_have_more_patience(dog):
    with watch().waiting("init", patience=5):
        assert late(dog, 15) is None
        assert late(dog, 0.5) == ("init, number 1 of this comm,", 15.5)


def test_each_comm_has_its_own_timeout_and_numbers(dog):
    first, second = watch(10.0), watch(2.0)
    with first.waiting("split"), second.waiting("barrier"):
        assert late(dog, 9) == ("barrier, number 1 of this comm,", 9.0)
    with first.waiting("close"):
        assert late(dog, 11) == ("close, number 2 of this comm,", 11.0)


def test_clock_of_what_is_enqueued_runs_while_the_stream_is_in_it(dog):
    stream, waiting = Stream(), watch()
    enqueue(waiting, stream, "first", "second")
    assert late(dog, 100) is None, "the stream has not come to it"
    stream.advance()
    assert late(dog, 3) is None
    stream.advance()
    assert late(dog, 100) is None, "it has left the first and computes"
    stream.advance()
    assert late(dog, 4) == ("second, number 2 of this comm,", 3.5)
    stream.advance()
    assert late(dog, 100) is None


def test_operations_that_follow_each_other_are_not_one_long_one(dog):
    stream, waiting = Stream(), watch()
    enqueue(waiting, stream, *["all_reduce"] * 20)
    stream.advance()
    for _ in range(18):
        assert late(dog, 2) is None
        stream.advance(2)
    assert late(dog, 4) == ("all_reduce, number 19 of this comm,", 3.5)


def test_block_in_a_block_is_part_of_it(dog):
    stream, waiting = Stream(), watch()
    with waiting.enqueued(stream.lane, "replay"), waiting.enqueued(stream.lane, "all_gather"):
        pass
    assert len(stream.enqueued) == 2
    stream.advance()
    assert late(dog, 4) == ("replay, number 1 of this comm,", 3.5)
    stream.advance()
    assert late(dog, 100) is None


def test_kernel_may_write_the_numbers_by_itself(dog):
    stream, waiting = Stream(), watch()
    address, number = waiting.by_kernel(stream.lane, "gather")
    assert stream.enqueued == [] and address == stream.numbers.ctypes.data
    stream.numbers[0] = number
    assert late(dog, 4) == ("gather, number 1 of this comm,", 3.5)
    stream.numbers[1] = number
    assert late(dog, 100) is None
    with waiting.enqueued(stream.lane, "replay"):
        assert waiting.by_kernel(stream.lane, "gather") == (0, 0), "within a block that is watched"
    stream.advance()
    assert late(dog, 4) == ("replay, number 2 of this comm,", 3.5)
    stream.advance()
    assert late(dog, 100) is None


def test_block_that_ends_with_an_error_is_left(dog):
    stream = Stream()
    with pytest.raises(KeyError), watch().enqueued(stream.lane, "all_gather"):
        raise KeyError
    stream.advance(2)
    assert late(dog, 100) is None


def test_numbers_may_pass_the_largest(dog):
    stream, waiting = Stream(), watch()
    stream.lane._count = 2**32 - 2
    enqueue(waiting, stream, "last", "first again")
    stream.advance(3)
    assert late(dog, 4) == ("first again, number 2 of this comm,", 3.5)


def test_time_in_which_the_process_was_stopped_does_not_count(monkeypatch):
    """The clock goes by the thread's own sleep, one of which takes an hour."""
    now, slept = [0.0], []

    def sleep(seconds):
        if len(slept) == 10:
            raise StopIteration
        slept.append(seconds)
        now[0] += 3600 if len(slept) == 5 else seconds

    made = watchdog._Watchdog()
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    monkeypatch.setattr(watchdog.signal, "pthread_sigmask", lambda *signals: None)
    with pytest.raises(StopIteration):
        made._run()
    assert set(slept) == {1.0}
    assert made.clock == 9 + 2


@pytest.fixture
def noted(monkeypatch):
    """What other ranks would be told of this one: number, phase and name of its last operation."""
    memory = bytearray(heartbeat._TOKEN + heartbeat._NOTE.size)
    monkeypatch.setattr(heartbeat, "_memory", memory)

    def noted():
        _, number, _, phase, what = heartbeat._NOTE.unpack_from(memory, heartbeat._TOKEN)
        return number, phase, what.rstrip(b"\0").decode()

    return noted


def test_operations_on_the_host_are_noted_as_they_begin_and_end(dog, noted):
    waiting = watch()
    with waiting.waiting("barrier"):
        assert noted() == (1, heartbeat.WAITS, "barrier")
        with waiting.waiting("agree"):  # as in another thread
            assert noted() == (2, heartbeat.WAITS, "agree")
        assert noted() == (1, heartbeat.WAITS, "barrier")
    assert noted() == (1, heartbeat.LEFT, "barrier")


def test_operations_on_a_gpu_are_noted_as_the_watchdog_finds_them(dog, noted):
    stream, waiting = Stream(), watch()
    enqueue(waiting, stream, "first", "second")
    found = []
    for _ in range(4):
        late(dog, 1)
        found.append(noted())
        stream.advance()
    assert found == [(0, b"\0", ""), (1, heartbeat.GPU_WAITS, "first"), (1, heartbeat.GPU_LEFT, "first"),
                     (2, heartbeat.GPU_WAITS, "second")]


ENDS = """
import ctypes, threading
from thdattn.comm.failures import watchdog

def abort():
    {abort}

watchdog._SECONDS_TO_END = 0.5
watch = watchdog.Watch("rank 0 of 2", 0.1, abort)
watch.start()
with watch.waiting("barrier"):
    threading.Event().wait()
"""


@pytest.mark.parametrize("abort", ["threading.Event().wait()", "raise RuntimeError", "ctypes.PyDLL(None).sleep(60)"])
def test_process_ends_also_where_the_abort_hangs_or_fails(abort):
    """The last one hangs with Python's lock, as MPI does."""
    program = ENDS.format(abort=abort)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert run.returncode == 1
    assert "thdattn: rank 0 of 2: barrier, number 1 of this comm, has not completed within 0.1 s" in run.stderr
    assert "Timeout (0:00:00.5" in run.stderr and "most recent call first" in run.stderr, "says where the threads are"


def test_start_of_mpi_that_holds_the_lock_is_ended():
    program = (
        "import ctypes\nfrom thdattn.comm.failures import watchdog\n"
        "with watchdog.start_of_mpi('rank 0 on node7', 0.1):\n    ctypes.PyDLL(None).sleep(60)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert run.returncode == -9 and run.stdout == ""
    assert run.stderr.startswith("thdattn: rank 0 on node7: the start of MPI has not completed within 0.5 s")


FORKS = """
import os, threading, time
from thdattn.comm.failures.watchdog import Watch

def wait():
    with parent.waiting("barrier"):
        threading.Event().wait()

parent = Watch("the parent", 1000.0, None)
parent.start()
threading.Thread(target=wait, daemon=True).start()
number = os.fork()
if number == 0:
    child = Watch("the child", 0.1, lambda: os._exit(3))
    child.start()
    with child.waiting("barrier"):
        time.sleep(20)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
"""


def test_forked_child_has_a_watchdog_of_its_own():
    run = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (0, "3\n")
    assert "thdattn: the child: barrier, number 1 of this comm, has not completed within 0.1 s" in run.stderr
