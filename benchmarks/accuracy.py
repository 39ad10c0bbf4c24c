"""Errors against float64: the right results of a small version of a case, and two numbers for each result.

The relative root mean square (RMS) shows what every element pays, such as a second rounding. The largest error shows
the element that pays most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from workloads import Case, TreeCase

RESULTS = ("out", "dq", "dk", "dv")
ROWS, HEADS, LONGEST = 2048, 8, 4  # at most, of the small version; the number of longest sequences that it keeps
SCORES = 2**26  # at a time, in each float64 array of scores
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
    """Return a case with the same widths, mask and heads per kv head that float64 computes in milliseconds.

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


def exact(case: Case, inputs: Sequence[Any], xp: Any, softcap: float = 0.0, sinks: Any = None) -> list[Array]:
    """Compute out, dq, dk and dv in float64, from the rule on positions, one sequence at a time; return them on the
    host.

    Args:
        inputs: q, k, v, dout on the host, (rows, heads, width), in the dtype that the kernels get.
        xp: cupy or numpy, which computes.
        softcap: 0 is none.
        sinks: (query heads,), array of xp; None: no sinks.
    """
    q, k, v, dout = (xp.asarray(x.astype(np.float64)) for x in inputs)
    results = [xp.empty_like(x) for x in (dout, q, k, v)]
    queries, keys = ([slice(*ends) for ends in pairwise(np.cumsum([0, *lengths]).tolist())]
                     for lengths in (case.lengths, case.keys or case.lengths))
    for here, there in zip(queries, keys, strict=True):
        parts = _one_sequence(case, (q[here], k[there], v[there], dout[here]), xp, softcap, sinks)
        for result, rows, part in zip(results, (here, here, there, there), parts, strict=True):
            result[rows] = part
    return [x if isinstance(x, np.ndarray) else x.get() for x in results]


def exact_trees(case: TreeCase, inputs: Sequence[Any], xp: Any) -> list[Array]:
    """Compute the results of `exact` for prefix trees, from their unrolled paths.

    One path of each row has the gradient of its output, so that gradients are sums over paths.
    """
    rows = np.concatenate(case.batch().paths())
    _, first = np.unique(rows, return_index=True)
    *unrolled, dout = (x[rows] for x in inputs)
    dout[np.delete(np.arange(len(rows)), first)] = 0
    out, *of_paths = exact(case.unrolled, [*unrolled, dout], xp)
    grads = [np.zeros((len(first), *x.shape[1:])) for x in of_paths]
    for total, x in zip(grads, of_paths, strict=True):
        np.add.at(total, rows, x)
    return [out[first], *grads]


def _one_sequence(case: Case, inputs: Sequence[Any], xp: Any, softcap: float, sinks: Any) -> list[Any]:
    q, k, v, dout = inputs
    scale = case.head_dim**-0.5

    def by_head(x: Any) -> Any:  # (kv heads, query heads of each or 1, rows, width)
        return x.reshape(len(x), case.kv_heads, -1, x.shape[2]).transpose(1, 2, 0, 3)

    qh, kh, vh, douth = map(by_head, (q, k, v, dout))
    behind = len(k) - len(q)  # query i is key i + behind
    left, right = (side if side >= 0 else len(q) + len(k) for side in case.sides)
    out, dq, dk, dv = (xp.zeros(x.shape) for x in (douth, qh, kh, vh))
    step = max(1, SCORES // (case.heads * max(1, len(k))))
    for begin in range(0, len(q), step):
        rows = slice(begin, min(begin + step, len(q)))
        keys = slice(0, min(len(k), rows.stop + behind + right))  # these rows see no key beyond
        ahead = xp.arange(keys.stop) - (xp.arange(rows.start, rows.stop) + behind)[:, None]
        its_q, its_dout, its_k, its_v = qh[:, :, rows], douth[:, :, rows], kh[:, :, keys], vh[:, :, keys]
        logits = scale * (its_q @ its_k.swapaxes(2, 3))
        share = xp.tanh(logits / softcap) if softcap else xp.zeros(1)
        logits = xp.where((ahead < -left) | (ahead > right), -np.inf, softcap * share if softcap else logits)
        top = logits.max(axis=3, keepdims=True)
        p = xp.exp(logits - top)
        total = p.sum(axis=3, keepdims=True)
        if sinks is not None:
            total = total + xp.exp(sinks.reshape(case.kv_heads, -1, 1, 1) - top)
        p /= total
        dp = its_dout @ its_v.swapaxes(2, 3)
        ds = scale * p * (dp - (p * dp).sum(axis=3, keepdims=True)) * (1 - share**2)
        out[:, :, rows], dq[:, :, rows] = p @ its_v, ds @ its_k
        for sums, weights, x in ((dk, ds, its_q), (dv, p, its_dout)):
            sums[:, :, keys] += (weights.swapaxes(2, 3) @ x).sum(axis=1, keepdims=True)
    return [x.transpose(2, 0, 1, 3).reshape(x.shape[2], -1, x.shape[3]) for x in (out, dq, dk, dv)]


def error(found: NDArray[Any], wanted: Array) -> Error:
    """Return the error of a result on the host, in any float dtype; NaN where it has one."""
    difference = found.astype(np.float64) - wanted
    return Error(float(np.linalg.norm(difference) / np.linalg.norm(wanted)), float(np.abs(difference).max()))


def errors(found: Sequence[NDArray[Any]], wanted: Sequence[Array]) -> dict[str, Error]:
    """Return the errors of out, dq, dk, dv, given results of `exact`."""
    return {name: error(x, right) for name, x, right in zip(RESULTS, found, wanted, strict=True)}
