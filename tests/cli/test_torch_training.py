"""The training loop in PyTorch learns what the same loop learns in float64, one document at a time, without ranks."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
from launch import SOURCE, need_gpus, run, run_ranks, run_torchrun
from test_training_loops import printed

import thdattn

torch = pytest.importorskip("torch")
functional = torch.nn.functional
example = importlib.import_module("torch_training")  # not before torch is known to be there

EXAMPLE = SOURCE.parent / "examples" / "torch_training.py"


@pytest.fixture(scope="module")
def truth():
    """Return a function of the number of groups: the losses in float64, by torch's own attention."""
    return {groups: losses_of(groups) for groups in (1, 2)}.__getitem__


def losses_of(groups):
    torch.manual_seed(0)
    model = example.Model(thdattn.comm.init("single"), torch.float32, "reference").double()
    optimizer = torch.optim.Adam(model.parameters(), example.LEARNING_RATE)
    heads, kv_heads = example.HEADS, example.KV_HEADS
    losses = []
    for _ in range(example.STEPS):
        loss = 0.0
        for group in range(groups):
            rng = np.random.default_rng(group)
            lengths = example.LENGTHS[group]
            for n in lengths:
                x = torch.from_numpy(rng.standard_normal((n, example.WIDTH), np.float32)).double()
                qkv = functional.linear(x, model.project_in.weight).view(n, -1, example.HEAD_DIM).transpose(0, 1)
                q, k, v = qkv.split([heads, kv_heads, kv_heads])
                out = functional.scaled_dot_product_attention(
                    q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
                found = functional.linear(out.transpose(0, 1).flatten(1), model.project_out.weight)
                wanted = torch.stack([x[: i + 1].mean(dim=0) for i in range(n)])
                loss = loss + (found - wanted).square().sum() / (sum(lengths) * example.WIDTH * groups)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def same(losses, wanted, atol=1e-4):
    """Compare losses, of which four decimals are printed."""
    np.testing.assert_allclose(losses, wanted, rtol=1e-2, atol=atol)


@pytest.mark.parametrize("groups", [1, 2])
def test_loss_falls(truth, groups):
    assert truth(groups)[-1] < truth(groups)[0] / 20


@pytest.mark.parametrize(("ranks", "cp_size"), [(2, 1), (4, 2)])
def test_losses_of_dp_and_cp_are_those_of_float64(monkeypatch, truth, ranks, cp_size):
    torch.manual_seed(0)
    right = example.Model
    weights = right(thdattn.comm.init("single"), torch.float32, "reference").state_dict()

    def model(*arguments):
        made = right(*arguments)  # at random: torch has one generator for all threads, which simulated ranks are
        made.load_state_dict(weights)
        return made

    def program(comm):
        with torch.autograd.set_multithreading_enabled(False):  # each simulated rank runs its own backward
            return example.train(comm, cp_size)

    monkeypatch.setattr(example, "Model", model)
    for losses in thdattn.comm.run_local(ranks, program):
        np.testing.assert_allclose(losses, truth(ranks // cp_size), rtol=1e-4)


def test_the_program_alone_prints_the_losses(truth):
    same(printed(run([sys.executable, str(EXAMPLE)], 240)), truth(1))


@pytest.mark.parametrize("start", [pytest.param(run_ranks, marks=pytest.mark.exhaustive), run_torchrun])
def test_processes_print_the_losses_once(truth, start):
    same(printed(start(2, EXAMPLE, "1", timeout=240)), truth(2))


def test_groups_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ValueError, match="the number of ranks is 1, wanted a multiple of the group size 2"):
        example.train(thdattn.comm.init("single"), 2)


@pytest.mark.gpu
def test_two_gpus_print_the_losses_once(cupy, truth):
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    need_gpus(cupy, 2)
    for start in (run_ranks, run_torchrun):
        same(printed(start(2, EXAMPLE, "1", timeout=240)), truth(2), atol=5e-3)
