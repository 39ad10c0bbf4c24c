"""Progress of a run: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import io
import math
import shutil
import sys
import time

from tqdm import tqdm

BAR = "{n}/{total} |{bar:20}| {elapsed}<{remaining}{postfix}"
LINE = "step {n} of {total}, {elapsed} passed, {remaining} to go{postfix}"
FIRST_SECONDS, LATER_SECONDS = 10, 60  # seconds between two lines of a log: in the first minute, and later


class Progress:
    """Display of steps on stderr.

    Args:
        total: steps of the run.
        done: steps before now.
        shown: False on all ranks but one.
        bar: True draws a bar even if stderr is no terminal. Its width is $COLUMNS then.
    """

    def __init__(self, total: int, done: int, shown: bool, bar: bool) -> None:
        terminal = sys.stderr.isatty()
        self._shown, self._live = shown, terminal or bar
        # A launcher forwards stdout and stderr in any order, so all output goes to one of them.
        self._speech = sys.stderr if bar and not terminal else sys.stdout
        self._began = self._printed = time.monotonic()
        self._bar = tqdm(
            total=total, initial=done, disable=not shown, file=sys.stderr if self._live else io.StringIO(),
            mininterval=0.5 if self._live else math.inf, bar_format=BAR if self._live else LINE,
            dynamic_ncols=terminal, ncols=None if terminal or not bar else shutil.get_terminal_size().columns,
        )

    def step(self, about: str) -> None:
        """Count one more step, and show a text about it."""
        self._bar.set_postfix_str(about, refresh=False)
        self._bar.update()
        now = time.monotonic()
        if now - self._printed >= (FIRST_SECONDS if now - self._began <= LATER_SECONDS else LATER_SECONDS):
            self._print_line()

    def say(self, text: str) -> None:
        """Print a line of its own, on stdout unless a launcher separates this rank from the terminal."""
        if self._shown and self._live:
            self._bar.write(text, file=self._speech)
        elif self._shown:
            print(text, flush=True)

    def close(self) -> None:
        """Show the last step."""
        self._print_line()
        self._bar.close()

    def _print_line(self) -> None:
        if self._shown and not self._live:
            self._printed = time.monotonic()
            print(self._bar, file=sys.stderr, flush=True)
