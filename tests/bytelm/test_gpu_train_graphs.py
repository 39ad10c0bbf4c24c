"""Training through CUDA graphs on a GPU: the bits of training without, whatever is captured; nothing waits or leaks."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from statistics import mode

import checkpoint
import numpy as np
import pytest
import runs
from held import held
from launch import run_ranks
from programs import MISBEHAVE, TRAIN, lines_of, options, start
from sizes import SIZES
from test_train_graphs import EVERY_WAY, way_id, ways_of

import thdattn
from thdattn.graphs import Upload

pytestmark = pytest.mark.gpu

STEPS, TOKENS = 200, 512
HYBRID = SIZES["tiny-hybrid"]
RANKS = Path(__file__).with_name("train_graph_ranks.py")
FLAT = 16 * 2**20  # bytes that 15 cycles of capture and destruction may cost, if one that leaks costs as many


@pytest.fixture(scope="module")
def batches(documents):
    return runs.batches(documents, STEPS, TOKENS)


@pytest.fixture(scope="module")
def comm(cupy):
    with thdattn.comm.init("single") as comm:
        yield comm


def outcome(comm, batches, accumulate=1, validate_every=50, **graphs):
    """The run, and how many of its graphs were captured."""
    made = runs.trainer(comm, "cuda", **graphs)
    result = runs.run(made, batches, batches[:6], accumulate, validate_every)
    captured = runs.num_captured(made)
    made.graphs.close()
    return result, captured


@pytest.fixture(scope="module")
def eager(comm, batches):
    return outcome(comm, batches)[0]


@pytest.fixture(scope="module")
def slices(documents):
    """Batches for rows that are slices of the pack, for hybrids."""
    return runs.batches(documents, 60, TOKENS, sharding="contiguous")


@pytest.mark.parametrize("way", ways_of(HYBRID), ids=way_id)
def test_steps_of_a_hybrid_are_bitwise_those_without_graphs(comm, slices, way):
    """Also where some do not fit."""
    documents = [batch.batch.num_seqs for batch in slices]
    room = max(documents) - 1
    of_hybrid = {"config": HYBRID, "method": runs.Method("a2a", "contiguous")}
    expected, _ = outcome(comm, slices, 2, 10, **of_hybrid)
    result, captured = outcome(comm, slices, 2, 10, max_packed_seqs=room, **of_hybrid, **way)
    mixers, layers = HYBRID.num_mixers, HYBRID.layers
    parts = {(): layers, ("attn",): layers - mixers, ("mlp",): layers, ("mamba",): mixers}[way.get("modules", ())]
    assert captured == (2 if way["impl"] == "full_iteration" else 1 + 2 * parts)
    assert 0 < result.overflows[-1] < len(slices) // 4
    assert (result.numbers, result.validations, result.weights) == (
        expected.numbers, expected.validations, expected.weights)


def wanted_graphs(way):
    """A forward and a backward per captured part or layer of 3, and the plan; a step and a validation."""
    return 2 if way["impl"] == "full_iteration" else 1 + 2 * 3


@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
def test_200_steps_are_bitwise_those_without_graphs(comm, batches, eager, way):
    """Losses, norms, validations in between, and in the end weights and gradient."""
    assert len({batch.batch.num_seqs for batch in batches}) > 3 and len(eager.numbers) == STEPS
    result, captured = outcome(comm, batches, **way)
    assert captured == wanted_graphs(way)
    assert result == eager


@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
def test_gradients_of_micro_batches_add_up_bitwise(comm, batches, way):
    expected, _ = outcome(comm, batches[:40], accumulate=2)
    result, captured = outcome(comm, batches[:40], accumulate=2, **way)
    assert captured == wanted_graphs(way)
    assert result == expected


@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
@pytest.mark.parametrize("single_pool", [True, False])
def test_steps_that_do_not_fit_run_eagerly_between_replays(comm, batches, eager, way, single_pool):
    documents = [batch.batch.num_seqs for batch in batches]
    room = mode(documents)
    result, captured = outcome(comm, batches, max_packed_seqs=room, single_pool=single_pool, **way)
    assert captured == wanted_graphs(way)
    assert result.overflows == np.cumsum([n > room for n in documents]).tolist()
    assert 0 < result.overflows[-1] < STEPS // 2
    assert (result.numbers, result.weights) == (eager.numbers, eager.weights)


@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
def test_steps_of_which_some_micro_batches_do_not_fit_are_bitwise_those_without_graphs(comm, batches, way):
    """Of eight, most of which fit: local replays these, full_iteration runs the whole step eagerly."""
    documents = [batch.batch.num_seqs for batch in batches]
    room = max(documents) - 2
    large = np.reshape([n > room for n in documents], (-1, 8)).sum(axis=1)
    assert 0 < large.max() < 8 and (large == 0).sum() > 10, "no step is partly eager, or too few are replayed"
    expected, _ = outcome(comm, batches, accumulate=8)
    result, captured = outcome(comm, batches, accumulate=8, max_packed_seqs=room, **way)
    assert captured == wanted_graphs(way)
    assert result.overflows == np.cumsum(np.minimum(large, 1) if way["impl"] == "full_iteration" else large).tolist()
    assert (result.numbers, result.weights, result.gradient, result.validations) == (
        expected.numbers, expected.weights, expected.gradient, expected.validations)


@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
def test_sums_in_any_order_train_as_well(comm, batches, eager, way):
    result, _ = outcome(comm, batches, deterministic=False, **way)
    losses, expected = (np.array(run.numbers)[:, 0] for run in (result, eager))
    np.testing.assert_allclose(losses[:20], expected[:20], rtol=2**-6)
    assert losses[-20:].mean() == pytest.approx(expected[-20:].mean(), rel=0.03)


def test_a_captured_step_of_another_number_of_micro_batches_is_refused(comm, batches):
    made = runs.trainer(comm, "cuda", impl="full_iteration")
    for begin in range(0, 10, 2):
        made.step(batches[begin : begin + 2], runs.LR)
    with pytest.raises(ValueError, match="batches holds 1 micro-batches, wanted 2 as in the captured step"):
        made.step(batches[:1], runs.LR)
    assert np.isfinite(made.step(batches[:2], runs.LR).numbers()).all()
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
def test_the_host_waits_for_no_replayed_step_of_layers(cupy, comm, batches, way):
    made = runs.trainer(comm, "cuda", **way)
    for _ in range(6):
        made.step(batches[:1], runs.LR)
    assert held(cupy, lambda: made.step(batches[:1], runs.LR)), "a step came back only when the GPU was let go"
    made.graphs.close()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other workers use the same GPU's memory")
@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
def test_memory_stays_flat_over_20_cycles_of_capture_and_destruction(cupy, comm, batches, way):
    pool, free = cupy.get_default_memory_pool(), []
    for _ in range(20):
        result, captured = outcome(comm, batches[:8], **way)
        assert captured == wanted_graphs(way)
        del result
        gc.collect()
        pool.free_all_blocks()
        cupy.cuda.Device().synchronize()
        free.append(cupy.cuda.runtime.memGetInfo()[0])
    assert free[4] - free[-1] <= FLAT, [free[0] - x for x in free]


def test_the_memory_of_graphs_is_counted_until_they_are_closed(cupy, comm, batches):
    made = runs.trainer(comm, "cuda", impl="full_iteration")
    for _ in range(5):
        made.step(batches[:1], runs.LR)
    assert made.graphs.num_bytes > 0
    made.graphs.close()
    assert made.graphs.num_bytes == 0


# --- the program -----------------------------------------------------------------------------------------------


def gpus(cupy, wanted):
    found = cupy.cuda.runtime.getDeviceCount()
    if found < wanted:
        pytest.skip(f"needs {wanted} GPUs, found {found}")


@pytest.mark.parametrize(("cp_size", "keep_keys", "cp_comm_type", "size"), [
    (2, True, "all_gather", "tiny"), (2, False, "all_gather", "tiny"), (1, False, "all_gather", "tiny"),
    (2, True, "a2a", "tiny"), (2, False, "a2a", "tiny"), (2, True, "a2a+all_gather", "tiny"),
    (2, True, "a2a", "tiny-hybrid"), (1, False, "a2a", "tiny-hybrid"),
])  # fmt: skip
def test_two_gpus_make_the_bits_of_two_gpus_without_graphs(cupy, documents, cp_size, keep_keys, cp_comm_type, size):
    """As one group that shares each micro-batch, and as two that have one each."""
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
    graphs, eager = ([line["loss"] for line in lines_of(tmp_path / name) if "loss" in line]
                     for name in ("graphs", "eager"))
    np.testing.assert_allclose(graphs[:10], eager[:10], rtol=2**-6)
    assert np.mean(graphs[-10:]) == pytest.approx(np.mean(eager[-10:]), rel=0.03)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_ctrl_c_and_errors_end_a_run_with_graphs(cupy, documents, tmp_path, ranks, impl):
    gpus(cupy, ranks)
    for accident in ("ctrl-c", "fail"):
        words = options(data=documents, steps=10_000, val_bytes=2000, metrics=tmp_path / f"{accident}.jsonl",
                        cuda_graph_impl=impl)
        process = start(ranks, MISBEHAVE, accident, ranks - 1, 20, *words, timeout=120)
        assert (process.returncode == 0) == (accident == "ctrl-c"), process.stdout + process.stderr
        assert "stopped after step" in process.stdout or "an accident, on purpose" in process.stderr


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("impl", "step"), [("none", 20), ("local", 20), ("full_iteration", 2)])
def test_sigterm_ends_a_run_amid_a_step(cupy, documents, tmp_path, ranks, impl, step):
    """Of four micro-batches per group, the second; of a step that is one graph, before that is captured."""
    gpus(cupy, ranks)
    words = options(data=documents, steps=10_000, val_bytes=2000, accumulate=4, checkpoint=tmp_path,
                    cuda_graph_impl=impl)
    process = start(ranks, MISBEHAVE, "amid", ranks - 1, step, *words, timeout=120)
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"stopped after step {step - 1}, --resume goes on" in process.stdout
    assert process.stdout.count('"in step": 2') == ranks
    assert checkpoint.load(tmp_path).step == step - 1
