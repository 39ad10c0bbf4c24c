"""Generations of lengths on a GPU: they mark the results of a call, so that these are not used with other lengths.

Only the host counts generations. A graph of thdattn.graphs counts again at each replay; other replays go unnoticed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _OfThread(threading.local):
    """State of one thread. actions: host actions of the graph that it captures; None: it captures none."""

    actions: list[Callable[[], None]] | None = None


_of_thread = _OfThread()
_numbers = itertools.count(1)


@contextmanager
def recorded() -> Iterator[list[Callable[[], None]]]:
    """Yield the list of host actions of a captured block, which every replay of its graph must repeat."""
    actions: list[Callable[[], None]] = []
    _of_thread.actions = actions
    try:
        yield actions
    finally:
        _of_thread.actions = None


def renew(lengths: Any, name: Callable[[], Any] = lambda: next(_numbers)) -> None:
    """Give lengths a new generation, now and at replays of the graph that is being captured.

    Args:
        lengths: a DeviceLengths, whose generation is set.
        name: returns the generation; equal lengths have equal generations.
    """
    def act() -> None:
        lengths.generation = name()

    act()
    if _of_thread.actions is not None:
        _of_thread.actions.append(act)


class Generation:
    """Generation of lengths that a call found; for a captured call, that of the last replay of its graph.

    Args:
        lengths: a DeviceLengths.
        capture: returns the number of the capture that the current stream is in, None for none.
    """

    __slots__ = ("_capture", "_lengths", "_made_in", "_name", "_of_graph")

    def __init__(self, lengths: Any, capture: Callable[[], int | None]) -> None:
        self._lengths, self._capture = lengths, capture
        actions = _of_thread.actions
        self._of_graph = actions is not None
        self._name, self._made_in = lengths.generation, capture()
        if actions is not None:
            actions.append(self._follow)

    def check(self, what: str) -> None:
        """Raise a ValueError if the lengths have changed; a captured check is repeated at every replay.

        Results of a graph outside thdattn.graphs are checked during capture alone, because its replays go unnoticed.
        """
        if self._of_graph and _of_thread.actions is not None and self._made_in != self._capture():
            _of_thread.actions.append(lambda: self._compare(what))
        self._compare(what)

    def _follow(self) -> None:
        self._name, self._made_in = self._lengths.generation, None

    def _compare(self, what: str) -> None:
        if self._name != self._lengths.generation and self._made_in in (None, self._capture()):
            raise ValueError(
                f"{what} was made for lengths that the plan no longer has, wanted those of its last refresh; use it "
                f"before Plan.refresh and StaticPack.plans of another batch, or make a plan for each batch under way"
            )
