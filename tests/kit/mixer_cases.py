"""The packs and sizes that tests of the Mamba-2 mixer share, and a run over simulated ranks.

Inputs of a case are made per row of the pack, the same for every cp_size; `run` poisons every row that holds no token.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from cases import Case as AttentionCase
from cases import to_host

import thdattn
from thdattn.fuzz.cases import offsets
from thdattn.fuzz.runs import draw_mixer_inputs, token_rows
from thdattn.mamba import oracle
from thdattn.mamba.oracle import FIELDS as FIELDS
from thdattn.mamba.oracle import FIELDS_WITH_NORM, Norm, Result, Sizes
from thdattn.oracle import judge

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = map(np.dtype, (ml_dtypes.bfloat16, "float16", "float32", "float64"))
SIZES = Sizes(4, 3, 5, 2)


@dataclass(frozen=True)
class Case:
    """A pack and a mixer.

    lengths: tokens of every sequence; padded: their rows, None = as many; slack: rows behind the last sequence.
    trees: a case of an attention that has the pack instead.
    """

    name: str
    lengths: tuple[int, ...]
    padded: tuple[int, ...] | None = None
    slack: int = 0
    sizes: Sizes = SIZES
    conv_width: int = 4
    norm: Norm | None = None
    trees: AttentionCase | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def batch(self) -> thdattn.PackedBatch:
        if self.trees:
            return self.trees.batch(2)
        starts = offsets(self.lengths if self.padded is None else self.padded)
        return thdattn.PackedBatch(offsets(self.lengths), starts, total_rows=int(starts[-1]) + self.slack)

    @property
    def valid(self) -> np.ndarray:
        """Return (total_rows,) bool, True for the rows that hold a token."""
        return np.isin(np.arange(self.batch.total_rows), token_rows(self.batch))

    def mixer(self, comm: thdattn.comm.Comm, dtype: Any, **options: Any) -> thdattn.Mamba2Mixer:
        """Make a mixer, on the NumPy engine unless options say otherwise."""
        options = {"engine": "reference", **options}
        if self.norm:
            place = "after_gate" if self.norm.after_gate else "before_gate"
            options |= {"norm": place, "norm_groups": self.norm.groups, "norm_eps": self.norm.eps}
        return thdattn.Mamba2Mixer(comm, *self.sizes, conv_width=self.conv_width, dtype=dtype, **options)


# The engine works at chunks of 64 rows.
CASES = {case.name: case for case in (
    Case("no-sequences", ()),
    Case("no-sequences-slack", (), slack=19),
    Case("all-empty", (0, 0, 0)),
    Case("all-empty-padded", (0, 0), padded=(5, 2), slack=3),
    Case("one-token", (1,)),
    Case("fewer-rows-than-ranks", (1, 0, 2)),
    Case("a-row-per-rank", (1, 5, 1)),
    Case("shorter-than-the-convolution", (1, 2, 3, 1, 1, 2, 3, 2)),
    Case("resets-inside-chunks", (10, 50, 7, 30, 90, 2)),
    Case("ranks-of-padding", (5,), padded=(64,)),
    Case("empty-between", (0, 9, 0, 40, 0), padded=(3, 12, 0, 40, 8), slack=2),
    Case("chunk-edges", (63, 64, 65, 1)),
    Case("padding-ends-a-chunk", (60, 60), padded=(64, 70), slack=9),
    Case("over-all-ranks", (200,)),
    Case("ends-with-a-rank", (50, 50, 100)),
    Case("capacity", (40, 21), slack=135),
    Case("one-group", (37, 90), sizes=Sizes(3, 2, 4, 1)),
    Case("a-group-per-head", (37, 90), sizes=Sizes(3, 2, 4, 3)),
    Case("sizes-of-one", (37, 90), sizes=Sizes(1, 1, 1, 1)),
    Case("no-convolution", (5, 70), padded=(6, 70), conv_width=1),
    Case("convolution-of-two", (5, 70, 1, 1), conv_width=2),
    Case("convolution-of-nine", (5, 70, 1, 3, 20), conv_width=9),
)}
# Of a norm: where, and which groups: one, those of B and C, or heads.
NORMS = [("after_gate", "groups"), ("before_gate", "one"), ("before_gate", "heads"), ("after_gate", "one")]
GPU_SIZES = Sizes(8, 64, 128, 1)
GPU_NORMS = [Norm(True, 8), Norm(False, 4), Norm(True, 1), Norm(False, 1)]
# Groups of 64 columns to 2560, some with a number of threads that is no power of 2.
NORM_SIZES = [
    (Sizes(8, 64, 64, 8), Norm(True, 8)), (Sizes(16, 64, 128, 2), Norm(True, 2)),
    (Sizes(8, 128, 64, 4), Norm(False, 4)), (Sizes(24, 64, 128, 8), Norm(True, 8)),
    (Sizes(8, 128, 256, 8), Norm(False, 2)), (Sizes(40, 64, 64, 1), Norm(True)),
]
ON_GPUS = tuple(replace(CASES[name], sizes=GPU_SIZES) for name in (
    "no-sequences", "no-sequences-slack", "all-empty-padded", "one-token", "fewer-rows-than-ranks",
    "shorter-than-the-convolution", "resets-inside-chunks", "ranks-of-padding", "empty-between",
    "padding-ends-a-chunk", "ends-with-a-rank",
))


def random_inputs(case: Case, dtype: Any, seed: int = 0) -> tuple[np.ndarray, thdattn.Mamba2Weights, np.ndarray]:
    """Draw zxbcdt, weights, dout; all rows hold numbers."""
    rng = np.random.default_rng(zlib.crc32(f"{case.name} {seed}".encode()))
    return draw_mixer_inputs(rng, case.batch.total_rows, (*case.sizes, case.conv_width), dtype, norm=bool(case.norm))


def adding_up(weights: thdattn.Mamba2Weights) -> thdattn.Mamba2Weights:
    """Return weights of a mixer that hardly forgets, and whose convolution returns its rows unchanged."""
    own_row = np.zeros_like(weights.conv_weight)
    own_row[:, -1] = 1
    return thdattn.Mamba2Weights(own_row, 0 * weights.conv_bias, np.full_like(weights.A_log, -14), 0 * weights.D,
                                 0 * weights.dt_bias)


@cache
def truth(case: Case, dtype: Any, rounding: Any = None) -> Result:
    """Return the oracle's answer for random_inputs, or plain maths with a rounding."""
    zxbcdt, weights, dout = random_inputs(case, dtype)
    return oracle.packed_mixer(case.batch, zxbcdt, weights, dout, case.sizes, rounding, case.norm)


def run(
    case: Case, cp_size: int, dtype: Any, inputs: Any = None, fill: float = np.nan, xp: Any = np, **options: Any
) -> dict[str, np.ndarray]:
    """Return FIELDS of a mixer over simulated ranks: whole packs, and gradients of weights by rank, on the host.

    Args:
        inputs: as random_inputs.
        fill: what rows without a token hold, fillers too.
        xp: numpy for the NumPy engine, cupy for the CUDA engine.
        options: of Mamba2Mixer.
    """
    inputs = inputs or random_inputs(case, dtype)
    ranks = thdattn.comm.run_local(
        cp_size, lambda comm: run_rank(case, comm, dtype, inputs, fill, xp, **options), timeout=240)
    return assembled(case, ranks)


def run_rank(
    case: Case, comm: thdattn.comm.Comm, dtype: Any, inputs: Any, fill: float = np.nan, xp: Any = np, **options: Any
) -> tuple[np.ndarray, ...]:
    """Return FIELDS of one rank."""
    mixer = case.mixer(comm, dtype, engine="reference" if xp is np else "cuda", **options)
    plan = mixer.plan(case.batch)
    valid = to_host(plan.valid)
    zxbcdt, weights, dout = on_rank(plan, inputs)
    zxbcdt, dout = (np.where(valid[:, None], x, x.dtype.type(fill)) for x in (zxbcdt, dout))
    made = tuple(map(to_host, step(mixer, plan, on_engine((zxbcdt, weights, dout), xp))[0]))
    for x in made[:2]:
        assert not x[~valid].view(np.uint8).any(), "exactly 0"
    return made


def on_rank(plan: thdattn.Plan, inputs: Any) -> tuple[np.ndarray, thdattn.Mamba2Weights, np.ndarray]:
    """Return the rows of a rank of inputs of a whole pack, on the host."""
    zxbcdt, weights, dout = inputs
    return plan.sharding.shard(zxbcdt, plan.cp_rank), weights, plan.sharding.shard(dout, plan.cp_rank)


def on_engine(inputs: Any, xp: Any) -> tuple[Any, thdattn.Mamba2Weights, Any]:
    """Return inputs as arrays of xp, numpy or cupy."""
    zxbcdt, weights, dout = inputs
    return xp.asarray(zxbcdt), thdattn.Mamba2Weights(*map(xp.asarray, weights)), xp.asarray(dout)


def step(mixer: thdattn.Mamba2Mixer, plan: thdattn.Plan, inputs: Any) -> tuple[tuple[Any, ...], thdattn.Mamba2Saved]:
    """Return FIELDS of a forward and a backward over a rank's rows, and what the forward saved."""
    zxbcdt, weights, dout = inputs
    out, saved = mixer.forward(zxbcdt, weights, plan)
    dzxbcdt, dweights = mixer.backward(dout, saved)
    return (out, dzxbcdt, *dweights), saved


def on_the_host(case: Case, inputs: Any, computed_in: Any) -> tuple[np.ndarray, thdattn.Mamba2Saved]:
    """Return what the NumPy engine's forward on one rank gives for inputs as random_inputs, cast to a dtype."""
    zxbcdt, weights, _ = inputs
    weights = thdattn.Mamba2Weights(*(x.astype(np.promote_types(computed_in, np.float32)) for x in weights))
    mixer = case.mixer(thdattn.comm.init("single"), computed_in)
    return mixer.forward(zxbcdt.astype(computed_in), weights, mixer.plan(case.batch))


def columns_of(sizes: Sizes) -> dict[str, slice]:
    """Return the columns of zxbcdt by their names."""
    inner, width = sizes.num_heads * sizes.head_dim, sizes.num_groups * sizes.state_dim
    ends = np.cumsum([inner, inner, width, width, sizes.num_heads])
    return dict(zip(("z", "x", "B", "C", "dt"), map(slice, [0, *ends[:-1]], ends), strict=True))


def with_norm(case: Case, norm: Norm | tuple[str, str] | None) -> Case:
    """Return the case with a norm, or with one of NORMS; "groups" of B and C are those of the norm too."""
    if norm is None:
        return case
    if isinstance(norm, Norm):
        return replace(case, name=f"{case} {norm.after_gate} {norm.groups}", norm=norm)
    place, groups = norm
    return replace(case, name=f"{case} {place} {groups}", norm=Norm(place == "after_gate", {
        "groups": case.sizes.num_groups, "one": 1, "heads": case.sizes.num_heads}[groups]))


def check_gradients(
    case: Case, dtype: Any, made: dict[str, np.ndarray], exact: Result | None = None, plain: Result | None = None
) -> None:
    """Check gradients by the errors of plain maths: rows by the accuracy rule, column by column.

    Gradients of weights are few numbers, which are judged by the sum of their squares.
    """
    exact, plain = exact or truth(case, dtype), plain or truth(case, dtype, dtype)
    assert made["zxbcdt"].dtype == dtype and tuple(made) == (FIELDS_WITH_NORM if case.norm else FIELDS)
    for name, part in columns_of(case.sizes).items():
        verdict = judge(made["zxbcdt"][:, part], exact.zxbcdt[:, part], plain.zxbcdt[:, part])
        assert verdict.rms <= verdict.rms_budget, f"d{name} of {case}: {verdict}"
    for field in tuple(made)[2:]:
        assert made[field].dtype == np.float32
        wanted, found = getattr(exact, field), made[field].astype(np.float64).sum(axis=0)
        ours, allowed = (np.sqrt(np.mean((x - wanted) ** 2)) for x in (found, getattr(plain, field)))
        size = np.sqrt(np.mean(wanted**2))
        assert ours <= 3 * allowed + 1e-3 * size, f"{field} of {case}: {ours:.1e}, plain {allowed:.1e}, of {size:.1e}"


def assembled(case: Case, ranks: Sequence[tuple[np.ndarray, ...]]) -> dict[str, np.ndarray]:
    """Return FIELDS of all ranks, and norm_weight with a norm: whole packs, and gradients of weights by rank."""
    sharding = thdattn.Sharding(case.batch, len(ranks), "contiguous")
    packs = [sharding.unshard([rank[i] for rank in ranks]) for i in range(2)]
    of_weights = [np.stack(each) for each in zip(*(rank[2:] for rank in ranks), strict=True)]
    return dict(zip(FIELDS_WITH_NORM, [*packs, *of_weights], strict=False))


def assert_equal(made: dict[str, np.ndarray], exact: Result, error: float) -> None:
    """Assert that all fields are the oracle's, up to an error relative to the largest value of each."""
    for field in made:
        actual = made[field] if field in ("out", "zxbcdt") else made[field].astype(np.float64).sum(axis=0)
        wanted = getattr(exact, field)
        assert actual.shape == wanted.shape
        scale = np.abs(wanted).max(initial=0)
        assert np.abs(actual - wanted).max(initial=0) <= error * scale, field


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    return np.sqrt(np.mean((found.astype(np.float64) - wanted) ** 2) / np.mean(wanted**2))


def assert_same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for field in one:
        assert one[field].tobytes() == other[field].tobytes(), field
