"""python -m thdattn advise with rates that a GPU measures, and with the memory that its kernels take."""

from __future__ import annotations

import pytest
from test_advise import run, table

import thdattn
from thdattn.costs.measure import measured
from thdattn.costs.model import H200, Shape, Way, cost

pytestmark = pytest.mark.gpu


def test_kernels_are_timed_and_the_rest_is_that_of_h200():
    rates = measured(thdattn.comm.init("single"), [2048, 0, 1000], Shape(8, 2))
    assert rates.forward > 1e12 and rates.backward > 1e12  # a CPU does not reach it
    assert rates._replace(forward=H200.forward, backward=H200.backward) == H200


def test_the_command_measures_on_the_gpu(capsys):
    status, text, errors = run(capsys, "--lengths", "4x1000", "--heads", 8, "--kv-heads", 2, "--ranks", 4, "--measure")
    assert (status, errors) == (0, "") and "TFLOP/s backward (measured)" in text and len(table(text)) == 7


def test_memory_counts_what_kernels_of_the_gpu_take():
    batch, way = thdattn.PackedBatch.from_lengths([3000, 500]), Way("all_gather", "balanced")
    gpu, host = (cost(batch, 4, Shape(8, 2, engine=engine), way).memory for engine in ("cuda", "reference"))
    assert gpu > host
