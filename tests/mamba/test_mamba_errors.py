"""Every bad input of the Mamba-2 mixer is named, with what was found, what was wanted and the remedy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mixer_cases import FLOAT32, Case, random_inputs
from wrong_values import MASKED, OnAGpu, refuses, table

import thdattn
from thdattn.comm import Comm
from thdattn.mamba import reference
from thdattn.mamba.configs import MIXER_SIZES
from thdattn.mamba.oracle import Norm
from thdattn.packing import PackedBatch

SINGLE = thdattn.comm.init("single")
BATCH = PackedBatch([0, 5, 7], [0, 6, 8])
COLUMNS = 12 + 12 + 2 * 10 + 4  # 4 heads of 3, 2 groups of 5
SHAPES = {"conv_weight": (32, 4), "conv_bias": (32,), "A_log": (4,), "D": (4,), "dt_bias": (4,)}


def mixer(comm=SINGLE, **changes):
    arguments = {"num_heads": 4, "head_dim": 3, "state_dim": 5, "num_groups": 2, "dtype": "float32",
                 "engine": "reference"}
    return thdattn.Mamba2Mixer(comm, **{**arguments, **changes})


def attention(comm=SINGLE, **changes):
    return thdattn.CPAttention(comm, 2, 8, dtype="float32", engine="reference", **changes)


def weights(**changes):
    return thdattn.Mamba2Weights(**{**{name: np.ones(x, np.float32) for name, x in SHAPES.items()}, **changes})


@table(
    ("num_heads", 0, ValueError, "num_heads is 0, wanted >= 1; pass"),
    ("num_heads", 4.0, TypeError, "num_heads is 4.0, a float; wanted an int"),
    ("num_heads", 5, ValueError, "num_heads is 5, not a multiple of num_groups = 2; wanted … use a divisor"),
    ("num_groups", 3, ValueError, "num_heads is 4, not a multiple of num_groups = 3"),
    ("state_dim", "5", TypeError, "state_dim is '5', a str; wanted an int"),
    ("dtype", "int32", TypeError, "dtype is int32, wanted one of float16, bfloat16, float32, float64"),
    ("engine", "triton", ValueError, "engine is 'triton', wanted 'auto', 'cuda' or 'reference'"),
    ("norm", "rms", ValueError, "norm is 'rms', wanted 'after_gate' or 'before_gate'; pass one of these"),
    ("norm", True, TypeError, "norm is True, a bool; wanted 'after_gate' or 'before_gate'"),
    ("norm_groups", 3, ValueError, "norm_groups is 3, wanted a divisor of num_heads = 4 … pass 1, or num_groups = 2"),
    ("norm_eps", 0, ValueError, "norm_eps is 0, wanted a finite number > 0; 1e-5 is usual"),
    ("comm", 4, TypeError, "comm is 4, a int; wanted a Comm; make one with thdattn.comm.init()"),
    ("comm", (SINGLE, SINGLE), TypeError, "comm is … a tuple; wanted a Comm"),
)
def test_bad_mixer(argument, value, kind, message):
    norm = {"norm": "after_gate"} if argument.startswith("norm_") else {}
    refuses(lambda **bad: mixer(**{**norm, **bad}), argument, value, kind, message)


def test_a_comm_of_other_arrays_is_refused():
    class OnGpus(type(SINGLE)):
        name = "nccl"
        devices = frozenset({"cuda"})

    class OnHosts(type(SINGLE)):
        name = "mpi"
        devices = frozenset({"cpu"})

    with pytest.raises(ValueError, match="'reference' computes on cpu arrays, but a comm of backend 'nccl' moves cuda"):
        mixer(OnGpus())
    with pytest.raises(ValueError, match="engine is 'cuda', but a comm of backend 'mpi' moves host arrays; use"):
        mixer(OnHosts(), engine="cuda")


@pytest.mark.parametrize(("changes", "wanted"), [
    ({"head_dim": 96}, "head_dim is 96, wanted one of 64, 128"),
    ({"state_dim": 32}, "state_dim is 32, wanted one of 64, 128, 256"),
    ({"conv_width": 9}, "conv_width is 9, wanted 1 to 8"),
    ({"num_heads": 12}, "num_heads is 12, wanted a multiple of 8"),
    ({"num_heads": 4}, "num_heads is 4, wanted a multiple of 8"),
    ({"num_heads": 136, "norm": "after_gate"}, "d_inner // norm_groups is 8704, wanted 1 to 8192"),
], ids=str)
def test_sizes_that_an_engine_has_no_kernels_for_are_refused_with_the_remedy(monkeypatch, changes, wanted):
    """The NumPy engine takes all sizes; here it has those of the CUDA engine."""
    monkeypatch.setattr(reference, "MIXER_SIZES", MIXER_SIZES)
    good = {"num_heads": 8, "head_dim": 64, "state_dim": 128, "num_groups": 1}
    assert mixer(**good) and mixer(**{**good, "num_heads": 136}, norm="after_gate", norm_groups=2)
    message = f"{wanted} for a Mamba-2 mixer on engine 'reference'; use engine='reference', with host arrays"
    with pytest.raises(ValueError, match=message):
        mixer(**{**good, **changes})


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", ["dual_chunk", "balanced"])
def test_sharding_that_is_not_contiguous_is_refused_with_the_remedy(sharding):
    batch = PackedBatch.from_lengths([16, 8], multiple=4)
    wanted = f"sharding is '{sharding}', wanted 'contiguous' for a mixer over 2 ranks … use sharding='contiguous'"

    def program(comm: Comm):
        layer = mixer(comm)
        for made in (sharding, thdattn.Sharding(batch, 2, sharding)):
            for asked in (layer.plan, layer.sharding):
                refuses(lambda sharding, ask=asked: ask(batch, sharding), "sharding", made, ValueError, wanted)
        plan = attention(comm).plan(batch, sharding)
        x = np.ones((plan.local_rows, COLUMNS), np.float32)
        refuses(lambda plan: layer.forward(x, weights(), plan), "plan", plan, ValueError, wanted)

    thdattn.comm.run_local(2, program)


def test_slices_of_slices_with_fillers_between_are_refused():
    def program(comm: Comm):
        sharding = thdattn.Sharding(PackedBatch([0, 10]), 4, "contiguous", inner=2)
        refuses(lambda sharding: mixer(comm).plan(sharding.batch, sharding), "sharding", sharding, ValueError,
                "sharding has inner 2, wanted 1 or 4 … make it with Sharding(batch, 4, 'contiguous')")

    thdattn.comm.run_local(4, program)


@table(
    ("plan", None, TypeError, "plan is None, a NoneType; wanted a Plan; make it with mixer.plan(batch)"),
    ("plan", BATCH, TypeError, "plan is … wanted a Plan"),
    ("plan", attention(causal=False).plan(BATCH), ValueError,
     "plan was made for window (-1, -1), wanted (-1, 0); make it with this mixer's plan(batch)"),
    ("plan", attention(window=(3, 0)).plan(BATCH), ValueError,
     "plan was made for window (3, 0), wanted (-1, 0)"),
    ("plan", attention().plan(BATCH, key_batch=PackedBatch([0, 5, 7])), ValueError,
     "plan has keys of their own, wanted those of the queries"),
    ("plan", replace(attention().plan(BATCH), cp_rank=1), ValueError, "plan was made for cp_rank 1, wanted 0"),
)
def test_bad_plan(argument, value, kind, message):
    x = np.ones((8, COLUMNS), np.float32)
    refuses(lambda plan: mixer().forward(x, weights(), plan), argument, value, kind, message)


def test_batch_that_differs_between_ranks_is_refused_on_all():
    def program(comm: Comm):
        lengths = [8, 8] if comm.rank else [8, 7]
        with pytest.raises(ValueError, match=r"the plan is not the same on all ranks: cu_seqlens\[2\] is 15"):
            mixer(comm).plan(PackedBatch.from_lengths(lengths, multiple=8))
        with pytest.raises(ValueError, match="is not the same on all ranks"):
            mixer(comm, state_dim=5 + comm.rank).plan(BATCH)

    thdattn.comm.run_local(2, program)


# --- arrays ----------------------------------------------------------------------------------------------------------

WRONG_ROWS = np.ones((7, COLUMNS), np.float32)


@table(
    ("zxbcdt", WRONG_ROWS, ValueError, "zxbcdt has shape (7, 48), wanted (8, 48); pass this rank's rows"),
    ("zxbcdt", np.ones((8, 47), np.float32), ValueError, "zxbcdt has shape (8, 47), wanted (8, 48)"),
    ("zxbcdt", np.ones((8, COLUMNS)), TypeError, "zxbcdt is float64, wanted float32 for a mixer of float32; cast it"),
    ("zxbcdt", OnAGpu(), TypeError, "zxbcdt is a … wanted a NumPy array"),
    ("zxbcdt", MASKED, TypeError, "zxbcdt is a masked array"),
    ("weights", None, TypeError, "weights is None, a NoneType; wanted a Mamba2Weights; make one of the five arrays"),
    ("weights", tuple(weights()), TypeError, "weights is (a ndarray … a tuple; wanted a Mamba2Weights"),
    ("weights", weights(D=np.ones(3, np.float32)), ValueError, "weights.D has shape (3,), wanted (4,); pass"),
    ("weights", weights(conv_weight=np.ones((32, 3), np.float32)), ValueError,
     "weights.conv_weight has shape (32, 3), wanted (32, 4)"),
    ("weights", weights(A_log=np.ones(4)), TypeError, "weights.A_log is float64, wanted float32"),
    ("weights", weights(conv_bias=None), TypeError, "weights.conv_bias is a"),
)
def test_bad_arrays_of_forward(argument, value, kind, message):
    layer = mixer()
    good = {"zxbcdt": np.ones((8, COLUMNS), np.float32), "weights": weights(), "plan": layer.plan(BATCH)}
    refuses(lambda **bad: layer.forward(**{**good, **bad}), argument, value, kind, message)


@table(
    ("dout", np.ones((8, 11), np.float32), ValueError, "dout has shape (8, 11), wanted (8, 12); pass the gradient"),
    ("dout", np.ones((8, 12), np.float16), TypeError, "dout is float16, wanted float32"),
    ("saved", None, TypeError, "saved is None, a NoneType; wanted a Mamba2Saved; pass the one that forward returned"),
)
def test_bad_arguments_of_backward(argument, value, kind, message):
    layer = mixer()
    _, saved = layer.forward(np.ones((8, COLUMNS), np.float32), weights(), layer.plan(BATCH))
    good = {"dout": np.ones((8, 12), np.float32), "saved": saved}
    refuses(lambda **bad: layer.backward(**{**good, **bad}), argument, value, kind, message)


def test_saved_of_a_mixer_of_other_sizes_is_refused():
    layer = mixer()
    _, saved = layer.forward(np.ones((8, COLUMNS), np.float32), weights(), layer.plan(BATCH))
    other = mixer(num_heads=3, head_dim=4, num_groups=1, state_dim=10)
    refuses(lambda saved: other.backward(np.ones((8, 12), np.float32), saved), "saved", saved, ValueError,
            "saved was made with num_heads 4, wanted 3; pass what this mixer's forward returned")
    assert mixer().backward(np.ones((8, 12), np.float32), saved)


# --- norms -----------------------------------------------------------------------------------------------------------


def test_groups_without_a_norm_are_refused():
    refuses(lambda norm_groups: mixer(norm_groups=norm_groups), "norm_groups", 2, ValueError,
            "norm_groups is 2, but norm is None, wanted both or none; pass norm='after_gate'")


NORMED = Case("some", (9, 4), norm=Norm(True, 2))
ZXBCDT, WEIGHTS, DOUT = random_inputs(NORMED, FLOAT32)


@table(
    ("norm_weight", None, ValueError,
     "weights.norm_weight is None, wanted an array for norm='after_gate'; pass those of this layer"),
    ("norm_weight", np.ones(3, np.float32), ValueError, "weights.norm_weight has shape (3,), wanted (12,)"),
    ("norm_weight", np.ones(12), TypeError, "weights.norm_weight is float64, wanted float32 for a mixer of float32"),
)
def test_bad_weights_of_a_norm(argument, value, kind, message):
    layer = mixer(norm="after_gate")
    plan = layer.plan(NORMED.batch)
    refuses(lambda **bad: layer.forward(ZXBCDT, WEIGHTS._replace(**bad), plan), argument, value, kind, message)


def test_a_mixer_without_a_norm_refuses_its_weight():
    layer = mixer()
    wanted = "weights.norm_weight is a ndarray … wanted None for a mixer without a norm"
    for call in (lambda weights: layer.forward(ZXBCDT, weights, layer.plan(NORMED.batch)),
                 lambda weights: layer.decode(ZXBCDT[:2], weights, layer.cache(2))):
        refuses(call, "weights", WEIGHTS, ValueError, wanted)


@pytest.mark.parametrize("changes", [
    {"norm": None}, {"norm": "before_gate"}, {"norm_groups": 1}, {"norm_eps": 1e-6}], ids=str)
def test_saved_and_caches_are_those_of_one_norm(changes):
    layer, other = mixer(norm="after_gate"), mixer(**{"norm": "after_gate", **changes})
    _, saved = layer.forward(ZXBCDT, WEIGHTS, layer.plan(NORMED.batch))
    with pytest.raises(ValueError, match=r"saved was made with norm GatedNorm.*, wanted .*; pass what this mixer's"):
        other.backward(DOUT, saved)
    weights = WEIGHTS if other._shape.norm else WEIGHTS._replace(norm_weight=None)
    with pytest.raises(ValueError, match=r"cache was made for norm GatedNorm.*, wanted .*; make it with this mixer's"):
        other.decode(ZXBCDT[:2], weights, layer.cache(2))
    with pytest.raises(ValueError, match="saved was made with norm GatedNorm"):
        other.cache(2).fill(saved)


def test_ranks_agree_on_the_norm():
    def program(comm):
        layer = replace(NORMED, norm=Norm(True, 2, 1e-5 if comm.rank else 1e-6)).mixer(comm, FLOAT32)
        with pytest.raises(ValueError, match="the plan is not the same on all ranks: norm is"):
            layer.plan(NORMED.batch)

    thdattn.comm.run_local(2, program)
