"""Outcomes of steps that can fail on one rank alone: all ranks try, exchange outcomes, and go on or raise together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Outcome = tuple[bool, Any]  # (True, result) or (False, message)
Waiting = Callable[[str], AbstractContextManager[object]]
Watched = Callable[[Any], AbstractContextManager[object]]


class Shortage(str):
    """Message of a MemoryError."""

    __slots__ = ()


def attempt(action: Callable[[], Any]) -> Outcome:
    """Return what an action returns, or the message of its error."""
    try:
        return True, action()
    except MemoryError as error:
        return False, Shortage(error)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


def results(failure: str, outcomes: Sequence[Outcome], remedy: str = "") -> list[Any]:
    """Return the results of all ranks, if none has failed.

    Raises:
        MemoryError: a rank has raised one.
        RuntimeError: a rank has failed otherwise. Either names all ranks that have failed, and why.
    """
    failed = {rank: message for rank, (ok, message) in enumerate(outcomes) if not ok}
    if failed:
        kind = MemoryError if any(isinstance(message, Shortage) for message in failed.values()) else RuntimeError
        why = "; ".join(f"rank {rank}: {message}" for rank, message in failed.items())
        raise kind(f"{failure} on {why}; {remedy}" if kind is MemoryError and remedy else f"{failure} on {why}")
    return [result for _, result in outcomes]


def agreed(
    world: Any, step: str, action: Callable[[], Any], remedy: str = "", waiting: Waiting = nullcontext
) -> list[Any]:
    """Try an action on every rank and return each rank's result; all ranks make this call.

    Args:
        waiting: makes a context in which this rank waits for the others, given the step's name.

    Raises:
        MemoryError, RuntimeError: on every rank, see results.
    """
    outcome = attempt(action)
    with waiting(step):
        outcomes = world.allgather(outcome)
    return results(f"{step} failed", outcomes, remedy)
