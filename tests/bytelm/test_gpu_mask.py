"""Training on answers alone on a GPU: what the CPU computes, with and without graphs, on one rank and on two."""

from __future__ import annotations

import data
import numpy as np
import pytest
import runs
from data import Packing, Position
from programs import TRAIN, lines_of, options, start
from test_prompt_mask import written
from test_train_graphs import EVERY_WAY, way_id
from texts import to_host

import thdattn

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Prompts and answers of many lengths, some longer than a micro-batch."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 120, (200, 2))
    texts = [("p" * prompt, "a" * answer) for prompt, answer in lengths] + [("q" * 2000, "b" * 40)]
    return written(tmp_path_factory.mktemp("texts"), texts)


@pytest.fixture(scope="module")
def batches(folder):
    coming = data.micro_batches(data.find_dialogues(folder), Packing.of(512, 1, "dual_chunk"), 0, Position(0, 0))
    return [next(coming) for _ in range(40)]


@pytest.fixture(scope="module")
def comm(cupy):
    with thdattn.comm.init("single") as comm:
        yield comm


def test_loss_and_gradient_are_the_cpus(comm, batches):
    found = {}
    for engine in ("cuda", "reference"):
        made = runs.trainer(comm, engine)
        loss, norm = made.step(batches[:4], 0.0).numbers()
        found[engine] = loss, norm, to_host(made.model.gradient)
    (loss, norm, gradient), (wanted_loss, wanted_norm, wanted) = found["cuda"], found["reference"]
    assert loss == pytest.approx(wanted_loss, rel=2**-7) and norm == pytest.approx(wanted_norm, rel=2**-6)
    assert gradient @ wanted > (1 - 2**-8) * np.linalg.norm(gradient) * np.linalg.norm(wanted)


@pytest.mark.parametrize("way", EVERY_WAY, ids=way_id)
def test_every_way_with_graphs_makes_the_bits_without(comm, batches, way):
    expected = runs.run(runs.trainer(comm, "cuda"), batches, batches[:3], 2, 10)
    made = runs.trainer(comm, "cuda", **way)
    found = runs.run(made, batches, batches[:3], 2, 10)
    assert runs.num_captured(made) > 0
    made.graphs.close()
    assert found == expected


@pytest.mark.parametrize("way", [{}, *EVERY_WAY], ids=lambda way: way_id(way) if way else "eager")
def test_a_step_of_prompts_alone_has_no_gradient(comm, folder, way):
    long = data.find_dialogues(folder)[-1]
    pieces = list(data.pack(data.pieces_of([long], 512), Packing(512, 16, 512)))
    prompts = [data.MicroBatch.of(chosen, Packing(512, 16, 512), Position(0, 0)) for chosen in pieces[:2]]
    assert sum(batch.num_targets for batch in prompts) == 0
    made = runs.trainer(comm, "cuda", **way)
    for _ in range(6):
        assert made.step(prompts, runs.LR).numbers().tolist() == [0, 0]
    made.graphs.close()


@pytest.mark.parametrize("cp_size", [1, 2])
def test_two_gpus_train_the_model_of_one(cupy, folder, tmp_path, cp_size):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs 2 GPUs")
    words = {"data": folder, "mask_prompt": True, "steps": 40, "val_bytes": 500, "sharding": "dual_chunk"}
    for ranks, more in ((1, {"accumulate": 2}), (2, {"cp": cp_size, "accumulate": cp_size})):
        process = start(ranks, TRAIN, *options(metrics=tmp_path / f"{ranks}", **words, **more), timeout=200)
        assert process.returncode == 0, process.stdout + process.stderr
    two, one = ([line["loss"] for line in lines_of(tmp_path / f"{ranks}") if "loss" in line] for ranks in (2, 1))
    np.testing.assert_allclose(two[:10], one[:10], rtol=2**-6)
    assert np.mean(two[-10:]) == pytest.approx(np.mean(one[-10:]), rel=0.05)
