"""The packs, masks and head layouts that CPU and GPU tests share, and what attention over one of them must give.

Tensors of a case are made per valid token, in sequence order without padding, so that inputs and truth are the same for
every cp_size; `run` spreads them over simulated ranks and poisons every row that holds no token.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike

import thdattn
from thdattn import oracle
from thdattn.comm import Comm
from thdattn.fuzz.cases import offsets
from thdattn.fuzz.judge import order_of
from thdattn.fuzz.runs import local_rows as local_rows
from thdattn.fuzz.runs import to_host as to_host
from thdattn.fuzz.runs import token_rows as token_rows
from thdattn.kernels.configs import TILES
from thdattn.plan.build import with_arrays
from thdattn.plan.plan import NO_ARRAYS, Plan

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CP_SIZES = (1, 2, 4, 8)
FIELDS = ("out", "lse", "max_logit", "dq", "dk", "dv")
DSINKS = "dsinks"  # one more field of cases with sinks
FLOAT32_ERROR = 1e-4  # of what is computed and kept in float32, whatever the inputs are


@dataclass(frozen=True)
class Case:
    """A pack with its mask, heads and sharding, which tests compute.

    lengths: valid tokens of every sequence.
    padded: padded lengths; None: the next multiples of 2*cp_size for dual_chunk, of 3 for other shardings.
    slack: rows of the packed buffer after the last sequence.
    heads: (num_heads, num_kv_heads); dims: (head_dim, v_head_dim).
    cp_sizes: the numbers of simulated ranks to run it on.
    keys: lengths of every sequence's keys, padded and with slack as the queries; None: the same sequences.
    parents: parents of the nodes of trees, whose lengths are `lengths`; None: they are those of sequences.
    cp_comm_type: the context-parallel method.
    softcap: bound of the logits; 0: none.
    sinks: True if every head has a sink.
    """

    name: str
    lengths: tuple[int, ...]
    padded: tuple[int, ...] | None = None
    slack: int = 0
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    sharding: str = "dual_chunk"
    cp_sizes: tuple[int, ...] = (1, 2, 4, 8)
    deterministic: bool = False
    keys: tuple[int, ...] | None = None
    cp_comm_type: str = "all_gather"
    softcap: float = 0.0
    sinks: bool = False
    parents: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.name

    def batch(self, cp_size: int) -> thdattn.PackedBatch:
        """Return the case's batch for cp_size ranks."""
        padded, multiple = self.padded, 2 * cp_size if self.sharding == "dual_chunk" else 3
        if self.parents is not None:
            trees = thdattn.PackedBatch.from_trees(self.lengths, self.parents, multiple)
            return trees.padded_to(trees.total_rows + self.slack)
        if padded is None:
            padded = tuple(-(-length // multiple) * multiple for length in self.lengths)
        cu_seqlens, cu_seqlens_padded = offsets(self.lengths), offsets(padded)
        return thdattn.PackedBatch(cu_seqlens, cu_seqlens_padded, total_rows=int(cu_seqlens_padded[-1]) + self.slack)

    def key_batch(self) -> thdattn.PackedBatch | None:
        """Return the keys' batch of cross-attention, which runs on one rank; None for self-attention."""
        return None if self.keys is None else replace(self, lengths=self.keys, padded=None).batch(1)

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return (heads, width) of q, k, v and dout, by name."""
        (num_heads, num_kv_heads), (head_dim, v_head_dim) = self.heads, self.dims
        return {"q": (num_heads, head_dim), "k": (num_kv_heads, head_dim), "v": (num_kv_heads, v_head_dim),
                "dout": (num_heads, v_head_dim)}

    def attention(self, comm: Comm | tuple[Comm, Comm], dtype: DTypeLike, **options: Any) -> thdattn.CPAttention:
        """Make a CPAttention with the case's heads and mask."""
        (num_heads, num_kv_heads), (head_dim, v_head_dim) = self.heads, self.dims
        return thdattn.CPAttention(
            comm, num_heads, head_dim, num_kv_heads, v_head_dim, self.causal, self.window, dtype=dtype,
            **{"deterministic": self.deterministic, "cp_comm_type": self.cp_comm_type, "softcap": self.softcap,
               "sinks": self.sinks, **options},
        )

    def slim(self) -> Case:
        """Return this case with narrow heads, which the NumPy engine computes in less time."""
        return replace(self, dims=(8, 8) if self.dims[0] == self.dims[1] else (12, 8))


def random_inputs(case: Case, dtype: DTypeLike, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Draw q, k, v, dout of the valid tokens, (total_tokens, heads, width): the same for every cp_size."""
    rng = np.random.default_rng(zlib.crc32(f"{case.name} {seed}".encode()))
    keys = case.lengths if case.keys is None else case.keys
    return tuple(
        rng.standard_normal((sum(keys if name in "kv" else case.lengths), *shape), np.float32).astype(dtype)
        for name, shape in case.shapes().items()
    )


def random_sinks(case: Case, dtype: DTypeLike, seed: int = 0) -> np.ndarray | None:
    """Draw (num_heads,) sinks, some below the logits and some among them; None for a case without sinks."""
    if not case.sinks:
        return None
    rng = np.random.default_rng(zlib.crc32(f"{case.name} sinks {seed}".encode()))
    return rng.uniform(-2, 4, case.heads[0]).astype(np.promote_types(dtype, np.float32))


# Lengths 0, 1, 2N-1, 2N and odd for every N of CP_SIZES.
EDGES = (0, 1, 3, 4, 7, 8, 15, 16, 2, 5, 33, 0, 129, 0)
# Chunks shorter and longer than every window below, at every cp_size.
UNEVEN = (257, 3, 64, 0, 100, 17, 190)

FIXTURES = (
    Case("worked-example", (7, 3)),
    Case("two-of-eight", (8, 8)),
    Case("four-sequences", (8, 8, 8, 16), heads=(16, 8)),
    Case("two-and-three", (2, 3)),
    Case("edge-lengths", EDGES),
    Case("edge-lengths-contiguous", EDGES, sharding="contiguous"),
    Case("all-empty", (0, 0, 0)),
    Case("all-empty-padded", (0, 0, 0), padded=(16, 0, 32)),
    Case("all-empty-contiguous", (0, 0), padded=(5, 2), sharding="contiguous"),
    Case("no-sequences", ()),
    Case("no-sequences-slack", (), slack=19),
    Case("no-sequences-contiguous", (), slack=3, sharding="contiguous"),
    Case("one-token", (1,)),
    Case("odd-for-one-rank", (5, 0, 33, 1), padded=(5, 1, 33, 2), slack=2, heads=(16, 8), cp_sizes=(1,)),
    Case("fewer-tokens-than-ranks", (1, 0, 2), padded=(1, 0, 2), sharding="contiguous"),
    Case("repeated-offsets", (16, 24, 0, 0, 0, 0), heads=(16, 8)),
    Case("empty-but-padded-between", (40, 0, 9, 0), padded=(48, 16, 16, 32), heads=(16, 8)),
    # A document of 5 tokens in 64 rows: ranks beyond the first own nothing but padding.
    Case("ranks-of-padding", (5,), padded=(64,), sharding="contiguous"),
    Case("ranks-of-padding-dual", (1, 0), padded=(32, 16)),
)
REGRESSIONS = (
    # Transformer Engine issues: NaN in the backward with padding at the end (2186), keys dropped for padding that was
    # overlooked (3331), 7 tokens treated as 6 (1930).
    Case("te-2186", (9, 8, 8, 12, 8, 12), padded=(12, 8, 8, 12, 8, 12), cp_sizes=(1, 2)),
    Case("te-3331", (698,), padded=(704,), cp_sizes=(1, 2, 4, 8)),
    Case("te-1930", (7,)),
)
HEADS = (
    Case("mha", (37, 90), heads=(3, 3)),
    Case("gqa-32-8", (37, 90), heads=(32, 8)),
    Case("gqa-12-2", (37, 90), heads=(12, 2)),
    Case("mqa", (37, 90), heads=(8, 1)),
)
MASKS = (
    Case("causal", UNEVEN),
    Case("full", UNEVEN, causal=False),
    Case("full-contiguous", UNEVEN, causal=False, sharding="contiguous"),
    Case("window-causal", UNEVEN, window=(10, 0)),
    Case("window-causal-contiguous", UNEVEN, window=(70, 0), sharding="contiguous"),
    Case("window-two-sided", UNEVEN, causal=False, window=(16, 16)),
    Case("window-lopsided", UNEVEN, causal=False, window=(3, 40)),
    Case("window-lopsided-contiguous", UNEVEN, causal=False, window=(40, 3), sharding="contiguous"),
    Case("window-left-only", UNEVEN, causal=False, window=(9, -1)),
    Case("window-right-only", UNEVEN, causal=False, window=(-1, 5)),
    Case("window-larger-than-sequences", UNEVEN, causal=False, window=(1000, 300)),
    Case("window-self", UNEVEN, causal=False, window=(0, 0)),
    Case("window-self-causal", UNEVEN, window=(0, 0)),
)
BUFFERS = (
    Case("capacity", (100, 30, 0), slack=61),
    Case("capacity-of-a-tile", (100, 30, 0), slack=300),
    Case("capacity-contiguous", (100, 30, 0), slack=61, sharding="contiguous"),
    # One row less and one row more than tiles of 64 and 128 rows.
    Case("tail-tiles", (63, 65, 127, 129), padded=(64, 80, 128, 144)),
    Case("tail-tile-of-one", (384, 1), padded=(384, 1), sharding="contiguous"),
)
# Documents with more, fewer and as many keys as queries, without either, and longer than a tile on one side only.
QUERIES_HERE, KEYS_THERE = (5, 40, 0, 33, 7, 1, 300, 2, 0, 130), (40, 5, 9, 33, 0, 200, 3, 290, 0, 140)
CROSS = (
    *(Case(f"cross-{name}", QUERIES_HERE, keys=KEYS_THERE, causal=causal, window=window, slack=slack, heads=heads,
           sharding=sharding, cp_sizes=(1,))
      for name, causal, window, slack, heads, sharding in (
        ("causal", True, (-1, -1), 0, (4, 2), "dual_chunk"),
        ("full", False, (-1, -1), 3, (3, 3), "contiguous"),
        ("window-causal", True, (70, 0), 61, (4, 1), "contiguous"),
        ("window-lopsided", False, (3, 40), 0, (4, 2), "dual_chunk"),
        ("window-right-only", False, (-1, 5), 0, (2, 2), "contiguous"),
        ("window-self", False, (0, 0), 5, (4, 2), "dual_chunk"),
    )),
    Case("cross-without-keys", (5, 7), keys=(0, 0), cp_sizes=(1,)),
    Case("cross-padding-for-keys", (5, 7), keys=(0, 0), slack=9, cp_sizes=(1,)),
    Case("cross-without-queries", (0, 0), keys=(130, 7), cp_sizes=(1,)),
    Case("cross-padding-for-queries", (0, 0), keys=(130, 7), slack=9, cp_sizes=(1,)),
    Case("cross-sees-nothing", (70, 9), keys=(30, 4), causal=False, window=(-1, 0), cp_sizes=(1,)),
    Case("cross-decoding", (1,) * 40, keys=tuple(range(100, 300, 5)), heads=(8, 2), cp_sizes=(1,)),
)
SMALL = FIXTURES + REGRESSIONS + HEADS + MASKS + BUFFERS
BIG = (
    Case("8192-of-34", (34,) * 8192, heads=(2, 1)),
    Case("65536-window", (65536, *(16,) * 1000), heads=(2, 1), window=(300, 0)),
)
LONG = Case("65536-causal", (65536, *(16,) * 1000), heads=(2, 1))

# The pack has rows that see one tile and many, ends in the middle of tiles, and has a gap of padding at every cp_size.
DIMS = tuple(
    Case(f"dims-{head_dim}-{v_head_dim}-{mask}", (150, 0, 77, 301, 1), slack=5, heads=heads,
         dims=(head_dim, v_head_dim), causal=causal, window=window)
    for head_dim, v_head_dim in TILES
    for mask, heads, causal, window in (
        ("causal", (8, 2), True, (-1, -1)),
        ("full", (2, 2), False, (-1, -1)),
        ("window", (3, 1), False, (33, 70)),
    )
)
# Cases whose RMS errors cannot tell a backward that rounds P twice from a right one: no token at all, no row that sees
# more than one key, or so few of them that their errors vary by as much.
TOO_SMALL_TO_TELL = {
    "all-empty", "all-empty-padded", "all-empty-contiguous", "no-sequences", "no-sequences-slack",
    "no-sequences-contiguous", "one-token", "ranks-of-padding-dual", "window-self", "window-self-causal",
    "worked-example", "two-of-eight", "two-and-three", "fewer-tokens-than-ranks", "ranks-of-padding", "te-1930",
    "fewer tokens than ranks",
}

CASES = {case.name: case for case in (*SMALL, *CROSS, *BIG, LONG)}


@lru_cache(maxsize=3)
def truth(case: Case, dtype: np.dtype, seed: int = 0) -> oracle.Truth:
    """Return the float64 oracle over the valid tokens, and the baselines."""
    batch = thdattn.PackedBatch(offsets(case.lengths))
    if case.parents is not None:
        batch = thdattn.PackedBatch.from_trees(case.lengths, case.parents)
    how = {} if case.keys is None else {"key_batch": thdattn.PackedBatch(offsets(case.keys))}
    how |= {"causal": case.causal, "window": case.window, "softcap": case.softcap}
    return oracle.truth(batch, *random_inputs(case, dtype, seed), sinks=random_sinks(case, dtype, seed), **how)


@dataclass(frozen=True)
class Engine:
    """The engine that a test runs on; the fixture `engine` makes it.

    xp: the library of its arrays, NumPy or CuPy.
    """

    name: str
    xp: Any

    def suited(self, case: Case) -> Case:
        """Return the case, with narrow heads on the engine that takes heads of any width."""
        return case.slim() if self.name == "reference" else case

    def check(self, case: Case, cp_size: int, dtype: Any, **options: Any) -> Outcome:
        """Run a case and assert everything that the contract promises."""
        case = self.suited(case)
        outcome = run(case, cp_size, dtype, xp=self.xp, engine=self.name, **options)
        check(case, dtype, outcome)
        return outcome


def on_engines(
    cases: Sequence[Case], cp_sizes: Sequence[int] = CP_SIZES, seldom: Sequence[int] = (), **dtypes: Sequence[Any]
) -> Any:
    """Parametrise a test by engine, case, dtype and cp_size, with dtypes by the name of an engine.

    The cp_sizes of one case come one after the other, so that its oracle is computed once. The NumPy engine takes those
    that are `seldom` in exhaustive runs alone.
    """
    def marks(name: str, cp_size: int) -> list[pytest.MarkDecorator]:
        return [pytest.mark.gpu] if name != "reference" else [pytest.mark.exhaustive] * (cp_size in seldom)

    return pytest.mark.parametrize(("engine", "case", "dtype", "cp_size"), [
        pytest.param(name, case, np.dtype(dtype), cp_size, id=f"{name}-{case}-{dtype}-cp{cp_size}",
                     marks=marks(name, cp_size))
        for name in dtypes for case in cases for dtype in dtypes[name] for cp_size in cp_sizes
        if cp_size in case.cp_sizes
    ], indirect=["engine"])


# The CUDA engine also with its kernels for every GPU.
on_all_kernels = pytest.mark.parametrize("engine", [
    "reference", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "portable"))], indirect=True)


def gpu_only(test: Callable[..., Any]) -> Any:
    """Mark a test that needs a GPU, whose allocations all start as NaN, or -1."""
    return pytest.mark.gpu(pytest.mark.usefixtures("poisoned_gpu")(test))


def assert_same_bits(one: Outcome, *others: Outcome) -> None:
    """Assert that outcomes are the same bit by bit."""
    for other in others:
        for field, x in one.tokens.items():
            assert other.tokens[field].tobytes() == x.tobytes(), field


@dataclass
class Outcome:
    """Results of all ranks together, on the host.

    tokens: per field the rows of the valid tokens, in sequence order; lse (num_heads, total_tokens); dsinks the sum of
        what ranks have.
    padding: per field every row that holds no token: padding, slack and fillers.
    max_logits: one (num_heads,) per rank.
    """

    tokens: dict[str, np.ndarray]
    padding: dict[str, np.ndarray]
    max_logits: list[np.ndarray]


def fields_of(case: Case) -> tuple[str, ...]:
    """Return the names of what forward and backward of a case return."""
    return (*FIELDS, DSINKS) if case.sinks else FIELDS


class Exported:
    """Array of another library, with nothing but DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def inputs_of(
    case: Case, plan: thdattn.Plan, dtype: Any, xp: Any = np, fill: float = np.nan, seed: int = 0,
    wrap: Callable[[Any], Any] = lambda x: x,
) -> list[Any]:
    """Return this rank's q, k, v, dout, of which rows without a token are `fill`."""
    here = keys = plan.batch, to_host(plan.rows)
    if case.keys is not None:
        keys = plan.key_batch, np.arange(plan.key_batch.total_rows)
    sides = zip((here, keys, keys, here), random_inputs(case, dtype, seed), strict=True)
    return [wrap(xp.asarray(local_rows(*side, x, fill))) for side, x in sides]


def step(layer: thdattn.CPAttention, plan: thdattn.Plan, inputs: list[Any], sinks: Any = None) -> dict[str, Any]:
    """Return what a forward and a backward return."""
    *qkv, dout = inputs
    out, saved = layer.forward(*qkv, plan, return_max_logit=True, sinks=sinks)
    arrays = out, saved.lse, saved.max_logit, *layer.backward(dout, saved)
    return dict(zip((*FIELDS, DSINKS)[: len(arrays)], arrays, strict=True))


def on_host(results: dict[str, Any]) -> dict[str, np.ndarray]:
    return {field: to_host(x) for field, x in results.items()}


def run(
    case: Case, cp_size: int, dtype: Any, *, xp: Any = np, fill: float = np.nan, seed: int = 0,
    wrap: Callable[[Any], Any] = lambda x: x, call: Callable[..., dict[str, Any]] = step,
    comm_of: Callable[[thdattn.comm.Comm], Any] = lambda comm: comm, batch: thdattn.PackedBatch | None = None,
    **options: Any,
) -> Outcome:
    """Run forward and backward of a case over cp_size simulated ranks.

    Args:
        wrap: makes a user's array of one of xp.
        call: as step.
        comm_of: makes what CPAttention takes of a rank's comm.
        batch: replaces that of the case.
        options: of CPAttention.
    """
    batch, key_batch = batch or case.batch(cp_size), case.key_batch()

    def program(comm: thdattn.comm.Comm) -> tuple[dict[str, np.ndarray], thdattn.Sharding]:
        layer = case.attention(comm_of(comm), dtype, **options)
        plan = layer.plan(batch, case.sharding, key_batch)
        given = {"sinks": wrap(xp.asarray(random_sinks(case, dtype, seed)))} if case.sinks else {}
        return on_host(call(layer, plan, inputs_of(case, plan, dtype, xp, fill, seed, wrap), **given)), plan.sharding

    ranks = thdattn.comm.run_local(cp_size, program, timeout=240)
    return assemble(ranks[0][1], [results for results, _ in ranks], key_batch)


def assemble(
    sharding: thdattn.Sharding, ranks: list[dict[str, np.ndarray]], key_batch: thdattn.PackedBatch | None = None
) -> Outcome:
    """Put every rank's rows where they belong, and those that hold no token aside."""
    rows = np.concatenate([sharding.rows(rank) for rank in range(sharding.cp_size)])
    queries = keys = _held(sharding.batch, rows)
    if key_batch is not None:
        keys = _held(key_batch, np.arange(key_batch.total_rows))
    outcome = Outcome({}, {}, [result["max_logit"] for result in ranks])
    for field in ("out", "lse", "dq", "dk", "dv"):
        order, padding = keys if field in ("dk", "dv") else queries
        by_row = np.concatenate([result[field].T if field == "lse" else result[field] for result in ranks])
        outcome.tokens[field] = by_row[order].T if field == "lse" else by_row[order]
        outcome.padding[field] = by_row[padding]
    outcome.tokens["max_logit"] = ranks[0]["max_logit"]
    if DSINKS in ranks[0]:
        outcome.tokens[DSINKS] = np.sum([result[DSINKS] for result in ranks], axis=0)
    return outcome


def _held(batch: thdattn.PackedBatch, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where in `rows` every token is, in sequence order, and where what holds none is."""
    order, padding = order_of(token_rows(batch), rows)
    assert order is not None, "every token lies on one rank"
    return order, padding


def check(case: Case, dtype: Any, outcome: Outcome, seed: int = 0) -> None:
    """Assert all that the contract promises about an outcome, padding first."""
    dtype = np.dtype(dtype)
    check_padding(outcome)
    right = truth(case, dtype, seed)
    sees_no_key = right.exact.lse[0] == -np.inf
    assert not outcome.tokens["out"][sees_no_key].any() and not outcome.tokens["dq"][sees_no_key].any()
    for field in fields_of(case):
        actual, wanted = outcome.tokens[field], getattr(right.exact, field)
        assert actual.shape == wanted.shape, f"{field} of {case}"
        if field in ("lse", "max_logit", DSINKS):
            kept = np.float64 if dtype == np.float64 and field != "max_logit" else np.float32
            assert actual.dtype == kept, f"{field} of {case} is {actual.dtype}"
        if field == DSINKS and dtype.itemsize == 2:
            check_dsinks(right, random_inputs(case, dtype, seed)[3], random_sinks(case, dtype, seed), actual)
            continue
        if field in ("lse", "max_logit", DSINKS):
            error = FLOAT32_ERROR if kept == np.float32 else 1e-12
            np.testing.assert_allclose(actual, wanted, rtol=error, atol=error, err_msg=f"{field} of {case}")
            continue
        assert actual.dtype == dtype, f"{field} of {case} is {actual.dtype}"
        if dtype == np.float64:
            np.testing.assert_allclose(actual, wanted, rtol=1e-10, atol=1e-12, err_msg=f"{field} of {case}")
        else:
            verdict = right.judge(field, actual)
            assert verdict.good, f"{field} of {case}: {verdict}"


def check_dsinks(right: oracle.Truth, dout: np.ndarray, sinks: np.ndarray, actual: np.ndarray) -> None:
    """Assert that the gradient of sinks errs as its sums do when out is rounded, with independent errors."""
    out, lse, dout = right.exact.out, right.exact.lse, dout.astype(np.float64)
    share = np.exp(sinks[:, None] - np.where(lse == -np.inf, np.inf, lse)).T[..., None]
    deviation = np.sqrt(((share * dout * (right.fused.out - out)) ** 2).sum(axis=(0, 2)))
    noise = 1e-5 * np.abs(share * dout * out).sum(axis=(0, 2))
    error = np.abs(actual - right.exact.dsinks)
    assert (error <= 5 * deviation + noise).all(), f"dsinks: {error}, standard deviations {deviation}, noise {noise}"


def check_padding(outcome: Outcome) -> None:
    """Assert that rows without a token are exactly 0, -inf in lse, and max_logit is the same on all ranks."""
    for field, rows in outcome.padding.items():
        if field == "lse":
            assert (rows == -np.inf).all(), "lse of padding is -inf"
        else:
            assert not rows.any(), f"{field} of padding is 0"  # NaN is true
    for rank, max_logit in enumerate(outcome.max_logits):
        np.testing.assert_array_equal(max_logit, outcome.max_logits[0], err_msg=f"max_logit of rank {rank}")


def check_long(case: Case, dtype: Any, outcome: Outcome) -> None:
    """Check a causal case whose first document is too long for the oracle: samples of it, the others whole.

    A sampled query row is computed by itself. A sampled key needs lse and out of every later row; those are the
    outcome's own, which the sampled rows check.
    """
    check_padding(outcome)
    length, batch = case.lengths[0], thdattn.PackedBatch(offsets(case.lengths[1:]))
    inputs = random_inputs(case, dtype)
    edges = [0, 1, 63, 64, 127, 128, length // 2 - 1, length // 2, length - 1]
    picks = np.unique(np.append(edges, np.random.default_rng(len(case.lengths)).integers(0, length, 40)))
    rest = slice(length, None)
    dtype = np.dtype(dtype)
    others = oracle.truth(batch, *(x[rest] for x in inputs), dtype=dtype)
    document = [x[:length] for x in inputs]
    exact, plain = (_sample(case, document, outcome, picks, rounding) for rounding in (None, dtype))
    fused = _sample(case, document, outcome, picks, dtype, fused=True) if others.fused else {}
    for field in ("out", "dq", "dk", "dv"):
        verdict = others.judge(field, outcome.tokens[field][rest])
        assert verdict.good, f"{field} of {case}, short documents: {verdict}"
        verdict = oracle.judge(outcome.tokens[field][picks], exact[field], plain[field], fused.get(field))
        assert verdict.good, f"{field} of {case}, samples: {verdict}"
    for rows, wanted in ((rest, others.exact.lse), (picks, exact["lse"])):
        np.testing.assert_allclose(outcome.tokens["lse"][:, rows], wanted, rtol=FLOAT32_ERROR, atol=FLOAT32_ERROR)


def _sample(
    case: Case, inputs: list[np.ndarray], outcome: Outcome, picks: np.ndarray, rounding: Any, fused: bool = False
) -> dict[str, np.ndarray]:
    """Return out, lse, dq of the query rows `picks` and dk, dv of the keys `picks` of one causal document."""
    num_heads, num_kv_heads = case.heads
    scale, group, position = case.dims[0] ** -0.5, num_heads // num_kv_heads, np.arange(len(inputs[0]))

    def stored(x: np.ndarray) -> np.ndarray:
        return x.astype(np.float64) if rounding is None else x.astype(rounding).astype(np.float32)

    kept = (lambda x: x) if fused else stored
    q, k, v, dout = inputs
    seen = position <= picks[:, None]
    rows = oracle.attention(q[picks], k, v, dout[picks], rounding=rounding, fused=fused, visible=seen)
    q, k, v, dout = map(stored, inputs)
    out = outcome.tokens["out"][: len(q)].astype(q.dtype)
    dk, dv = np.zeros_like(k[picks]), np.zeros_like(v[picks])
    for h in range(num_heads):
        g = h // group
        logits = scale * kept(q[:, h] @ k[picks, g].T)
        logits[position[:, None] < picks] = -np.inf
        p = kept(np.exp(logits - outcome.tokens["lse"][h, : len(q), None]))
        delta = (dout[:, h] * out[:, h]).sum(axis=1, keepdims=True)
        ds = stored(p * (kept(dout[:, h] @ v[picks, g].T) - delta))
        dk[:, g] += scale * (ds.T @ q[:, h])
        dv[:, g] += stored(p).T @ dout[:, h]
    return {"out": rows.out, "lse": rows.lse, "dq": rows.dq} | {
        field: stored(x).astype(np.float64) for field, x in (("dk", dk), ("dv", dv))}


def outline_of(engine, sharding, cp_rank, window, tiles, key_batch=None, keys_of=None, dims=(64, 64)):
    """Make the plan of one rank, without arrays."""
    return Plan(sharding, cp_rank, window, dims, tiles, NO_ARRAYS, engine, key_batch or sharding.batch, keys_of=keys_of)


def plan_with(*args, **options):
    """Make the plan of one rank, with arrays; arguments are those of outline_of."""
    return with_arrays(outline_of(*args, **options))
