"""Ctrl-C and other signals: ending a run between two micro-batches, or at once."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from typing import Protocol

from measure import Clock

from thdattn.comm import Comm

ONE_PRESS = 0.5  # seconds; a launcher and the terminal may both deliver the same Ctrl-C


class Interrupt:
    """Listener for SIGINT (Ctrl-C), SIGTERM and SIGUSR1, which ask this process to end.

    A second SIGINT ends the process at once, and the launcher then ends the other ranks. Later ones of the other two
    change nothing, also while Python shuts down. A thread listens, because Python runs handlers in the main thread,
    which may be waiting for other ranks or for a compiler.

    Attributes:
        requested: True after a signal.
        quiet: True prints nothing, as another rank does.
    """

    def __init__(self) -> None:
        self.requested = False
        self.quiet = False
        receiving, sending = os.pipe()
        os.set_blocking(sending, False)
        signal.set_wakeup_fd(sending)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ignore_requests)
        threading.Thread(target=self._listen, args=(receiving,), name="signals", daemon=True).start()

    @staticmethod
    def _ignore_requests(*_: object) -> None:
        """Ignore what schedulers repeat: Python restores the fatal default of any other handler at its end."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)

    def _listen(self, receiving: int) -> None:
        pressed = math.inf
        while True:
            (number,) = os.read(receiving, 1)
            if number == signal.SIGINT:
                if time.monotonic() - pressed > ONE_PRESS:
                    self._say("ended at once")
                    os._exit(128 + signal.SIGINT)
                pressed = min(pressed, time.monotonic())
            if number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) and not self.requested:
                self.requested = True
                self._say("ending after this micro-batch; Ctrl-C again ends at once, without a checkpoint")

    def _say(self, text: str) -> None:
        if not self.quiet:
            os.write(2, f"\n{text}\n".encode())  # not by sys.stderr, whose lock the main thread may hold


class Listener(Protocol):
    """Listener for requests to end: an Interrupt, or a substitute for tests."""

    requested: bool


class Stopped(Exception):
    """Signal of an early end on all ranks, one of which was asked to end."""


class Stop:
    """Check between two micro-batches if a rank was asked to end. Every rank calls it alike.

    The ranks agree on the host, which is at most one micro-batch ahead of the GPU. So a run ends with the current
    micro-batch.

    Args:
        comm: all ranks.
        interrupt: of this rank.
        clock: marks the work of micro-batches.

    Attributes:
        wanted: True once this rank knows that the run ends; any thread may read it.
    """

    def __init__(self, comm: Comm, interrupt: Listener, clock: Clock) -> None:
        self._comm, self._interrupt, self._clock = comm, interrupt, clock
        self._last = clock.mark()
        self._agreed = False

    @property
    def wanted(self) -> bool:
        return self._agreed or self._interrupt.requested

    def __call__(self) -> None:
        """Return, or end the run on all ranks.

        Raises:
            Stopped: on every rank, if one was asked to end.
        """
        before, self._last = self._last, self._clock.mark()
        self._clock.wait(before)
        asked = self._interrupt.requested
        try:
            self._comm.agree("the request to end", asked)
        except ValueError:
            asked = True
        if asked:
            self._agreed = True
            raise Stopped
