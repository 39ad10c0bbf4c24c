"""Rows of one rank and of the whole pack: shard, unshard, and shift inside sequences.

Plan has these functions as methods, whose docstrings explain the arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from thdattn.arguments import INT32_MAX, Array, as_count, found
from thdattn.comm import Comm
from thdattn.plan.node_table import node_table, rows_before

if TYPE_CHECKING:
    from thdattn.plan.plan import Plan


def shard(plan: Plan, x: Array) -> Any:
    """Return Plan.shard(x)."""
    plan.enter()
    x = _checked(plan, x, plan.batch.total_rows, "pass the whole packed array, as batch.pack makes it")
    local = _words(x)[plan.arrays.rows]
    owned = (plan.arrays.rows >= 0).reshape(plan.local_rows, *(1 for _ in local.shape[1:]))
    return np.where(owned, local, local.dtype.type(0)).view(x.dtype)  # of CuPy arrays this is cupy.where


def unshard(plan: Plan, x: Array, comm: Comm) -> Any:
    """Return Plan.unshard(x, comm)."""
    _check_comm(plan, comm)
    x = _checked(plan, x, plan.local_rows, "pass this rank's rows, as forward returns them")
    plan.enter()
    comm.agree("x of unshard", {"shape": x.shape, "dtype": x.dtype.name})
    return _packed(plan, x, comm)[:-1].view(x.dtype)


def shift(plan: Plan, x: Array, n: int, fill: Any, comm: Comm | None) -> Any:
    """Return Plan.shift(x, n, fill, comm)."""
    if comm is not None or plan.cp_size > 1:
        _check_comm(plan, comm)
    fields: dict[str, Any] = {}
    refusal = ""
    try:
        x = _checked(plan, x, plan.local_rows, "pass this rank's rows, in the order of plan.rows")
        n = as_count("n", n, "pass how many tokens later", at_least=-INT32_MAX)
        if n > 0 and plan.has_trees:
            raise ValueError(
                f"n is {n}, but batch has trees: wanted n <= 0, as a token at a fork has several next ones; pass n=-1 "
                f"for the value one token earlier on the path, and compare that with the labels"
            )
        filling = _as_dtype(fill, x.dtype)
        fields = {"shape": x.shape, "dtype": x.dtype.name, "n": n, "fill": str(filling)}
    except (TypeError, ValueError) as error:
        if comm is None:
            raise
        refusal = str(error)
    if comm is not None:
        comm.agree("the call of shift", fields, refusal)
    plan.enter()
    packed = _packed(plan, x, comm)
    packed[-1:] = _words(filling)[()]
    return packed[_source_rows(plan, n)].view(x.dtype)


def _source_rows(plan: Plan, n: int) -> Any:
    """Return the source row in the pack of each local row; total_rows where there is none.

    The host reads no length, so that lengths may be on a GPU.
    """
    arrays, batch = plan.arrays, plan.batch
    if plan.has_trees:
        table = node_table(batch) if arrays.nodes is None else arrays.nodes
        rows = np.where(arrays.valid, arrays.rows, batch.total_rows)
        return rows_before(table, rows, -n, batch.total_rows)
    host = batch.cu_seqlens, batch.cu_seqlens_padded
    cu_seqlens, begins = host if arrays.offsets is None else arrays.offsets[0]
    # The index of the sequence after a row's own; arbitrary for rows outside all sequences, which are not valid.
    behind = np.minimum(np.searchsorted(begins, arrays.rows, side="right"), len(begins) - 1)
    length = cu_seqlens[behind] - cu_seqlens[behind - 1]
    position = arrays.positions.astype(np.int64) + n
    inside = arrays.valid & (position >= 0) & (position < length)
    return np.where(inside, arrays.rows + n, batch.total_rows)


def _packed(plan: Plan, x: Array, comm: Comm | None) -> Any:
    """Return all ranks' rows in sequence order, as words, and after them one row for fillers."""
    gathered = words = _words(x)
    if comm is not None:
        gathered = plan.engine.empty((plan.cp_size * plan.local_rows, *words.shape[1:]), words.dtype)
        comm.all_gather(words, gathered)
    packed = plan.engine.empty((plan.batch.total_rows + 1, *words.shape[1:]), words.dtype)
    packed[plan.arrays.all_rows] = gathered  # fillers, -1, go to the last row
    return packed


def _check_comm(plan: Plan, comm: Comm | None) -> None:
    if not isinstance(comm, Comm):
        raise TypeError(f"comm is a {type(comm).__name__}, wanted a Comm; pass that of the attention")
    if (comm.rank, comm.size) != (plan.cp_rank, plan.cp_size):
        raise ValueError(
            f"comm is rank {comm.rank} of {comm.size}, wanted rank {plan.cp_rank} of {plan.cp_size} as the plan; "
            f"pass the comm of the attention that made it"
        )


def _checked(plan: Plan, x: Array, num_rows: int, remedy: str) -> Any:
    x = plan.engine.from_user("x", x)
    if x.shape[:1] != (num_rows,):
        raise ValueError(f"x has shape {x.shape}, wanted {num_rows} rows; {remedy}")
    return x


def _as_dtype(fill: Any, dtype: np.dtype[Any]) -> Any:
    """Return fill as a 0-d NumPy array of a dtype; integers have to hold it exactly."""
    if not isinstance(fill, (bool, int, float, np.generic)):
        raise TypeError(f"fill is {found(fill)}; wanted a number; pass one that x could hold")
    with np.errstate(all="ignore"):
        try:
            made = np.array(fill).astype(dtype)
        except (OverflowError, TypeError, ValueError):
            made = None
    if made is None or (dtype.kind in "biu" and made.item() != fill):
        raise ValueError(f"fill is {fill!r}, wanted a value of {dtype}, the dtype of x; pass one that x could hold")
    return made


def _words(x: Array) -> Any:
    """Return the array as unsigned integers, as CuPy does not index every dtype."""
    return x.view(f"u{x.itemsize}") if x.itemsize in (1, 2, 4, 8) else x
