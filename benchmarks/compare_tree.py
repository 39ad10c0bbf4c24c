"""The side of one source tree in compare.py: answers questions about its thdattn on stdin, one at a time, on stdout.

A question is a line of JSON, {"do": METHOD, ...arguments}; so is the answer: what the method of `Measure` returns, or
{"error": TEXT}.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import accuracy
import cupy
import timing
from peers import PEERS, Peer, draw_inputs, release_memory
from workloads import CASES

import thdattn
from thdattn.jit import compiler


class Measure:
    """The case that is being measured, and the graph that is replayed."""

    peer: Peer | None = None
    of = ("", "")  # case and way of `peer`
    replay: Callable[[], list[float]] | None = None

    def about(self) -> dict[str, str]:
        """Which code this is."""
        return {"package": str(Path(thdattn.__file__).parent), "kernel_sources": compiler.source_hash()}

    def prepare(self, case: str, way: str, direction: str) -> dict[str, float]:
        """Compiles and calls the kernels; (rough milliseconds, TFLOP) of a call."""
        self.replay = None  # no graph may be alive when memory is released
        if self.of != (case, way):
            self.peer, self.of = None, ("", "")
            release_memory()
            self.peer = PEERS[way](CASES[case], draw_inputs(CASES[case]))
            self.of = case, way
            self.peer.forward()
        call = getattr(self.peer, direction)
        call()
        return {"ms": median(timing.called(call, 3)), "tflop": getattr(CASES[case].flops, direction) / 1e12}

    def capture(self, direction: str, ms: float) -> dict[str, int]:
        """Captures the graph that `time` replays, of as many calls of `ms` milliseconds as make a group."""
        assert self.peer is not None
        calls = timing.calls_per_graph(timing.calls_per_group(ms))
        self.replay = partial(timing.replayed, self.peer.capture(getattr(self.peer, direction), calls), calls)
        return {"calls": calls}

    def time(self) -> dict[str, list[float]]:
        """Milliseconds of a call in the captured graph, on a rested GPU."""
        assert self.replay is not None
        time.sleep(timing.REST)
        return {"ms": self.replay()}

    def errors(self, case: str, way: str) -> dict[str, accuracy.Error]:
        """(relative RMS, largest) error of out, dq, dk, dv on a small version of the case."""
        small = accuracy.small(CASES[case])
        inputs = draw_inputs(small)
        peer = PEERS[way](small, inputs)
        peer.forward()
        peer.backward()
        wanted = accuracy.exact(small, [x.get() for x in inputs], cupy)
        return accuracy.errors(peer.on_host(), wanted)


def serve(measure: Any, questions: TextIO, answers: TextIO) -> None:
    """Answers until there are no more questions; an error is an answer too."""
    for line in questions:
        question = json.loads(line)
        try:
            answer = getattr(measure, question.pop("do"))(**question)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    with cupy.cuda.Stream(non_blocking=True):  # the default stream cannot be captured
        serve(Measure(), sys.stdin, answers)


if __name__ == "__main__":
    main()
