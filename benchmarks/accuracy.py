"""Errors against the float64 oracle on a small version of a case: two numbers for each result.

The relative root mean square (RMS) shows what every element pays, such as a second rounding. The largest error shows
the element that pays most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from workloads import Case, TreeCase

import thdattn
from thdattn import oracle

RESULTS = ("out", "dq", "dk", "dv")
ROWS, HEADS, LONGEST = 2048, 8, 4  # at most, of the small version; the number of longest sequences that it keeps
Array = NDArray[np.float64]


class Error(NamedTuple):
    """Relative RMS of the differences, over that of the right values, and the largest difference."""

    rms: float
    largest: float

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns of a record."""
        return {"rms": f"{self.rms:.4e}", "largest": f"{self.largest:.4e}"}


def small(case: Case) -> Case:
    """Return a case with the same widths, mask and heads per kv head that float64 computes in seconds.

    It scales lengths until the longest four fit the rows together, and takes them in order while there is room. Lengths
    of keys are scaled and taken with their queries.
    """
    sides = case.keys or case.lengths
    scale = min(1.0, ROWS / sum(sorted(sides)[-LONGEST:]))
    kept: list[int] = []
    lengths: list[int] = []
    for length, side in zip(case.lengths, sides, strict=True):
        scaled = max(1, int(scale * side))
        if sum(kept) + scaled <= ROWS:
            kept.append(scaled)
            lengths.append(scaled if case.keys is None else length)
    return replace(case, lengths=tuple(lengths), keys=case.keys and tuple(kept), **_few_heads(case))


def small_tree(case: TreeCase) -> TreeCase:
    """Return the first tree of a pack, with its lengths scaled to the rows of `small`, and with as few heads."""
    nodes = next((node for node, parent in enumerate(case.parents) if node and parent < 0), len(case.parents))
    scale = min(1.0, ROWS / sum(case.lengths[:nodes]))
    lengths = tuple(max(1, int(scale * length)) for length in case.lengths[:nodes])
    return replace(case, lengths=lengths, parents=case.parents[:nodes], **_few_heads(case))


def _few_heads(case: Case) -> dict[str, Any]:
    few = (n for n in range(1, case.kv_heads) if case.kv_heads % n == 0 and case.heads // n <= HEADS)
    fewer = next(few, case.kv_heads)
    return {"heads": case.heads // fewer, "kv_heads": case.kv_heads // fewer}


def exact(
    case: Case, inputs: Sequence[Any], batch: thdattn.PackedBatch | None = None, **logits: Any
) -> list[Array]:
    """Compute out, dq, dk and dv by the oracle, on the host.

    Args:
        inputs: q, k, v, dout on the host, (rows, heads, width), in the dtype that the kernels get.
        batch: with padding where the inputs have it; None: that of the case.
        logits: softcap and sinks of the oracle.
    """
    right = oracle.packed_attention(batch or case.batch(), *inputs, causal=case.causal, window=case.window,
                                    key_batch=case.key_batch(), **logits)
    return [getattr(right, name) for name in RESULTS]


def error(found: NDArray[Any], wanted: Array) -> Error:
    """Return the error of a result on the host, in any float dtype; NaN where it has one."""
    difference = found.astype(np.float64) - wanted
    return Error(float(np.linalg.norm(difference) / np.linalg.norm(wanted)), float(np.abs(difference).max()))


def errors(found: Sequence[NDArray[Any]], wanted: Sequence[Array]) -> dict[str, Error]:
    """Return the errors of out, dq, dk, dv, given results of `exact`."""
    return {name: error(x, right) for name, x, right in zip(RESULTS, found, wanted, strict=True)}
