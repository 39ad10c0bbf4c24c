"""Judgement of a random case's results: errors by the accuracy rule, zeros in padding, and equal bits.

The rule allows one standard deviation of the quotient of two RMS errors. A baseline may be right by luck: the error of
delta in one row decides all of dq and dk of a tiny pack. A soak draws so many small packs that both happen. So an error
beyond the rule is compared with the baseline's errors in neighbours. These are packs of the same layout whose inputs
differ by about one percent, so that every rounding falls anew. The error is `near` up to four standard deviations
beyond their root mean square, and wrong beyond that. Near cases are counted: a kernel that rounds twice has many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from thdattn import oracle
from thdattn.fuzz.cases import FuzzCase
from thdattn.fuzz.runs import Results, inputs_of, mixer_inputs_of, token_rows
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
    shares: errors by name, in parts of what the rule allows.
    """

    wrong: list[str] = field(default_factory=list)
    near: list[str] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """Largest error that is finite, in parts of what the rule allows."""
        return max(filter(np.isfinite, self.shares.values()), default=0.0)

    def hold(self, name: str, error: float, budget: float, wide: float | None = None) -> None:
        """Hold an error to its budget, or by luck to a wide one; NaN is wrong."""
        wide = budget if wide is None else max(wide, budget)
        if not error <= wide:
            self.wrong.append(f"{name} errs by {error:.3g}, which may be {wide:.3g}")
        elif error > budget:
            self.near.append(name)
        self.shares[name] = error / budget if budget > 0 else np.inf if error else 0.0


def judge(case: FuzzCase, by_rank: Sequence[Results] | Exception) -> Judgement:
    """Hold the results of all ranks against the oracle.

    Args:
        by_rank: results of `runs.run` on every rank, or the error of one, which is wrong.
    """
    if isinstance(by_rank, Exception):
        return Judgement([f"{type(by_rank).__name__}: {by_rank}"])
    found = Judgement()
    if unequal := sum(int(each["unequal"][0]) for each in by_rank):
        found.wrong.append(f"{unequal} arrays differ in bits from those of the same calls")
    tokens = token_rows(case.tokens if case.flow in ("varlen", "decode") else case.batch)
    order, padding = order_of(tokens, np.concatenate([each["rows"] for each in by_rank]))
    if order is None:
        found.wrong.append("a token lies on no rank, or on several")
        return found
    whole = _Whole(by_rank, order, padding)
    if case.flow == "mixer":
        _judge_mixer(case, whole, found)
    else:
        for layer in range(1 + (case.flow == "layers")):
            _judge_layer(_Layer(case, layer), whole, found)
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


@dataclass(frozen=True)
class _Whole:
    """Results of all ranks, put together.

    order: each token's index in the rows of all ranks.
    padding: indices of the rows that hold no token.
    """

    by_rank: Sequence[Results]
    order: Array
    padding: Array

    def __contains__(self, name: str) -> bool:
        return name in self.by_rank[0]

    def rows(self, name: str) -> Array:
        """Return the rows of all ranks, one rank after the other."""
        return np.concatenate([each[name] for each in self.by_rank])

    def tokens(self, name: str, found: Judgement) -> Array:
        """Return the rows of all tokens; those of padding must be 0."""
        rows = self.rows(name)
        if rows[self.padding].view(np.uint8).any():
            found.wrong.append(f"{name} is not 0 on padding")
        return np.asarray(rows[self.order])

    def total(self, name: str, dtype: DTypeLike | None = None) -> Array:
        """Return the sum over ranks."""
        return np.asarray(np.sum([each[name] for each in self.by_rank], axis=0, dtype=dtype))


def _typical_errors(
    seed: int, arrays: Sequence[Array | None], names: Sequence[str],
    results: Callable[[Sequence[Any]], tuple[Any, Any]],
) -> dict[str, Array]:
    """Return the root mean square error of a baseline in neighbours of a case, for every number of some results.

    Args:
        arrays: those that differ a little between neighbours, in the same dtypes.
        results: makes (exact, baseline) of arrays.
    """
    rng, squares = np.random.default_rng([seed, 4]), dict.fromkeys(names, np.float64())
    for _ in range(NEIGHBOURS):
        exact, baseline = results([None if x is None else _near(x, rng) for x in arrays])
        squares = {name: x + (getattr(baseline, name) - getattr(exact, name)) ** 2 for name, x in squares.items()}
    return {name: np.sqrt(x / NEIGHBOURS) for name, x in squares.items()}


def _near(x: Array, rng: np.random.Generator) -> Array:
    near: Array = (x.astype(np.float64) * (1 + DISTANCE * rng.standard_normal(x.shape))).astype(x.dtype)
    return near


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


def _hold_float64(name: str, made: Array, exact: Array, found: Judgement) -> None:
    size = float(np.abs(exact).max(initial=0))
    found.hold(name, float(np.abs(made - exact).max(initial=0)), FLOAT64_ERROR * (1 + size))


# ------------------------------------------------------------------------------------------------ attention


class _Layer:
    """Inputs of a layer of attention, and its exact results and baselines.

    suffix: end of the names of its results.
    names: those of ATTENTION that it has; decode has no backward.
    noise: error of sums that cancel.
    """

    def __init__(self, case: FuzzCase, number: int) -> None:
        self.case, self.suffix = case, " of B" * number
        self.inputs = inputs_of(case, number)
        self.names: tuple[str, ...] = ATTENTION
        if case.flow == "decode":
            self.inputs, self.names = self.inputs._replace(dout=None), ATTENTION[:1]
        self.truth = self._truth(self.inputs[:4])
        group = case.heads[0] // case.heads[1]  # query heads whose gradients of a key are summed
        self.noise = 4 * float(np.finfo(np.float32).eps) * (max(case.dims) * group) ** 0.5

    def _truth(self, arrays: Sequence[Any]) -> oracle.Truth:
        case = self.case
        keys = PackedBatch.from_lengths(case.keys) if case.flow == "varlen" and case.keys else None
        return oracle.truth(
            case.tokens, *arrays, causal=case.causal, window=case.window, sinks=self.inputs.sinks, key_batch=keys,
            softmax_scale=case.scale * case.dims[0] ** -0.5, softcap=case.softcap)

    @cached_property
    def typical(self) -> dict[str, Array]:
        """Errors of the baseline in neighbours."""
        def results(arrays: Sequence[Any]) -> tuple[oracle.Result, oracle.Result]:
            truth = self._truth(arrays)
            return truth.exact, truth.fused or truth.plain

        return _typical_errors(self.case.seed, self.inputs[:4], self.names, results)


def _judge_layer(layer: _Layer, whole: _Whole, found: Judgement) -> None:
    for of in layer.names:
        name, exact = f"{of}{layer.suffix}", getattr(layer.truth.exact, of)
        of_keys = layer.case.flow == "varlen" and of in ("dk", "dv")  # they have no padding
        made = whole.rows(name) if of_keys else whole.tokens(name, found)
        if made.dtype != np.dtype(layer.case.dtype) or made.shape != exact.shape:
            found.wrong.append(f"{name} is {made.dtype} {made.shape}")
        elif made.dtype == np.float64:
            _hold_float64(name, made, exact, found)
        else:
            verdict, wide = layer.truth.judge(of, made), (0.0, 0.0)
            if not verdict.good:
                share = 2.0 if layer.truth.fused is None else 1.05
                wide = _wide(share, layer.typical[of], verdict.largest_budget, layer.noise)
            found.hold(f"{name} (RMS)", verdict.rms, verdict.rms_budget, wide[0])
            found.hold(f"{name} (largest)", verdict.largest, verdict.largest_budget, wide[1])
    _judge_numbers(layer, whole, found)


def _judge_numbers(layer: _Layer, whole: _Whole, found: Judgement) -> None:
    """Judge lse, max_logit and dsinks, where the case has them."""
    exact, dtype = layer.truth.exact, layer.case.dtype
    lse, max_logit, dsinks = (f"{name}{layer.suffix}" for name in ("lse", "max_logit", "dsinks"))
    kept = np.float64 if dtype == "float64" else np.float32
    if lse in whole:
        made = np.concatenate([each[lse].T for each in whole.by_rank])
        if (made[whole.padding] != -np.inf).any():
            found.wrong.append(f"{lse} is not -inf on padding")
        _hold_close(lse, made[whole.order].T, exact.lse, kept, found)
    if max_logit in whole:
        made = np.stack([each[max_logit] for each in whole.by_rank])
        _hold_close(max_logit, made, np.broadcast_to(exact.max_logit, made.shape), np.float32, found)
    if dsinks in whole:
        made = whole.total(dsinks)
        if made.dtype != kept or dtype in ("float64", "float32"):
            assert exact.dsinks is not None
            _hold_close(dsinks, made, exact.dsinks, kept, found)
        else:
            _judge_dsinks(dsinks, made, layer, found)


def _hold_close(name: str, made: Array, exact: Array, kept: Any, found: Judgement) -> None:
    """Hold numbers that are kept in float32, or float64, whatever the inputs are."""
    if made.dtype != kept or made.shape != exact.shape:
        found.wrong.append(f"{name} is {made.dtype} {made.shape}")
        return
    tolerance = FLOAT64_ERROR if kept == np.float64 else FLOAT32_ERROR
    with np.errstate(invalid="ignore"):
        error = np.where(made == exact, 0.0, np.abs(made - exact) / (1 + np.abs(exact)))
    found.hold(name, float(error.max(initial=0)), tolerance)


def _judge_dsinks(name: str, made: Array, layer: _Layer, found: Judgement) -> None:
    """Judge sums over rows, whose errors follow from those of out as if they were independent."""
    exact, fused, (*_, dout, sinks) = layer.truth.exact, layer.truth.fused, layer.inputs
    assert fused is not None and exact.dsinks is not None and dout is not None and sinks is not None
    share = np.exp(sinks[:, None] - np.where(exact.lse == -np.inf, np.inf, exact.lse)).T[..., None]
    deviation = np.sqrt(((share * dout * (fused.out - exact.out)) ** 2).sum(axis=(0, 2)))
    noise = 1e-5 * np.abs(share * dout * exact.out).sum(axis=(0, 2)) + 1e-12
    error = np.abs(made - exact.dsinks)
    worst = int(np.argmax(error / (6 * deviation + noise))) if len(error) else 0
    if len(error):
        found.hold(name, float(error[worst]), float(6 * deviation[worst] + noise[worst]))


# ------------------------------------------------------------------------------------------------ the mixer


def _judge_mixer(case: FuzzCase, whole: _Whole, found: Judgement) -> None:
    """Judge rows by the rule's RMS error, and weights' gradients, a few sums, by the plain baseline's error."""
    (zxbcdt, weights, dout), dtype = mixer_inputs_of(case), np.dtype(case.dtype)

    def results(arrays: Sequence[Any]) -> tuple[mamba_oracle.Result, mamba_oracle.Result]:
        sizes, (rows, drows) = mamba_oracle.Sizes(*case.mixer[:4]), arrays
        exact = mamba_oracle.packed_mixer(case.tokens, rows, weights, drows, sizes)
        if dtype == np.float64:
            return exact, exact
        return exact, mamba_oracle.packed_mixer(case.tokens, rows, weights, drows, sizes, case.dtype)

    exact, plain = results((zxbcdt, dout))
    typical = cache(lambda: _typical_errors(case.seed, (zxbcdt, dout), mamba_oracle.FIELDS, results))
    for name in mamba_oracle.FIELDS:
        wanted, baseline = getattr(exact, name), getattr(plain, name)
        of_rows = name in ("out", "zxbcdt")
        made = whole.tokens(name, found) if of_rows else whole.total(name, np.float64)
        if dtype == np.float64:
            _hold_float64(name, made, wanted, found)
            continue
        if of_rows:
            error, budget, *_ = oracle.judge(made, wanted, baseline)
        else:
            error, allowed, size = (_rms(x) for x in (made - wanted, baseline - wanted, wanted))
            of_sum = 0.1 * len(whole.order) ** 0.5  # size of a sum over as many rows
            eps = float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
            budget = 3 * allowed + (16 if dtype == np.float32 else 4) * eps * (size + of_sum)
        wide = budget if error <= budget else _wide(2.0, typical()[name], 0.0, 0.0)[0]
        found.hold(f"{name} (RMS)" if of_rows else name, error, budget, wide)


def _rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2))) if x.size else 0.0
