"""Run train.py with an accident, for tests: misbehave.py ACCIDENT RANK NUMBER [options of train.py].

amid: the rank gets SIGTERM in the second micro-batch of step NUMBER.
validating: it gets SIGTERM in the first micro-batch of validation NUMBER.
early: it gets SIGTERM before it looks for documents.
wait: it sleeps before any work, while the others wait for it in MPI; process ids are in files beside that of --metrics.

In the end every rank prints how many steps and validations it has begun, and micro-batches in the last one of each.
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
counts = dict.fromkeys(("step", "validation", "in step", "in validation"), 0)
WHEN = {"amid": {"step": number, "in step": 2}, "validating": {"validation": number, "in validation": 1}}
whole_train = train.train


def train_with_accident(comm, args, interrupt):
    def strike():
        if comm.rank != rank:
            return
        os.kill(os.getpid(), signal.SIGTERM)
        while not interrupt.requested:  # a thread hears of it, late on a busy machine
            time.sleep(0.001)

    def count(owner, name, what, inside=None):
        """Count the calls of a method, and begin to count anew what happens inside."""
        method = getattr(owner, name)

        def counted(*words):
            counts[what] += 1
            if inside:
                counts[inside] = 0
            if accident in WHEN and WHEN[accident].items() <= counts.items():
                strike()
            return method(*words)

        setattr(owner, name, counted)

    count(train.Trainer, "step", "step", "in step")
    count(train.Trainer, "bits_per_byte", "validation", "in validation")
    count(Model, "loss_and_gradient", "in step")
    count(Model, "loss", "in validation")
    if accident == "wait":
        args.metrics.with_name(str(comm.rank)).write_text(str(os.getpid()))
        if comm.rank == rank:
            time.sleep(600)
    if accident == "early":
        strike()
    whole_train(comm, args, interrupt)


train.train = train_with_accident
status = train.main()
print("began", json.dumps(counts), flush=True)
sys.exit(status)
