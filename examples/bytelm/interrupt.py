"""Ctrl-C: ending a run after a step, or at once."""

from __future__ import annotations

import math
import os
import signal
import threading
import time

ONE_PRESS = 0.5  # seconds; a launcher and the terminal may both deliver the same Ctrl-C


class Interrupt:
    """Whether this process was asked to end after a step: by SIGINT (Ctrl-C), SIGTERM or SIGUSR1.

    A second SIGINT ends the process at once, and the launcher then ends the other ranks. A thread listens, since Python
    calls its handlers in the main thread, and that one may be waiting for other ranks or for a compiler.

    Attributes:
        requested: whether it was.
        quiet: say nothing about it, as another rank does.
    """

    def __init__(self) -> None:
        self.requested = False
        self.quiet = False
        receiving, sending = os.pipe()
        os.set_blocking(sending, False)
        signal.set_wakeup_fd(sending)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)  # the thread does the work
        threading.Thread(target=self._listen, args=(receiving,), name="signals", daemon=True).start()

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
                self._say("ending after this step; Ctrl-C again ends at once, without a checkpoint")

    def _say(self, text: str) -> None:
        if not self.quiet:
            os.write(2, f"\n{text}\n".encode())  # past sys.stderr, which the main thread may hold
