"""Benchmark of Mamba-2 mixers without a GPU: float64 results, peers, heads dealt to ranks, and rows."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy")

import bench_mamba
import mamba_cp
import mamba_exact
import mamba_peers
import record
from cp_methods import OURS
from mamba_cases import BYTES_PER_S, MixerCase, draw
from mamba_exact import MIXER, OF_ROWS, OF_WEIGHTS, SCAN

from thdattn.comm import run_local
from thdattn.engines.cuda import launch
from thdattn.mamba import oracle
from thdattn.mamba.shape import Mamba2Weights

TOY = MixerCase("toy", (37, 1, 70, 3), heads=4, head_dim=8, state_dim=16, groups=2, dtype=np.float32)


# --- float64 -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy():
    return draw(TOY, np)


def test_float64_of_the_mixer_is_the_oracles(toy):
    wide = [x.astype(np.float64) for x in (toy.zxbcdt, toy.dout)]
    sizes = oracle.Sizes(TOY.heads, TOY.head_dim, TOY.state_dim, TOY.groups)
    weights = tuple(x.astype(np.float64) for x in toy.weights)
    right = oracle.packed_mixer(TOY.batch(), wide[0], weights, wide[1], sizes)
    fields = (getattr(right, name) for name in oracle.FIELDS[2:])
    found = dict(zip(MIXER, (right.out, *mamba_peers.columns(TOY, right.zxbcdt), *fields), strict=True))
    made = mamba_exact.exact_mixer(TOY, toy, np)
    assert tuple(made) == MIXER == (*OF_ROWS, *OF_WEIGHTS)
    assert max(error.rms for error in mamba_exact.errors(made, found).values()) < 1e-13


def test_float64_of_the_scan_is_that_of_a_mixer_whose_convolution_makes_those_channels(toy):
    """Compare a scan of given channels with a mixer that convolves to them; dx, dB, dC lack the convolution alone."""
    shape, weights = TOY.shape, toy.weights
    alone = replace(TOY, conv_width=1)
    ones = weights._replace(conv_weight=np.ones((shape.channels, 1), np.float32),
                            conv_bias=np.zeros(shape.channels, np.float32))
    inputs = toy._replace(weights=ones)
    xbc = shape.parts(toy.zxbcdt)[1].astype(np.float64)
    share = 1 / (1 + np.exp(-xbc))
    mixer = mamba_exact.exact_mixer(alone, inputs, np)
    scan = mamba_exact.exact_scan(alone, inputs._replace(channels=xbc * share), np)
    slopes = (x.reshape(len(xbc), -1) for x in shape.split(share * (1 + xbc * (1 - share))))
    for name, slope in zip(("dx", "dB", "dC"), slopes, strict=True):
        scan[name] = scan[name] * slope
    assert tuple(scan) == SCAN
    errors = mamba_exact.errors(scan, {name: mixer[name] for name in SCAN})
    assert max(error.rms for error in errors.values()) < 1e-13, errors


# --- who is timed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["mixer", "scan"])
@pytest.mark.parametrize(("dtype", "least", "most"), [(np.float32, 0, 2e-5), (ml_dtypes.bfloat16, 1e-4, 2e-2)])
def test_errors_are_those_of_the_dtype(on_host, part, dtype, least, most):
    case = replace(TOY, dtype=dtype)
    measured = bench_mamba.small_errors(case, part, [OURS], np)
    assert list(measured) == [(OURS, name, record.ERRORS) for name in mamba_exact.PARTS[part]]
    for (_, name, _), row in measured.items():
        in_float32 = (part, name) == ("scan", "dD")  # of x, which is given, and of dy before it is rounded
        low, high = (0, 2e-5) if in_float32 else (least, most)
        assert low < float(row["rms"]) < high, measured
        assert float(row["largest"]) > 0


def test_a_scan_runs_without_the_convolution_again(on_host, toy, monkeypatch):
    peer = mamba_peers.OurScan(TOY, toy)
    peer.forward()
    peer.backward()
    first = [x.copy() for x in peer.on_host()]
    for name in ("mixer_conv", "mixer_conv_bwd"):
        monkeypatch.setattr(peer.mixer._mixer, name, None)
    peer.forward()
    peer.backward()
    assert [x.tobytes() for x in peer.on_host()] == [x.tobytes() for x in first]


@pytest.mark.parametrize("part", ["mixer", "scan"])
def test_portable_peers_choose_portable_kernels_in_every_call(on_host, toy, monkeypatch, part):
    monkeypatch.setattr(launch, "_gpu", lambda device: launch.Gpu(True, 132, 232_448))
    monkeypatch.setattr(launch.cupy.cuda.runtime, "getDevice", lambda: 0)
    seen = []

    def watched(call):
        return lambda *args: (seen.append(launch.this_gpu().sm90), call(*args))[1]

    peers = [mamba_peers.PEERS[part][name](TOY, toy) for name in ("portable", OURS)]
    for name in ("mixer_scan", "mixer_bwd"):
        monkeypatch.setattr(peers[0].mixer._mixer, name, watched(getattr(peers[0].mixer._mixer, name)))
    for peer in peers:
        peer.forward()
        peer.backward()
    assert seen == [False, False, True, True]


def test_peers_that_fail_are_named_and_leave_blanks(on_host, monkeypatch, capsys):
    class Missing(mamba_peers.OurMixer):
        def __init__(self, case, inputs):
            raise ImportError("no module named mamba_ssm")

    monkeypatch.setitem(bench_mamba.PEERS["mixer"], "mamba_ssm", Missing)
    monkeypatch.setattr(bench_mamba, "cupy", np)
    monkeypatch.setattr(bench_mamba, "race", lambda case, peers, direction, rounds, flops: {
        (name, direction, how): record.timed([2.0]) for name in peers for how in record.TIMINGS})
    measured = bench_mamba.bench(TOY, "mixer", [OURS, "mamba_ssm"], 1)
    assert "toy mixer mamba_ssm: ImportError: no module named mamba_ssm" in capsys.readouterr().err
    assert measured[OURS, "forward", "graph"]["ms"] == "2.00000" and measured["mamba_ssm", "backward", "called"] == {}
    assert len(measured) == 2 * (2 * 2 + len(MIXER))
    bench_mamba.add_floor(TOY, "NVIDIA H200", 1, measured)
    floor = 1e3 * TOY.least_bytes("backward") / BYTES_PER_S["NVIDIA H200"]
    found = [row["floor_ms"] for key, row in measured.items() if key[1] == "backward"]
    assert found == [f"{floor:.4f}"] * 4


# --- heads dealt to ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 2), (4, 1, 2), (4, 2, 4), (8, 8, 4)])
def test_heads_dealt_to_ranks_make_the_whole_mixer(heads, groups, size):
    case = replace(TOY, heads=heads, groups=groups)
    inputs = draw(case, np)
    whole = mamba_exact.exact_mixer(case, inputs, np)
    part = mamba_cp.share(case, size)
    outs, grads = [], []
    for rank in range(size):
        ranges = mamba_cp.columns_of(case, size, rank)
        zxbcdt = np.concatenate([inputs.zxbcdt[:, begin:end] for begin, end in ranges], axis=1)
        weights = mamba_cp.weights_of(case, inputs.weights, size, rank, np.concatenate)
        assert tuple(x.shape for x in weights) == tuple(part.shape.weights)
        dout = np.split(inputs.dout, size, axis=1)[rank]
        made = mamba_exact.exact_mixer(part, inputs._replace(zxbcdt=zxbcdt, weights=weights, dout=dout), np)
        outs.append(made["out"])
        grads.append(np.concatenate([made[name] for name in OF_ROWS[1:]], axis=1))
    dzxbcdt = np.full(inputs.zxbcdt.shape, np.nan)
    mamba_cp.put_together(case, grads, dzxbcdt)
    found = dict(zip(OF_ROWS, [np.concatenate(outs, axis=1), *mamba_peers.columns(case, dzxbcdt)], strict=True))
    assert max(error.rms for error in mamba_exact.errors(found, {x: whole[x] for x in OF_ROWS}).values()) < 1e-13


def test_weights_are_in_the_order_of_their_names():
    assert tuple(f"d{name}" for name in Mamba2Weights._fields) == OF_WEIGHTS


def test_two_ranks_are_timed_beside_one(on_host, monkeypatch):
    monkeypatch.setattr(mamba_cp, "draw", lambda case, _: draw(case, np))
    case = replace(TOY, lengths=(40, 24), dtype=ml_dtypes.bfloat16)

    def program(comm):
        ((_, part, versions, measured),) = mamba_cp.measure(comm, [case], False, 1)
        return part, versions, {key: row["ms"] for key, row in measured.items()}

    ms = {"forward": "0.00100", "backward": "0.00200", "both": "0.00300"}
    wanted = {(peer, name, "called"): found for peer in (OURS, "one GPU") for name, found in ms.items()}
    assert run_local(2, program) == [("mixer", {}, wanted)] * 2
