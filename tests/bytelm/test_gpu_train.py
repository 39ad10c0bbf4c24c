"""Training on GPUs, in bfloat16: the same curve as on the CPU, on one GPU and on several."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import checkpoint
import numpy as np
import pytest
from programs import MISBEHAVE, SAMPLE, TRAIN, gpus, lines_of, losses, options, start, validations

pytestmark = pytest.mark.gpu

FEW = {"steps": 60, "val_bytes": 8192, "val_every": 30, "sharding": "dual_chunk"}


def run(ranks, engine, folder, program=TRAIN, before=(), **more):
    """Return the finished process of a run that leaves its checkpoint and metrics in the folder."""
    words = options(engine=engine, checkpoint=folder, metrics=folder / "run.jsonl", **more)
    process = start(ranks, program, *before, *words, timeout=280)
    assert process.returncode == 0, process.stdout + process.stderr
    return process


def mean_loss(folder, steps):
    """Return the mean of the last steps, as single ones differ between dtypes by chance."""
    return np.mean(losses(folder / "run.jsonl")[-steps:])


@pytest.fixture(scope="module")
def few_steps_on_the_cpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu")
    run(1, "reference", folder, **FEW)
    return folder


def test_tiny_model_reaches_the_curve_of_the_cpu(cupy, tmp_path):
    """This machine's Python has other documents than the recorded curve."""
    folders = {"cuda": tmp_path, "reference": tmp_path / "cpu"}
    with ThreadPoolExecutor(2) as pool:  # side by side, as a minute each is long for a test
        process, _ = pool.map(lambda engine: run(1, engine, folders[engine], size="tiny"), folders)
    assert "bfloat16, engine 'cuda'" in process.stdout
    on_gpu, on_cpu = (validations(folder / "run.jsonl")[-1] for folder in folders.values())
    assert on_gpu < on_cpu + 0.05 and on_gpu < 2.5
    text = start(1, SAMPLE, *options(checkpoint=tmp_path, prompt="def ", bytes=100))
    assert text.returncode == 0, text.stderr
    assert "\ndef " in text.stdout and len(text.stdout) > 60


def test_first_steps_are_those_of_the_cpu(cupy, tmp_path, few_steps_on_the_cpu):
    run(1, "cuda", tmp_path, **FEW)
    on_gpu, on_cpu = (lines_of(folder / "run.jsonl") for folder in (tmp_path, few_steps_on_the_cpu))
    assert on_gpu[1]["loss"] == pytest.approx(on_cpu[1]["loss"], rel=2**-7)  # two units in the last place of bfloat16
    assert mean_loss(tmp_path, 20) == pytest.approx(mean_loss(few_steps_on_the_cpu, 20), rel=0.03)


def test_metrics_on_a_gpu_are_finite_and_mfu_is_a_share(cupy, tmp_path):
    run(1, "cuda", tmp_path, accumulate=2, **FEW)
    steps = [line for line in lines_of(tmp_path / "run.jsonl") if "loss" in line]
    assert len(steps) == FEW["steps"]
    for line in steps:
        assert line["tokens_per_s"] > 0 and line["attention_tflops"] > 0
        assert line["mfu"] is None or 0 < line["mfu"] < 1


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("sharding", "tolerance"), [("dual_chunk", 0.03), ("contiguous", 0.1)])
def test_gpus_together_train_as_one_rank_does(cupy, tmp_path, few_steps_on_the_cpu, ranks, sharding, tolerance):
    """contiguous needs no padding and so packs other batches."""
    gpus(cupy, ranks)
    process = run(ranks, "cuda", tmp_path, **FEW | {"sharding": sharding})
    assert f"ranks: {ranks}, backend 'nccl'" in process.stdout
    assert mean_loss(tmp_path, 20) == pytest.approx(mean_loss(few_steps_on_the_cpu, 20), rel=tolerance)


MANY_HEADS = {"size": "small", "tokens": 2048, "longest": 512, "steps": 30, "val_bytes": 4096, "val_every": 30}


def losses_of_many_heads(ranks, metrics, **more):
    """Return the loss of every step, and the output, of a model whose heads 4 ranks can exchange."""
    process = start(ranks, TRAIN, *options(engine="cuda", metrics=metrics, **MANY_HEADS, **more), timeout=280)
    assert process.returncode == 0, process.stdout + process.stderr
    return losses(metrics), process.stdout


@pytest.fixture(scope="module")
def one_gpu(cupy, tmp_path_factory):
    """Run on one GPU: rule for lengths -> losses."""
    folder = tmp_path_factory.mktemp("one")
    return {sharding: losses_of_many_heads(1, folder / sharding, sharding=sharding)[0]
            for sharding in ("dual_chunk", "contiguous")}  # fmt: skip


@pytest.mark.parametrize(("ranks", "words"), [
    (2, {"sharding": "balanced"}), (2, {"cp_comm_type": "a2a"}), (2, {"cp_comm_type": "p2p"}),
    (4, {"sharding": "balanced"}), (4, {"cp_comm_type": "a2a"}),
    (4, {"cp_comm_type": "a2a+all_gather", "cp_inner": 2, "sharding": "balanced"}),
    (4, {"cp_comm_type": "a2a+all_gather", "cp_inner": 2, "cuda_graph_impl": "full_iteration"}),
    (4, {"cp_comm_type": "a2a+p2p", "cp_inner": 2}),
])  # fmt: skip
def test_every_method_trains_as_one_gpu_does(cupy, tmp_path, one_gpu, ranks, words):
    gpus(cupy, ranks)
    found, said = losses_of_many_heads(ranks, tmp_path / "run.jsonl", **words)
    assert f"share a micro-batch by {words.get('cp_comm_type', 'all_gather')}" in said and "cannot capture" not in said
    rule = "contiguous" if words.get("sharding") == "balanced" or words.get("cp_comm_type") == "a2a" else "dual_chunk"
    np.testing.assert_allclose(found[:5], one_gpu[rule][:5], rtol=2**-6)
    assert np.mean(found[-10:]) == pytest.approx(np.mean(one_gpu[rule][-10:]), rel=0.03)


def losses_of_a_hybrid(ranks, engine, metrics, **more):
    """Return the loss of every step."""
    words = {"size": "tiny-hybrid", "steps": 60, "val_bytes": 8192, "val_every": 30, **more}
    process = start(ranks, TRAIN, *options(engine=engine, metrics=metrics, **words), timeout=280)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "cannot capture" not in process.stdout
    return losses(metrics)


@pytest.fixture(scope="module")
def hybrid_on_the_cpu(tmp_path_factory):
    return losses_of_a_hybrid(1, "reference", tmp_path_factory.mktemp("cpu") / "run.jsonl")


@pytest.mark.parametrize(("ranks", "words"), [
    (1, {}), (2, {}), (2, {"cp_comm_type": "all_gather", "cuda_graph_impl": "local"}),
    (4, {"cuda_graph_impl": "full_iteration"}),
])  # fmt: skip
def test_hybrids_train_on_gpus_as_on_the_cpu(cupy, tmp_path, hybrid_on_the_cpu, ranks, words):
    gpus(cupy, ranks)
    found = losses_of_a_hybrid(ranks, "cuda", tmp_path / "run.jsonl", **words)
    np.testing.assert_allclose(found[:5], hybrid_on_the_cpu[:5], rtol=2**-6)
    assert np.mean(found[-20:]) == pytest.approx(np.mean(hybrid_on_the_cpu[-20:]), rel=0.03)


@pytest.fixture(scope="module")
def two_batches_a_step_on_the_cpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu2")
    run(1, "reference", folder, accumulate=2, **FEW)
    return folder


@pytest.mark.parametrize(("ranks", "cp_size", "accumulate"), [(2, 1, 1), (2, 2, 2), (4, 2, 1)])
def test_groups_of_gpus_train_as_one_rank_does(
    cupy, tmp_path, two_batches_a_step_on_the_cpu, ranks, cp_size, accumulate
):
    """Two micro-batches per step, of one group each or of all GPUs one after the other; the norm tells their scale."""
    gpus(cupy, ranks)
    run(ranks, "cuda", tmp_path, cp=cp_size, accumulate=accumulate, **FEW)
    on_gpus, on_cpu = (lines_of(folder / "run.jsonl")[1] for folder in (tmp_path, two_batches_a_step_on_the_cpu))
    assert on_gpus["loss"] == pytest.approx(on_cpu["loss"], rel=2**-7)
    assert on_gpus["gradient_norm"] == pytest.approx(on_cpu["gradient_norm"], rel=0.02)
    assert mean_loss(tmp_path, 20) == pytest.approx(mean_loss(two_batches_a_step_on_the_cpu, 20), rel=0.03)
    assert validations(tmp_path / "run.jsonl")[-1] == pytest.approx(
        validations(two_batches_a_step_on_the_cpu / "run.jsonl")[-1], rel=0.03)


def test_run_that_goes_on_ends_where_an_uninterrupted_one_does(cupy, tmp_path, two_batches_a_step_on_the_cpu):
    """The run stops after the micro-batch in which it is asked to, the last one of step 20."""
    process = run(1, "cuda", tmp_path, MISBEHAVE, ("amid", 0, 20), accumulate=2, **FEW)
    assert checkpoint.load(tmp_path).step == 20 and "stopped after step 20" in process.stdout
    run(1, "cuda", tmp_path, resume=True, accumulate=2, **FEW)
    assert checkpoint.load(tmp_path).step == FEW["steps"]
    assert mean_loss(tmp_path, 20) == pytest.approx(mean_loss(two_batches_a_step_on_the_cpu, 20), rel=0.03)
