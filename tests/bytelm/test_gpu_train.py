"""Training on GPUs, in bfloat16: the same curve as on the CPU, on one GPU and on several."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import checkpoint
import numpy as np
import pytest
from launch import need_gpus
from programs import MISBEHAVE, SAMPLE, TRAIN, lines_of, options, start, validations

pytestmark = pytest.mark.gpu

FEW = {"size": "tiny", "steps": 60, "val_bytes": 8192, "val_every": 30, "sharding": "dual_chunk", "accumulate": 1}
# Of a model whose heads 4 ranks can exchange.
MANY_HEADS = {"size": "small", "tokens": 2048, "longest": 512, "steps": 30, "val_bytes": 4096, "val_every": 30}
HYBRID = {"size": "tiny-hybrid", "sharding": "contiguous"}


def run(ranks, engine, folder, program=TRAIN, before=(), **more):
    """Return the finished process of a run that leaves its checkpoint and metrics in the folder."""
    words = options(engine=engine, checkpoint=folder, metrics=folder / "run.jsonl", **more)
    process = start(ranks, program, *before, *words, timeout=280)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "cannot capture" not in process.stdout
    return process


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    """Run on one rank, once: (engine, options) -> the folder of the run."""

    @cache
    def ran(engine, words):
        folder = tmp_path_factory.mktemp("one")
        run(1, engine, folder, **dict(words))
        return folder

    return lambda engine, words: ran(engine, tuple(words.items()))


def assert_same_curve(folder, wanted, num_equal, tolerance):
    """Compare the first losses, and means of the last third, as single ones differ between dtypes by chance."""
    steps, expected = ([line for line in lines_of(each / "run.jsonl") if "loss" in line] for each in (folder, wanted))
    found, others = (np.array([line["loss"] for line in lines]) for lines in (steps, expected))
    np.testing.assert_allclose(found[:num_equal], others[:num_equal], rtol=tolerance)
    assert steps[0]["gradient_norm"] == pytest.approx(expected[0]["gradient_norm"], rel=0.05)
    last = slice(-(len(others) // 3), None)
    assert found[last].mean() == pytest.approx(others[last].mean(), rel=0.03)
    assert validations(folder / "run.jsonl")[-1] == pytest.approx(validations(wanted / "run.jsonl")[-1], rel=0.03)


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


@pytest.mark.parametrize(("ranks", "words"), [
    *((ranks, {"sharding": sharding}) for ranks in (1, 2, 4) for sharding in ("dual_chunk", "contiguous")),
    *((ranks, {"cp": cp_size, "accumulate": accumulate, "cuda_graph_impl": impl})
      for ranks, cp_size, accumulate in ((1, 1, 2), (2, 1, 1), (2, 2, 2), (4, 2, 1))
      for impl in ("none", "local", "full_iteration")),
    (1, HYBRID), (2, HYBRID), (2, {"cp_comm_type": "all_gather", "cuda_graph_impl": "local", **HYBRID}),
    (4, {"cuda_graph_impl": "full_iteration", **HYBRID}),
], ids=str)
def test_gpus_train_as_one_rank_on_the_cpu_does(cupy, tmp_path, on_one_rank, ranks, words):
    """Their groups compute the micro-batches of a step one after another, or side by side. The norm tells their scale.

    Metrics are finite, and MFU is a share.
    """
    need_gpus(cupy, ranks)
    words = FEW | words
    process = run(ranks, "cuda", tmp_path, **words)
    graphs = words.get("cuda_graph_impl", "none") != "none"
    assert f"ranks: {ranks}" in process.stdout and (ranks == 1 or "backend 'nccl'" in process.stdout)
    assert ("CUDA graphs: " in process.stdout) == graphs
    num_batches = words["accumulate"] * ranks // words.get("cp", ranks)
    wanted = on_one_rank("reference", {name: words[name] for name in FEW} | {"accumulate": num_batches})
    # Two units in the last place of bfloat16 at first.
    assert_same_curve(tmp_path, wanted, *((5, 2**-6) if words["size"] == "tiny-hybrid" else (1, 2**-7)))
    for line in [line for line in lines_of(tmp_path / "run.jsonl") if "loss" in line]:
        assert line["tokens_per_s"] > 0 and (line["mfu"] is None or 0 < line["mfu"] < 1)
        assert graphs or line["attention_tflops"] > 0


def test_run_that_goes_on_ends_where_an_uninterrupted_one_does(cupy, tmp_path, on_one_rank):
    """The run stops after the micro-batch in which it is asked to, the last one of step 20."""
    words = FEW | {"accumulate": 2}
    process = run(1, "cuda", tmp_path, MISBEHAVE, ("amid", 0, 20), **words)
    assert checkpoint.load(tmp_path).step == 20 and "stopped after step 20" in process.stdout
    run(1, "cuda", tmp_path, resume=True, **words)
    assert checkpoint.load(tmp_path).step == FEW["steps"]
    assert_same_curve(tmp_path, on_one_rank("reference", words), 1, 2**-7)


@pytest.mark.parametrize(("ranks", "words"), [
    (2, {"sharding": "balanced"}), (2, {"cp_comm_type": "a2a"}), (2, {"cp_comm_type": "p2p"}),
    (2, {"cp_comm_type": "p2p", "cuda_graph_impl": "full_iteration"}),
    *((2, {"sharding": "balanced", "cuda_graph_impl": impl}) for impl in ("local", "full_iteration")),
    (4, {"sharding": "balanced"}), (4, {"cp_comm_type": "a2a"}),
    *((4, {"cp_comm_type": "a2a+all_gather", "cp_inner": 2, "sharding": "balanced", "cuda_graph_impl": impl})
      for impl in ("none", "local")),
    (4, {"cp_comm_type": "a2a+all_gather", "cp_inner": 2, "cuda_graph_impl": "full_iteration"}),
    (4, {"cp_comm_type": "a2a+p2p", "cp_inner": 2}),
])
def test_every_method_trains_as_one_gpu_does(cupy, tmp_path, on_one_rank, ranks, words):
    need_gpus(cupy, ranks)
    said = run(ranks, "cuda", tmp_path, **MANY_HEADS, **words).stdout
    assert f"share a micro-batch by {words.get('cp_comm_type', 'all_gather')}" in said
    rule = "contiguous" if words.get("sharding") == "balanced" or words.get("cp_comm_type") == "a2a" else "dual_chunk"
    assert_same_curve(tmp_path, on_one_rank("cuda", {**MANY_HEADS, "sharding": rule}), 5, 2**-6)
