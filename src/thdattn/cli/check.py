"""Compare this machine's engine with float64 on every kind of pack, mask and method: python -m thdattn check."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

import thdattn
from thdattn import oracle
from thdattn.comm import Comm
from thdattn.engines.select import choose_engine
from thdattn.methods import a2a

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """A pack with its mask, heads and sharding, which `check` and the tests compute.

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


def offsets(lengths: Sequence[int]) -> NDArray[np.int32]:
    """Return (num_seqs + 1,) int32, the cumulative sum of the lengths from 0."""
    return np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))]).astype(np.int32)


def random_inputs(case: Case, dtype: DTypeLike, seed: int = 0) -> tuple[Array, ...]:
    """Draw q, k, v, dout of the valid tokens, (total_tokens, heads, width): the same for every cp_size."""
    rng = np.random.default_rng(zlib.crc32(f"{case.name} {seed}".encode()))
    keys = case.lengths if case.keys is None else case.keys
    return tuple(
        rng.standard_normal((sum(keys if name in "kv" else case.lengths), *shape), np.float32).astype(dtype)
        for name, shape in case.shapes().items()
    )


def random_sinks(case: Case, dtype: DTypeLike, seed: int = 0) -> Array | None:
    """Draw (num_heads,) sinks, some below the logits and some among them; None for a case without sinks."""
    if not case.sinks:
        return None
    rng = np.random.default_rng(zlib.crc32(f"{case.name} sinks {seed}".encode()))
    return rng.uniform(-2, 4, case.heads[0]).astype(np.promote_types(dtype, np.float32))


RAGGED = (130, 7, 261, 33, 1, 64)

CASES = (
    Case("one document", (300,), heads=(4, 4), cp_sizes=(1,)),
    Case("ragged lengths", RAGGED, heads=(4, 4), cp_sizes=(2,)),
    Case("grouped-query heads 8/2", RAGGED, heads=(8, 2), cp_sizes=(4,)),
    Case("full mask", RAGGED, heads=(4, 4), causal=False, cp_sizes=(2,)),
    Case("causal window of 50", RAGGED, heads=(4, 4), window=(50, 0), cp_sizes=(4,)),
    Case("window 20 back, 9 ahead", RAGGED, heads=(4, 4), causal=False, window=(20, 9), cp_sizes=(4,)),
    Case("empty documents", (0, 90, 0, 0, 41, 0), cp_sizes=(2,)),
    Case("fewer tokens than ranks", (1, 0, 2), heads=(4, 4), cp_sizes=(4,)),
    Case("contiguous, padded to 3", RAGGED, heads=(4, 4), sharding="contiguous", cp_sizes=(4,)),
    Case("contiguous, no padding", RAGGED, RAGGED, heads=(4, 4), causal=False, sharding="contiguous", cp_sizes=(4,)),
    Case("head dim 128, deterministic", RAGGED, heads=(4, 1), dims=(128, 128), deterministic=True, cp_sizes=(2,)),
    Case("head dims 192 and 128", RAGGED, dims=(192, 128), cp_sizes=(2,)),
    Case("balanced rows", RAGGED, sharding="balanced", cp_sizes=(4,)),
    Case("all-to-all", RAGGED, heads=(8, 8), sharding="contiguous", cp_comm_type="a2a", cp_sizes=(4,)),
    Case("ring", RAGGED, cp_comm_type="p2p", cp_sizes=(4,)),
    Case("two levels", RAGGED, sharding="balanced", cp_comm_type="a2a+all_gather", cp_sizes=(4,)),
    Case("sinks", RAGGED, sinks=True, cp_sizes=(2,)),
    Case("soft-capped logits, sinks", RAGGED, softcap=30.0, sinks=True, cp_sizes=(2,)),
)

NAMES = ("out", "dq", "dk", "dv")


def check(engine: str = "auto") -> int:
    """Compare every case with the float64 oracle and print a table; under mpiexec only rank 0 prints.

    Args:
        engine: "auto", "cuda" or "reference", as for CPAttention.

    Returns:
        The exit status: 0 if every error is within its budget and padding is exactly 0, else 1.
    """
    with thdattn.comm.init("auto") as comm:
        module, why = choose_engine(engine, comm)
        shown = print if comm.rank == 0 else lambda *text, **how: None
        shown(f"engine  {module.name}: {why}")
        shown(f"ranks   {f'{comm.size}, backend {comm.name!r}' if comm.size > 1 else 'simulated in this process'}")
        shown("errors  against float64, in percent of the budget: RMS / largest (thdattn.oracle has the rule)")
        shown("padding is NaN in the inputs and must be exactly 0 in the results\n")
        shown(f"{'case':<28} ranks dtype     {''.join(f'{name:>3}'.ljust(14) for name in NAMES)}")
        dtypes = ("bfloat16", "float16") if module.name == "cuda" else ("bfloat16", "float32")
        runs = [(case, cp_size, dtype) for case in CASES for cp_size in _cp_sizes(comm, case) for dtype in dtypes]
        failed = 0
        for case, cp_size, dtype in runs:
            verdicts, wrong = _judge(comm, case, cp_size, dtype, module.name)
            numbers = "".join(f"{_shares(verdict):<14}" for verdict in verdicts)
            shown(f"{case.name:<28} {cp_size:>5} {dtype:<9} {numbers}{'FAIL' if wrong else 'PASS'}", flush=True)
            for text in wrong:
                shown(f"    {text}")
            failed += bool(wrong)
        shown(f"{failed} of {len(runs)} FAILED" if failed else "all PASS")
    return 1 if failed else 0


def _cp_sizes(comm: Comm, case: Case) -> tuple[int, ...]:
    """Return the numbers of ranks: the real one under mpiexec if the ranks can share the heads, else simulated ones."""
    if comm.size == 1:
        return case.cp_sizes
    return () if case.cp_comm_type == "a2a" and a2a.obstacle(*case.heads, comm.size) else (comm.size,)


def _ranks(comm: Comm, case: Case) -> Any:
    """Return the comm of a case; for two levels (inner, outer), with pairs of neighbours as inner."""
    if "+" not in case.cp_comm_type:
        return comm
    inner = 1 if comm.size % 2 else 2
    return comm.split(comm.rank // inner), comm.split(comm.rank % inner)


def _judge(comm: Comm, case: Case, cp_size: int, dtype: str, engine: str) -> tuple[list[oracle.Verdict], list[str]]:
    """Return the verdicts on out, dq, dk, dv and a text for each failure; on other ranks than 0 empty lists."""
    batch = case.batch(cp_size)
    inputs = [batch.pack(np.split(x, batch.cu_seqlens[1:-1]), fill=np.nan) for x in random_inputs(case, dtype)]
    compute = partial(_compute, case=case, batch=batch, inputs=inputs, dtype=dtype, engine=engine)
    actual = compute(comm) if comm.size > 1 else thdattn.comm.run_local(cp_size, compute, timeout=600)[0]
    if comm.rank != 0:
        return [], []
    truth = oracle.truth(batch, *inputs, causal=case.causal, window=case.window, softcap=case.softcap,
                         sinks=random_sinks(case, dtype))
    verdicts = [truth.judge(name, x) for name, x in zip(NAMES, actual, strict=True)]
    padding = np.isnan(inputs[0][:, 0, 0].astype(np.float32))
    wrong = [f"{name}: {verdict}" for name, verdict in zip(NAMES, verdicts, strict=True) if not verdict.good]
    wrong += [f"{name}: padding is not 0" for name, x in zip(NAMES, actual, strict=True) if x[padding].any()]
    return verdicts, wrong


def _compute(
    comm: Comm, case: Case, batch: thdattn.PackedBatch, inputs: Sequence[Array], dtype: str, engine: str
) -> list[Array]:
    """Compute this rank's rows and return out, dq, dk, dv of the whole pack, in sequence order on the host."""
    attn = case.attention(_ranks(comm, case), dtype, engine=engine)
    plan = attn.plan(batch, case.sharding)
    xp = importlib.import_module("cupy" if engine == "cuda" else "numpy")
    q, k, v, dout = (xp.asarray(plan.sharding.shard(x, comm.rank)) for x in inputs)
    sinks = random_sinks(case, dtype)
    out, saved = attn.forward(q, k, v, plan, sinks=None if sinks is None else xp.asarray(sinks))
    dq, dk, dv, *_ = attn.backward(dout, saved)
    whole = (plan.unshard(x, comm) for x in (out, dq, dk, dv))
    return [x.get() if engine == "cuda" else x for x in whole]


def _shares(verdict: oracle.Verdict) -> str:
    return f"{100 * verdict.rms / verdict.rms_budget:3.0f} / {100 * verdict.largest / verdict.largest_budget:.0f}"
