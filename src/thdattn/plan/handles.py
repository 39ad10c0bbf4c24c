"""Handles of plans and attentions: numbers in arrays, for compilers whose operators take only arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

_numbers = itertools.count(1)
_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()
_wraps: list[Callable[[NDArray[np.int64]], Any]] = []


def give_handle(owner: Any) -> None:
    """Set an object's attribute `_handle`, (1,) int64 on the host. It does not keep the object alive."""
    number = next(_numbers)
    handle: Any = np.array([number])
    for wrap in _wraps:
        handle = wrap(handle)
    object.__setattr__(owner, "_handle", handle)  # works for frozen dataclasses, too
    _owners[number] = owner


def owner_of(handle: int) -> Any:
    """Return the object of a handle; None if it no longer exists."""
    return _owners.get(handle)


def wrap_handles(wrap: Callable[[NDArray[np.int64]], Any]) -> None:
    """Convert the handles of all objects, present and future, to arrays of another library."""
    _wraps.append(wrap)
    for owner in list(_owners.values()):
        object.__setattr__(owner, "_handle", wrap(owner._handle))
