"""Judgement of a random case's results: errors by the accuracy rule, zeros in padding, and equal bits.

The rule compares with baselines that round as kernels may. Both store their results, so their errors are at least that
of the exact result rounded once. A result within this smaller bound is good, and most of the NumPy engine's are; the
baselines are computed for the others alone.

The rule allows one standard deviation of the quotient of two RMS errors. A baseline may be right by luck: the error of
delta in one row decides all of dq and dk of a tiny pack. A soak draws so many small packs that both happen. So an error
beyond the rule is compared with the baseline's errors in neighbours. These are packs of the same layout whose inputs
differ by about one percent, so that every rounding falls anew. The error is `near` up to four standard deviations
beyond their root mean square, and wrong beyond that. Near cases are counted: a kernel that rounds twice has many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from thdattn import oracle
from thdattn.cli.check import offsets
from thdattn.fuzz.cases import FuzzCase
from thdattn.fuzz.runs import Inputs, Results, inputs_of, mixer_inputs_of, token_rows
from thdattn.mamba import oracle as mamba_oracle
from thdattn.packing import PackedBatch

Array = NDArray[Any]

ATTENTION = ("out", "dq", "dk", "dv")
FLOAT32_ERROR = 1e-4  # bound for lse, max_logit and dsinks
FLOAT64_ERROR = 1e-11  # bound for results in float64
NEIGHBOURS, DISTANCE = 16, 0.01  # number of packs, and the share by which their inputs differ from a case's


@dataclass
class Judgement:
    """Judgement of the results of a case.

    near: names of results beyond the rule, but by no more than chance explains.
    worst: the largest error, in parts of what the rule allows.
    """

    wrong: list[str] = field(default_factory=list)
    near: list[str] = field(default_factory=list)
    worst: float = 0.0

    def hold(self, name: str, error: float, budget: float, wide: float | None = None) -> None:
        """Hold an error to its budget, or by luck to a wide one; NaN is wrong."""
        wide = budget if wide is None else max(wide, budget)
        if not error <= wide:
            self.wrong.append(f"{name} errs by {error:.3g}, which may be {wide:.3g}")
        elif error > budget:
            self.near.append(name)
        self.worst = max(self.worst, error / budget if budget > 0 else np.inf if error else 0.0)


def judge(case: FuzzCase, by_rank: Sequence[Results]) -> Judgement:
    """Hold the results of all ranks against the oracle.

    Args:
        by_rank: results of `runs.run` on every rank.
    """
    found = Judgement()
    unequal = sum(int(each["unequal"][0]) for each in by_rank)
    if unequal:
        found.wrong.append(f"{unequal} arrays differ in bits from those of the same calls")
    rows = np.concatenate([each["rows"] for each in by_rank])
    order, padding = order_of(token_rows(case.tokens if case.flow in ("varlen", "decode") else case.batch), rows)
    if order is None:
        found.wrong.append("a token lies on no rank, or on several")
    elif case.flow == "mixer":
        _judge_mixer(case, by_rank, order, padding, found)
    else:
        for layer, suffix in enumerate(("", " of B")[: 1 + (case.flow == "layers")]):
            _judge_layer(case, by_rank, order, padding, found, (layer, suffix))
    return found


def order_of(tokens: Array, rows: Array) -> tuple[Array | None, Array]:
    """Return each token's index in `rows`, None if one is missing or twice there, and the indices of padding."""
    token_of_row = np.full(max(tokens.max(initial=-1), rows.max(initial=-1)) + 2, -1)
    token_of_row[tokens] = np.arange(len(tokens))
    token = token_of_row[rows]  # row -1, a filler, is the one behind all others
    held = np.flatnonzero(token >= 0)
    order = held[np.argsort(token[held], kind="stable")]
    whole = np.array_equal(token[order], np.arange(len(tokens)))
    return (order if whole else None), np.flatnonzero(token < 0)


# ------------------------------------------------------------------------------------------------ attention


def _judge_layer(
    case: FuzzCase, by_rank: Sequence[Results], order: Array, padding: Array, found: Judgement, which: tuple[int, str]
) -> None:
    layer, suffix = which
    inputs, names = inputs_of(case, layer), [f"{name}{suffix}" for name in ATTENTION]
    oracle_of = _Oracle(case, inputs)
    exact = oracle_of.exact
    for name, of in zip(names, ATTENTION, strict=True):
        if name not in by_rank[0]:
            continue  # decode has no backward
        whole = np.concatenate([each[name] for each in by_rank])
        keys = case.flow == "varlen" and of in ("dk", "dv")  # they have no padding
        made = whole if keys else whole[order]
        if not keys and whole[padding].view(np.uint8).any():
            found.wrong.append(f"{name} is not 0 on padding")
        if made.dtype != np.dtype(case.dtype) or made.shape != getattr(exact, of).shape:
            found.wrong.append(f"{name} is {made.dtype} {made.shape}")
        else:
            _judge_rows(name, made, of, oracle_of, found)
    _judge_numbers(case, by_rank, order, padding, found, suffix, oracle_of)


class _Neighbours:
    """Errors of a baseline in neighbours of a case, for every number of a result.

    Args:
        arrays: those that differ a little between neighbours, in the same dtypes; None: there is none.
        results: makes (exact, baseline) of arrays; fields that are None are left out.
    """

    def __init__(
        self, seed: int, arrays: Sequence[Array | None], names: Sequence[str],
        results: Callable[[Sequence[Any]], tuple[Any, Any]],
    ) -> None:
        self._seed, self._arrays, self._names, self._results = seed, arrays, names, results

    def typical(self, name: str) -> Array:
        """Return the baseline's root mean square error over neighbours, for every number of a result."""
        return np.asarray(np.sqrt(np.mean([each[name] ** 2 for each in self._errors], axis=0)))

    @cached_property
    def _errors(self) -> list[dict[str, Array]]:
        rng, found = np.random.default_rng([self._seed, 4]), []
        for _ in range(NEIGHBOURS):
            exact, baseline = self._results([x if x is None else _near(x, rng) for x in self._arrays])
            found.append({name: getattr(baseline, name) - getattr(exact, name) for name in self._names
                          if getattr(exact, name) is not None})
        return found


def _near(x: Array, rng: np.random.Generator) -> Array:
    near: Array = (x.astype(np.float64) * (1 + DISTANCE * rng.standard_normal(x.shape))).astype(x.dtype)
    return near


class _Oracle:
    """Exact results for the tokens of a layer, and baselines, which are computed on first use."""

    def __init__(self, case: FuzzCase, inputs: Inputs) -> None:
        self._batch, self._dtype = case.tokens, np.dtype(case.dtype)
        self.inputs = inputs._replace(dout=None) if case.flow == "decode" else inputs
        self._how: dict[str, Any] = {
            "causal": case.causal, "window": case.window, "softmax_scale": case.scale * case.dims[0] ** -0.5,
            "softcap": case.softcap, "sinks": inputs.sinks,
            "key_batch": PackedBatch(offsets(case.keys)) if case.flow == "varlen" and case.keys else None,
        }
        group = case.heads[0] // case.heads[1]  # query heads whose gradients of a key are summed
        self.noise = 4 * float(np.finfo(np.float32).eps) * (max(case.dims) * group) ** 0.5
        self.exact = self._result(self.inputs[:4])
        self.typical = _Neighbours(case.seed, self.inputs[:4], ATTENTION, lambda arrays: (
            self._result(arrays), self._baseline(arrays, self._dtype.itemsize == 2))).typical

    def _result(self, arrays: Sequence[Any], **how: Any) -> oracle.Result:
        q, k, v, dout = arrays
        return oracle.packed_attention(self._batch, q, k, v, dout, **self._how, **how)

    @cached_property
    def truth(self) -> oracle.Truth:
        """Exact results with baselines in the dtype of the case."""
        plain = self.exact if self._dtype == np.float64 else self._baseline(self.inputs[:4], fused=False)
        fused = self._baseline(self.inputs[:4], fused=True) if self._dtype.itemsize == 2 else None
        return oracle.Truth(self.exact, plain, fused)

    def baselines(self, name: str) -> tuple[Array, Array | None]:
        """Return the plain and the fused baseline of a result."""
        fused = self.truth.fused
        return getattr(self.truth.plain, name), None if fused is None else getattr(fused, name)

    def _baseline(self, arrays: Sequence[Any], fused: bool) -> oracle.Result:
        return self._result(arrays, rounding=self._dtype, fused=fused)


def _judge_rows(name: str, made: Array, of: str, oracle_of: _Oracle, found: Judgement) -> None:
    """Judge rows by the accuracy rule; float64 by a bound of its own."""
    exact = getattr(oracle_of.exact, of)
    if made.dtype == np.float64:
        error = np.abs(made - exact).max(initial=0)
        found.hold(name, float(error), FLOAT64_ERROR * float(1 + np.abs(exact).max(initial=0)))
        return
    nearest = exact.astype(made.dtype).astype(np.float64)
    floor = oracle.judge(made, exact, nearest)
    rounding = float(np.sqrt(np.mean((nearest - exact) ** 2))) if exact.size else 0.0
    share = 1.05 if made.dtype.itemsize == 2 else 2.0
    noise = made.shape[-1] ** 0.5 * float(np.finfo(np.float32).eps)
    verdict, wide = floor._replace(rms_budget=float(np.hypot(share * rounding, noise))), (0.0, 0.0)
    if not verdict.good:
        plain, fused = oracle_of.baselines(of)
        verdict = oracle.judge(made, exact, plain, fused)
        if not verdict.good:
            share = 2.0 if fused is None else 1.05
            wide = _wide(share, oracle_of.typical(of), verdict.largest_budget, oracle_of.noise)
    found.hold(f"{name} (RMS)", verdict.rms, verdict.rms_budget, wide[0])
    found.hold(f"{name} (largest)", verdict.largest, verdict.largest_budget, wide[1])


def _wide(share: float, typical: Array, largest_budget: float, noise: float) -> tuple[float, float]:
    """Return budgets of the RMS error and the largest one that chance does not exceed.

    Args:
        share: what the rule allows the RMS error to be, in parts of the baseline's.
        typical: (..., width), the baseline's error over neighbours.
        largest_budget: what the rule allows the largest error to be.
        noise: error of sums that cancel.
    """
    squares = (typical**2).sum(axis=-1)
    spread = np.sqrt((squares**2).sum() / 2) / squares.sum() if squares.any() else 0.0
    return ((share + 4 * float(spread)) * _rms(typical) + noise,
            2 * largest_budget + 4 * float(typical.max(initial=0)) + 4 * noise)


def _judge_numbers(
    case: FuzzCase, by_rank: Sequence[Results], order: Array, padding: Array, found: Judgement, suffix: str,
    oracle_of: _Oracle,
) -> None:
    """Judge lse, max_logit and dsinks, where the case has them."""
    exact, first = oracle_of.exact, by_rank[0]
    kept = np.float64 if case.dtype == "float64" else np.float32
    if f"lse{suffix}" in first:
        lse = np.concatenate([each[f"lse{suffix}"].T for each in by_rank])
        if (lse[padding] != -np.inf).any():
            found.wrong.append(f"lse{suffix} is not -inf on padding")
        _hold_close(f"lse{suffix}", lse[order].T, exact.lse, kept, found)
    if f"max_logit{suffix}" in first:
        for each in by_rank:
            _hold_close(f"max_logit{suffix}", each[f"max_logit{suffix}"], exact.max_logit, np.float32, found)
    if f"dsinks{suffix}" in first:
        made = np.sum([each[f"dsinks{suffix}"] for each in by_rank], axis=0)
        if made.dtype != kept or case.dtype in ("float64", "float32"):
            assert exact.dsinks is not None
            _hold_close(f"dsinks{suffix}", made, exact.dsinks, kept, found)
        else:
            _judge_dsinks(f"dsinks{suffix}", made, oracle_of, found)


def _hold_close(name: str, made: Array, exact: Array, kept: Any, found: Judgement) -> None:
    """Hold numbers that are kept in float32, or float64, whatever the inputs are."""
    if made.dtype != kept or made.shape != exact.shape:
        found.wrong.append(f"{name} is {made.dtype} {made.shape}")
        return
    tolerance = FLOAT64_ERROR if kept == np.float64 else FLOAT32_ERROR
    with np.errstate(invalid="ignore"):
        error = np.where(made == exact, 0.0, np.abs(made - exact) / (1 + np.abs(exact)))
    found.hold(name, float(error.max(initial=0)), tolerance)


def _judge_dsinks(name: str, made: Array, oracle_of: _Oracle, found: Judgement) -> None:
    """Judge sums over rows, whose errors follow from those of out as if they were independent."""
    exact, fused, (*_, dout, sinks) = oracle_of.exact, oracle_of.truth.fused, oracle_of.inputs
    assert fused is not None and exact.dsinks is not None and dout is not None and sinks is not None
    share = np.exp(sinks[:, None] - np.where(exact.lse == -np.inf, np.inf, exact.lse)).T[..., None]
    deviation = np.sqrt(((share * dout * (fused.out - exact.out)) ** 2).sum(axis=(0, 2)))
    noise = 1e-5 * np.abs(share * dout * exact.out).sum(axis=(0, 2)) + 1e-12
    error = np.abs(made - exact.dsinks)
    worst = int(np.argmax(error / (6 * deviation + noise))) if len(error) else 0
    if len(error):
        found.hold(name, float(error[worst]), float(6 * deviation[worst] + noise[worst]))


# ------------------------------------------------------------------------------------------------ the mixer


def _judge_mixer(
    case: FuzzCase, by_rank: Sequence[Results], order: Array, padding: Array, found: Judgement
) -> None:
    """Judge rows by the rule's RMS error, and weights' gradients, a few sums, by the plain baseline's error."""
    (zxbcdt, weights, dout), dtype = mixer_inputs_of(case), np.dtype(case.dtype)

    def results(arrays: Sequence[Any]) -> tuple[mamba_oracle.Result, mamba_oracle.Result]:
        sizes, (rows, drows) = mamba_oracle.Sizes(*case.mixer[:4]), arrays
        exact = mamba_oracle.packed_mixer(case.tokens, rows, weights, drows, sizes)
        if dtype == np.float64:
            return exact, exact
        return exact, mamba_oracle.packed_mixer(case.tokens, rows, weights, drows, sizes, case.dtype)

    exact, plain = results((zxbcdt, dout))
    neighbours = _Neighbours(case.seed, (zxbcdt, dout), mamba_oracle.FIELDS, results)
    for name in mamba_oracle.FIELDS:
        wanted, baseline = getattr(exact, name), getattr(plain, name)
        of_rows = name in ("out", "zxbcdt")
        if of_rows:
            whole = np.concatenate([each[name] for each in by_rank])
            if whole[padding].view(np.uint8).any():
                found.wrong.append(f"{name} is not 0 on padding")
            made = whole[order]
        else:
            made = np.sum([each[name].astype(np.float64) for each in by_rank], axis=0)
        if dtype == np.float64:
            size = float(np.abs(wanted).max(initial=0))
            found.hold(name, float(np.abs(made - wanted).max(initial=0)), FLOAT64_ERROR * (1 + size))
            continue
        if of_rows:
            verdict = oracle.judge(made, wanted, baseline)
            error, budget = verdict.rms, verdict.rms_budget
        else:
            error, allowed, size = (_rms(x) for x in (made - wanted, baseline - wanted, wanted))
            typical = 0.1 * len(order) ** 0.5  # size of a sum over as many rows
            eps = float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
            budget = 3 * allowed + (16 if dtype == np.float32 else 4) * eps * (size + typical)
        wide = budget if error <= budget else _wide(2.0, neighbours.typical(name), 0.0, 0.0)[0]
        found.hold(f"{name} (RMS)" if of_rows else name, error, budget, wide)


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2))) if x.size else 0.0
