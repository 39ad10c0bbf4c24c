"""The training loops learn what the same loop learns in float64, one document at a time, on any number of ranks."""

from __future__ import annotations

import itertools
import re
import sys
from functools import partial
from pathlib import Path

import graph_loop
import numpy as np
import pytest
import training_loop
from launch import need_gpus, run, run_ranks

import thdattn
from thdattn import oracle
from thdattn.graphs import Captured, CudaGraphConfig, Graphs

LOOPS = [training_loop, graph_loop]
both = pytest.mark.parametrize("example", LOOPS, ids=lambda loop: loop.__name__)
PRINTED = 5e-3  # four decimals of a loss above 0.01, computed in bfloat16


@pytest.fixture(scope="module")
def truth():
    """The losses in float64, with neither packing nor padding nor ranks."""
    loop, rng = training_loop, np.random.default_rng(0)
    q_width, kv_width = loop.HEADS * loop.HEAD_DIM, loop.KV_HEADS * loop.HEAD_DIM
    documents = [rng.standard_normal((n, loop.WIDTH), np.float32).astype(float) for n in loop.LENGTHS]
    w_in = rng.standard_normal((loop.WIDTH, q_width + 2 * kv_width), np.float32) * loop.WIDTH**-0.5
    w_out = rng.standard_normal((q_width, loop.WIDTH), np.float32) * q_width**-0.5
    total, losses = sum(loop.LENGTHS) * loop.WIDTH, []
    for _ in range(loop.STEPS):
        loss, dw_in, dw_out = 0.0, np.zeros(w_in.shape), np.zeros(w_out.shape)
        for x in documents:
            qkv = [part.reshape(len(x), -1, loop.HEAD_DIM)
                   for part in np.split(x @ w_in, [q_width, q_width + kv_width], axis=1)]
            out = oracle.attention(*qkv).out.reshape(len(x), -1)
            error = out @ w_out - [x[: n + 1].mean(axis=0) for n in range(len(x))]
            loss += (error**2).sum() / total
            dout = (2 * error / total @ w_out.T).reshape(len(x), -1, loop.HEAD_DIM)
            made = oracle.attention(*qkv, dout)
            dw_in += x.T @ np.hstack([part.reshape(len(x), -1) for part in (made.dq, made.dk, made.dv)])
            dw_out += out.T @ (2 * error / total)
        w_in, w_out = w_in - loop.LEARNING_RATE * dw_in, w_out - loop.LEARNING_RATE * dw_out
        losses.append(loss)
    return losses


def test_loss_falls_to_a_quarter(truth):
    assert all(later < earlier for earlier, later in itertools.pairwise(truth))
    assert truth[-1] < truth[0] / 4


@both
@pytest.mark.parametrize("cp_size", [1, 3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 4))])
def test_losses_on_any_ranks_are_those_of_float64(monkeypatch, truth, example, cp_size):
    float32 = partial(thdattn.CPAttention, dtype="float32", engine="reference")
    monkeypatch.setattr(thdattn, "CPAttention", float32)
    for losses in thdattn.comm.run_local(cp_size, example.train):
        np.testing.assert_allclose(losses, truth, rtol=1e-5)


ATTENTION = {"attention, forward", "attention, backward"}


@pytest.mark.parametrize(("modules", "wanted"), [((), ATTENTION), (("attn",), ATTENTION), (("mlp",), set())])
def test_attention_becomes_graphs_where_the_modules_say_so(monkeypatch, modules, wanted):
    made = []
    monkeypatch.setattr(graph_loop, "CudaGraphConfig", partial(CudaGraphConfig, modules=modules))
    monkeypatch.setattr(graph_loop, "Graphs", lambda *args: made.append(Graphs(*args)) or made[-1])
    monkeypatch.setattr(graph_loop, "STEPS", 1)
    with thdattn.comm.init("single") as comm:
        graph_loop.train(comm)
        assert {captured.name for captured in made[0]._captured if captured._is_wanted} == wanted | {"plan"}


def printed(done):
    """The losses that a program has printed."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"^step +\d+ +loss (\S+)$", done.stdout, re.MULTILINE)]


@both
@pytest.mark.parametrize("start", [
    lambda program: run([sys.executable, program, "2"], 120), lambda program: run_ranks(2, Path(program)),
], ids=["simulated", "processes"])
def test_the_program_prints_the_losses_once(truth, example, start):
    np.testing.assert_allclose(printed(start(example.__file__)), truth, rtol=PRINTED)


@pytest.mark.gpu
@both
@pytest.mark.parametrize("cp_size", [1, 2])
def test_losses_on_a_gpu_are_those_of_float64(cupy, poisoned_gpu, truth, example, cp_size):
    for losses in thdattn.comm.run_local(cp_size, example.train):
        np.testing.assert_allclose(losses, truth, rtol=PRINTED)


@pytest.mark.gpu
@pytest.mark.parametrize(("modules", "wanted"), [((), ATTENTION), (("mlp",), set())])
def test_losses_with_graphs_are_those_of_float64(cupy, poisoned_gpu, truth, monkeypatch, modules, wanted):
    names, capture = set(), Captured._capture
    monkeypatch.setattr(graph_loop, "CudaGraphConfig", partial(CudaGraphConfig, modules=modules))
    monkeypatch.setattr(Captured, "_capture", lambda self, *args: (names.add(self.name), capture(self, *args))[1])
    with thdattn.comm.init("single") as comm:
        np.testing.assert_allclose(graph_loop.train(comm), truth, rtol=PRINTED)
    assert names == wanted | {"plan"}


@pytest.mark.gpu
@both
def test_two_gpus_print_the_losses_once(cupy, truth, example):
    need_gpus(cupy, 2)
    np.testing.assert_allclose(printed(run_ranks(2, Path(example.__file__), timeout=240)), truth, rtol=PRINTED)
