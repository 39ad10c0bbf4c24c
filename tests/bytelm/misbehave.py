"""train.py with an accident: misbehave.py ACCIDENT RANK STEP [options of train.py], for tests.

ctrl-c: that rank alone gets SIGINT amid that step. fail: that rank alone raises there. wait: that rank alone sleeps
before it has done anything, while the others wait for it in MPI; process ids are in files beside that of --metrics.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "bytelm"))

import train

accident, rank, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.argv[1:4] = []
step, Interrupt = train.Trainer.step, train.Interrupt
calls, listeners = 0, []


def listening():
    listeners.append(Interrupt())
    return listeners[-1]


def step_with_accident(self, batches, lr, stop=False):
    global calls
    calls += 1
    if calls == number and self.grid.world.rank == rank:
        if accident == "fail":
            raise RuntimeError("an accident, on purpose")
        os.kill(os.getpid(), signal.SIGINT)
        while not listeners[0].requested:  # a thread hears of it, late on a busy machine
            time.sleep(0.001)
    return step(self, batches, lr, stop)


def sleepy_train(comm, args, interrupt):
    args.metrics.with_name(str(comm.rank)).write_text(str(os.getpid()))
    if comm.rank == rank:
        time.sleep(600)
    return whole_train(comm, args, interrupt)


if accident == "wait":
    whole_train, train.train = train.train, sleepy_train
train.Interrupt = listening
train.Trainer.step = step_with_accident
sys.exit(train.main())
