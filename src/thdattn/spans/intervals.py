"""Sets of times, as ascending lists of intervals (begin, end) that do not touch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merged(some: Iterable[Interval]) -> list[Interval]:
    """Return the set of all times in some intervals, which may overlap."""
    whole: list[Interval] = []
    for begin, end in sorted(some):
        if whole and begin <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(end, whole[-1][1])
        else:
            whole.append((begin, end))
    return whole


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the times in both sets."""
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(times: Iterable[Interval]) -> float:
    """Return the length of a set."""
    return sum(end - begin for begin, end in times)
