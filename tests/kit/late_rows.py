"""Exchanges between simulated ranks whose rows come no sooner than they are waited for, and what hides them."""

from __future__ import annotations

from typing import Any

from thdattn.comm.local import LocalComm
from thdattn.comm.peer import transport
from thdattn.methods import group_cast


def come_late(monkeypatch: Any) -> None:
    """Let rows from other ranks be NaN until somebody waits for them."""
    exchange = LocalComm._exchange

    def delayed(self: LocalComm, sends: Any, recvs: Any, sizes: Any) -> Any:
        exchange(self, sends, recvs, sizes)()
        came = [array.copy() for array, _ in recvs]
        for array, _ in recvs:
            array.view(f"u{array.itemsize}")[...] = 2 ** (8 * array.itemsize) - 1

        def wait() -> None:
            for (array, _), rows in zip(recvs, came, strict=True):
                array[...] = rows

        return wait

    monkeypatch.setattr(LocalComm, "_exchange", delayed)


def hide_all(monkeypatch: Any) -> None:
    """Overlap every exchange of needed rows, however small and whatever the comm can do."""
    monkeypatch.setattr(group_cast, "is_worth_overlapping", lambda *_: True)
    monkeypatch.setattr(transport, "WORTH_COPYING", 0)
