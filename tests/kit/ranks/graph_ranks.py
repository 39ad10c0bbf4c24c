"""CUDA graphs of attention beside the same calls without them, on one rank or on several, and how programs end.

Imported by tests of one GPU, and a program under mpiexec: mpiexec -n 2 python -m mpi4py graph_ranks.py packs 2
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from cases import BFLOAT16, local_rows, to_host
from tree_cases import draw_trees

import thdattn
from thdattn import PackedBatch, Sharding
from thdattn.capacity import BalancedCapacity
from thdattn.comm.levels import Levels
from thdattn.comm.peer import transport
from thdattn.graphs import CudaGraphConfig, Graphs, StaticPack
from thdattn.methods import group_cast
from thdattn.plan.ranges import host_arrays

ROWS, MAX_SEQS, MAX_NODES = 1024, 24, 30
ROOM = {"max_packed_seqs": MAX_SEQS}
MASKS = {
    "causal": {},
    "window": {"window": (70, 0)},
    "two-sided": {"causal": False, "window": (16, 40)},
}
RINGS = ("causal", "dual_chunk"), ("window", "contiguous"), ("two-sided", "balanced"), ("trees", "balanced")
TREES = "trees"  # a causal mask, and packs of trees


def packs(cp_size: int, count: int, seed: int = 0) -> list[PackedBatch]:
    """Packs of 0 to MAX_SEQS documents with padding between and behind them; every fifth does not fit.

    Of five packs the third has too many documents, or too many rows.
    """
    rng, multiple = np.random.default_rng(seed), 2 * cp_size
    made = []
    for number in range(count):
        num_seqs, room = int(rng.integers(0, MAX_SEQS + 1)), int(rng.integers(0, ROWS // multiple + 1))
        if number % 10 == 2:
            num_seqs = MAX_SEQS + 1 + number
        if number % 10 == 7:
            num_seqs, room = 3, ROWS // multiple + 5
        shares = rng.dirichlet(np.full(num_seqs, 0.4)) if num_seqs else np.zeros(0)
        padded = multiple * rng.multinomial(room, shares / max(shares.sum(), 1e-9)) if num_seqs else shares.astype(int)
        lengths = np.where(rng.random(num_seqs) < 0.5, padded, rng.integers(0, padded + 1))
        offsets = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (lengths, padded)]
        made.append(PackedBatch(*offsets))
    return made


def tree_packs(cp_size: int, count: int, seed: int = 0) -> list[PackedBatch]:
    """Packs of prefix trees and documents, with padding; every fifth has too many nodes."""
    made = []
    for number in range(count):
        lengths, parents = draw_trees(np.random.default_rng([number, seed]), MAX_SEQS, 800)
        if number % 5 == 2:
            lengths, parents = (3,) * (MAX_NODES + 1), tuple(range(-1, MAX_NODES))
        made.append(PackedBatch.from_trees(lengths, parents, 2 * cp_size))
    return made


def packs_of(mask: str) -> tuple[Callable[..., list[PackedBatch]], dict[str, int]]:
    """Return a function that draws packs for a mask, and the capacity that all but every fifth fit."""
    return (tree_packs, {**ROOM, "max_packed_nodes": MAX_NODES}) if mask == TREES else (packs, ROOM)


def inputs_of(cupy: Any, batch: PackedBatch, rows: np.ndarray, shapes: list[tuple[int, int]], seed: int) -> list[Any]:
    """Return a rank's rows of random arrays, NaN in every row that holds no token."""
    rng = np.random.default_rng(seed)
    tokens = [rng.standard_normal((batch.total_tokens, *shape), np.float32).astype(BFLOAT16) for shape in shapes]
    return [cupy.asarray(local_rows(batch, rows, x, np.nan)) for x in tokens]


# --- packs -------------------------------------------------------------------------------------------------------


def replay_packs(
    comm: thdattn.comm.Comm, cupy: Any, mask: str, dims: tuple[int, int], sharding: str | BalancedCapacity,
    count: int = 50, options: dict[str, Any] | None = None,
) -> None:
    """Replay a forward and a backward graph for packs of all lengths; those that do not fit run eagerly in between.

    options: of the attention.
    """
    with cupy.cuda.Stream(non_blocking=True):
        _replay_packs(comm, cupy, mask, dims, sharding, count, options or {})


def _replay_packs(
    comm: thdattn.comm.Comm, cupy: Any, mask: str, dims: tuple[int, int], sharding: str | BalancedCapacity,
    count: int, options: dict[str, Any],
) -> None:
    warmup = 2
    drawn, room = packs_of(mask)
    options = {"comm": comm, "num_heads": 4, "num_kv_heads": 2, "deterministic": True, **MASKS.get(mask, {}),
               **options}
    attention = thdattn.CPAttention(head_dim=dims[0], v_head_dim=dims[1], engine="cuda", **options)
    heads = attention.num_heads, attention.num_kv_heads
    shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1])]
    graphs = Graphs(comm, CudaGraphConfig(impl="local", warmup_steps=warmup, **room))
    assert graphs.active
    pack = StaticPack(graphs, [attention], ROWS, sharding)
    strategy = "balanced" if isinstance(sharding, BalancedCapacity) else sharding
    pair = graphs.pair(lambda q, k, v: attention.forward(q, k, v, pack.plans()[0], return_max_logit=True),
                       attention.backward, "layer")
    returned, fitting = set(), 0
    with graphs:
        for number, batch in enumerate(drawn(comm.size, count)):
            fits = pack.fits([batch])
            shared = pack.sharding(batch) if fits else attention.sharding(batch, strategy)
            q, k, v, dout = inputs_of(cupy, shared.batch, shared.rows(comm.rank), shapes, number)
            plan = attention.plan(shared.batch, shared)
            out, saved = attention.forward(q, k, v, plan, return_max_logit=True)
            wanted = out, saved.lse, saved.max_logit, *attention.backward(dout, saved)
            if not fits:  # what a program does with it
                continue
            pack.load([batch])
            out, saved = pair.forward(q, k, v)
            found = out, saved.lse, saved.max_logit, *pair.backward(dout, saved)
            fitting += 1
            if fitting > warmup:
                returned.add(tuple(x.data.ptr for x in found))
            for name, *both in zip(("out", "lse", "max_logit", "dq", "dk", "dv"), found, wanted, strict=True):
                x, y = map(to_host, both)
                same = x.tobytes() == y.tobytes()
                if not attention.deterministic and name in ("dq", "dk", "dv"):
                    x, y = (z.astype(np.float32) for z in (x, y))
                    same = bool(np.linalg.norm(x - y) <= 1e-2 * np.linalg.norm(y))
                assert same, f"{name} of pack {number}, {batch}"
        assert fitting + graphs.num_overflows == count and fitting > warmup + 5
        assert graphs.num_overflows == count // 5 or isinstance(sharding, BalancedCapacity)
        assert len(returned) == 1, "all replays are of one graph"


def replay_masks(comm: thdattn.comm.Comm, cupy: Any) -> None:
    for mask, dims, sharding in (("causal", (128, 128), "dual_chunk"), ("window", (64, 64), "dual_chunk"),
                                 ("two-sided", (64, 64), "contiguous")):
        replay_packs(comm, cupy, mask, dims, sharding)


def replay_balanced(comm: thdattn.comm.Comm, cupy: Any) -> None:
    """Change layouts at every replay; what does not fit a small capacity runs eagerly."""
    check_plans(comm, cupy, "balanced", 20)
    for mask in MASKS:
        replay_packs(comm, cupy, mask, (128, 128), "balanced", 50)
    replay_packs(comm, cupy, "causal", (64, 64), "balanced", 20, {"num_heads": 16, "num_kv_heads": 8})
    rows = ROWS // comm.size
    small = BalancedCapacity(rows // 4, rows + rows // 2)
    replay_packs(comm, cupy, "causal", (64, 64), small, 50)
    _replay_behind_nan(comm, cupy)


def replay_overlapped(comm: thdattn.comm.Comm, cupy: Any) -> None:
    """Change layouts at every replay, with exchanges that overlap a fixed number of tiles."""
    group_cast.WORTH_OVERLAPPING = transport.WORTH_COPYING = 0
    rows = ROWS // comm.size
    some, any_layout = BalancedCapacity(rows // 4, rows + rows // 2), BalancedCapacity(rows, ROWS, 0, ROWS - 128)
    for mask, dims, capacity in (("causal", (128, 128), some._replace(early_queries=128, early_keys=rows)),
                                 ("two-sided", (192, 128), any_layout),
                                 ("window", (64, 64), some._replace(early_queries=192))):
        replay_packs(comm, cupy, mask, dims, capacity, 100)
    replay_packs(comm, cupy, "causal", (256, 256), any_layout, 20)
    replay_packs(comm, cupy, "causal", (128, 128), any_layout, 50, {"deterministic": False})
    replay_packs(comm, cupy, "causal", (64, 64), any_layout, 1000)


def _replay_behind_nan(comm: thdattn.comm.Comm, cupy: Any) -> None:
    """Check that NaN of a layout's tokens does not reach a smaller layout that is replayed after it."""
    attention = thdattn.CPAttention(comm, 2, 64, engine="cuda")
    graphs = Graphs(comm, CudaGraphConfig(impl="local", max_packed_seqs=MAX_SEQS, warmup_steps=1))
    pack = StaticPack(graphs, [attention], ROWS, "balanced")
    forward = graphs.captured(lambda q, k, v: attention.forward(q, k, v, pack.plans()[0])[0], "forward")
    large, small = PackedBatch([0, ROWS]), PackedBatch.from_lengths([64] * comm.size)
    with graphs:
        for batch, filling in ((large, 1.0), (large, np.nan), (small, 1.0)):
            pack.load([batch])
            shape = pack.sharding(batch).local_rows, 2, 64
            q, k, v = (cupy.full(shape, filling, np.float32).astype(attention.dtype) for _ in range(3))
            out = to_host(forward(q, k, v)).astype(np.float32)
        tokens = pack.sharding(small).rows(comm.rank) < small.total_tokens
        assert (out[tokens] == 1).all() and not out[~tokens].any()


def replay_trees(comm: thdattn.comm.Comm, cupy: Any) -> None:
    """Change trees at every replay, in rows of every sharding, and with heads that are exchanged."""
    for sharding in ("dual_chunk", "contiguous", "balanced"):
        check_plans(comm, cupy, sharding, 20, (TREES,))
        replay_packs(comm, cupy, TREES, (128, 128), sharding, 30)
    replay_packs(comm, cupy, TREES, (64, 64), "contiguous", 20, {"cp_comm_type": "a2a"})
    replay_packs(comm, cupy, TREES, (64, 64), "dual_chunk", 20, {"num_heads": 16, "num_kv_heads": 8, "head_groups": 2})


def replay_methods(comm: thdattn.comm.Comm, cupy: Any) -> None:
    """Exchange heads at once and in groups, kept for the backward and not; use rings, and two levels."""
    levels = Levels(comm.split(comm.rank // 2), comm.split(comm.rank % 2))
    groups = {"num_heads": 16, "num_kv_heads": 8, "head_groups": 2}
    for mask, sharding, options in (
        ("causal", "contiguous", {"cp_comm_type": "a2a"}),
        ("window", "dual_chunk", {"cp_comm_type": "a2a", "keep_keys": False}),
        ("two-sided", "contiguous", {"cp_comm_type": "a2a", **groups}),
        ("causal", "dual_chunk", {"cp_comm_type": "a2a+all_gather", "comm": levels}),
        ("window", "contiguous", {"cp_comm_type": "a2a+all_gather", "comm": levels, "keep_keys": False, **groups}),
        ("causal", "balanced", {"cp_comm_type": "a2a+all_gather", "comm": levels}),
        ("window", "balanced", {"cp_comm_type": "a2a+all_gather", "comm": levels, "keep_keys": False, **groups}),
        ("two-sided", "dual_chunk", {"cp_comm_type": "a2a+p2p", "comm": levels}),
        ("causal", "balanced", {"cp_comm_type": "a2a+p2p", "comm": levels, **groups}),
    ):
        replay_packs(comm, cupy, mask, (64, 64), sharding, 20, options)
    for mask, sharding in RINGS:
        replay_packs(comm, cupy, mask, (64, 64), sharding, 20, {"cp_comm_type": "p2p"})


def replay_mixers(comm: thdattn.comm.Comm, cupy: Any, count: int = 20, norm: str | None = None) -> None:
    """Replay packs through a mixer, whose plan is its own or that of a causal attention beside it.

    norm: as of Mamba2Mixer.
    """
    heads, head_dim, state_dim = 8, 64, 64
    inner, channels = heads * head_dim, heads * head_dim + 2 * state_dim
    mixer = thdattn.Mamba2Mixer(comm, heads, head_dim, state_dim, engine="cuda", norm=norm)
    attention = thdattn.CPAttention(comm, 8, 64, 4, engine="cuda", cp_comm_type="a2a")
    rng = np.random.default_rng(0)
    weights = thdattn.Mamba2Weights(*(cupy.asarray(x, np.float32) for x in (
        rng.standard_normal((channels, 4)) / 2, rng.standard_normal(channels), np.log(rng.uniform(1, 16, heads)),
        rng.standard_normal(heads), rng.uniform(-7, -2, heads))))
    if norm:
        weights = weights._replace(norm_weight=cupy.asarray(rng.uniform(0.5, 1.5, inner), np.float32))
    shapes, warmup = [(inner + channels + heads,), (inner,)], 2
    for planner in (mixer, attention):
        graphs = Graphs(comm, CudaGraphConfig(impl="local", max_packed_seqs=MAX_SEQS, warmup_steps=warmup))
        pack = StaticPack(graphs, [planner], ROWS)
        pair = graphs.pair(lambda x, pack=pack: mixer.forward(x, weights, pack.plans()[0]), mixer.backward, "mixer")
        returned = set()
        for number, batch in enumerate(packs(comm.size, count)):
            if not pack.fits([batch]):
                continue
            shared = pack.sharding(batch)
            zxbcdt, dout = inputs_of(cupy, shared.batch, shared.rows(comm.rank), shapes, number)
            out, saved = mixer.forward(zxbcdt, weights, mixer.plan(shared.batch, shared))
            dzxbcdt, dweights = mixer.backward(dout, saved)
            wanted = {"out": out, "dzxbcdt": dzxbcdt, **dweights._asdict()}
            pack.load([batch])
            out, saved = pair.forward(zxbcdt)
            dzxbcdt, dweights = pair.backward(dout, saved)
            found = {"out": out, "dzxbcdt": dzxbcdt, **dweights._asdict()}
            for name, x in wanted.items():
                assert to_host(x).tobytes() == to_host(found[name]).tobytes(), f"{name} of pack {number}, {batch}"
            returned.add(out.data.ptr)
        assert graphs.num_overflows == count // 5 and len(returned) <= warmup + 1
        assert all(captured._graph is not None for captured in (pair.forward, pair.backward))
        graphs.close()


# --- plans -------------------------------------------------------------------------------------------------------


def check_plans(
    comm: thdattn.comm.Comm, cupy: Any, sharding: str, count: int = 40, masks: Sequence[str] = tuple(MASKS)
) -> None:
    """Compare the plans of a static pack, element by element, with those of the host, and what is counted of them."""
    from thdattn.engines.cuda.backward import partials_per_tile

    drawn, room = packs_of(masks[0])
    attentions = [
        thdattn.CPAttention(comm, 2, dim, engine="cuda", **MASKS.get(mask, {})) for dim in (64, 128) for mask in masks
    ]
    for num_batches in (1, 2):
        graphs = Graphs(comm, CudaGraphConfig(impl="local", warmup_steps=1, **room))
        pack = StaticPack(graphs, attentions, ROWS, sharding, num_batches)
        shares = [partials_per_tile(plan) for plan in pack.plans()]
        replayed = [graphs.captured(partial(pack.plans, number), "plans") for number in range(num_batches)]
        fitting = [batch for batch in drawn(comm.size, count, seed=7) if pack.fits([batch])]
        assert len(fitting) == count - count // 5 > 2 * num_batches
        for first in range(0, len(fitting) - 1, num_batches):
            batches = fitting[first : first + num_batches]
            pack.load(batches)
            for number in reversed(range(num_batches)):
                plans, shared = replayed[number](), pack.sharding(batches[number])
                for attention, plan, counted in zip(attentions, plans, shares, strict=True):
                    if pack.balanced:
                        capacity = pack.balanced[attention.window]
                        shared = Sharding(shared.batch, comm.size, "balanced", capacity=capacity)
                    for field, x in vars(host_arrays(shared, comm.rank, plan.window, plan.tiles)).items():
                        if x is not None:
                            np.testing.assert_array_equal(to_host(getattr(plan.arrays, field)), x, field)
                    eager = attention.plan(shared.batch, shared)
                    for field in ("query_ends", "group_ends", "group_begins") if plan.has_trees else ():
                        x, y = (to_host(getattr(each.arrays, field)) for each in (plan, eager))
                        np.testing.assert_array_equal(x, y, field)
                    np.testing.assert_array_equal(to_host(counted), to_host(partials_per_tile(eager)), "shares")
                    plan.check()
        graphs.close()


def check_shardings(comm: thdattn.comm.Comm, cupy: Any) -> None:
    for sharding in ("dual_chunk", "contiguous"):
        check_plans(comm, cupy, sharding, 20)


# --- the end -----------------------------------------------------------------------------------------------------


class Job:
    """Graphs with collectives in them, replayed, and a program that is about to end."""

    def __init__(self, comm: thdattn.comm.Comm, cupy: Any, warmup_steps: int = 1) -> None:
        self.comm, self.cupy = comm, cupy
        self.attention = thdattn.CPAttention(comm, 4, 64, 2, engine="cuda")
        self.graphs = Graphs(comm, CudaGraphConfig(impl="local", max_packed_seqs=4, warmup_steps=warmup_steps))
        self.pack = StaticPack(self.graphs, [self.attention], ROWS)
        self.pair = self.graphs.pair(self.forward, self.backward, "layer")
        self.raises = False

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        out, saved = self.attention.forward(q, k, v, self.pack.plans()[0])
        if self.raises:
            raise KeyError("in the middle of a capture")
        return out, saved

    def backward(self, dout: Any, saved: Any) -> tuple[Any, ...]:
        gradients = self.attention.backward(dout, saved)
        norm = self.cupy.ones(1, np.float32)
        self.comm.all_reduce(norm, "sum")  # one of NCCL's even if there is one rank
        return *gradients, norm

    def step(self) -> None:
        multiple = 2 * self.comm.size
        self.pack.load([PackedBatch.from_lengths([300, 5, 200], multiple)])
        rows = ROWS // self.comm.size
        q, k, v = (self.cupy.ones((rows, heads, 64), BFLOAT16) for heads in (4, 2, 2))
        out, saved = self.pair.forward(q, k, v)
        *_, norm = self.pair.backward(out, saved)
        assert float(norm[0]) == self.comm.size


ENDS = "exit", "cold", "graphs-first", "comm-first", "capture-raises", "raise", "raise-on-one"


def end(comm: thdattn.comm.Comm, cupy: Any, scenario: str) -> None:
    """Replay, then end in one of the ways in which programs end."""
    assert scenario in ENDS, f"scenario is {scenario}, wanted one of {', '.join((*SCENARIOS, 'cycles', *ENDS))}"
    job = Job(comm, cupy, warmup_steps=0 if scenario == "cold" else 1)
    if scenario == "capture-raises":
        job.step()
        job.raises = True
        with contextlib.suppress(KeyError):
            job.step()
            raise AssertionError("nothing was captured")
        job.raises = False
    for _ in range(4):
        job.step()
    if scenario == "raise":
        raise RuntimeError("of every rank")
    if scenario == "raise-on-one":
        if comm.rank == comm.size - 1:
            raise RuntimeError("of the last rank")
        while True:
            job.step()
    if scenario == "graphs-first":
        job.graphs.close()
    if scenario in ("graphs-first", "comm-first"):
        comm.close()
    # Else the interpreter's exit closes them.


def cycles(comm: thdattn.comm.Comm, cupy: Any, count: int = 20) -> None:
    """Check that cycles of capture and destruction leave memory flat: of the pool, and of the device."""
    pool, used, free = cupy.get_default_memory_pool(), [], []
    for _ in range(count):
        job = Job(comm, cupy)
        for _ in range(3):
            job.step()
        assert sum(p.total_bytes() for p in job.graphs._pools) > 2**20, "what would be seen if it were not freed"
        job.graphs.close()
        del job
        gc.collect()
        cupy.cuda.Device().synchronize()
        used.append((pool.used_bytes(), pool.total_bytes()))
        free.append(cupy.cuda.runtime.memGetInfo()[0])
    settled = count // 4  # kernels loaded, buffers of NCCL and of the driver made
    assert len(set(used[settled:])) == 1, used
    assert free[settled] - free[-1] < 2**20 * (count - settled) // 2, free


# Each is run over several ranks by test_gpu_graphs.py.
SCENARIOS: dict[str, Callable[[thdattn.comm.Comm, Any], None]] = {
    "packs": replay_masks, "methods": replay_methods, "balanced": replay_balanced, "overlapped": replay_overlapped,
    "trees": replay_trees, "mixers": replay_mixers, "plans": check_shardings,
}


def main(scenario: str, size: str) -> None:
    import cupy

    comm = thdattn.comm.init("nccl")
    assert comm.size == int(size), f"MPI sees {comm.size} ranks, the launcher started {size}"
    if scenario in SCENARIOS:
        SCENARIOS[scenario](comm, cupy)
    elif scenario == "cycles":
        cycles(comm, cupy)
    else:
        end(comm, cupy, scenario)
    print(f"rank {comm.rank} of {comm.size}: {scenario} done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
