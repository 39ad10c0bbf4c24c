"""Training with CUDA graphs on a GPU: the same bits as without, whatever is captured; nothing waits or leaks."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import mode
from typing import NamedTuple

import checkpoint
import data
import numpy as np
import pytest
import runs
from held import held
from launch import run_ranks
from programs import MISBEHAVE, TRAIN, gpus, losses, options, start
from runs import EVERY_WAY, way_id, ways_of
from sizes import SIZES
from texts import write_dialogues

import thdattn
from thdattn.arguments import INT32_MAX
from thdattn.graphs import Upload

pytestmark = pytest.mark.gpu

STEPS, TOKENS = 200, 512
HYBRID = SIZES["tiny-hybrid"]
RANKS = Path(__file__).with_name("train_graph_ranks.py")
FLAT = 16 * 2**20  # bytes that 15 cycles of capture and destruction may cost, if one that leaks costs as many


@pytest.fixture(scope="module")
def batches(documents, tmp_path_factory):
    """Pack documents by the lengths that each sharding needs; and prompts, some longer than a micro-batch."""
    made = {sharding: runs.batches(documents, STEPS, TOKENS, sharding=sharding)
            for sharding in ("dual_chunk", "contiguous")}  # fmt: skip
    lengths = [*np.random.default_rng(0).integers(1, 120, (200, 2)), (2000, 40)]
    texts = [("p" * prompt, "a" * answer) for prompt, answer in lengths]
    dialogues = data.find_dialogues(write_dialogues(tmp_path_factory.mktemp("texts"), texts))
    packing = data.Packing.of(TOKENS, 1, "dual_chunk")
    made["prompts"] = list(islice(data.micro_batches(dialogues, packing, 0, data.Position(0, 0)), 40))
    return made


@pytest.fixture
def dual(batches):
    return batches["dual_chunk"]


@pytest.fixture(scope="module")
def comm(cupy):
    with thdattn.comm.init("single") as comm:
        yield comm


def outcome(comm, batches, accumulate=1, **graphs):
    """Return the run, and how many of its graphs were captured."""
    made = runs.trainer(comm, "cuda", **graphs)
    result = runs.run(made, batches, batches[:6], accumulate, 50 if len(batches) == STEPS else 10)
    captured = runs.num_captured(made)
    made.graphs.close()
    return result, captured


class Case(NamedTuple):
    """Batches of a run, steps of `accumulate` of them, and a room that some do not fit; None: all fit."""

    num_batches: int
    accumulate: int
    room: Callable[[list[int]], int] | None = None
    batches: str = "dual_chunk"
    single_pool: bool = True


CASES = {
    "one": Case(STEPS, 1), "two": Case(40, 2), "some-one": Case(STEPS, 1, mode),
    "some-one-pools": Case(STEPS, 1, mode, single_pool=False), "some-eight": Case(STEPS, 8, lambda n: max(n) - 1),
    "prompts": Case(40, 2, batches="prompts"), "hybrid": Case(60, 2, lambda n: max(n) - 1, "contiguous"),
}
# By batches, if it is not the tiny model.
MODELS = {"contiguous": {"config": HYBRID, "method": runs.Method("a2a", "contiguous")}}


def config_of(batches):
    return MODELS.get(batches, {}).get("config", SIZES["tiny"])


@pytest.fixture(scope="module")
def eager(comm, batches):
    """Run a case without graphs: (number of batches, accumulate, their name) -> Run."""
    return cache(lambda num, accumulate, name: outcome(
        comm, batches[name][:num], accumulate, **MODELS.get(name, {}))[0])  # fmt: skip


def wanted_graphs(way, config=SIZES["tiny"]):
    """Count a forward and a backward per captured part or layer, and the plan; or a step and a validation."""
    mixers, layers = config.num_mixers, config.layers
    parts = {(): layers, ("attn",): layers - mixers, ("mlp",): layers, ("mamba",): mixers}[way.get("modules", ())]
    return 2 if way["impl"] == "full_iteration" else 1 + 2 * parts


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name, case in CASES.items() for way in ways_of(config_of(case.batches))],
    ids=lambda x: x if isinstance(x, str) else way_id(x),
)
def test_steps_are_bitwise_those_without_graphs(comm, batches, eager, name, way):
    """Losses, norms, validations in between, weights and the last gradient are; also where some batches do not fit."""
    num, accumulate, room, kind, single_pool = CASES[name]
    some = batches[kind][:num]
    documents = [batch.batch.num_seqs for batch in some]
    assert len(set(documents)) > 1
    limits = {"max_packed_seqs": room(documents)} if room else {}
    result, captured = outcome(comm, some, accumulate, single_pool=single_pool, **way, **MODELS.get(kind, {}), **limits)
    assert captured == wanted_graphs(way, config_of(kind))
    wanted = runs.overflows(some, room(documents) if room else INT32_MAX, accumulate, 1, way["impl"])
    assert result.overflows == wanted
    if room:
        steps = runs.overflows(some, room(documents), accumulate, 1, "full_iteration")
        assert 0 < steps[-1] < len(steps) - 10, "no step is eager, or too few are replayed"
    assert result.results == eager(num, accumulate, kind).results


@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
def test_sums_in_any_order_train_as_well(comm, dual, eager, way):
    result, _ = outcome(comm, dual, deterministic=False, **way)
    losses, expected = (np.array(run.numbers)[:, 0] for run in (result, eager(STEPS, 1, "dual_chunk")))
    np.testing.assert_allclose(losses[:20], expected[:20], rtol=2**-6)
    assert losses[-20:].mean() == pytest.approx(expected[-20:].mean(), rel=0.03)


def test_a_captured_step_of_another_number_of_micro_batches_is_refused(comm, dual):
    made = runs.trainer(comm, "cuda", impl="full_iteration")
    for begin in range(0, 10, 2):
        made.step(dual[begin : begin + 2], runs.LR)
    with pytest.raises(ValueError, match="batches holds 1 micro-batches, wanted 2 as in the captured step"):
        made.step(dual[:1], runs.LR)
    assert np.isfinite(made.step(dual[:2], runs.LR).numbers()).all()
    made.graphs.close()


def test_uploads_arrive_in_order_and_wait_for_nothing(cupy):
    upload, copies = Upload(100_000, on_gpu=True), cupy.zeros((6, 100_000), np.int32)
    address = upload.words.data.ptr

    def send(*values):
        for value in values:
            words = np.full(100_000, value, np.int32)
            upload.send([words])
            words.fill(-1)  # the caller's array is free again
            copies[value] = upload.words

    send(1, 2)
    assert held(cupy, lambda: send(3, 4)), "an upload came back only when the GPU was let go"
    send(5)
    assert upload.words.data.ptr == address
    assert (copies.get() == np.arange(6)[:, None]).all()


# Not of full_iteration: the launch of so large a graph returns only when the GPU has begun with it.
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other workers launch on the same GPU")
@pytest.mark.parametrize("way", [way for way in EVERY_WAY if way["impl"] == "local"], ids=way_id)
def test_the_host_waits_for_no_replayed_step_of_layers(cupy, comm, dual, way):
    made = runs.trainer(comm, "cuda", **way)
    for _ in range(6):
        made.step(dual[:1], runs.LR)
    assert held(cupy, lambda: made.step(dual[:1], runs.LR)), "a step came back only when the GPU was let go"
    made.graphs.close()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other workers use the same GPU's memory")
@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
def test_memory_stays_flat_over_20_cycles_of_capture_and_destruction(cupy, comm, dual, way):
    pool, free = cupy.get_default_memory_pool(), []
    for _ in range(20):
        result, captured = outcome(comm, dual[:8], **way)
        assert captured == wanted_graphs(way)
        del result
        gc.collect()
        pool.free_all_blocks()
        cupy.cuda.Device().synchronize()
        free.append(cupy.cuda.runtime.memGetInfo()[0])
    assert free[4] - free[-1] <= FLAT, [free[0] - x for x in free]


def test_the_memory_of_graphs_is_counted_until_they_are_closed(cupy, comm, dual):
    made = runs.trainer(comm, "cuda", impl="full_iteration")
    for _ in range(5):
        made.step(dual[:1], runs.LR)
    assert made.graphs.num_bytes > 0
    made.graphs.close()
    assert made.graphs.num_bytes == 0


# --- the program -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cp_size", "keep_keys", "cp_comm_type", "size"), [
    (2, True, "all_gather", "tiny"), (2, False, "all_gather", "tiny"), (1, False, "all_gather", "tiny"),
    (2, True, "a2a", "tiny"), (2, False, "a2a", "tiny"), (2, True, "a2a+all_gather", "tiny"),
    (2, True, "a2a", "tiny-hybrid"), (1, False, "a2a", "tiny-hybrid"),
])  # fmt: skip
def test_two_gpus_make_the_bits_of_two_gpus_without_graphs(cupy, documents, cp_size, keep_keys, cp_comm_type, size):
    """Two GPUs are one group that shares each micro-batch, or two groups that have one each."""
    gpus(cupy, 2)
    process = run_ranks(2, RANKS, str(documents), str(cp_size), str(int(keep_keys)), cp_comm_type, size, timeout=280)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("bitwise the same") == len(ways_of(SIZES[size]))


@pytest.mark.parametrize(("ranks", "cp_size"), [(1, 1), (2, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_a_whole_run_ends_by_itself_and_trains(cupy, documents, tmp_path, ranks, cp_size, impl):
    gpus(cupy, ranks)
    words = {"data": documents, "steps": 60, "val_bytes": 2000, "val_every": 20, "accumulate": 2, "cp": cp_size,
             "sharding": "dual_chunk"}  # fmt: skip
    for name, graphs in {"graphs": {"cuda_graph_impl": impl}, "eager": {}}.items():
        process = start(ranks, TRAIN, *options(metrics=tmp_path / name, **words, **graphs), timeout=200)
        assert process.returncode == 0, process.stdout + process.stderr
        assert ("CUDA graphs: " in process.stdout) == bool(graphs) and "cannot capture" not in process.stdout
    graphs, eager = (losses(tmp_path / name) for name in ("graphs", "eager"))
    np.testing.assert_allclose(graphs[:10], eager[:10], rtol=2**-6)
    assert np.mean(graphs[-10:]) == pytest.approx(np.mean(eager[-10:]), rel=0.03)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_an_error_of_one_rank_ends_a_run_with_graphs(cupy, documents, tmp_path, ranks, impl):
    gpus(cupy, ranks)
    words = options(data=documents, steps=10_000, val_bytes=2000, cuda_graph_impl=impl)
    process = start(ranks, MISBEHAVE, "fail", ranks - 1, 20, *words, timeout=120)
    assert process.returncode != 0 and "an accident, on purpose" in process.stderr, process.stdout + process.stderr


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("impl", "step"), [("none", 20), ("local", 20), ("full_iteration", 2)])
def test_sigterm_ends_a_run_amid_a_step(cupy, documents, tmp_path, ranks, impl, step):
    """The second of four micro-batches per group is the last; a step that is one graph ends before its capture."""
    gpus(cupy, ranks)
    words = options(data=documents, steps=10_000, val_bytes=2000, accumulate=4, checkpoint=tmp_path,
                    cuda_graph_impl=impl)
    process = start(ranks, MISBEHAVE, "amid", ranks - 1, step, *words, timeout=120)
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"stopped after step {step - 1}, --resume goes on" in process.stdout
    assert process.stdout.count('"in step": 2') == ranks
    assert checkpoint.load(tmp_path).step == step - 1
