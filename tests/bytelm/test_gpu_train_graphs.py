"""Training with CUDA graphs on a GPU: the same bits as without, whatever is captured; nothing waits."""

from __future__ import annotations

import os
from pathlib import Path

import checkpoint
import numpy as np
import pytest
import runs
from held import held
from launch import need_gpus, run_ranks
from programs import MISBEHAVE, options, start
from runs import EVERY_WAY, way_id, ways_of
from sizes import SIZES

import thdattn
from thdattn.graphs import Upload

pytestmark = pytest.mark.gpu

RANKS = Path(__file__).with_name("train_graph_ranks.py")


@pytest.fixture
def dual(batches):
    return batches("dual_chunk", "cuda")


@pytest.fixture(scope="module")
def comm(cupy):
    with thdattn.comm.init("single") as comm:
        yield comm


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


def test_the_memory_of_graphs_is_counted_until_they_are_closed(cupy, comm, dual):
    made = runs.trainer(comm, "cuda", impl="full_iteration")
    for _ in range(5):
        made.step(dual[:1], runs.LR)
    assert made.graphs.num_bytes > 0
    made.graphs.close()
    assert made.graphs.num_bytes == 0


# --- the program -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cp_size", "keep_keys", "method", "size"), [
    (2, True, "all_gather", "tiny"), (2, False, "all_gather", "tiny"), (1, False, "all_gather", "tiny"),
    (2, True, "all_gather:balanced", "tiny"), (2, False, "all_gather:balanced", "tiny"),
    (2, True, "a2a", "tiny"), (2, False, "a2a", "tiny"), (2, True, "a2a+all_gather", "tiny"),
    (2, True, "a2a", "tiny-hybrid"), (1, False, "a2a", "tiny-hybrid"),
])
def test_two_gpus_make_the_bits_of_two_gpus_without_graphs(cupy, documents, cp_size, keep_keys, method, size):
    """Two GPUs are one group that shares each micro-batch, or two groups that have one each."""
    need_gpus(cupy, 2)
    process = run_ranks(2, RANKS, str(documents), str(cp_size), str(int(keep_keys)), method, size, timeout=280)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("bitwise the same") == len(ways_of(SIZES[size]))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("impl", "step"), [("none", 20), ("local", 20), ("full_iteration", 2)])
def test_sigterm_ends_a_run_amid_a_step(cupy, documents, tmp_path, ranks, impl, step):
    """The second of four micro-batches per group is the last; a step that is one graph ends before its capture."""
    need_gpus(cupy, ranks)
    words = options(data=documents, steps=10_000, val_bytes=2000, accumulate=4, checkpoint=tmp_path,
                    cuda_graph_impl=impl)
    process = start(ranks, MISBEHAVE, "amid", ranks - 1, step, *words, timeout=120)
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"stopped after step {step - 1}, --resume goes on" in process.stdout
    assert process.stdout.count('"in step": 2') == ranks
    assert checkpoint.load(tmp_path).step == step - 1
