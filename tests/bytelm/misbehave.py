"""Run train.py with an accident, for tests: misbehave.py ACCIDENT RANK NUMBER [options of train.py].

amid: it gets SIGTERM in the second micro-batch of step NUMBER.
validating: it gets SIGTERM in the first micro-batch of validation NUMBER.
early: it gets SIGTERM before it looks for documents.
wait: it sleeps before any work, while the others wait for it in MPI; process ids are in files beside that of --metrics.

After SIGTERM, every rank prints how many steps and micro-batches it has begun.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "bytelm"))

import train
from model import Model

accident, rank, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.argv[1:4] = []
Interrupt, whole_train, Trainer = train.Interrupt, train.train, train.Trainer
loss_and_gradient, loss, step, bits_per_byte = Model.loss_and_gradient, Model.loss, Trainer.step, Trainer.bits_per_byte
counts = dict.fromkeys(("step", "validation", "in step", "in validation"), 0)
listeners = []


def listening():
    listeners.append(Interrupt())
    return listeners[-1]


def signalled(me):
    if me != rank:
        return
    os.kill(os.getpid(), signal.SIGTERM)
    while not listeners[0].requested:  # a thread hears of it, late on a busy machine
        time.sleep(0.001)


def step_with_accident(self, *args):
    counts["step"] += 1
    counts["in step"] = 0
    return step(self, *args)


def validation_with_accident(self, *args):
    counts["validation"] += 1
    counts["in validation"] = 0
    return bits_per_byte(self, *args)


def amid(self, *args):
    counts["in step"] += 1
    result = loss_and_gradient(self, *args)
    if accident == "amid" and (counts["step"], counts["in step"]) == (number, 2):
        signalled(world_rank)
    return result


def validating(self, *args):
    counts["in validation"] += 1
    result = loss(self, *args)
    if accident == "validating" and (counts["validation"], counts["in validation"]) == (number, 1):
        signalled(world_rank)
    return result


def train_with_accident(comm, args, interrupt):
    global world_rank
    world_rank = comm.rank
    if accident == "wait":
        args.metrics.with_name(str(comm.rank)).write_text(str(os.getpid()))
        if comm.rank == rank:
            time.sleep(600)
    if accident == "early":
        signalled(comm.rank)
    whole_train(comm, args, interrupt)


train.Interrupt, train.train = listening, train_with_accident
Model.loss_and_gradient, Model.loss = amid, validating
Trainer.step, Trainer.bits_per_byte = step_with_accident, validation_with_accident
status = train.main()
if accident in ("amid", "validating", "early"):
    print("began", json.dumps(counts), flush=True)
sys.exit(status)
