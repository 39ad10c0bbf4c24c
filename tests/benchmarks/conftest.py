"""Fixture that runs the programs of benchmarks without a GPU."""

from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest


def stepped(steps, calls):
    """Run the steps once; the first takes 1 µs, the next 2."""
    for step in steps:
        step()
    return [[1e-3 * (1 + number) for number in range(len(steps))]] * calls


def slowest(comm, samples):
    longest = np.array([*samples], np.float64)
    comm.all_reduce(longest, "max")
    return longest.tolist()


@pytest.fixture
def on_host(monkeypatch):
    """Let all programs compute on the NumPy engine, with ranks as threads and without a clock."""
    pytest.importorskip("cupy")
    import peers
    import timing
    from mamba_cases import MixerCase
    from workloads import Case

    attention, mixer = Case.attention, MixerCase.mixer
    monkeypatch.setattr(Case, "attention",
                        lambda case, engine, comm=None, **options: attention(case, "reference", comm, **options))
    monkeypatch.setattr(MixerCase, "mixer", lambda case, comm, _: mixer(case, comm, "reference"))
    monkeypatch.setattr(peers, "normal", partial(peers.normal, xp=np))
    monkeypatch.setattr(peers, "cupy", Mock())
    for name, fake in {"stepped": stepped, "slowest": slowest, "REST": 0.0}.items():
        monkeypatch.setattr(timing, name, fake)
